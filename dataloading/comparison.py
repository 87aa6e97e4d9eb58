"""Before and after, fairly: interleaved blocks, paired ratios, and an interval."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dataloading.arguments import check_device, check_seconds
from dataloading.borrowing import borrowed
from dataloading.interleaving import (
    LATEST,
    ORDER,
    SIDES,
    WARM_SHARE,
    Blocks,
    LoaderBlocks,
    block_seconds,
    interleave,
    warm_up,
)
from dataloading.paired_ratios import CONFIDENCE, FEWEST_PAIRS, bootstrap_interval, log_ratios
from dataloading.progress import time_bar
from dataloading.results import Result, format_count, format_ratio, format_share
from dataloading.same_samples import same_samples
from dataloading.storage_reads import cache_notes, total, unlike_caches
from dataloading.timing import LEAST_LIMIT_S, TrainStep, length_of
from dataloading.train_steps import state_kept
from dataloading.training_functions import FunctionBlocks, check_sides, samples_notes
from dataloading.watchdog import random_state_kept, time_limit

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ORDER", "Comparison", "compare_dataloaders", "judge_pairs", "same_samples"]

START_LIMIT_S = 60.0  # spawned workers import torch; that is not taken from the budget
SMALLEST_GAIN = 0.005  # two builds of one loader can differ by so much: where their memory lies
COLUMNS = (
    *("before_samples_per_s", "after_samples_per_s", "ratio", "before_steps", "after_steps"),
    *("before_step_s", "after_step_s", "before_storage_share", "after_storage_share", "four"),
)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Result):
    """How much faster one loader is than another.

    Attributes:
        ratio: Rate after over rate before (samples/s); above 1, after is faster. None where the
            two could not be compared.
        interval: 95 % bootstrap interval of the ratio, early ends accounted for; None likewise, and
            with fewer than six pairs, which give none worth the name.
        verdict: `faster`, `slower`, `no difference shown`, or `not comparable`. A difference below
            0.5 % is never called one.
        pairs: DataFrame with a row per pair of neighbouring blocks: `before_samples_per_s`,
            `after_samples_per_s` (NaN where training functions count no samples), `ratio`,
            `before_steps`, `after_steps` (batches, or calls of a function), `before_step_s`,
            `after_step_s`, `before_storage_share`, `after_storage_share` (of the bytes read, that
            came from storage and not from the page cache; NaN where not known or hardly any were
            read), and `four`, the number of the four blocks that the pair belongs to.
        same_samples: Whether both deliver the same samples: True, False, or None if unknown.
        notes: What the reader should know.
    """

    ratio: float | None
    interval: tuple[float, float] | None
    verdict: str
    pairs: pd.DataFrame
    same_samples: bool | None
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Ratio, interval and verdict."""
        if self.ratio is None:
            return f"{self.verdict} ({'; '.join(self.notes)})"
        return (
            f"after runs at {format_ratio(self.ratio)}x the rate of before "
            f"({self.interval_text()}): {self.verdict}"
        )

    def interval_text(self) -> str:
        """The interval and the number of pairs behind it, in words."""
        if self.interval is None:
            return f"no interval: {len(self.pairs)} of the {FEWEST_PAIRS} pairs it takes"
        low, high = map(format_ratio, self.interval)
        return f"95 % interval {low} to {high}, {len(self.pairs)} pairs"

    def plot(self, ax: Any = None) -> Any:
        """Draw the pairs and the interval; returns the Axes."""
        from dataloading.plots import plot_comparison

        return plot_comparison(self, ax=ax)


