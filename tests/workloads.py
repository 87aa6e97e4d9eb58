"""Datasets, loaders and steps for the tests, in a module of their own so that any worker finds them."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="forks workers, sends signals")
FOREVER_S = 60.0  # longer than any test may take
SETTLED_S = 5.0  # what the project promises: nothing is left after this


def doze(seconds: float) -> None:
    """Sleep in small steps: in a thread, only Python code can be interrupted."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run in another thread; what it returns or raises comes back."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=FOREVER_S)
    return outcome[0]


class Slow(Dataset):
    """`(tensor, index)` after a pause."""

    def __init__(self, count: int = 100, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((3,), float(index)), index


class SlowAt(Slow):
    """The same, with one sample that takes longer."""

    def __init__(self, count: int, index: int, seconds: float) -> None:
        super().__init__(count)
        self.slow_index = index
        self.slow_s = seconds

    def __getitem__(self, index: int) -> Any:
        if index == self.slow_index:
            time.sleep(self.slow_s)
        return super().__getitem__(index)


class Failing(Slow):
    """The same, with one sample that raises."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("broken sample 5")
        return super().__getitem__(index)


class Dozing(Slow):
    """A sample that never comes, in Python code that can be interrupted in any thread."""

    def __getitem__(self, index: int) -> Any:
        doze(FOREVER_S)
        return super().__getitem__(index)


class Touching(Slow):
    """A sample that never comes; a file tells that a worker has begun with it."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        super().__init__(100)
        self.path = path
        self.begin = begin

    def __getitem__(self, index: int) -> Any:
        if index >= self.begin:
            self.path.touch()
            time.sleep(FOREVER_S)
        return super().__getitem__(index)


class Counting(IterableDataset):
    """Numbers, each worker its part; no length."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(first, self.count, step):
            yield torch.tensor([float(number)])


class CountingWithLen(Counting):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.count


class Sharded(IterableDataset):
    """Numbers from `start` on; `give_part` sets it in each worker, as PyTorch's manual shows."""

    def __init__(self, count: int) -> None:
        self.start, self.end = 0, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def give_part(worker_id: int) -> None:
    """Give each worker its part of a `Sharded` dataset."""
    info = get_worker_info()
    assert info is not None
    part = info.dataset.end // info.num_workers
    info.dataset.start, info.dataset.end = worker_id * part, (worker_id + 1) * part


class Batched(Slow):
    """A dataset that fetches a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(Batched, self).__getitem__(index) for index in indices]


class Together(Slow):
    """The same cost per sample, paid once for the whole batch: one pause, one inaccuracy."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self.seconds * len(indices))
        return [(torch.zeros(3), index) for index in indices]


class Random(Slow):
    """Draws from every global random state, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) + random.random() + float(np.random.rand()), index


class Dicts(Slow):
    """Samples that are dicts."""

    def __getitem__(self, index: int) -> Any:
        return {"pixels": torch.zeros(3, 4, 4), "text": f"image {index}"}


@dataclass
class Pair:
    """A batch as a dataclass."""

    inputs: torch.Tensor
    targets: torch.Tensor


def collate_pair(samples: list[Any]) -> Pair:
    """Collate into a dataclass."""
    return Pair(*default_collate(samples))


class SameConstructor(DataLoader):
    """A subclass that can be built again."""


class OwnConstructor(DataLoader):
    """A subclass that cannot."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(Slow(count), batch_size=4, **options)


class InterruptedStart(Slow):
    """Pickles once; the second worker's start is interrupted."""

    starts = 0

    def __getstate__(self) -> dict[str, Any]:
        type(self).starts += 1
        if type(self).starts > 1:
            raise KeyboardInterrupt
        return self.__dict__


def global_state() -> dict[str, Any]:
    """What a probe may not change for good."""
    state = {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": {child.pid for child in multiprocessing.active_children()},
        # ("once" is what sympy adds when an optimizer imports it)
        "filters": [entry for entry in warnings.filters if entry[0] != "once"],
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
    }
    if hasattr(signal, "SIGALRM"):
        state["alarm"] = signal.getsignal(signal.SIGALRM)
        state["timer running"] = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    return state


def random_state() -> list[Any]:
    """Every global random state, comparable."""
    name, keys, *rest = np.random.get_state()
    return [random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()]


def leaves_nothing() -> Iterator[None]:
    """Body of a fixture: after the test, no process, thread, alarm or global state is left over."""
    before = global_state()
    yield
    deadline = time.monotonic() + SETTLED_S
    while (after := global_state()) != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread of a closed queue ends a moment later
    changed = {name: (before[name], after[name]) for name in before if after[name] != before[name]}
    assert not changed, changed


def nap(value: Any) -> Any:
    """A transform that waits."""
    time.sleep(0.004)
    return value


class Burn:
    """A transform that computes."""

    def __call__(self, value: Any) -> Any:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return value


class Chain:
    """Transforms one after another, as torchvision's Compose holds them."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Staged(Dataset):
    """Samples that go through two named stages."""

    def __init__(self, count: int = 240) -> None:
        self.count = count
        self.transform = Chain([nap, Burn()])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return self.transform(index)


class StagedTogether(Staged):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.transform(index) for index in indices]


class StagedStream(IterableDataset):
    """The same as a stream."""

    def __init__(self, count: int = 240) -> None:
        self.count = count
        self.transform = Chain([nap, Burn()])

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            yield self.transform(number)


class Unwrappable(Staged):
    """Works only with its own transform, and not with one that was wrapped."""

    def __getitem__(self, index: int) -> int:
        if type(self.transform.transforms[0]).__name__ != "function":
            raise RuntimeError("somebody touched my transform")
        return super().__getitem__(index)
