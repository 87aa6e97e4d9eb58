"""What the stages of a sample cost inside the workers, from a few samples timed in detail.

A worker times at most one sample a batch, and at most one in 50 ms, on a copy of its data set that
carries clocks, so that looking costs well below 1 %. Sums go to a small file mapped into memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.stages import StageClock, stage_table, with_clocks
from dataloading.watchdog import ProbeTimeout

if TYPE_CHECKING:
    import pandas as pd

EVERY_NS = 50_000_000  # between two samples timed in detail
MOST_STAGES = 30  # distinct names kept; later ones count as the rest
FEWEST_SAMPLES = 5  # fewer say nothing


class StageNotes:
    """Sums of the stages of all workers, in files that the training process reads."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = path
        self.workers = workers
        np.memmap(path, dtype="i8", mode="w+", shape=self._shape).flush()

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Workers, stages (the whole sample first), and count, wall and CPU nanoseconds."""
        return self.workers, 1 + MOST_STAGES, 3

    def open(self, worker: int) -> np.ndarray:
        """The sums of one worker, to be added to."""
        return np.memmap(self.path, dtype="i8", mode="r+", shape=self._shape)[worker % self.workers]

    def _names_file(self, worker: int) -> Path:
        return self.path.with_suffix(f".stages-{worker % self.workers}")

    def names(self, worker: int) -> list[str]:
        """Names of a worker's stages, in the order of their sums."""
        try:
            return json.loads(self._names_file(worker).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # none yet
            return []

    def write_names(self, worker: int, names: list[str]) -> None:
        """Keep the names, complete at any moment."""
        file = self._names_file(worker)
        part = file.with_suffix(f"{file.suffix}.part")
        part.write_text(json.dumps(names), encoding="utf-8")
        os.replace(part, file)

    def table(self, collate_wall_s: float, collate_cpu_s: float) -> pd.DataFrame | None:
        """Mean cost of each stage over all workers.

        Args:
            collate_wall_s, collate_cpu_s: Seconds per sample for putting the batch together.

        Returns:
            A DataFrame as `SampleProfile.stages`, or None when too few samples were timed.
        """
        sums = np.array(np.memmap(self.path, dtype="i8", mode="r", shape=self._shape))
        count, wall_ns, cpu_ns = (int(total) for total in sums[:, 0].sum(axis=0))
        if count < FEWEST_SAMPLES:
            return None
        means: dict[str, tuple[float, float]] = {}
        for worker in range(self.workers):
            for row, name in enumerate(self.names(worker), start=1):
                wall, cpu = means.get(name, (0.0, 0.0))
                own_wall, own_cpu = sums[worker, row, 1:] / count / 1e9
                means[name] = (wall + float(own_wall), cpu + float(own_cpu))
        sample = (wall_ns / count / 1e9, cpu_ns / count / 1e9)
        return stage_table(means, sample, (collate_wall_s, collate_cpu_s))

    def remove(self) -> None:
        """Delete the files."""
        self.path.unlink(missing_ok=True)
        for worker in range(self.workers):
            self._names_file(worker).unlink(missing_ok=True)


class StageWatch:
    """Times a sample in detail now and then, in the worker that prepares it."""

    def __init__(self, notes: StageNotes, worker: int) -> None:
        self.clock = StageClock()
        self.clock.running = False
        self._notes = notes
        self._worker = worker
        self._names = notes.names(worker)
        self._sums = notes.open(worker)
        self._clocked: Any = None
        self._broken = False
        self._due_ns = time.perf_counter_ns() + EVERY_NS  # the first batch pays for start-up

    def is_due(self) -> bool:
        """Whether the next sample may be timed in detail."""
        return not self._broken and time.perf_counter_ns() > self._due_ns

    def fetch(
        self, get: Callable[[Any, Any], Any], dataset: Any, index: Any, samples: int = 1
    ) -> Any:
        """Call `get(dataset, index)` on a copy with clocks; should that fail, on the data set itself."""
        first = self._clocked is None
        try:
            if first:
                self._clocked = with_clocks(dataset, self.clock)
            self.begin()
            item = self.clock.sample(index, lambda: get(self._clocked, index))
        except ProbeTimeout:
            raise
        except Exception:  # the data set's own error comes again below; ours must not be seen
            self._broken = True
            self.clock.running = False
            return get(dataset, index)
        self.end(0 if first else samples)
        return item

    def next(self, samples: Iterator[Any], ended: Any) -> Any:
        """The next sample of a stream that already carries the clocks."""
        self.begin()
        item = self.clock.sample(None, lambda: next(samples, ended))
        self.end(0 if item is ended else 1)
        return item

    def begin(self) -> None:
        """Start the clocks for one sample."""
        self.clock.running = True
        self._due_ns = time.perf_counter_ns() + EVERY_NS

    def end(self, samples: int) -> None:
        """Stop the clocks, and add up what they showed for so many samples."""
        self.clock.running = False
        for seen in self.clock.samples if samples else ():
            self._sums[0] += (samples, seen.wall_ns, seen.cpu_ns)
            for name, times in seen.stages.items():
                if name not in self._names and len(self._names) < MOST_STAGES:
                    self._names.append(name)
                    self._notes.write_names(self._worker, self._names)
                if name in self._names:
                    self._sums[1 + self._names.index(name)] += (samples, *times)
        self.clock.samples.clear()
