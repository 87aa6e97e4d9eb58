"""Whether NVML's utilisation is the share of time in which the GPU is known to be busy."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.plan import NotAvailable, Plan, Work
from dataloading.monitoring import monitor_resources
from dataloading.nvml import Nvml

DUTIES = (0.25, 0.5, 0.75)
PERIODS_S = (1.0, 0.02)  # of bursts, as of a starved GPU, and of a usual train step
LOADS = ((1.0, 1.0), *((period, duty) for period in PERIODS_S for duty in DUTIES))
SETTLING_S = 1.5  # the driver's first readings still hold what was before
POLL_S = 0.2
QUICK = 10  # times as fast, in a dry run
WORK_UNIT_S = 0.001  # short beside a period, so that the shares are kept


def measure(plan: Plan, figures: dict[str, Any]) -> None:
    """Keep the device busy for known shares of the time, and read what the monitor says.

    Args:
        plan: Where, and how long.
        figures: Filled as the measuring goes on.
    """
    rows: list[dict[str, Any]] = figures.setdefault("loads", [])
    work = Work(plan, WORK_UNIT_S)
    for period_s, duty in LOADS:
        quick_s = period_s / QUICK if plan.dry_run else period_s
        rows.append(one_load(plan, work, quick_s, duty, plan.seconds / len(LOADS)))


def busy_column(plan: Plan) -> str:
    """Where the monitor keeps the device's busy share; on a CPU that of the train step."""
    return "gpu0_utilization" if plan.device.type == "cuda" else "train_step_percent"


def one_load(
    plan: Plan, work: Work, period_s: float, duty: float, seconds: float
) -> dict[str, Any]:
    """Run one duty cycle under the monitor."""
    settling_s = min(SETTLING_S, seconds / 4)
    with (
        polled_utilization(plan) as polled,
        monitor_resources(interval_s=0.1 if plan.dry_run else POLL_S, workers=False) as trace,
    ):
        busy_share = keep_busy(work, period_s, duty, seconds)
    column = busy_column(plan)
    try:
        series = trace.series(column, after_s=settling_s)
    except KeyError:
        raise NotAvailable(f"{column}: {trace.why_missing(column)}") from None
    whole_s = settling_s + max(1, (seconds - settling_s) // period_s) * period_s
    series = series[series.index < whole_s]
    late = [percent for since_s, percent in polled if settling_s <= since_s < whole_s]
    read = float(series.mean()) / 100 if len(series) else None
    return {
        "period_s": period_s,
        "asked_share": duty,
        "busy_share": busy_share,
        "read_share": read,
        "error": None if read is None else read - busy_share,
        "source": trace.gpu_source or column,
        "readings": len(series),
        "spacing_s": float(np.median(np.diff(series.index))) if len(series) > 1 else None,
        "polled_share": statistics.fmean(late) / 100 if late else None,
    }


def keep_busy(work: Work, period_s: float, duty: float, seconds: float) -> float:
    """Alternate work and rest; returns the share of the time that was work."""
    begun = time.perf_counter()
    busy_s = 0.0
    turn = 0
    while (now := time.perf_counter()) - begun < seconds:
        until = begun + (turn + duty) * period_s
        while time.perf_counter() < until:
            work.wait()
        busy_s += time.perf_counter() - now
        turn += 1
        time.sleep(max(0.0, begun + turn * period_s - time.perf_counter()))
    return busy_s / (time.perf_counter() - begun)


@contextlib.contextmanager
def polled_utilization(plan: Plan) -> Iterator[list[tuple[float, float]]]:
    """Ask the driver for its utilisation rate again and again: (seconds since the start, percent)."""
    readings: list[tuple[float, float]] = []
    stop = threading.Event()
    begun = time.perf_counter()
    with Nvml() as nvml:

        def poll() -> None:
            while not stop.wait(POLL_S):
                percent = nvml.devices[0].utilization().value
                if percent is not None:
                    readings.append((time.perf_counter() - begun, percent))

        if plan.device.type != "cuda" or not nvml.devices:
            yield readings
            return
        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            stop.set()
            thread.join()
