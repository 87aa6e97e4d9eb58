"""Gantt chart of a simulated run: workers, the batches that wait, and the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import (
    KINDS,
    SMALL_SIZE,
    TEXT_SIZE,
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

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

BATCHES = 24  # as many batches as can be told apart in 700 pixels
NUMBER: dict[str, Any] = {"ha": "center", "fontsize": SMALL_SIZE, "clip_on": True}
MOST_WORKERS = 12  # rows beyond this are too thin to read
ROOM_FOR_NUMBER = 0.045  # a bar narrower than this share of the picture has no room for its number
ROW_FOR_NUMBER_IN = 0.24  # nor has a row that is lower than this


def plot_timeline(
    timeline: pd.DataFrame, ax: Axes | None = None, *, batches: int = BATCHES
) -> Axes:
    """Draw who does what when: a row per worker, the finished batches, and the training.

    Args:
        timeline: DataFrame of `simulate_timeline`, in order of delivery.
        ax: Where to draw; None makes a figure.
        batches: How many batches to show, from the start of the run.

    Returns:
        The Axes.

    Raises:
        ValueError: `batches` is below 1.

    Explained in: notebook 00
    """
    if batches < 1:
        raise ValueError(f"batches={batches} must be at least 1.")
    workers = sorted({int(worker) for worker in timeline["worker"]})
    shown = workers[:MOST_WORKERS]
    rows = len(shown) + (2 if workers != [-1] else 1)
    ax = axes_for(ax, 1.5 + 0.38 * rows)
    if not len(timeline):
        return say_instead(ax, "Who does what when", "the timeline has no batch")
    part = timeline.iloc[:batches]
    end = float(part["step_ended_s"].max())
    factor, unit = time_unit(end)
    numbered = _height_in(ax) / rows > ROW_FOR_NUMBER_IN
    for row, worker in enumerate(shown):
        _draw_worker(ax, timeline[timeline["worker"] == worker], row, factor, end, numbered)
    labels = ["loading" if worker < 0 else f"worker {worker}" for worker in shown]
    if workers != [-1]:
        _draw_queue(ax, timeline, len(shown), factor, end)
        labels.append("ready batches")
    _draw_training(ax, part, rows - 1, factor, end, numbered)
    labels.append("training")
    ax.axhline(rows - 1.5, color=inks(ax)[1], linewidth=0.8, alpha=0.6)
    ax.set_yticks(range(rows), labels)
    ax.set_ylim(rows - 0.45, -0.55)
    ax.set_xlim(0, max(end * factor, 1e-9))
    hidden = len(workers) - len(shown)
    more = f" ({hidden} more workers not drawn)" if hidden else ""
    dress(
        ax,
        title=f"Training waits {percent(steady_wait_share(timeline))} of the time",
        xlabel=f"time since the start, {unit}{more}",
    )
    legend_below(ax, patches("prepare", "wait", "step"))
    return ax


def steady_wait_share(timeline: pd.DataFrame) -> float:
    """Share of waiting in the second half of a simulated run, behind its first burst."""
    half = timeline.iloc[len(timeline) // 2 :]
    whole = float(half["step_ended_s"].max() - half["asked_s"].min())
    return float(half["wait_s"].sum()) / whole if whole > 0 else 0.0


def _height_in(ax: Axes) -> float:
    """Height of the Axes in inches, before the layout settles."""
    figure: Any = ax.figure
    return ax.get_position().height * figure.get_figheight()


def _draw_worker(
    ax: Axes, jobs: pd.DataFrame, row: int, factor: float, end: float, numbered: bool
) -> None:
    jobs = jobs[jobs["begun_s"] < end]
    begun = jobs["begun_s"].to_numpy(dtype=float)
    spans = np.minimum(jobs["ready_s"].to_numpy(dtype=float), end) - begun
    ax.broken_barh(
        list(zip(begun * factor, spans * factor, strict=True)),
        (row - 0.34, 0.68),
        **KINDS["prepare"].style(),
    )
    if numbered and np.median(spans) > ROOM_FOR_NUMBER * end:
        plate = label_box(ax) | {"boxstyle": "round,pad=0.12"}
        for number, left, width in zip(jobs["batch"], begun, spans, strict=True):
            if width > ROOM_FOR_NUMBER * end:
                middle = (left + width / 2) * factor
                write(ax, middle, row, f"{number:.0f}", bbox=plate, **NUMBER)


def _draw_queue(ax: Axes, timeline: pd.DataFrame, row: int, factor: float, end: float) -> None:
    """Finished batches that nobody has taken yet, as a small step curve."""
    moments = np.concatenate([timeline["ready_s"], timeline["step_begun_s"]])
    changes = np.repeat([1, -1], len(timeline))
    order = np.lexsort((-changes, moments))  # a batch is ready before it is taken
    moments, waiting = moments[order], np.cumsum(changes[order])
    last = np.append(moments[1:] > moments[:-1], True)  # several at one moment count together
    moments, waiting = np.insert(moments[last], 0, 0.0), np.insert(waiting[last], 0, 0)
    most = int(waiting[moments < end].max(initial=0))
    if most == 0:
        write(
            ax,
            end * factor / 2,
            row,
            "none: each is taken at once",
            soft=True,
            ha="center",
            fontsize=SMALL_SIZE,
        )
        return
    base = row + 0.36
    ax.fill_between(
        moments * factor,
        base,
        base - waiting / most * 0.7,
        step="post",
        facecolor=KINDS["sample_wait"].color,
        edgecolor=KINDS["prepare"].color,
        linewidth=1.0,
    )
    ink, _ = inks(ax)
    ax.annotate(
        f" up to {most}",
        (1.0, row),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=TEXT_SIZE,
        color=ink,
        annotation_clip=False,
    )


def _draw_training(
    ax: Axes, part: pd.DataFrame, row: int, factor: float, end: float, numbered: bool
) -> None:
    asked, begun, ended = (
        part[name].to_numpy(dtype=float) for name in ("asked_s", "step_begun_s", "step_ended_s")
    )
    for kind, left, right in (("wait", asked, begun), ("step", begun, ended)):
        spans = [(a * factor, (b - a) * factor) for a, b in zip(left, right, strict=True) if b > a]
        ax.broken_barh(spans, (row - 0.38, 0.76), **KINDS[kind].style())
    if numbered and np.median(ended - begun) > ROOM_FOR_NUMBER * end:
        for number, middle in zip(part["batch"], (begun + ended) / 2 * factor, strict=True):
            write(ax, middle, row, f"{number:.0f}", color="white", **NUMBER)
