"""Whole training functions, for a comparison: one call after another."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dataloading.arguments import check_device, check_loader, check_train_step
from dataloading.interleaving import SIDES, Block, synchronize
from dataloading.processes import child_pids
from dataloading.progress import TimeBar
from dataloading.results import format_count
from dataloading.storage_reads import Reads, reads_since, reads_so_far


class FunctionBlocks:
    """A training function, called again and again."""

    def __init__(
        self, function: Callable[[], Any], name: str, bar: TimeBar, doing: list[str]
    ) -> None:
        self.function = function
        self.name = name
        self.bar = bar
        self.doing = doing

    def block(self, seconds: float) -> Block:
        """Call it once, or as often as a block is long."""
        self.doing[0] = f"Running {self.name}()"
        earlier = self._reads()
        synchronize()
        started = time.perf_counter()
        counts: list[int | None] = []
        while not counts or time.perf_counter() - started < seconds:
            counts.append(self._count(self.function()))
            self.bar.update()
        synchronize()
        elapsed_s = time.perf_counter() - started
        known = [count for count in counts if count is not None]
        samples = sum(known) if len(known) == len(counts) else None
        return Block(samples, elapsed_s, len(counts), reads_since(earlier, self._reads()))

    def _count(self, returned: Any) -> int | None:
        """The number of samples, where that is what the function returned."""
        lazy = inspect.isgenerator(returned) or inspect.isawaitable(returned)
        if lazy or isinstance(returned, DataLoader):
            raise TypeError(
                f"{self.name}() returned a {type(returned).__name__} and did not train; expected a "
                "function that trains when it is called. To compare loaders, give the loaders."
            )
        if isinstance(returned, bool) or not isinstance(returned, int | np.integer):
            return None  # a loss, a history: nothing that counts samples
        if returned < 1:
            raise ValueError(
                f"{self.name}() returned {returned}; expected the number of samples it trained on, "
                "or None."
            )
        return int(returned)

    def _reads(self) -> Reads | None:
        return reads_so_far(child_pids(os.getpid()) or ())


def check_sides(before: Any, after: Any, train_step: Any, device: Any) -> bool:
    """Check what is to be compared.

    Returns:
        Whether these are two training functions, and not two loaders.

    Raises:
        TypeError: A function and a loader, neither of them, or a function that needs arguments.
        ValueError: A train step or a device that functions have no use for, or no such device.
    """
    functions = [_is_function(before), _is_function(after)]
    if not any(functions):
        check_loader(before, "before")
        check_loader(after, "after")
        check_train_step(train_step)
        check_device(device)
        return False
    if not all(functions):
        function, loader = SIDES if functions[0] else reversed(SIDES)
        other = before if functions[1] else after
        raise TypeError(
            f"{function} is a function, and {loader} is a {type(other).__name__}; give two loaders, "
            "or two functions without arguments that train."
        )
    for name, given in (("train_step", train_step), ("device", device)):
        if given is not None:
            raise ValueError(
                f"{name} must be None where before and after are functions: they train by "
                "themselves, and get no batch from here."
            )
    for name, function in zip(SIDES, (before, after), strict=True):
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise TypeError(
                f"{name} cannot be called without arguments ({error}); bind them: "
                f"lambda: train(model, loader)."
            ) from None
        except ValueError:  # written in C, and says nothing of its arguments
            pass
    return True


def _is_function(value: Any) -> bool:
    """Whether this can only be called, and not be iterated as a loader."""
    if isinstance(value, type | torch.nn.Module):
        return False
    return callable(value) and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__")


def samples_notes(calls: Mapping[str, Block], counted: bool) -> list[str]:
    """What counts where functions are compared, if it is not the same number of samples."""
    if not counted:
        return ["seconds a call are compared: the functions return no number of samples"]
    before, after = (calls[side].samples or 0 for side in SIDES)
    if before == after:
        return []
    return [
        f"a call trains on {format_count(before, 'sample')} before and on "
        f"{format_count(after, 'sample')} after; the rates are compared"
    ]
