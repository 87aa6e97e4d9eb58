"""Data sets and DataLoaders: from a folder of images to batches, and what to start from.

Takes the place of the Learn PyTorch course's `data_setup.py`: `NUM_WORKERS` and
`create_dataloaders` answer the same calls. Everything here can be imported by worker processes, so
loaders made here work under every start method.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from dataloading.faults import SlowDataset, burn_cpu
from dataloading.machine import usable_cpu_count
from dataloading.settings import LoaderSettings

if TYPE_CHECKING:
    from PIL import Image

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


# ---------------------------------------------------------------------------------- image folders


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
        subfolders[:] = sorted(name for name in subfolders if not _is_clutter(name))
        images = (n for n in names if n.lower().endswith(IMG_EXTENSIONS) and not _is_clutter(n))
        yield parent, subfolders, sorted(images)


def _is_clutter(name: str) -> bool:
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


# ---------------------------------------------------------------------------------- sample photos

SAMPLE_MARKER = ".sample_images.json"  # says how a folder was made, and whether it is complete
SAMPLE_RECIPE = 1  # raise it when the same arguments would give other pictures


def create_sample_images(
    root: str | Path,
    *,
    images: int = 200,
    classes: int = 3,
    size: int = 512,
    quality: int = 85,
    seed: int = 42,
    progress: bool = False,
) -> Path:
    """Make a folder of photos (`root/class_0/00000.jpg`) that cost what real ones cost to load.

    Each is a crop of one real photo, zoomed, flipped and re-coloured by chance: at the default
    size and quality about 50 kB a file, as in Food101. A folder that was made with the same
    arguments is used again; one left unfinished, or made with others, is made anew.

    Args:
        root: Folder to fill: new, empty, or made by this function.
        images: Number of photos, dealt out to the classes in turn.
        classes: Number of classes, at most `images`.
        size: Width and height in pixels.
        quality: JPEG quality, 1 to 95.
        seed: Fixes every photo.
        progress: Show a progress bar.

    Returns:
        `Path(root)`.

    Raises:
        FileExistsError: The folder holds something else; nothing in it is touched.
        ValueError: A number is out of range.

    Example:
        >>> create_sample_images("data/photos", images=200)  # doctest: +SKIP
        PosixPath('data/photos')

    Explained in: notebook 00
    """
    for name, value, least, most in [
        ("images", images, 1, 10**6),
        ("classes", classes, 1, images),
        ("size", size, 1, 4096),
        ("quality", quality, 1, 95),
    ]:
        if not least <= value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}.")
    root = Path(root).expanduser()
    marker = root / SAMPLE_MARKER
    made_by = {"recipe": SAMPLE_RECIPE, "images": images, "classes": classes, "size": size}
    made_by |= {"quality": quality, "seed": seed}
    files = [root / f"class_{i % classes}" / f"{i:05d}.jpg" for i in range(images)]
    if _read_marker(marker) == made_by | {"complete": True} and all(f.is_file() for f in files):
        return root

    _empty_sample_folder(root)
    _write_marker(marker, made_by | {"complete": False})
    photo = _hopper_photo()
    for number, file in enumerate(_with_progress(files, progress)):
        file.parent.mkdir(exist_ok=True)
        _vary_photo(photo, size, np.random.default_rng([seed, number])).save(file, quality=quality)
    _write_marker(marker, made_by | {"complete": True})
    return root


def _read_marker(marker: Path) -> dict[str, Any] | None:
    """How the folder was made; None without a marker, empty if it cannot be understood."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _write_marker(marker: Path, content: dict[str, Any]) -> None:
    """Write the marker in one step, so that nobody reads half of it."""
    part = marker.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, marker)


def _empty_sample_folder(root: Path) -> None:
    """Make `root`, or remove from it what an earlier call made; refuse a folder of others."""
    if root.exists() and not root.is_dir():
        raise FileExistsError(f"{root.absolute()} is a file; give a folder for the sample images.")
    root.mkdir(parents=True, exist_ok=True)
    strangers = [path.name for path in root.iterdir() if not _is_clutter(path.name)]
    if strangers and _read_marker(root / SAMPLE_MARKER) is None:
        raise FileExistsError(
            f"{root.absolute()} holds other files ({', '.join(sorted(strangers)[:3])}); give a new "
            "or empty folder for the sample images."
        )
    for folder in root.glob("class_*"):
        shutil.rmtree(folder)


def _with_progress(files: list[Path], progress: bool) -> Iterable[Path]:
    """The files, behind a progress bar if wanted."""
    if not progress:
        return files
    from tqdm.auto import tqdm

    return tqdm(files, desc="Making photos", unit="photo")


def _hopper_photo() -> Image.Image:
    """Matplotlib's sample photo of Grace Hopper, 512 x 600 pixels, in the public domain."""
    from matplotlib.cbook import get_sample_data

    return load_image(str(get_sample_data("grace_hopper.jpg", asfileobj=False)))


def _vary_photo(photo: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """A square crop of half to full width, at a random place, with other colours."""
    from PIL import Image, ImageEnhance, ImageOps

    side = photo.width * rng.uniform(0.5, 1.0)
    left, top = rng.uniform(0, photo.width - side), rng.uniform(0, photo.height - side)
    varied = photo.resize(
        (size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )
    if rng.random() < 0.5:
        varied = ImageOps.mirror(varied)
    for enhance in (ImageEnhance.Color, ImageEnhance.Brightness, ImageEnhance.Contrast):
        varied = enhance(varied).enhance(rng.uniform(0.7, 1.3))
    return varied


# ----------------------------------------------------------------------------------- where to start


@dataclass(frozen=True)
class HardwarePreset:
    """Settings often advised for a kind of machine, as ranges (low, high), to start from.

    Args:
        cpu_cores: CPU cores of the machine.
        accelerator: Its GPU.
        num_workers: Worker processes.
        batch_size: Samples per batch.
        pin_memory: Whether to pin batches.
        prefetch_factor: Batches each worker prepares ahead.
    """

    cpu_cores: int
    accelerator: str
    num_workers: tuple[int, int]
    batch_size: tuple[int, int]
    pin_memory: bool
    prefetch_factor: int


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


HARDWARE_PRESETS: Mapping[str, HardwarePreset] = MappingProxyType(
    {
        "16-core + A100": HardwarePreset(16, "A100", (8, 12), (64, 128), True, 3),
        "8-core + RTX 4080": HardwarePreset(8, "RTX 4080", (4, 6), (32, 64), True, 2),
    }
)

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


def rule_of_thumb_workers(
    cpu_cores: float, batch_size: int, available_memory: float, memory_per_worker: float
) -> int:
    """The usual first guess: the least of cores, batch size and the workers that memory holds.

    Args:
        cpu_cores: CPU cores that may be used.
        batch_size: Samples per batch.
        available_memory: Free memory, in any unit.
        memory_per_worker: Memory that one worker needs, in the same unit.

    Returns:
        Number of workers, at least 1.

    Raises:
        ValueError: An argument is zero, negative or not a number.

    Example:
        >>> rule_of_thumb_workers(16, 64, available_memory=24, memory_per_worker=4)
        6

    Explained in: notebook 00
    """
    for name, value in [
        ("cpu_cores", cpu_cores),
        ("batch_size", batch_size),
        ("available_memory", available_memory),
        ("memory_per_worker", memory_per_worker),
    ]:
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
    return max(1, int(min(cpu_cores, batch_size, available_memory / memory_per_worker)))
