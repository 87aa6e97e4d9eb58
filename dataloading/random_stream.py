"""A stream of torch's random numbers of its own, for transforms that run in the training process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import get_worker_info


class RandomStream:
    """Random numbers that repeat, whatever else the training process draws.

    In a worker it does nothing: the loader has given that a seed already.

    Args:
        seed: Where the stream begins.

    Example:
        >>> first, again = RandomStream(3), RandomStream(3)
        >>> with first.in_use():
        ...     drawn = torch.rand(1)
        >>> with again.in_use():
        ...     bool(torch.rand(1) == drawn)
        True
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw torch's random numbers from this stream."""
        if get_worker_info() is not None:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)


class SeededTransform:
    """A transform whose random numbers come from a stream of its own.

    Args:
        transform: Draws from torch, as all of torchvision's transforms do.
        seed: Of its stream.
    """

    def __init__(self, transform: Callable[[Any], Any], seed: int) -> None:
        self.transform = transform
        self.stream = RandomStream(seed)

    def __call__(self, image: Any) -> Any:
        """Transform one image."""
        with self.stream.in_use():
            return self.transform(image)

    def __repr__(self) -> str:
        return f"SeededTransform({self.transform!r})"
