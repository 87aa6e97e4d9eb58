"""Checks of what a user hands over: each names the argument, what came, and what was expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


def check_seconds(value: Any, name: str = "seconds") -> None:
    """Refuse a time budget that is not a finite number above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is not above 0, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be a finite number above 0.")


def check_amount(name: str, value: Any) -> None:
    """Refuse anything but a finite number of at least 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be a finite number of at least 0.")


def check_share(name: str, value: Any) -> None:
    """Refuse anything but a number above 0 and at most 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    check_amount(name, value)
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value} must be above 0 and at most 1.")


def check_int(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """Refuse anything but a whole number of at least `least` (or, if optional, None), by name.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number, not {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")


def check_loader(value: Any, name: str = "dataloader") -> None:
    """Refuse what is not a loader: batches come from a `DataLoader`, or from any other iterable.

    Raises:
        TypeError: It cannot be iterated, is a class or text, or is a map-style data set, whose
            items are samples.
    """
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}; expected a loader made with it.")
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        raise TypeError(
            f"{name} is a data set ({type(value).__name__}), which gives samples; expected a "
            "loader, which gives batches: DataLoader(dataset, batch_size=32)."
        )
    iterable = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not iterable or isinstance(value, str | bytes | dict):
        raise TypeError(f"Expected {name} to be a loader to iterate over, got {_named(value)}.")


def check_train_step(value: Any) -> None:
    """Refuse a train step that cannot be called with a batch.

    Raises:
        TypeError: It is not None and not callable, or it is a class.
    """
    if isinstance(value, torch.nn.Module):
        raise TypeError(
            f"train_step is the model ({type(value).__name__}); expected a function that trains "
            "it on one batch: make_train_step(model, loss_fn, optimizer)."
        )
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise TypeError(f"Expected train_step(batch) to be a function, got {_named(value)}.")


def check_device(value: Any) -> torch.device | None:
    """The device that a name stands for; None stays None.

    Raises:
        TypeError: It is neither a name nor a `torch.device`.
        ValueError: There is no such device, or it is not available here.
    """
    if value is None:
        return None
    device = device_named(value)
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here and here.type == device.type else 0
    if device.type not in ("cpu", "meta") and (device.index or 0) >= count:
        has = f"{count} {device.type} device(s)" if count else f"no {device.type} device"
        raise ValueError(f"device={str(value)!r} is not available: this machine has {has}.")
    return device


def device_named(value: Any) -> torch.device:
    """The device that a name stands for, whether it is there or not.

    Raises:
        TypeError: It is neither a name nor a `torch.device`.
        ValueError: There is no such kind of device.
    """
    try:
        return torch.device(value)
    except TypeError:
        raise TypeError(
            f"Expected device to be a name such as 'cuda', got {_named(value)}."
        ) from None
    except RuntimeError:
        raise ValueError(
            f"device={value!r} is not a device; use 'cpu', 'cuda', 'cuda:1' or 'mps'."
        ) from None


def _named(value: Any) -> str:
    """What came, short enough for a message."""
    text = repr(value)
    kind = type(value).__name__
    return f"{kind} ({text})" if len(text) <= 40 else kind
