"""Data sets and DataLoaders: from a folder of images to batches, and what to start from.

Takes the place of the Learn PyTorch course's `data_setup.py`: `NUM_WORKERS` and
`create_dataloaders` answer the same calls. Everything here can be imported by worker processes, so
loaders made here work under every start method.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dataloading.arguments import check_int, device_named
from dataloading.batch_transforms import BatchTransform, split_transform, tensor_ready
from dataloading.cached_dataset import CachedDataset
from dataloading.cached_images import cached_images
from dataloading.course_datasets import load_course_dataset
from dataloading.decoders import DECODERS, decoder_for
from dataloading.distributed import (
    EpochSampler,
    epochs,
    rank_and_world_size,
    set_epoch,
    steps_per_rank,
    workers_per_rank,
)
from dataloading.draft_crops import draft_ready
from dataloading.faults import SlowDataset, burn_cpu
from dataloading.image_collate import collate_images
from dataloading.image_scan import ImageScan, scan_images
from dataloading.images import ImageFiles, check_images, image_dataset, load_image
from dataloading.machine import usable_cpu_count
from dataloading.resuming import resumable_dataloader
from dataloading.rules_of_thumb import HARDWARE_PRESETS, HardwarePreset, rule_of_thumb_workers
from dataloading.sample_images import create_sample_images
from dataloading.settings import LoaderSettings
from dataloading.sharded_streams import ShardedStream
from dataloading.skipping import SkippingDataLoader, make_skipping

__all__ = [
    "DECODERS",
    "HARDWARE_PRESETS",
    "IMAGE_RECIPES",
    "NUM_WORKERS",
    "BatchTransform",
    "CachedDataset",
    "EpochSampler",
    "HardwarePreset",
    "ImageFiles",
    "ImageRecipe",
    "ImageScan",
    "ShardedStream",
    "SkippingDataLoader",
    "SlowDataset",
    "burn_cpu",
    "can_pin_memory",
    "check_images",
    "create_dataloaders",
    "create_sample_images",
    "epochs",
    "image_dataset",
    "load_course_dataset",
    "load_image",
    "make_skipping",
    "recipe_settings",
    "resumable_dataloader",
    "rule_of_thumb_workers",
    "scan_images",
    "seed_worker",
    "set_epoch",
    "split_transform",
    "tensor_ready",
]

# What this process may use: on a shared machine often fewer than os.cpu_count() says.
NUM_WORKERS = usable_cpu_count()


# ------------------------------------------------------------------------------------- DataLoaders


def create_dataloaders(
    train_dir: str | Path,
    test_dir: str | Path,
    transform: Callable[[Any], Any] | None,
    batch_size: int,
    num_workers: int = NUM_WORKERS,
    *,
    settings: LoaderSettings | None = None,
    decoder: str = "pillow",
    cache: str | os.PathLike[str] | None = None,
    distributed: bool | tuple[int, int] | None = None,
    seed: int | None = None,
    skip_bad_images: bool = False,
    device: torch.device | str | None = None,
) -> tuple[DataLoader, DataLoader, list[str]]:
    """Make the DataLoaders for training (shuffled) and testing (in order) from two image folders.

    Batches are pinned where there is an accelerator that can use it. Labels are those of the
    training classes, also where the test folder lacks some of them.

    The fast way: `sample_transform, batch_transform = split_transform(transform)`, then
    `create_dataloaders(..., sample_transform, ..., decoder="torchvision")`, and in the training loop
    `images = batch_transform(images.to(device))`, or `make_train_step(..., batch_transform=...)`.

    Args:
        train_dir: Folder with one sub-folder of images per class, or one flat folder of images.
        test_dir: The same for the test images.
        transform: Turns a PIL image into a tensor, for both loaders. None leaves images as they are
            decoded, of which batches can be made with `decoder="torchvision"` and equal sizes only.
        batch_size: Samples per batch.
        num_workers: Worker processes of each loader; 0 loads in this process.
        settings: Loader settings that take the place of `num_workers` and the pinning and, where
            it has one, of `batch_size`, such as `recommend_settings` gives. Pinning stays off
            without an accelerator.
        decoder: `"pillow"`; `"pillow-draft"`, which reads large photos at a reduced size where the
            transform begins with a `Resize` or a `RandomResizedCrop`; or `"torchvision"`, the
            fastest for photos of usual size, which gives uint8 tensors to the transform (those of
            torchvision take them, `ToTensor` included).
        cache: Keep decoded images, as they are before the first random step of the transform:
            `"memory"` for shared memory, or a folder for files that later runs and all processes on
            this machine use. None: no cache.
        distributed: Share the samples out among the processes of a distributed job. None: where
            there is one (`torchrun`); True: there must be one; False: never; or a pair (rank,
            number of ranks). Each epoch has a new order by itself; `set_epoch` need not be called.
            Up to one sample less than there are ranks comes twice, so that all ranks get as many,
            when testing too. Bad images should be removed first (`scan_images`), not skipped: ranks
            would get unlike numbers of batches, and wait for one another for ever.
        seed: Makes order and random transforms the same in every run with the same number of
            workers, for transforms that draw from torch, NumPy or `random`.
        skip_bad_images: Leave out images that cannot be read, and warn of them at the end of an
            epoch; `loader.skipped()` lists them. Batches are smaller then, and never empty.
        device: Where the batches will be used; `"cpu"` turns pinning off. None: the accelerator,
            if there is one.

    Returns:
        `(train_dataloader, test_dataloader, class_names)`.

    Raises:
        FileNotFoundError: A folder is missing or holds no images; the text names it in full.
        TypeError: An argument is of another kind; the text names it.
        ValueError: A path is no folder, the test folder has a class that training lacks, a
            number is out of range, there is no such decoder, a rank would get no batch, or images
            have no common size where they should be cached.

    Example:
        >>> create_dataloaders("photos/train", "photos/test", transform, 32)  # doctest: +SKIP

    Explained in: notebook 00
    """
    _check_arguments(train_dir, test_dir, transform, batch_size, settings, seed)
    if device is not None:
        device = device_named(device)
    rank, world_size = rank_and_world_size(distributed)
    if world_size > 1 and skip_bad_images:
        warnings.warn(
            "Ranks that skip bad images get unlike numbers of batches, and training in step "
            "(DistributedDataParallel) then waits for ever. Find the files with scan_images(folder) "
            "and remove them instead.",
            stacklevel=2,
        )
    if settings is None:
        workers, fewer = workers_per_rank(num_workers) if world_size > 1 else (num_workers, None)
        if fewer:
            warnings.warn(fewer, stacklevel=2)
        settings = LoaderSettings(num_workers=workers, pin_memory=True)
    options = {"batch_size": batch_size} | settings.kwargs()
    options["pin_memory"] = settings.pin_memory and can_pin_memory(device)
    own_seed = None if seed is None else seed + rank  # ranks draw other crops and flips

    if decoder == "pillow-draft":
        transform = draft_ready(transform)
    load = decoder_for(decoder, transform)
    if decoder == "torchvision":
        transform = tensor_ready(transform)
    train_data = ImageFiles(train_dir, transform, seed=own_seed)
    test_data = ImageFiles(test_dir, transform, classes=train_data.classes, seed=own_seed)
    if decoder == "torchvision" and _goes_to_accelerator(device):
        options["collate_fn"] = collate_images
    loaders = []
    for files, shuffle in ((train_data, True), (test_data, False)):
        files.loader = load
        data = files if cache is None else cached_images(files, cache, seed=own_seed)
        make = make_skipping if skip_bad_images else DataLoader
        order = _order(data, shuffle, rank, world_size, seed, options["batch_size"])
        loaders.append(make(data, **options, **order, **_seeding(own_seed)))
    return loaders[0], loaders[1], train_data.classes


def _check_arguments(
    train_dir: Any, test_dir: Any, transform: Any, batch_size: Any, settings: Any, seed: Any
) -> None:
    """Refuse what would only fail later, or in words that do not name it."""
    for name, folder in (("train_dir", train_dir), ("test_dir", test_dir)):
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"{name} must be the path of a folder, got {folder!r}.")
    if transform is not None and (isinstance(transform, type) or not callable(transform)):
        raise TypeError(f"transform={transform!r} must be a transform of one image, or None.")
    check_int("batch_size", batch_size, least=1)
    if settings is not None and not isinstance(settings, LoaderSettings):
        raise TypeError(f"settings={settings!r} must be LoaderSettings(...), or None.")
    check_int("seed", seed, least=0, optional=True)
    if seed is not None and seed >= 2**63:
        raise ValueError(f"seed={seed} must be below 2**63.")


def _order(
    data: Any, shuffle: bool, rank: int, world_size: int, seed: int | None, batch_size: int
) -> dict[str, Any]:
    """The arguments that say in which order samples come, and to which rank."""
    if world_size == 1:
        return {"shuffle": shuffle}
    steps_per_rank(len(data), world_size, batch_size)  # refuses ranks without a batch
    return {"sampler": EpochSampler(data, world_size, rank, shuffle=shuffle, seed=seed or 0)}


def _seeding(seed: int | None) -> dict[str, Any]:
    """The arguments that make a loader repeatable; each loader gets a generator of its own."""
    if seed is None:
        return {}
    return {"generator": torch.Generator().manual_seed(seed), "worker_init_fn": seed_worker}


def seed_worker(worker_id: int) -> None:
    """Seed NumPy and `random` in a worker from the seed that PyTorch gave it (`worker_init_fn`).

    Source: "Reproducibility" in the PyTorch documentation.

    Args:
        worker_id: Number of the worker; its seed already differs from that of the others.

    Explained in: notebook 00
    """
    worker_seed = torch.initial_seed() % 2**32  # the range that NumPy accepts
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def _goes_to_accelerator(device: torch.device | str | None = None) -> bool:
    """Whether batches go to an accelerator, which sorts the channels of uint8 images in no time."""
    if device is None:
        return torch.accelerator.is_available()
    return torch.device(device).type not in ("cpu", "meta")


def can_pin_memory(device: torch.device | str | None = None) -> bool:
    """Whether pinned batches help on the way to `device` (None: to any accelerator).

    Apple's `mps` shares its memory with the CPU and PyTorch warns when asked to pin for it.

    Args:
        device: Where the batches will be used.

    Example:
        >>> can_pin_memory("cpu")
        False

    Explained in: notebook 00
    """
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps":
        return False
    return device is None or torch.device(device).type == accelerator.type


# ----------------------------------------------------------------------------------- where to start


@dataclass(frozen=True)
class ImageRecipe:
    """Settings often advised for a data set, as ranges (low, high), to start from.

    Args:
        stored_as: What one sample is on disk or in memory.
        shape: Channels, height and width as the model of the course sees them.
        classes: Number of classes.
        batch_size: Samples per batch.
        core_share: Worker processes as a share of the usable CPU cores.
        pin_memory: Whether to pin batches where there is an accelerator.
        prefetch_factor: Batches each worker prepares ahead.
    """

    stored_as: str
    shape: tuple[int, int, int]
    classes: int
    batch_size: tuple[int, int] = (32, 128)
    core_share: tuple[float, float] = (0.5, 0.75)
    pin_memory: bool = True
    prefetch_factor: int = 2


IMAGE_RECIPES: Mapping[str, ImageRecipe] = MappingProxyType(
    {
        "food101": ImageRecipe("JPEG file, longest side 512 pixels", (3, 224, 224), 101),
        "cifar10": ImageRecipe("part of one array in memory", (3, 32, 32), 10),
        "fashion_mnist": ImageRecipe("part of one array in memory", (1, 28, 28), 10),
    }
)


def recipe_settings(
    name: str, *, cpu_cores: int = NUM_WORKERS, device: torch.device | str | None = None
) -> LoaderSettings:
    """Turn a recipe into settings for this machine, from the middle of its ranges.

    Args:
        name: A key of `IMAGE_RECIPES`.
        cpu_cores: CPU cores that may be used.
        device: Where the batches will be used; None: the accelerator, if there is one.

    Returns:
        Settings with at least one worker, pinned only where that helps.

    Raises:
        ValueError: There is no such recipe, or `cpu_cores` is below 1.

    Example:
        >>> settings = recipe_settings("food101", cpu_cores=16)
        >>> settings.num_workers, settings.batch_size, settings.prefetch_factor
        (10, 64, 2)

    Explained in: notebook 00
    """
    check_int("cpu_cores", cpu_cores, least=1)
    if not isinstance(name, str) or name not in IMAGE_RECIPES:
        raise ValueError(f"There is no recipe {name!r}; choose one of {', '.join(IMAGE_RECIPES)}.")
    recipe = IMAGE_RECIPES[name]
    smallest, largest = recipe.batch_size
    return LoaderSettings(
        num_workers=max(1, round(cpu_cores * sum(recipe.core_share) / 2)),
        batch_size=round((smallest * largest) ** 0.5),  # batch sizes go up by doubling
        pin_memory=recipe.pin_memory and can_pin_memory(device),
        prefetch_factor=recipe.prefetch_factor,
    )
