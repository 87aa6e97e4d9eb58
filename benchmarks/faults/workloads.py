"""Data sets, samplers and train steps that carry a fault; importable, so that spawn works."""

from __future__ import annotations

import mmap
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from benchmarks.faults.mechanisms import BURNS, burn, wait


class Sized(Dataset):
    """A data set of so many samples."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Costly(Sized):
    """Each sample waits and burns; one batch in `every` takes `factor` times as long."""

    def __init__(
        self,
        size: int,
        *,
        wait_s: float = 0.0,
        burn_s: float = 0.0,
        waits: str = "sleep",
        burns: str = "Python",
        shape: tuple[int, ...] = (3, 16, 16),
        every: int = 0,
        factor: float = 1.0,
        batch: int = 8,
    ) -> None:
        super().__init__(size)
        self.wait_s, self.burn_s, self.waits, self.burns = wait_s, burn_s, waits, burns
        self.shape, self.every, self.factor, self.batch = shape, every, factor, batch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        slow = self.every and (index // self.batch) % self.every == self.every - 1
        factor = self.factor if slow else 1.0
        if self.wait_s:
            wait(self.wait_s * factor, self.waits)
        if self.burn_s:
            burn(self.burn_s * factor, self.burns)
        return torch.zeros(self.shape), index


class Tiny(Sized):
    """Samples of next to no work, as tensors, arrays or plain numbers."""

    def __init__(self, size: int, kind: str, width: int) -> None:
        super().__init__(size)
        self.kind = kind
        self.rows = np.zeros((size, width), dtype=np.float32)
        self.tensors = torch.from_numpy(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.kind == "tensor":
            return self.tensors[index]
        return self.rows[index] if self.kind == "array" else index


class ManyTensors(Sized):
    """Many small tensors in a dict, a list, or dicts within a dict."""

    def __init__(self, size: int, tensors: int, kind: str = "dict") -> None:
        super().__init__(size)
        self.tensors, self.kind = tensors, kind

    def __getitem__(self, index: int) -> Any:
        fields = {f"field{n}": torch.full((4,), index) for n in range(self.tensors)}
        if self.kind == "list":
            return list(fields.values())
        if self.kind == "nested":
            return {name: {"value": value} for name, value in fields.items()}
        return fields


def _record(kind: str, number: int) -> Any:
    if kind == "tuple":
        return (f"row {number}", float(number))
    if kind == "text":
        return f"row {number} of a longer text"
    return {"name": f"row {number}", "value": float(number)}


class Records(Sized):
    """Metadata in a list of Python objects, all of which are read."""

    def __init__(self, size: int, rows: int, kind: str = "dict") -> None:
        super().__init__(size)
        self.rows = [_record(kind, number) for number in range(rows)]

    def __getitem__(self, index: int) -> torch.Tensor:
        part = len(self.rows) // self.size
        rows = self.rows[index * part : (index + 1) * part]
        return torch.tensor(sum(len(row) for row in map(_parts, rows)))


def _parts(row: Any) -> list[Any]:
    """What a record holds: all of it is touched."""
    return list(row.values()) if isinstance(row, dict) else list(row)


EVERYTHING_SEEN: dict[int, np.ndarray] = {}  # a cache of the module, as people have them


class Keeping(Sized):
    """Keeps something of every sample for good: in a list, a dict, or a global of the module."""

    def __init__(self, size: int, kept_bytes: int, kind: str = "list") -> None:
        super().__init__(size)
        self.kept_bytes, self.kind = kept_bytes, kind
        self.kept: dict[int, np.ndarray] | list[np.ndarray] = [] if kind == "list" else {}

    def __getitem__(self, index: int) -> torch.Tensor:
        more = np.ones(self.kept_bytes, dtype=np.uint8)
        if self.kind == "global":
            EVERYTHING_SEEN[len(EVERYTHING_SEEN)] = more
        elif isinstance(self.kept, list):
            self.kept.append(more)
        else:
            self.kept[len(self.kept)] = more
        wait(0.001)
        return torch.zeros(16)


class Searching(Dataset):
    """Looks every sample up by searching through all of them."""

    def __init__(self, size: int, kind: str = "index") -> None:
        self.names = [f"sample {i}" for i in range(size)]
        self.kind = kind
        self.numbers = np.arange(size)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        if self.kind == "filter":
            found = [n for n, name in enumerate(self.names) if name == f"sample {index}"]
            return found.pop()
        if self.kind == "sort":
            return int(np.sort(self.numbers[::-1])[index])
        return self.names.index(f"sample {index}")


class Locked(Sized):
    """All workers share one lock, held while a sample is fetched."""

    def __init__(self, size: int, held_s: float, lock: Any, waits: str = "sleep") -> None:
        super().__init__(size)
        self.held_s, self.lock, self.waits = held_s, lock, waits

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            wait(self.held_s, self.waits)
        return torch.zeros(16)


class Copies(IterableDataset):
    """Every worker goes through all of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Shares(Copies):
    """Every worker goes through its own part."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(first, self.size, step))


class SlowDraw(Sampler):
    """Draws each index anew over all weights: with torch, with NumPy, or in Python."""

    def __init__(self, size: int, draws: int, kind: str = "torch") -> None:
        self.draws, self.kind = draws, kind
        self.weights = torch.ones(size)
        self.array = np.ones(size) / size
        self.plain = [1.0] * (size // 20)  # Python is slower

    def __len__(self) -> int:
        return self.draws

    def __iter__(self):
        for _ in range(self.draws):
            yield self.draw() % self.draws

    def draw(self) -> int:
        """One index."""
        if self.kind == "NumPy":
            return int(np.random.default_rng().choice(len(self.array), p=self.array))
        if self.kind == "Python":
            total = sum(weight * number for number, weight in enumerate(self.plain))
            return int(total) + int(torch.randint(10_000, ()))
        return int(torch.multinomial(self.weights, 1))


class StartSlowly:
    """A worker_init_fn that takes its time, waiting or computing."""

    def __init__(self, seconds: float, kind: str = "wait") -> None:
        self.seconds, self.kind = seconds, kind

    def __call__(self, worker_id: int) -> None:
        (burn if self.kind == "burn" else wait)(self.seconds)


class ManyThreads(Sized):
    """Each sample computes on several threads: torch's own, or those of a pool."""

    def __init__(self, size: int, kind: str, side: int, rounds: int) -> None:
        super().__init__(size)
        self.kind, self.rounds, self.matrix = kind, rounds, torch.rand(side, side)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "torch":
            result = self.matrix
            for _ in range(self.rounds):
                result = torch.mm(result, self.matrix) * 1e-3
            return result[:4, :4].clone()
        return torch.full((4, 4), float(sum(compute_in_threads(self.rounds))))


