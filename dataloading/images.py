"""Folders of image files as data sets, and files that cannot be read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from dataloading.image_modes import TRUNCATED, is_truncation, readable_part, to_rgb
from dataloading.random_stream import RandomStream
from dataloading.resuming import ResumableRandomness

if TYPE_CHECKING:
    from PIL import Image


def image_dataset(
    root: str | Path,
    transform: Callable[[Any], Any] | None = None,
    *,
    upright: bool = False,
    load_truncated: bool = False,
) -> ImageFiles:
    """Open a folder of images as a data set of `(image, class number)`.

    Args:
        root: Folder with one sub-folder per class (`root/class/image.jpg`, also deeper), or one
            flat folder of images, which is then the only class. Hidden files and folders and
            those that systems leave behind (`.DS_Store`, `__MACOSX`, `.ipynb_checkpoints`) are
            passed over.
        transform: Turns a PIL image (RGB) into what the loader collates.
        upright: Turn photos as their orientation tag says, which `ImageFolder` does not.
        load_truncated: Load what can be read of cut files, and list them in `truncated_files`.

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
    return ImageFiles(root, transform, upright=upright, load_truncated=load_truncated)


class ImageFiles(ResumableRandomness, ImageFolder):
    """An `ImageFolder` that also reads flat folders and says which file it cannot read.

    Args:
        root: See `image_dataset`.
        transform: See `image_dataset`.
        classes: Class names that give the labels, such as those of the training set; None takes
            the names of the sub-folders, sorted.
        seed: Samples loaded in the training process draw from a stream of random numbers of their
            own, so that they repeat (workers are seeded by the loader).
        upright: See `image_dataset`.
        load_truncated: See `image_dataset`.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        seed: int | None = None,
        upright: bool = False,
        load_truncated: bool = False,
    ) -> None:
        folder = existing_folder(root)
        VisionDataset.__init__(self, str(folder), transform=transform)
        found = _images_by_class(folder)
        if classes is not None and len(classes) == len(found) == 1:
            # One class is one class: flat folders are called train and test.
            found = {classes[0]: next(iter(found.values()))}
        self.classes = sorted(found) if classes is None else list(classes)
        if unknown := sorted(set(found) - set(self.classes)):
            if unknown == [folder.name] and not (folder / folder.name).is_dir():
                raise ValueError(
                    f"{folder} has images directly in it, and the training set has classes: put "
                    f"them into sub-folders called {', '.join(self.classes)}."
                )
            raise ValueError(
                f"{folder} has classes that the training set lacks: {', '.join(unknown)}. "
                f"Known are: {', '.join(self.classes)}. Rename those folders, or move them elsewhere."
            )
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = [
            (path, self.class_to_idx[name]) for name in self.classes for path in found.get(name, [])
        ]
        self.imgs = self.samples  # a second name for it, as in ImageFolder
        self.targets = [label for _, label in self.samples]
        self.extensions = IMG_EXTENSIONS
        self.loader: Callable[..., Any] = load_image
        self._cut: torch.Tensor | None = None  # a mark for each file that was loaded in part
        if upright or load_truncated:
            self.loader = functools.partial(
                load_image, upright=upright, load_truncated=load_truncated
            )
        if load_truncated:
            # shared, so that marks set by workers are seen here
            self._cut = torch.zeros(len(self.samples), dtype=torch.uint8).share_memory_()
        self._stream = RandomStream(seed) if seed is not None else None

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._stream is None:
            return self._sample(index)
        with self._stream.in_use():
            return self._sample(index)

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers are, for a `StatefulDataLoader`."""
        state = super().state_dict()
        if self._stream is None:
            return state
        drawn, (name, keys, *rest), python = self._stream.state
        return {**state, "stream": (drawn, (name, tuple(keys.tolist()), *rest), python)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the random numbers back where they were."""
        super().load_state_dict(state)
        if self._stream is not None and "stream" in state:
            drawn, numpy_state, python = state["stream"]
            self._stream.state = (drawn, tuple(numpy_state), python)

    def _sample(self, index: int) -> tuple[Any, Any]:
        if self._cut is None:
            return super().__getitem__(index)
        path, label = self.samples[index]
        image = self.loader(path)
        if image.info.get(TRUNCATED):
            self._cut[index] = 1
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label

    @property
    def truncated_files(self) -> list[str]:
        """The cut files that were loaded in part so far, by this process or by workers."""
        marked = [] if self._cut is None else self._cut.nonzero().flatten().tolist()
        return [self.samples[index][0] for index in marked]


EXPECTED_LAYOUT = (
    "Expected one sub-folder of images per class (folder/class/image.jpg) or images directly in "
    f"the folder, with one of the extensions {', '.join(IMG_EXTENSIONS)}."
)


def existing_folder(root: str | Path) -> Path:
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
    found = {name: list(images_below(folder / name)) for name in subfolders}
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


def images_below(folder: Path) -> Iterator[str]:
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


UNREADABLE = "Cannot read the image "
REMEDY = ". Repair, replace or remove the file."


def load_image(
    path: str | Path, *, upright: bool = False, load_truncated: bool = False
) -> Image.Image:
    """Open an image file as RGB, as torchvision's `ImageFolder` does, and say which file failed.

    Unlike there, grey images of 16 bits are scaled to 8 bits; Pillow would clip them to white.

    Args:
        path: The file; grey, palette and transparent images become RGB too.
        upright: Turn the image as its orientation tag says; `ImageFolder` does not.
        load_truncated: Load what can be read of a cut file; `info["truncated"]` is True then.

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
        try:
            with Image.open(path) as image:
                return to_rgb(image, upright=upright)
        except OSError as error:
            if not load_truncated or not is_truncation(error):
                raise
            return readable_part(path, upright=upright)
    except UnidentifiedImageError:
        reason = "not an image" if os.path.getsize(path) else "the file is empty"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # missing or forbidden: the system's text names the file already
        reason = str(error)
    raise OSError(f"{UNREADABLE}{path}: {reason}{REMEDY}")


def short_reason(error: BaseException, path: str | Path | None = None) -> str:
    """Why a file cannot be read, in one line and without what every such error of ours says.

    Example:
        >>> short_reason(OSError("Cannot read the image a.jpg: not an image. Repair, replace or remove the file."), "a.jpg")
        'not an image'
    """
    text = str(error).removeprefix(f"{UNREADABLE}{path}: ").removesuffix(REMEDY)
    return " ".join(text.split()) or type(error).__name__


def check_images(
    paths: str | Path | Iterable[str | Path], limit: int | None = None
) -> list[tuple[str, str]]:
    """Decode image files and return those that fail, before a training run finds them.

    Args:
        paths: Image files, or one of them.
        limit: Check no more than so many, spread evenly over all; None checks every file.

    Returns:
        `(path, reason)` for each file that cannot be read.

    Raises:
        ValueError: `limit` is below 1.

    Explained in: notebook 00
    """
    files = [paths] if isinstance(paths, str | Path) else paths
    failed = []
    for path in spread_evenly([str(file) for file in files], limit):
        try:
            load_image(path)
        except OSError as error:
            failed.append((path, str(error)))
    return failed


def spread_evenly(files: list[str], limit: int | None) -> list[str]:
    """At most `limit` of the files, spread evenly over all; None takes every file.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all files, got {limit}.")
    if limit is None or limit >= len(files):
        return files
    return [files[position * len(files) // limit] for position in range(limit)]
