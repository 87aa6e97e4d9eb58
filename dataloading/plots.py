"""Pictures of results: they show what was measured or predicted, and compute nothing new.

Every function takes `ax=None`, returns the Axes, and sets nothing global. A figure made here is the
caller's to close. One colour and hatch stands for each kind of time, see `plot_style.KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import (
    GRID,
    KINDS,
    ROW_IN,
    SMALL_SIZE,
    axes_for,
    dress,
    inks,
    label_box,
    legend_below,
    patches,
    percent,
    say_instead,
    time_unit,
    write,
)
from dataloading.plots_batch_sizes import plot_batch_sizes
from dataloading.plots_ceilings import measured_rate, plot_ceilings
from dataloading.plots_comparison import plot_comparison
from dataloading.plots_history import plot_history
from dataloading.plots_resources import plot_gpu_curve, plot_memory, plot_resources
from dataloading.plots_scaling import plot_scaling
from dataloading.plots_timeline import plot_timeline
from dataloading.plots_tuning import plot_tuning
from dataloading.plots_workers import plot_worker_curve
from dataloading.results import format_seconds, format_share, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.loader_timing import LoaderTiming
    from dataloading.profiling import SampleProfile

__all__ = [
    "KINDS",
    "measured_rate",
    "plot_batch_sizes",
    "plot_ceilings",
    "plot_comparison",
    "plot_gpu_curve",
    "plot_history",
    "plot_memory",
    "plot_resources",
    "plot_sample_stages",
    "plot_scaling",
    "plot_time_split",
    "plot_timeline",
    "plot_tuning",
    "plot_waits",
    "plot_worker_curve",
]

PARTS = ("wait", "transfer", "step", "other")  # of one step, in the order in which they happen
ROOM_FOR_LABEL = 0.085  # a part narrower than this share of the picture has no room for its time


def plot_time_split(
    timing: LoaderTiming | Mapping[str, LoaderTiming], ax: Axes | None = None
) -> Axes:
    """Draw where the time of a step goes: waiting, moving the batch, training, other work.

    Args:
        timing: One run, or several by name, drawn as bars under one another.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Raises:
        ValueError: No run was given.

    Explained in: notebook 00
    """
    runs = timing if isinstance(timing, Mapping) else {"": timing}
    if not runs:
        raise ValueError("timing is empty: give a LoaderTiming, or a dict of them by name.")
    ax = axes_for(ax, 1.35 + ROW_IN * len(runs) * 1.15)
    runs = {name: run for name, run in runs.items() if run.steps > 0}
    if not runs:
        return say_instead(ax, "Where the time of a step goes", "no steady step was measured")
    means = {
        name: [float(getattr(run, f"{p}_s").mean()) for p in PARTS] for name, run in runs.items()
    }
    longest = max(sum(parts) for parts in means.values())
    factor, unit = time_unit(longest)
    for row, (name, run) in enumerate(runs.items()):
        left = 0.0
        for part, seconds in zip(PARTS, means[name], strict=True):
            width = seconds * factor
            ax.barh(row, width, left=left, height=0.62, **KINDS[part].style())
            if seconds > ROOM_FOR_LABEL * longest:
                _label_part(ax, left + width / 2, row, seconds, KINDS[part].hatch)
            left += width
        rate = format_value("samples_per_s", run.samples_per_s)
        write(ax, left + 0.015 * longest * factor, row, rate, soft=True)
    ax.set_yticks(range(len(runs)), list(runs))
    ax.set_ylim(len(runs) - 0.5, -0.5)
    ax.set_xlim(0, longest * factor * 1.22)  # room for the rate
    dress(ax, title=_split_title(runs), xlabel=f"mean time of one step, {unit}")
    legend_below(ax, patches(*PARTS))
    return ax


def _label_part(ax: Axes, x: float, y: float, seconds: float, hatch: str) -> None:
    options: dict[str, Any] = {"ha": "center", "fontsize": SMALL_SIZE}
    if hatch:
        options["bbox"] = label_box(ax)
    else:
        options["color"] = "white"
    write(ax, x, y, format_seconds(seconds), **options)


def _split_title(runs: Mapping[str, LoaderTiming]) -> str:
    if len(runs) > 1:
        return "Where the time of a step goes"
    (run,) = runs.values()
    return f"Waiting for data takes {percent(run.wait_share)} of the time"


def plot_waits(timing: LoaderTiming, ax: Axes | None = None) -> Axes:
    """Draw how long each steady step waited for its batch, with median and 95 % line.

    Args:
        timing: The run.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 01
    """
    ax = axes_for(ax, 3.0)
    waits = timing.wait_s[np.isfinite(timing.wait_s)]
    if not len(waits):
        return say_instead(ax, "Wait of each step", "no steady step was measured")
    factor, unit = time_unit(float(waits.max()))
    ink, _ = inks(ax)
    steps = np.arange(len(waits) + 1) + 0.5  # step n is the bar around n
    ax.stairs(waits * factor, steps, fill=True, **KINDS["wait"].style() | {"linewidth": 0})
    median, high = float(np.median(waits)), float(np.percentile(waits, 95))
    for value, style, text in ((median, "-", "median"), (high, "--", "95 % wait less than")):
        ax.axhline(
            value * factor,
            color=ink,
            linestyle=style,
            linewidth=1.3,
            label=f"{text} {format_seconds(value)}",
        )
    ax.set_xlim(0.5, len(waits) + 0.5)
    ax.set_ylim(0, max(float(waits.max()) * factor * 1.08, 1e-9))
    dress(
        ax,
        title=f"Wait of each step: {format_seconds(median)} in the median",
        xlabel=f"steady step ({len(waits)} in all)",
        ylabel=f"wait for the batch, {unit}",
        grid="y",
    )
    legend_below(ax, columns=2)
    return ax


def plot_sample_stages(profile: SampleProfile, ax: Axes | None = None) -> Axes:
    """Draw what one sample goes through, as a waterfall; working and waiting look different.

    Args:
        profile: What `profile_samples` found.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 01
    """
    stages = profile.stages
    ax = axes_for(ax, 1.35 + ROW_IN * max(1, len(stages)))
    known = stages[np.isfinite(stages["wall_s"].to_numpy(dtype=float))]
    whole = float(known["wall_s"].sum())
    if not len(known) or whole <= 0:
        return say_instead(ax, "What one sample costs", "no stage was measured")
    factor, unit = time_unit(whole)
    plate = label_box(ax) | {"boxstyle": "square,pad=0.1"}
    begun = 0.0
    for row, stage in enumerate(known.itertuples()):
        wall = float(stage.wall_s)
        waits = float(np.clip(np.nan_to_num(float(stage.wait_s)), 0.0, wall))
        works = wall - waits
        ax.barh(row, works * factor, left=begun * factor, height=0.6, **KINDS["prepare"].style())
        ax.barh(
            row,
            waits * factor,
            left=(begun + works) * factor,
            height=0.6,
            **KINDS["sample_wait"].style(),
        )
        begun += wall
        if row + 1 < len(known):  # a thread that leads on to the next stage
            ax.plot([begun * factor] * 2, [row, row + 1], color=GRID, linewidth=0.8, zorder=0.5)
        text = f"{format_seconds(wall)}  ({format_share(wall / whole)})"
        write(ax, (begun + 0.012 * whole) * factor, row, text, bbox=plate)
    ax.set_yticks(range(len(known)), [str(name) for name in known["stage"]])
    ax.set_ylim(len(known) - 0.5, -0.5)
    ax.set_xlim(0, whole * factor * 1.26)  # room for the last label
    top = known.loc[known["wall_s"].idxmax()]
    dress(
        ax,
        title=f"One sample takes {format_seconds(whole)}, most of it: {top['stage']}",
        xlabel=f"time since the sample was asked for, {unit} (mean of {profile.samples} samples)",
    )
    works_patch, waits_patch = patches("prepare", "sample_wait")
    works_patch.set_label("a CPU works")
    legend_below(ax, [works_patch, waits_patch])
    return ax
