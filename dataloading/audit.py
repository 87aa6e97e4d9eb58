"""Which samples an epoch delivers: how often each, to which rank, in which order, how random.

Map-style data sets are audited through their samplers: exact, and without loading a sample. Iterable
data sets are run through their own workers, and each sample is told by its content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from dataloading.borrowing import borrowed
from dataloading.codes import Finding
from dataloading.fingerprints import fingerprint
from dataloading.randomness import repeated_randomness
from dataloading.results import Result
from dataloading.sample_rules import judge_samples
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.watchdog import (
    close_iterator,
    generators_of,
    loader_warnings_hidden,
    random_state_kept,
    time_limit,
)

if TYPE_CHECKING:
    import pandas as pd

LIMIT_S = 60.0  # for running an iterable data set through its workers, all ranks and epochs
COMPARED_ITEMS = 4  # items fetched to see whether two data sets hold the same

StartEpoch = Callable[[DataLoader, int], Any]


@dataclass(frozen=True, repr=False, eq=False)
class SampleAudit(Result):
    """Which samples the epochs of all ranks delivered.

    Attributes:
        findings: What is wrong, most severe first.
        ok: Whether nothing worse than a note was found.
        counts: DataFrame with a row per epoch and rank: `epoch`, `rank`, `batches`, `delivered`,
            `unique`, `repeated` (deliveries beyond the first of a sample, within the rank),
            `shared` (samples that another rank got too) and `missing` (of the whole epoch: samples
            that no rank got).
        population: How many samples there are to deliver.
        notes: What could not be checked, and why.
    """

    findings: tuple[Finding, ...]
    ok: bool
    counts: pd.DataFrame
    population: int
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Whether each sample came once, else the first finding."""
        if self.findings and not self.ok:
            return f"{len(self.findings)} finding(s), first {self.findings[0].summary()}"
        per_epoch = self.counts.groupby("epoch")["delivered"].sum().tolist()
        return f"ok: {per_epoch} of {self.population} samples delivered per epoch"

    def rows(self) -> list[tuple[str, Any]]:
        """Findings, then the counts of each epoch and rank."""
        counted = [
            (
                f"epoch {row['epoch']}, rank {row['rank']}",
                f"{row['delivered']} delivered, {row['unique']} different, {row['repeated']} "
                f"repeated, {row['shared']} shared with other ranks, {row['missing']} missing",
            )
            for row in self.counts.to_dict(orient="records")
        ]
        found = [(f"{f.code} ({f.severity})", f"{f.message} {f.advice}") for f in self.findings]
        return [("samples", self.population), *found, *counted, ("notes", self.notes)]


@dataclass(frozen=True)
class Delivery:
    """What one rank got in one epoch: sample ids in order, and the number of batches."""

    epoch: int
    rank: int
    ids: tuple[Hashable, ...]
    batches: int


def check_samples(
    make_dataloader: Callable[[int, int], DataLoader] | DataLoader,
    *,
    world_size: int = 1,
    epochs: int = 2,
    start_epoch: StartEpoch | None = None,
) -> SampleAudit:
    """Check that every epoch delivers each sample once, over workers and ranks.

    Args:
        make_dataloader: `make_dataloader(rank, world_size)` gives one rank's loader; with one
            rank, a loader will do.
        world_size: How many ranks to play, all in this process.
        epochs: How many epochs to play.
        start_epoch: `start_epoch(dataloader, epoch)`: what your loop does before an epoch, such as
            `set_epoch`; None means nothing, as in a loop that forgot it.

    Returns:
        A `SampleAudit`: duplicates, missing samples, overlap between ranks, epochs in the same
        shuffled order, repeated random numbers. A fixed order without shuffling is not a fault.

    Raises:
        TypeError: `make_dataloader` is neither a `DataLoader` nor a function that makes one.
        ValueError: `world_size` or `epochs` is below 1, or several ranks share one loader.

    Example:
        >>> check_samples(DataLoader(range(10), batch_size=2, shuffle=True)).ok
        True

    Explained in: notebook 08
    """
    if world_size < 1 or epochs < 1:
        raise ValueError(f"world_size={world_size} and epochs={epochs} must be at least 1.")
    if isinstance(make_dataloader, DataLoader) and world_size > 1:
        raise ValueError(
            "With several ranks, give a function make_dataloader(rank, world_size); one loader "
            "cannot show what the other ranks get."
        )
    with loader_warnings_hidden(), random_state_kept():
        loaders = [_make(make_dataloader, rank, world_size) for rank in range(world_size)]
        generators = [g for loader in loaders for g in generators_of(loader)]
        with (
            random_state_kept(*generators),
            time_limit(LIMIT_S, "Auditing the samples of an epoch"),
        ):
            identify, notes = _identification(loaders)
            population = _population(loaders, identify)
            deliveries = [
                _deliver(loader, rank, epoch, start_epoch, identify)
                for epoch in range(epochs)
                for rank, loader in enumerate(loaders)
            ]
            randomness, random_notes = repeated_randomness(loaders[0], start_epoch)
    counts = count_deliveries(deliveries, population)
    findings = judge_samples(loaders, deliveries, counts, population, randomness)
    return SampleAudit(
        findings=findings,
        ok=all(f.severity == "info" for f in findings),
        counts=counts,
        population=sum(population.values()),
        notes=(*notes, *random_notes),
    )


