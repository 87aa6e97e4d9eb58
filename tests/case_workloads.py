"""Data sets of the cases of failures, storage and order, in a module of their own for any worker."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from faulty_workloads import Blobs
from torch.utils.data import DataLoader, Dataset

from dataloading import memory
from dataloading.evidence import Evidence
from dataloading.preflight_rules import check_dataloader
from dataloading.timing import measure_dataloader

MEGAPIXEL = 1_000_000


@contextmanager
def held_by_a_thread(lock: threading.Lock) -> Iterator[None]:
    """Have another thread hold a lock, which a fork copies in that state."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


class TakesALock(Blobs):
    """Samples of more than so many pixels take a lock, as libraries do that use threads for them."""

    def __init__(self, pixels: list[int], largest_without: int = 0) -> None:
        super().__init__(len(pixels))
        self.pixels, self.largest_without = pixels, largest_without
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pixels[index] > self.largest_without:
            with self.lock:
                return super().__getitem__(index)
        return super().__getitem__(index)


class CannotBeRebuilt(Blobs):
    """Can be pickled, and not unpickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("the data base is not here")


def report_kept_batches() -> None:
    """Run loops that keep batches in three ways under a low limit of open files.

    For a process of its own, whose limit it lowers; prints a JSON line for each way.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    for keep in (lambda batch: batch, lambda batch: batch.numpy(), lambda batch: batch.clone()):
        kept: list[Any] = []
        loader = DataLoader(
            Blobs(4000, (2,)), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        told: dict[str, Any] = {"found": None}
        try:
            measure_dataloader(
                loader,
                lambda batch: kept.append(keep(batch)),  # noqa: B023
                seconds=30.0,
                max_steps=2000,
                progress=False,
            )
        except (RuntimeError, OSError) as error:
            told["found"] = error.finding.to_dict()  # type: ignore[attr-defined]
        told |= {"kept": len(kept), "children": len(multiprocessing.active_children())}
        print(json.dumps(told))


class OneSlow(Blobs):
    """Samples that take a moment, and one that takes long."""

    def __init__(self, count: int, slow_index: int, slow_s: float, usual_s: float) -> None:
        super().__init__(count)
        self.slow_index, self.slow_s, self.usual_s = slow_index, slow_s, usual_s

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow_s if index == self.slow_index else self.usual_s)
        return super().__getitem__(index)


# ---- starts, memory -----------------------------------------------------------------------------


class SetsUp:
    """A worker_init_fn that takes its time, and counts how often it is called in all workers."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = multiprocessing.Value("i", 0)

    def __call__(self, worker_id: int) -> None:
        time.sleep(self.seconds)
        with self.calls:
            self.calls.value += 1


class Names(Dataset):
    """Names, some at a time, from a list of strings or from a packed array."""

    def __init__(self, names: list[str] | np.ndarray, each: int) -> None:
        self.names, self.each = names, each

    def __len__(self) -> int:
        return len(self.names) // self.each

    def __getitem__(self, index: int) -> torch.Tensor:
        some = self.names[index * self.each : (index + 1) * self.each]
        if isinstance(some, np.ndarray):
            return torch.tensor(int(np.char.str_len(some).sum()))
        return torch.tensor(sum(map(len, some)))


def report_names() -> None:
    """Go twice through many names, as a list and packed, with four forked workers that stay.

    For a process of its own, whose memory is still new; prints a JSON line for each.
    """
    memory.READ_EVERY_S, memory.MOST_OF_THE_TIME = 0.02, 1e9  # after every few batches
    names = [f"image {number} of a long list.jpg" for number in range(400_000)]
    held_bytes = sum(map(sys.getsizeof, names)) + sys.getsizeof(names)
    for held in (names, np.array(names, dtype="S")):
        loader = DataLoader(
            Names(held, 2000),
            batch_size=4,
            shuffle=True,
            num_workers=4,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        before = [found.to_dict() for found in check_dataloader(loader, spawn_check=False)]
        seen = measure_dataloader(loader, seconds=60.0, max_steps=2 * len(loader), progress=False)
        told = {"held_bytes": held_bytes, "before": before}
        print(json.dumps(told | {"evidence": Evidence().with_timing(seen).to_dict()}))
