"""Whether two loaders deliver the same samples, told by lengths and samplers without loading one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dataloading.sample_numbers import bases_of, number_samples
from dataloading.sharding import gives_shares
from dataloading.timing import length_of
from dataloading.watchdog import generators_of, random_state_kept, time_limit

MOST_DRAWS = 1_000_000  # indices of an epoch; to draw more would take longer than it is worth
DRAW_LIMIT_S = 2.0  # for drawing two epochs of indices from each loader


def same_samples(before: Any, after: Any) -> bool | None:
    """Whether two loaders deliver the same samples, as far as it shows without loading any.

    Where they share a data set, `Subset`s of it included, and their samplers are not torch's own
    for whole epochs, the indices that these give are compared.

    Returns:
        True where both deliver each sample equally often, False where they do not, None where it
        cannot be known: data sets of their own, samplers that choose others in each epoch.

    Example:
        >>> from torch.utils.data import Subset
        >>> data = list(range(8))
        >>> half, other = Subset(data, range(4)), Subset(data, range(4, 8))
        >>> same_samples(DataLoader(data), DataLoader(data, shuffle=True))
        True
        >>> same_samples(DataLoader(half), DataLoader(other))
        False
    """
    first, second = getattr(before, "dataset", None), getattr(after, "dataset", None)
    if first is None or second is None:
        return None
    lengths = [_delivered(loader) for loader in (before, after)]
    if None not in lengths and lengths[0] != lengths[1]:
        return False
    copies = [_copies(loader) for loader in (before, after)]
    if first is second and None not in copies and copies[0] != copies[1]:
        return False
    if first is second and all(_is_complete(loader) for loader in (before, after)):
        return True
    return _same_draws(before, after)


def _delivered(loader: Any) -> int | None:
    """Samples of an epoch, as far as sampler and drop_last tell."""
    if getattr(loader, "batch_size", None) is None:
        return None
    count = length_of(loader.sampler) if hasattr(loader, "sampler") else None
    return count if count is not None else length_of(loader.dataset)


def _copies(loader: Any) -> int | None:
    """How often each sample of an iterable data set comes in an epoch; None where not known."""
    workers = getattr(loader, "num_workers", 0)
    if workers < 2:
        return 1
    shares_out = gives_shares(loader)
    return None if shares_out is None else 1 if shares_out else workers


def _is_complete(loader: Any) -> bool:
    """Whether each sample comes once in an epoch, by torch's own samplers."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    if isinstance(sampler, SequentialSampler):
        return True
    return isinstance(sampler, RandomSampler) and not sampler.replacement


def _same_draws(before: Any, after: Any) -> bool | None:
    """Compare the indices of an epoch; None where they differ from epoch to epoch, or take long."""
    loaders = (before, after)
    if not all(isinstance(loader, DataLoader) for loader in loaders):
        return None
    if any(isinstance(loader.dataset, IterableDataset) for loader in loaders):
        return None
    bases = [[id(base) for base in bases_of(loader.dataset)] for loader in loaders]
    if set(bases[0]) != set(bases[1]):
        return None  # fetching samples to compare them could open files that workers then inherit
    generators = [generator for loader in loaders for generator in generators_of(loader)]
    try:
        with (
            random_state_kept(*generators),
            time_limit(DRAW_LIMIT_S, "Drawing the indices of an epoch"),
        ):
            numbers, _ = number_samples([loader.dataset for loader in loaders])
            draws = [
                [np.sort(own[_indices(loader)]) for _ in range(2)]
                for loader, own in zip(loaders, numbers, strict=True)
            ]
    except Exception:  # the user's sampler; running the loader will report it
        return None
    if np.array_equal(draws[0][0], draws[1][0]):
        return True
    steady = all(np.array_equal(one, two) for one, two in draws)
    return False if steady else None


def _indices(loader: DataLoader) -> np.ndarray:
    """The indices of one epoch, those of a last batch that `drop_last` leaves out included.

    Raises:
        TypeError: The sampler gives something else than indices.
        ValueError: It gives too many.
    """
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        drawn: Iterator[Any] = chain.from_iterable(batches)
    else:
        drawn = iter(getattr(batches, "sampler", loader.sampler))
    indices = np.fromiter(map(operator.index, islice(drawn, MOST_DRAWS + 1)), dtype=np.int64)
    if len(indices) > MOST_DRAWS:
        raise ValueError(f"more than {MOST_DRAWS} indices in an epoch")
    return indices
