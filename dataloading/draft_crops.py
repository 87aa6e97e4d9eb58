"""Choosing the crop before decoding: a large photo is decoded at the size that its crop needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional

from dataloading.images import load_image
from dataloading.transform_steps import NamedSteps, kind_of, steps_of

REDUCTIONS = (8, 4, 2)  # by which a JPEG decoder can leave pixels out
SPARE = 2  # times the target: what the resize still has to average over keeps its quality
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def draft_ready(transform: Any) -> Any:
    """The same transform for photos that are not decoded yet, where it begins with a random crop.

    A `RandomResizedCrop` as the first step draws its box from the size in the header, and has the
    decoder leave out pixels that the crop does not need. Any other transform stays as it is.

    Args:
        transform: For PIL images; it is not changed.

    Example:
        >>> draft_ready(transforms.RandomResizedCrop(224)).transforms
        [DraftCrop(size=(224, 224))]
    """
    steps = steps_of(transform)
    if not steps or kind_of(steps[0][1]) != "RandomResizedCrop":
        return transform
    path, crop = steps[0]
    return NamedSteps([(path, DraftCrop(crop)), *steps[1:]])


class DraftCrop:
    """A `RandomResizedCrop` that is given a photo before it is decoded: the same boxes.

    Args:
        crop: torchvision's transform (v1 or v2).
    """

    __name__ = "RandomResizedCrop"  # what its owner knows it as

    def __init__(self, crop: Any) -> None:
        self.size = (int(crop.size[0]), int(crop.size[1]))
        self.scale, self.ratio = crop.scale, crop.ratio
        self.interpolation = transforms.InterpolationMode(crop.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Crop one photo at random and resize it to RGB; raises as `load_image` does."""
        full = image.size
        box = transforms.RandomResizedCrop.get_params(image, list(self.scale), list(self.ratio))
        path = getattr(image, "filename", "")
        scale = self.reduction(box) if getattr(image, "format", None) in ("JPEG", "MPO") else None
        try:
            if scale is not None:
                image.draft(None, (full[0] // scale, full[1] // scale))
            image = image.convert("RGB")
        except UNREADABLE:
            if not path:
                raise
            image = load_image(path)  # says what is wrong, or reads it all the same
        if image.size == full:
            return functional.resized_crop(image, *box, list(self.size), self.interpolation)
        across, down = image.width / full[0], image.height / full[1]
        top, left, height, width = box
        part = (left * across, top * down, (left + width) * across, (top + height) * down)
        resample = functional.pil_modes_mapping[self.interpolation]
        return image.resize(self.size[::-1], Image.Resampling(resample), box=part)

    def reduction(self, box: tuple[int, int, int, int]) -> int | None:
        """By how much a photo can be reduced for a box (top, left, height, width); None: not at all.

        Example:
            >>> crop = DraftCrop(transforms.RandomResizedCrop(224))
            >>> crop.reduction((0, 0, 2000, 3000)), crop.reduction((0, 0, 400, 400))
            (4, None)
        """
        _, _, height, width = box
        for scale in REDUCTIONS:
            if height >= scale * SPARE * self.size[0] and width >= scale * SPARE * self.size[1]:
                return scale
        return None

    def __repr__(self) -> str:
        return f"DraftCrop(size={self.size})"


def open_undecoded(path: str | Path) -> Image.Image:
    """Open a JPEG file without decoding it, for a `DraftCrop`; any other file as `load_image` does.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is no image, or a damaged one; the text names the file and the reason.
    """
    try:
        image = Image.open(path)
    except UNREADABLE:
        return load_image(path)
    if image.format in ("JPEG", "MPO"):
        return image
    image.close()
    return load_image(path)
