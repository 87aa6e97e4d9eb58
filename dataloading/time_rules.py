"""Rules about time: each a pure function from evidence to a finding, with no clock in sight."""

from __future__ import annotations

from collections.abc import Callable

from dataloading.batch_costs import BatchCosts
from dataloading.codes import Finding, finding
from dataloading.evidence import FEWEST_STEPS, Evidence
from dataloading.machine import Machine
from dataloading.model import step_bounds
from dataloading.results import format_ratio, format_seconds, format_share, format_value
from dataloading.settings import LoaderSettings
from dataloading.setup_rules import SHARE_ADVICE
from dataloading.stages import DECODE, READ
from dataloading.verdict import (
    DATA_BOUND_SHARE,
    HANDOVER_SHARE,
    HOST_SHARE,
    QUIET_SHARE,
    RESTART_SHARE,
    first_batch_s,
    handover_share,
    host_share,
    judge,
    restart_share,
    workers_pace_s,
)
from dataloading.workers import best_workers

# Every threshold of the rules, with its reason.
WORTH_A_CHANGE = 1.10  # a predicted gain below 10 % is within the error of the model
LARGE_GAIN = 1.5  # half again the rate is worth stopping a training for
TINY_SAMPLE_S = 30e-6  # below this, calls and pickling outweigh the content of a sample
MOST_OF_IT = 0.5  # the larger part of a batch's time
NEARLY_ALL = 0.75  # of the CPU time that a step could have: what is left is switching
COPY_BYTES_PER_S = 2e9  # copying into fresh memory, page faults included, on a slow machine
HEAVY_BATCH_BYTES = 2**20  # smaller batches of few tensors cost their hand-over, not their bytes
MANY_TENSORS = 10
COPY_SLACK = 2.0  # collating may take twice that and still be mere copying
WORKING_SHARE = 0.75  # of the workers of a stream, told by batches made at the same time
INTERFERENCE_FACTOR = 1.3  # the real run against the slower of its two arms

LIGHT_BATCH_ADVICE = (
    "The batch is small, so that its hand-over costs more than its bytes: fewer, larger batches "
    "share that cost (but change training), or num_workers=0 avoids it."
)

# What the percentage of `nvidia-smi` means, said wherever it could mislead.
UTILISATION_MEANING = (
    "GPU utilisation is the share of time a kernel was running, not the share of the GPU in use."
)

# What makes the dearest stage cheaper, where its name says what it does.
STAGE_ADVICE = {
    READ: "Read fewer, larger files, or keep the files in memory.",
    DECODE: "Decode faster (create_dataloaders with decoder='torchvision'), decode at reduced size "
    "('pillow-draft', or smaller files), or cache what was decoded (CachedDataset).",
}

Rule = Callable[[Evidence, Machine], Finding | None]


def is_data_bound(evidence: Evidence) -> bool:
    """Whether waiting for data takes the time."""
    return judge(evidence) == "data-bound"


