"""How the time of an epoch grows with the number of samples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from dataloading.arguments import check_int, check_loader, check_seconds, check_train_step
from dataloading.borrowing import borrowed
from dataloading.codes import Finding, finding
from dataloading.progress import time_bar
from dataloading.results import Result
from dataloading.settings import rebuild_dataloader
from dataloading.timing import TrainStep
from dataloading.train_steps import state_kept
from dataloading.watchdog import (
    ProbeTimeout,
    close_iterator,
    loader_warnings_hidden,
    open_iterator,
    time_limit,
)

FEWEST_SIZES = 5  # fewer points give no interval for a slope
SUPERLINEAR = 1.1  # an exponent is called superlinear when its whole interval lies above this
MUCH = 2.0  # times the cost of a sample, from the smallest to the largest set; n log n stays below
CONFIDENCE = 0.95
FEWEST_BATCHES = 10  # per worker: with fewer, starting and ending them would be what is timed
MOST_ROUNDS = 5  # the sizes are gone through so often at most, up and down in turn
OVERRUN_S = 10.0  # a single epoch may run past the budget by this much before it is stopped


@dataclass(frozen=True, repr=False, eq=False)
class ScalingFit(Result):
    """Exponent of epoch time against data-set size.

    Attributes:
        exponent: b in seconds = a x size^b: 1 means that a sample costs the same in a large set.
        interval: 95 % interval `(low, high)` of the exponent; infinite with fewer than three sizes.
        sizes: Array of the sizes.
        seconds_per_epoch: Array of the median seconds of an epoch, start-up left out.
        findings: `superlinear-dataset` where the interval lies above 1.1.
        notes: What the reader should know.
    """

    exponent: float
    interval: tuple[float, float]
    sizes: np.ndarray
    seconds_per_epoch: np.ndarray
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The exponent with its interval, in words."""
        low, high = self.interval
        words = "grows faster than the data" if self.findings else "no growth beyond the data shown"
        known = f"95 % interval {low:.2f} to {high:.2f}, {len(self.sizes)} sizes"
        if not np.isfinite(low):
            known = f"no interval from {len(self.sizes)} sizes"
        return f"epoch time ~ size^{self.exponent:.2f} ({known}): {words}"

    def plot(self, ax: Any = None) -> Any:
        """Draw epoch time against size; returns the Axes."""
        from dataloading.plots import plot_scaling

        return plot_scaling(self, ax=ax)


def measure_scaling(
    make_dataloader: Callable[[int], Iterable[Any]],
    sizes: Sequence[int],
    *,
    train_step: TrainStep | None = None,
    seconds: float = 20.0,
    progress: bool = True,
) -> ScalingFit:
    """Measure how the time of an epoch grows with the number of samples.

    Args:
        make_dataloader: `make_dataloader(size)` gives a loader over that many samples.
        sizes: Data-set sizes, best five or more, each about twice the one before.
        train_step: Called with each batch; None measures loading alone.
        seconds: Time budget. Every size is measured at least once.
        progress: Show a progress bar.

    Returns:
        A `ScalingFit`.

    Raises:
        TypeError: `make_dataloader` is no function or gives no loader, or a size is no whole number.
        ValueError: Fewer than two sizes, or one that is not positive, or an empty loader.
        ProbeTimeout: The sizes could not be gone through once.

    Example:
        >>> fit = measure_scaling(lambda n: [[0] * 10] * (n // 10), [100, 200, 400], seconds=0.2, progress=False)
        >>> fit.sizes.tolist()
        [100, 200, 400]

    Explained in: notebook 02
    """
    if not callable(make_dataloader):
        raise TypeError(
            f"Expected a function make_dataloader(size), got {type(make_dataloader).__name__}: "
            "one loader has one size."
        )
    check_seconds(seconds)
    check_train_step(train_step)
    wanted = _checked_sizes(sizes)
    times: dict[int, list[float]] = {size: [] for size in wanted}
    notes = []
    begun = time.perf_counter()
    doing = "Starting"
    with (
        loader_warnings_hidden(),
        state_kept(train_step),
        time_bar(seconds, "Measuring growth", progress) as bar,
    ):
        try:
            with time_limit(seconds + OVERRUN_S, lambda: doing):
                here = _too_short_for_workers(_made(make_dataloader, wanted[0]))
                for number in range(MOST_ROUNDS):
                    for size in wanted if number % 2 == 0 else reversed(wanted):
                        doing = f"An epoch of {size} samples"
                        loader = _made(make_dataloader, size)
                        times[size].append(_epoch_s(loader, train_step, here))
                        bar.update()
                    spent = time.perf_counter() - begun
                    if spent * (number + 2) / (number + 1) > seconds:
                        break
        except ProbeTimeout as error:
            if not all(times.values()):
                raise
            notes.append(str(error))
    if here:
        notes.append("Measured without workers: the smallest set has too few batches to time them")
    medians = np.array([float(np.median(times[size])) for size in wanted])
    return fit_growth(np.array(wanted), medians, notes)


