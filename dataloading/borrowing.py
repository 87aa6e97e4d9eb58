"""Iterating somebody's loader without changing it: on a copy, with everything put away afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.watchdog import (
    close_iterator,
    generators_of,
    loader_warnings_hidden,
    random_state_kept,
)
from dataloading.worker_clock import TimedSampler, instrument
from dataloading.worker_records import WorkerRecords


@dataclass(frozen=True)
class Borrowed:
    """A loader to iterate, its settings and the records of its workers, where there are any."""

    loader: Any
    settings: LoaderSettings | None
    records: WorkerRecords | None = None
    sampler: TimedSampler | None = None

    @property
    def sampler_s(self) -> float | None:
        """Seconds for choosing the samples of one batch, where it was measured."""
        if self.sampler is None or self.sampler.draw_s is None:
            return None
        return self.sampler.draw_s * (self.loader.batch_size or 1)

    @property
    def queued_batches(self) -> int:
        """Batches that its workers may hold ready."""
        return self.settings.queued_batches if self.settings is not None else 0

    @property
    def batched(self) -> bool:
        """Whether what it delivers are batches, rather than single samples."""
        return getattr(self.loader, "batch_sampler", True) is not None


@contextlib.contextmanager
def borrowed(dataloader: Any, *, clocks: bool = False) -> Iterator[Borrowed]:
    """Lend a copy of a loader; one that cannot be copied is lent itself.

    The copy's workers are ended and the random states put back when the block ends.

    Args:
        dataloader: A `DataLoader`, or any iterable of batches.
        clocks: Put clocks inside the copy's workers.

    Yields:
        A `Borrowed`.
    """
    with random_state_kept(*generators_of(dataloader)), loader_warnings_hidden():
        if not isinstance(dataloader, DataLoader):
            yield Borrowed(dataloader, None)
            return
        settings = LoaderSettings.of(dataloader)
        records = sampler = None
        own_iterator = getattr(dataloader, "_iterator", None)
        try:
            if clocks:
                loader, records, sampler = instrument(dataloader, settings)
            else:
                loader = rebuild_dataloader(dataloader, settings)
        except TypeError:  # cannot be built again (the message says why): lend the loader itself
            loader = dataloader
        try:
            yield Borrowed(loader, settings, records, sampler)
        finally:
            kept = getattr(loader, "_iterator", None)
            if kept is not None and kept is not own_iterator:
                close_iterator(kept)
                loader._iterator = None
            if records is not None:
                records.remove()
