"""The single steps of a torchvision transform, what to call them, and conversions of our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision import transforms
from torchvision.transforms import functional

TORCHVISION = "torchvision.transforms."
# Of Pillow; with the others, ToTensor does not just divide by 255.
EIGHT_BIT_MODES = ("L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")
WHITE = 255  # uint8


class NamedSteps(transforms.Compose):
    """Steps rearranged from a transform, and the attribute paths by which its owner knows them.

    Args:
        steps: Pairs of path and step.
    """

    def __init__(self, steps: list[tuple[str, Any]]) -> None:
        super().__init__([step for _, step in steps])
        self.paths = [path for path, _ in steps]


def steps_of(transform: Any, path: str = "transform") -> list[tuple[str, Any]]:
    """The single steps of a transform, each with its attribute path.

    Example:
        >>> steps_of(transforms.Compose([transforms.CenterCrop(2)]))
        [('transform.transforms[0]', CenterCrop(size=(2, 2)))]
    """
    if transform is None:
        return []
    if isinstance(transform, NamedSteps):
        return list(zip(transform.paths, transform.transforms, strict=True))
    kind, parts = kind_of(transform), []
    if kind == "Compose":
        parts = [(f"{path}.transforms[{i}]", one) for i, one in enumerate(transform.transforms)]
    elif type(transform) is nn.Sequential:
        parts = [(f"{path}[{i}]", one) for i, one in enumerate(transform)]
    elif kind == "ImageClassification":  # what weights.transforms() gives
        return [(path, step) for step in _preset_steps(transform)]
    else:
        return [(path, transform)]
    return [step for part_path, part in parts for step in steps_of(part, part_path)]


def _preset_steps(preset: Any) -> list[Any]:
    """What the `forward` of torchvision's preset for classification does, step by step."""
    size, interpolation = preset.resize_size, preset.interpolation
    return [
        transforms.Resize(size, interpolation=interpolation, antialias=preset.antialias),
        transforms.CenterCrop(preset.crop_size),
        transforms.ToTensor(),
        transforms.Normalize(preset.mean, preset.std),
    ]


def kind_of(step: Any) -> str | None:
    """The class of a step of torchvision itself, v1 and v2 alike; None for one of anybody else."""
    kind = type(step)
    return kind.__name__ if kind.__module__.startswith(TORCHVISION) else None


def name_of(step: Any) -> str:
    """What to call a step in a message: its class, or its own name if it is a function."""
    return getattr(step, "__name__", type(step).__name__)


class ToFloat:
    """An 8-bit image tensor as float32 in [0, 1], as `ToTensor` does with PIL images."""

    def __call__(self, image: Any) -> torch.Tensor:
        """Convert one image (C, H, W); one of floats stays as it is."""
        if not isinstance(image, torch.Tensor):
            raise TypeError(
                f"ToTensor was to get an image tensor, but a step before it gave {type(image)}; use "
                'decoder="pillow" for this transform.'
            )
        if image.dtype != torch.uint8:
            return image
        return image.to(torch.get_default_dtype()).div(WHITE)

    def __repr__(self) -> str:
        return "ToFloat()"


class ToUint8:
    """An 8-bit image as a uint8 tensor (C, H, W), to be converted to float with its batch."""

    def __call__(self, image: Any) -> torch.Tensor:
        """Convert one PIL image or array (H, W, C); tensors stay as they are."""
        if isinstance(image, torch.Tensor):
            if image.dtype == torch.uint8:
                return image
            kind: Any = image.dtype
        elif isinstance(image, np.ndarray):
            if image.dtype == np.uint8 and image.ndim in (2, 3):
                array = image[:, :, None] if image.ndim == 2 else image
                return torch.from_numpy(array.transpose(2, 0, 1).copy())
            kind = f"an array of {image.dtype} in {image.ndim} dimensions"
        else:
            kind = getattr(image, "mode", type(image))
            if kind in EIGHT_BIT_MODES:
                return functional.pil_to_tensor(image)
        raise TypeError(
            f"Expected an image of 8 bits a channel before the conversion to float, got {kind}: "
            "it cannot travel in a uint8 batch. Use the transform without split_transform."
        )

    def __repr__(self) -> str:
        return "ToUint8()"
