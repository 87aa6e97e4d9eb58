"""The verdict: whether loading, training or other work takes the time of a step."""

from __future__ import annotations

from dataloading.evidence import FEWEST_STEPS, Evidence

DATA_BOUND_SHARE = 0.10  # waiting for a tenth of the time is worth an afternoon
QUIET_SHARE = 0.05  # less waiting than this cannot be told from noise
HANDOVER_SHARE = 0.20  # getting batches that stand ready is worth an afternoon from here on
WORKERS_BIND = 0.75  # of a step: workers whose batches take so long set the pace, or nearly
RESTART_SHARE = 0.15  # of an epoch spent on its start
HOST_SHARE = 0.20  # other work beyond a fifth of the step is not mere loop overhead


def judge(evidence: Evidence) -> str:
    """The verdict: where the time of a step goes.

    Example:
        >>> judge(Evidence(steps=20, wait_share=0.8, step_share=0.2, other_share=0.0))
        'data-bound'
    """
    if evidence.steps < FEWEST_STEPS or evidence.wait_share is None:
        return "inconclusive"
    host, handover = host_share(evidence), handover_share(evidence)
    late = evidence.wait_share - handover  # of the time: batches that were not ready
    waits = late >= DATA_BOUND_SHARE or handover >= HANDOVER_SHARE
    if waits and evidence.wait_share >= host:
        return "data-bound"
    if restart_share(evidence) >= max(RESTART_SHARE, host):
        return "data-bound"
    if host >= HOST_SHARE:
        return "host-bound"
    if late <= QUIET_SHARE and handover <= DATA_BOUND_SHARE:
        return "compute-bound"
    return "balanced"


def restart_share(evidence: Evidence) -> float:
    """Share of an epoch for its start, without the work on the first batch, which must be done."""
    steps, period, restart = evidence.steps_per_epoch, evidence.period_s, evidence.epoch_restart_s
    if not steps or not period or restart is None or not evidence.num_workers:
        return 0.0
    return max(0.0, restart - first_batch_s(evidence)) / (restart + steps * period)


def first_batch_s(evidence: Evidence) -> float:
    """Seconds that a worker needs for a batch, as far as it is known."""
    if evidence.worker_batch_s is not None:
        return evidence.worker_batch_s
    return evidence.costs.batch_s if evidence.costs is not None else 0.0


def handover_share(evidence: Evidence) -> float:
    """Share of the time for getting batches that stand ready; the workers cannot do better.

    0 where the workers set the pace: then the next batch is late, whatever stands in the queue.
    """
    seconds = evidence.handover_s if evidence.handover_s is not None else evidence.send_s
    if not evidence.num_workers or not seconds or not evidence.period_s:
        return 0.0
    if workers_pace_s(evidence) >= WORKERS_BIND * evidence.period_s:
        return 0.0
    return min(seconds / evidence.period_s, evidence.wait_share or 0.0)


def workers_pace_s(evidence: Evidence) -> float:
    """Seconds from one batch to the next that the workers can keep up, all together."""
    return first_batch_s(evidence) / max(1, evidence.num_workers or 0)


def host_share(evidence: Evidence) -> float:
    """Share of time for work that is neither loading nor training."""
    return (evidence.other_share or 0.0) + (evidence.spike_share or 0.0)
