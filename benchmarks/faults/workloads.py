"""Data sets, samplers and train steps that carry a fault; importable, so that spawn works."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def burn(seconds: float) -> None:
    """Use the CPU of this thread for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Costly(Dataset):
    """Each sample waits and burns; one batch in `every` takes `factor` times as long."""

    def __init__(
        self,
        size: int,
        *,
        wait_s: float = 0.0,
        burn_s: float = 0.0,
        shape: tuple[int, ...] = (3, 16, 16),
        every: int = 0,
        factor: float = 1.0,
        batch: int = 8,
    ) -> None:
        self.size, self.wait_s, self.burn_s = size, wait_s, burn_s
        self.shape, self.every, self.factor, self.batch = shape, every, factor, batch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        slow = self.every and (index // self.batch) % self.every == self.every - 1
        factor = self.factor if slow else 1.0
        if self.wait_s:
            time.sleep(self.wait_s * factor)
        if self.burn_s:
            burn(self.burn_s * factor)
        return torch.zeros(self.shape), index


class ManyTensors(Dataset):
    """A dict of many small tensors."""

    def __init__(self, size: int, tensors: int) -> None:
        self.size, self.tensors = size, tensors

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"field{n}": torch.full((4,), index) for n in range(self.tensors)}


class Records(Dataset):
    """Metadata in a list of dicts of Python objects, all of which are read."""

    def __init__(self, size: int, rows: int) -> None:
        self.rows = [{"name": f"row {i}", "value": float(i)} for i in range(rows)]
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        part = len(self.rows) // self.size
        rows = self.rows[index * part : (index + 1) * part]
        return torch.tensor(sum(len(row["name"]) + row["value"] for row in rows))


class Keeping(Dataset):
    """Keeps something of every sample for good."""

    def __init__(self, size: int, kept_bytes: int) -> None:
        self.size, self.kept_bytes, self.kept = size, kept_bytes, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(np.ones(self.kept_bytes, dtype=np.uint8))
        time.sleep(0.001)
        return torch.zeros(16)


class Searching(Dataset):
    """Looks every sample up by searching through all of them."""

    def __init__(self, size: int) -> None:
        self.names = [f"sample {i}" for i in range(size)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return self.names.index(f"sample {index}")


class Locked(Dataset):
    """All workers share one lock, held while a sample is fetched."""

    def __init__(self, size: int, held_s: float, lock: Any) -> None:
        self.size, self.held_s, self.lock = size, held_s, lock

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            time.sleep(self.held_s)
        return torch.zeros(16)


class Files(Dataset):
    """Reads files; may push them out of the page cache before or after."""

    def __init__(
        self, paths: list[Path], per_sample: int = 1, *, evict_after: bool = False
    ) -> None:
        self.paths, self.per_sample, self.evict_after = paths, per_sample, evict_after

    def __len__(self) -> int:
        return len(self.paths) // self.per_sample

    def __getitem__(self, index: int) -> torch.Tensor:
        total = 0
        for path in self.paths[index * self.per_sample : (index + 1) * self.per_sample]:
            with open(path, "rb") as file:
                total += len(file.read())
                if self.evict_after:
                    evict(file.fileno())
        return torch.tensor(total)


def evict(descriptor: int) -> None:
    """Push a file of our own out of the page cache."""
    os.fsync(descriptor) if os.access(f"/proc/self/fd/{descriptor}", os.W_OK) else None
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


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
    """Draws each index anew over all weights."""

    def __init__(self, size: int, draws: int) -> None:
        self.weights, self.draws = torch.ones(size), draws

    def __len__(self) -> int:
        return self.draws

    def __iter__(self):
        for _ in range(self.draws):
            yield int(torch.multinomial(self.weights, 1)) % self.draws


class StartSlowly:
    """A worker_init_fn that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker_id: int) -> None:
        time.sleep(self.seconds)


class ManyThreads(Dataset):
    """Each sample multiplies matrices on several threads."""

    def __init__(self, size: int, side: int, products: int) -> None:
        self.size, self.products, self.matrix = size, products, torch.rand(side, side)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        result = self.matrix
        for _ in range(self.products):
            result = torch.mm(result, self.matrix) * 1e-3
        return result[:4, :4].clone()


def eight_threads(worker_id: int) -> None:
    """A worker_init_fn that asks for more threads than there are cores."""
    torch.set_num_threads(8)


class Logging:
    """A train step that logs slowly now and then."""

    def __init__(self, step: Any, seconds: float, every: int) -> None:
        self.step, self.seconds, self.every, self.calls = step, seconds, every, 0

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        self.calls += 1
        if self.calls % self.every == 0:
            burn(self.seconds)


class KeepingStep:
    """A train step that keeps what it was given."""

    def __init__(self, step: Any, kept_bytes: int) -> None:
        self.step, self.kept_bytes, self.kept = step, kept_bytes, []

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        self.kept.append(torch.ones(self.kept_bytes, dtype=torch.uint8))


class Neighbour:
    """Another process that burns one core while the block runs."""

    def __enter__(self) -> None:
        import subprocess
        import sys

        self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