def _make(
    make_dataloader: Callable[[int, int], DataLoader] | DataLoader, rank: int, world_size: int
) -> DataLoader:
    if isinstance(make_dataloader, DataLoader):
        return make_dataloader
    if not callable(make_dataloader):
        raise TypeError(
            f"Expected a DataLoader or a function make_dataloader(rank, world_size), got "
            f"{type(make_dataloader).__name__}."
        )
    loader = make_dataloader(rank, world_size)
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"make_dataloader(rank={rank}, world_size={world_size}) gave a "
            f"{type(loader).__name__}; expected a DataLoader."
        )
    return loader


Identify = Callable[[Any, Any], Hashable]


def _identification(loaders: list[DataLoader]) -> tuple[Identify, list[str]]:
    """How an index of a loader's data set becomes the id of a sample, the same over all ranks."""
    first, *others = (loader.dataset for loader in loaders)
    if not isinstance(first, Subset | ConcatDataset) and all(other is first for other in others):
        return lambda dataset, index: index, []
    if isinstance(first, IterableDataset) or all(_base(other) is _base(first) for other in others):
        return base_index, []
    same = all(_hold_the_same(first, other) for other in others)
    if same:
        return lambda dataset, index: base_index(dataset, index)[1:], []
    return (
        lambda dataset, index: fingerprint(dataset[index]),
        ["The ranks have data sets of their own, so samples were told by their content."],
    )


def base_index(dataset: Any, index: Any) -> tuple[Hashable, ...]:
    """The data set and index that `Subset`s and `ConcatDataset`s lead to.

    Example:
        >>> whole = ConcatDataset([range(3), range(5)])
        >>> base_index(Subset(whole, [7, 1]), 0)[1:]
        (1, 4)
    """
    path: tuple[Hashable, ...] = ()
    while True:
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        elif isinstance(dataset, ConcatDataset):
            part = int(np.searchsorted(dataset.cumulative_sizes, index, side="right"))
            index = index - (dataset.cumulative_sizes[part - 1] if part else 0)
            dataset = dataset.datasets[part]
            path = (*path, part)
        else:
            return (id(dataset), *path, index)


def _base(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _hold_the_same(first: Any, second: Any) -> bool:
    """Whether two data sets of one kind hold the same items, as far as a few of them show."""
    one, two = _base(first), _base(second)
    if type(one) is not type(two) or len(one) != len(two) or len(one) == 0:
        return False
    for index in np.linspace(0, len(one) - 1, min(COMPARED_ITEMS, len(one))).astype(int).tolist():
        if fingerprint(one[index]) != fingerprint(two[index]):
            # items that differ from themselves are random: their content tells nothing
            return fingerprint(one[index]) != fingerprint(one[index])
    return True


def _population(loaders: list[DataLoader], identify: Identify) -> Counter[Hashable]:
    """All samples that the ranks together should deliver once, and how often each is there."""
    population: Counter[Hashable] = Counter()
    for loader in loaders:
        population |= Counter(_all_samples(loader.dataset, identify))
    return population


def _all_samples(dataset: Any, identify: Identify) -> Iterable[Hashable]:
    if isinstance(dataset, IterableDataset):
        return (fingerprint(sample) for sample in dataset)
    return (identify(dataset, index) for index in range(len(dataset)))


def _deliver(
    loader: DataLoader,
    rank: int,
    epoch: int,
    start_epoch: StartEpoch | None,
    identify: Identify,
) -> Delivery:
    if start_epoch is not None:
        start_epoch(loader, epoch)
    if isinstance(loader.dataset, IterableDataset):
        return _run(loader, rank, epoch)
    if loader.batch_sampler is not None:
        batches = [list(batch) for batch in loader.batch_sampler]
    else:
        batches = [[index] for index in loader.sampler]
    ids = tuple(identify(loader.dataset, index) for batch in batches for index in batch)
    return Delivery(epoch, rank, ids, len(batches))


def _run(loader: DataLoader, rank: int, epoch: int) -> Delivery:
    """One epoch of an iterable data set in its workers, with fingerprints instead of batches."""
    with borrowed(loader) as lent:
        reader = rebuild_dataloader(
            lent.loader, LoaderSettings.of(loader), collate_fn=Fingerprints(loader)
        )
        iterator = iter(reader)
        try:
            batches = list(iterator)
        finally:
            close_iterator(iterator)
            reader._iterator = None
    return Delivery(epoch, rank, tuple(i for batch in batches for i in batch), len(batches))


class Fingerprints:
    """Collates samples to their fingerprints."""

    def __init__(self, loader: DataLoader) -> None:
        self.batched = loader.batch_size is not None

    def __call__(self, samples: Any) -> list[str]:
        """One fingerprint per sample."""
        return [fingerprint(s) for s in samples] if self.batched else [fingerprint(samples)]


def count_deliveries(deliveries: list[Delivery], population: Counter[Hashable]) -> pd.DataFrame:
    """Count what each rank got in each epoch.

    Args:
        deliveries: Sample ids by epoch and rank.
        population: Every sample, with how often it is there.

    Returns:
        The table described in `SampleAudit.counts`.
    """
    import pandas as pd

    rows = []
    for one in deliveries:
        own = Counter(one.ids)
        others: Counter[Hashable] = Counter()
        for other in deliveries:
            if other.epoch == one.epoch and other.rank != one.rank:
                others.update(other.ids)
        missing = population - (own + others)
        rows.append(
            {
                "epoch": one.epoch,
                "rank": one.rank,
                "batches": one.batches,
                "delivered": len(one.ids),
                "unique": len(own),
                "repeated": sum(max(0, n - max(1, population[i])) for i, n in own.items()),
                "shared": sum(1 for i in own if i in others),
                "missing": sum(missing.values()),
            }
        )
    return pd.DataFrame(rows)
