"""The figure for the README: how often each cause was named first, and what was named instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.faults.scoring import Outcome, confusion, summary
from dataloading.plot_style import (
    KINDS,
    ROW_IN,
    SMALL_SIZE,
    dress,
    legend_below,
    render_png,
    write,
)

DPI = 150
ROOM = 1.6  # times the longest bar: the names of what was named instead stand on the right
RIGHT, WRONG = KINDS["prepare"], KINDS["wait"]  # a fill and a hatch: readable in grey


def draw(figure: Any, outcomes: list[Outcome]) -> None:
    """A bar for each right cause: runs in which it came first, and runs in which it did not."""
    from matplotlib.patches import Patch

    table = confusion(outcomes)
    ax = figure.add_subplot()
    for row, right in enumerate(table.index):
        named = {name: int(runs) for name, runs in table.loc[right].items() if runs}
        runs, good = sum(named.values()), named.pop(right, 0)
        ax.barh(row, good, height=0.66, **RIGHT.style())
        ax.barh(row, runs - good, left=good, height=0.66, **WRONG.style())
        others = ", ".join(f"{name} {count}" for name, count in named.items())
        write(ax, runs + 0.15, row, others, soft=True, fontsize=SMALL_SIZE)
    dress(ax, title=_title(outcomes), xlabel="runs")
    ax.set_xlim(0, ROOM * max(table.sum(axis=1), default=1))
    ax.set_ylim(len(table.index) - 0.4, -0.6)
    ax.set_yticks(range(len(table.index)), table.index, fontsize=SMALL_SIZE)
    ax.xaxis.get_major_locator().set_params(integer=True)
    named_first = Patch(label="named first", **RIGHT.style())
    legend_below(ax, [named_first, Patch(label="something else first", **WRONG.style())])


def _title(outcomes: list[Outcome]) -> str:
    figures = summary(outcomes)
    faults, alarms = figures["faults"], figures["false_alarms"]
    return (
        f"Right cause first in {faults['yes']} of {faults['of']} runs; "
        f"{alarms['yes']} false alarms in {alarms['of']}"
    )


def figure_png(outcomes: Iterable[Outcome]) -> bytes:
    """The figure as a PNG file."""
    runs = list(outcomes)
    height = 1.4 + 0.5 * ROW_IN * len(confusion(runs).index)
    return render_png(lambda figure: draw(figure, runs), height, dpi=DPI)
