"""A cache in the middle of a transform: after what is the same every time, before what is random."""

from __future__ import annotations

import os
from typing import Any

from dataloading.cached_dataset import CachedDataset
from dataloading.images import ImageFiles
from dataloading.random_stream import SeededTransform
from dataloading.transform_steps import NamedSteps, kind_of, name_of, steps_of

IN_MEMORY = "memory"
# Steps of torchvision that give the same for the same image, and keep 8 bits a channel.
STEADY = (
    *("Resize", "CenterCrop", "Pad", "Grayscale", "RGB"),
    *("PILToTensor", "ToImage", "ToPureTensor", "Identity"),
)


def cached_images(
    data: ImageFiles, cache: str | os.PathLike[str], *, seed: int | None = None
) -> CachedDataset:
    """Cache the images of a folder as they are before the first random step of its transform.

    Args:
        data: The images; its transform is split, and the first part stays with it.
        cache: `"memory"` for shared memory, or a folder for files that later runs use again.
        seed: Makes the random part repeat in the training process, as with `ImageFiles(seed=)`.

    Returns:
        A `CachedDataset` of what `data` gives, with the rest of the transform after it.

    Raises:
        TypeError: `cache` is neither.
        ValueError: The images have no common size before the first random step.

    Explained in: notebook 06
    """
    if not isinstance(cache, str | os.PathLike) or not str(cache):
        raise TypeError(f'Expected cache="memory" or the path of a folder, got {cache!r}.')
    before, after = split_at_random(data.transform)
    if not any(_fixes_size(step) for _, step in before):
        first = f"{after[0][0]} ({name_of(after[0][1])})" if after else "the end of the transform"
        raise ValueError(
            f"The cache keeps images as they are before {first}, and there they have no common "
            "size. Begin the transform with one, such as Resize((256, 256)) or Resize(256) and "
            "CenterCrop(256), and leave random steps such as RandomResizedCrop after it."
        )
    data.transform = NamedSteps(before)
    rest: Any = NamedSteps(after) if after else None
    if rest is not None and seed is not None:
        rest = SeededTransform(rest, seed)
    return CachedDataset(data, rest, path=None if cache == IN_MEMORY else cache)


def split_at_random(
    transform: Any,
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The steps of a transform that a cache may come after, and the others.

    Conversions to float come after the cache: floats take four times the room.

    Example:
        >>> from torchvision import transforms
        >>> steps = [transforms.Resize((8, 8)), transforms.RandomHorizontalFlip()]
        >>> before, after = split_at_random(transforms.Compose(steps))
        >>> [name_of(step) for _, step in before], [name_of(step) for _, step in after]
        (['Resize'], ['RandomHorizontalFlip'])
    """
    steps = steps_of(transform)
    at = next((n for n, (_, step) in enumerate(steps) if kind_of(step) not in STEADY), len(steps))
    return steps[:at], steps[at:]


def _fixes_size(step: Any) -> bool:
    """Whether every image has the same height and width after a step."""
    if kind_of(step) == "CenterCrop":
        return True
    size = getattr(step, "size", None)
    return kind_of(step) == "Resize" and isinstance(size, tuple | list) and len(size) == 2