def compute_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """The train step takes the time."""
    verdict, share = judge(evidence), evidence.wait_share or 0.0
    if verdict not in ("compute-bound", "balanced"):
        return None
    judged = "the loader is not the problem."
    if verdict == "balanced":
        judged = f"a perfect loader would be {format_ratio(1 / (1 - share))} times as fast at most."
    if evidence.handover_s and handover_share(evidence) > MOST_OF_IT * share:
        judged += (
            f" Batches stand ready when they are asked for; to get one takes "
            f"{format_seconds(evidence.handover_s)}."
        )
    extra = ""
    if evidence.utilization_percent is not None:
        extra = f" NVML shows {evidence.utilization_percent:.0f} %. {UTILISATION_MEANING}"
    return finding(
        "compute",
        f"Training waits for data {format_share(share, 1)} of the time: {judged}{extra}",
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
        f"Other work of the training process takes {format_share(share, 1)} of the time, "
        f"waiting for data {format_share(evidence.wait_share or 0.0, 1)}.",
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
    costs, step_s = evidence.costs, compute_s(evidence)
    if (
        not is_data_bound(evidence)
        or costs is None
        or step_s is None
        or evidence.num_workers is None
    ):
        return None
    if tiny_samples(evidence) or _some_have_no_work(evidence):
        return None
    now = max(step_bounds(costs, evidence.settings, step_s, machine).values())
    wanted = best_workers(costs, step_s, machine)
    settings = LoaderSettings(num_workers=wanted)
    gain = now / max(max(step_bounds(costs, settings, step_s, machine).values()), 1e-12)
    if wanted <= evidence.num_workers or gain < WORTH_A_CHANGE:
        return None
    shared = not evidence.is_stream or evidence.shares_out is True
    advice = f"Set num_workers={wanted}."
    if evidence.shares_out is False:
        advice = f"{SHARE_ADVICE} Then set num_workers={wanted}; before that each worker would "
        advice += "deliver all samples."
    elif not shared:
        advice = "Where the iterable data set gives each worker a share of its own (check_samples "
        advice += f"tells), set num_workers={wanted}."
    return finding(
        "too-few-workers",
        f"Training waits {format_seconds(evidence.wait_s or 0.0)} a step with "
        f"num_workers={evidence.num_workers}; {wanted} would keep up better.",
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
        advice=advice,
        expected_gain=gain if shared else None,
        severity="critical" if gain > LARGE_GAIN and shared else "warning",
    )


def _some_have_no_work(evidence: Evidence) -> bool:
    """Whether some workers of a stream deliver nothing, as with fewer files than workers."""
    workers, alone, batch = evidence.num_workers, evidence.alone_period_s, evidence.worker_batch_s
    if not evidence.is_stream or not workers or workers < 2 or not alone or not batch:
        return False
    return batch / alone < WORKING_SHARE * workers


def cpu_bound_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Every usable CPU is busy preparing data."""
    costs, step_s = evidence.costs, compute_s(evidence)
    if not is_data_bound(evidence) or costs is None or step_s is None or tiny_samples(evidence):
        return None
    if too_few_workers_rule(evidence, machine) is not None:
        return None
    bounds = step_bounds(costs, evidence.settings, step_s, machine)
    cpu_s = bounds["cpu"]
    if costs.cpu_share < MOST_OF_IT or cpu_s < step_s or _dominant_part(evidence) is not None:
        return None
    stage, share = evidence.top_stage, evidence.top_stage_share
    most = f"; most of it is {stage} ({format_share(share)})" if stage and share else ""
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
    if not is_data_bound(evidence) or not tiny_samples(evidence):
        return None
    size = evidence.batch_size or 1
    gain = None
    costs, step_s = evidence.costs, compute_s(evidence)
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
    if not is_data_bound(evidence) or tiny_samples(evidence):
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
    if not is_data_bound(evidence) or tiny_samples(evidence):
        return None
    if _dominant_part(evidence) != "transfer" or not _parts_explain_the_pace(evidence):
        return None
    return finding(
        "transfer",
        f"Building and sending {format_value('x_bytes', evidence.batch_bytes)} in "
        f"{evidence.tensors_per_batch} tensors takes most of the "
        f"{format_seconds(_batch_s(evidence))} that a batch costs (sending alone "
        f"{format_seconds(evidence.send_s or 0.0)}).",
        {
            "send_s": evidence.send_s,
            "collate_s": evidence.collate_s,
            "batch_s": _batch_s(evidence),
            "threshold_share": MOST_OF_IT,
            "batch_bytes": evidence.batch_bytes,
            "tensors_per_batch": evidence.tensors_per_batch,
            "steps": evidence.steps,
        },
    )


def _parts_explain_the_pace(evidence: Evidence) -> bool:
    """Whether what a batch costs comes near to what the loader alone takes for one."""
    alone = evidence.alone_period_s
    known_s = max(workers_pace_s(evidence), _batch_s(evidence) / max(1, evidence.num_workers or 0))
    return not alone or max(known_s, evidence.send_s or 0.0) >= MOST_OF_IT * alone


def handover_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Batches stand ready, and getting them takes the time."""
    share, seconds = handover_share(evidence), evidence.handover_s
    if not is_data_bound(evidence) or seconds is None or tiny_samples(evidence):
        return None
    if share < HANDOVER_SHARE or share < MOST_OF_IT * (evidence.wait_share or 0.0):
        return None
    if cpus_are_full(evidence, machine):  # then getting a batch waits for a CPU, too
        return None
    return finding(
        "transfer",
        f"Batches stand ready when they are asked for, but to get one takes "
        f"{format_seconds(seconds)}, {format_share(share)} of a step "
        f"({format_value('x_bytes', evidence.batch_bytes)} in {evidence.tensors_per_batch} tensors).",
        {
            "handover_s": seconds,
            "handover_share": share,
            "threshold_share": HANDOVER_SHARE,
            "batch_bytes": evidence.batch_bytes,
            "tensors_per_batch": evidence.tensors_per_batch,
            "steps": evidence.steps,
        },
        advice=None if _is_heavy(evidence) else LIGHT_BATCH_ADVICE,
        expected_gain=(evidence.period_s or 0.0)
        / max((evidence.period_s or 0.0) - seconds, workers_pace_s(evidence), 1e-9),
    )


def cpus_are_full(evidence: Evidence, machine: Machine) -> bool:
    """Whether the CPU work of a step takes all usable CPUs for nearly all of it."""
    if evidence.costs is None or not evidence.period_s:
        return False
    return cpu_pace_s(evidence.costs, machine) >= NEARLY_ALL * evidence.period_s


def epoch_startup_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Epochs spend much of their time on their start."""
    share, restart, period = restart_share(evidence), evidence.epoch_restart_s, evidence.period_s
    if share < RESTART_SHARE or restart is None or period is None:
        return None
    first_batch, steps = first_batch_s(evidence), evidence.steps_per_epoch
    avoidable = max(0.0, restart - first_batch)
    advice = None
    if evidence.persistent_workers:
        advice = "The workers are kept already; look at what the sampler or the first batch does."
    return finding(
        "epoch-startup",
        f"Each epoch of {steps} batches begins with {format_seconds(restart)} of waiting; "
        f"{format_seconds(avoidable)} of it, {format_share(share)} of the epoch, is not the first batch's work.",
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


def replaced_workers_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Persistent workers of a loader that is made anew for each epoch."""
    if not evidence.replaced_loaders:
        return None
    return finding(
        "epoch-startup",
        "A new loader was made for an epoch, so its persistent workers were started anew "
        f"({evidence.replaced_loaders} time(s) so far).",
        {
            "replaced_loaders": evidence.replaced_loaders,
            "persistent_workers": evidence.persistent_workers,
            "num_workers": evidence.num_workers,
        },
        advice="Make the loader once, before the loop over epochs, and iterate over it again.",
    )


def interference_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Both arms are fast alone and slow together."""
    arms = (evidence.replay_step_s, evidence.alone_period_s, evidence.handover_s)
    if not evidence.num_workers or None in arms or evidence.period_s is None:
        return None
    slower = max(evidence.replay_step_s or 0.0, evidence.alone_period_s or 0.0)
    costs = evidence.costs
    # handing batches over comes on top of training, and the CPUs are shared: that is expected
    explained = max(slower, (evidence.replay_step_s or 0.0) + (evidence.handover_s or 0.0))
    if costs is not None:
        explained = max(explained, cpu_pace_s(costs, machine))
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
            "explained_s": explained,
            "threshold_factor": INTERFERENCE_FACTOR,
            "steps": evidence.steps,
        },
        severity="info",
    )


TIME_RULES: tuple[Rule, ...] = (
    too_few_workers_rule,
    per_sample_overhead_rule,
    transfer_rule,
    handover_rule,
    collate_rule,
    cpu_bound_rule,
    epoch_startup_rule,
    replaced_workers_rule,
    host_work_rule,
    compute_rule,
    interference_rule,
)


def cpu_pace_s(costs: BatchCosts, machine: Machine) -> float:
    """Seconds from one step to the next that all usable CPUs can keep up."""
    return (costs.cpu_s + costs.send_s + costs.step_cpu_s) / machine.cpus_per_rank


def compute_s(evidence: Evidence) -> float | None:
    """Seconds of the train step when data is free: replayed, else as seen in the run."""
    return evidence.replay_step_s if evidence.replay_step_s is not None else evidence.step_s


def tiny_samples(evidence: Evidence) -> bool:
    """Whether the calls around a sample outweigh its content."""
    if evidence.sample_wall_s is None or evidence.sample_wall_s >= TINY_SAMPLE_S:
        return False
    return (evidence.collate_s or 0.0) < TINY_SAMPLE_S * (evidence.batch_size or 1)


def _batch_s(evidence: Evidence) -> float:
    costs = evidence.costs
    if costs is None:
        return 0.0
    return costs.batch_s if evidence.num_workers else costs.cpu_s + costs.wait_s


def _is_heavy(evidence: Evidence) -> bool:
    """Whether a batch costs its bytes or its tensors to send, more than the mere hand-over."""
    tensors = evidence.tensors_per_batch or 1
    return (evidence.batch_bytes or 0) >= HEAVY_BATCH_BYTES or tensors >= MANY_TENSORS


def _dominant_part(evidence: Evidence) -> str | None:
    """`collate` or `transfer`, where one of them takes the larger part of a batch's time.

    Collating that takes no longer than copying its bytes counts as moving them.
    """
    whole = _batch_s(evidence)
    if whole <= 0:
        return None
    collate, send = evidence.collate_s or 0.0, (evidence.send_s or 0.0)
    if not evidence.num_workers:
        send = 0.0
    copying = (evidence.batch_bytes or 0) / COPY_BYTES_PER_S
    moved = send + (collate if collate < COPY_SLACK * copying else 0.0)
    if evidence.num_workers and _is_heavy(evidence) and moved >= MOST_OF_IT * whole:
        return "transfer"
    if collate >= MOST_OF_IT * whole:
        return "collate"
    return None
