"""Rules of the sample audit about lengths: indices beyond the data set, and a wrong `len(dataloader)`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, IterableDataset

from dataloading.codes import Finding, finding
from dataloading.deliveries import Played, sampler_of
from dataloading.timing import length_of

if TYPE_CHECKING:
    import pandas as pd


def index_outside(loaders: list[DataLoader], played: Played) -> Finding | None:
    """The sampler draws an index that the data set has no sample for."""
    if played.outside is None:
        return None
    index, size = played.outside
    name = type(sampler_of(loaders[0])).__name__
    return finding(
        "worker-error",
        f"The sampler ({name}) gives index {index}, and the data set has {size} samples: loading "
        "it will raise an error, or deliver something else.",
        {"index": index, "samples": size, "sampler": name},
        severity="critical",
        advice="Make the sampler with the length of this data set, after it was cut or changed.",
    )


def wrong_length(loaders: list[DataLoader], played: Played, counts: pd.DataFrame) -> Finding | None:
    """`len(dataloader)` is not how many batches come, in no epoch of a rank.

    An epoch that was cut shows nothing, nor does one in which workers repeat samples, which has its
    own finding. A loader that iterates in its own way may deliver other batches than were played.

    Args:
        loaders: One per rank.
        played: All epochs.
        counts: The table described in `SampleAudit.counts`.
    """
    stream = isinstance(loaders[0].dataset, IterableDataset)
    if not played.whole if stream else any("does not end" in note for note in played.notes):
        return None
    for rank, loader in enumerate(loaders):
        length = length_of(copy.copy(loader))  # torch keeps what a stream said, to warn later
        if length is None or type(loader).__iter__ is not DataLoader.__iter__:
            continue
        rows = counts[counts["rank"] == rank]
        fits = rows["batches"] == length
        if stream:  # workers batch their own shares, which len() knows nothing of
            size = loader.batch_size or 1
            most = rows["delivered"] + rows["missing"]  # with what drop_last dropped
            fits |= (rows["delivered"] // size <= length) & (length <= -(-most // size))
            fits |= rows["repeated"] > 0
        if not fits.any():
            batches = int(rows["batches"].iloc[0])
            return finding(
                "dropped-samples",
                f"len(dataloader) says {length} batches an epoch, and {batches} come.",
                {"length": length, "batches": batches, "rank": rank},
                advice="Mend __len__ of the sampler, the batch sampler or the iterable data set: "
                "loops over range(len(dataloader)), learning-rate schedules and progress bars go "
                "by it.",
            )
    return None
