"""From whatever an image file holds to upright RGB pixels: modes, orientation, cut files."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

SIXTEEN_BIT_FORMATS = ("PNG", "PPM")  # where mode I, of 32 bits, holds values of 16
JPEG_END = b"\xff\xd9"  # with this marker libjpeg fills up what is missing
TRUNCATED = "truncated"  # key in `Image.info` of an image that was read in part
ORIENTATION = 0x0112
UPRIGHT = 1
TURNS = {  # orientation -> name in Image.Transpose; Exif 2.3, section 4.6.4
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
VALUE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
ENTRY_BYTES = 12


def to_rgb(image: Image.Image, *, upright: bool = False) -> Image.Image:
    """Any image as RGB, with 8 bits a channel and without a warning.

    Args:
        image: An opened image of any mode. 16 bits are scaled to 8 (Pillow itself would clip them
            to white); transparency is dropped.
        upright: Turn it as its orientation tag says.

    Returns:
        An image in mode RGB.

    Raises:
        OSError: The image cannot be decoded.

    Example:
        >>> from PIL import Image
        >>> to_rgb(Image.fromarray(np.full((1, 1), 0x7FFF, dtype=np.uint16))).getpixel((0, 0))
        (127, 127, 127)
    """
    image.load()  # first: a PNG may bring its orientation after its pixels
    rgb = _eight_bit(image) if is_sixteen_bit(image) else image
    if rgb.mode == "P" and "transparency" in rgb.info:
        rgb = rgb.convert("RGBA")  # on the straight way Pillow warns
    rgb = rgb.convert("RGB")
    if not upright:
        return rgb
    orientation, _ = read_orientation(image)
    return turned(rgb, orientation)


def is_sixteen_bit(image: Image.Image) -> bool:
    """Whether an image has one channel of 16 bits (Pillow reduces 16-bit colour by itself)."""
    return image.mode.startswith("I;16") or (
        image.mode == "I" and image.format in SIXTEEN_BIT_FORMATS
    )


def _eight_bit(image: Image.Image) -> Image.Image:
    """The high byte of each value, which is also what Pillow keeps of 16-bit colour."""
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def turned(image: Image.Image, orientation: int | None) -> Image.Image:
    """Turn an image upright, as `ImageOps.exif_transpose` does."""
    from PIL import Image

    name = TURNS.get(orientation or UPRIGHT)
    return image if name is None else image.transpose(Image.Transpose[name])


def read_orientation(image: Image.Image) -> tuple[int | None, bool]:
    """The orientation tag of an image, and whether its Exif data is broken.

    Reads the bytes itself: Pillow would warn of broken data, or raise. A TIFF file has no tag here,
    since Pillow turns it upright when it loads it.

    Args:
        image: An opened image; of a PNG, a loaded one.

    Returns:
        `(orientation, broken)`: 1 to 8 or None, and whether some of the data could not be read.

    Example:
        >>> from PIL import Image
        >>> read_orientation(Image.new("RGB", (4, 4)))
        (None, False)
    """
    data = image.info.get("exif")
    if not isinstance(data, bytes) or not data:
        return None, False
    data = data.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(data[:4])
    if order is None:
        return None, True
    orientation, broken = None, False
    try:
        (start,) = struct.unpack_from(f"{order}L", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, start)
        for number in range(count):
            place = start + 2 + number * ENTRY_BYTES
            tag, kind, values, offset = struct.unpack_from(f"{order}HHLL", data, place)
            size = VALUE_BYTES.get(kind, 0) * values
            broken |= size > 4 and offset + size > len(data)  # longer values stand elsewhere
            if tag == ORIENTATION:
                (orientation,) = struct.unpack_from(f"{order}H", data, place + 8)
    except struct.error:  # the data ends early
        broken = True
    valid = orientation == UPRIGHT or orientation in TURNS
    return (orientation if valid else None), broken


def is_truncation(error: BaseException) -> bool:
    """Whether Pillow says that a file ends early."""
    return isinstance(error, OSError) and "truncated" in str(error).lower()


def readable_part(path: str | Path, *, upright: bool = False) -> Image.Image:
    """What can be read of a cut image file, the rest left grey or black.

    Gives the pixels that Pillow's switch `LOAD_TRUNCATED_IMAGES` would give, without the switch,
    which would hold for every thread and every file. `info["truncated"]` of the image is True.

    Args:
        path: The file.
        upright: Turn it as its orientation tag says.

    Returns:
        An image in mode RGB, of full size.

    Raises:
        OSError: Nothing of it can be read.
    """
    from PIL import Image

    content = Path(path).read_bytes()
    with Image.open(io.BytesIO(content + JPEG_END)) as image:
        try:
            image.load()
        except OSError:
            image.tile = []  # nothing is left to decode: the pixels so far are the image
        rgb = to_rgb(image, upright=upright)
    if all(low == high for low, high in rgb.getextrema()):  # type: ignore[misc]
        raise OSError("truncated before its first pixels")
    rgb.info[TRUNCATED] = True
    return rgb
