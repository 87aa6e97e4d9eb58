"""From evidence to findings: each rule is a pure function that sees numbers and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataloading.codes import CODES, SEVERITIES, Finding, finding
from dataloading.evidence import FEWEST_STEPS, Evidence
from dataloading.machine import Machine
from dataloading.model import step_bounds
from dataloading.profiling import DECODE, READ, SampleProfile
from dataloading.results import Result, format_seconds, format_value
from dataloading.settings import LoaderSettings
from dataloading.timing import LoaderTiming
from dataloading.workers import best_workers

if TYPE_CHECKING:
    from dataloading.monitoring import ResourceTrace

# Every threshold of the rules, with its reason.
DATA_BOUND_SHARE = 0.10  # waiting for a tenth of the time is worth an afternoon
QUIET_SHARE = 0.05  # less waiting than this cannot be told from noise
HOST_SHARE = 0.20  # other work beyond a fifth of the step is not mere loop overhead
WORTH_A_CHANGE = 1.10  # a predicted gain below 10 % is within the error of the model
LARGE_GAIN = 1.5  # half again the rate is worth stopping a training for
TINY_SAMPLE_S = 30e-6  # below this, calls and pickling outweigh the content of a sample
MOST_OF_IT = 0.5  # the larger part of a batch's time
RESTART_SHARE = 0.15  # of an epoch spent on its start
INTERFERENCE_FACTOR = 1.3  # the real run against the slower of its two arms

# What the percentage of `nvidia-smi` means, said wherever it could mislead.
UTILISATION_MEANING = (
    "GPU utilisation is the share of time a kernel was running, not the share of the GPU in use."
)

# What makes the dearest stage cheaper, where its name says what it does.
STAGE_ADVICE = {
    READ: "Read fewer, larger files, or keep the files in memory.",
    DECODE: "Store smaller images, decode at reduced size, or cache what was decoded.",
}

Rule = Callable[[Evidence, Machine], Finding | None]


@dataclass(frozen=True, repr=False, eq=False)
class Diagnosis(Result):
    """Why a training loop is as fast as it is.

    Attributes:
        verdict: `data-bound`, `compute-bound`, `host-bound`, `balanced` or `inconclusive`.
        cause: Code of the first finding, or None.
        findings: What was found, most important first.
        ceilings: Samples per second that each part could reach alone: `compute`, `workers`, `cpu`,
            `transfer`, `storage`, `sampler`, `startup`; None where it was not measured.
        evidence: The numbers behind all of it.
        timing: The real run.
        profile: What a sample costs, where it was measured.
        trace: Resources during the run, where they were watched.
        machine: Where it ran.
    """

    verdict: str
    cause: str | None
    findings: tuple[Finding, ...]
    ceilings: Mapping[str, float | None]
    evidence: Evidence
    timing: LoaderTiming | None
    profile: SampleProfile | None
    trace: ResourceTrace | None
    machine: Machine

    def top(self, group: str) -> Finding | None:
        """The first finding of a group (`time`, `memory`, `samples` or `setup`), or None."""
        return next((found for found in self.findings if found.group == group), None)

    def summary(self) -> str:
        """Verdict, cause and the share of waiting."""
        share = format_value("wait_share", self.evidence.wait_share)
        cause = f", cause {self.cause}" if self.cause else ""
        return f"{self.verdict}{cause} (waiting {share} of {self.evidence.steps} steady steps)"

    def rows(self) -> list[tuple[str, Any]]:
        """Verdict, findings and ceilings."""
        ceilings = [
            (f"ceiling: {part}", format_value("samples_per_s", rate))
            for part, rate in self.ceilings.items()
            if rate is not None
        ]
        found = [
            row
            for item in self.findings
            for row in ((f"{item.code} ({item.severity})", item.message), ("  advice", item.advice))
        ]
        return [
            ("verdict", self.verdict),
            ("wait_share", self.evidence.wait_share),
            ("steps", self.evidence.steps),
            *found,
            *ceilings,
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the ceilings with the measured rate; returns the Axes."""
        from dataloading.plots import plot_ceilings

        return plot_ceilings(self, ax=ax)


