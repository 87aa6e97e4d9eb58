"""The choice of each setting, with its reason: workers, prefetch, pinning, persistence, and what fits."""

from __future__ import annotations

import math
from dataclasses import replace

from dataloading.batch_costs import BatchCosts
from dataloading.budgets import over_budget
from dataloading.diagnosis import Diagnosis
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.model import step_bounds
from dataloading.results import format_bytes, format_seconds, format_share
from dataloading.settings import DEFAULT_PREFETCH_FACTOR, LoaderSettings
from dataloading.setup_rules import pins_memory
from dataloading.workers import GOOD_ENOUGH, best_workers, worker_cap

KEEPS_WORKERS = (  # causes that another number of workers does not mend, or makes worse
    *("serialised-workers", "slow-sampler", "storage-bound", "small-files", "collate", "transfer"),
    *("thread-oversubscription", "worker-memory-leak", "main-memory-leak"),
)
PREFETCH_FACTORS = (2, 4, 8)


def keep_samples_single(
    chosen: LoaderSettings,
    evidence: Evidence,
    reasons: dict[str, str],
    refused: dict[str, str],
) -> LoaderSettings:
    """No more workers for a stream that each of them would, or might, deliver as a whole."""
    most, why = 1, "each would deliver all samples: the iterable data set gives no worker its share"
    if evidence.is_stream and evidence.shares_out is None:
        most = max(1, evidence.num_workers or 0)
        why = (
            "whether the iterable data set gives each worker its share could not be told; "
            "check_samples tells"
        )
    elif evidence.shares_out is not False:
        return chosen
    if chosen.num_workers <= most:
        return chosen
    refused[f"{chosen.num_workers} workers"] = why
    reasons["num_workers"] = f"more than {most} refused: {why}"
    return chosen.changed(num_workers=most)


def keep_handles_unshared(
    chosen: LoaderSettings,
    evidence: Evidence,
    reasons: dict[str, str],
    refused: dict[str, str],
) -> LoaderSettings:
    """No workers, where there are none yet, for a data set that holds a file or connection open."""
    if not evidence.open_handle or evidence.num_workers or not chosen.num_workers:
        return chosen
    why = (
        f"{evidence.open_handle} ({evidence.open_handle_kind}) is open: forked workers share it and "
        "disturb one another, and it cannot be sent to others. Open it on first use, in the worker"
    )
    refused[f"{chosen.num_workers} workers"] = why
    reasons["num_workers"] = f"workers refused: {why}"
    return chosen.changed(num_workers=0)


def choose_workers(
    diagnosis: Diagnosis,
    present: LoaderSettings,
    costs: BatchCosts,
    step_s: float,
    machine: Machine,
    reasons: dict[str, str],
    epochs: int,
) -> LoaderSettings:
    """The present workers where they do, else the smallest number that is as good as any."""
    wanted = best_workers(costs, step_s, machine)
    cap = worker_cap(machine, costs.cpu_share)
    if present.num_workers:  # even on one CPU, a worker goes on while training waits
        cap = max(cap, 1)
    kept = epochs > 1  # workers will be kept between epochs, see `_choose_persistence`
    numbers = {0, 1, wanted, present.num_workers}
    if diagnosis.cause == "per-sample-overhead":  # workers only add their hand-over
        numbers = {0, present.num_workers}
    candidates = {n: present.changed(num_workers=n, persistent_workers=kept) for n in numbers}
    seconds = {
        n: epoch_s(s, diagnosis, costs, step_s, machine, epochs) for n, s in candidates.items()
    }
    allowed = {n: s for n, s in seconds.items() if n <= cap}
    best = min(allowed.values())
    now = seconds[present.num_workers]
    if diagnosis.verdict in ("compute-bound", "host-bound") and present.num_workers <= cap:
        reasons["num_workers"] = f"kept: the loader is not the problem ({diagnosis.verdict})"
        return candidates[present.num_workers]
    if diagnosis.cause in KEEPS_WORKERS and present.num_workers <= cap:
        reasons["num_workers"] = f"kept: another number does not mend the cause, {diagnosis.cause}"
        return candidates[present.num_workers]
    if diagnosis.verdict == "inconclusive" and present.num_workers <= cap:
        reasons["num_workers"] = "kept: too few steps were measured to say more"
        return candidates[present.num_workers]
    if present.num_workers in allowed and now <= GOOD_ENOUGH * best:
        reasons["num_workers"] = "kept: no other number is predicted to be faster"
        return candidates[present.num_workers]
    number = min(n for n, s in allowed.items() if s <= GOOD_ENOUGH * best)
    reasons["num_workers"] = _why_workers(number, present.num_workers, costs, step_s, machine, cap)
    return candidates[number]


def _why_workers(
    number: int, present: int, costs: BatchCosts, step_s: float, machine: Machine, cap: int
) -> str:
    if present > cap >= number:
        return (
            f"{present} workers on {machine.cpus_per_rank} usable CPUs only take turns; "
            f"{number} do the same work"
        )
    if number == 0:
        return "a batch is made faster than it can be handed over by a worker"
    needed = math.ceil(costs.batch_s / step_s) if step_s > 0 else cap
    bound = f"; the CPUs carry {cap}" if number < needed else ""
    return (
        f"a batch takes {costs.batch_s / max(step_s, 1e-9):.1f} train steps to prepare{bound}; "
        f"CPU busy {format_share(costs.cpu_share)} of that"
    )


