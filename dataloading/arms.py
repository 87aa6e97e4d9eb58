"""The three arms: the real loop, training on one fixed batch, and the loader alone.

The real loop cannot be faster than the slower of the other two; which of them it is close to says
where to look, and being far from both says that they disturb each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloading.batch_costs import BatchCosts
from dataloading.evidence import Evidence
from dataloading.held_things import handles_among
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine, inspect_machine
from dataloading.object_graph import walk
from dataloading.pickling import probe_pickling
from dataloading.profiling import SampleProfile, profile_samples
from dataloading.ranks import share_wait
from dataloading.results import Result, format_value
from dataloading.settings import LoaderSettings, ineffective_options, rebuild_dataloader
from dataloading.sharding import gives_shares
from dataloading.timing import TrainStep, length_of, measure_dataloader, measure_replay
from dataloading.train_steps import state_kept
from dataloading.watchdog import ProbeTimeout, loader_warnings_hidden
from dataloading.worker_costs import WorkerCosts

# How the time budget is shared out.
REAL_SHARE, REPLAY_SHARE, ALONE_SHARE, ONE_WORKER_SHARE = 0.45, 0.1, 0.2, 0.15

LIGHT_BATCH_BYTES = 2**20  # of a larger batch the bytes cost more than the hand-over


@dataclass(frozen=True, repr=False, eq=False)
class Arms(Result):
    """What the three arms showed.

    Attributes:
        real: The training loop as it is.
        replay: Training on one fixed batch; None without a train step.
        alone: The loader without training.
        one_worker: The loader alone with one worker, for a loader with none or several; None where
            it was not needed or could not be started (see `notes`).
        step_cpu_s: CPU seconds of one train step, over all threads of this process.
        notes: What could not be measured, and why.
    """

    real: LoaderTiming
    replay: LoaderTiming | None
    alone: LoaderTiming | None
    one_worker: LoaderTiming | None
    step_cpu_s: float | None
    notes: tuple[str, ...] = ()

    @property
    def worker_costs(self) -> WorkerCosts | None:
        """What a batch costs inside a worker, as little disturbed as it was seen."""
        for timing in (self.one_worker, self.alone, self.real):
            if timing is not None and timing.workers is not None:
                return timing.workers
        return None

    def summary(self) -> str:
        """The rate of each arm."""
        arms = (("real", self.real), ("replay", self.replay), ("loader alone", self.alone))
        return ", ".join(
            f"{name} {format_value('samples_per_s', arm.samples_per_s)}"
            for name, arm in arms
            if arm is not None
        )


def measure_arms(
    dataloader: Any,
    train_step: TrainStep | None = None,
    *,
    seconds: float = 20.0,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Arms:
    """Measure the real loop, training alone and the loader alone.

    Args:
        dataloader: A `DataLoader`, or anything that yields batches.
        train_step: Called with each batch; None leaves the replay out.
        seconds: Time budget for all arms together.
        device: Move each batch there first.
        progress: Show progress bars.

    Returns:
        An `Arms`.

    Raises:
        ValueError: A bad argument, or a loader that delivers no batch.
        ProbeTimeout: The real loop gave no batch within its time.

    Explained in: notebook 01
    """
    notes: list[str] = []
    with state_kept(train_step):
        keeper = BatchKeeper(train_step)
        real = measure_dataloader(
            dataloader,
            keeper if train_step is not None else None,
            seconds=seconds * REAL_SHARE,
            device=device,
            progress=progress,
        )
        if real.failure is not None:  # a loader that hangs would only hang again
            return Arms(real, None, None, None, None, real.notes)
        if train_step is None:
            return Arms(real, None, real, _one_worker(dataloader, seconds, progress, notes), None)
        replay, step_cpu_s = replay_batch(keeper.batch, train_step, seconds * REPLAY_SHARE)
        alone = _alone(dataloader, seconds * ALONE_SHARE, progress, notes)
        one_worker = _one_worker(dataloader, seconds, progress, notes)
    return Arms(real, replay, alone, one_worker, step_cpu_s, tuple(notes))


class BatchKeeper:
    """Passes batches on to the train step, and keeps the first one for the replay."""

    def __init__(self, train_step: TrainStep | None) -> None:
        self.train_step = train_step
        self.batch: Any = None

    def __call__(self, batch: Any) -> None:
        """Keep the first batch and train on this one."""
        if self.batch is None:
            self.batch = batch
        if self.train_step is not None:
            self.train_step(batch)


def replay_batch(batch: Any, train_step: TrainStep, seconds: float) -> tuple[LoaderTiming, float]:
    """Train on one batch again and again; returns the timing and the CPU seconds of a step."""
    calls = 0

    def counted(one: Any) -> None:
        nonlocal calls
        calls += 1
        train_step(one)

    cpu = time.process_time()
    timing = measure_replay(batch, counted, seconds=seconds)
    return timing, (time.process_time() - cpu) / max(1, calls)


def _attempt(
    measure: Callable[[], LoaderTiming], what: str, notes: list[str]
) -> LoaderTiming | None:
    """Run a probe that the diagnosis can do without; a failure becomes a note."""
    try:
        with loader_warnings_hidden():
            return measure()
    except (ProbeTimeout, RuntimeError, OSError, AttributeError, TypeError, ValueError) as error:
        notes.append(f"{what}: {type(error).__name__}: {error}")
        return None


def _alone(
    dataloader: Any, seconds: float, progress: bool, notes: list[str]
) -> LoaderTiming | None:
    def measure() -> LoaderTiming:
        return measure_dataloader(dataloader, seconds=seconds, progress=progress)

    return _attempt(measure, "The loader alone", notes)


def _one_worker(
    dataloader: Any, seconds: float, progress: bool, notes: list[str]
) -> LoaderTiming | None:
    """The loader with one worker: what a batch costs there, undisturbed by others."""
    if not isinstance(dataloader, DataLoader) or dataloader.num_workers == 1:
        return None

    def measure() -> LoaderTiming:
        settings = LoaderSettings.of(dataloader).changed(num_workers=1)
        return measure_dataloader(
            rebuild_dataloader(dataloader, settings),
            seconds=seconds * ONE_WORKER_SHARE,
            progress=progress,
        )

    return _attempt(measure, "The loader with one worker", notes)


def gather_evidence(
    dataloader: Any,
    arms: Arms,
    profile: SampleProfile | None,
    trace: Any = None,
    *,
    machine: Machine | None = None,
    profile_reason: str | None = None,
) -> Evidence:
    """Put together what the probes measured.

    Args:
        dataloader: The loader that was measured, for options without effect.
        arms: The three arms.
        profile: What a sample costs; None where it could not be profiled.
        trace: A `ResourceTrace`, for the GPU's utilisation; None where nothing was watched.
        machine: Where it was measured; None means here.
        profile_reason: Why there is no profile.

    Returns:
        The `Evidence` that the rules read.
    """
    workers = arms.worker_costs
    waits, reason = share_wait("measured", float(arms.real.wait_s.mean()))
    reasons = dict(note.split(": ", 1) for note in arms.notes if ": " in note)
    evidence = replace(
        Evidence().with_timing(arms.real),
        replay_step_s=_undisturbed(arms.replay, arms.real.step_s + arms.real.other_s),
        replay_noise=_spread(arms.replay),
        step_cpu_s=arms.step_cpu_s,
        alone_period_s=None if arms.alone is None else _undisturbed(arms.alone, arms.real.total_s),
        **_one_worker_figures(arms),
        own_iteration=_iterates_itself(dataloader),
        promised_steps=_promised_steps(dataloader),
        collate_s=workers.collate_cpu_s if workers is not None else None,
        dropped_settings=ineffective_options(dataloader),
        is_stream=isinstance(getattr(dataloader, "dataset", None), IterableDataset),
        shares_out=gives_shares(dataloader),
        utilization_percent=_utilization(trace),
        rank_waits_s=waits,
        reasons=reasons | ({"rank_waits_s": reason} if reason else {}),
        **_open_handles(dataloader),
        **_sending(dataloader, machine or inspect_machine()),
    )
    if profile is None:
        return replace(evidence, reasons={**evidence.reasons, "cpu_s": profile_reason or ""})
    costs = BatchCosts.of(profile, workers, arms.step_cpu_s or 0.0)
    if _delivers_items(dataloader):
        # what the data set gives is a batch already, however many samples that is
        costs = replace(costs, batch_size=evidence.batch_size or costs.batch_size)
    costs = costs.for_batch_size(evidence.batch_size)
    return with_handover(evidence.with_profile(profile, costs), arms)


def with_handover(evidence: Evidence, arms: Arms) -> Evidence:
    """What handing over a small batch would cost a loader that has no workers yet.

    It is what the one worker of its arm needs from batch to batch beyond making it. Sender and
    receiver pay about the same: both open the batch's memory and wake up a thread.
    """
    workers = arms.one_worker.workers if arms.one_worker is not None else None
    if evidence.num_workers != 0 or arms.one_worker is None or workers is None:
        return evidence
    if workers.mean_batch_s is None or (evidence.batch_bytes or 0) > LIGHT_BATCH_BYTES:
        return evidence
    seconds = max(0.0, arms.one_worker.period_s - workers.mean_batch_s)
    return replace(evidence, handover_s=seconds, send_s=max(evidence.send_s or 0.0, seconds))


def _delivers_items(dataloader: Any) -> bool:
    """Whether a loader passes on what its data set gives, without making batches of it."""
    return (
        isinstance(dataloader, DataLoader)
        and dataloader.batch_sampler is None
        and dataloader.batch_size is None
    )


def _undisturbed(arm: LoaderTiming | None, in_the_run_s: np.ndarray) -> float:
    """Seconds of a step of an arm; 0 without one.

    A part of the run alone cannot take longer than in the run: an arm that does was disturbed by
    something else on the machine, and the run says more about it.
    """
    if arm is None:
        return 0.0
    return min(arm.period_s, float(in_the_run_s.mean()))


def profile_or_reason(dataloader: Any) -> tuple[SampleProfile | None, str | None]:
    """Profile the loader's samples; where that fails, None and the reason."""
    if not isinstance(dataloader, DataLoader):
        return None, f"{type(dataloader).__name__} is not a DataLoader, so its samples are unknown"
    try:
        return profile_samples(dataloader), None
    except Exception as error:  # the data set's own code; the run itself has told what it does
        return None, f"{type(error).__name__}: {error}"


