"""Training on in spite of bad samples, and never with an empty batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from dataloading.skipping_dataset import LOOKED_UP, NAMED, Skipped, SkippingDataset

__all__ = ["Skipped", "SkippingDataLoader", "SkippingDataset", "make_skipping"]


class SkippingCollate:
    """Collates the samples that are there; None where there is none.

    Args:
        collate_fn: Makes a batch of a list of samples.
        batched: Whether it gets lists; False for a loader with `batch_size=None`.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, batched: bool = True) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(self, samples: Any) -> Any:
        """Collate what is there."""
        if not self.batched:
            return None if samples is None else self.collate_fn(samples)
        there = [sample for sample in samples if sample is not None]
        return self.collate_fn(there) if there else None


class PassingOver:
    """What torch's iterators get in addition: batches of which nothing is left are passed over.

    Mixed into the iterator itself, because torch, and whatever measures and ends workers, knows it
    by its identity and its private parts. Tried with torch 2.14.
    """

    skipping: SkippingDataset
    delivered = 0
    passed = 0

    def __next__(self) -> Any:
        try:
            while (batch := super().__next__()) is None:  # type: ignore[misc]
                self.passed += 1
                if not self.delivered:
                    self._check_any_is_left()
        except StopIteration:
            self._end()
            raise
        self.delivered += 1
        return batch

    def _check_any_is_left(self) -> None:
        """End an epoch without end, in which nothing will ever be found."""
        if self.skipping.skipped_count == len(self.skipping):
            self._fail()

    def _end(self) -> None:
        """The epoch is over: tell what was skipped for the first time."""
        if self.passed and not self.delivered:
            self._fail()
        if (count := self.skipping.skipped_count) > self.skipping.reported:
            self.skipping.reported = count
            text = self.skipping.skipped(limit=NAMED).summary()
            warnings.warn(f"Skipped {text}", UserWarning, stacklevel=3)

    def _fail(self) -> None:
        raise RuntimeError(
            "No sample could be read, so there is nothing to train on. Skipped "
            f"{self.skipping.skipped(limit=NAMED).summary()}"
        ) from None

    def _reset(self, *args: Any, **kwargs: Any) -> None:
        """Begin an epoch with the workers of the one before; called by torch."""
        self.delivered = self.passed = 0
        super()._reset(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def _passing_over(kind: Any) -> type:
    """The same kind of iterator, which passes over empty batches."""
    return type(kind.__name__, (PassingOver, kind), {})


class SkippingDataLoader(DataLoader):
    """A `DataLoader` that never delivers an empty batch; make it with `make_skipping`.

    It has the constructor of `DataLoader`, so that it can be built again with other settings.
    """

    def __iter__(self) -> Any:
        data = _skipping_part(self.dataset)
        iterator: Any = super().__iter__()
        if not isinstance(iterator, PassingOver):  # persistent workers bring theirs again
            kind: Any = type(iterator)
            iterator.__class__ = _passing_over(kind)
            iterator.skipping = data
        return iterator

    def skipped(self, *, limit: int = LOOKED_UP) -> Skipped:
        """Which samples were skipped so far, in all epochs, and why.

        Args:
            limit: Load so many of them again, in this process, to find the reason.
        """
        return _skipping_part(self.dataset).skipped(limit=limit)


def _skipping_part(dataset: Any) -> SkippingDataset:
    """The `SkippingDataset` in a data set that may carry clocks, or be a part of it."""
    part = dataset
    while part is not None and not isinstance(part, SkippingDataset):
        inside = getattr(part, "__dict__", {})
        part = inside.get("inner", inside.get("dataset"))
    if part is None:
        raise TypeError(
            f"The data set ({type(dataset).__name__}) does not skip anything; make the loader with "
            "make_skipping(dataset, batch_size=32)."
        )
    return part


def make_skipping(
    dataset: Dataset,
    *,
    errors: tuple[type[Exception], ...] = (),
    collate_fn: Callable[[Any], Any] | None = None,
    **options: Any,
) -> SkippingDataLoader:
    """Make a loader that leaves out samples that cannot be read, counts them and names them.

    A batch holds the samples that are left of it, in order; a batch of which none is left is passed
    over, so an epoch may have fewer batches than `len(loader)`. Under `DistributedDataParallel` all
    ranks need the same number of batches: remove bad files first (`scan_images`). At the end of an
    epoch in which something new was skipped, a warning tells; `loader.skipped()` tells all.

    Args:
        dataset: A map-style data set, such as an `ImageFolder`.
        errors: Exception types that mean "cannot be read", beyond those of `is_unreadable`.
        collate_fn: As for `DataLoader`; it gets the samples that are left, never an empty list.
        **options: As for `DataLoader`.

    Returns:
        A loader. Iterating it raises a `RuntimeError` where no sample at all can be read.

    Raises:
        TypeError: The data set is iterable, or has no length; or `errors` is no tuple of types.

    Example:
        >>> loader = make_skipping([None, 1.5, 2.5], batch_size=1)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     len(list(loader)), loader.skipped().count
        (2, 1)

    Explained in: notebook 00
    """
    if not isinstance(errors, tuple) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in errors
    ):
        raise TypeError(
            f"errors={errors!r} must be a tuple of exception types: errors=(KeyError,)."
        )
    data = (
        dataset if isinstance(dataset, SkippingDataset) else SkippingDataset(dataset, errors=errors)
    )
    batched = options.get("batch_size", 1) is not None or options.get("batch_sampler") is not None
    if collate_fn is None:
        collate_fn = default_collate if batched else default_convert
    collate = SkippingCollate(collate_fn, batched=batched)
    return SkippingDataLoader(data, collate_fn=collate, **options)
