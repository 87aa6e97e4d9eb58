"""The statistics of a comparison: intervals of paired log ratios, and when they may end a run early.

Each four of blocks is `ABBA` or `BAAB`, drawn by chance. Were both loaders equal, exchanging them
would only turn the sign of a four's log ratio, so that signs are as random as coins, whatever the
machine did meanwhile: drift, bursts and rhythms cannot favour one side. Fours are therefore the unit,
not pairs: a burst that covers the two blocks in the middle hits both pairs of a four alike.

The mean is taken, not a median: an epoch's end or a stall that comes once in many blocks is part of
the rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

FEWEST_PAIRS = 6  # fewer pairs give no interval worth the name
FEWEST_RESAMPLED = 6  # values below which a bootstrap only repeats what it has
CONFIDENCE = 0.95
RESAMPLES = 4000
EARLY_LOOKS = (6, 9)  # fours after which a run may end early
LOOK_ERROR = 0.005  # of the 5 % that may go wrong, each early look uses up so much
PRECISE_ENOUGH = 0.01  # narrow: a half-width (log ratio) of 1 %,
PRECISE_SHARE = 0.1  # or of a tenth of the difference


def log_ratios(pairs: pd.DataFrame) -> np.ndarray:
    """The independent log ratios of a table of pairs: one a four, or one a pair where none is named.

    Args:
        pairs: DataFrame with a column `ratio` and, where pairs belong together, `four`.

    Returns:
        Shape (fours,) or (pairs,).

    Raises:
        ValueError: No pair, or a ratio that is not a positive number.
    """
    ratios = pairs["ratio"].to_numpy(dtype=float)
    if len(ratios) == 0 or not (np.isfinite(ratios).all() and (ratios > 0).all()):
        raise ValueError(
            f"pairs must hold at least one ratio, all positive numbers, got {ratios.tolist()}."
        )
    logs = np.log(ratios)
    if "four" not in pairs:
        return logs
    fours = pairs["four"].to_numpy()
    return np.array([logs[fours == four].mean() for four in np.unique(fours)])


def is_precise(logs: np.ndarray) -> bool:
    """Whether an early look at so many log ratios may end the run."""
    enough = max(PRECISE_ENOUGH, PRECISE_SHARE * abs(float(logs.mean())))
    return len(logs) in EARLY_LOOKS and half_width(logs, 1 - LOOK_ERROR) < enough


def last_confidence(fours: int) -> float:
    """Confidence of the last look at a run of so many fours that no early look has ended.

    All looks together, early and last, go wrong in at most 5 % of runs (Bonferroni).

    Example:
        >>> last_confidence(5), last_confidence(20)
        (0.95, 0.96)
    """
    return round(CONFIDENCE + LOOK_ERROR * sum(look <= fours for look in EARLY_LOOKS), 6)


def half_width(values: np.ndarray, confidence: float) -> float:
    """Half-width of Student's interval of the mean; infinite for a single value."""
    from scipy import stats

    if len(values) < 2:
        return math.inf
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error


def bootstrap_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of the mean: the wider of the bootstrap (BCa) and Student's t.

    With about ten values the bootstrap alone is too narrow and calls equal loaders different too
    often; Student's interval is wider there.

    Args:
        values: Paired log ratios, shape (values,); at least two.
        confidence: Share of such intervals that shall hold the truth.

    Returns:
        `(low, high)`.

    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 14.
    """
    mean = float(values.mean())
    if float(values.std()) == 0.0:
        return mean, mean
    margin = half_width(values, confidence)
    low, high = mean - margin, mean + margin
    if len(values) < FEWEST_RESAMPLED:
        return low, high
    from scipy import stats

    drawn = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="BCa",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return min(float(drawn.low), low), max(float(drawn.high), high)
