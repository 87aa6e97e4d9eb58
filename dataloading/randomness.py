"""Whether the random numbers in samples repeat: between workers, ranks, and from epoch to epoch.

The same sample is fetched again and again in every worker. Where its values change from one fetch to
the next there is randomness in it, whatever library it comes from; where two workers, ranks or epochs
show the same changing values, it repeats.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataloading.fingerprints import fingerprint
from dataloading.watchdog import close_iterator, open_iterator, time_limit

DRAWS = 16  # fetches per worker: enough for a coin, such as a random flip
CHANCE = 1e-3  # equal draws that are likelier than this by accident prove nothing
MOST_WORKERS = 4  # as many workers show a repetition as well as more would
EPOCHS, RANKS = 2, 2  # the first two show it as well as more would
ENOUGH_S = 5.0  # fetching stops after this
LIMIT_S = 15.0  # and a sample that does not come is given up after this

Draws = dict[int, list[str]]  # by worker


@dataclass(frozen=True)
class RepeatedRandomness:
    """What repeats: pairs of workers, epochs, ranks; and how many draws were equal."""

    workers: tuple[tuple[int, int], ...]
    epochs: bool
    draws: int
    ranks: bool = False


class RandomnessProbe:
    """Fetches one sample again and again in the workers of a rank's loader.

    Args:
        loader: Its data set, workers, seeding and generator are used.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.seen: list[Draws] = []
        self.notes: tuple[str, ...] = ()
        self._kept: Any = None
        if isinstance(loader.dataset, IterableDataset):
            self.notes = ("Random numbers in an iterable data set were not checked.",)

    def epoch(self, index: Any) -> None:
        """Fetch in one more epoch.

        Args:
            index: Which sample; None fetches nothing.
        """
        if index is None or self.notes:
            return
        try:
            with time_limit(LIMIT_S, f"Fetching sample {index!r}"):
                self.seen.append(self._fetch(index))
        except Exception as error:  # the data set's own code: whatever it raises, nothing is known
            last_line = str(error).strip().rpartition("\n")[2]
            self.notes = (f"Random numbers were not checked: {type(error).__name__}: {last_line}",)

    def _fetch(self, index: Any) -> Draws:
        if self._kept is None or not self.loader.persistent_workers:
            self._kept = self._probe(index)
        probe = self._kept
        deadline = time.monotonic() + ENOUGH_S
        draws: Draws = defaultdict(list)
        iterator = open_iterator(probe)
        try:
            for worker, value in iterator:
                draws[worker].append(value)
                if time.monotonic() > deadline:
                    break
        finally:
            if iterator is not probe._iterator:
                close_iterator(iterator)
        return draws

    def _probe(self, index: Any) -> DataLoader:
        """A loader over the very data set, so that what seeds it in `worker_init_fn` finds it."""
        loader = self.loader
        workers = min(loader.num_workers, MOST_WORKERS)
        options: dict[str, Any] = {}
        if workers:
            options = {
                "num_workers": workers,
                "worker_init_fn": loader.worker_init_fn,
                "multiprocessing_context": loader.multiprocessing_context,
                "persistent_workers": loader.persistent_workers,
            }
        return DataLoader(
            loader.dataset,
            sampler=[index] * (DRAWS * max(1, workers)),
            batch_size=None,
            collate_fn=worker_and_content,
            generator=loader.generator,
            **options,
        )

    def close(self) -> None:
        """End persistent workers."""
        if self._kept is not None:
            close_iterator(self._kept._iterator)
            self._kept._iterator = None


def worker_and_content(sample: Any) -> tuple[int, str]:
    """Collates a sample to the worker that fetched it and its fingerprint."""
    info = get_worker_info()
    return (info.id if info is not None else 0), fingerprint(sample)


def compare_draws(seen: list[Draws], other_rank: Draws | None = None) -> RepeatedRandomness | None:
    """Find equal sequences of changing values.

    Args:
        seen: For each epoch, the values that each worker drew, in order.
        other_rank: The values that the workers of another rank drew in the first epoch.

    Returns:
        What repeats, or None. Values that never change are not random, and few draws of a coin may
        be equal by accident.

    Example:
        >>> numbers = ["3", "1", "4", "1", "5", "9"]
        >>> compare_draws([{0: numbers, 1: numbers}]).workers
        ((0, 1),)
        >>> compare_draws([{0: ["a"] * 6, 1: ["a"] * 6}]) is None
        True
    """
    if not seen or not seen[0]:
        return None
    first = seen[0]
    workers = tuple(
        (one, two)
        for one in sorted(first)
        for two in sorted(first)
        if one < two and _repeats(first[one], first[two])
    )
    epochs = len(seen) > 1 and _all_repeat(first, seen[1])
    ranks = other_rank is not None and _all_repeat(first, other_rank)
    if not (workers or epochs or ranks):
        return None
    return RepeatedRandomness(workers, epochs, min(map(len, first.values())), ranks)


def _all_repeat(one: Draws, two: Draws) -> bool:
    return all(_repeats(draws, two.get(worker, [])) for worker, draws in one.items())


def _repeats(one: list[str], two: list[str]) -> bool:
    """Whether two sequences are equal as far as both go, and that is no accident.

    Two draws are alike with the probability that pairs within the sequence are; all draws are alike
    with its power.
    """
    count = min(len(one), len(two))
    one = one[:count]
    if count == 0 or one != two[:count]:
        return False
    alike = sum(n * (n - 1) // 2 for n in Counter(one).values())
    pairs = count * (count - 1) // 2
    return bool(((1 + alike) / (1 + pairs)) ** count < CHANCE)
