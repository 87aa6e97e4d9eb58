"""Memory of the training process and its workers over time, and what its growth means.

USS is what a process alone holds, RSS what it can reach without a page fault, shared pages included.
Copying shared pages on write raises USS and leaves RSS; keeping new objects raises both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from dataloading.processes import read_memory

READ_EVERY_S = 0.25  # a reading takes 1 to 5 ms a process
SETTLING_READINGS = 2  # the first readings show workers that are still starting
FEWEST_READINGS = 5  # fewer readings show no growth
LEVELLED_SHARE = 0.35  # of the growth of the first half in the second: it is ending


@dataclass(frozen=True)
class Growth:
    """How the memory of some processes grew while a loader ran.

    Attributes:
        uss_bytes, rss_bytes: From the first settled reading to the last, summed over processes.
        uss_per_batch_bytes: The same per batch, in the second half of the run.
        levels_off: Whether the second half grew far less than the first.
        batches: Batches delivered in that time.
        readings: How many readings stand behind it.
    """

    uss_bytes: int
    rss_bytes: int
    uss_per_batch_bytes: float
    levels_off: bool
    batches: int
    readings: int


@dataclass
class MemoryLog:
    """Readings of the main process and of workers, taken between batches."""

    batches: list[int] = field(default_factory=list)
    main: list[tuple[int, int]] = field(default_factory=list)
    workers: list[tuple[int, int]] = field(default_factory=list)
    _next_s: float = 0.0
    _pids: tuple[int, ...] = ()

    def read(self, batch: int, worker_pids: Iterable[int]) -> None:
        """Take a reading when it is time; called after each batch.

        Args:
            batch: Number of batches so far.
            worker_pids: The workers that are alive. Other workers than before start a new log.
        """
        if (now := time.perf_counter()) < self._next_s:
            return
        pids = tuple(worker_pids)
        if pids != self._pids:
            self._pids = pids
            self.batches, self.main, self.workers = [], [], []
        main = read_sum([psutil.Process().pid])
        workers = read_sum(pids)
        self._next_s = now + READ_EVERY_S + 10 * (time.perf_counter() - now)
        if main is None or workers is None:
            return
        self.batches.append(batch)
        self.main.append(main)
        self.workers.append(workers)

    def growth(self, of: str) -> Growth | None:
        """Growth of "main" or "workers"; None with too few readings."""
        return find_growth(np.array(self.batches), np.array(getattr(self, of), dtype=float))


def read_sum(pids: Iterable[int]) -> tuple[int, int] | None:
    """USS and RSS summed over processes; None where one of them cannot be read."""
    uss = rss = 0
    for pid in pids:
        try:
            memory = read_memory(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return None
        if memory.uss_bytes is None or memory.rss_bytes is None:
            return None
        uss, rss = uss + memory.uss_bytes, rss + memory.rss_bytes
    return uss, rss


def find_growth(batches: np.ndarray, memory: np.ndarray) -> Growth | None:
    """Growth in readings of (USS, RSS).

    Args:
        batches: Batches so far at each reading; shape (readings,).
        memory: USS and RSS at each reading; shape (readings, 2).

    Returns:
        A `Growth`, or None with too few readings.

    Example:
        >>> find_growth(np.arange(9), np.outer(np.arange(9), [1000, 0])).levels_off
        False
    """
    if len(batches) < FEWEST_READINGS + SETTLING_READINGS:
        return None
    batches, memory = batches[SETTLING_READINGS:], memory[SETTLING_READINGS:]
    middle = len(batches) // 2
    first, second = memory[middle, 0] - memory[0, 0], memory[-1, 0] - memory[middle, 0]
    count = max(1, int(batches[-1] - batches[middle]))
    per_batch_first = first / max(1, int(batches[middle] - batches[0]))
    return Growth(
        uss_bytes=int(memory[-1, 0] - memory[0, 0]),
        rss_bytes=int(memory[-1, 1] - memory[0, 1]),
        uss_per_batch_bytes=float(second / count),
        levels_off=bool(per_batch_first > 0 and second / count < LEVELLED_SHARE * per_batch_first),
        batches=int(batches[-1] - batches[0]),
        readings=len(batches),
    )


def worker_pids(iterator: Any) -> list[int]:
    """Process ids of the workers behind a `DataLoader` iterator (torch 2.6 to 2.14), else none."""
    workers = getattr(iterator, "_workers", ())
    return [w.pid for w in workers if w.pid is not None and w.is_alive()]