POOLS: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not live on in a forked one


def compute_in_threads(rounds: int) -> list[int]:
    """Hash on eight threads, as many native libraries do, and wait for all of them."""
    pool = POOLS.setdefault(os.getpid(), ThreadPoolExecutor(8))
    return list(pool.map(_hash, [rounds] * 8))


def _hash(rounds: int) -> int:
    for _ in range(rounds):
        BURNS["hashlib"]()
    return rounds


def eight_threads(worker_id: int) -> None:
    """A worker_init_fn that asks for more threads than there are cores."""
    torch.set_num_threads(8)


class Logging:
    """A train step that now and then does other work: it writes a log, or waits for a server."""

    def __init__(self, step: Any, seconds: float, every: int, kind: str = "burn") -> None:
        self.step, self.seconds, self.every, self.kind, self.calls = step, seconds, every, kind, 0

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        self.calls += 1
        if self.calls % self.every == 0:
            (burn if self.kind == "burn" else wait)(self.seconds)


class KeepingStep:
    """A train step that keeps what it was given or made: in a list, a queue or a chain."""

    def __init__(self, step: Any, kept_bytes: int, kind: str = "list") -> None:
        self.step, self.kept_bytes, self.kind = step, kept_bytes, kind
        self.kept: list[torch.Tensor] | deque[torch.Tensor] = [] if kind == "list" else deque()
        self.chain: tuple[Any, ...] = ()

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        more = torch.ones(self.kept_bytes, dtype=torch.uint8)
        if self.kind == "chain":
            self.chain = (more, self.chain)
        else:
            self.kept.append(more)


class KeepingBatches:
    """A train step that keeps every batch it was given, with what each tensor holds open."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.kept: list[Any] = []

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        self.kept.append(batch)


class Files(Sized):
    """A sample is read from one file or several; it may be pushed out of the page cache after.

    Args:
        paths: Files, `per_sample` of them for each sample.
        kind: How they are read: "open", "Path", "descriptor", and page by page as databases do
            "blocks" and "mapped".
        evict_after: Leave nothing of them in the page cache.
    """

    def __init__(
        self,
        paths: list[Path],
        per_sample: int = 1,
        *,
        kind: str = "open",
        evict_after: bool = False,
    ) -> None:
        super().__init__(len(paths) // per_sample)
        self.paths, self.per_sample, self.kind = paths, per_sample, kind
        self.evict_after = evict_after

    def __getitem__(self, index: int) -> torch.Tensor:
        own = self.paths[index * self.per_sample : (index + 1) * self.per_sample]
        total = sum(read_file(path, self.kind) for path in own)
        if self.evict_after:
            for path in own:
                evict(path)
        return torch.tensor(total)


PAGE = 4096


def read_file(path: Path, kind: str) -> int:
    """Read a file; returns a number that depends on it."""
    if kind == "Path":
        return len(path.read_bytes())
    if kind == "open":
        with open(path, "rb") as file:
            return len(file.read())
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        if kind == "descriptor":
            return len(os.read(handle, size))
        if kind == "mapped":
            with mmap.mmap(handle, size, access=mmap.ACCESS_READ) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                return sum(pages[at] for at in range(0, size, PAGE))
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        return sum(len(os.pread(handle, PAGE, at)) for at in range(0, size, PAGE))
    finally:
        os.close(handle)


def evict(path: Path) -> None:
    """Push a file of our own, already written to storage, out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
