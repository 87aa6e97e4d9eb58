"""Playing the epochs of iterable data sets in their own workers; a sample is told by its content."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from dataloading.fingerprints import fingerprint
from dataloading.sample_numbers import TELLING, expected_counts
from dataloading.settings import LoaderSettings
from dataloading.watchdog import close_iterator, open_iterator

MOST_STREAMED = 200_000  # samples of an iterable data set looked at in one go

Numbered = tuple[dict[tuple[int, int], np.ndarray], np.ndarray, bool, list[str]]


@dataclass(frozen=True)
class Take:
    """An epoch as it came: indices, keys or contents."""

    keys: Sequence[Any] | np.ndarray
    batches: int

    @property
    def first(self) -> Any:
        """The first index or key; None in an empty epoch."""
        if isinstance(self.keys, np.ndarray):
            return int(self.keys[0]) if len(self.keys) else None
        return self.keys[0] if self.keys else None

    def equals(self, other: Take) -> bool:
        """Whether the same came in the same order."""
        return len(self.keys) == len(other.keys) and bool(np.all(self.keys == other.keys))


class Stream:
    """The epochs of an iterable data set in its workers, with fingerprints instead of batches."""

    def __init__(self, loader: DataLoader, seconds: float) -> None:
        self.seconds = seconds
        self.notes: list[str] = []
        self.population: Sequence[Any] | np.ndarray = ()
        self.most = MOST_STREAMED
        self.owners = [loader.dataset] if hasattr(loader.dataset, "set_epoch") else []
        self.loader = loader
        self.reader = _reader(loader, loader.num_workers, loader.drop_last)

    def look_around(self) -> None:
        """Go through all samples once, with a single worker where the loader has workers."""
        single = _reader(self.loader, min(1, self.loader.num_workers), False)
        try:
            self.population = self._read(single).keys
        finally:
            close_iterator(single._iterator)
            single._iterator = None
        if self.notes:
            self.most = len(self.population)

    def epoch(self) -> Take:
        """Read what the workers produce in an epoch."""
        return self._read(self.reader)

    def _read(self, reader: DataLoader) -> Take:
        deadline = time.monotonic() + self.seconds
        keys: list[str] = []
        batches = 0
        iterator = open_iterator(reader)
        try:
            for batch in iterator:
                keys.extend(batch)
                batches += 1
                if len(keys) >= self.most or time.monotonic() > deadline:
                    self.notes.append(
                        "The iterable data set goes on for longer than was looked at, so missing "
                        "samples could not be counted."
                    )
                    break
        finally:
            if iterator is not reader._iterator:  # persistent workers stay for the next epoch
                close_iterator(iterator)
        return Take(keys, batches)

    def close(self) -> None:
        """End persistent workers."""
        close_iterator(self.reader._iterator)
        self.reader._iterator = None


class Fingerprints:
    """Collates samples to their fingerprints."""

    def __init__(self, loader: DataLoader) -> None:
        self.batched = loader.batch_size is not None

    def __call__(self, samples: Any) -> list[str]:
        """One fingerprint per sample."""
        return [fingerprint(s) for s in samples] if self.batched else [fingerprint(samples)]


def _reader(loader: DataLoader, num_workers: int, drop_last: bool) -> DataLoader:
    """A plain loader over the same iterable data set that delivers fingerprints."""
    settings = LoaderSettings.of(loader).changed(num_workers=num_workers, pin_memory=False)
    options = {**settings.kwargs(), "batch_size": loader.batch_size, "drop_last": drop_last}
    return DataLoader(
        loader.dataset,
        collate_fn=Fingerprints(loader),
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        timeout=loader.timeout if num_workers else 0,
        **options,
    )


def number_contents(players: list[Stream], takes: dict[tuple[int, int], Take]) -> Numbered:
    """Numbers of samples for the fingerprints of iterable data sets."""
    whole = not any(player.notes for player in players)
    known: dict[str, int] = {}

    def numbers(keys: Any) -> np.ndarray:
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)

    population = [numbers(player.population) for player in players]
    expected = expected_counts(population)
    samples = {place: numbers(take.keys) for place, take in takes.items()}
    if not whole:
        return samples, expected, False, []
    if len(known) > len(expected):
        reason = "Its samples are never the same twice"
    elif len(players) > 1 and len(expected) < TELLING * expected.sum():
        reason = "Too many of its samples are alike"
    else:
        return samples, expected, True, []
    firsts = np.cumsum([0, *(len(own) for own in population)])
    samples = {
        (epoch, rank): firsts[rank] + np.arange(len(take.keys)) % max(1, len(population[rank]))
        for (epoch, rank), take in takes.items()
    }
    note = f"{reason}, so what comes from the iterable data set was counted, and not compared."
    return samples, np.ones(firsts[-1], dtype=np.int64), True, [note]