def diagnose(
    evidence: Evidence,
    machine: Machine,
    *,
    timing: LoaderTiming | None = None,
    profile: SampleProfile | None = None,
    trace: ResourceTrace | None = None,
) -> Diagnosis:
    """Judge evidence: verdict, ranked findings and ceilings.

    Args:
        evidence: What was measured.
        machine: Where it was measured.
        timing, profile, trace: The measurements themselves, kept in the result.

    Returns:
        A `Diagnosis`.
    """
    verdict = judge(evidence)
    found = [f for rule in RULES if (f := rule(evidence, machine)) is not None]
    # Severity first; among equals the larger predicted gain, then the order of the rules.
    found.sort(key=lambda f: (-SEVERITIES.index(f.severity), -(f.expected_gain or 1.0)))
    time_findings = [f for f in found if f.group == "time"]
    first = time_findings[0] if time_findings else (found[0] if found else None)
    if first is not None:
        found = [first, *(f for f in found if f is not first)]
    return Diagnosis(
        verdict=verdict,
        cause=first.code if first is not None else None,
        findings=tuple(found),
        ceilings=ceilings(evidence, machine),
        evidence=evidence,
        timing=timing,
        profile=profile,
        trace=trace,
        machine=machine,
    )


def judge(evidence: Evidence) -> str:
    """The verdict: where the time of a step goes.

    Example:
        >>> judge(Evidence(steps=20, wait_share=0.8, step_share=0.2, other_share=0.0))
        'data-bound'
    """
    if evidence.steps < FEWEST_STEPS or evidence.wait_share is None:
        return "inconclusive"
    host = host_share(evidence)
    if evidence.wait_share >= DATA_BOUND_SHARE and evidence.wait_share >= host:
        return "data-bound"
    if host >= HOST_SHARE:
        return "host-bound"
    if evidence.wait_share <= QUIET_SHARE:
        return "compute-bound"
    return "balanced"


def host_share(evidence: Evidence) -> float:
    """Share of time for work that is neither loading nor training."""
    return (evidence.other_share or 0.0) + (evidence.spike_share or 0.0)


def ceilings(evidence: Evidence, machine: Machine) -> dict[str, float | None]:
    """Samples per second that each part could reach if all others were free."""
    size = evidence.batch_size

    def rate(seconds: float | None) -> float | None:
        return size / seconds if size and seconds and seconds > 0 else None

    costs = evidence.costs
    cpu_s = (costs.cpu_s + costs.send_s) / machine.cpus_per_rank if costs is not None else None
    epoch_start = evidence.epoch_restart_s
    per_step = (
        epoch_start / evidence.steps_per_epoch if epoch_start and evidence.steps_per_epoch else None
    )
    return {
        "compute": rate(evidence.replay_step_s),
        "workers": rate(evidence.alone_period_s),
        "cpu": rate(cpu_s),
        "transfer": rate(evidence.send_s) if evidence.num_workers else None,
        "storage": None,
        "sampler": None,
        "startup": rate(per_step),
    }


def _is_data_bound(evidence: Evidence) -> bool:
    return judge(evidence) == "data-bound"


def compute_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """The train step takes the time."""
    if judge(evidence) != "compute-bound":
        return None
    extra = ""
    if evidence.utilization_percent is not None:
        extra = f" NVML shows {evidence.utilization_percent:.0f} %. {UTILISATION_MEANING}"
    share = evidence.wait_share or 0.0
    return finding(
        "compute",
        f"Training waits for data {share:.1%} of the time: the loader is not the problem.{extra}",
        {
            "wait_share": evidence.wait_share,
            "threshold_wait_share": QUIET_SHARE,
            "step_share": evidence.step_share,
            "steps": evidence.steps,
        },
        severity="info",
    )


