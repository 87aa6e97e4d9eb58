"""Whether the idle time that `measure_dataloader` reads off CUDA events is what the profiler sees."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.plan import CLASSES, NotAvailable, Plan, Waiting, Work, course_step
from dataloading.timing import measure_dataloader

WAITS = (0.0, 0.5, 1.5, 3.0)  # seconds of waiting for a batch, in train steps
STEP_S = 0.010
WARM_UP_STEPS = 5
STEPS = 80  # enough for a share; the profiler keeps every kernel of them
FEWEST_STEPS = 6
MARK = "benchmark step"  # what each step is called in the trace
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


def measure(plan: Plan, figures: dict[str, Any]) -> None:
    """Time loops that wait more and less with events, and with the profiler at the same time.

    Args:
        plan: Where, and how long.
        figures: Filled as the measuring goes on.
    """
    on_gpu = plan.device.type == "cuda"
    work = Work(plan, STEP_S / 5 if plan.dry_run else STEP_S)
    cnn = course_step(plan)
    steps: dict[str, tuple[Callable[[Any], Any], bool]] = {  # and whether the host awaits it
        "matrix products": (work if on_gpu else work.wait, not on_gpu),
        "small CNN": (cnn, True),
    }
    batch = [
        torch.rand(plan.images, 3, plan.size, plan.size, device=plan.device),
        torch.randint(CLASSES, (plan.images,), device=plan.device),
    ]
    rows: list[dict[str, Any]] = figures.setdefault("loops", [])
    each = plan.seconds / len(steps) / len(WAITS)
    for name, (step, awaited) in steps.items():
        step_s = usual_seconds(plan, step, batch)
        for wait in WAITS:
            row = {"step": name, "wait_s": wait * step_s, "step_s": step_s}
            row["expected_idle_share"] = expected_idle(wait, awaited)
            rows.append(row | one_loop(plan, step, batch, wait * step_s, each))


def usual_seconds(plan: Plan, step: Callable[[Any], Any], batch: Any) -> float:
    """Seconds of a step on the device, warmed up."""
    for _ in range(WARM_UP_STEPS):
        step(batch)
    plan.synchronize()
    started = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step(batch)
    plan.synchronize()
    return (time.perf_counter() - started) / WARM_UP_STEPS


def expected_idle(wait: float, awaited: bool) -> float:
    """Idle share of a device whose steps take 1 and whose batches take `wait`.

    Where the host does not await the step, the next batch is loaded meanwhile.

    >>> expected_idle(1.0, awaited=True), expected_idle(2.0, awaited=False)
    (0.5, 0.5)
    """
    return wait / (1 + wait) if awaited else max(0.0, wait - 1) / max(wait, 1)


def one_loop(
    plan: Plan, step: Callable[[Any], Any], batch: Any, wait_s: float, seconds: float
) -> dict[str, Any]:
    """Run one loop under both; returns the idle shares that they saw."""
    on_gpu = plan.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def marked(one: Any) -> None:
        with record_function(MARK):
            step(one)

    measuring_s = seconds / 2  # the other half is for writing and reading the trace
    with profile(activities=activities) as seen:
        timing = measure_dataloader(
            iter(Waiting(wait_s, batch)),  # an iterator, so that no epoch begins anew
            marked,
            seconds=measuring_s,
            max_steps=FEWEST_STEPS if plan.dry_run else STEPS,
            progress=False,
        )
    busy = busy_intervals(read_trace(seen), on_gpu=on_gpu)
    steps = timing.steps + timing.discarded_steps
    by_profiler = idle_share(busy, steps)
    by_events = timing.wait_share + timing.other_share
    return {
        "clock": timing.clock,
        "steps": timing.steps,
        "events_wait_share": timing.wait_share,
        "events_idle_share": by_events,
        "profiler_idle_share": by_profiler,
        "difference": by_events - by_profiler,
    }


def read_trace(seen: Any) -> list[dict[str, Any]]:
    """The events of a profile, as its trace file has them in every version of PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def busy_intervals(events: Sequence[dict[str, Any]], *, on_gpu: bool) -> list[Interval]:
    """When the device worked, in microseconds: its kernels and copies; on a CPU the marked steps.

    Raises:
        NotAvailable: The profiler saw no work of the device.
    """
    found = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X"
        and (
            event.get("cat") in DEVICE_WORK
            if on_gpu
            else event.get("cat") == "user_annotation" and event.get("name") == MARK
        )
    ]
    if not found:
        raise NotAvailable("the profiler recorded no work of the device")
    return sorted(found)


def idle_share(busy: Sequence[Interval], steps: int) -> float:
    """Share of the time in which the device did nothing, from the end of the first step on.

    The first step is left out, as `measure_dataloader` leaves it out. Steps launch the same work,
    so it is the first of `steps` equal parts of the intervals.

    Args:
        busy: Intervals in the order of their start; they may overlap.
        steps: Steps that they belong to.

    >>> idle_share([(0, 10), (20, 30), (40, 50)], steps=3)
    0.5
    """
    first = math.ceil(len(busy) / steps)
    begun = until = max(end for _, end in busy[:first])
    idle = 0.0
    for start, end in busy[first:]:
        idle += max(0.0, start - until)
        until = max(until, end)
    return idle / (until - begun) if until > begun else 0.0
