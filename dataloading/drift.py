"""Slow trends over runs or epochs, which no single one of them shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataloading.results import Result

FEWEST_VALUES = 4  # that rise throughout: by chance 1 series in 24; one of three would be 1 in 6
LEAST_TOTAL = 0.02  # from the first value to the last; a smaller trend is of no use to anybody
CONFIDENCE = 0.95


@dataclass(frozen=True, repr=False, eq=False)
class Drift(Result):
    """How a figure changes from one run or epoch to the next.

    Attributes:
        change_share: Change from each value to the next, as a share of it: 0.1 is +10 %. None with
            fewer than four values.
        interval: 95 % interval `(low, high)` of it; None likewise.
        values: Array of the values, in their order.
        each: What one value stands for, such as "run" or "epoch".
    """

    change_share: float | None
    interval: tuple[float, float] | None
    values: np.ndarray
    each: str

    @property
    def verdict(self) -> str:
        """`rising`, `falling`, `none shown` or `too few values`."""
        if self.change_share is None or self.interval is None:
            return "too few values"
        total = (1 + self.change_share) ** (len(self.values) - 1)
        if self.interval[0] > 0 and total >= 1 + LEAST_TOTAL:
            return "rising"
        if self.interval[1] < 0 and total <= 1 - LEAST_TOTAL:
            return "falling"
        return "none shown"

    def summary(self) -> str:
        """Change from one to the next, its interval and the number of values."""
        count = f"{len(self.values)} {self.each}{'' if len(self.values) == 1 else 's'}"
        if self.change_share is None or self.interval is None:
            return f"{self.verdict}: {count}, {FEWEST_VALUES} are needed"
        low, high = (f"{bound:+.1%}".replace("%", " %") for bound in self.interval)
        change = f"{self.change_share:+.1%}".replace("%", " %")
        return f"{self.verdict}: {change} per {self.each} (95 % interval {low} to {high}, {count})"


def find_drift(values: Sequence[float] | np.ndarray, *, each: str = "run") -> Drift:
    """Find the trend of positive figures: a rate over runs, seconds or memory over epochs.

    The median of the slopes between all pairs (Theil-Sen) of the logarithms: a single outlier does
    not make a trend, nor hide one. Figures that follow one another are taken as independent; where
    neighbours resemble each other, as on a machine that is busy for days, trends show too often.

    Args:
        values: Shape (values,), in their order; all finite and above 0.
        each: What one value stands for.

    Returns:
        A `Drift`.

    Raises:
        ValueError: A value that is not a positive number.

    Example:
        >>> find_drift([60, 66, 73, 80], each="epoch")
        Drift: rising: +10.1 % per epoch (95 % interval +9.6 % to +10.6 %, 4 epochs)

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau (1968).

    Explained in: notebook 09
    """
    array = _positive(values)
    if len(array) < FEWEST_VALUES:
        return Drift(None, None, array, each)
    from scipy import stats

    line = stats.theilslopes(np.log(array), np.arange(len(array)), alpha=CONFIDENCE)
    change, low, high = (float(np.expm1(s)) for s in (line.slope, line.low_slope, line.high_slope))
    return Drift(change, (low, high), array, each)


def _positive(values: Any) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"Expected a list of finite numbers above 0, got {values!r}.")
    return array
