"""Rules of the sample audit: from counts to findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from dataloading.codes import SEVERITIES, Finding, finding
from dataloading.deliveries import Played, sampler_of
from dataloading.length_rules import index_outside, wrong_length

if TYPE_CHECKING:
    import pandas as pd

    from dataloading.randomness import RepeatedRandomness

NEARLY_ALL = 0.9  # a rank that gets nine tenths of what another gets has no share of its own
SMALL_LOSS = 0.1  # of the samples: what drop_last may cost with many workers without a warning


def judge_samples(
    loaders: list[DataLoader],
    played: Played,
    counts: pd.DataFrame,
    randomness: RepeatedRandomness | None,
) -> tuple[Finding, ...]:
    """Judge what the ranks got; the most severe finding comes first."""
    population = int(played.expected.sum())
    padding = _padding(loaders, counts, population)
    found = [
        _duplicates(loaders, counts),
        padding or _overlap(loaders, counts),
        _missing(loaders, counts, population),
        wrong_length(loaders, played, counts),
        index_outside(loaders, played),
        _same_order(loaders[0], played),
        _random_numbers(randomness),
    ]
    known = [f for f in found if f is not None]
    known.sort(key=lambda f: -SEVERITIES.index(f.severity))
    return tuple(known)


def _worst(counts: pd.DataFrame, column: str) -> dict[str, Any]:
    """The row of the epoch and rank with most in a column."""
    rows: list[Any] = counts.to_dict(orient="records")
    return max(rows, key=lambda row: row[column])


def _on_purpose(loader: DataLoader) -> str | None:
    """Why a sampler repeats samples or leaves some out; None where it was not told to."""
    sampler = sampler_of(loader)
    if getattr(sampler, "replacement", False):
        return f"{type(sampler).__name__} draws with replacement"
    if isinstance(sampler, RandomSampler | WeightedRandomSampler):
        source = sampler.data_source if isinstance(sampler, RandomSampler) else sampler.weights
        if sampler.num_samples != len(source):
            return f"{type(sampler).__name__} was told to draw {sampler.num_samples}"
    return None


def _duplicates(loaders: list[DataLoader], counts: pd.DataFrame) -> Finding | None:
    """A rank gets samples more than once in an epoch."""
    row = _worst(counts, "repeated")
    delivered, repeated = row["delivered"], row["repeated"]
    if repeated == 0:
        return None
    loader = loaders[row["rank"]]
    factor = delivered / (delivered - repeated)
    evidence = {
        "delivered": delivered,
        "unique": row["unique"],
        "repeated": repeated,
        "factor": factor,
        "rank": row["rank"],
        "num_workers": loader.num_workers,
    }
    if isinstance(loader.dataset, IterableDataset):
        copies = loader.num_workers > 1 and factor > NEARLY_ALL * loader.num_workers
        return finding(
            "duplicate-samples",
            f"{delivered} samples come in an epoch, though there are {delivered - repeated}: "
            + (
                f"each of the {loader.num_workers} workers goes through all of them."
                if copies
                else f"the shares of the {loader.num_workers} worker(s) overlap."
            ),
            evidence,
            severity="critical",
            advice="Give each worker its share in __iter__: with info = get_worker_info(), yield "
            "every info.num_workers-th sample, beginning with number info.id.",
        )
    purpose = _on_purpose(loader)
    return finding(
        "duplicate-samples",
        f"{repeated} of {delivered} deliveries in an epoch repeat a sample"
        + (f": {purpose}." if purpose else "."),
        evidence | {"sampler": type(sampler_of(loader)).__name__},
        severity="info" if purpose else "warning",
        advice="This is fine if it is meant."
        if purpose
        else f"Mend {type(sampler_of(loader)).__name__}, unless it is meant to repeat samples.",
    )


def _padding(loaders: list[DataLoader], counts: pd.DataFrame, population: int) -> Finding | None:
    """Samples are repeated just so that every rank gets the same number."""
    if len(loaders) < 2 or any(isinstance(one.dataset, IterableDataset) for one in loaders):
        return None
    plain = all(type(loader.batch_sampler) in (BatchSampler, type(None)) for loader in loaders)
    unit = 1 if plain else counts["delivered"].max() / max(1, counts["batches"].max())
    extra = 0
    for _, epoch in counts.groupby("epoch"):
        extra = int(epoch["delivered"].sum()) - population
        even = epoch["delivered"].nunique() == 1 and (epoch["missing"] == 0).all()
        if not even or not 0 < extra < len(loaders) * unit:
            return None
    return finding(
        "duplicate-samples",
        f"{extra} sample(s) come twice in an epoch, to give each of the {len(loaders)} ranks the "
        "same number.",
        {"repeated": extra, "samples": population, "ranks": len(loaders)},
        severity="info",
        advice="For exact evaluation use a sampler without padding.",
    )


def _overlap(loaders: list[DataLoader], counts: pd.DataFrame) -> Finding | None:
    """Ranks get the same samples."""
    row = _worst(counts, "shared")
    shared, unique, sampler = row["shared"], row["unique"], sampler_of(loaders[row["rank"]])
    if shared == 0:
        return None
    evidence = {
        "shared": shared,
        "unique": unique,
        "shared_share": shared / unique,
        "epoch": row["epoch"],
        "ranks": len(loaders),
        "threshold_share": NEARLY_ALL,
    }
    shares_out = hasattr(sampler, "num_replicas")
    if shared >= NEARLY_ALL * unique and not shares_out:
        return finding(
            "missing-distributed-sampler",
            f"Every rank goes through the same samples ({shared} of {unique} are shared).",
            evidence,
            severity="critical",
            expected_gain=float(len(loaders)),
        )
    message = f"{shared} of the {unique} samples of rank {row['rank']} go to another rank too."
    if purpose := _on_purpose(loaders[row["rank"]]):
        return finding(
            "sample-overlap",
            f"{message[:-1]}: {purpose}, on each rank by itself.",
            evidence,
            advice="This is fine if it is meant. For ranks that share nothing, draw with one seed on "
            "all of them and give each rank its part of the draws.",
        )
    return finding(
        "sample-overlap",
        message,
        evidence,
        severity="critical",
        advice="Give each rank's sampler its own rank= and the number of ranks, the same seed, and "
        "the same epoch."
        if shares_out
        else None,
    )


def _missing(loaders: list[DataLoader], counts: pd.DataFrame, population: int) -> Finding | None:
    """No rank gets some of the samples."""
    if counts["missing"].isna().any() or not counts["missing"].any():
        return None
    worst = counts[counts["epoch"] == _worst(counts, "missing")["epoch"]]
    missing = int(worst["missing"].iloc[0])
    drops = any(map(_drops_last, loaders))
    evidence: dict[str, Any] = {
        "missing": missing,
        "samples": population,
        "missing_share": missing / population,
        "batches": int(worst["batches"].sum()),
        "drop_last": drops,
        "ranks": len(loaders),
    }
    if drops and worst["batches"].min() == 0:
        return finding(
            "dropped-samples",
            f"A rank gets no batch at all: its samples do not fill one, and drop_last drops them "
            f"({missing} of {population} samples are lost).",
            evidence,
            severity="critical",
            advice="Use a smaller batch, fewer ranks or workers, or drop_last=False.",
        )
    if purposes := list(filter(None, map(_on_purpose, loaders))):
        return finding(
            "dropped-samples",
            f"{missing} of {population} samples are in no batch of an epoch: {purposes[0]}.",
            evidence,
            severity="info",
            advice="This is fine if it is meant.",
        )
    sizes = [getattr(loader.batch_sampler, "batch_size", None) or 1 for loader in loaders]
    makers = [
        loader.num_workers if isinstance(loader.dataset, IterableDataset) else 1
        for loader in loaders
    ]
    most = sum(size * max(1, own) for size, own in zip(sizes, makers, strict=True))
    if drops and missing < most:
        small = max(makers) <= 1 or missing <= SMALL_LOSS * population
        return finding(
            "dropped-samples",
            f"{missing} of {population} samples are in no batch of an epoch because drop_last drops "
            "what does not fill one.",
            evidence,
            severity="info" if small else "warning",
        )
    return finding(
        "dropped-samples",
        f"{missing} of {population} samples are in no batch of an epoch.",
        evidence,
        advice="Check that the data is not divided twice (by the data set and by the sampler), and "
        "that the sampler goes through all of it.",
    )


def _drops_last(loader: DataLoader) -> bool:
    owners = (loader, loader.batch_sampler, sampler_of(loader))
    return any(getattr(owner, "drop_last", False) for owner in owners)


def _same_order(loader: DataLoader, played: Played) -> Finding | None:
    """What shuffles by epoch gives the same order again."""
    if played.untold is None:
        return None
    epochs = [one for one in played.deliveries if one.rank == 0]
    return finding(
        "epoch-not-set",
        f"All epochs deliver the samples in the same shuffled order: {played.untold} was not told "
        "the epoch.",
        {"epochs": len(epochs), "equal_epochs": len(epochs), "samples": len(epochs[0].samples)},
        advice="Call the data set's set_epoch before each epoch; workers that stay have a copy that "
        "does not hear of it, so use persistent_workers=False."
        if loader.persistent_workers and isinstance(loader.dataset, IterableDataset)
        else None,
    )


def _random_numbers(randomness: RepeatedRandomness | None) -> Finding | None:
    """Random numbers repeat between workers, epochs or ranks."""
    if randomness is None:
        return None
    where = []
    if randomness.workers:
        where.append(f"workers {randomness.workers[0][0]} and {randomness.workers[0][1]}")
    if randomness.epochs:
        where.append("the first and the second epoch")
    if randomness.ranks:
        where.append("ranks 0 and 1")
    within_rank = bool(randomness.workers or randomness.epochs)
    return finding(
        "repeated-random-numbers",
        f"The random numbers in samples are the same in {' and in '.join(where)}.",
        {
            "equal_worker_pairs": len(randomness.workers),
            "equal_epochs": randomness.epochs,
            "equal_ranks": randomness.ranks,
            "draws": randomness.draws,
        },
        severity="warning" if within_rank else "info",
        advice=None if within_rank else "Add the rank to the seed of each rank.",
    )
