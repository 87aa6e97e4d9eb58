"""Folders of image files as data sets, and files that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.datasets.folder import IMG_EXTENSIONS

if TYPE_CHECKING:
    from PIL import Image


def image_dataset(root: str | Path, transform: Callable[[Any], Any] | None = None) -> ImageFiles:
    """Open a folder of images as a data set of `(image, class number)`.

    Args:
        root: Folder with one sub-folder per class (`root/class/image.jpg`, also deeper), or one
            flat folder of images, which is then the only class. Hidden files and folders and
            those that systems leave behind (`.DS_Store`, `__MACOSX`, `.ipynb_checkpoints`) are
            passed over.
        transform: Turns a PIL image (RGB) into what the loader collates.

    Returns:
        A data set with the attributes of torchvision's `ImageFolder`.

    Raises:
        FileNotFoundError: The folder is missing, or it or one of its classes holds no images.
        ValueError: `root` is no folder.

    Example:
        >>> image_dataset("photos/train").classes  # doctest: +SKIP
        ['pizza', 'steak', 'sushi']

    Explained in: notebook 00
    """
    return ImageFiles(root, transform)


class ImageFiles(ImageFolder):
    """An `ImageFolder` that also reads flat folders and says which file it cannot read.

    Args:
        root: See `image_dataset`.
        transform: See `image_dataset`.
        classes: Class names that give the labels, such as those of the training set; None takes
            the names of the sub-folders, sorted.
        seed: Samples loaded in the training process draw from a stream of torch's random numbers
            of their own, so that they repeat (workers are seeded by the loader).
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> None:
        folder = _existing_folder(root)
        VisionDataset.__init__(self, str(folder), transform=transform)
        found = _images_by_class(folder)
        if classes is not None and len(classes) == len(found) == 1:
            # One class is one class: flat folders are called train and test.
            found = {classes[0]: next(iter(found.values()))}
        self.classes = sorted(found) if classes is None else list(classes)
        if unknown := sorted(set(found) - set(self.classes)):
            raise ValueError(
                f"{folder} has classes that the training set lacks: {', '.join(unknown)}. "
                f"Known are: {', '.join(self.classes)}. Remove or rename those folders."
            )
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = [
            (path, self.class_to_idx[name]) for name in self.classes for path in found.get(name, [])
        ]
        self.imgs = self.samples  # a second name for it, as in ImageFolder
        self.targets = [label for _, label in self.samples]
        self.extensions = IMG_EXTENSIONS
        self.loader = load_image
        self._random_state = (
            torch.Generator().manual_seed(seed).get_state() if seed is not None else None
        )

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._random_state is None or get_worker_info() is not None:
            return super().__getitem__(index)
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            return super().__getitem__(index)
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(outside)


EXPECTED_LAYOUT = (
    "Expected one sub-folder of images per class (folder/class/image.jpg) or images directly in "
    f"the folder, with one of the extensions {', '.join(IMG_EXTENSIONS)}."
)


def _existing_folder(root: str | Path) -> Path:
    """The absolute path of an existing folder."""
    folder = Path(os.path.abspath(Path(root).expanduser()))
    if not folder.exists():
        raise FileNotFoundError(f"There is no folder {folder}. {EXPECTED_LAYOUT}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder. {EXPECTED_LAYOUT}")
    return folder


def _images_by_class(folder: Path) -> dict[str, list[str]]:
    """The image files below each sub-folder; if none holds any, those directly in the folder."""
    _, subfolders, names = next(_walk(folder))
    found = {name: list(_images_below(folder / name)) for name in subfolders}
    empty = [name for name, images in found.items() if not images]
    if len(empty) < len(found):
        if empty:
            raise FileNotFoundError(
                f"No images found for the class {', '.join(empty)} in {folder}. Remove the "
                f"sub-folder or put images in it. {EXPECTED_LAYOUT}"
            )
        return found
    if images := [str(folder / name) for name in names]:
        return {folder.name: images}
    raise FileNotFoundError(f"No images found in {folder}. {EXPECTED_LAYOUT}")


def _images_below(folder: Path) -> Iterator[str]:
    """The image files in a folder and its sub-folders, in sorted order."""
    for parent, _, names in _walk(folder):
        yield from (os.path.join(parent, name) for name in names)


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk`, sorted, over folders and image files only; each folder once, also with links."""
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error  # a folder that may not be read is not an empty one

    for parent, subfolders, names in os.walk(folder, onerror=fail, followlinks=True):
        real_path = os.path.realpath(parent)
        if real_path in seen:
            subfolders.clear()
            continue
        seen.add(real_path)
        subfolders[:] = sorted(name for name in subfolders if not is_clutter(name))
        images = (n for n in names if n.lower().endswith(IMG_EXTENSIONS) and not is_clutter(n))
        yield parent, subfolders, sorted(images)


def is_clutter(name: str) -> bool:
    """Whether a file or folder is hidden or left behind by a system, and so not data."""
    return name.startswith(".") or name == "__MACOSX"


def load_image(path: str | Path) -> Image.Image:
    """Open an image file as RGB, as torchvision's `ImageFolder` does, and say which file failed.

    Args:
        path: The file; grey, palette and transparent images become RGB too.

    Returns:
        A PIL image in mode RGB.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is no image, or a damaged one; the text names the file and the reason.

    Example:
        >>> load_image("photos/train/pizza/1.jpg").size  # doctest: +SKIP
        (512, 384)

    Explained in: notebook 00
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode == "P" and "transparency" in image.info:
                return image.convert("RGBA").convert("RGB")  # same colours, without a warning
            return image.convert("RGB")
    except UnidentifiedImageError:
        reason = "not an image" if os.path.getsize(path) else "the file is empty"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # missing or forbidden: the system's text names the file already
        reason = str(error)
    raise OSError(f"Cannot read the image {path}: {reason}. Repair, replace or remove the file.")


def check_images(paths: Iterable[str | Path], limit: int | None = None) -> list[tuple[str, str]]:
    """Decode image files and return those that fail, before a training run finds them.

    Args:
        paths: Image files.
        limit: Check no more than so many, spread evenly over all; None checks every file.

    Returns:
        `(path, reason)` for each file that cannot be read.

    Raises:
        ValueError: `limit` is below 1.

    Explained in: notebook 00
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all files, got {limit}.")
    files = [str(path) for path in paths]
    if limit is not None and limit < len(files):
        files = [files[position * len(files) // limit] for position in range(limit)]
    failed = []
    for path in files:
        try:
            load_image(path)
        except OSError as error:
            failed.append((path, str(error)))
    return failed
