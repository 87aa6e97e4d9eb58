"""Before and after, fairly: interleaved blocks, paired ratios, and an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from dataloading.arguments import check_device, check_loader, check_seconds, check_train_step
from dataloading.batches import count_samples, move_to
from dataloading.borrowing import Borrowed, borrowed
from dataloading.progress import TimeBar, time_bar
from dataloading.results import Result, format_count, format_ratio
from dataloading.sharding import gives_shares
from dataloading.timing import LEAST_LIMIT_S, TrainStep, length_of
from dataloading.train_steps import state_kept
from dataloading.watchdog import ProbeTimeout, close_iterator, time_limit

if TYPE_CHECKING:
    import pandas as pd

FEWEST_PAIRS = 6  # fewer pairs give no interval worth the name
WANTED_PAIRS = 10  # the budget is cut into this many pairs when steps are short enough
BLOCKS_SHARE = 0.7  # of the time; the rest goes to emptying queues
LATEST = 1.5  # times the budget: so long it may take to get the fewest pairs
START_LIMIT_S = 60.0  # spawned workers import torch; that is not taken from the budget
WARM_UP_STEPS = 2  # trained after the queue is empty, before a block is timed
FEWEST_BLOCK_STEPS = 3  # a block of fewer steps is mostly its edges
PRECISE_ENOUGH = 0.01  # stop when the interval's half-width (log ratio) is below 1 %
CONFIDENCE = 0.95
RESAMPLES = 4000
ORDER = ("before", "after", "after", "before")  # ABBA: slow drift hits both alike


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Result):
    """How much faster one loader is than another.

    Attributes:
        ratio: Rate after over rate before (samples/s); above 1, after is faster. None where the
            two could not be compared.
        interval: 95 % bootstrap interval of the ratio; None likewise, and with fewer than six
            pairs, which give none worth the name.
        verdict: `faster`, `slower`, `no difference shown`, or `not comparable`.
        pairs: DataFrame with a row per pair of blocks: `before_samples_per_s`,
            `after_samples_per_s`, `ratio`, `before_steps`, `after_steps`.
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
    before: Iterable[Any],
    after: Iterable[Any],
    train_step: TrainStep | None = None,
    *,
    seconds: float = 60.0,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare two loaders in interleaved blocks of steps, with a 95 % interval.

    Both keep their workers while the other one runs; the first batches of a block, which come from
    a queue that filled in the meantime, are left out. Epoch ends that fall into a block count.

    Args:
        before, after: `DataLoader`s, or anything that yields batches.
        train_step: Called with each batch; None compares the loaders alone.
        seconds: Time budget, counted from the first batches on; ends earlier when the interval is
            narrow enough, and up to half of it later to get the fewest pairs that prove anything.
        device: Move each batch there first.
        progress: Show a progress bar.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: A bad argument, or a loader that delivers no batch.
        ProbeTimeout: A batch or step took far longer than the budget.

    Explained in: notebook 09
    """
    check_seconds(seconds)
    check_loader(before, "before")
    check_loader(after, "after")
    check_train_step(train_step)
    on_device = check_device(device)
    same = same_samples(before, after)
    if same is False:
        note = "the two loaders do not deliver the same samples"
        return Comparison(None, None, "not comparable", _table([]), same, (note,))
    doing = ["Starting"]
    with (
        borrowed(before) as first,
        borrowed(after) as second,
        state_kept(train_step),
        time_bar(seconds, "Comparing before and after", progress) as bar,
        Stream(first, "before", train_step, on_device, bar, doing) as before_stream,
        Stream(second, "after", train_step, on_device, bar, doing) as after_stream,
    ):
        streams = {"before": before_stream, "after": after_stream}
        with time_limit(max(seconds, START_LIMIT_S), lambda: doing[0]):
            for stream in streams.values():  # start-up, first batches, lazy imports: not compared
                stream.block(0.0)
        with time_limit(LATEST * seconds + LEAST_LIMIT_S, lambda: doing[0]):
            rows, notes = _interleave(streams, seconds)
    return judge_pairs(_table(rows), same, notes)


class Stream:
    """An endless run over the epochs of one loader, taken block by block."""

    def __init__(
        self,
        lent: Borrowed,
        name: str,
        train_step: TrainStep | None,
        device: torch.device | None,
        bar: TimeBar,
        doing: list[str],
    ) -> None:
        self.loader = lent.loader
        self.name = name
        self.train_step = train_step
        self.device = device
        self.bar = bar
        self.doing = doing
        self.iterator: Any = None
        self.queued = lent.queued_batches
        self.batched = lent.batched

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        if self.iterator is not getattr(self.loader, "_iterator", None):
            close_iterator(self.iterator)

    def step(self, *, train: bool = True) -> int:
        """Load one batch and train on it; returns its samples."""
        self.doing[0] = f"Waiting for a batch of the loader {self.name!r}"
        if self.iterator is None:
            self.iterator = iter(self.loader)
        batch = next(self.iterator, _END)
        if batch is _END:  # an epoch ends; the restart belongs to the run
            self.iterator = iter(self.loader)
            batch = next(self.iterator, _END)
            if batch is _END:
                raise ValueError(
                    f"The loader {self.name!r} delivers no (further) batch; expected a loader that "
                    "can be iterated again and again."
                )
        if self.device is not None:
            batch = move_to(batch, self.device)
        if train and self.train_step is not None:
            self.doing[0] = f"Training on a batch of the loader {self.name!r}"
            self.train_step(batch)
        self.bar.update()
        return count_samples(batch, batched=self.batched)

    def block(self, seconds: float) -> tuple[int, float, int]:
        """Run one block; returns samples, seconds and steps, without the warm-up.

        The queue filled while the other loader ran. It is emptied first, without training, since
        training would let it fill again.
        """
        for _ in range(self.queued):
            self.step(train=False)
        for _ in range(WARM_UP_STEPS):
            self.step()
        _synchronize()
        started = time.perf_counter()
        samples = steps = 0
        while steps < FEWEST_BLOCK_STEPS or time.perf_counter() - started < seconds:
            samples += self.step()
            steps += 1
        _synchronize()
        return samples, time.perf_counter() - started, steps


_END = object()


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _interleave(
    streams: dict[str, Stream], seconds: float
) -> tuple[list[dict[str, float]], list[str]]:
    """Run ABBA blocks until the time is over or the interval is narrow enough."""
    begun = time.perf_counter()
    rows: list[dict[str, float]] = []
    notes: list[str] = []
    block_s = BLOCKS_SHARE * seconds / (2 * WANTED_PAIRS)
    half: dict[str, tuple[float, int]] = {}
    longest = 0.0
    try:
        for turn in _endless(ORDER):
            now = time.perf_counter()
            spent = now - begun + longest
            enough = len(rows) >= FEWEST_PAIRS
            if rows and spent > (seconds if enough else LATEST * seconds):
                break
            samples, elapsed, steps = streams[turn].block(block_s)
            longest = max(longest, time.perf_counter() - now)
            half[turn] = (samples / elapsed, steps)
            if len(half) == 2:
                rows.append(_pair(half))
                half = {}
                if len(rows) >= WANTED_PAIRS and _half_width(rows) < PRECISE_ENOUGH:
                    break
    except ProbeTimeout as error:
        if not rows:
            raise
        notes.append(str(error))
    return rows, notes


def _endless(order: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from order


def _pair(half: dict[str, tuple[float, int]]) -> dict[str, float]:
    (before, before_steps), (after, after_steps) = half["before"], half["after"]
    return {
        "before_samples_per_s": before,
        "after_samples_per_s": after,
        "ratio": after / before,
        "before_steps": before_steps,
        "after_steps": after_steps,
    }


def _table(rows: list[dict[str, float]]) -> pd.DataFrame:
    import pandas as pd

    columns = [
        "before_samples_per_s",
        "after_samples_per_s",
        "ratio",
        "before_steps",
        "after_steps",
    ]
    return pd.DataFrame(rows, columns=columns)


def _half_width(rows: list[dict[str, float]]) -> float:
    """Quick half-width of the interval of the mean log ratio, for stopping early."""
    logs = np.log([row["ratio"] for row in rows])
    return float(2 * logs.std(ddof=1) / math.sqrt(len(logs)))


def judge_pairs(
    pairs: pd.DataFrame, same: bool | None = True, notes: Iterable[str] = ()
) -> Comparison:
    """Turn paired rates into a ratio, an interval and a verdict.

    Args:
        pairs: DataFrame with a column `ratio`, a row per pair of neighbouring blocks.
        same: Whether both loaders deliver the same samples.
        notes: Passed on.

    Returns:
        A `Comparison`. Fewer than six pairs give no interval, and the verdict
        `no difference shown`.

    Raises:
        ValueError: No pair, or a ratio that is not a positive number.
    """
    ratios = pairs["ratio"].to_numpy(dtype=float)
    if len(ratios) == 0 or not (np.isfinite(ratios).all() and (ratios > 0).all()):
        raise ValueError(
            f"pairs must hold at least one ratio, all positive numbers, got {ratios.tolist()}."
        )
    logs = np.log(ratios)
    ratio = float(np.exp(logs.mean()))
    if len(logs) < FEWEST_PAIRS:
        note = (
            f"{format_count(len(logs), 'pair')} fit into the time, {FEWEST_PAIRS} are needed; "
            "allow more seconds"
        )
        return Comparison(ratio, None, "no difference shown", pairs, same, (*notes, note))
    low, high = map(float, np.exp(bootstrap_interval(logs)))
    verdict = "no difference shown"
    if low > 1:
        verdict = "faster"
    elif high < 1:
        verdict = "slower"
    return Comparison(ratio, (low, high), verdict, pairs, same, tuple(notes))


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean: the wider of the bootstrap (BCa) and Student's t.

    With about ten pairs the bootstrap alone is too narrow and calls equal loaders different too
    often; Student's interval is wider there.

    Args:
        values: Paired log ratios, shape (pairs,).

    Returns:
        `(low, high)`.

    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 14.
    """
    from scipy import stats

    mean = float(values.mean())
    if len(values) < 2 or float(values.std()) == 0.0:
        return mean, mean
    result = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa",
        random_state=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values)
    return min(float(low), mean - margin), max(float(high), mean + margin)


def same_samples(before: Any, after: Any) -> bool | None:
    """Whether two loaders deliver the same samples, as far as it shows without running them.

    Returns:
        True for the same dataset sampled completely by both, False when their lengths differ, None
        when it cannot be known.
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
    return None


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
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SequentialSampler):
        return True
    return isinstance(sampler, torch.utils.data.RandomSampler) and not sampler.replacement
