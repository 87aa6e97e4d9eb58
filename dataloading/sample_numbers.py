"""One number for one sample, whatever rank, `Subset` or `ConcatDataset` it is reached through."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from dataloading.fingerprints import fingerprint
from dataloading.watchdog import ProbeTimeout

COMPARED_ITEMS = 4  # items fetched to see whether two data sets hold the same
CONTENT_LIMIT_S = 10.0  # for fetching all items of data sets that differ, to find those they share
TELLING = 0.5  # where fewer contents than this share of the samples differ, contents tell nothing


def number_samples(
    datasets: Sequence[Any], shared_out: bool = False
) -> tuple[list[np.ndarray], list[str]]:
    """Number the samples of the map-style data sets of all ranks.

    Ranks that made a data set each are compared by content, with the random numbers of transforms
    held still.

    Args:
        datasets: The data set of each rank.
        shared_out: Whether samplers share the samples out over ranks: then data sets that cannot
            be compared count as the same, else as different.

    Returns:
        For each rank an array, index -> number of the sample; and notes on what is assumed.

    Example:
        >>> whole = list("abcd")
        >>> numbers, _ = number_samples([Subset(whole, [0, 2]), Subset(whole, [2, 3])])
        >>> [one.tolist() for one in numbers]
        [[0, 2], [2, 3]]
    """
    per_rank = [list(bases_of(dataset)) for dataset in datasets]
    numbers: dict[int, np.ndarray] = {}
    notes: list[str] = []
    count, differ = 0, False
    for own in per_rank:
        twins = per_rank[0] if len(own) == len(per_rank[0]) else [None] * len(own)
        for base, twin in zip(own, twins, strict=True):
            if id(base) in numbers:
                continue
            same: bool | None = False
            if own is not per_rank[0]:
                same, reason = hold_the_same(twin, base)
                differ = differ or same is False
                if same is None:
                    same = shared_out
                    notes.append(
                        f"The ranks' data sets could not be compared ({reason}); they are taken "
                        f"for {'the same' if same else 'different'}."
                    )
            numbers[id(base)] = numbers[id(twin)] if same else np.arange(count, count + len(base))
            count += 0 if same else len(base)
    if differ:
        by_content = _numbers_by_content([base for own in per_rank for base in own])
        numbers = by_content or numbers
        notes.append(
            "The ranks have data sets of their own, so samples were told by their content."
            if by_content
            else "The ranks have data sets of their own; whether these share samples was not found "
            "out, as their contents could not be compared."
        )
    return [_numbers_through(dataset, numbers) for dataset in datasets], [*dict.fromkeys(notes)]


def bases_of(dataset: Any) -> Iterator[Any]:
    """The data sets that `Subset`s and `ConcatDataset`s lead to, in order."""
    if isinstance(dataset, Subset):
        yield from bases_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from bases_of(part)
    else:
        yield dataset


def _numbers_through(dataset: Any, numbers: dict[int, np.ndarray]) -> np.ndarray:
    if isinstance(dataset, Subset):
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return _numbers_through(dataset.dataset, numbers)[chosen]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_numbers_through(part, numbers) for part in dataset.datasets])
    return numbers[id(dataset)]


def hold_the_same(one: Any, two: Any) -> tuple[bool | None, str]:
    """Whether two data sets of one kind hold the same items, as far as a few of them show.

    Returns:
        True, False, or None where it cannot be told, with the reason.
    """
    if type(one) is not type(two) or len(one) != len(two):
        return False, ""
    try:
        for index in np.linspace(0, len(one) - 1, min(COMPARED_ITEMS, len(one))).astype(int):
            content = _content(one, int(index))
            if content != _content(two, int(index)):
                steady = content == _content(one, int(index))
                return (False, "") if steady else (None, "their items differ at each fetch")
    except ProbeTimeout:
        raise
    except Exception as error:  # the data set's own code may raise anything
        return None, f"{type(error).__name__}: {error}"
    return True, ""


def _content(dataset: Any, index: int) -> str:
    """Fingerprint of an item, its random transforms with the same random numbers each time."""
    random.seed(0)
    np.random.seed(0)
    torch.random.default_generator.manual_seed(0)
    return fingerprint(dataset[index])


def _numbers_by_content(bases: list[Any]) -> dict[int, np.ndarray] | None:
    """Numbers by content; None where that fails, takes too long, or tells too little apart."""
    deadline = time.monotonic() + CONTENT_LIMIT_S
    known: dict[str, int] = {}
    numbers: dict[int, np.ndarray] = {}
    for base in {id(base): base for base in bases}.values():
        own: list[int] = []
        try:
            while len(own) < len(base) and time.monotonic() < deadline:
                own.append(known.setdefault(_content(base, len(own)), len(known)))
        except ProbeTimeout:
            raise
        except Exception:  # the data set's own code may raise anything
            return None
        if len(own) < len(base) or len(set(own)) < TELLING * len(own):
            return None
        numbers[id(base)] = np.array(own, dtype=np.int64)
    return numbers


def expected_counts(population: list[np.ndarray]) -> np.ndarray:
    """How often the ranks together should deliver each sample: as often as one data set has it."""
    size = max((int(own.max()) + 1 for own in population if len(own)), default=0)
    return np.max([np.bincount(own, minlength=size) for own in population], axis=0)
