"""Transforms rearranged for speed: for tensors in place of PIL images, and with a part per batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchvision import transforms
from torchvision.transforms import functional, v2

from dataloading.transform_steps import (
    WHITE,
    NamedSteps,
    ToFloat,
    ToUint8,
    kind_of,
    name_of,
    steps_of,
)

STEP_ERRORS = (TypeError, AttributeError, ValueError, RuntimeError)


def tensor_ready(transform: Any) -> Any:
    """The same transform for uint8 tensors (C, H, W), as `decoder="torchvision"` gives them.

    `ToTensor` becomes a conversion to float32 in [0, 1], `PILToTensor` does nothing, and resizing is
    that of torchvision's v2, which keeps uint8 (four times as fast as v1 on tensors) and is always
    antialiased, as it is on PIL images. Every other step stays as it is: torchvision's take tensors
    too. All draw the same random numbers as before. A callable of your own gets the tensor.

    Args:
        transform: A transform of torchvision (v1 or v2), a `Compose` or `nn.Sequential` of some, or
            None. It is not changed.

    Returns:
        A `Compose` of the steps. It raises TypeError at the first image if one of them needs a PIL
        image, and names it as `transform.transforms[2]`. None stays None.

    Example:
        >>> ready = tensor_ready(transforms.Compose([transforms.CenterCrop(2), transforms.ToTensor()]))
        >>> ready(torch.full((3, 4, 4), 255, dtype=torch.uint8)).shape
        torch.Size([3, 2, 2])

    Explained in: notebook 06
    """
    if transform is None or isinstance(transform, TensorSteps):
        return transform
    ready, was_pil, is_pil = [], True, False  # what steps were given, and what they are given now
    for path, step in steps_of(transform):
        ready.append((path, step if is_pil else _for_tensors(step, was_pil)))
        if kind_of(step) == "ToPILImage":
            was_pil = is_pil = True
        elif _leaves_pil(step):
            was_pil = is_pil = False
    return TensorSteps(ready)


def split_transform(transform: Any) -> tuple[Any, nn.Module]:
    """Split a transform: what each sample needs, and the conversion to float for whole batches.

    The conversion to float32 and the `Normalize` steps at the end move out of the workers, which
    then hand over uint8 batches, a quarter of the bytes. Together both parts give what the whole
    transform gives, up to the rounding of floats. A conversion that is followed by anything else
    (`RandomErasing`, a callable of your own) stays where it is, with a UserWarning that names what
    holds it back.

    Args:
        transform: For PIL images, or for tensors from `tensor_ready`; None stays None. It is not
            changed.

    Returns:
        `(sample_transform, batch_transform)`. The second one is called with each batch, best on the
        training device: a `BatchTransform`, or `nn.Identity()` where nothing could move.

    Raises:
        TypeError: It cannot be called with an image.
        ValueError: A `Normalize` step has a standard deviation of 0.

    Example:
        >>> steps = [transforms.ToTensor(), transforms.Normalize([0.5], [0.25])]
        >>> sample_transform, batch_transform = split_transform(transforms.Compose(steps))
        >>> batch_transform
        BatchTransform(uint8 to float32 in [0, 1], mean=(0.5,), std=(0.25,))

    Explained in: notebook 06
    """
    if transform is not None and (isinstance(transform, type) or not callable(transform)):
        raise TypeError(f"transform={transform!r} must be a transform of one image, or None.")
    steps = steps_of(transform)
    at = next((number for number, (_, step) in enumerate(steps) if _gives_float(step)), None)
    if at is None:
        if (
            path := next((p for p, step in steps if kind_of(step) == "Normalize"), None)
        ) is not None:
            warnings.warn(
                f"{path} (Normalize) stays in the workers: no step before it converts to float32 in "
                "[0, 1], such as ToTensor() or v2.ToDtype(torch.float32, scale=True).",
                stacklevel=2,
            )
        return transform, nn.Identity()
    tail = steps[at + 1 :]
    for path, step in tail:
        if not _takes_batches(step):
            warnings.warn(
                f"{path} ({name_of(step)}) comes after the conversion to float and works on single "
                "images, so the conversion stays in the workers and batches stay float32. Put it "
                "before the conversion, if it takes uint8 images, to have uint8 batches.",
                stacklevel=2,
            )
            return transform, nn.Identity()
    kept = [*steps[:at], (steps[at][0], ToUint8())]
    kept += [(path, step) for path, step in tail if kind_of(step) == "ToPureTensor"]
    kind = type(transform) if isinstance(transform, NamedSteps) else NamedSteps
    return kind(kept), _batch_transform(tail)


def _batch_transform(tail: list[tuple[str, Any]]) -> BatchTransform:
    """All normalisations in one."""
    mean, std = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    normalised = [(path, step) for path, step in tail if kind_of(step) == "Normalize"]
    for path, step in normalised:
        next_std = torch.as_tensor(step.std, dtype=torch.float64).reshape(-1)
        if (next_std == 0).any():
            raise ValueError(f"{path} (Normalize) has a standard deviation of 0: {step.std}.")
        mean = mean + std * torch.as_tensor(step.mean, dtype=torch.float64).reshape(-1)
        std = std * next_std
    return BatchTransform(mean.tolist(), std.tolist()) if normalised else BatchTransform()


class BatchTransform(nn.Module):
    """Turns uint8 image batches into float32 in [0, 1], normalised, on the device where they are.

    Works on a tensor (N, C, H, W), and on the images of a batch `(images, labels)` or of a mapping
    whose first value they are; labels and the kind of container stay. It can also be the first
    module of a model: `nn.Sequential(batch_transform, model)`.

    Args:
        mean: Of each channel in [0, 1]; None does not normalise.
        std: Standard deviation of each channel, likewise.

    Example:
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
        >>> BatchTransform()(images).flatten()
        tensor([0., 1.])

    Explained in: notebook 06
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, mean: list[float] | None = None, std: list[float] | None = None) -> None:
        super().__init__()
        self.mean = tuple(mean) if mean is not None else None
        self.std = tuple(std) if std is not None else None
        channel_mean = torch.tensor(self.mean or (0.0,), dtype=torch.float64).reshape(-1, 1, 1)
        channel_std = torch.tensor(self.std or (1.0,), dtype=torch.float64).reshape(-1, 1, 1)
        # (x / 255 - mean) / std as x * scale + shift: two passes over the batch, not three.
        # Not persistent: the checkpoint of a model stays as it was.
        scale, shift = 1 / (WHITE * channel_std), -channel_mean / channel_std
        self.register_buffer("scale", scale.float(), persistent=False)
        self.register_buffer("shift", shift.float(), persistent=False)

    def forward(self, batch: Any) -> Any:
        """Convert a batch.

        Raises:
            TypeError: Its images are no uint8 tensor, such as when it was converted before.
        """
        if isinstance(batch, Mapping) and batch:
            first = next(iter(batch))
            changed: Any = copy.copy(batch)
            changed[first] = self._converted(batch[first])
            return changed
        if isinstance(batch, list | tuple) and batch:
            parts = [self._converted(batch[0]), *batch[1:]]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return self._converted(batch)

    def _converted(self, images: Any) -> torch.Tensor:
        if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
            raise TypeError(
                f"Expected a batch of uint8 images, got {getattr(images, 'dtype', type(images))}. "
                "The batch transform goes on each batch once, as it comes from the loader."
            )
        if self.scale.device != images.device:
            self.to(images.device)  # once: the batches after this one come to the same device
        # Contiguous, as models expect it, however the decoder left the channels.
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        if self.mean is None:
            return floats.mul_(1 / WHITE)  # a quarter of the time of dividing
        return floats.mul_(self.scale).add_(self.shift)

    def extra_repr(self) -> str:
        """What it does, in one line."""
        done = "uint8 to float32 in [0, 1]"
        return done if self.mean is None else f"{done}, mean={self.mean}, std={self.std}"