def _made(make_dataloader: Callable[[int], Iterable[Any]], size: int) -> Iterable[Any]:
    loader = make_dataloader(size)
    check_loader(loader, f"what make_dataloader({size}) returns")
    return loader


def _checked_sizes(sizes: Any) -> list[int]:
    """The sizes, each once, in ascending order."""
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(f"Expected sizes to be a list of whole numbers, got {sizes!r}.")
    given = [size.item() if isinstance(size, np.generic) else size for size in sizes]
    for size in given:
        check_int("a size", size, least=1)
    if len(set(given)) < 2:
        raise ValueError(f"sizes={given} must hold at least two different sizes.")
    return sorted(set(given))


def _too_short_for_workers(dataloader: Any) -> bool:
    """Whether start and end of the workers would be most of an epoch of the smallest set."""
    workers = getattr(dataloader, "num_workers", 0)
    if not isinstance(dataloader, DataLoader) or workers == 0:
        return False
    try:
        return len(dataloader) < FEWEST_BATCHES * workers
    except TypeError:  # an iterable data set without a length
        return False


def _epoch_s(dataloader: Iterable[Any], train_step: TrainStep | None, here: bool) -> float:
    """Seconds from the first to the last batch of an epoch, stretched to all batches.

    The workers begin together: when the first batch comes, each is done with about one.
    """
    with borrowed(dataloader) as lent:
        loader, workers = lent.loader, lent.settings.num_workers if lent.settings else 0
        if here and lent.settings is not None:
            with contextlib.suppress(TypeError):  # it cannot be built again: keep its workers
                loader = rebuild_dataloader(loader, lent.settings.changed(num_workers=0))
                workers = 0
        batches = 0
        started = ended = time.perf_counter()
        iterator = open_iterator(loader)
        try:
            for batch in iterator:
                if batches == 0 and workers:
                    started = time.perf_counter()  # workers are up
                if train_step is not None:
                    train_step(batch)
                batches += 1
                ended = time.perf_counter()  # before the workers are shut down
        finally:
            if iterator is not getattr(loader, "_iterator", None):
                close_iterator(iterator)
    if batches == 0:
        raise ValueError("make_dataloader gave a loader that delivers no batch.")
    return (ended - started) * batches / (batches - workers if batches > workers else batches)


def fit_growth(
    sizes: np.ndarray, seconds_per_epoch: np.ndarray, notes: Sequence[str] = ()
) -> ScalingFit:
    """Fit a power law through sizes and times.

    Args:
        sizes: Shape (sizes,), ascending.
        seconds_per_epoch: Shape (sizes,).
        notes: Passed on.

    Returns:
        A `ScalingFit`; a straight line through the logarithms, with Student's interval of its slope.

    Example:
        >>> sizes = np.array([100, 200, 400, 800, 1600])
        >>> fit_growth(sizes, 1e-6 * sizes**2.0).findings[0].code
        'superlinear-dataset'
    """
    from scipy import stats

    notes = list(notes)
    line = stats.linregress(np.log(sizes), np.log(np.maximum(seconds_per_epoch, 1e-9)))
    exponent = float(line.slope)
    interval = (-float("inf"), float("inf"))
    if len(sizes) > 2:
        error = np.nan_to_num(line.stderr)  # times that are all equal give NaN
        margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2) * error)
        interval = (exponent - margin, exponent + margin)
    found: tuple[Finding, ...] = ()
    if len(sizes) < FEWEST_SIZES:
        notes.append(f"{len(sizes)} sizes prove no growth; {FEWEST_SIZES} are needed")
    elif interval[0] > SUPERLINEAR:
        factor = (seconds_per_epoch[-1] / sizes[-1]) / (seconds_per_epoch[0] / sizes[0])
        found = (
            finding(
                "superlinear-dataset",
                f"Epoch time grows with size^{exponent:.2f}: a sample of the largest set costs "
                f"{factor:.1f} times one of the smallest.",
                {
                    "exponent": exponent,
                    "interval_low": interval[0],
                    "interval_high": interval[1],
                    "threshold": SUPERLINEAR,
                    "sizes": len(sizes),
                    "cost_factor": float(factor),
                },
                severity="critical" if factor >= MUCH else "warning",
                expected_gain=float(factor),
            ),
        )
    return ScalingFit(exponent, interval, sizes, seconds_per_epoch, found, tuple(notes))
