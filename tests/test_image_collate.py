"""Batches of images: the values of `default_collate`, in the order that decoders leave them in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from dataloading.image_collate import collate_images


def image(number: int, height: int = 4, width: int = 5) -> torch.Tensor:
    """As a decoder gives it."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return pixels.permute(2, 0, 1)


SAMPLES = [(image(number), number) for number in range(6)]


@pytest.mark.parametrize("workers", [0, 1])
def test_values_and_types_are_those_of_default_collate(workers: int) -> None:
    loader = DataLoader(SAMPLES, 3, num_workers=workers, collate_fn=collate_images)  # type: ignore[arg-type]
    for batch, start in zip(loader, (0, 3), strict=True):
        usual = default_collate(SAMPLES[start : start + 3])
        assert type(batch) is type(usual)
        assert torch.equal(batch[0], usual[0])
        assert torch.equal(batch[1], usual[1])
        assert batch[0].is_contiguous(memory_format=torch.channels_last)
        assert batch[0].is_shared() == (workers > 0)


@pytest.mark.parametrize(
    "samples",
    [
        [(image(0).contiguous(), 0), (image(1).contiguous(), 1)],
        [(image(0).float(), 0), (image(1).float(), 1)],
        [(image(0), 0), (image(1).contiguous(), 1)],
        [image(0), image(1)],
        [{"image": image(0)}, {"image": image(1)}],
        [1.5, 2.5],
    ],
)
def test_everything_else_is_left_to_default_collate(samples: list[Any]) -> None:
    batch, usual = collate_images(samples), default_collate(samples)
    assert type(batch) is type(usual)
    parts = zip(batch, usual, strict=True) if isinstance(usual, list) else [(batch, usual)]
    for part, same in parts:
        assert torch.equal(part, same) if isinstance(same, torch.Tensor) else part.keys()


def test_images_of_different_sizes_are_an_error_in_the_words_of_torch() -> None:
    with pytest.raises(RuntimeError, match=r"\[3, 4, 5\] at entry 0 and \[3, 6, 5\] at entry 1"):
        collate_images([(image(0), 0), (image(1, height=6), 1)])
