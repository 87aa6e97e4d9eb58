"""Picture of the model's main answer: what each number of workers would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dataloading.model import BatchCosts, predict_dataloader
from dataloading.plot_style import (
    ACCENT,
    KINDS,
    axes_for,
    dress,
    inks,
    is_number,
    legend_below,
)
from dataloading.results import format_value
from dataloading.settings import LoaderSettings
from dataloading.workers import best_workers, worker_cap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dataloading.machine import Machine

LEAST_WORKERS = 4  # a curve over fewer says little
MOST_WORKERS = 64


def plot_worker_curve(
    costs: BatchCosts,
    step_s: float,
    machine: Machine,
    measured: Mapping[int, float] | None = None,
    ax: Axes | None = None,
    *,
    settings: LoaderSettings | None = None,
) -> Axes:
    """Draw the predicted rate against the number of workers, with its 90 % interval.

    Marked are the smallest number that is as good as any, and how many workers the CPUs carry.

    Args:
        costs: What a batch costs.
        step_s: Seconds of the train step when data is free.
        machine: Usable CPUs and ranks.
        measured: Rates that were measured, by number of workers, drawn as dots (samples/s).
        ax: Where to draw; None makes a figure.
        settings: A choice to mark on the curve; its batch size and prefetch hold for all of it.

    Returns:
        The Axes.

    Raises:
        ValueError: `step_s` is negative.

    Explained in: notebook 00
    """
    from matplotlib.ticker import MaxNLocator

    ax = axes_for(ax, 3.4)
    base = settings or LoaderSettings()
    costs = costs.for_batch_size(base.batch_size)
    measured = {n: rate for n, rate in (measured or {}).items() if is_number(rate)}
    knee = best_workers(costs, step_s, machine)
    cap = worker_cap(machine, costs.cpu_share)
    numbers = list(range(_last_number(knee, cap, measured, settings) + 1))
    predictions = [
        predict_dataloader(costs, _with_workers(base, n), step_s=step_s, machine=machine)
        for n in numbers
    ]
    rates = [p.samples_per_s for p in predictions]
    low, high = zip(*(p.samples_per_s_interval for p in predictions), strict=True)
    ink, soft = inks(ax)
    color = KINDS["prepare"].color
    ax.fill_between(numbers, low, high, color=color, alpha=0.18, linewidth=0, label="90 % interval")
    ax.plot(numbers, rates, color=color, linewidth=2, marker="o", markersize=4, label="predicted")
    top = max([*high, *measured.values()]) * 1.18
    if step_s > 0:
        compute = costs.batch_size / step_s
        if compute < top:
            ax.axhline(
                compute,
                color=KINDS["step"].color,
                linestyle="--",
                linewidth=1.5,
                label="train step alone",
            )
    if cap < numbers[-1]:
        ax.axvspan(
            cap + 0.5,
            numbers[-1] + 0.5,
            color=soft,
            alpha=0.12,
            linewidth=0,
            label="more than the CPUs carry",
        )
    ax.scatter(
        [knee],
        [rates[knee]],
        s=170,
        facecolor="none",
        edgecolor=ink,
        linewidth=1.6,
        zorder=4,
        label=f"enough: {knee}",
    )
    if settings is not None:
        at = settings.num_workers
        ax.scatter(
            [at], [rates[at]], s=80, marker="D", color=ACCENT, zorder=5, label=f"chosen: {at}"
        )
    if measured:
        ax.scatter(
            list(measured),
            list(measured.values()),
            s=60,
            marker="X",
            color=ink,
            zorder=6,
            label="measured",
        )
    ax.set_xlim(-0.5, numbers[-1] + 0.5)
    ax.set_ylim(0, top)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    most = format_value("samples_per_s", rates[knee])
    dress(
        ax,
        title=f"{knee} {'worker is' if knee == 1 else 'workers are'} enough: {most} predicted",
        xlabel="num_workers",
        ylabel="samples/s",
        grid="y",
    )
    legend_below(ax, columns=3)
    return ax


def _with_workers(base: LoaderSettings, number: int) -> LoaderSettings:
    return replace(base, num_workers=number)


def _last_number(
    knee: int, cap: int, measured: Mapping[int, float], settings: LoaderSettings | None
) -> int:
    """Far enough to show that the curve is flat, and everything that is to be marked."""
    wanted = max(LEAST_WORKERS, knee + 2, min(cap + 1, 2 * knee))
    marked = [*measured, settings.num_workers if settings is not None else 0]
    return min(max(wanted, *marked), max(MOST_WORKERS, *marked))