def _one_worker_figures(arms: Arms) -> dict[str, Any]:
    workers = arms.one_worker.workers if arms.one_worker is not None else None
    if workers is None:
        return {}
    return {
        "one_worker_batch_s": workers.batch_s,
        "one_worker_mean_batch_s": workers.mean_batch_s,
    }


def _promised_steps(dataloader: Any) -> int | None:
    """Batches that an epoch has by the loader's own word, where torch's sampling stands behind it."""
    if not isinstance(dataloader, DataLoader) or _iterates_itself(dataloader):
        return None
    return None if isinstance(dataloader.dataset, IterableDataset) else length_of(dataloader)


def _iterates_itself(dataloader: Any) -> bool:
    """Whether a loader's class has an `__iter__` of its own, whose work we cannot see into."""
    if not isinstance(dataloader, DataLoader):
        return False
    return type(dataloader).__iter__ is not DataLoader.__iter__


def _sending(dataloader: Any, machine: Machine) -> dict[str, Any]:
    """What workers that are not forked must be sent."""
    if not isinstance(dataloader, DataLoader) or dataloader.num_workers == 0:
        return {}
    method = LoaderSettings.of(dataloader).multiprocessing_context or machine.start_method
    if method == "fork":
        return {"start_method": method}
    probe = probe_pickling(dataloader.dataset, "dataset")
    return {
        "start_method": method,
        "pickled_bytes": probe.size_bytes,
        "pickling_s": probe.seconds if probe.error is None else None,
    }


def _open_handles(dataloader: Any) -> dict[str, Any]:
    """Open files and connections of the data set, which forked workers share, or would."""
    if not isinstance(dataloader, DataLoader):
        return {}
    handles = list(handles_among(list(walk(dataloader.dataset, "dataset"))))
    if not handles:
        return {"open_handles": 0}
    first = handles[0]
    kinds = {"open_handle": first.path, "open_handle_kind": first.kind}
    return {"open_handles": len(handles), **kinds}


def _spread(replay: LoaderTiming | None) -> float | None:
    if replay is None:
        return None
    low, middle, high = np.percentile(replay.step_s, [10, 50, 90])
    return float((high - low) / middle) if middle > 0 else None


def _utilization(trace: Any) -> float | None:
    frame = getattr(trace, "frame", None)
    if frame is None or "gpu0_utilization" not in frame:
        return None
    mean = float(frame["gpu0_utilization"].mean())
    return mean if np.isfinite(mean) else None
