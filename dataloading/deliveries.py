"""Playing the epochs of all ranks: which samples their loaders choose or their workers produce.

Map-style data sets are played through their samplers, without loading a sample.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from dataloading.sample_numbers import expected_counts, number_samples
from dataloading.streams import Numbered, Stream, Take, number_contents

MOST_DRAWS = 1_000_000  # a sampler that goes on for so long beyond four epochs does not end
STREAM_LIMIT_S = 45.0  # for all goes through iterable data sets together

StartEpoch = Callable[[DataLoader, int], Any]


@dataclass(frozen=True)
class Delivery:
    """What one rank got in one epoch: the numbers of its samples in order, and its batches."""

    epoch: int
    rank: int
    samples: np.ndarray
    batches: int


@dataclass(frozen=True)
class Played:
    """All epochs of all ranks.

    Attributes:
        deliveries: By epoch, then rank.
        expected: How often each sample is there to be delivered, by its number.
        whole: Whether `expected` holds all samples, so that missing ones can be counted.
        untold: What has a `set_epoch` and was not told, though the order would have changed.
        notes: What could not be checked, or is assumed.
        outside: An index that was drawn and the data set has no sample for, with the number of
            samples that it has; None where all are inside.
    """

    deliveries: list[Delivery]
    expected: np.ndarray
    whole: bool = True
    untold: str | None = None
    notes: tuple[str, ...] = ()
    outside: tuple[int, int] | None = None


def sampler_of(loader: DataLoader) -> Any:
    """What chooses the samples: the sampler inside the batch sampler, or one that has none itself."""
    batches: Any = loader.batch_sampler
    if batches is not None and loader.batch_size is None:  # the user's own
        return getattr(batches, "sampler", batches)
    return getattr(batches, "sampler", loader.sampler)


def play_epochs(
    loaders: list[DataLoader],
    epochs: int,
    start_epoch: StartEpoch | None = None,
    after_epoch: Callable[[int, int, Any], None] | None = None,
) -> Played:
    """Play the epochs of all ranks.

    Args:
        loaders: One per rank.
        epochs: How many epochs.
        start_epoch: Called as `start_epoch(loader, epoch)` before each epoch of each rank.
        after_epoch: Called as `after_epoch(epoch, rank, first)` after it; `first` is the first
            index that the sampler gave, None where there is none.

    Returns:
        What was delivered.
    """
    streams = isinstance(loaders[0].dataset, IterableDataset)
    players: list[Any] = (
        [Stream(loader, STREAM_LIMIT_S / (len(loaders) * (epochs + 1))) for loader in loaders]
        if streams
        else [Draws(loader, len(loaders)) for loader in loaders]
    )
    takes: dict[tuple[int, int], Take] = {}
    try:
        for player in players:
            player.look_around()
        for epoch in range(epochs):
            for rank, (player, loader) in enumerate(zip(players, loaders, strict=True)):
                if start_epoch is not None:
                    start_epoch(loader, epoch)
                takes[epoch, rank] = take = player.epoch()
                if after_epoch is not None:
                    after_epoch(epoch, rank, None if streams else take.first)
        untold = _untold(players[0], [takes[epoch, 0] for epoch in range(epochs)])
    finally:
        for player in players:
            player.close()
    numbered = number_contents if streams else _number_indices
    samples, expected, whole, notes = numbered(players, takes)
    deliveries = [
        Delivery(epoch, rank, samples[epoch, rank], take.batches)
        for (epoch, rank), take in takes.items()
    ]
    notes = [*dict.fromkeys([*notes, *(note for player in players for note in player.notes)])]
    outside = None if streams else _outside(players, takes)
    return Played(deliveries, expected, whole, untold, tuple(notes), outside)


class Draws:
    """The epochs of a map-style data set, as its sampler draws them."""

    def __init__(self, loader: DataLoader, ranks: int) -> None:
        self.loader = loader
        self.notes: list[str] = []
        self.size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        self.ranks = ranks
        own = sampler_of(loader)
        self.owners = [one for one in (loader.batch_sampler, own) if hasattr(one, "set_epoch")]

    def look_around(self) -> None:
        """Nothing: the data set says how many samples there are."""

    def epoch(self) -> Take:
        """Draw once through the sampler."""
        batched = self.loader.batch_sampler is not None
        most = MOST_DRAWS + 4 * (self.size or 0)
        drawn: list[Any] = []
        batches = 0
        for batch in self.loader.batch_sampler if batched else self.loader.sampler:  # type: ignore[union-attr]
            batches += 1
            many = batched or (np.ndim(batch) == 1 and not isinstance(batch, tuple))
            if many:
                drawn.extend(batch)
            else:
                drawn.append(batch)
            if len(drawn) > most:
                share = math.ceil((self.size or most) / self.ranks)
                self.notes.append(
                    f"The sampler does not end; its first {share} draws were taken for an epoch."
                )
                batches = math.ceil(batches * share / len(drawn))
                del drawn[share:]
                break
        try:
            indices = np.fromiter(map(operator.index, drawn), dtype=np.int64, count=len(drawn))
        except TypeError:  # keys that are no numbers
            return Take(drawn, batches)
        return Take(indices, batches)

    def close(self) -> None:
        """Nothing was started."""


def _untold(player: Any, takes: list[Take]) -> str | None:
    """Name of what shuffles by epoch and was not told it: the order would have changed."""
    if len(takes) < 2 or not all(take.equals(takes[0]) for take in takes):
        return None
    for owner in player.owners:
        before = getattr(owner, "epoch", 0)
        told = []
        try:
            for epoch in range(len(takes)):
                player.close()  # persistent workers would not hear of it
                owner.set_epoch(epoch)
                told.append(player.epoch())
        finally:
            owner.set_epoch(before if isinstance(before, int) else 0)
        if not all(take.equals(told[0]) for take in told):
            return type(owner).__name__
    return None


def _number_indices(players: list[Draws], takes: dict[tuple[int, int], Take]) -> Numbered:
    """Numbers of samples for indices of map-style data sets."""
    odd = _odd_key(players, takes)
    if odd is not None:
        known: dict[Any, int] = {}
        samples = {
            place: np.array([known.setdefault(key, len(known)) for key in take.keys], np.int64)
            for place, take in takes.items()
        }
        return samples, np.zeros(len(known), np.int64), False, [odd]
    loaders = [player.loader for player in players]
    shared_out = all(hasattr(sampler_of(loader), "num_replicas") for loader in loaders)
    numbers, notes = number_samples([loader.dataset for loader in loaders], shared_out)
    meant = [
        own[np.asarray(sampler_of(loader).indices, dtype=np.int64)]
        if isinstance(sampler_of(loader), SubsetRandomSampler)
        else own
        for own, loader in zip(numbers, loaders, strict=True)
    ]
    samples = {(epoch, rank): numbers[rank][take.keys] for (epoch, rank), take in takes.items()}
    return samples, expected_counts(meant), True, notes


def _outside(players: list[Draws], takes: dict[tuple[int, int], Take]) -> tuple[int, int] | None:
    """The first index that a data set has no sample for, and how many samples that has."""
    for (_, rank), take in takes.items():
        size = players[rank].size
        if size is None or not isinstance(take.keys, np.ndarray):
            continue
        strange = take.keys[(take.keys < -size) | (take.keys >= size)]
        if len(strange):
            return int(strange[0]), size
    return None


def _odd_key(players: list[Draws], takes: dict[tuple[int, int], Take]) -> str | None:
    """Why samples can only be told by what the sampler gave; None where it gave indices."""
    if any(player.size is None for player in players):
        return "The data set has no length, so missing samples could not be counted."
    for (_, rank), take in takes.items():
        size = players[rank].size or 0
        indices = take.keys if isinstance(take.keys, np.ndarray) else None
        if indices is None or (len(indices) and not -size <= indices.min() <= indices.max() < size):
            return (
                f"The sampler gives other things than numbers below {size}, so missing samples "
                "could not be counted."
            )
    return None
