"""The faults of the course as dials: data sets that are slow on purpose, by a known amount.

They live in a module, not in a notebook cell, so that worker processes can import them under every
start method.
"""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset

CLASSES = 10  # labels run from 0 to 9, so that any small classifier can train on them


class SlowDataset(Dataset[tuple[torch.Tensor, int]]):
    """Random samples, each of which costs a set time to read and to compute.

    Args:
        size: Number of samples.
        read_s: Seconds that each sample waits without using the CPU, as on a slow disk.
        cpu_s: Seconds of CPU time that each sample burns, as a decoder does.
        shape: Shape of the sample (float32, values in [0, 1)).
        slow_every: Every so many samples one costs more (a straggler); None for none.
        slow_factor: How many times more that one costs.
        seed: Changes the values, and which samples are the stragglers.

    Raises:
        ValueError: A size or a time is negative, or `slow_every` is below 1.

    Example:
        >>> image, label = SlowDataset(100, read_s=0.001, shape=(3, 8, 8))[42]
        >>> image.shape, label
        (torch.Size([3, 8, 8]), 2)

    Explained in: notebook 00
    """

    def __init__(
        self,
        size: int,
        *,
        read_s: float = 0.0,
        cpu_s: float = 0.0,
        shape: tuple[int, ...] = (3, 32, 32),
        slow_every: int | None = None,
        slow_factor: float = 10.0,
        seed: int = 0,
    ) -> None:
        for name, value in [("size", size), ("read_s", read_s), ("cpu_s", cpu_s)]:
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if slow_every is not None and slow_every < 1:
            raise ValueError(f"slow_every must be at least 1, or None, got {slow_every}.")
        self.size = size
        self.read_s = read_s
        self.cpu_s = cpu_s
        self.shape = tuple(shape)
        self.slow_every = slow_every
        self.slow_factor = slow_factor
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(f"Sample {index} of a data set with {self.size} samples.")
        factor = self.slow_factor if self.is_slow(index) else 1.0
        if self.read_s:
            time.sleep(self.read_s * factor)
        if self.cpu_s:
            burn_cpu(self.cpu_s * factor)
        generator = torch.Generator().manual_seed(self.seed * self.size + index)
        return torch.rand(self.shape, generator=generator), index % CLASSES

    def is_slow(self, index: int) -> bool:
        """Whether this sample is a straggler."""
        return self.slow_every is not None and (index + self.seed + 1) % self.slow_every == 0


def burn_cpu(seconds: float) -> None:
    """Keep this thread busy until it has used so much CPU time, however long that takes.

    Unlike waiting, this gets slower when the cores are shared. (On Windows the clock of a thread
    ticks every 16 ms, so shorter burns take one tick.)

    Args:
        seconds: CPU time to use.

    Example:
        >>> before = time.thread_time()
        >>> burn_cpu(0.005)
        >>> time.thread_time() - before >= 0.005
        True

    Explained in: notebook 00
    """
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))  # a few microseconds between two looks at the clock
