"""Everything the rules may know about a training loop, as plain numbers.

Probes fill it; rules read it. It can be saved and replayed: a diagnosis of yesterday's run needs no
loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.batch_costs import BatchCosts
from dataloading.loader_timing import LoaderTiming
from dataloading.profiling import SampleProfile
from dataloading.results import Result
from dataloading.settings import LoaderSettings
from dataloading.stages import dearest

if TYPE_CHECKING:
    import pandas as pd

FROM_WORKERS = (  # figures that have the same name in `WorkerCosts`
    *(
        "extra_cpu_share",
        "run_delay_share",
        "slow_batch_factor",
        "storage_share",
        "first_storage_share",
    ),
    *("read_bytes_per_sample", "opens_per_sample", "open_share"),
)
FEWEST_STEPS = 8  # fewer steady steps than this prove nothing


@dataclass(frozen=True, repr=False, eq=False)
class Evidence(Result):
    """What was measured; None where it was not, with the reason in `reasons`.

    Attributes:
        steps: Steady steps of the real run behind the figures.
        num_workers, prefetch_factor, batch_size, pin_memory, persistent_workers, in_order,
            multiprocessing_context: The loader's settings; None where it is not a `DataLoader`, or
            leaves it to the default.
        wait_share, transfer_share, step_share, other_share, spike_share: Shares of the real run.
        period_s: Seconds from one step to the next in the real run.
        wait_s: Mean wait of a step.
        step_s: Mean train step in the real run.
        replay_step_s: Train step on one fixed batch: the compute ceiling.
        replay_noise: Spread of the replayed steps, (p90 - p10) / median.
        step_cpu_s: CPU seconds of a train step, all threads.
        alone_period_s: Seconds per batch of the loader alone.
        startup_s, epoch_restart_s: First batch, and first batch of a later epoch.
        steps_per_epoch: Batches in an epoch.
        promised_steps: What `len` of the loader says, for a map-style data set.
        cpu_s, sample_wait_s, send_s: CPU work, waiting and sending of one batch.
        collate_s: Collating one batch, in the workers where it was seen there.
        sample_wall_s, sample_cpu_s: One sample, undisturbed.
        slow_sample_factor: The slowest of the samples that were profiled over their median.
        worker_batch_s: Wall seconds of a batch inside a worker, during the run.
        batch_bytes, tensors_per_batch: Size of a batch.
        top_stage, top_stage_share: The dearest stage of a sample and its share of the wall time.
        extra_cpu_share: CPU time of a worker's other threads, as a share of its batch time.
        worker_threads: Threads in a worker.
        run_delay_share: Share of a worker's batch time spent waiting for a CPU.
        slow_batch_factor: The slowest batches (99th percentile) over the median, inside workers.
        handover_s: Seconds to get a batch that stands ready.
        blocked_share: Share of the waiting during which a later batch stood ready in the queue.
        one_worker_batch_s: Wall seconds of a batch with a single worker, undisturbed by others.
        worker_mean_batch_s, one_worker_mean_batch_s: The same two as means late in the run, which
            rare long batches raise above the median.
        own_iteration: Whether the loader is of a class that iterates in its own way.
        sampler_s: Choosing the indices of one batch, in the training process.
        storage_share: Share of the bytes read that came from storage, late in the run.
        first_storage_share: The same for the first epoch or the first quarter of the run.
        first_wait_factor: Wait of that first part over the wait of the rest.
        read_bytes_per_sample: Bytes read for one sample.
        opens_per_sample, open_share: Files opened for one sample; share of its time spent opening.
        throttled_share: Share of the scheduler's periods in which the quota held the process back.
        start_method: How workers start.
        open_handle, open_handle_kind: Where in the data set an open file or connection hangs, and what
            it is; `open_handles` is how many there are.
        pickled_bytes, pickling_s: What each worker is sent, and how long pickling it takes.
        worker_growth_batches, main_growth_batches: Batches delivered while the memory of the workers,
            or of the training process, was read.
        worker_growth_goes_on, main_growth_goes_on: Whether they grew in every part of the run.
        worker_uss_growth_bytes, worker_rss_growth_bytes: Growth of the workers in that time.
        worker_growth_levels_off: Whether that growth was ending.
        main_uss_growth_bytes: Growth of the training process in that time.
        is_stream: Whether the data set is an iterable one.
        shares_out: Whether each of several workers gets samples of its own; None where not told.
        epoch_batches_seen: Batches seen over batches of an epoch.
        queue_bytes: Bytes of batches that may be queued.
        rank_waits_s: Mean wait of a step on each rank of a distributed job, in order of ranks.
        utilization_percent: Mean GPU utilisation as NVML gave it; a share of time in which a kernel
            was running, not of capacity.
        dropped_settings: Wished settings that the combination does not allow: name -> reason.
        reasons: Why a figure is None: name -> reason.
    """

    steps: int = 0
    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    multiprocessing_context: str | None = None
    wait_share: float | None = None
    transfer_share: float | None = None
    step_share: float | None = None
    other_share: float | None = None
    spike_share: float | None = None
    period_s: float | None = None
    wait_s: float | None = None
    step_s: float | None = None
    replay_step_s: float | None = None
    replay_noise: float | None = None
    step_cpu_s: float | None = None
    alone_period_s: float | None = None
    startup_s: float | None = None
    epoch_restart_s: float | None = None
    steps_per_epoch: int | None = None
    promised_steps: int | None = None
    cpu_s: float | None = None
    sample_wait_s: float | None = None
    send_s: float | None = None
    collate_s: float | None = None
    sample_wall_s: float | None = None
    sample_cpu_s: float | None = None
    slow_sample_factor: float | None = None
    worker_batch_s: float | None = None
    batch_bytes: int | None = None
    tensors_per_batch: int | None = None
    top_stage: str | None = None
    top_stage_share: float | None = None
    extra_cpu_share: float | None = None
    worker_threads: int | None = None
    run_delay_share: float | None = None
    slow_batch_factor: float | None = None
    blocked_share: float | None = None
    handover_s: float | None = None
    one_worker_batch_s: float | None = None
    worker_mean_batch_s: float | None = None
    one_worker_mean_batch_s: float | None = None
    own_iteration: bool | None = None
    sampler_s: float | None = None
    storage_share: float | None = None
    first_storage_share: float | None = None
    first_wait_factor: float | None = None
    read_bytes_per_sample: float | None = None
    opens_per_sample: float | None = None
    open_share: float | None = None
    throttled_share: float | None = None
    start_method: str | None = None
    open_handle: str | None = None
    open_handle_kind: str | None = None
    open_handles: int | None = None
    pickled_bytes: int | None = None
    pickling_s: float | None = None
    worker_growth_batches: int | None = None
    worker_growth_goes_on: bool | None = None
    main_growth_batches: int | None = None
    main_growth_goes_on: bool | None = None
    worker_uss_growth_bytes: int | None = None
    worker_rss_growth_bytes: int | None = None
    worker_growth_levels_off: bool | None = None
    main_uss_growth_bytes: int | None = None
    epoch_batches_seen: float | None = None
    replaced_loaders: int | None = None
    is_stream: bool | None = None
    shares_out: bool | None = None
    queue_bytes: int | None = None
    rank_waits_s: tuple[float, ...] | None = None
    utilization_percent: float | None = None
    dropped_settings: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """Read evidence that `to_dict` wrote; names it does not know are left out."""
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def with_timing(self, timing: LoaderTiming) -> Evidence:
        """Add what a run of the real loop showed."""
        seen: dict[str, Any] = {
            "steps": timing.steps,
            "wait_share": timing.wait_share,
            "transfer_share": timing.transfer_share,
            "step_share": timing.step_share,
            "other_share": timing.other_share,
            "spike_share": timing.spike_share,
            "period_s": timing.period_s,
            "wait_s": float(timing.wait_s.mean()),
            "step_s": float(timing.step_s.mean()),
            "startup_s": timing.startup_s,
            "epoch_restart_s": timing.epoch_restart_s,
            "steps_per_epoch": timing.steps_per_epoch,
            "batch_size": round(float(np.median(timing.samples))),
            "first_wait_factor": timing.first_wait_factor,
        }
        if (workers := timing.workers) is not None:
            seen |= {
                "worker_batch_s": workers.batch_s,
                "worker_mean_batch_s": workers.mean_batch_s,
                "worker_threads": workers.threads,
                **_top_stage(workers.stages),
                **{name: getattr(workers, name) for name in FROM_WORKERS},
            }
        if (observed := timing.observed) is not None:
            seen |= {
                name: getattr(observed, name)
                for name in ("blocked_share", "handover_s", "sampler_s")
            }
            if (growth := observed.worker_growth) is not None:
                seen |= {
                    "worker_uss_growth_bytes": growth.uss_bytes,
                    "worker_rss_growth_bytes": growth.rss_bytes,
                    "worker_growth_levels_off": growth.levels_off,
                    "worker_growth_batches": growth.batches,
                    "worker_growth_goes_on": growth.goes_on,
                }
            if (growth := observed.main_growth) is not None:
                seen |= {
                    "main_uss_growth_bytes": growth.uss_bytes,
                    "main_growth_batches": growth.batches,
                    "main_growth_goes_on": growth.goes_on,
                }
        return replace(self.with_settings(timing.settings), **seen)

    def with_settings(self, settings: LoaderSettings | None) -> Evidence:
        """Add how the loader is set, where it is known."""
        if settings is None:
            return self
        names = (
            *("num_workers", "pin_memory", "persistent_workers", "prefetch_factor"),
            *("in_order", "multiprocessing_context"),
        )
        return replace(self, **{name: getattr(settings, name) for name in names})

    def with_profile(self, profile: SampleProfile, costs: BatchCosts) -> Evidence:
        """Add what a sample and a batch cost."""
        stage, share = profile.top_stage
        if self.top_stage is not None and self.top_stage_share is not None:
            stage, share = self.top_stage, self.top_stage_share  # as seen inside the workers
        return replace(
            self,
            top_stage=stage,
            top_stage_share=share,
            sample_wall_s=profile.sample_wall_s,
            sample_cpu_s=profile.sample_cpu_s,
            slow_sample_factor=_tail(profile.wall_s),
            collate_s=self.collate_s if self.collate_s is not None else profile.collate_s,
            batch_bytes=costs.batch_bytes,
            queue_bytes=self.settings.queued_batches * costs.batch_bytes,
            tensors_per_batch=profile.tensors_per_batch,
            cpu_s=costs.cpu_s,
            sample_wait_s=costs.wait_s,
            send_s=costs.send_s,
        )

    @property
    def costs(self) -> BatchCosts | None:
        """What a batch costs, for the model; None where it was not measured."""
        if self.cpu_s is None or self.batch_size is None:
            return None
        return BatchCosts(
            cpu_s=self.cpu_s,
            wait_s=self.sample_wait_s or 0.0,
            send_s=self.send_s or 0.0,
            batch_size=self.batch_size,
            batch_bytes=self.batch_bytes or 0,
            tensors=self.tensors_per_batch or 1,
            step_cpu_s=self.step_cpu_s or 0.0,
            handover_s=self.handover_s or 0.0,
        )

    @property
    def settings(self) -> LoaderSettings:
        """The loader's settings as far as they are known; the batch size is left open."""
        return LoaderSettings.cleaned(
            num_workers=self.num_workers or 0,
            pin_memory=bool(self.pin_memory),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=bool(self.persistent_workers),
            in_order=self.in_order is not False,
            multiprocessing_context=self.multiprocessing_context,
        ).settings

    def summary(self) -> str:
        """How much was measured."""
        known = sum(1 for f in fields(self) if getattr(self, f.name) is not None)
        return f"{known} of {len(fields(self))} figures known, over {self.steps} steps"


def _tail(seconds: np.ndarray) -> float | None:
    median = float(np.median(seconds)) if len(seconds) else 0.0
    return float(seconds.max()) / median if median > 0 else None


def _top_stage(stages: pd.DataFrame | None) -> dict[str, Any]:
    if stages is None:
        return {}
    stage, share = dearest(stages)
    return {"top_stage": stage, "top_stage_share": share}
