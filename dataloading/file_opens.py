"""Counting the files that a worker opens, and estimating what opening them costs."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from statistics import median
from typing import Any

from torch.utils.data import get_worker_info

ONE_IN = 16  # opens for which the cost is measured, by opening the file once more
MEASURED = 32  # of the latest of them, the median counts
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND  # our own records too
SYSTEM_PATHS = ("/proc", "/dev", "/sys")


class OpenCounter:
    """Counts opened files in a worker process; an audit hook of Python tells of each.

    Hooks cannot be taken away again, so none is set in the training process: there the count stays
    unknown (None).
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._measured_ns: deque[int] = deque(maxlen=MEASURED)
        self._measuring = False

    def __getstate__(self) -> dict[str, Any]:
        return {"count": None, "_measured_ns": deque(maxlen=MEASURED), "_measuring": False}

    def begin(self) -> None:
        """Begin to count, where this is a worker; called before the first sample is done."""
        if self.count is None and get_worker_info() is not None:
            self.count = 0
            sys.addaudithook(self._on_event)

    @property
    def cost_ns(self) -> int | None:
        """Nanoseconds that one open takes: the median of those measured, None without any."""
        return int(median(self._measured_ns)) if self._measured_ns else None

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self._measuring or self.count is None:
            return
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not isinstance(flags, int) or flags & WRITING:
            return  # a file that is open already, or one that is written
        if os.fsdecode(path).startswith(SYSTEM_PATHS):
            return
        self.count += 1
        if self.count == 1:
            self._measure(path)  # the first time costs more than an open does
            self._measured_ns.clear()
        elif self.count % ONE_IN == 2:
            self._measure(path)

    def _measure(self, path: str | bytes) -> None:
        self._measuring = True
        try:
            if os.path.isfile(path):
                started = time.perf_counter_ns()
                os.close(os.open(path, os.O_RDONLY))
                self._measured_ns.append(time.perf_counter_ns() - started)
        except (OSError, ValueError):
            pass  # the worker's own call will say what is wrong with it
        finally:
            self._measuring = False