def host_work_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Logging, hooks and the like take the time."""
    share = host_share(evidence)
    if evidence.steps < FEWEST_STEPS or share < HOST_SHARE:
        return None
    return finding(
        "host-work",
        f"Other work of the training process takes {share:.1%} of the time, "
        f"waiting for data {evidence.wait_share or 0.0:.1%}.",
        {
            "other_share": evidence.other_share,
            "spike_share": evidence.spike_share,
            "threshold_other_share": HOST_SHARE,
            "wait_share": evidence.wait_share,
            "steps": evidence.steps,
        },
        expected_gain=1 / (1 - share) if share < 1 else None,
    )


def too_few_workers_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """More workers would shorten the step."""
    costs, step_s = evidence.costs, _compute_s(evidence)
    if (
        not _is_data_bound(evidence)
        or costs is None
        or step_s is None
        or evidence.num_workers is None
    ):
        return None
    if _tiny_samples(evidence):
        return None
    now = max(step_bounds(costs, evidence.settings, step_s, machine).values())
    wanted = best_workers(costs, step_s, machine)
    settings = LoaderSettings(num_workers=wanted)
    gain = now / max(max(step_bounds(costs, settings, step_s, machine).values()), 1e-12)
    if wanted <= evidence.num_workers or gain < WORTH_A_CHANGE:
        return None
    return finding(
        "too-few-workers",
        f"Training waits {format_seconds(evidence.wait_s or 0.0)} a step with "
        f"{evidence.num_workers} workers; {wanted} would keep up better.",
        {
            "wait_s": evidence.wait_s,
            "wait_share": evidence.wait_share,
            "threshold_wait_share": DATA_BOUND_SHARE,
            "batch_s": costs.batch_s,
            "step_s": step_s,
            "cpu_share": costs.cpu_share,
            "num_workers": evidence.num_workers,
            "wanted_workers": wanted,
            "usable_cpus": machine.cpus_per_rank,
            "steps": evidence.steps,
        },
        advice=f"Set num_workers={wanted}.",
        expected_gain=gain,
        severity="critical" if gain > LARGE_GAIN else "warning",
    )


def cpu_bound_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Every usable CPU is busy preparing data."""
    costs, step_s = evidence.costs, _compute_s(evidence)
    if not _is_data_bound(evidence) or costs is None or step_s is None or _tiny_samples(evidence):
        return None
    if too_few_workers_rule(evidence, machine) is not None:
        return None
    bounds = step_bounds(costs, evidence.settings, step_s, machine)
    cpu_s = bounds["cpu"]
    if costs.cpu_share < MOST_OF_IT or cpu_s < step_s or _dominant_part(evidence) is not None:
        return None
    stage, share = evidence.top_stage, evidence.top_stage_share
    most = f"; most of it is {stage} ({share:.0%})" if stage and share else ""
    return finding(
        "cpu-bound",
        f"A batch needs {format_seconds(costs.cpu_s + costs.send_s)} of CPU work, and "
        f"{machine.cpus_per_rank} usable CPUs are all there is{most}.",
        {
            "cpu_s": costs.cpu_s,
            "step_cpu_s": costs.step_cpu_s,
            "usable_cpus": machine.cpus_per_rank,
            "cpu_limit_s": cpu_s,
            "step_s": step_s,
            "cpu_share": costs.cpu_share,
            "top_stage": stage,
            "top_stage_share": share,
            "rate_if_that_were_free": 1 / (1 - share) if share and share < 1 else None,
            "wait_share": evidence.wait_share,
            "steps": evidence.steps,
        },
        advice=STAGE_ADVICE.get(stage or ""),
    )


