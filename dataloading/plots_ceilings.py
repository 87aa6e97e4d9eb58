"""Picture of the ceilings: what each part could reach alone, and what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloading.diagnosis import PARTS
from dataloading.plot_style import (
    KINDS,
    ROW_IN,
    axes_for,
    dress,
    inks,
    is_number,
    label_box,
    legend_below,
    say_instead,
    write,
)
from dataloading.results import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.diagnosis import Diagnosis

CLIP = 3.0  # ceilings beyond this many times the lowest are cut off: their height doesn't matter
FAR_ABOVE = 1.5  # times the measured rate: a ceiling up there does not explain it
COLORED_AS = {"compute": "step", "transfer": "transfer", "startup": "other"}  # the rest: prepare


def plot_ceilings(diagnosis: Diagnosis, ax: Axes | None = None) -> Axes:
    """Draw the rate that each part could reach alone, and the rate that was measured.

    The lowest ceiling is what limits training. Bars far above it are cut off, with their value.

    Args:
        diagnosis: What `diagnose_dataloader` found.
        ax: Where to draw; None makes a figure.

    Returns:
        The Axes.

    Explained in: notebook 00
    """
    rates = {part: rate for part, rate in diagnosis.ceilings.items() if is_number(rate)}
    known = sorted(((float(rate or 0), part) for part, rate in rates.items()))
    missing = [PARTS.get(p, p) for p in diagnosis.ceilings if p not in rates]
    ax = axes_for(ax, 1.5 + ROW_IN * max(2, len(known)))
    if not known:
        return say_instead(ax, "What limits training", "no ceiling was measured")
    measured = measured_rate(diagnosis)
    ink, _ = inks(ax)
    lowest = known[0][0]
    right = max(min(known[-1][0], CLIP * max(lowest, measured or 0.0)), measured or 0.0) * 1.02
    for row, (rate, part) in enumerate(known):
        style = KINDS[COLORED_AS.get(part, "prepare")].style()
        binds = row == 0
        ax.barh(row, min(rate, right), height=0.62, **style | {"alpha": 1.0 if binds else 0.55})
        text = format_value("samples_per_s", rate)
        if rate > right:
            text = f"→ {text}"
        write(
            ax,
            min(rate, right) + 0.012 * right,
            row,
            text,
            fontweight="bold" if binds else "normal",
            bbox=label_box(ax) | {"boxstyle": "square,pad=0.1"},
            zorder=4,
        )
        if binds:
            ax.barh(row, rate, height=0.62, facecolor="none", edgecolor=ink, linewidth=1.6)
    if measured is not None:
        ax.axvline(
            measured,
            color=ink,
            linestyle="--",
            linewidth=1.5,
            label=f"measured: {format_value('samples_per_s', measured)}",
        )
    names = [PARTS.get(part, part) for _, part in known]
    ax.set_yticks(range(len(known)), names)
    ax.get_yticklabels()[0].set_fontweight("bold")
    ax.set_ylim(len(known) - 0.5, -0.5)
    ax.set_xlim(0, right * 1.3)
    unknown = f"\nnot measured: {', '.join(missing)}" if missing else ""
    dress(
        ax,
        title="What was measured does not explain the rate"
        if measured is not None and lowest > FAR_ABOVE * measured
        else f"Lowest ceiling: {names[0]}",
        xlabel=f"samples/s that each part could reach alone{unknown}",
    )
    if measured is not None:
        legend_below(ax, drop=0.62 if missing else 0.0)
    else:
        write(
            ax,
            1,
            1.02,
            "rate of the run not measured",
            soft=True,
            transform=ax.transAxes,
            ha="right",
            va="bottom",
        )
    return ax


def measured_rate(diagnosis: Diagnosis) -> float | None:
    """Samples per second of the real run, or None."""
    if diagnosis.timing is not None and diagnosis.timing.steps > 0:
        rate = diagnosis.timing.samples_per_s
        return rate if is_number(rate) else None
    evidence = diagnosis.evidence
    if evidence.batch_size is None or not evidence.period_s:
        return None
    return evidence.batch_size / evidence.period_s
