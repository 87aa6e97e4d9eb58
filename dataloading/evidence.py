"""Everything the rules may know about a training loop, as plain numbers.

Probes fill it; rules read it. It can be saved and replayed: a diagnosis of yesterday's run needs no
loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from dataloading.model import BatchCosts
from dataloading.profiling import SampleProfile
from dataloading.results import Result
from dataloading.settings import LoaderSettings
from dataloading.timing import LoaderTiming

FEWEST_STEPS = 8  # fewer steady steps than this prove nothing


@dataclass(frozen=True, repr=False, eq=False)
class Evidence(Result):
    """What was measured; None where it was not, with the reason in `reasons`.

    Attributes:
        steps: Steady steps of the real run behind the figures.
        num_workers, prefetch_factor, batch_size, pin_memory, persistent_workers: The loader's
            settings; None where it is not a `DataLoader`.
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
        cpu_s, sample_wait_s, send_s: CPU work, waiting and sending of one batch.
        collate_s: Collating one batch, in the workers where it was seen there.
        sample_wall_s, sample_cpu_s: One sample, undisturbed.
        worker_batch_s: Wall seconds of a batch inside a worker, during the run.
        batch_bytes, tensors_per_batch: Size of a batch.
        top_stage, top_stage_share: The dearest stage of a sample and its share of the wall time.
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
    cpu_s: float | None = None
    sample_wait_s: float | None = None
    send_s: float | None = None
    collate_s: float | None = None
    sample_wall_s: float | None = None
    sample_cpu_s: float | None = None
    worker_batch_s: float | None = None
    batch_bytes: int | None = None
    tensors_per_batch: int | None = None
    top_stage: str | None = None
    top_stage_share: float | None = None
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
        settings = timing.settings
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
            "worker_batch_s": timing.workers.batch_s if timing.workers is not None else None,
        }
        if settings is not None:
            seen |= {
                name: getattr(settings, name)
                for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
            }
        return replace(self, **seen)

    def with_profile(self, profile: SampleProfile, costs: BatchCosts) -> Evidence:
        """Add what a sample and a batch cost."""
        top = profile.top_stage
        return replace(
            self,
            top_stage=top[0],
            top_stage_share=top[1],
            sample_wall_s=profile.sample_wall_s,
            sample_cpu_s=profile.sample_cpu_s,
            collate_s=self.collate_s if self.collate_s is not None else profile.collate_s,
            batch_bytes=profile.batch_bytes,
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
        )

    @property
    def settings(self) -> LoaderSettings:
        """The loader's settings as far as they are known; the batch size is left open."""
        return LoaderSettings.cleaned(
            num_workers=self.num_workers or 0,
            pin_memory=bool(self.pin_memory),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=bool(self.persistent_workers),
        ).settings

    def summary(self) -> str:
        """How much was measured."""
        known = sum(1 for f in fields(self) if getattr(self, f.name) is not None)
        return f"{known} of {len(fields(self))} figures known, over {self.steps} steps"
