"""Picture of a comparison: each pair of blocks, and the ratio with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import (
    ACCENT,
    GRID,
    ROW_IN,
    SMALL_SIZE,
    axes_for,
    dress,
    inks,
    legend_below,
    say_instead,
    write,
)
from dataloading.results import format_ratio
from dataloading.storage_reads import FROM_STORAGE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from dataloading.comparison import Comparison

TALLEST_IN = 6.0  # many pairs share this height


def plot_comparison(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw each pair of blocks as two connected dots, and below them the ratio with its interval.

    Pairs stand in the order in which they were run, so that a drift of the machine shows; those that
    read from storage are marked.

    Args:
        comparison: What `compare_dataloaders` found.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 09
    """
    pairs = comparison.pairs
    ax = axes_for(ax, min(1.9 + 0.5 * ROW_IN * len(pairs), TALLEST_IN))
    rates = _rates(pairs)
    if comparison.ratio is None or rates is None:
        reason = "; ".join(comparison.notes) or "the rates of its blocks are not known"
        return say_instead(ax, f"Before and after: {comparison.verdict}", reason)
    before, after, unit = rates
    rows = np.arange(1, len(pairs) + 1)
    _, soft = inks(ax)
    ax.hlines(
        rows,
        np.minimum(before, after),
        np.maximum(before, after),
        color=soft,
        linewidth=1.2,
        alpha=0.6,
    )
    hollow: dict[str, Any] = {
        "facecolor": ax.figure.get_facecolor(),
        "edgecolor": GRID,
        "linewidth": 1.8,
    }
    ax.scatter(before, rows, s=44, label="before", zorder=3, **hollow)
    ax.scatter(after, rows, s=44, color=ACCENT, marker="D", label="after", zorder=3)

    # The interval of the ratio, drawn around the typical rate before, so that both share one axis.
    low, high = comparison.interval or (comparison.ratio, comparison.ratio)
    typical = float(np.exp(np.log(before).mean()))
    bottom = len(pairs) + 1.6
    ax.axhline(len(pairs) + 0.8, color=soft, linewidth=0.8, alpha=0.6)
    ax.plot(
        [typical * low, typical * high],
        [bottom] * 2,
        color=ACCENT,
        linewidth=9,
        alpha=0.35,
        solid_capstyle="butt",
    )
    ax.scatter([typical], [bottom], s=60, zorder=3, **hollow)
    ax.scatter([typical * comparison.ratio], [bottom], s=60, color=ACCENT, marker="D", zorder=4)
    right = max(typical * high, float(after.max()), float(before.max()))
    left = min(typical * low, float(after.min()), float(before.min()))
    middle = typical * comparison.ratio
    write(
        ax,
        middle,
        bottom + 0.65,
        _ratio_text(comparison),
        ha="right"
        if middle > left + 0.75 * (right - left)
        else "left"
        if middle < left + 0.25 * (right - left)
        else "center",
        va="top",
        fontweight="bold",
    )
    ax.set_ylim(bottom + 2.4, 0.2)
    margin = 0.06 * (right - left) if right - left > 1e-6 * right else 0.1 * right
    ax.set_xlim(max(0.0, left - margin), right + margin)
    every = max(1, round(len(pairs) / 12))
    shown = rows[::every]
    ax.set_yticks(
        [*shown, bottom],
        [
            *(f"pair {n}{_storage_mark(pairs, n)}" for n in shown),
            "ratio and\n95 % interval" if comparison.interval else "ratio",
        ],
    )
    for label in ax.get_yticklabels()[:-1]:
        label.set_fontsize(SMALL_SIZE)
    dress(ax, title=f"Before and after: {_verdict(comparison)}", xlabel=unit)
    legend_below(ax)
    return ax


def _rates(pairs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, str] | None:
    """Rates before and after with their unit; None where they are not known.

    Training functions that count no samples are shown by their calls.
    """
    for columns, power, unit in (
        (("before_samples_per_s", "after_samples_per_s"), 1, "samples/s"),
        (("before_step_s", "after_step_s"), -1, "calls/s"),
    ):
        if set(columns) <= set(pairs):
            before, after = (pairs[name].to_numpy(dtype=float) ** power for name in columns)
            if np.isfinite(before).all() and np.isfinite(after).all():
                return before, after, unit
    return None


def _storage_mark(pairs: pd.DataFrame, number: int) -> str:
    """What to write behind a pair whose files were not all in the page cache."""
    names = [name for name in ("before_storage_share", "after_storage_share") if name in pairs]
    shares = pairs[names].iloc[number - 1].to_numpy(dtype=float)
    return " (storage)" if bool((shares > FROM_STORAGE).any()) else ""


def _ratio_text(comparison: Comparison) -> str:
    ratio = f"×{format_ratio(comparison.ratio or 1.0)}"
    if comparison.interval is None:
        return f"{ratio}  (too few pairs for an interval)"
    low, high = map(format_ratio, comparison.interval)
    return f"{ratio}  ({low} to {high})"


def _verdict(comparison: Comparison) -> str:
    if comparison.verdict in ("faster", "slower") and comparison.ratio is not None:
        return f"{format_ratio(comparison.ratio)} times the rate, {comparison.verdict}"
    return comparison.verdict