def per_sample_overhead_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Handling each sample costs more than its content."""
    if not _is_data_bound(evidence) or not _tiny_samples(evidence):
        return None
    size = evidence.batch_size or 1
    gain = None
    costs, step_s = evidence.costs, _compute_s(evidence)
    if evidence.num_workers and evidence.period_s and costs is not None and step_s is not None:
        gain = evidence.period_s / (costs.cpu_s + costs.wait_s + step_s)  # without workers
    return finding(
        "per-sample-overhead",
        f"A sample takes {format_seconds(evidence.sample_wall_s or 0.0)}: the calls around it cost "
        "more than its content.",
        {
            "sample_wall_s": evidence.sample_wall_s,
            "threshold_sample_s": TINY_SAMPLE_S,
            "batch_size": size,
            "num_workers": evidence.num_workers,
            "wait_share": evidence.wait_share,
            "steps": evidence.steps,
        },
        expected_gain=gain,
        severity="critical" if (gain or 1.0) > LARGE_GAIN else "warning",
    )


def collate_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Collating takes the larger part of a batch's time."""
    if not _is_data_bound(evidence) or _tiny_samples(evidence):
        return None
    if _dominant_part(evidence) != "collate":
        return None
    return finding(
        "collate",
        f"Collating takes {format_seconds(evidence.collate_s or 0.0)} of the "
        f"{format_seconds(_batch_s(evidence))} that a batch costs.",
        {
            "collate_s": evidence.collate_s,
            "batch_s": _batch_s(evidence),
            "threshold_share": MOST_OF_IT,
            "batch_bytes": evidence.batch_bytes,
            "steps": evidence.steps,
        },
    )


def transfer_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Sending batches takes the larger part of their time."""
    if not _is_data_bound(evidence) or _tiny_samples(evidence):
        return None
    if _dominant_part(evidence) != "transfer":
        return None
    return finding(
        "transfer",
        f"Sending a batch from worker to main process takes "
        f"{format_seconds(evidence.send_s or 0.0)} of the {format_seconds(_batch_s(evidence))} that "
        f"it costs ({format_value('x_bytes', evidence.batch_bytes)} in "
        f"{evidence.tensors_per_batch} tensors).",
        {
            "send_s": evidence.send_s,
            "batch_s": _batch_s(evidence),
            "threshold_share": MOST_OF_IT,
            "batch_bytes": evidence.batch_bytes,
            "tensors_per_batch": evidence.tensors_per_batch,
            "steps": evidence.steps,
        },
    )


def epoch_startup_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Epochs spend much of their time on their start."""
    restart, steps, period = evidence.epoch_restart_s, evidence.steps_per_epoch, evidence.period_s
    if restart is None or not steps or period is None or not evidence.num_workers:
        return None
    costs = evidence.costs
    # The first batch must be prepared in any case; only what comes on top can be saved.
    first_batch = evidence.worker_batch_s or (costs.batch_s if costs is not None else 0.0)
    avoidable = max(0.0, restart - first_batch)
    share = avoidable / (restart + steps * period)
    if share < RESTART_SHARE:
        return None
    advice = None
    if evidence.persistent_workers:
        advice = "The workers are kept already; look at what the sampler or the first batch does."
    return finding(
        "epoch-startup",
        f"Each epoch of {steps} batches begins with {format_seconds(restart)} of waiting; "
        f"{format_seconds(avoidable)} of it, {share:.0%} of the epoch, is not the first batch's work.",
        {
            "epoch_restart_s": restart,
            "first_batch_s": first_batch,
            "avoidable_share": share,
            "threshold_share": RESTART_SHARE,
            "steps_per_epoch": steps,
            "period_s": period,
            "persistent_workers": evidence.persistent_workers,
        },
        advice=advice,
        expected_gain=None if evidence.persistent_workers else 1 / (1 - share),
        severity="critical" if 1 / (1 - share) > LARGE_GAIN else "warning",
    )


