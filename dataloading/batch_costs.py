"""What one batch costs, whoever prepares it: the numbers that the model predicts from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dataloading.profiling import SampleProfile
from dataloading.results import Result, format_seconds, format_share
from dataloading.worker_costs import WorkerCosts

PROFILE_ERROR = 0.09  # standard error of costs seen in one process, for a run with workers


@dataclass(frozen=True, repr=False, eq=False)
class BatchCosts(Result):
    """What one batch costs; seconds unless the name says otherwise.

    Attributes:
        cpu_s: CPU work: fetching, collating and sending.
        wait_s: Waiting, for example for a disk.
        send_s: CPU work that is paid only with workers: handing the batch over.
        batch_size: Samples in the batch.
        batch_bytes: Bytes of its tensors.
        tensors: Tensors in it.
        step_cpu_s: CPU work of the train step, over all its threads.
        handover_s: What the training process pays to get a batch that stands ready.
        cycle_s: What one worker, alone, needs from one batch to the next; None where it was not
            measured, and is put together from the parts.
        alone_s: The same for the training process without workers.
        fixed_s: The part of `cycle_s` that does not grow with the batch size.
        crowding: How many times longer a batch takes when all CPUs prepare batches (shared caches,
            memory and hyper-threads).
        crowd: With how many workers that was measured; 0 where it was not.
        saturated_s: From one batch to the next with twice as many workers, where these are busy
            rather than waiting: they use what the others leave idle. None where not measured.
        batch_factors: Batch times over their mean, in the order they came; shape (batches,).
        worker_bytes: Private memory of a worker that has loaded some batches; None where unknown.
        start_method: How the workers started that these costs were seen in.
        cpus: Usable CPUs where they were seen; None where unknown.
        error_share: Standard error of these costs, as a share.
    """

    cpu_s: float
    wait_s: float
    send_s: float
    batch_size: int
    batch_bytes: int
    tensors: int
    step_cpu_s: float = 0.0
    handover_s: float = 0.0
    cycle_s: float | None = None
    alone_s: float | None = None
    fixed_s: float = 0.0
    crowding: float = 1.0
    crowd: int = 0
    saturated_s: float | None = None
    batch_factors: np.ndarray | None = None
    worker_bytes: int | None = None
    start_method: str | None = None
    cpus: float | None = None
    error_share: float = PROFILE_ERROR

    @classmethod
    def of(
        cls, profile: SampleProfile, workers: WorkerCosts | None = None, step_cpu_s: float = 0.0
    ) -> BatchCosts:
        """Costs from a profile; CPU work as seen inside the workers, where it was measured."""
        size = profile.batch_size
        cpu_s = profile.sample_cpu_s * size + profile.collate_s
        if workers is not None and workers.samples > 0:
            cpu_s = (workers.fetch_cpu_s + workers.collate_cpu_s) * size / workers.samples
        return cls(
            cpu_s=cpu_s,
            wait_s=profile.sample_wait_s * size,
            send_s=profile.transfer_s or 0.0,
            batch_size=size,
            batch_bytes=profile.batch_bytes,
            tensors=profile.tensors_per_batch,
            step_cpu_s=step_cpu_s,
        )

    def for_batch_size(self, batch_size: int | None) -> BatchCosts:
        """The same work for another batch size; the train step's share is left as it is.

        The more samples in a batch, the less batches differ: their spread falls with the root.
        """
        if batch_size is None or batch_size == self.batch_size:
            return self
        factor = batch_size / self.batch_size
        spread = self.batch_factors
        return replace(
            self,
            cpu_s=self.cpu_s * factor,
            wait_s=self.wait_s * factor,
            send_s=self.send_s * factor,
            batch_size=batch_size,
            batch_bytes=int(self.batch_bytes * factor),
            cycle_s=self._grown(self.cycle_s, factor),
            alone_s=self._grown(self.alone_s, factor),
            saturated_s=self._grown(self.saturated_s, factor),
            batch_factors=None if spread is None else 1 + (spread - 1) / np.sqrt(max(1, factor)),
        )

    def _grown(self, seconds: float | None, factor: float) -> float | None:
        """A time of a batch for so many times as many samples; the fixed part stays."""
        if seconds is None:
            return None
        fixed = min(1.0, self.fixed_s / self.cycle_s) if self.cycle_s else 0.0
        return seconds * (fixed + (1 - fixed) * factor)

    @property
    def batch_s(self) -> float:
        """Seconds that one worker, undisturbed, needs for one batch.

        Sending happens in a thread of its own, so it overlaps with waiting, not with computing.
        """
        if self.cycle_s is not None:
            return self.cycle_s
        return self.cpu_s + max(self.wait_s, self.send_s)

    @property
    def cpu_share(self) -> float:
        """Share of a worker's time in which it needs a CPU."""
        return min(1.0, (self.cpu_s + self.send_s) / self.batch_s) if self.batch_s > 0 else 1.0

    def crowding_with(self, workers: int, cpus: float) -> float:
        """How many times longer a batch takes with so many workers on so many CPUs.

        Nothing for one worker; as measured when all CPUs are busy; in between by the CPUs in use.
        """
        if self.crowding <= 1.0 or self.crowd < 2:
            return 1.0
        idle, full, now = (
            min(cpus, n * self.cpu_share) for n in (1, max(2, self.crowd), max(1, workers))
        )
        share = 1.0 if full <= idle else (now - idle) / (full - idle)
        return 1.0 + (self.crowding - 1.0) * float(np.clip(share, 0.0, 1.0))

    def summary(self) -> str:
        """One line."""
        return (
            f"{format_seconds(self.batch_s)} a batch of {self.batch_size}, "
            f"CPU busy {format_share(self.cpu_share)} of it"
        )
