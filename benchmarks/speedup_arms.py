"""The arms of the speed-up benchmark: each a function that measures samples per second."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, transforms

from data_setup import can_pin_memory
from dataloading.batch_transforms import split_transform, tensor_ready
from dataloading.batches import count_samples, move_to
from dataloading.cached_dataset import CachedDataset
from dataloading.decoders import decoder_for
from dataloading.image_collate import collate_images
from dataloading.images import ImageFiles
from dataloading.machine import usable_cpu_count
from dataloading.watchdog import close_iterator

BATCH_SIZE = 32
CROP = 224
CACHED = 256  # what torchvision's own presets resize to before they crop 224
FIRST_TURNS = 2  # of each worker, with the cost of a new process still in it
LONG = 1_000_000  # samples: no epoch ends during a block

Rate = Callable[[float], float]  # samples per second, measured for about so many seconds


def augmentation() -> transforms.Compose:
    """What the default does with each photo."""
    steps = [transforms.RandomResizedCrop(CROP), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*steps, transforms.ToTensor()])


def rate_of(loader: DataLoader, seconds: float, finish: Callable[[Any], Any], whole: bool) -> float:
    """Samples per second of a loader in steady state: without its start.

    Args:
        loader: To iterate over anew.
        seconds: So long, unless the epoch ends before.
        finish: What the training process does with each batch.
        whole: To the end of the epoch, however long that takes.
    """
    turn, iterator = max(1, loader.num_workers), iter(loader)
    try:
        samples, elapsed_s = counted(iterator, turn, math.inf if whole else seconds, finish)
    finally:
        close_iterator(iterator)
    return samples / elapsed_s


def counted(
    batches: Iterator[Any], turn: int, seconds: float, finish: Callable[[Any], Any]
) -> tuple[int, float]:
    """Samples that came, and seconds that it took, after the first batches.

    Workers deliver nearly at the same time: whole turns (a batch of each) are counted, from the end
    of one to the end of another; when the batches are at an end, what has come of the last one too.
    """
    samples, at_turn, begun, elapsed_s = 0, 0, time.perf_counter(), 0.0
    for number, batch in enumerate(batches, 1):
        finish(batch)
        if number <= FIRST_TURNS * turn:
            begun = time.perf_counter()
            continue
        samples += count_samples(batch)
        if number % turn == 0:
            _synchronize()
            at_turn, elapsed_s = samples, time.perf_counter() - begun
            if elapsed_s >= seconds:
                return at_turn, elapsed_s
    if not samples:
        needed = (FIRST_TURNS * turn + 1) * BATCH_SIZE
        raise ValueError(f"Too few images: {needed} are needed for {turn} workers.")
    return samples, time.perf_counter() - begun


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def default_arm(root: Path, device: torch.device) -> Rate:
    """The Learn PyTorch course's `create_dataloaders`, training part."""
    data = datasets.ImageFolder(str(root), augmentation())
    loader = endless(data, os.cpu_count() or 1)
    return lambda seconds: rate_of(loader, seconds, lambda batch: move_to(batch, device), False)


def fast_arm(root: Path, device: torch.device, *, convert: bool) -> Rate:
    """Ours without a cache."""
    sample_transform, batch_transform = split_transform(tensor_ready(augmentation()))
    data = ImageFiles(root, sample_transform)
    data.loader = decoder_for("torchvision")
    loader = endless(data, usable_cpu_count(), collate(convert))
    finish = finishing(device, batch_transform if convert else None)
    return lambda seconds: rate_of(loader, seconds, finish, False)


def finishing(device: torch.device, batch_transform: Callable[[Any], Any] | None) -> Any:
    """What the training process does with a batch: move it, and convert it unless that is left out."""

    def finish(batch: Any) -> Any:
        arrived = move_to(batch, device)
        return arrived if batch_transform is None else batch_transform(arrived)

    return finish


def cached(root: Path) -> tuple[CachedDataset, torch.nn.Module]:
    """An empty cache of photos at 256 x 256 pixels, and what its batches still need."""
    sample_transform, batch_transform = split_transform(tensor_ready(augmentation()))
    kept = [transforms.Resize(CACHED), transforms.CenterCrop(CACHED)]
    data = ImageFiles(root, tensor_ready(transforms.Compose(kept)))
    data.loader = decoder_for("torchvision")
    return CachedDataset(data, transform=sample_transform), batch_transform


def cold_arm(root: Path, device: torch.device, *, convert: bool) -> Rate:
    """The first epoch of a new cache; always a whole one."""

    def rate(seconds: float) -> float:
        data, batch_transform = cached(root)
        loader = DataLoader(
            data,
            BATCH_SIZE,
            shuffle=True,
            num_workers=usable_cpu_count(),
            collate_fn=collate(convert),
            **pinning(),
        )
        finish = finishing(device, batch_transform if convert else None)
        return rate_of(loader, seconds, finish, True)

    return rate


def warm_arm(root: Path, device: torch.device, *, convert: bool) -> Rate:
    """Later epochs of a cache that is full."""
    data, batch_transform = cached(root)
    workers = usable_cpu_count()
    for _ in DataLoader(data, BATCH_SIZE, num_workers=workers):
        pass
    loader = endless(data, workers, collate(convert))
    finish = finishing(device, batch_transform if convert else None)
    return lambda seconds: rate_of(loader, seconds, finish, False)


def endless(data: Any, workers: int, collate_fn: Any = None) -> DataLoader:
    """A shuffling loader whose epochs do not end during a block."""
    sampler = RandomSampler(data, replacement=True, num_samples=LONG)
    options = {"num_workers": workers, "collate_fn": collate_fn, **pinning()}
    return DataLoader(data, BATCH_SIZE, sampler=sampler, **options)


def collate(convert: bool) -> Any:
    """As `create_dataloaders` does: sorting channels is left to an accelerator, where there is one."""
    on_cpu = convert and not torch.accelerator.is_available()
    return None if on_cpu else collate_images


def pinning() -> dict[str, Any]:
    """Pinned, as in the course, where that does anything."""
    return {"pin_memory": can_pin_memory()}


def decode_and_crop(root: str, seconds: float, seed: int) -> float:
    """Samples per second of one process that only decodes, crops and flips."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sample_transform, _ = split_transform(tensor_ready(augmentation()))
    data = ImageFiles(root, sample_transform)
    data.loader = decoder_for("torchvision")
    chance = np.random.default_rng(seed)
    done, begun = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begun) < seconds or not done:
        data[int(chance.integers(len(data)))]
        done += 1
    return done / elapsed_s


@contextlib.contextmanager
def ceiling_arm(root: Path) -> Iterator[Rate]:
    """All usable CPUs at once, each with a process that waits between the rounds."""
    cpus = usable_cpu_count()
    with multiprocessing.get_context().Pool(cpus) as pool:

        def rate(seconds: float) -> float:
            tasks = [(str(root), seconds, seed) for seed in range(cpus)]
            return sum(pool.starmap(decode_and_crop, tasks, chunksize=1))

        try:
            yield rate
        finally:
            pool.terminate()
            pool.join()
