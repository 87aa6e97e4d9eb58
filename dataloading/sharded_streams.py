"""The samples of an iterable data set, shared out over all ranks and their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dataloading.distributed import Distributed, rank_and_world_size
from dataloading.sharding import gives_shares

NOT_TOLD = -1  # no epoch was set


class ShardedStream(IterableDataset):
    """Shares the samples of an iterable data set out over all ranks and their workers.

    Every worker goes through the whole source and keeps its part, so the source must give the same
    order everywhere: shuffle by seed and epoch, not by global random numbers (`check_samples` tells).
    The epoch comes from `set_epoch`, best by `for epoch in epochs(loader, 10)`; nobody else tells it.

    Args:
        source: An `IterableDataset` or another iterable that can be gone through again, or a
            function `source(epoch)` that gives an iterator.
        distributed: As in `rank_and_world_size`.
        even: Leave out the last `length % world_size` samples, so that each rank gets equally
            many. With the same batch size and number of workers on all ranks that also makes
            equally many steps.

    Raises:
        TypeError: `source` is an iterator, a map-style data set, or not iterable.
        ValueError: `source` shares its samples out among workers by itself.

    Example:
        >>> [list(ShardedStream(range(5), distributed=(rank, 2), even=True)) for rank in (0, 1)]
        [[0, 2], [1, 3]]

    Explained in: notebook 08
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int], Iterator[Any]],
        *,
        distributed: Distributed = None,
        even: bool = False,
    ) -> None:
        _check_source(source)
        self.source = source
        self.even = even
        self.rank, self.world_size = rank_and_world_size(distributed)
        # shared memory: workers that stay hear of it, too
        self._told = torch.tensor(NOT_TOLD).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Tell the source the epoch of the next iteration, in all workers."""
        self._told.fill_(int(epoch))

    def __iter__(self) -> Iterator[Any]:
        samples = _open(self.source, int(self._told))
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        own = _whole_rounds if self.even else _share
        return islice(own(samples, self.rank, self.world_size), worker, None, workers)


def _share(samples: Iterator[Any], rank: int, world_size: int) -> Iterator[Any]:
    """Every `world_size`-th sample, beginning with number `rank`."""
    return islice(samples, rank, None, world_size)


def _whole_rounds(samples: Iterator[Any], rank: int, world_size: int) -> Iterator[Any]:
    """The same, but none of a last round in which some ranks would go without."""
    own = None
    for number, sample in enumerate(samples):
        place = number % world_size
        if place == rank:
            own = sample
        if place == world_size - 1:
            yield own


def _open(source: Any, epoch: int) -> Iterator[Any]:
    """Begin with the samples of an epoch."""
    if _is_function(source):
        return iter(source(max(0, epoch)))
    if epoch != NOT_TOLD and hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    return iter(source)


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "__iter__")


class _Whole(IterableDataset):
    """All samples of a source, to be looked at."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return _open(self.source, NOT_TOLD)


def _check_source(source: Any) -> None:
    """Refuse what cannot be shared out."""
    kind = type(source).__name__
    if isinstance(source, Iterator):
        raise TypeError(
            f"source is an iterator ({kind}), which ends after one epoch. Give a function "
            "source(epoch) that makes a new one."
        )
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"source is a map-style data set ({kind}). Give it to DataLoader with "
            "sampler=EpochSampler(dataset), which shares it out without reading the other parts."
        )
    if isinstance(source, type) or not (callable(source) or isinstance(source, Iterable)):
        raise TypeError(
            f"source is {kind if not isinstance(source, type) else f'the class {source.__name__}'}; "
            "expected an iterable data set, or a function source(epoch) that gives an iterator."
        )
    if gives_shares(DataLoader(_Whole(source))):
        raise ValueError(
            f"{kind} shares its samples out among workers by itself, so most would be lost if they "
            "were shared out again. Take the part with get_worker_info() out of it, or let it share "
            "over ranks, too, and use it without ShardedStream."
        )
