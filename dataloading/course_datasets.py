"""The course's three data sets: from disk, from the net, or generated where there is no net."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from dataloading.arguments import check_int, check_seconds
from dataloading.course_archives import course_data, fetch_course_data
from dataloading.generated_data import GeneratedImages, generate_food101


def load_course_dataset(
    name: str,
    root: str | Path = "data",
    *,
    train: bool = True,
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    download: bool = True,
    generated: bool | None = None,
    images: int | None = None,
    mirrors: Sequence[str] | None = None,
    timeout_s: float = 20.0,
    seed: int = 0,
) -> Dataset:
    """Open Food-101, CIFAR-10 or Fashion-MNIST; without a net, generated images in their place.

    Data on disk, as torchvision keeps them below `root`, are opened. Else the archive is downloaded
    from the first mirror that delivers it, its checksum is compared, and it is unpacked and
    removed; an interrupted download goes on with the next call. Processes that call at the same
    time wait for the first. If no mirror delivers, images of the same shapes, classes and file
    sizes are generated, and a warning says so and why.

    Sizes of the downloads: Food-101 5 GB (as much again while it is unpacked), CIFAR-10 170 MB,
    Fashion-MNIST 31 MB.

    Args:
        name: `"food101"`, `"cifar10"` or `"fashion_mnist"`.
        root: Folder for all data sets.
        train: The training images, or else the test images.
        transform: Turns the PIL image into what the loader collates.
        target_transform: The same for the class number.
        download: False uses no network.
        generated: True generates images without a look at disk or net; False never generates.
        images: Number of images to generate; the real data sets always come whole. None: 404 of
            Food-101, 1000 of the others.
        mirrors: Addresses (`https:`, `http:` or `file:`) of folders that hold the archives, in the
            place of the known ones.
        timeout_s: How long silent servers are waited for in all, in seconds. A mirror slower than
            100 kB/s is left for the next.
        seed: Fixes the generated images.

    Returns:
        torchvision's data set, or one with the same items and attributes. `is_generated` tells
        which, `source` where it is from: `"disk"`, `"generated"` or the address of a mirror.

    Raises:
        ConnectionError: No mirror delivered and `generated=False`; a line for each mirror.
        FileNotFoundError: Not on disk, with `download=False` and `generated=False`.
        TypeError: An argument is of the wrong kind.
        ValueError: There is no such data set, or an argument is out of range.
        OSError: The data cannot be written below `root`.

    Example:
        >>> dataset = load_course_dataset("cifar10", generated=True, images=100)
        >>> len(dataset), dataset.is_generated, dataset.classes[:3]
        (100, True, ['airplane', 'automobile', 'bird'])

    Explained in: notebook 00
    """
    known = course_data(name)
    check_int("images", images, least=1, optional=True)
    check_int("seed", seed, least=0)
    check_seconds(timeout_s, "timeout_s")
    addresses = known.mirrors if mirrors is None else _addresses(mirrors)
    root = Path(root).expanduser()
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root.absolute()} is a file; give a folder for the data sets.")
    transforms = {"transform": transform, "target_transform": target_transform}

    if generated is not True:
        dataset = _open(name, root, train, transforms)
        if dataset is not None:
            return _marked(dataset, "disk")
        problem: OSError = FileNotFoundError(
            f"{name} is not on disk, or not complete, in {(root / known.folder).absolute()}, and "
            "download=False."
        )
        if download:
            try:
                source = fetch_course_data(
                    name,
                    root,
                    addresses,
                    timeout_s=timeout_s,
                    is_there=lambda: _open(name, root, train, {}) is not None,
                )
            except ConnectionError as error:
                problem = ConnectionError(_not_downloaded(name, root, error))
            else:
                return _marked(_opened(name, root, train, transforms), source)
        if generated is False:
            raise problem
        warnings.warn(
            f"GENERATED images take the place of {name}: same shapes and classes, but nothing "
            f"learned from them holds for the real data. {problem} If generated images are what "
            "you want, say generated=True.",
            stacklevel=2,
        )
    return _generate(name, root, train, images or known.images, seed, transforms)


def _addresses(mirrors: Sequence[str]) -> tuple[str, ...]:
    """The mirrors as addresses of folders, each once."""
    if isinstance(mirrors, str) or not all(isinstance(mirror, str) for mirror in mirrors):
        raise TypeError(f"mirrors={mirrors!r} must be a list of addresses.")
    for mirror in mirrors:
        if not mirror.startswith(("https://", "http://", "file://")):
            raise ValueError(f"The mirror {mirror!r} must begin with https://, http:// or file://.")
    if not mirrors:
        raise ValueError("mirrors is empty; give an address, or None for the known mirrors.")
    return tuple(dict.fromkeys(mirror.rstrip("/") + "/" for mirror in mirrors))


# ----------------------------------------------------------------------------------- the real data


def _open(name: str, root: Path, train: bool, transforms: dict[str, Any]) -> Any | None:
    """torchvision's data set; None if it is not on disk, or not whole."""
    from torchvision import datasets

    try:
        if name == "food101":
            split = "train" if train else "test"
            dataset: Any = datasets.Food101(root, split, **transforms)
            _check_photos(root / "food-101", split)
            return dataset
        kind = datasets.CIFAR10 if name == "cifar10" else datasets.FashionMNIST
        return kind(root, train, **transforms)
    except (RuntimeError, FileNotFoundError):  # torchvision's word for "not found or corrupted"
        return None
    except (AssertionError, ValueError, LookupError, EOFError):  # what it says of files cut short
        return None


def _check_photos(folder: Path, split: str) -> None:
    """Refuse a folder that was not unpacked to its end: torchvision only looks whether it is there.

    Raises:
        FileNotFoundError: A photo is missing.
    """
    listed = json.loads((folder / "meta" / f"{split}.json").read_text(encoding="utf-8"))
    for label, photos in listed.items():
        there = set(os.listdir(folder / "images" / label))
        missing = [photo for photo in photos if f"{photo.split('/')[-1]}.jpg" not in there]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {len(missing)} photos of {label}.")


def _opened(name: str, root: Path, train: bool, transforms: dict[str, Any]) -> Any:
    """The data set after a download."""
    dataset = _open(name, root, train, transforms)
    if dataset is None:
        raise RuntimeError(
            f"torchvision cannot open {name} in {root.absolute()} though its archives were unpacked"
            " there. Remove what is in that folder of it and call again."
        )
    return dataset


def _marked(dataset: Any, source: str) -> Any:
    """The data set with the attributes that tell where it is from."""
    dataset.is_generated = source == "generated"
    dataset.source = source
    return dataset


def _not_downloaded(name: str, root: Path, error: ConnectionError) -> str:
    """What was tried, a line for each mirror, and how to get the data in another way."""
    known = course_data(name)
    archives = ", ".join(file for file, _ in known.files)
    return (
        f"{name} could not be downloaded:\n{error}\nCheck the connection and call again, or put "
        f"{archives} into {(root / known.folder).absolute()} by hand."
    )


# ------------------------------------------------------------------------------ the generated data


def _generate(
    name: str, root: Path, train: bool, images: int, seed: int, transforms: dict[str, Any]
) -> Any:
    """Images of the same shapes and classes: files for Food-101, an array for the others."""
    if name != "food101":
        return GeneratedImages(name, train=train, images=images, seed=seed, **transforms)
    from torchvision.datasets import Food101

    folder = generate_food101(root, train=train, images=images, seed=seed)
    return _marked(Food101(folder, "train" if train else "test", **transforms), "generated")
