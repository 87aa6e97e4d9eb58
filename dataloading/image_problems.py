"""What is in one image file, and how to handle it."""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataloading.image_headers import format_by_name, open_header
from dataloading.image_modes import UPRIGHT, is_sixteen_bit, is_truncation, read_orientation
from dataloading.images import short_reason
from dataloading.watchdog import ProbeTimeout

if TYPE_CHECKING:
    from PIL import ImageFile

BAD = {  # problem -> handling: these files give no sample
    "empty": "remove it, or fetch it again",
    "not an image": "remove it, or fetch it again",
    "truncated": "repair or remove it; image_dataset(load_truncated=True) loads the part that can be read",
    "damaged": "repair or remove it",
    "cannot be opened": "check its name and the rights to it",
    "far too large": "Pillow refuses it: make it smaller, or remove it",
}
ODD = {  # problem -> handling: these files load
    "very large": "Pillow warns of it: make it smaller",
    "16 bit": "scaled to 8 bit by load_image; Pillow's convert would clip it to white",
    "32 bit": "values above 255 are clipped: scale them yourself",
    "palette": "converted to RGB",
    "palette with transparency": "converted to RGB by way of RGBA; the transparency is dropped",
    "CMYK": "converted to RGB",
    "grey": "converted to RGB",
    "transparency": "converted to RGB; the transparency is dropped",
    "other mode": "converted to RGB",
    "orientation tag": "not turned, as in ImageFolder; image_dataset(upright=True) turns it upright",
    "animated": "the first of its pictures is used",
    "wrong extension": "fine: the content decides; rename it for other programs",
    "broken metadata": "fine: the pixels are read, the metadata is not",
}
HANDLING = BAD | ODD
MODES = {
    "P": "palette",
    "PA": "palette with transparency",
    "CMYK": "CMYK",
    "L": "grey",
    "1": "grey",
    "LA": "transparency",
    "La": "transparency",
    "RGBA": "transparency",
    "RGBa": "transparency",
    "I": "32 bit",
    "F": "32 bit",
}
STILL = ("MPO",)  # several pictures of one moment, as phones store them
SAME_FORMAT = (("JPEG", "MPO"),)


@dataclass
class Seen:
    """What was found in one file."""

    path: str
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    mode: str | None = None
    width: int | None = None
    height: int | None = None
    size_bytes: int | None = None
    orientation: int | None = None
    decode_s: float | None = None


def look_at(path: str, max_pixels: int | None, decode: bool) -> Seen:
    """What is in one file.

    Args:
        path: The file.
        max_pixels: See `scan_images`; None sets no limit.
        decode: Whether to decode it, too.

    Returns:
        What was found; `reason` is empty unless the file gives no sample.
    """
    from PIL import Image, UnidentifiedImageError

    seen = Seen(path)
    try:
        seen.size_bytes = os.path.getsize(path)
        with open(path, "rb") as file:
            if not seen.size_bytes:
                return _bad(seen, "empty", "the file is empty")
            source = io.BytesIO(file.read()) if decode else file  # only decoding is timed
            with open_header(source, path) as image:
                _examine(seen, image, max_pixels, decode)
    except (ProbeTimeout, MemoryError):  # not the file's fault
        raise
    except UnidentifiedImageError as error:
        return _bad(seen, "not an image", short_reason(error))
    except Image.DecompressionBombError as error:
        return _bad(seen, "far too large", short_reason(error))
    except Exception as error:  # a decoder may raise anything for a damaged file
        if isinstance(error, OSError) and error.filename is not None:
            return _bad(seen, "cannot be opened", short_reason(error))
        return _bad(seen, "truncated" if is_truncation(error) else "damaged", short_reason(error))
    return seen


def _bad(seen: Seen, problem: str, reason: str) -> Seen:
    seen.problems.insert(0, problem)
    seen.reason = reason if reason.startswith(problem) else f"{problem}: {reason}"
    return seen


def _examine(seen: Seen, image: ImageFile.ImageFile, max_pixels: int | None, decode: bool) -> None:
    """Note what an opened image is; decoding it may raise."""
    seen.mode, (seen.width, seen.height) = image.mode, image.size
    pixels = seen.width * seen.height
    if max_pixels is not None and pixels > 2 * max_pixels:
        _bad(seen, "far too large", f"{pixels:,} pixels, more than twice {max_pixels:,}")
        return
    large = max_pixels is not None and pixels > max_pixels
    if large:
        seen.problems.append("very large")
    if mode := _mode_problem(image):
        seen.problems.append(mode)
    if _is_animated(image):
        seen.problems.append("animated")
    promised = format_by_name(seen.path)
    actual = image.format
    if promised is not None and promised != actual and (promised, actual) not in SAME_FORMAT:
        seen.problems.append("wrong extension")
    if decode and not large:
        began = time.perf_counter()
        image.load()
        seen.decode_s = time.perf_counter() - began
    seen.orientation, broken = read_orientation(image)
    if seen.orientation not in (None, UPRIGHT):
        seen.problems.append("orientation tag")
    if broken:
        seen.problems.append("broken metadata")


def _mode_problem(image: ImageFile.ImageFile) -> str | None:
    if is_sixteen_bit(image):
        return "16 bit"
    if image.mode == "P" and "transparency" in image.info:
        return "palette with transparency"
    return None if image.mode == "RGB" else MODES.get(image.mode, "other mode")


def _is_animated(image: ImageFile.ImageFile) -> bool:
    try:
        return image.format not in STILL and bool(getattr(image, "is_animated", False))
    except (OSError, EOFError, SyntaxError, ValueError):  # a later picture is broken
        return True