def interference_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Both arms are fast alone and slow together."""
    arms = (evidence.replay_step_s, evidence.alone_period_s)
    if not evidence.num_workers or None in arms or evidence.period_s is None:
        return None
    slower = max(arm for arm in arms if arm is not None)
    costs = evidence.costs
    explained = slower
    if costs is not None:  # sharing the CPUs is expected, and has rules of its own
        explained = max(
            slower, (costs.cpu_s + costs.send_s + costs.step_cpu_s) / machine.cpus_per_rank
        )
    if evidence.steps < FEWEST_STEPS or evidence.period_s < INTERFERENCE_FACTOR * explained:
        return None
    if host_share(evidence) >= HOST_SHARE:
        return None
    return finding(
        "interference",
        f"A step takes {format_seconds(evidence.period_s)}, though the loader alone needs "
        f"{format_seconds(arms[1] or 0.0)} and training alone {format_seconds(arms[0] or 0.0)}.",
        {
            "period_s": evidence.period_s,
            "alone_period_s": arms[1],
            "replay_step_s": arms[0],
            "threshold_factor": INTERFERENCE_FACTOR,
            "steps": evidence.steps,
        },
        severity="info",
        expected_gain=evidence.period_s / explained,
    )


def invalid_settings_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Options that have no effect in their combination."""
    if not evidence.dropped_settings:
        return None
    named = "; ".join(f"{name}: {why}" for name, why in evidence.dropped_settings.items())
    return finding(
        "invalid-settings", f"Settings without effect: {named}.", evidence.dropped_settings
    )


def pins_memory(machine: Machine) -> bool:
    """Whether an accelerator here copies from pinned memory."""
    return any(a.kind in ("cuda", "xpu") for a in machine.accelerators)


def pin_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Pinned memory without an accelerator that uses it."""
    if not evidence.pin_memory or pins_memory(machine):
        return None
    kinds = ", ".join(a.kind for a in machine.accelerators) or "none"
    return finding(
        "pin-without-accelerator",
        f"pin_memory=True, but no accelerator here copies from pinned memory (found: {kinds}).",
        {"pin_memory": True, "accelerators": kinds},
        severity="info",
    )


RULES: tuple[Rule, ...] = (
    too_few_workers_rule,
    per_sample_overhead_rule,
    transfer_rule,
    collate_rule,
    cpu_bound_rule,
    epoch_startup_rule,
    host_work_rule,
    interference_rule,
    compute_rule,
    invalid_settings_rule,
    pin_rule,
)


def _compute_s(evidence: Evidence) -> float | None:
    """Seconds of the train step when data is free: replayed, else as seen in the run."""
    return evidence.replay_step_s if evidence.replay_step_s is not None else evidence.step_s


def _tiny_samples(evidence: Evidence) -> bool:
    return evidence.sample_wall_s is not None and evidence.sample_wall_s < TINY_SAMPLE_S


def _batch_s(evidence: Evidence) -> float:
    costs = evidence.costs
    if costs is None:
        return 0.0
    return costs.batch_s if evidence.num_workers else costs.cpu_s + costs.wait_s


def _dominant_part(evidence: Evidence) -> str | None:
    """`collate` or `transfer`, where one of them takes the larger part of a batch's time."""
    whole = _batch_s(evidence)
    if whole <= 0:
        return None
    if evidence.num_workers and (evidence.send_s or 0.0) >= MOST_OF_IT * whole:
        return "transfer"
    if (evidence.collate_s or 0.0) >= MOST_OF_IT * whole:
        return "collate"
    return None


def explain(code: str) -> str:
    """What a code means, proves and advises, as plain text.

    Raises:
        KeyError: The code is not registered.
    """
    entry = CODES[code]
    return (
        f"{code} ({entry.group}): {entry.meaning}\n  shown by: {entry.proof}\n"
        f"  ruled out by: {entry.ruled_out_by}\n  advice: {entry.advice}"
    )
