"""Pictures of resources over time: GPU or CPU curve with its sawtooth, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.plot_style import (
    KINDS,
    axes_for,
    bytes_unit,
    dress,
    inks,
    legend_below,
    say_instead,
)
from dataloading.results import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import Series

    from dataloading.monitoring import ResourceTrace

MOST_TEETH = 60  # more bands than this merge into a grey area
SHORTEST_S = 1.0  # width of the picture while there are hardly any readings
PHASE_BINS = 24  # parts of a period in which its beginning is looked for
CPU_COLUMNS = ("cpu_percent_of_usable", "cpu_percent")
TIME_LABEL = "seconds since the monitor started"
LEVELS = (  # first and second choice of a column, label, colour, line, marker
    ("memory_bytes", None, "all processes", "#1f2933", "-", None),
    ("main_pss_bytes", "main_rss_bytes", "training process", KINDS["step"].color, "--", "o"),
    ("workers_pss_bytes", "workers_rss_bytes", "workers", KINDS["prepare"].color, "-.", "s"),
    ("shared_memory_used_bytes", None, "shared memory (/dev/shm)", "#7A8793", ":", "^"),
)


def plot_gpu_curve(
    trace: ResourceTrace, column: str | None = None, ax: Axes | None = None, *, after_s: float = 0.0
) -> Axes:
    """Draw how busy a GPU was over time, and name the pattern; the teeth of a sawtooth are marked.

    Args:
        trace: What `monitor_resources` saw.
        column: A column in percent; None takes the first GPU, else the CPU.
        ax: Where to draw; None makes a figure.
        after_s: Leave out what is older than this.

    Returns:
        The Axes; without any such reading, it says why.

    Raises:
        ValueError: The column isn't in percent.

    Explained in: notebook 01
    """
    ax = axes_for(ax, 2.9)
    wanted = column or busiest_column(trace)
    if wanted is None:
        return say_instead(ax, "GPU and CPU over time", _why_nothing(trace))
    if wanted not in trace.frame.columns:
        return say_instead(ax, f"{name_of(wanted)} over time", trace.why_missing(wanted))
    series = trace.series(wanted, after_s=after_s)
    if not len(series):
        return say_instead(ax, f"{name_of(wanted)} over time", "no reading yet")
    pattern = trace.pattern(wanted, after_s=after_s)
    times, values = _arrays(series)
    if pattern.period_s is not None:
        _mark_teeth(ax, times, values, pattern.period_s)
    color = KINDS["step"].color if wanted.startswith("gpu") else KINDS["prepare"].color
    ax.fill_between(times, values, color=color, alpha=0.22, linewidth=0)
    dot = "o" if len(times) == 1 else ""
    ax.plot(times, values, color=color, linewidth=1.4, marker=dot, label=name_of(wanted))
    ax.set_ylim(0, max(105.0, float(values.max()) * 1.05))
    ax.set_xlim(times[0], max(times[-1], times[0] + SHORTEST_S))
    period = f", a tooth every {format_seconds(pattern.period_s)}" if pattern.period_s else ""
    telling = pattern.name != "unknown" if wanted.startswith("gpu") else pattern.name == "sawtooth"
    known = f": {pattern.name}{period}" if telling else ""  # only a GPU can be starved
    dress(
        ax,
        title=f"{name_of(wanted)}{known}",
        xlabel=TIME_LABEL,
        ylabel=_busy_label(wanted),
        grid="y",
    )
    return ax


def plot_resources(trace: ResourceTrace, ax: Axes | None = None, *, after_s: float = 0.0) -> Axes:
    """Draw the most telling curve there is: the GPU with the CPU behind it, the CPU, or memory.

    Args:
        trace: What `monitor_resources` saw.
        ax: Where to draw; None makes a figure.
        after_s: Leave out what is older than this.

    Returns:
        The Axes.

    Explained in: notebook 01
    """
    main = busiest_column(trace)
    if main is None:
        return plot_memory(trace, ax, after_s=after_s)
    ax = plot_gpu_curve(trace, main, ax, after_s=after_s)
    beside = next((c for c in CPU_COLUMNS if c != main and c in trace.frame.columns), None)
    if beside is not None and main.startswith("gpu"):
        series = trace.series(beside, after_s=after_s)
        if len(series):
            times, values = _arrays(series)
            ax.plot(
                times,
                values,
                color=KINDS["prepare"].color,
                linestyle="--",
                linewidth=1.4,
                label=name_of(beside),
            )
            ax.set_ylabel("busy, %")
            ax.set_ylim(0, max(ax.get_ylim()[1], float(values.max()) * 1.05))
            legend_below(ax)
    return ax


def plot_memory(trace: ResourceTrace, ax: Axes | None = None, *, after_s: float = 0.0) -> Axes:
    """Draw memory over time: training process, workers, shared memory, and all together.

    Proportional shares (PSS, shared pages divided among those who share them) where they can be
    read, else resident memory.

    Args:
        trace: What `monitor_resources` saw.
        ax: Where to draw; None makes a figure.
        after_s: Leave out what is older than this.

    Returns:
        The Axes.

    Explained in: notebook 01
    """
    ax = axes_for(ax, 3.1)
    curves = []
    for first, second, label, color, line, marker in LEVELS:
        for name in (first, second):
            if name is not None and name in trace.frame.columns:
                series = trace.series(name, after_s=after_s)
                if len(series):
                    kind = (
                        name.rsplit("_", 2)[-2].upper()
                        if second is not None
                        else trace.memory_label
                    )
                    named = (
                        f"{label} ({kind})"
                        if kind and name.startswith(("main", "workers"))
                        else label
                    )
                    curves.append((series, named, color, line, marker))
                    break
    if not curves:
        return say_instead(ax, "Memory over time", _why_nothing(trace, "memory_bytes"))
    divisor, unit = bytes_unit(max(float(series.max()) for series, *_ in curves))
    ink, _ = inks(ax)
    for series, label, color, line, marker in curves:
        times, values = _arrays(series)
        dot = marker or ("o" if len(times) == 1 else None)
        style: dict[str, Any] = {"linestyle": line, "marker": dot, "markersize": 4}
        style["markevery"] = max(1, len(times) // 12)
        shade = ink if color == "#1f2933" else color
        ax.plot(times, values / divisor, color=shade, linewidth=1.6, label=label, **style)
    begins, ends = zip(*(series.index[[0, -1]] for series, *_ in curves), strict=True)
    ax.set_xlim(min(begins), max(*ends, min(begins) + SHORTEST_S))
    ax.set_ylim(bottom=0)
    ax.set_ylim(top=ax.get_ylim()[1] * 1.05)
    dress(
        ax,
        title=_memory_title(trace, after_s),
        xlabel=TIME_LABEL,
        ylabel=f"memory, {unit}",
        grid="y",
    )
    legend_below(ax, columns=2)
    return ax


def busiest_column(trace: ResourceTrace) -> str | None:
    """The column that tells most about being busy: the first GPU's utilisation, else the CPU's."""
    columns = [str(name) for name in trace.frame.columns]
    gpus = [name for name in columns if name.startswith("gpu") and name.endswith("_utilization")]
    found = [*gpus, *(name for name in CPU_COLUMNS if name in columns)]
    return next((name for name in found if len(trace.series(name))), None)


def name_of(column: str) -> str:
    """A column in words.

    >>> name_of("gpu1_utilization"), name_of("cpu_percent_of_usable")
    ('GPU 1', 'CPU of this process')
    """
    device, _, _ = column.partition("_")
    if device.startswith("gpu") and device[3:].isdecimal():
        return f"GPU {device[3:]}"
    return {
        "cpu_percent_of_usable": "CPU of this process",
        "cpu_percent": "CPU of the machine",
    }.get(column, column.replace("_", " "))


def _busy_label(column: str) -> str:
    if column.startswith("gpu"):
        return "% of time a kernel ran"
    return "% of the usable CPUs" if column == "cpu_percent_of_usable" else "%"


def _why_nothing(trace: ResourceTrace, *topics: str) -> str:
    for topic in (*topics, "monitor", "gpu", *CPU_COLUMNS):
        if topic in trace.notes:
            return trace.notes[topic]
    return "the monitor has no reading yet"


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    return series.index.to_numpy(dtype=float), series.to_numpy(dtype=float)


def _mark_teeth(ax: Axes, times: np.ndarray, values: np.ndarray, period_s: float) -> None:
    """Shade every second period, each beginning where the curve rises most."""
    if (times[-1] - times[0]) / period_s > MOST_TEETH:
        return
    phase = ((times - times[0]) / period_s * PHASE_BINS).astype(int) % PHASE_BINS
    means = np.array([values[phase == n].mean() for n in np.unique(phase)])
    rise = np.unique(phase)[np.argmax(means - np.roll(means, 1))]
    edge = times[0] + rise / PHASE_BINS * period_s - period_s
    _, soft = inks(ax)
    for number in range(int((times[-1] - edge) / period_s) + 1):
        begin = edge + number * period_s
        if number % 2 == 0:
            ax.axvspan(begin, begin + period_s, color=soft, alpha=0.13, linewidth=0)
        if times[0] <= begin <= times[-1]:
            ax.axvline(begin, color=soft, linewidth=0.8, linestyle=":")


def _memory_title(trace: ResourceTrace, after_s: float) -> str:
    trend = trace.trend("memory_bytes", after_s=after_s)
    if trend.verdict in ("growing", "shrinking") and trend.slope_per_s is not None:
        return f"Memory: {trend.verdict} by {format_bytes(abs(trend.slope_per_s))} a second"
    return f"Memory: {trend.verdict}" if trend.verdict != "unknown" else "Memory"
