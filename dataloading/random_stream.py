"""A stream of random numbers of its own, for transforms that run in the training process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


class RandomStream:
    """Random numbers of torch, NumPy and Python that repeat, whatever else the process draws.

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
        self.state: tuple[Any, Any, Any] = (
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed % 2**32).get_state(),  # the range that NumPy accepts
            random.Random(seed).getstate(),
        )

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw random numbers from this stream."""
        if get_worker_info() is not None:
            yield
            return
        outside = _states()
        _set_states(self.state)
        try:
            yield
        finally:
            self.state = _states()
            _set_states(outside)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class SeededTransform:
    """A transform whose random numbers come from a stream of its own.

    Args:
        transform: Draws from torch, NumPy or `random`.
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