def compare_dataloaders(
    before: Any,
    after: Any,
    train_step: TrainStep | None = None,
    *,
    seconds: float = 60.0,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare two loaders, or two training functions, in interleaved blocks, with a 95 % interval.

    Loaders keep their workers while the other one runs; the first batches of a block, which come
    from a queue that filled in the meantime, are left out. Epoch ends that fall into a block count.
    Of training functions the first call is left out; after it a block is one call, or several short
    ones.

    Files are read by both before anything is compared, until they come from the page cache, for at
    most a third of the time. Where one side still reads from storage and the other does not, the
    two are not comparable.

    Args:
        before, after: `DataLoader`s, or anything that yields batches. Or two functions without
            arguments that train, for an epoch, say: they return the number of samples that they
            trained on, or None; with None seconds a call are compared.
        train_step: Called with each batch; None compares the loaders alone. None for functions.
        seconds: Time budget, counted from the first batches on; ends earlier when the interval is
            narrow enough, and up to half of it later to get the fewest pairs that prove anything.
        device: Move each batch there first. None for functions.
        progress: Show a progress bar.

    Returns:
        A `Comparison`.

    Raises:
        TypeError: A loader and a function, or neither; a function that needs arguments.
        ValueError: A bad argument, or a loader that delivers no batch.
        ProbeTimeout: A batch, step or call took far longer than the budget.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> before, after = DataLoader(range(100)), DataLoader(range(100), batch_size=10)
        >>> compare_dataloaders(before, after, seconds=4).verdict  # doctest: +SKIP
        'faster'

    Explained in: notebook 09
    """
    check_seconds(seconds)
    functions = check_sides(before, after, train_step, device)
    if not functions:
        _check_batches(before, after)
    same = None if functions else same_samples(before, after)
    if same is False:
        return _not_comparable("the two loaders do not deliver the same samples", same)
    doing = ["Starting"]
    with (
        random_state_kept(),
        state_kept(train_step),
        time_bar(seconds, "Comparing before and after", progress) as bar,
        contextlib.ExitStack() as opened,
    ):
        sides: dict[str, Blocks] = {}
        for name, one in zip(SIDES, (before, after), strict=True):
            if functions:
                sides[name] = FunctionBlocks(one, name, bar, doing)
            else:
                lent = opened.enter_context(borrowed(one))
                blocks = LoaderBlocks(lent, name, train_step, check_device(device), bar, doing)
                sides[name] = opened.enter_context(blocks)
        warm_s = WARM_SHARE * seconds
        with time_limit(max(seconds, START_LIMIT_S) + warm_s, lambda: doing[0]):
            warmed, spent_s = warm_up(sides, warm_s, block_seconds(seconds))
        left_s = max(seconds / 2, seconds - spent_s)
        counted = all(block.samples is not None for own in warmed.values() for block in own)
        with time_limit(LATEST * left_s + LEAST_LIMIT_S, lambda: doing[0]):
            seen = interleave(sides, left_s, counted=counted)
    table = _table(seen.rows)
    if reason := unlike_caches(*(total(seen.reads[side]) for side in SIDES)):
        return _not_comparable(reason, same, table)
    for side in SIDES:
        first = [block.reads for block in warmed[side]]
        seen.notes += cache_notes(side, first, seen.reads[side])
    if functions:
        seen.notes += samples_notes({side: own[-1] for side, own in warmed.items()}, counted)
    return judge_pairs(table, same, seen.notes, confidence=seen.confidence)


def _check_batches(*loaders: Any) -> None:
    for name, loader in zip(SIDES, loaders, strict=True):
        if length_of(loader) == 0:
            raise ValueError(
                f"{name!r} delivers no batch: its data set is empty, or smaller than a batch with "
                "drop_last=True."
            )


def _not_comparable(
    reason: str, same: bool | None, pairs: pd.DataFrame | None = None
) -> Comparison:
    pairs = _table([]) if pairs is None else pairs
    return Comparison(None, None, "not comparable", pairs, same, (reason,))


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(COLUMNS))


def judge_pairs(
    pairs: pd.DataFrame,
    same: bool | None = True,
    notes: Iterable[str] = (),
    *,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Turn paired rates into a ratio, an interval and a verdict.

    Args:
        pairs: DataFrame with a column `ratio`, a row per pair of neighbouring blocks; with a column
            `four`, pairs of one number count as one measurement.
        same: Whether both loaders deliver the same samples.
        notes: Passed on.
        confidence: Of the interval; above 0.95 where earlier looks have used up some of it.

    Returns:
        A `Comparison`. Fewer than six pairs give no interval, and the verdict
        `no difference shown`.

    Raises:
        ValueError: No pair, or a ratio that is not a positive number.
    """
    logs = log_ratios(pairs)
    ratio = float(np.exp(logs.mean()))
    if len(pairs) < FEWEST_PAIRS:
        note = (
            f"{format_count(len(pairs), 'pair')} fit into the time, {FEWEST_PAIRS} are needed; "
            "allow more seconds"
        )
        return Comparison(ratio, None, "no difference shown", pairs, same, (*notes, note))
    low, high = map(float, np.exp(bootstrap_interval(logs, confidence)))
    verdict = "no difference shown"
    if low > 1 or high < 1:
        if abs(float(logs.mean())) < np.log1p(SMALLEST_GAIN):
            small = format_share(abs(ratio - 1), 1)
            less = format_share(SMALLEST_GAIN, 1)
            note = (
                f"the {small} are more than noise, but less than {less} is not called a difference"
            )
            notes = (*notes, note)
        else:
            verdict = "faster" if low > 1 else "slower"
    return Comparison(ratio, (low, high), verdict, pairs, same, tuple(notes))
