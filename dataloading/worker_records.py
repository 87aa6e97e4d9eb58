"""Records of batches in a file that workers write and the training process reads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from dataloading.progress_notes import Progress
from dataloading.worker_costs import RECORD, WorkerCosts
from dataloading.worker_stages import StageNotes

SLOTS = 4096  # batches kept per worker; older ones are overwritten


class WorkerRecords:
    """A file of records, one row of slots per worker; opened where it is used."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        handle, name = tempfile.mkstemp(prefix="dataloading-", suffix=".records")
        os.close(handle)
        self.path = Path(name)
        shape = (self.workers, SLOTS)
        np.memmap(self.path, dtype=RECORD, mode="w+", shape=shape).flush()
        self.progress = Progress(self.path.with_suffix(".progress"), self.workers)
        self.stages = StageNotes(self.path.with_suffix(".stages"), self.workers)
        self._open: np.memmap | None = None
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_count": 0}

    def write(self, record: tuple[int, ...]) -> None:
        """Note one batch; called in the worker that made it."""
        row = worker_id() % self.workers
        if self._open is None:
            shape = (self.workers, SLOTS)
            self._open = np.memmap(self.path, dtype=RECORD, mode="r+", shape=shape)
            # behind the records of the worker that had this row in the epoch before
            self._count = int(np.count_nonzero(self._open["ended_ns"][row]))
        self._open[row, self._count % SLOTS] = record
        self._count += 1

    def read(self) -> np.ndarray:
        """The records so far, oldest first; a structured array with one row per batch."""
        shape = (self.workers, SLOTS)
        mapped = np.memmap(self.path, dtype=RECORD, mode="r", shape=shape)
        records = np.array(mapped).ravel()
        del mapped
        records = records[records["ended_ns"] > 0]
        return records[np.argsort(records["ended_ns"])]

    def summary(self) -> WorkerCosts | None:
        """What a batch cost so far; None when no batch was made."""
        costs = WorkerCosts.from_records(self.read())
        if costs is None or not costs.samples:
            return costs
        collate = (costs.collate_s / costs.samples, costs.collate_cpu_s / costs.samples)
        return replace(costs, stages=self.stages.table(*collate))

    def remove(self) -> None:
        """Delete the file."""
        self._open = None
        self.path.unlink(missing_ok=True)
        self.progress.remove()
        self.stages.remove()


def worker_id() -> int:
    """Number of the worker that this process is; 0 in the training process."""
    info = get_worker_info()
    return info.id if info is not None else 0
