"""A data set that keeps the samples it has loaded, for all workers and for the next epochs."""

from __future__ import annotations

import hashlib
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from dataloading.arguments import check_int
from dataloading.cache_bounds import FREE_SHARE, free_bytes, most_rows
from dataloading.cache_counts import HIT, MISFIT, MISS, NO_ROOM, NOT_WRITTEN, REASONS, CacheCounts
from dataloading.cache_files import FORMAT, FileRows
from dataloading.cache_identity import data_fingerprint, data_name
from dataloading.cache_probe import SampleProbe
from dataloading.cache_storage import (
    MemoryRows,
    RowPlan,
    RowStorage,
    rows_within,
)
from dataloading.results import format_bytes, format_share
from dataloading.sample_leaves import Misfit


class CachedDataset(Dataset):
    """Keeps what `dataset[index]` gave, such as decoded and resized images, and reads it from there.

    Random augmentation belongs into `transform`, which is applied after the cache, each time anew.
    The samples are kept in shared memory, for all workers of this process under every start method
    and for all epochs; or in a memory-mapped file, also for later runs and for other processes on
    this machine, such as the ranks of a distributed job. Worker processes fill it together.

    The first sample gives the layout; samples are tensors, NumPy arrays, PIL images, numbers, texts,
    and tuples, lists, dicts, named tuples and dataclasses of these. A sample of another shape or
    type comes from the data set each time and is counted. Each hit is a copy of its own.

    The name of the file holds a fingerprint of the data set, of its files (path, size, time of
    change) and of its transforms; when one of them changes, a new file is made and the old one is
    removed unless a living process uses it. Random results that the data set itself draws would be
    frozen: a `UserWarning` says so.

    Args:
        dataset: A map-style data set with a length.
        transform: Applied to the first part of a sample that is a tuple (the image), or else to the
            whole sample, after the cache.
        path: Folder for the file, made if need be; best on a local disk. None: shared memory.
        max_bytes: What the cache may take; never more than 80 % of the memory or disk that is free
            now. Where that is not enough, the first samples are kept and the others passed through.

    Attributes:
        dataset: The data set that is wrapped; its public attributes (`classes`, `targets`) can be
            read from here too.
        needed_bytes: What keeping all samples takes.
        file: Path of the file, or None.

    Raises:
        TypeError: The data set is iterable, or has no length or no items; a sample is made of
            something that cannot be kept.
        ValueError: The data set is empty, or `max_bytes` has no room for one sample.
        MemoryError: There is not enough shared memory.
        OSError: The folder cannot be made or written; the text names it.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = CachedDataset(TensorDataset(torch.arange(4)), max_bytes=2**20)
        >>> [int(data[1][0]) for _ in range(2)]
        [1, 1]
        >>> data
        CachedDataset: 1 of 4 samples cached, 32.0 KiB of 32.0 KiB, hit rate 50 %

    Explained in: notebook 06
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        count = _checked_length(dataset)
        _check_options(transform, path, max_bytes)
        self.dataset = dataset
        self.transform = transform
        known = data_fingerprint(dataset) if path is not None else ""  # before anything is fetched
        probe = SampleProbe(dataset, count)
        if probe.warning:
            warnings.warn(probe.warning, stacklevel=2)
        self._layout = probe.layout
        self._count = count
        self.needed_bytes = RowPlan(count, self._layout.row_bytes).total_bytes
        self._most_rows = most_rows(count, self._layout.row_bytes, max_bytes)
        self.file = None
        if path is not None:
            told = (FORMAT, count, repr(self._layout), known, probe.content)
            digest = hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()
            folder = Path(path).expanduser().absolute()
            self.file = folder / f"{data_name(dataset)}-{digest}.cache"
        self._rows, self._limit = self._made_rows()
        self._counted_before = self._rows.counts.totals()

    def _made_rows(self) -> tuple[RowStorage, str | None]:
        """The storage, and what keeps it from having room for every sample."""
        row_bytes = self._layout.row_bytes
        free, what = free_bytes(self.file)
        free_rows = self._most_rows
        if free is not None:
            free_rows = min(free_rows, rows_within(int(FREE_SHARE * free), row_bytes))
        rows: RowStorage
        if self.file is None:
            rows = MemoryRows(RowPlan(free_rows, row_bytes))
        else:
            rows = FileRows(self.file, free_rows, row_bytes, self._most_rows)
        if rows.plan.rows >= self._count:
            return rows, None
        if rows.plan.rows == 0:
            needed = format_bytes(self.needed_bytes)
            warnings.warn(
                f"Nothing is cached: a sample does not fit into {format_share(FREE_SHARE)} of "
                f"{what}; all of them need {needed}.",
                stacklevel=3,
            )
        if rows.plan.rows >= self._most_rows:
            return rows, "max_bytes"
        return rows, f"{format_share(FREE_SHARE)} of {what}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        place = self._place(index)
        if self._rows.has(place):
            sample = self._layout.unpack(self._rows.data, place)
            self._rows.counts.add(HIT)
        else:
            sample = self.dataset[place]
            self._rows.counts.add(self._keep(place, sample))
        return self._transformed(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch: hits are gathered together, misses fetched as the data set can."""
        places = np.array([self._place(index) for index in indices], np.int64)
        hit = self._rows.has_many(places)
        samples: list[Any] = [None] * len(places)
        if hit.any():
            held = self._layout.unpack_many(self._rows.data, places[hit])
            for position, sample in zip(np.flatnonzero(hit).tolist(), held, strict=True):
                samples[position] = sample
            self._rows.counts.add(HIT, len(held))
        missing = np.flatnonzero(~hit).tolist()
        if missing:
            fetched = self._fetched(places[missing].tolist())
            for position, sample in zip(missing, fetched, strict=True):
                samples[position] = sample
                self._rows.counts.add(self._keep(int(places[position]), sample))
        return samples if self.transform is None else [self._transformed(s) for s in samples]

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if place < 0:
            place += self._count
        if not 0 <= place < self._count:
            raise IndexError(f"Index {index} is out of range: there are {self._count} samples.")
        return place

    def _fetched(self, places: list[int]) -> Sequence[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        return fetch_many(places) if fetch_many else [self.dataset[place] for place in places]

    def _keep(self, place: int, sample: Any) -> int:
        """Keep a fetched sample if possible; returns the column that counts the read."""
        if place >= self._rows.plan.rows:
            return NO_ROOM
        try:
            content = self._layout.pack(sample)
        except Misfit:
            self._rows.note_example(place)
            return MISFIT
        return MISS if self._rows.write(place, content) else NOT_WRITTEN

    def _transformed(self, sample: Any) -> Any:
        if self.transform is None:
            return sample
        if not isinstance(sample, tuple) or not sample:
            return self.transform(sample)
        parts = (self.transform(sample[0]), *sample[1:])
        kind: Any = type(sample)
        return parts if kind is tuple else kind(*parts)

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the wrapped data set, such as `classes`."""
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def counts(self) -> CacheCounts:
        """How full the cache is, and how often it had what was asked for.

        Returns:
            `CacheCounts`, over all workers and, with a file, all processes on this machine since
            this object was made, or since `reset_counts()`.

        Example:
            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> CachedDataset(TensorDataset(torch.arange(4)), max_bytes=2**20).counts().cached
            0

        Explained in: notebook 06
        """
        counted = self._rows.counts.totals() - self._counted_before
        plan, filled = self._rows.plan, self._rows.filled
        return CacheCounts(
            samples=self._count,
            slots=plan.rows,
            cached=filled,
            cached_bytes=plan.bytes_with(filled),
            needed_bytes=self.needed_bytes,
            limited_by=self._limit,
            hits=int(counted[HIT]),
            misses=int(counted[MISS]),
            uncached_because={
                reason: int(counted[column])
                for column, reason in REASONS.items()
                if counted[column]
            },
            misfit_example=self._rows.example,
        )

    @property
    def hit_rate(self) -> float | None:
        """Hits as a share of all reads that were counted; None before the first."""
        return self.counts().hit_share

    def reset_counts(self) -> None:
        """Count from zero again; what is cached stays.

        Explained in: notebook 06
        """
        self._counted_before = self._rows.counts.totals()

    def clear(self) -> None:
        """Forget all samples; the memory or file keeps its size.

        Raises:
            PermissionError: The file may only be read.

        Explained in: notebook 06
        """
        self._rows.clear()

    def __repr__(self) -> str:
        return repr(self.counts())

    def _repr_html_(self) -> str:
        return self.counts()._repr_html_()


def _checked_length(dataset: Any) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is an IterableDataset, whose samples have no index; a cache needs "
            "dataset[index] and len(dataset)."
        )
    keyed = isinstance(dataset, str | bytes | dict)
    if isinstance(dataset, type) or keyed or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"Expected a map-style data set with dataset[index], got {dataset!r}.")
    try:
        count = len(dataset)
    except TypeError:
        raise TypeError(f"{name} has no length; a cache needs len(dataset).") from None
    if count < 1:
        raise ValueError(f"{name} is empty; there is nothing to cache.")
    return count


def _check_options(transform: Any, path: Any, max_bytes: Any) -> None:
    if transform is not None and (isinstance(transform, type) or not callable(transform)):
        raise TypeError(f"transform={transform!r} must be a function of one sample or image.")
    if path is not None and (not isinstance(path, str | os.PathLike) or not str(path)):
        raise TypeError(f"path={path!r} must be the name of a folder, or None for shared memory.")
    check_int("max_bytes", max_bytes, least=1, optional=True)
