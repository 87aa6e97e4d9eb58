"""A look at a few samples before they are cached: how they are laid out, and whether they are random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataloading.fingerprints import fingerprint
from dataloading.object_graph import walk
from dataloading.peeking import trial_copy
from dataloading.sample_layout import SampleLayout, sample_layout
from dataloading.sample_leaves import Misfit
from dataloading.watchdog import random_state_kept

MOST_TRIED = 16  # samples in a row, where they cannot be read,
MOST_SPREAD = 64  # and then so many over all of the data set


@dataclass(frozen=True)
class _Fetch:
    sample: Any
    content: str
    state: str  # of the global random generators afterwards


class SampleProbe:
    """What a few samples show: their layout, and whether they are random.

    They are fetched from a copy of the data set, whose own generators and open files are not those
    of the original, and the global random state is put back.
    """

    def __init__(self, dataset: Any, count: int) -> None:
        held = list(walk(dataset, "dataset"))
        with random_state_kept(), trial_copy(dataset, held) as trial:
            at, first = _readable(trial, _some_places(count))
            again = _fetch(trial, at)
            from_behind = range(count - 1, at, -1)[:MOST_TRIED]
            last, other = _readable(trial, from_behind, default=(at, first))
        try:
            self.layout: SampleLayout = sample_layout([first.sample, other.sample])
        except Misfit as misfit:
            raise TypeError(f"{type(dataset).__name__} cannot be cached: {misfit}.") from None
        self.warning = _random_warning(f"Sample {at} of {type(dataset).__name__}", first, again)
        # equal in every run, unless it is random
        self.content = None if self.warning else (first.content, other.content)
        if self.warning is None:
            self.warning = _misfit_warning(self.layout, other.sample, last)


def _some_places(count: int) -> list[int]:
    """The first few, and then some spread over all, where a folder begins with bad files."""
    first = range(min(count, MOST_TRIED))
    spread = (number * count // MOST_SPREAD for number in range(MOST_SPREAD))
    return list(dict.fromkeys([*first, *spread]))


def _readable(
    dataset: Any, places: Sequence[int], default: tuple[int, _Fetch] | None = None
) -> tuple[int, _Fetch]:
    """The first sample that can be read among a few; the others will be told when they are used.

    Raises:
        OSError: None of them can be read, and there is no default.
    """
    errors = []
    for place in places:
        try:
            return place, _fetch(dataset, place)
        except OSError as error:
            errors.append(error)
    if default is None:
        raise OSError(
            f"Nothing to cache: none of {len(errors)} samples that were looked at can be read. "
            f"{errors[0]}"
        )
    return default


def _fetch(dataset: Any, index: int) -> _Fetch:
    sample = dataset[index]
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    return _Fetch(sample, fingerprint(sample), fingerprint(states))


def _random_warning(sample: str, first: _Fetch, again: _Fetch) -> str | None:
    if first.content != again.content:
        seen = f"{sample} came out differently when it was fetched twice"
    elif first.state != again.state:  # seeding by index would leave the same state
        seen = f"{sample} draws random numbers"
    else:
        return None
    return (
        f"{seen}: in a cache, random results would be frozen; pass the random part as transform=, "
        "which is applied after the cache."
    )


def _misfit_warning(layout: SampleLayout, sample: Any, index: int) -> str | None:
    try:
        layout.pack(sample)
    except Misfit as misfit:
        return (
            f"Samples differ ({index}: {misfit}); only those like the first are cached. Resize or "
            "pad them in the data set."
        )
    return None
