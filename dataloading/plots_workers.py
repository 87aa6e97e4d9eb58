"""Picture of the model's main answer: what each number of workers would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataloading.batch_costs import BatchCosts
from dataloading.model import predict_dataloader
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
MOST_POINTS = 64  # more workers than this are drawn in larger steps
MOST_MARKERS = 24  # points closer than this hide the curve


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
    marked = [knee, *measured, *([settings.num_workers] if settings is not None else [])]
    numbers = numbers_to_draw(knee, cap, marked)
    predictions = {
        n: predict_dataloader(costs, replace(base, num_workers=n), step_s=step_s, machine=machine)
        for n in numbers
    }
    rates = {n: predicted.samples_per_s for n, predicted in predictions.items()}
    low, high = zip(*(p.samples_per_s_interval for p in predictions.values()), strict=True)
    top = max([*high, *measured.values()]) * 1.18
    color = KINDS["prepare"].color
    ax.fill_between(numbers, low, high, color=color, alpha=0.18, linewidth=0, label="90 % interval")
    markers = "o" if len(numbers) <= MOST_MARKERS else ""
    ax.plot(
        numbers,
        list(rates.values()),
        color=color,
        linewidth=2,
        marker=markers,
        markersize=4,
        label="predicted",
    )
    if step_s > 0 and costs.batch_size / step_s < top:
        _draw_limit(ax, costs.batch_size / step_s)
    if cap < numbers[-1]:
        _shade_beyond(ax, cap, numbers[-1])
    _mark_knee(ax, knee, rates)
    if settings is not None:
        _mark_choice(ax, settings.num_workers, rates)
    if measured:
        _mark_measured(ax, measured)
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


def numbers_to_draw(knee: int, cap: int, marked: list[int]) -> list[int]:
    """Far enough to show that the curve is flat, and everything that is to be marked.

    >>> numbers_to_draw(knee=2, cap=2, marked=[2])
    [0, 1, 2, 3, 4]
    """
    last = max(LEAST_WORKERS, knee + 2, min(cap + 1, 2 * knee), *marked)
    return sorted({*range(0, last + 1, 1 + last // MOST_POINTS), *marked, last})


def _draw_limit(ax: Axes, rate: float) -> None:
    color = KINDS["step"].color
    ax.axhline(rate, color=color, linestyle="--", linewidth=1.5, label="train step alone")


def _shade_beyond(ax: Axes, cap: int, last: int) -> None:
    _, soft = inks(ax)
    label = "more than the CPUs carry"
    ax.axvspan(cap + 0.5, last + 0.5, color=soft, alpha=0.12, linewidth=0, label=label)


def _mark_knee(ax: Axes, knee: int, rates: Mapping[int, float]) -> None:
    ink, _ = inks(ax)
    ring: dict[str, Any] = {"facecolor": "none", "edgecolor": ink, "linewidth": 1.6}
    ax.scatter([knee], [rates[knee]], s=170, zorder=4, label=f"enough: {knee}", **ring)


def _mark_choice(ax: Axes, number: int, rates: Mapping[int, float]) -> None:
    label = f"chosen: {number}"
    ax.scatter([number], [rates[number]], s=80, marker="D", color=ACCENT, zorder=5, label=label)


def _mark_measured(ax: Axes, measured: Mapping[int, float]) -> None:
    ink, _ = inks(ax)
    rates = list(measured.values())
    ax.scatter(list(measured), rates, s=60, marker="X", color=ink, zorder=6, label="measured")
