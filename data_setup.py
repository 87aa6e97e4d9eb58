"""Data sets and DataLoaders: from a folder of images to batches, and what to start from.

Takes the place of the Learn PyTorch course's `data_setup.py`: `NUM_WORKERS` and
`create_dataloaders` answer the same calls. Everything here can be imported by worker processes, so
loaders made here work under every start method.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dataloading.faults import SlowDataset, burn_cpu
from dataloading.images import ImageFiles, check_images, image_dataset, load_image
from dataloading.machine import usable_cpu_count
from dataloading.rules_of_thumb import HARDWARE_PRESETS, HardwarePreset, rule_of_thumb_workers
from dataloading.sample_images import create_sample_images
from dataloading.settings import LoaderSettings

__all__ = [
    "HARDWARE_PRESETS",
    "IMAGE_RECIPES",
    "NUM_WORKERS",
    "HardwarePreset",
    "ImageFiles",
    "ImageRecipe",
    "SlowDataset",
    "burn_cpu",
    "can_pin_memory",
    "check_images",
    "create_dataloaders",
    "create_sample_images",
    "image_dataset",
    "load_image",
    "recipe_settings",
    "rule_of_thumb_workers",
    "seed_worker",
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
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[DataLoader, DataLoader, list[str]]:
    """Make the DataLoaders for training (shuffled) and testing (in order) from two image folders.

    Batches are pinned where there is an accelerator that can use it. Labels are those of the
    training classes, also where the test folder lacks some of them.

    Args:
        train_dir: Folder with one sub-folder of images per class, or one flat folder of images.
        test_dir: The same for the test images.
        transform: Turns a PIL image into a tensor, for both loaders; None gives PIL images.
        batch_size: Samples per batch.
        num_workers: Worker processes of each loader; 0 loads in this process.
        settings: Loader settings that take the place of `num_workers` and the pinning and, where
            it has one, of `batch_size`. Pinning stays off without an accelerator.
        seed: Makes order and random transforms the same in every run with the same number of
            workers. Holds for transforms that draw from torch, as all of torchvision's do; with
            workers also for those that draw from NumPy or `random`.
        device: Where the batches will be used; `"cpu"` turns pinning off. None: the accelerator,
            if there is one.

    Returns:
        `(train_dataloader, test_dataloader, class_names)`.

    Raises:
        FileNotFoundError: A folder is missing or holds no images; the text names it in full.
        ValueError: A path is no folder, the test folder has a class that training lacks, or a
            number is out of range.

    Example:
        >>> create_dataloaders("photos/train", "photos/test", transform, 32)  # doctest: +SKIP

    Explained in: notebook 00
    """
    train_data = ImageFiles(train_dir, transform, seed=seed)
    test_data = ImageFiles(test_dir, transform, classes=train_data.classes, seed=seed)
    if settings is None:
        settings = LoaderSettings(num_workers=num_workers, pin_memory=True)
    options = {"batch_size": batch_size} | settings.kwargs()
    options["pin_memory"] = settings.pin_memory and can_pin_memory(device)
    train_dataloader: DataLoader = DataLoader(train_data, shuffle=True, **options, **_seeding(seed))
    test_dataloader: DataLoader = DataLoader(test_data, shuffle=False, **options, **_seeding(seed))
    return train_dataloader, test_dataloader, train_data.classes


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
    if name not in IMAGE_RECIPES:
        raise ValueError(f"There is no recipe {name!r}; choose one of {', '.join(IMAGE_RECIPES)}.")
    if cpu_cores < 1:
        raise ValueError(f"cpu_cores must be at least 1, got {cpu_cores}.")
    recipe = IMAGE_RECIPES[name]
    smallest, largest = recipe.batch_size
    return LoaderSettings(
        num_workers=max(1, round(cpu_cores * sum(recipe.core_share) / 2)),
        batch_size=round((smallest * largest) ** 0.5),  # batch sizes go up by doubling
        pin_memory=recipe.pin_memory and can_pin_memory(device),
        prefetch_factor=recipe.prefetch_factor,
    )
