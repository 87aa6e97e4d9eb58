"""Which sample each worker is at, and how one failed: word that outlives a worker that does not answer."""

from __future__ import annotations

import contextlib
import json
import operator
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IDLE = -1
NOT_A_NUMBER = -2  # an index that is no whole number: the sample cannot be named


@dataclass(frozen=True)
class Stuck:
    """A worker that has been at one sample for a while."""

    worker: int
    index: int | None
    seconds: float


@dataclass(frozen=True)
class Failed:
    """An exception of the data set or, when collating, of the collate function.

    Class, text, sample, worker, and the line it came from.
    """

    error: str
    message: str
    index: int | str | None
    worker: int
    where: str
    collating: bool = False


class Progress:
    """A small file with one entry per worker, and a second one for a failure."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = path
        self.workers = workers
        self._open: memoryview | None = None
        entries = np.memmap(path, dtype="i8", mode="w+", shape=(workers, 2))
        entries[:, 0] = IDLE
        entries.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "workers": self.workers, "_open": None}

    def _entries(self) -> memoryview:
        """Index and begin of each worker in turn; a view, because writing to an array is slow."""
        if self._open is None:
            shape = (2 * self.workers,)
            self._open = np.memmap(self.path, dtype="i8", mode="r+", shape=shape).data
        return self._open

    def begin(self, worker: int, index: Any) -> None:
        """A worker begins with a sample."""
        entries, place = self.entry(worker)
        entries[place + 1] = time.perf_counter_ns()
        entries[place] = as_number(index)

    def entry(self, worker: int) -> tuple[memoryview, int]:
        """Where a worker's index is kept: a view, and a place; its begin (ns) comes next to it."""
        return self._open or self._entries(), 2 * (worker % self.workers)

    def end(self, worker: int) -> None:
        """The sample is there."""
        entries, place = self.entry(worker)
        entries[place] = IDLE

    def fail(self, worker: int, index: Any, error: Exception, *, collating: bool = False) -> None:
        """A sample, or putting a batch together, raised; what is written first is kept."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = f"{Path(last[0].filename).name}, line {last[0].lineno}" if last else "unknown"
        failed = {
            "error": type(error).__name__,
            "message": _text(error),
            "index": _told(index),
            "worker": worker,
            "where": where,
            "collating": collating,
        }
        with contextlib.suppress(OSError), open(self._failure, "x", encoding="utf-8") as file:
            json.dump(failed, file)

    @property
    def _failure(self) -> Path:
        return self.path.with_suffix(".failure")

    def stuck(self) -> list[Stuck]:
        """Workers that are at a sample now, the one that began first in front."""
        now = time.perf_counter_ns()
        entries = np.array(self._entries()).reshape(self.workers, 2)
        found = [
            Stuck(worker, int(index) if index >= 0 else None, (now - int(begun)) / 1e9)
            for worker, (index, begun) in enumerate(entries)
            if index != IDLE
        ]
        return sorted(found, key=lambda one: -one.seconds)

    def failed(self) -> Failed | None:
        """How a sample failed, or None."""
        try:
            return Failed(**json.loads(self._failure.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):  # none, or half written
            return None

    def remove(self) -> None:
        """Delete the files."""
        self._open = None
        self.path.unlink(missing_ok=True)
        self._failure.unlink(missing_ok=True)


def _told(index: Any) -> int | str | None:
    """An index as it goes into a file: a number, the text of a key, or None for no sample."""
    if index is None:
        return None
    return number if (number := as_number(index)) >= 0 else repr(index)


def as_number(index: Any) -> int:
    """An index as a whole number, whatever its type (int, NumPy, a tensor), where it is one."""
    try:
        number = operator.index(index)
    except TypeError:  # a key, or the indices of a whole batch
        return NOT_A_NUMBER
    return number if 0 <= number < 2**63 else NOT_A_NUMBER


def _text(error: Exception) -> str:
    """What an exception says; some cannot even be printed."""
    try:
        return str(error)
    except Exception:  # the exception's own code
        return "its text cannot be read"
