"""Rules about what the training process itself does to get a batch."""

from __future__ import annotations

from dataloading.codes import Finding, finding
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.results import format_seconds
from dataloading.time_rules import is_data_bound
from dataloading.verdict import workers_pace_s

SAMPLER_SHARE = 0.5  # of the waiting
OWN_SHARE = 0.25  # of the time between two batches


def sampler_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Choosing indices takes most of the waiting."""
    sampler, wait = evidence.sampler_s, evidence.wait_s
    if sampler is None or wait is None or not is_data_bound(evidence):
        return None
    if sampler < SAMPLER_SHARE * wait:
        return None
    period = evidence.period_s or 0.0
    if sampler <= wait:
        message = f"Choosing the samples of a batch takes {format_seconds(sampler)} of the "
        message += f"{format_seconds(wait)} that training waits."
    else:  # most of it at the starts of epochs, which are no steady steps
        message = (
            f"Choosing the samples takes {format_seconds(sampler)} a batch, most of it at the "
        )
        message += f"start of each epoch; between, training waits {format_seconds(wait)} a batch."
    return finding(
        "slow-sampler",
        message,
        {
            "sampler_s": sampler,
            "wait_s": wait,
            "threshold_share": SAMPLER_SHARE,
            "num_workers": evidence.num_workers,
            "steps": evidence.steps,
        },
        severity="critical",
        expected_gain=period / (period - sampler) if 0 < sampler < period else None,
    )


def own_iteration_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """A loader's own code between the workers and the training takes the time."""
    alone = evidence.alone_period_s
    if not evidence.own_iteration or not alone or not is_data_bound(evidence):
        return None
    delivered_s = max(workers_pace_s(evidence), evidence.send_s or 0.0)
    own_s = alone - delivered_s
    if own_s < OWN_SHARE * alone:
        return None
    return finding(
        "host-work",
        f"A batch takes {format_seconds(alone)} to get, and its workers deliver one in "
        f"{format_seconds(delivered_s)}: the loader's own __iter__ works for the rest, in the "
        "training process.",
        {
            "alone_period_s": alone,
            "delivered_s": delivered_s,
            "own_s": own_s,
            "threshold_share": OWN_SHARE,
            "num_workers": evidence.num_workers,
            "steps": evidence.steps,
        },
        advice="Do this work in the data set or the collate function, where the workers share it.",
        expected_gain=(evidence.period_s or alone)
        / max((evidence.period_s or alone) - own_s, evidence.step_s or 0.0, 1e-9),
    )


MAIN_PROCESS_RULES = (sampler_rule, own_iteration_rule)
