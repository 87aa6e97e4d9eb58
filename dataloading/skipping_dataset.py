"""A data set without its unreadable samples, which it counts and names."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset, Subset

from dataloading.images import short_reason
from dataloading.results import Result, format_share
from dataloading.unreadable import is_unreadable
from dataloading.watchdog import ProbeTimeout, random_state_kept, time_limit

NAMED = 3  # files that a warning names
LOOKED_UP = 20  # files whose reason `skipped()` finds out
LOOK_UP_LIMIT_S = 5.0
NOT_LOOKED_UP = "not looked up"
READABLE_NOW = "could be read when tried again"
GAVE_NONE = "the data set gave None"


@dataclass(frozen=True, repr=False, eq=False)
class Skipped(Result):
    """Which samples were skipped so far.

    Attributes:
        count: How many different samples.
        samples: Samples in the data set.
        files: `(path, reason)` of each; the number of the sample where it has no path.
        share: `count` as a share of `samples`.
    """

    count: int
    samples: int
    files: tuple[tuple[str | int, str], ...] = ()
    derived: ClassVar[tuple[str, ...]] = ("share",)

    @property
    def share(self) -> float:
        """Share of the samples that was skipped."""
        return self.count / max(self.samples, 1)

    def summary(self) -> str:
        """Count, share, and the first few with their reasons."""
        if not self.count:
            return f"none of {self.samples:,} samples"
        named = [f"{_short(name)}: {reason}" for name, reason in self.files[:NAMED]]
        more = [f"and {self.count - len(named):,} more"] if self.count > len(named) else []
        return (
            f"{self.count:,} of {self.samples:,} samples ({format_share(self.share)}): "
            f"{'; '.join(named + more)}"
        )

    def rows(self) -> list[tuple[str, Any]]:
        """Count, share, and each sample with its reason."""
        return [
            ("skipped", self.count),
            ("skipped_share", self.share),
            *((_short(name), reason) for name, reason in self.files[:LOOKED_UP]),
        ]


def _short(name: str | int) -> str:
    return f"sample {name}" if isinstance(name, int) else os.path.basename(name)


class SkippingDataset(Subset):
    """A map-style data set whose unreadable samples are None, and are missing from batches.

    What counts as unreadable is said in `is_unreadable`: files that cannot be opened or decoded,
    never faults of the program. A sample that is None counts, too. Each skipped sample leaves a
    mark in memory that all workers share; it is tried again in the next epoch.

    Answers for the data set inside in every other way: `classes`, `samples`, `set_epoch`.

    Args:
        dataset: A map-style data set with a length.
        errors: Further exception types that mean "cannot be read".

    Raises:
        TypeError: The data set is iterable, or has no length.

    Example:
        >>> data = SkippingDataset([torch.ones(1), None, torch.ones(1)])
        >>> len(data), len(data.__getitems__([0, 1])), data.skipped_count
        (3, 1, 1)
    """

    OWN = ("dataset", "indices", "errors", "marks", "reported")

    def __init__(self, dataset: Any, *, errors: tuple[type[Exception], ...] = ()) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"Expected a map-style data set, got {type(dataset).__name__}: a stream leaves out "
                "what it cannot read in its own __iter__."
            )
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no __len__; skipped samples are counted by number."
            )
        # A Subset of all samples, because whoever looks for the data set inside looks through those
        super().__init__(dataset, range(len(dataset)))
        self.errors = tuple(errors)
        self.marks = torch.zeros(len(dataset), dtype=torch.uint8).share_memory_()
        self.reported = 0

    def __getitem__(self, index: Any) -> Any:
        try:
            sample = self.dataset[index]
        except Exception as error:
            if not is_unreadable(error, self.errors) or not self._mark(index):
                raise
            return None
        if sample is None:
            self._mark(index)
        return sample

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """The samples of a batch that can be read, in order."""
        samples = self._fetched_at_once(indices)
        if samples is None:
            samples = [self[index] for index in indices]
        return [sample for sample in samples if sample is not None]

    def _fetched_at_once(self, indices: list[Any]) -> list[Any] | None:
        """A batch from a data set that gets it at once; None where it does not, or one is bad."""
        if not callable(getattr(_base(self.dataset), "__getitems__", None)):
            return None
        inside: Any = self.dataset
        try:
            samples = inside.__getitems__(indices)
        except Exception as error:
            if not is_unreadable(error, self.errors):
                raise
            return None  # one by one it will show which
        return None if any(sample is None for sample in samples) else samples

    def _mark(self, index: Any) -> bool:
        """Mark a sample as skipped; False for an index that is no number of a sample."""
        try:
            number = operator.index(index)
            self.marks[number] = 1
        except (TypeError, IndexError):
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.OWN:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in self.OWN or name.startswith("__")
        if not own and hasattr(self.dataset, name):  # as in `loader.dataset.transform = ...`
            setattr(self.dataset, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def skipped_count(self) -> int:
        """How many different samples were skipped so far, by all workers together."""
        return int(self.marks.sum(dtype=torch.int64))

    def skipped(self, *, limit: int = LOOKED_UP) -> Skipped:
        """Which samples were skipped, and why.

        Args:
            limit: Load so many of them again to find the reason; no longer than five seconds.
        """
        numbers = self.marks.nonzero().flatten().tolist()
        reasons = _reasons(self, numbers[:limit])
        files = [
            (_path(self.dataset, number) or number, reasons.get(number, NOT_LOOKED_UP))
            for number in numbers
        ]
        return Skipped(count=len(numbers), samples=len(self), files=tuple(files))

    def reason(self, read: Callable[[Any], Any], key: Any, path: str | None) -> str | None:
        """Why `read(key)` fails; None where it gives something."""
        try:
            return GAVE_NONE if read(key) is None else None
        except ProbeTimeout:  # the watchdog's, not the file's
            raise
        except Exception as error:  # a fault of the program may have come up in the meantime
            text = short_reason(error, path)
            return text if is_unreadable(error, self.errors) else f"{type(error).__name__}: {text}"


def _base(dataset: Any) -> Any:
    """The data set that `Subset`s lead to."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _path(dataset: Any, number: int) -> str | None:
    """The file of a sample, where the data set has a list of them."""
    while isinstance(dataset, Subset):
        dataset, number = dataset.dataset, dataset.indices[number]
    try:
        path = dataset.samples[number][0]
    except (AttributeError, TypeError, LookupError):
        return None
    return str(path) if isinstance(path, str | os.PathLike) else None


def _reasons(data: SkippingDataset, numbers: list[int]) -> dict[int, str]:
    """Why samples cannot be read, from trying again; as many as come in time."""
    from dataloading.object_graph import walk
    from dataloading.peeking import trial_copy

    found: dict[int, str] = {}
    read = getattr(_base(data.dataset), "loader", None)
    paths = {number: _path(data.dataset, number) for number in numbers}
    with (
        contextlib.suppress(ProbeTimeout),
        random_state_kept(),
        time_limit(LOOK_UP_LIMIT_S, "Looking up why samples were skipped"),
    ):
        for number, path in paths.items():  # the file alone first, without the transforms
            if path is not None and callable(read) and (reason := data.reason(read, path, path)):
                found[number] = reason
        if not (rest := [number for number in numbers if number not in found]):
            return found
        # on a copy: what a sample opens here must not be inherited by later workers
        with trial_copy(data.dataset, list(walk(data.dataset, "dataset"))) as trial:
            for number in rest:
                reason = data.reason(trial.__getitem__, number, paths[number])
                found[number] = reason or READABLE_NOW
    return found
