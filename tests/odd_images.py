"""Image files as they are found in the wild, made in the tests."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

ORIENTATION = 0x0112


def photo(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Noise, which no format makes small."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(path: Path, mode: str = "RGB", seed: int = 0, **options: Any) -> Path:
    """A photo in a mode; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    photo(seed=seed).convert(mode).save(path, **options)
    return path


def cut(path: Path, share: float = 0.6) -> Path:
    """Leave the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def png_header(path: Path, width: int, height: int) -> Path:
    """The header of a PNG file of any size, and no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))
        )

    header = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    )
    return path


def tagged(path: Path, orientation: int, size: tuple[int, int] = (40, 20)) -> Path:
    """A photo with an orientation tag."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    photo(*size).save(path, exif=exif)
    return path


def sixteen_bit(path: Path) -> Path:
    """A grey ramp of 16 bits, from black to white."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    Image.fromarray(np.tile(ramp, (4, 1))).save(path)
    return path


def see_through(path: Path, seed: int = 0) -> Path:
    """A palette image with a transparency for each colour."""
    photo(seed=seed).convert("P").save(path, transparency=bytes(range(256)))
    return path


def pillow_globals() -> tuple[Any, ...]:
    """What nobody may change for good, nor for a moment."""
    return ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
