"""Which samples an epoch delivers: how often each, to which rank, in which order, how random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader

from dataloading.arguments import check_int
from dataloading.codes import Finding
from dataloading.deliveries import Played, StartEpoch, play_epochs
from dataloading.randomness import EPOCHS, RANKS, RandomnessProbe, compare_draws
from dataloading.results import Result
from dataloading.sample_rules import judge_samples
from dataloading.watchdog import (
    generators_of,
    loader_warnings_hidden,
    random_state_kept,
    time_limit,
)

if TYPE_CHECKING:
    import pandas as pd

LIMIT_S = 120.0  # for the whole audit: a worker that does not answer is given up after this


@dataclass(frozen=True, repr=False, eq=False)
class SampleAudit(Result):
    """Which samples the epochs of all ranks delivered.

    Attributes:
        findings: What is wrong, most severe first.
        ok: Whether nothing worse than a note was found.
        counts: DataFrame with a row per epoch and rank: `epoch`, `rank`, `batches`, `delivered`,
            `unique`, `repeated` (deliveries beyond the first of a sample, within the rank),
            `shared` (samples that another rank got too) and `missing` (of the whole epoch: samples
            that no rank got; None where that is not known).
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
                f"repeated, {row['shared']} shared with other ranks, "
                f"{'unknown' if row['missing'] is None else row['missing']} missing",
            )
            for row in self.counts.to_dict(orient="records")
        ]
        found = [(f"{f.code} ({f.severity})", f"{f.message} {f.advice}") for f in self.findings]
        return [("samples", self.population), *found, *counted, ("notes", self.notes)]


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
        Map-style data sets are audited through their samplers: exact, and with a few samples
        loaded. Iterable data sets run through their own workers, and samples are told by content.

    Raises:
        TypeError: `make_dataloader` is neither a `DataLoader` nor a function that makes one.
        ValueError: `world_size` or `epochs` is below 1, or several ranks share one loader.
        ProbeTimeout: A worker gave no sample within its time.

    Example:
        >>> check_samples(DataLoader(range(10), batch_size=2, shuffle=True)).ok
        True

    Explained in: notebook 08
    """
    check_int("world_size", world_size, least=1)
    check_int("epochs", epochs, least=1)
    if start_epoch is not None and not callable(start_epoch):
        raise TypeError(
            f"Expected a function start_epoch(dataloader, epoch), got {type(start_epoch).__name__}."
        )
    if isinstance(make_dataloader, DataLoader) and world_size > 1:
        raise ValueError(
            "With several ranks, give a function make_dataloader(rank, world_size); one loader "
            "cannot show what the other ranks get."
        )
    with loader_warnings_hidden(), random_state_kept():
        loaders = [_make(make_dataloader, rank, world_size) for rank in range(world_size)]
        generators = [g for loader in loaders for g in generators_of(loader)]
        probes = [RandomnessProbe(loader) for loader in loaders[:RANKS]]
        first: list[Any] = []

        def probe_randomness(epoch: int, rank: int, index: Any) -> None:
            first.append(index)
            if rank < RANKS and epoch < (1 if rank else EPOCHS):
                probes[rank].epoch(first[0])  # the same sample in all ranks and epochs

        try:
            with (
                random_state_kept(*generators),
                time_limit(LIMIT_S, "Auditing the samples of an epoch"),
            ):
                played = play_epochs(loaders, epochs, start_epoch, probe_randomness)
        finally:
            for probe in probes:
                probe.close()
    randomness = compare_draws(probes[0].seen, *(p.seen[0] for p in probes[1:] if p.seen))
    counts = count_deliveries(played)
    findings = judge_samples(loaders, played, counts, randomness)
    return SampleAudit(
        findings=findings,
        ok=all(f.severity == "info" for f in findings),
        counts=counts,
        population=int(played.expected.sum()),
        notes=(*played.notes, *probes[0].notes),
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


def count_deliveries(played: Played) -> pd.DataFrame:
    """Count what each rank got in each epoch.

    Args:
        played: Sample numbers by epoch and rank, and how often each sample is there.

    Returns:
        The table described in `SampleAudit.counts`.
    """
    import pandas as pd

    expected = played.expected
    rows = []
    for epoch in sorted({one.epoch for one in played.deliveries}):
        ranks = [one for one in played.deliveries if one.epoch == epoch]
        got = [np.bincount(one.samples, minlength=len(expected)) for one in ranks]
        size = max(map(len, got))  # samples beyond the expected ones have higher numbers
        got = [np.pad(own, (0, size - len(own))) for own in got]
        due = np.pad(expected, (0, size - len(expected)))
        total = np.sum(got, axis=0)
        missing = int(np.maximum(due - total, 0).sum()) if played.whole else None
        for one, own in zip(ranks, got, strict=True):
            rows.append(
                {
                    "epoch": epoch,
                    "rank": one.rank,
                    "batches": one.batches,
                    "delivered": len(one.samples),
                    "unique": int(np.count_nonzero(own)),
                    "repeated": int(np.maximum(own - np.maximum(due, 1), 0).sum()),
                    "shared": int(np.count_nonzero((own > 0) & (total > own) & (total > due))),
                    "missing": missing,
                }
            )
    return pd.DataFrame(rows)
