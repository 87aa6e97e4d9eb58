"""Picture of a search: what was predicted and what was measured, for each number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloading.plot_style import ACCENT, KINDS, axes_for, dress, inks, legend_below, say_instead
from dataloading.results import format_value
from dataloading.settings import DEFAULT_PREFETCH_FACTOR

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from dataloading.tuning import TuningResult


def plot_tuning(result: TuningResult, ax: Axes | None = None) -> Axes:
    """Draw the landscape of a search: predicted rates as a line, measured ones as dots.

    Args:
        result: What `tune_dataloader` found.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 03
    """
    from matplotlib.ticker import MaxNLocator

    ax = axes_for(ax, 3.4)
    trials = result.trials
    measured = trials[trials["samples_per_s"].notna()]
    plain = trials["prefetch_factor"].isna() | (
        trials["prefetch_factor"] == DEFAULT_PREFETCH_FACTOR
    )
    predicted = trials[plain & trials["predicted_samples_per_s"].notna()]
    if measured.empty and predicted.empty:
        return say_instead(ax, "What each setting gives", "nothing was predicted or measured")
    if not predicted.empty:
        line = predicted.groupby("num_workers")["predicted_samples_per_s"].max()
        color = KINDS["prepare"].color
        ax.plot(line.index, line, color=color, linewidth=2, label="predicted")
    _draw_measured(ax, measured)
    _draw_chosen(ax, measured[measured["chosen"]])
    left_out = trials[trials["status"].isin(["refused", "failed", "hung", "out of memory"])]
    if not left_out.empty:
        _, soft = inks(ax)
        zeros = [0.0] * len(left_out)
        ax.scatter(
            left_out["num_workers"],
            zeros,
            marker="x",
            color=soft,
            clip_on=False,
            label="refused or failed",
        )
    ax.set_ylim(bottom=0)
    ax.margins(x=0.06, y=0.15)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    rate = result.samples_per_s
    best = "" if rate is None else f": {format_value('samples_per_s', rate)}"
    number = result.settings.num_workers
    dress(
        ax,
        title=f"{number} {'worker' if number == 1 else 'workers'}{best}",
        xlabel="num_workers",
        ylabel="samples/s",
        grid="y",
    )
    legend_below(ax, columns=3)
    return ax


def _draw_measured(ax: Axes, measured: pd.DataFrame) -> None:
    """A dot per setting; other prefetch factors than the usual one are hollow."""
    ink, _ = inks(ax)
    usual = measured["prefetch_factor"].isna() | (
        measured["prefetch_factor"] == DEFAULT_PREFETCH_FACTOR
    )
    for rows, label, face in (
        (measured[usual], "measured", ink),
        (measured[~usual], "with another prefetch factor", "none"),
    ):
        if not rows.empty:
            errors = (rows["spread_share"].fillna(0.0) * rows["samples_per_s"]).to_numpy()
            ax.errorbar(
                rows["num_workers"],
                rows["samples_per_s"],
                yerr=errors,
                fmt="o",
                color=ink,
                markerfacecolor=face,
                markersize=6,
                capsize=3,
                label=label,
            )


def _draw_chosen(ax: Axes, chosen: pd.DataFrame) -> None:
    if not chosen.empty:
        ax.scatter(
            chosen["num_workers"],
            chosen["samples_per_s"],
            s=90,
            marker="D",
            color=ACCENT,
            zorder=5,
            label="chosen",
        )
