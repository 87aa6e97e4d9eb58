"""Rules of the sample audit: from counts to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dataloading.codes import SEVERITIES, Finding, finding

if TYPE_CHECKING:
    import pandas as pd

    from dataloading.audit import Delivery
    from dataloading.randomness import RepeatedRandomness

NEARLY_ALL = 0.9  # a rank that gets nine tenths of what another gets has no share of its own


def judge_samples(
    loaders: list[DataLoader],
    deliveries: list[Delivery],
    counts: pd.DataFrame,
    population: Counter[Hashable],
    randomness: RepeatedRandomness | None,
) -> tuple[Finding, ...]:
    """Judge what the ranks got; the most severe finding comes first."""
    found = [
        _duplicates(loaders, counts, population),
        _overlap(loaders, counts),
        _missing(loaders, counts, population),
        _same_order(loaders, deliveries),
        _random_numbers(randomness),
    ]
    known = [f for f in found if f is not None]
    known.sort(key=lambda f: -SEVERITIES.index(f.severity))
    return tuple(known)


def _first_epoch(counts: pd.DataFrame) -> pd.DataFrame:
    return counts[counts["epoch"] == counts["epoch"].min()]


def _duplicates(
    loaders: list[DataLoader], counts: pd.DataFrame, population: Counter[Hashable]
) -> Finding | None:
    """A rank gets samples more than once in an epoch."""
    rank = _first_epoch(counts).sort_values("repeated").iloc[-1]
    repeated, delivered = int(rank["repeated"]), int(rank["delivered"])
    if repeated == 0:
        return None
    loader = loaders[int(rank["rank"])]
    evidence = {
        "delivered": delivered,
        "unique": int(rank["unique"]),
        "repeated": repeated,
        "factor": delivered / max(1, int(rank["unique"])),
        "rank": int(rank["rank"]),
        "num_workers": loader.num_workers,
    }
    if isinstance(loader.dataset, IterableDataset):
        return finding(
            "duplicate-samples",
            f"{delivered} samples come in an epoch, though there are {int(rank['unique'])} "
            f"different ones: each of the {loader.num_workers} workers goes through all of them.",
            evidence,
            severity="critical",
            advice="Give each worker its share in __iter__: with info = get_worker_info(), yield "
            "every info.num_workers-th sample, beginning with number info.id.",
        )
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and repeated < sampler.num_replicas:
        return finding(
            "duplicate-samples",
            f"{repeated} sample(s) are repeated to give every rank the same number.",
            evidence,
            severity="info",
            advice="For exact evaluation use a sampler without padding.",
        )
    replaces = bool(getattr(sampler, "replacement", False))
    return finding(
        "duplicate-samples",
        f"{repeated} of {delivered} deliveries in an epoch repeat a sample.",
        evidence,
        severity="info" if replaces else "warning",
        advice="The sampler draws with replacement; that is fine if it is meant."
        if replaces
        else None,
    )


def _overlap(loaders: list[DataLoader], counts: pd.DataFrame) -> Finding | None:
    """Ranks get the same samples."""
    if len(loaders) < 2:
        return None
    rank = _first_epoch(counts).sort_values("shared").iloc[-1]
    shared, unique = int(rank["shared"]), int(rank["unique"])
    padding = sum(1 for loader in loaders if isinstance(loader.sampler, DistributedSampler))
    if shared == 0 or shared < padding:
        return None
    evidence = {
        "shared": shared,
        "unique": unique,
        "shared_share": shared / max(1, unique),
        "ranks": len(loaders),
        "threshold_share": NEARLY_ALL,
    }
    if shared >= NEARLY_ALL * unique and not isinstance(loaders[0].sampler, DistributedSampler):
        return finding(
            "missing-distributed-sampler",
            f"Every rank goes through the same samples ({shared} of {unique} are shared).",
            evidence,
            severity="critical",
            expected_gain=float(len(loaders)),
        )
    return finding(
        "sample-overlap",
        f"{shared} of the {unique} samples of rank {int(rank['rank'])} go to another rank too.",
        evidence,
        severity="critical",
    )


def _missing(
    loaders: list[DataLoader], counts: pd.DataFrame, population: Counter[Hashable]
) -> Finding | None:
    """No rank gets some of the samples."""
    first = _first_epoch(counts)
    missing = int(first["missing"].iloc[0])
    if missing == 0:
        return None
    total = sum(population.values())
    drops = any(_drops_last(loader) for loader in loaders)
    evidence: dict[str, Any] = {
        "missing": missing,
        "samples": total,
        "missing_share": missing / max(1, total),
        "batches": int(first["batches"].sum()),
        "drop_last": drops,
        "ranks": len(loaders),
    }
    if int(first["batches"].min()) == 0:
        return finding(
            "dropped-samples",
            f"A rank gets no batch at all: its samples do not fill one, and drop_last drops them "
            f"({missing} of {total} samples are lost).",
            evidence,
            severity="critical",
            advice="Use a smaller batch, fewer ranks or workers, or drop_last=False.",
        )
    size = max((loader.batch_size or 1) for loader in loaders)
    makers = sum(
        max(1, loader.num_workers) if isinstance(loader.dataset, IterableDataset) else 1
        for loader in loaders
    )
    expected = drops and missing < size * makers
    return finding(
        "dropped-samples",
        f"{missing} of {total} samples are in no batch of an epoch"
        + (" because drop_last drops what does not fill one." if expected else "."),
        evidence,
        severity="info" if expected and missing <= 0.1 * total else "warning",
        advice=None
        if expected
        else "Check that the data is not divided twice (by the data set and by the sampler), and "
        "that the sampler goes through all of it.",
    )


def _drops_last(loader: DataLoader) -> bool:
    return bool(loader.drop_last or getattr(loader.sampler, "drop_last", False))


def _same_order(loaders: list[DataLoader], deliveries: list[Delivery]) -> Finding | None:
    """A sampler that shuffles by epoch gives the same order again."""
    loader = loaders[0]
    by_epoch = [one.ids for one in deliveries if one.rank == 0]
    if len(by_epoch) < 2 or len(by_epoch[0]) < 2:
        return None
    owner = next(
        (
            o
            for o in (loader.sampler, loader.batch_sampler, loader.dataset)
            if hasattr(o, "set_epoch")
        ),
        None,
    )
    if owner is None or not getattr(owner, "shuffle", True):
        return None
    if isinstance(loader.dataset, IterableDataset) and owner is not loader.dataset:
        return None
    same = sum(1 for ids in by_epoch[1:] if ids == by_epoch[0])
    if same == 0:
        return None
    return finding(
        "epoch-not-set",
        f"All epochs deliver the samples in the same shuffled order: {type(owner).__name__} was not "
        "told the epoch.",
        {"epochs": len(by_epoch), "equal_epochs": same + 1, "samples": len(by_epoch[0])},
    )


def _random_numbers(randomness: RepeatedRandomness | None) -> Finding | None:
    """Random numbers repeat between workers or epochs."""
    if randomness is None:
        return None
    where = []
    if randomness.workers:
        where.append(f"workers {randomness.workers[0][0]} and {randomness.workers[0][1]}")
    if randomness.epochs:
        where.append("the first and the second epoch")
    return finding(
        "repeated-random-numbers",
        f"The random numbers in samples are the same in {' and in '.join(where)}.",
        {
            "equal_worker_pairs": len(randomness.workers),
            "equal_epochs": randomness.epochs,
            "draws": randomness.draws,
        },
    )
