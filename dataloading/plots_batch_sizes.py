"""Picture of a search for the batch size: the rate of training with each size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloading.batch_trials import OUT_OF_MEMORY, PASSED
from dataloading.plot_style import ACCENT, KINDS, axes_for, dress, legend_below, say_instead

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.batch_sizes import BatchSizeSearch

APART = 1.4  # times as large as the one before: a size with a label of its own


def plot_batch_sizes(search: BatchSizeSearch, ax: Axes | None = None) -> Axes:
    """Draw the rate of training with each size that passed, and the sizes that did not fit.

    Args:
        search: What `find_batch_sizes` returned.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 05
    """
    ax, title = axes_for(ax, 3.2), "Rate of training by batch size"
    sizes = search.sizes
    passed = sizes[sizes["status"] == PASSED]
    if passed.empty:
        return say_instead(ax, title, "no size passed a training step")
    ax.plot(
        passed["batch_size"],
        passed["samples_per_s"],
        label=PASSED,
        color=KINDS["step"].color,
        linewidth=1.8,
        marker="o",
    )
    short = sizes.loc[sizes["status"] == OUT_OF_MEMORY, "batch_size"]
    if not short.empty:
        zeros = [0.0] * len(short)
        red = KINDS["wait"].color
        ax.scatter(short, zeros, label=OUT_OF_MEMORY, color=red, marker="X", s=60, clip_on=False)
    ax.scatter(
        passed.loc[passed["chosen"], "batch_size"],
        passed.loc[passed["chosen"], "samples_per_s"],
        label=f"chosen: {search.batch_size}",
        color=ACCENT,
        marker="D",
        s=80,
        zorder=5,
    )
    ax.set_xscale("log", base=2)  # sizes double
    ticks = _apart([*passed["batch_size"], *short])
    ax.set_xticks(ticks, [f"{size:,}" for size in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    dress(ax, title=title, xlabel="batch size", ylabel="samples/s", grid="y")
    legend_below(ax, columns=3)
    return ax


def _apart(sizes: list[int]) -> list[int]:
    """Those that have room for a label each on a logarithmic axis."""
    ticks: list[int] = []
    for size in sorted(sizes):
        if not ticks or size >= APART * ticks[-1]:
            ticks.append(size)
    return ticks
