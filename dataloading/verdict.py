"""The verdict: whether loading, training or other work takes the time of a step."""

from __future__ import annotations

from dataloading.evidence import FEWEST_STEPS, Evidence

DATA_BOUND_SHARE = 0.10  # waiting for a tenth of the time is worth an afternoon
QUIET_SHARE = 0.05  # less waiting than this cannot be told from noise
HOST_SHARE = 0.20  # other work beyond a fifth of the step is not mere loop overhead


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
