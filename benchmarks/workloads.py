"""Loaders of known kinds, for the benchmarks of the model and of the tuner; importable by workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from dataloading.sample_images import create_sample_images

LONG = 1_000_000  # samples: no epoch ends during a run
PHOTOS = 256
BATCH_SIZE = 16


class Sample(Dataset):
    """Each sample waits, then computes; one in `every` takes `factor` times as long."""

    def __init__(
        self,
        wait_s: float = 0.0,
        cpu_s: float = 0.0,
        shape: tuple[int, ...] = (3, 32, 32),
        every: int = 0,
        factor: float = 1.0,
    ) -> None:
        self.wait_s, self.cpu_s, self.shape = wait_s, cpu_s, shape
        self.every, self.factor = every, factor

    def __len__(self) -> int:
        return LONG

    def __getitem__(self, index: int) -> torch.Tensor:
        slow = self.every and (index * 7919) % self.every == 0
        factor = self.factor if slow else 1.0
        if self.wait_s:
            time.sleep(self.wait_s * factor)
        if self.cpu_s:
            compute(self.cpu_s * factor)
        return torch.zeros(self.shape)


def compute(seconds: float) -> None:
    """Keep a CPU busy for so much CPU time: what waits for a CPU meanwhile takes longer."""
    end = time.thread_time() + seconds
    block = np.ones(2000)
    while time.thread_time() < end:
        block.sum()


@dataclass(frozen=True)
class Workload:
    """A kind of loader and train step.

    Attributes:
        name: For the tables.
        dataset: Makes its data set; given a folder for files.
        step_s: Seconds of the simulated train step.
        batch_size: Of the loader.
        is_real: Whether it decodes photos, rather than waiting or computing for a set time.
    """

    name: str
    dataset: Callable[[Path], Any]
    step_s: float
    batch_size: int = BATCH_SIZE
    is_real: bool = False

    def loader(self, folder: Path, batch_size: int | None = None) -> DataLoader:
        """The loader without workers, as many a user has it."""
        dataset = self.dataset(folder)
        sampler = RandomSampler(dataset, replacement=True, num_samples=LONG)
        return DataLoader(dataset, batch_size=batch_size or self.batch_size, sampler=sampler)


def photos(folder: Path) -> Dataset:
    """Photos of about 50 kB, decoded, cropped and turned into float tensors."""
    from torchvision import datasets, transforms

    root = create_sample_images(folder / "photos", images=PHOTOS)
    steps = [transforms.RandomResizedCrop(160), transforms.ToTensor()]
    return datasets.ImageFolder(str(root), transforms.Compose(steps))


WORKLOADS = (
    Workload("waiting", lambda _: Sample(wait_s=0.002, cpu_s=0.0001), step_s=0.008),
    Workload("CPU-bound", lambda _: Sample(cpu_s=0.002), step_s=0.010),
    Workload("mixed", lambda _: Sample(wait_s=0.001, cpu_s=0.001), step_s=0.010),
    Workload("stragglers", lambda _: Sample(0.001, 0.0002, every=100, factor=40), step_s=0.008),
    Workload("tiny samples", lambda _: Sample(shape=(8,)), step_s=0.001, batch_size=64),
    Workload("fat batches", lambda _: Sample(cpu_s=0.001, shape=(3, 300, 300)), step_s=0.010),
    Workload("compute-bound", lambda _: Sample(cpu_s=0.0005), step_s=0.030),
    Workload("photos", photos, step_s=0.030, is_real=True),
)