class TensorSteps(NamedSteps):
    """Steps that are given uint8 tensors, and say which of them cannot take one."""

    def __call__(self, image: Any) -> Any:
        """Apply all steps to one image."""
        for path, step in zip(self.paths, self.transforms, strict=True):
            try:
                changed = step(image)
            except STEP_ERRORS as error:
                if not _wants_pil(step, image):
                    raise
                raise TypeError(
                    f'{path} ({name_of(step)}) takes PIL images only, and decoder="torchvision" '
                    f"gives uint8 tensors (C, H, W): {type(error).__name__}: {error}. Use a step "
                    'that takes tensors, or decoder="pillow".'
                ) from error
            image = changed
        return image


class TensorResizedCrop(transforms.RandomResizedCrop):
    """`RandomResizedCrop` for uint8 tensors: the same boxes, by torchvision's quicker v2 resize."""

    __name__ = "RandomResizedCrop"  # what its owner knows it as

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Crop one image (C, H, W) at random and resize it."""
        box = self.get_params(image, self.scale, self.ratio)
        cropped = functional.crop(image, *box)
        # Decoders leave the channels of a pixel side by side; a crop copied in that order is resized
        # half as fast again as one with gaps between its rows.
        cropped = cropped[None].contiguous(memory_format=torch.channels_last)[0]
        return v2.functional.resize(cropped, self.size, self.interpolation, antialias=True)


def _for_tensors(step: Any, was_pil: bool) -> Any:
    """What does the same to a uint8 tensor as a step does to what it was given."""
    kind = kind_of(step)
    if kind == "ToTensor" or step is functional.to_tensor:
        return ToFloat()
    if kind == "PILToTensor" or step is functional.pil_to_tensor:
        return nn.Identity()
    if not was_pil and not getattr(step, "antialias", True):
        return step  # on a tensor, that is another picture
    if kind == "Resize":
        return v2.Resize(step.size, step.interpolation, step.max_size, antialias=True)
    if kind == "RandomResizedCrop":
        interpolation = step.interpolation  # v2 may keep its name only
        if isinstance(interpolation, str):
            interpolation = transforms.InterpolationMode(interpolation)
        return TensorResizedCrop(step.size, step.scale, step.ratio, interpolation)
    return step


def _leaves_pil(step: Any) -> bool:
    """Whether a step turns PIL images into tensors."""
    functions = (functional.to_tensor, functional.pil_to_tensor)
    return kind_of(step) in ("ToTensor", "PILToTensor", "ToImage") or step in functions


def _gives_float(step: Any) -> bool:
    """Whether a step converts images to float32 in [0, 1]."""
    kind = kind_of(step)
    if kind == "ToTensor" or isinstance(step, ToFloat) or step is functional.to_tensor:
        return torch.get_default_dtype() == torch.float32
    scales = kind == "ConvertImageDtype" or (kind == "ToDtype" and step.scale)
    return scales and step.dtype == torch.float32


def _takes_batches(step: Any) -> bool:
    """Whether a step after the conversion gives the same for a whole batch at once."""
    kind = kind_of(step)
    if kind == "Normalize":
        return torch.as_tensor(step.mean).ndim <= 1 and torch.as_tensor(step.std).ndim <= 1
    return kind == "ToPureTensor" or _gives_float(step)


def _wants_pil(step: Any, image: Any) -> bool:
    """Whether a step that failed on a uint8 tensor works on the same picture as a PIL image."""
    if not isinstance(image, torch.Tensor) or image.dtype != torch.uint8:
        return False
    try:
        step(functional.to_pil_image(image))
    except STEP_ERRORS:
        return False
    return True
