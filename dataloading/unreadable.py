"""Whether an error says that a sample cannot be read, or that the program has a fault."""

from __future__ import annotations

import struct
import traceback
import zlib
from collections.abc import Iterator
from types import FrameType

# The system's word on one file. Too many open files, a full disk or a lost network are not that.
OF_A_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
# What decoders raise for damaged files; anywhere else these are faults of the program.
BY_DECODERS = (SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)
WITHOUT_MEMORY = "alloc"  # in the text of torch's error when memory is short
DECODERS = ("PIL.ImageFile", "torchvision.io.")
PILLOW_PLUGIN = "ImagePlugin"


def is_unreadable(error: BaseException, also: tuple[type[Exception], ...] = ()) -> bool:
    """Whether an error means that one sample cannot be read, so that it may be skipped.

    Unreadable is

    - a file that is missing, forbidden or a folder;
    - an `OSError` without a number from the system, as Pillow and `load_image` raise it for files
      that are no image, cut or damaged; not one of its subclasses (time-outs, lost connections),
      and not one from saving an image;
    - what Pillow or `torchvision.io` raise while they open or decode a file: `SyntaxError`,
      `ValueError`, `EOFError`, `IndexError`, `struct.error`, `zlib.error`, torchvision's
      `RuntimeError`, and Pillow's refusal of far too large images;
    - anything in `also`.

    Everything else (`TypeError`, `KeyError`, `AttributeError`, a `ValueError` from a transform, no
    memory, too many open files) is a fault of the program or the machine.

    Args:
        error: What was raised, with its traceback.
        also: Further types that count as unreadable.

    Example:
        >>> is_unreadable(FileNotFoundError(2, "gone")), is_unreadable(ValueError("crop size"))
        (True, False)
    """
    from PIL import Image, UnidentifiedImageError

    if also and isinstance(error, also):
        return True
    if isinstance(error, (*OF_A_FILE, UnidentifiedImageError)):
        return True
    if type(error) is OSError:
        return error.errno is None and not _was_saving(error)
    if isinstance(error, Image.DecompressionBombError):
        return True
    if type(error) is RuntimeError:
        return WITHOUT_MEMORY not in str(error) and _was_decoding(error)
    return isinstance(error, BY_DECODERS) and _was_decoding(error)


def _was_decoding(error: BaseException) -> bool:
    """Whether the error passed through a function that opens or decodes an image file."""
    return not _was_saving(error) and any(
        name.startswith(DECODERS)
        or (name.startswith("PIL.") and name.endswith(PILLOW_PLUGIN))
        or (name == "PIL.Image" and frame.f_code.co_name == "open")
        for name, frame in _frames(error)
    )


def _was_saving(error: BaseException) -> bool:
    """Whether the error came while an image was written, as some transforms do."""
    return any(
        name == "PIL.Image" and frame.f_code.co_name == "save" for name, frame in _frames(error)
    )


def _frames(error: BaseException) -> Iterator[tuple[str, FrameType]]:
    """Module and frame of each function that the error passed through."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_globals.get("__name__", ""), frame
