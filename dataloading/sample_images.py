"""Photos that cost what real ones cost to load, made here: no download, the same everywhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.images import is_clutter, load_image

if TYPE_CHECKING:
    from PIL import Image

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
    strangers = [path.name for path in root.iterdir() if not is_clutter(path.name)]
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
