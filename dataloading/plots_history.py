"""Picture of a history: the rate of each run, what was to be expected, and the latest run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import (
    ACCENT,
    GRID,
    axes_for,
    dress,
    inks,
    legend_below,
    say_instead,
)
from dataloading.results import format_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.regression import RunTrend

MOST_TICKS = 6
ROOM = 0.12  # of the axis, above and below; a change of 5 % would not show from zero on


def plot_history(trend: RunTrend, ax: Axes | None = None) -> Axes:
    """Draw the rate of each run in order of time, and where the latest was to be expected.

    Args:
        trend: What `find_regression` found, or the `.trend` of what `record_run` returned.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 09
    """
    ax = axes_for(ax, 3.4)
    runs = trend.compared
    if trend.ratio is None or len(runs) < 2:
        return say_instead(ax, f"Runs: {trend.verdict}", "; ".join(trend.notes))
    rates = runs["samples_per_s"].to_numpy(dtype=float)
    numbers = np.arange(1, len(runs) + 1)
    chosen = runs["in_baseline"].to_numpy(dtype=bool)
    others = ~chosen
    others[-1] = False
    _, soft = inks(ax)
    baseline = rates[-1] / trend.ratio
    ax.axhline(baseline, color=soft, linestyle=":", linewidth=1.5, label="mean of the baseline")
    if trend.interval is not None:
        half = math.log(trend.interval[1] / trend.ratio)
        low, high = baseline * math.exp(-half), baseline * math.exp(half)
        ax.axhspan(low, high, color=GRID, alpha=0.2, linewidth=0, label="expected (95 %)")
    ax.plot(numbers, rates, color=soft, linewidth=1.0, alpha=0.5)
    hollow: dict[str, Any] = {"facecolor": ax.figure.get_facecolor(), "edgecolor": GRID}
    ax.scatter(numbers[chosen], rates[chosen], s=40, color=soft, zorder=3, label="baseline")
    if others.any():
        ax.scatter(numbers[others], rates[others], s=40, zorder=3, label="other runs", **hollow)
    ax.scatter(numbers[-1], rates[-1], s=70, color=ACCENT, marker="D", zorder=4, label="latest")
    ax.margins(y=ROOM)
    shown = np.unique(np.linspace(0, len(runs) - 1, min(MOST_TICKS, len(runs))).round().astype(int))
    dates = runs["time_utc"].dt.strftime("%Y-%m-%d").to_numpy()
    ax.set_xticks(numbers[shown], [f"{numbers[i]}\n{dates[i]}" for i in shown])
    dress(ax, title=_title(trend), xlabel="run, date (UTC)", ylabel="samples/s", grid="y")
    legend_below(ax, columns=3, drop=0.72)
    return ax


def _title(trend: RunTrend) -> str:
    verdict = trend.verdict
    if trend.ratio is not None and verdict in ("slower", "faster"):
        verdict = f"{format_ratio(trend.ratio)} times the rate of the baseline, {verdict}"
    return f"Latest run: {verdict}{'; drifting down' if trend.is_drifting else ''}"
