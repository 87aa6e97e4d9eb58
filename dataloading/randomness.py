"""Whether the random numbers in samples repeat: between workers, and from epoch to epoch.

The same sample is fetched again and again in every worker. Where its values change from one fetch to
the next there is randomness in it, whatever library it comes from; where two workers, or two epochs,
show the same changing values, it repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dataloading.fingerprints import fingerprint
from dataloading.watchdog import close_iterator

DRAWS = 4  # fetches per worker; four equal draws in a row are no accident
MOST_WORKERS = 4  # as many workers show a repetition as well as more would
EPOCHS = 2


@dataclass(frozen=True)
class RepeatedRandomness:
    """What repeats: pairs of workers, or epochs; and how many draws were equal."""

    workers: tuple[tuple[int, int], ...]
    epochs: bool
    draws: int


class SameSample(Dataset):
    """Fetches one sample of a data set again and again, and tells who fetched it."""

    def __init__(self, dataset: Any, fetches: int) -> None:
        self.dataset = dataset
        self.fetches = fetches

    def __len__(self) -> int:
        return self.fetches

    def __getitem__(self, number: int) -> tuple[int, str]:
        info = get_worker_info()
        return (info.id if info is not None else 0), fingerprint(self.dataset[0])


def repeated_randomness(
    loader: DataLoader, start_epoch: Callable[[DataLoader, int], Any] | None = None
) -> tuple[RepeatedRandomness | None, tuple[str, ...]]:
    """Fetch the first sample in several workers over two epochs, and compare what came.

    Args:
        loader: Its data set, workers, seeding and generator are used.
        start_epoch: Called before each epoch, as in the user's loop.

    Returns:
        What repeats (None for nothing), and notes on what could not be checked.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None, ("Random numbers in an iterable data set were not checked.",)
    workers = min(loader.num_workers, MOST_WORKERS)
    options: dict[str, Any] = {}
    if workers:
        options = {
            "num_workers": workers,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
        }
    probe: DataLoader[Any] = DataLoader(
        SameSample(loader.dataset, DRAWS * max(1, workers)),
        batch_size=None,
        generator=loader.generator,
        **options,
    )
    seen: list[dict[int, list[str]]] = []
    try:
        for epoch in range(EPOCHS):
            if start_epoch is not None:
                start_epoch(loader, epoch)
            seen.append(_one_epoch(probe))
    except Exception as error:  # the data set's own code: whatever it raises, nothing is known
        return None, (f"Random numbers were not checked: {type(error).__name__}: {error}",)
    finally:
        close_iterator(probe._iterator)
        probe._iterator = None
    return compare_draws(seen), ()


def _one_epoch(probe: DataLoader) -> dict[int, list[str]]:
    draws: dict[int, list[str]] = defaultdict(list)
    iterator = iter(probe)
    try:
        for worker, value in iterator:
            draws[int(worker)].append(value)
    finally:
        if iterator is not probe._iterator:
            close_iterator(iterator)
    return draws


def compare_draws(seen: list[dict[int, list[str]]]) -> RepeatedRandomness | None:
    """Find equal sequences of changing values.

    Args:
        seen: For each epoch, the values that each worker drew, in order.

    Returns:
        What repeats, or None. Values that never change are not random.

    Example:
        >>> compare_draws([{0: ["a", "b"], 1: ["a", "b"]}]).workers
        ((0, 1),)
        >>> compare_draws([{0: ["a", "a"], 1: ["a", "a"]}]) is None
        True
    """
    if len({value for epoch in seen for draws in epoch.values() for value in draws}) < 2:
        return None
    first = seen[0]
    workers = tuple(
        (one, two)
        for one in sorted(first)
        for two in sorted(first)
        if one < two and _same(first[one], first[two])
    )
    epochs = len(seen) > 1 and all(
        _same(first[worker], seen[1].get(worker, [])) for worker in first
    )
    if not workers and not epochs:
        return None
    return RepeatedRandomness(workers, epochs, min(len(draws) for draws in first.values()))


def _same(one: list[str], two: list[str]) -> bool:
    return bool(one) and one == two
