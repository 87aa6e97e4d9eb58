"""Opening image files of any size and kind, without Pillow's warnings and limits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import ImageFile

PREFIX_BYTES = 16  # what Pillow shows its plugins
SURE_SIGNS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")  # formats that no text begins like
SHOWN_CHARACTERS = 30


def open_header(file: IO[bytes], name: str = "") -> ImageFile.ImageFile:
    """Open an image as `Image.open` does, whatever number of pixels its header tells.

    Asks Pillow's plugins directly. `Image.open` would warn above `Image.MAX_IMAGE_PIXELS` and raise
    above twice that; changing the limit, or the warnings filter, would reach every other thread.

    Args:
        file: An open binary file.
        name: Its path.

    Returns:
        An image that is not decoded yet.

    Raises:
        UnidentifiedImageError: It is no image.
        OSError: It begins like an image, and its header is damaged.
        Image.DecompressionBombError: A plugin itself refuses so many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    prefix = file.read(PREFIX_BYTES)
    tried: set[str] = set()
    for load_plugins in (Image.preinit, Image.init):  # the usual ones first, then all
        load_plugins()
        for kind in [one for one in Image.ID if one not in tried]:
            tried.add(kind)
            factory, accept = Image.OPEN[kind]
            try:
                accepted = accept is None or accept(prefix)
                if accepted and not isinstance(accepted, str):  # a text says what is missing
                    file.seek(0)
                    return factory(file, name)
            except (SyntaxError, IndexError, TypeError, struct.error) as error:
                if accept is not None and kind in SURE_SIGNS:
                    raise OSError(f"damaged {kind} file: {error}") from error
    raise UnidentifiedImageError(f"not an image{_looks_like_text(file)}")


def _looks_like_text(file: IO[bytes]) -> str:
    """How a file begins, where that is text: often a page that says what went wrong."""
    file.seek(0)
    try:
        text = " ".join(file.read(4 * SHOWN_CHARACTERS).decode("ascii").split())
    except UnicodeDecodeError:
        return ""
    if not text.isprintable() or not text:
        return ""
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return f": text that begins with {cut!r}"


def format_by_name(path: str) -> str | None:
    """The format that the ending of a name promises; None where it promises none.

    Example:
        >>> format_by_name("photo.JPG"), format_by_name("notes.txt")
        ('JPEG', None)
    """
    from PIL import Image

    return Image.registered_extensions().get(Path(path).suffix.lower())
