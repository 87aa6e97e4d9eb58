"""Picture of growth: seconds of an epoch against the number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import ACCENT, KINDS, axes_for, dress, inks, legend_below, say_instead
from dataloading.results import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.scaling import ScalingFit

SHARE_APART = 0.09  # of the axis: ticks nearer to each other would overlap


def plot_scaling(fit: ScalingFit, ax: Axes | None = None) -> Axes:
    """Draw the time of an epoch against its size, the fitted power, and growth in proportion.

    Both axes are logarithmic, so that a power of the size is a straight line.

    Args:
        fit: What `measure_scaling` found.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 02
    """
    ax = axes_for(ax, 3.6)
    sizes = np.asarray(fit.sizes, dtype=float)
    seconds = np.asarray(fit.seconds_per_epoch, dtype=float)
    known = np.isfinite(seconds) & (seconds > 0) & (sizes > 0)
    sizes, seconds = sizes[known], seconds[known]
    if len(sizes) < 2:
        return say_instead(ax, "Time of an epoch against its size", "fewer than two sizes")
    ends = np.array([sizes.min(), sizes.max()])
    centre_size, centre_s = (float(np.exp(np.log(v).mean())) for v in (sizes, seconds))
    color = KINDS["prepare"].color
    _, soft = inks(ax)
    proportional = seconds[np.argmin(sizes)] * ends / sizes.min()
    ax.plot(ends, proportional, color=soft, linestyle=":", linewidth=1.5, label="in proportion")
    fitted = centre_s * (ends / centre_size) ** fit.exponent
    low, high = fit.interval
    known_interval = f" (95 %: {low:.2f} to {high:.2f})" if np.isfinite([low, high]).all() else ""
    label = f"size to the power {fit.exponent:.2f}{known_interval}"
    ax.plot(ends, fitted, color=ACCENT, linewidth=1.8, label=label)
    ax.scatter(sizes, seconds, s=44, color=color, zorder=3, label="measured")
    ax.set_xscale("log")
    ax.set_yscale("log")
    _label_points(ax, sizes, seconds)
    dress(
        ax,
        title=f"Epoch time grows as size to the power {fit.exponent:.2f}",
        xlabel="samples in the data set (logarithmic)",
        ylabel="time of an epoch (logarithmic)",
        grid="y",
    )
    legend_below(ax, columns=2)
    return ax


def _label_points(ax: Axes, sizes: np.ndarray, seconds: np.ndarray) -> None:
    """Ticks where something was measured, as far as they stand apart."""
    from matplotlib.ticker import NullFormatter, NullLocator

    for axis, values, text in (
        (ax.xaxis, sizes, lambda v: f"{v:,.0f}"),
        (ax.yaxis, seconds, format_seconds),
    ):
        low, high = axis.get_view_interval()
        apart = SHARE_APART * float(np.log(high / low))
        shown: list[Any] = []
        for value in sorted(values):
            if not shown or np.log(value / shown[-1]) > apart:
                shown.append(value)
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_ticks(shown, [text(value) for value in shown])
