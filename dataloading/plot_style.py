"""One look for all pictures: a colour and a hatch per kind of time, readable in grey as well.

Nothing global is set: every colour and size is given where something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dataloading.results import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 7.2  # at 100 dots an inch, the column of a README or a notebook
ROW_IN = 0.46  # height of one bar with its gap
PAD_IN = 0.1  # free border of a figure
ACCENT = "#7B3F98"  # what is chosen, or came after: not a kind of time
INK, SOFT_INK = "#1f2933", "#5b6773"  # text, and text that may stand back
PALE_INK, PALE_SOFT_INK = "#f2f4f6", "#b9c2cb"  # the same on a dark figure
GRID = "#8a94a0"
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 11.0, 9.5, 8.5


@dataclass(frozen=True)
class Kind:
    """How one kind of time looks: name in the legend, fill, hatch, and colour of the hatch."""

    label: str
    color: str
    hatch: str
    line: str = "white"

    def style(self) -> dict[str, Any]:
        """Keyword arguments for bars, areas and legend patches."""
        return {
            "facecolor": self.color,
            "hatch": self.hatch,
            "edgecolor": self.line,
            "linewidth": 0.6,
        }


# Lightness (L* of 32, 61, 78, 90, 48, 84) and hatch keep them apart in grey and for the colour blind.
KINDS = {
    "wait": Kind("waiting for data", "#E2711D", "////"),
    "transfer": Kind("moving the batch", "#85C7EE", "....", "#1D5E85"),
    "step": Kind("train step", "#174F7C", ""),
    "other": Kind("other work", "#E1E4E8", "xxxx", "#9AA3AD"),
    "prepare": Kind("preparing data", "#2F7F79", "\\\\\\"),
    "sample_wait": Kind("the sample waits", "#C3DEDA", "////", "#2F7F79"),
}


def axes_for(ax: Any, height_in: float = 3.0) -> Axes:
    """The Axes to draw on: the given one, or that of a new white figure.

    Args:
        ax: Axes, or None for a figure of our own, which the caller closes.
        height_in: Height of the new figure in inches.
    """
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(WIDTH_IN, height_in), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=PAD_IN, h_pad=PAD_IN)
    return ax


def render_png(draw: Callable[[Figure], Any], height_in: float, *, dpi: int) -> bytes:
    """Draw on a figure that pyplot knows nothing of, so that there is nothing to close or to show.

    Args:
        draw: Called with the empty figure.
        height_in: Its height in inches; the width is that of all pictures.
        dpi: Dots an inch.

    Returns:
        The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=PAD_IN, h_pad=PAD_IN)
    canvas = FigureCanvasAgg(figure)
    draw(figure)
    file = io.BytesIO()
    figure.set_dpi(dpi)
    canvas.print_png(file)
    return file.getvalue()


def inks(ax: Axes) -> tuple[str, str]:
    """Colours of text and of softer text that can be read on the figure's background."""
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(ax.figure.get_facecolor())
    lightness = 0.3 * red + 0.59 * green + 0.11 * blue
    dark = alpha > 0.5 and lightness < 0.5
    return (PALE_INK, PALE_SOFT_INK) if dark else (INK, SOFT_INK)


def dress(
    ax: Axes,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    grid: Literal["x", "y"] | None = "x",
) -> None:
    """Title, labels, light grid and no box.

    Args:
        ax: The Axes, already drawn on.
        title: What the picture says; stands on the left.
        xlabel, ylabel: Labels with their unit.
        grid: Axis whose values are to be read off: "x", "y" or None.
    """
    ink, soft = inks(ax)
    ax.set_facecolor(ax.figure.get_facecolor())
    ax.set_title(title, loc="left", fontsize=TITLE_SIZE, fontweight="bold", color=ink, pad=10)
    ax.set_xlabel(xlabel, fontsize=TEXT_SIZE, color=soft)
    ax.set_ylabel(ylabel, fontsize=TEXT_SIZE, color=soft)
    ax.tick_params(labelsize=TEXT_SIZE, color=GRID, labelcolor=ink, length=3)
    ax.tick_params(which="minor", length=0)
    for side in ("top", "right", "left" if grid == "x" else ""):
        if side:
            ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GRID)
    ax.set_axisbelow(True)
    if grid is not None:
        ax.grid(True, axis=grid, color=GRID, alpha=0.25, linewidth=0.8)
    if grid == "x":
        ax.tick_params(axis="y", length=0)


def legend_below(ax: Axes, handles: Any = None, *, columns: int = 4, drop: float = 0.0) -> None:
    """A frameless legend under the axis label.

    Args:
        ax: The Axes.
        handles: Artists; None takes what has a label.
        columns: Entries side by side.
        drop: How far below the Axes, in inches; 0 takes the room of one axis label.
    """
    from matplotlib.transforms import ScaledTranslation

    ink, _ = inks(ax)
    figure: Any = ax.figure
    down = ScaledTranslation(0, -(drop or 0.46), figure.dpi_scale_trans)
    ax.legend(
        handles=handles if handles is not None else ax.get_legend_handles_labels()[0],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + down,
        ncols=columns,
        frameon=False,
        fontsize=TEXT_SIZE,
        labelcolor=ink,
        borderaxespad=0,
        handlelength=1.6,
        markerscale=0.75,
        handleheight=1.1,
        columnspacing=1.4,
    )


def patches(*kinds: str) -> list[Any]:
    """Legend entries of some kinds of time."""
    from matplotlib.patches import Patch

    return [Patch(label=KINDS[kind].label, **KINDS[kind].style()) for kind in kinds]


def write(ax: Axes, x: float, y: float, text: str, *, soft: bool = False, **options: Any) -> Any:
    """Text in the usual size and ink; further options go to `Axes.text`."""
    ink, softer = inks(ax)
    usual: dict[str, Any] = {
        "fontsize": TEXT_SIZE,
        "color": softer if soft else ink,
        "va": "center",
    }
    return ax.text(x, y, text, **usual | options)


def label_box(ax: Axes) -> dict[str, Any]:
    """A plate under text that stands on a hatch."""
    return {
        "boxstyle": "round,pad=0.2",
        "facecolor": ax.figure.get_facecolor(),
        "edgecolor": "none",
        "alpha": 0.88,
    }


def say_instead(ax: Axes, title: str, reason: str) -> Axes:
    """A picture without data: the title, and in words why there is nothing to see.

    Args:
        ax: The Axes.
        title: What would have been shown.
        reason: Why it is not.
    """
    import textwrap

    dress(ax, title=title, grid=None)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    text = "\n".join(textwrap.wrap(f"Not available: {reason}", 80))
    write(ax, 0.0, 0.92, text, soft=True, transform=ax.transAxes, va="top")
    return ax


def time_unit(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which a time reads best.

    >>> time_unit(0.04), time_unit(3), time_unit(2e-5)
    ((1000.0, 'ms'), (1.0, 's'), (1000000.0, 'µs'))
    """
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 or seconds <= 0 else (1e6, "µs")


def bytes_unit(count: float) -> tuple[float, str]:
    """Divisor and name of the unit in which a number of bytes reads best.

    >>> bytes_unit(3 * 2**30)
    (1073741824, 'GiB')
    """
    return (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")


def is_number(value: Any) -> bool:
    """Whether a value is there and finite."""
    return value is not None and bool(np.isfinite(value))


def percent(share: float) -> str:
    """A share of the time in words; small ones are not rounded to nothing.

    >>> percent(0.801), percent(0.004), percent(0.0)
    ('80 %', 'less than 1 %', '0 %')
    """
    return "less than 1 %" if 0 < share < 0.01 else format_value("x_share", share)
