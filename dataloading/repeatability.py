"""Whether two runs of a loader deliver the same: which samples, in which order, with which values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from dataloading.arguments import check_int
from dataloading.held_things import generators_kept
from dataloading.object_graph import walk
from dataloading.results import Result, format_count
from dataloading.settings import LoaderSettings
from dataloading.streams import Fingerprints
from dataloading.watchdog import (
    close_iterator,
    generators_of,
    loader_warnings_hidden,
    open_iterator,
    random_state_kept,
    time_limit,
)

LIMIT_S = 60.0  # for one run


@dataclass(frozen=True, repr=False, eq=False)
class StreamComparison(Result):
    """What two runs have in common; order and values are judged apart.

    Attributes:
        same_samples: Whether the same samples came, in any order.
        same_order: Whether they came in the same order.
        same_values: Whether their contents are the same too, augmentation included.
        samples: How many samples of each run were compared.
    """

    same_samples: bool
    same_order: bool
    same_values: bool
    samples: int

    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    @property
    def verdict(self) -> str:
        """`repeatable`, or the first thing that differs."""
        if not self.same_samples:
            return "other samples"
        if not self.same_order:
            return "same samples in another order"
        return "repeatable" if self.same_values else "same order, augmentation may differ"

    def summary(self) -> str:
        """The verdict and what stands behind it."""
        return f"{self.verdict} (over {format_count(self.samples, 'sample')})"


def compare_streams(
    first: DataLoader, second: DataLoader, *, samples: int = 1000
) -> StreamComparison:
    """Compare what two loaders deliver in an epoch, or what one loader delivers in two runs.

    Both runs begin with the same global random numbers, as after a seed, and with their own
    generators as they are; everything is put back afterwards. If the streams are equal and results
    differ all the same, the reason lies in training.

    Args:
        first, second: The loaders; the same one twice shows whether it repeats itself.
        samples: Compare no more than so many.

    Returns:
        A `StreamComparison`. Samples of iterable data sets have no number, only values.

    Raises:
        TypeError: One of them is not a `DataLoader`.
        ValueError: `samples` is below 1.
        ProbeTimeout: A run took far too long.

    Example:
        >>> loader = DataLoader(range(8), shuffle=True)
        >>> compare_streams(loader, loader).verdict
        'repeatable'

    Explained in: notebook 10
    """
    check_int("samples", samples, least=1)
    for loader in (first, second):
        if not isinstance(loader, DataLoader):
            raise TypeError(f"Expected a DataLoader, got {type(loader).__name__}.")
    (order, values), (other_order, other_values) = (_read(one, samples) for one in (first, second))
    return StreamComparison(
        same_samples=Counter(order) == Counter(other_order),
        same_order=order == other_order,
        same_values=values == other_values,
        samples=min(len(values), len(other_values)),
    )


class Overheard:
    """A sampler or batch sampler that keeps what it gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.given: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for item in self.inner:
            self.given += item if isinstance(item, list) else [item]
            yield item

    def __len__(self) -> int:
        return len(self.inner)


def _read(loader: DataLoader, samples: int) -> tuple[list[str], list[str]]:
    """Keys and fingerprints of the first samples of an epoch, in order."""
    held = list(walk(loader.dataset, "dataset"))
    with (
        loader_warnings_hidden(),
        random_state_kept(*generators_of(loader)),
        generators_kept(held),
        time_limit(LIMIT_S, "Comparing two runs of a loader"),
    ):
        reader, overheard = _reader(loader)
        values: list[str] = []
        deadline = time.monotonic() + LIMIT_S / 2
        iterator = open_iterator(reader)
        try:
            for batch in iterator:
                values.extend(batch)
                if len(values) >= samples or time.monotonic() > deadline:
                    break
        finally:
            close_iterator(iterator)
    values = values[:samples]
    given = values if overheard is None else overheard.given
    return [str(key) for key in given[: len(values)]], values


def _reader(loader: DataLoader) -> tuple[DataLoader, Overheard | None]:
    """A loader over the same data set that delivers fingerprints, and what its sampler gave."""
    settings = LoaderSettings.of(loader).changed(persistent_workers=False, pin_memory=False)
    options: dict[str, Any] = {**settings.changed(in_order=True).kwargs()}
    options.pop("batch_size", None)
    overheard = None
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        overheard = Overheard(loader.sampler)
        options |= {"batch_size": None, "sampler": overheard}
    else:
        overheard = Overheard(loader.batch_sampler)
        options["batch_sampler"] = overheard
    reader: DataLoader = DataLoader(
        loader.dataset,
        collate_fn=Fingerprints(loader),
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **options,
    )
    return reader, overheard
