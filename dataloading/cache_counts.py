"""Counting hits and misses of a cache over all processes that use it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import psutil

from dataloading.results import Result, format_bytes, format_count, format_share

ROWS = 512  # processes that can count at the same time
OWNER, HIT, MISS, NO_ROOM, MISFIT, NOT_WRITTEN = range(6)  # columns of a row
COLUMNS = 6
FULL, EXAMPLE = 0, 1  # columns of the first row: the storage is full; 1 + number of a misfit
TABLE_BYTES = (ROWS + 1) * COLUMNS * 8
REASONS = {
    NO_ROOM: "no room",
    MISFIT: "another shape or type than the first sample",
    NOT_WRITTEN: "could not be written",
}


@dataclass(frozen=True, repr=False, eq=False)
class CacheCounts(Result):
    """How full a cache is, and how often it had what was asked for.

    Attributes:
        samples: Samples of the data set.
        slots: Samples that there is room for, the first ones.
        cached: Samples that are kept now.
        cached_bytes: What they take, with what is kept about them.
        needed_bytes: What all samples of the data set would take.
        limited_by: What allowed no more slots; None where there is room for all samples.
        hits: Reads that the cache answered, in all processes, since `reset_counts()`.
        misses: Reads that went to the data set and were kept.
        uncached_because: Reads that went to the data set and were not kept, by reason.
        misfit_example: Number of a sample of another shape or type than the first one, or None.
    """

    derived: ClassVar[tuple[str, ...]] = ("uncached", "hit_share")

    samples: int
    slots: int
    cached: int
    cached_bytes: int
    needed_bytes: int
    limited_by: str | None
    hits: int
    misses: int
    uncached_because: dict[str, int] = field(default_factory=dict)
    misfit_example: int | None = None

    @property
    def uncached(self) -> int:
        """Reads that went to the data set and were not kept."""
        return sum(self.uncached_because.values())

    @property
    def hit_share(self) -> float | None:
        """Hits as a share of all reads; None before the first."""
        reads = self.hits + self.misses + self.uncached
        return self.hits / reads if reads else None

    def summary(self) -> str:
        """How full, how often hit, and what is passed by."""
        rate = (
            "not read yet" if self.hit_share is None else f"hit rate {format_share(self.hit_share)}"
        )
        size = format_bytes(self.cached_bytes)
        if self.cached < self.samples:
            size += f" of {format_bytes(self.needed_bytes)}"
        text = f"{self.cached:,} of {format_count(self.samples, 'sample')} cached, {size}, {rate}"
        if self.limited_by is not None:
            text += f"; room for the first {self.slots:,} only ({self.limited_by})"
        others = {r: n for r, n in self.uncached_because.items() if r != REASONS[NO_ROOM]}
        if others:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in others.items())
            text += f"; reads that were not kept: {reasons}"
        if self.misfit_example is not None:
            text += f" (such as sample {self.misfit_example})"
        return text

    def rows(self) -> list[tuple[str, Any]]:
        """Name and value of each line in the notebook table."""
        return [
            *(row for row in super().rows() if row[0] != "misfit_example"),
            *((f"uncached: {reason}", count) for reason, count in self.uncached_because.items()),
        ]

    def __repr__(self) -> str:
        return f"CachedDataset: {self.summary()}"


class SharedCounts:
    """A table of counts in shared memory or a file; each process writes to a row of its own.

    Args:
        table: int64, shape (ROWS + 1, COLUMNS); the first row holds notes of the whole cache.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self._process: int | None = None
        self._row = 0
        self._lock = threading.Lock()

    def add(self, column: int, count: int = 1) -> None:
        """Count in this process's row."""
        if self._process != os.getpid():
            self.claim_row()
        with self._lock:
            self.table[self._row, column] += count

    def claim_row(self) -> None:
        """Take a row that is free, or whose process has ended (its counts stay).

        Where to begin looking follows from the number of the process, so that two processes look
        at the same row at the same moment only if 512 others began between them.
        """
        process = os.getpid()
        for step in range(ROWS):
            row = 1 + (process + step) % ROWS
            owner = int(self.table[row, OWNER])
            if not owner or (owner != process and not psutil.pid_exists(owner)):
                break
        self.table[row, OWNER] = process
        self._row = row
        self._lock = threading.Lock()  # a lock that was forked may be held for ever
        self._process = process

    def release_row(self) -> None:
        """Give the row back; its counts stay."""
        if self._process == os.getpid():
            self.table[self._row, OWNER] = 0
            self._process = None

    def totals(self) -> np.ndarray:
        """Counts of all processes by column; int64, shape (COLUMNS,)."""
        return self.table[1:].sum(axis=0)

    @property
    def is_in_use(self) -> bool:
        """Whether a living process has a row."""
        owners = self.table[1:, OWNER]
        return any(psutil.pid_exists(int(owner)) for owner in owners[owners > 0])
