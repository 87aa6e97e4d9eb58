"""The most memory that a block of code takes: of an accelerator, or else of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from dataloading.memory import read_main

READ_EVERY_S = 0.01  # resident memory, while the block runs
READING_SHARE = 0.1  # of the time, at most, spent on that


class PeakMemory:
    """Measures one block after another.

    Attributes:
        peak_bytes: What the last block took: all that torch had allocated on the accelerator, or
            how far the memory of this process had risen since this object was made. None where it
            cannot be read, as on MPS.
    """

    def __init__(self, accelerator: torch.device | None) -> None:
        self.accelerator = accelerator
        self.peak_bytes: int | None = None
        self._start = read_main()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """A context manager around the block."""
        self.peak_bytes = None
        return self._of_process() if self.accelerator is None else self._of_accelerator()

    @contextlib.contextmanager
    def _of_accelerator(self) -> Iterator[None]:
        counter: Any = getattr(torch, self.accelerator.type)  # type: ignore[union-attr]
        if not hasattr(counter, "max_memory_allocated"):
            yield
            return
        torch.empty(0, device=self.accelerator)  # before it is in use, it counts nothing
        counter.reset_peak_memory_stats(self.accelerator)
        try:
            yield
        finally:
            self.peak_bytes = counter.max_memory_allocated(self.accelerator)

    @contextlib.contextmanager
    def _of_process(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            cost_s = 0.0
            while not stop.wait(max(READ_EVERY_S, cost_s / READING_SHARE)):
                begun = time.perf_counter()
                self._read()
                cost_s = time.perf_counter() - begun

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._read()  # a short block may have been missed

    def _read(self) -> None:
        now = read_main()
        if now is not None and self._start is not None:
            self.peak_bytes = max(self.peak_bytes or 0, now[1] - self._start[1])
