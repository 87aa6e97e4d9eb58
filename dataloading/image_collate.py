"""Putting images together as they lie in memory, which is quicker than sorting their channels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate


def collate_images(samples: list[Any]) -> Any:
    """`default_collate`, with batches of decoded uint8 images left in the order of the decoder.

    Decoders put the channels of a pixel side by side ("channels last"). Such images (C, H, W) become
    a batch (N, C, H, W) that lies so too; its values are those of `default_collate`. A
    `BatchTransform` gives ordinary contiguous floats of it, on the device.

    Args:
        samples: Tuples whose first part is the image, or anything else, which `default_collate`
            gets.

    Example:
        >>> image = torch.zeros(4, 5, 3, dtype=torch.uint8).permute(2, 0, 1)
        >>> images, labels = collate_images([(image, 0), (image, 1)])
        >>> images.shape, labels
        (torch.Size([2, 3, 4, 5]), tensor([0, 1]))

    Explained in: notebook 06
    """
    if not all(type(sample) is tuple and len(sample) > 1 for sample in samples):
        return default_collate(samples)
    images = [sample[0] for sample in samples]
    if not all(_lies_as_decoded(image) for image in images) or len({i.shape for i in images}) > 1:
        return default_collate(samples)
    batch = default_collate([(sample[0].permute(1, 2, 0), *sample[1:]) for sample in samples])
    return [batch[0].permute(0, 3, 1, 2), *batch[1:]]


def _lies_as_decoded(image: Any) -> bool:
    if type(image) is not torch.Tensor or image.dtype != torch.uint8 or image.ndim != 3:
        return False
    return not image.is_contiguous() and image.permute(1, 2, 0).is_contiguous()
