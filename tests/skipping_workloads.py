"""Data sets with bad samples, in a module of their own so that spawned workers find them."""

from __future__ import annotations

import errno
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from dataloading.watchdog import ProbeTimeout

ERRORS: dict[str, Any] = {
    "damaged": lambda: OSError("image file is truncated"),
    "missing": lambda: FileNotFoundError(errno.ENOENT, "No such file", "a.jpg"),
    "forbidden": lambda: PermissionError(errno.EACCES, "Permission denied", "a.jpg"),
    "type": lambda: TypeError("a transform got two arguments"),
    "key": lambda: KeyError("mask"),
    "attribute": lambda: AttributeError("no attribute 'crop'"),
    "value": lambda: ValueError("crop size must be positive"),
    "runtime": lambda: RuntimeError("shapes do not match"),
    "index": lambda: IndexError("list index out of range"),
    "memory": lambda: MemoryError(),
    "too many open files": lambda: OSError(errno.EMFILE, "Too many open files"),
    "disk full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "time-out": lambda: TimeoutError("the server does not answer"),
    "connection": lambda: ConnectionResetError("lost"),
    "watchdog": lambda: ProbeTimeout("stopped by the watchdog"),
}
SKIPPED = ("damaged", "missing", "forbidden")


class Bad(Dataset):
    """`(number, number)` tensors; at some indices an error of a kind."""

    def __init__(
        self, count: int = 12, bad: tuple[int, ...] = (1, 6), kind: str = "damaged"
    ) -> None:
        self.count = count
        self.bad = bad
        self.kind = kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ERRORS[self.kind]()
        return torch.tensor([float(index)]), index


class BadTogether(Bad):
    """The same, a batch at once."""

    together = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        type(self).together += 1
        return [self[index] for index in indices]


class Pair(list):
    """A batch of one's own kind."""


def collate_pair(samples: list[Any]) -> Pair:
    """A collate function of one's own, which cannot take an empty list."""
    assert samples
    return Pair(default_collate(samples))