def epoch_s(
    settings: LoaderSettings,
    diagnosis: Diagnosis,
    costs: BatchCosts,
    step_s: float,
    machine: Machine,
    epochs: int,
) -> float:
    """Predicted seconds of one epoch, starts of workers included, averaged over the training."""
    evidence = diagnosis.evidence
    step = max(step_bounds(costs, settings, step_s, machine).values())
    steps = evidence.steps_per_epoch
    if not steps:
        return step
    start = 0.0
    if settings.num_workers > 0 and evidence.num_workers:
        start = evidence.epoch_restart_s or evidence.startup_s or 0.0
        start = max(0.0, start - costs.batch_s) * settings.num_workers / evidence.num_workers
    elif settings.num_workers > 0:
        method = settings.multiprocessing_context or machine.start_method
        start = START_S.get(method, START_S["spawn"]) * settings.num_workers
    starts = 1 if settings.persistent_workers else epochs
    refill = costs.batch_s if settings.num_workers > 0 else 0.0  # every epoch begins with no queue
    return steps * step + refill + start * starts / epochs


START_S = {"fork": 0.02, "forkserver": 1.0, "spawn": 1.5}  # one worker, until its first batch


def fit(
    settings: LoaderSettings,
    costs: BatchCosts,
    machine: Machine,
    fraction: float,
    reasons: dict[str, str],
    refused: dict[str, str],
) -> LoaderSettings:
    """The largest part of the wished workers and prefetch that the machine's budgets hold."""
    wished = settings
    while settings.num_workers > 0 and (short := over_budget(settings, costs, machine, fraction)):
        refused[f"{settings.num_workers} workers, prefetch {_prefetch(settings)}"] = short
        if _prefetch(settings) > 1 and settings.num_workers == 1:
            settings = replace(settings, prefetch_factor=_prefetch(settings) - 1)
        else:
            settings = replace(settings, num_workers=settings.num_workers - 1)
    if settings.num_workers == 0 and wished.num_workers > 0:
        reasons["num_workers"] = "no number of workers fits; loading stays in the training process"
    elif settings != wished:
        reasons["num_workers"] = "what fits: more would run out of memory, shared memory or files"
    settings = settings.changed()
    if settings.num_workers > 0:
        settings = replace(settings, prefetch_factor=_prefetch(settings))
        reasons.setdefault(
            "prefetch_factor",
            f"{settings.queued_batches} batches ready; more would add slack, not rate",
        )
    return settings


def choose_prefetch(
    settings: LoaderSettings, evidence: Evidence, reasons: dict[str, str]
) -> LoaderSettings:
    """As many batches ahead as it takes to outlast a slow one, within reason."""
    late_s = tail_s(evidence)
    if settings.num_workers == 0 or late_s <= slack_s(settings, evidence):
        return settings
    present = _prefetch(settings)
    for factor in (n for n in PREFETCH_FACTORS if n > present):
        deeper = replace(settings, prefetch_factor=factor)
        if late_s <= slack_s(deeper, evidence):
            reasons["prefetch_factor"] = (
                f"the slowest batches take {format_seconds(late_s)} longer than usual: "
                f"{deeper.queued_batches} ready batches outlast that"
            )
            return deeper
    return settings


def choose_pinning(
    settings: LoaderSettings, machine: Machine, reasons: dict[str, str]
) -> LoaderSettings:
    """Pin where there is an accelerator that copies from pinned memory."""
    kinds = [a.kind for a in machine.accelerators]
    pins = pins_memory(machine)
    if pins:
        reasons["pin_memory"] = f"copies to {kinds[0]} can run beside training"
    elif "mps" in kinds:
        reasons["pin_memory"] = "not supported on MPS"
    else:
        reasons["pin_memory"] = "no accelerator to copy to"
    return replace(settings, pin_memory=pins)


def choose_persistence(
    settings: LoaderSettings, epochs: int, reasons: dict[str, str]
) -> LoaderSettings:
    """Keep workers between epochs, where there are several epochs."""
    if settings.num_workers == 0:
        return replace(settings, persistent_workers=False)
    if epochs == 1:
        reasons["persistent_workers"] = "a single epoch starts its workers once anyway"
        return replace(settings, persistent_workers=False)
    reasons["persistent_workers"] = f"workers start once, not {epochs} times"
    return replace(settings, persistent_workers=True)


def explain_start_method(
    settings: LoaderSettings, evidence: Evidence, machine: Machine, reasons: dict[str, str]
) -> None:
    """Say why the start method stays: what it costs here, or what it does harm to."""
    if settings.num_workers == 0:
        return
    method = settings.multiprocessing_context or machine.start_method
    reason = f"kept: workers start by {method}"
    if method == "fork" and evidence.open_handle:
        reason += (
            f", and would share {evidence.open_handle}; open it in the worker, on first use (as it "
            "is, it cannot be sent to workers that are spawned)"
        )
    elif method == "fork":
        reason += ", within milliseconds, and share the data set"
    elif evidence.pickled_bytes is not None:
        reason += f"; each is sent {format_bytes(evidence.pickled_bytes)} when it starts"
    reasons["multiprocessing_context"] = reason


def tail_s(evidence: Evidence) -> float:
    """How much longer than usual the slowest batches take; 0 where that was not seen."""
    batch_s, factor = evidence.worker_batch_s, evidence.slow_batch_factor
    if batch_s is None or factor is None:
        return 0.0
    return batch_s * max(0.0, factor - 1.0)


def slack_s(settings: LoaderSettings, evidence: Evidence) -> float:
    """How long training goes on from a full queue, were nothing delivered."""
    step_s = evidence.replay_step_s if evidence.replay_step_s is not None else evidence.step_s
    return settings.queued_batches * (step_s or 0.0)


def _prefetch(settings: LoaderSettings) -> int:
    return settings.prefetch_factor or DEFAULT_PREFETCH_FACTOR
