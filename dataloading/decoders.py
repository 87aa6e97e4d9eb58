"""Ways to decode an image file: as Pillow does, at a reduced size, or straight to a tensor."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dataloading.draft_crops import REDUCTIONS, SPARE, DraftCrop, open_undecoded
from dataloading.images import load_image
from dataloading.transform_steps import kind_of, name_of, steps_of

if TYPE_CHECKING:
    from PIL import Image

DECODERS = ("pillow", "pillow-draft", "torchvision")

KEEP_SIZE = ("ToImage", "PILToTensor", "ToTensor", "Identity", "ToPureTensor")

JPEG_START = b"\xff\xd8\xff"
PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
OTHER_FRAMES = {*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}


def decoder_for(name: str, transform: Any = None) -> Callable[[str | Path], Any]:
    """The function that reads image files for `ImageFiles.loader`, by the name of a decoder.

    Args:
        name: One of `DECODERS`. `"pillow"` is the usual one, `load_image`. `"pillow-draft"` lets
            the JPEG decoder leave out pixels of large photos: for transforms that begin with a
            `Resize`, whose result it keeps at the same shape, or with a `RandomResizedCrop` (use
            `draft_ready(transform)`). `"torchvision"` gives uint8 tensors
            (C, H, W) in place of PIL images: use `tensor_ready(transform)` with it.
        transform: The transform of the images; only `"pillow-draft"` looks at it.

    Returns:
        `load(path)`, which gives an RGB image and can be sent to workers. It raises OSError for a
        file that it cannot read, with the file in the text.

    Raises:
        ValueError: There is no such decoder.
        RuntimeError: This torchvision has no image decoder.

    Warns:
        UserWarning: `"pillow-draft"` has to decode at full size, and why.

    Example:
        >>> decoder_for("pillow").__name__
        'load_image'

    Explained in: notebook 06
    """
    if name not in DECODERS:
        raise ValueError(f"There is no decoder {name!r}; choose one of {', '.join(DECODERS)}.")
    if name == "pillow-draft":
        return _draft_loader(transform)
    if name == "torchvision":
        _check_torchvision()
        return load_tensor
    return load_image


# --------------------------------------------------------------------------------- reduced decoding


class DraftLoader:
    """Reads JPEG files at a half, a quarter or an eighth of their size, where that is enough.

    The decoded photo has at least twice the size that the first resize asks for, and the same
    shape comes out of that. Other files are read as `load_image` does.

    Args:
        size: Of the resize: the shorter side, or (height, width), in pixels.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = size

    def __call__(self, path: str | Path) -> Image.Image:
        """Open an image file as RGB; raises as `load_image` does."""
        from PIL import Image

        try:
            with Image.open(path) as image:
                if image.format in ("JPEG", "MPO"):
                    if scale := self.reduction(image.size):
                        image.draft(None, (image.width // scale, image.height // scale))
                    return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            pass  # the plain way says what is wrong
        return load_image(path)

    def reduction(self, size: tuple[int, int]) -> int | None:
        """By how much a photo of so many pixels (width, height) can be reduced; None: not at all.

        Example:
            >>> DraftLoader(224).reduction((4000, 3000)), DraftLoader(224).reduction((512, 512))
            (4, None)
            >>> DraftLoader(224).reduction((800, 400)) is None
            True
        """
        for scale in REDUCTIONS:
            reduced = (-(-size[0] // scale), -(-size[1] // scale))  # an incomplete pixel counts
            if self._is_enough(reduced) and self._resized(reduced) == self._resized(size):
                return scale
        return None

    def _is_enough(self, size: tuple[int, int]) -> bool:
        if isinstance(self.size, int):
            return min(size) >= SPARE * self.size
        height, width = self.size
        return size[0] >= SPARE * width and size[1] >= SPARE * height

    def _resized(self, size: tuple[int, int]) -> int:
        """The longer side after the resize: a pixel lost to rounding would change the shape."""
        return int(self.size * max(size) / min(size)) if isinstance(self.size, int) else 0

    def __repr__(self) -> str:
        return f"DraftLoader({self.size})"


def _draft_loader(transform: Any) -> Callable[[str | Path], Any]:
    """A loader for reduced sizes if the transform allows it, else the plain one and a warning."""
    steps = [pair for pair in steps_of(transform) if kind_of(pair[1]) not in KEEP_SIZE]
    if not steps:
        reason = "there is no transform that resizes it"
    else:
        path, step = steps[0]
        if isinstance(step, DraftCrop):
            return open_undecoded
        size = _resize_target(step)
        if size is not None:
            return DraftLoader(size)
        reason = f"{path} is {name_of(step)}"
    warnings.warn(
        f'decoder="pillow-draft" decodes every photo at its full size here: {reason}, and only a '
        "Resize(size) as the first step, or draft_ready(transform) of a RandomResizedCrop, says how "
        "small it may be.",
        stacklevel=3,
    )
    return load_image


def _resize_target(step: Any) -> int | tuple[int, int] | None:
    """The size of a plain `Resize` in pixels; None for any other step."""
    if kind_of(step) != "Resize" or step.size is None or step.max_size is not None:
        return None
    size = [step.size] if isinstance(step.size, int) else [int(side) for side in step.size]
    return size[0] if len(size) == 1 else (size[0], size[1])


# ------------------------------------------------------------------------------- straight to tensors


def load_tensor(path: str | Path) -> torch.Tensor:
    """Read an image file as a uint8 RGB tensor (3, height, width), several times as fast as Pillow.

    JPEG files are decoded by torchvision. What it reads otherwise than Pillow, or not at all (CMYK,
    other formats, photos above Pillow's limit), is left to `load_image`, and so are the errors. PNG
    files are too: torchvision (0.29) ends the process at a damaged one. As there, an orientation tag
    turns nothing.

    Args:
        path: The file; grey, palette and transparent images become RGB too.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is no image, or a damaged one; the text names the file and the reason.

    Example:
        >>> load_tensor("photos/train/pizza/1.jpg").shape  # doctest: +SKIP
        torch.Size([3, 384, 512])

    Explained in: notebook 06
    """
    from torchvision.transforms.functional import pil_to_tensor

    data = np.fromfile(path, dtype=np.uint8)
    if _reads_like_pillow(memoryview(data.data)):
        try:
            return _decode_jpeg(torch.from_numpy(data))
        except RuntimeError:
            pass  # damaged: Pillow says how, or reads it all the same
    return pil_to_tensor(load_image(path))


def _decode_jpeg(data: torch.Tensor) -> torch.Tensor:
    """Decode a JPEG file by the operator behind `torchvision.io.decode_jpeg` (0.21 to 0.29).

    That function warns of its own end at every call since torchvision 0.29.
    """
    import torchvision.io

    mode = torchvision.io.ImageReadMode.RGB.value
    return torch.ops.image.decode_jpeg(data, mode, False)  # False: as the orientation tag finds it


def _reads_like_pillow(data: memoryview) -> bool:
    """Whether torchvision gives the picture that Pillow gives, as far as the header tells."""
    from PIL import Image

    frame = _jpeg_frame(data) if data[:3] == JPEG_START else None
    limit = Image.MAX_IMAGE_PIXELS
    return frame is not None and (limit is None or frame[0] * frame[1] <= limit)


def _jpeg_frame(data: memoryview) -> tuple[int, int] | None:
    """Width and height of a grey or RGB JPEG file of 8 bits; None for any other."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in PLAIN_FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            return (width, height) if bits == 8 and channels in (1, 3) else None
        if marker in OTHER_FRAMES:
            return None
        # Bytes of 0xFF may fill the space before a marker; else its segment tells its length.
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _check_torchvision() -> None:
    """Decode one pixel.

    Raises:
        RuntimeError: torchvision was built without its decoders, or has them no more.
    """
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "JPEG")
    try:
        _decode_jpeg(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    except (ImportError, AttributeError, RuntimeError) as error:
        raise RuntimeError(
            f'decoder="torchvision" cannot be used with this torchvision: {error} Use '
            'decoder="pillow".'
        ) from error
