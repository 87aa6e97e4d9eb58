"""Processes, patterns, trends and the background sampler."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dataloading import monitoring, processes
from dataloading.monitoring import (
    ResourceMonitor,
    Sampler,
    classify_pattern,
    classify_trend,
    monitor_resources,
)
from dataloading.patterns import MIN_PERIODS, MIN_READINGS, even_bins
from dataloading.processes import (
    ProcessMemory,
    ProcessTree,
    child_pids,
    cpu_percent_of_usable,
    disk_read_bytes,
    list_children,
    parse_pressure,
    pressure_stall_s,
    read_memory,
    role_of,
    sum_memory,
    summed_increase,
    tree_memory,
)
from dataloading.trace import Columns, ResourceTrace
from dataloading.train_steps import BusyMeter, simulated_train_step

MB = 10**6
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class FakeProcess:
    """A psutil.Process whose answers are given; an exception is raised, None is a missing method."""

    def __init__(self, pid: int = 1, rss: Any = 0, **answers: Any) -> None:
        self.pid = pid
        memory = rss if isinstance(rss, Exception) else SimpleNamespace(rss=rss)
        self.answers = {"memory_info": memory, "children": [], "status": "running", **answers}

    def __getattr__(self, name: str) -> Any:
        answer = self.__dict__["answers"].get(name)
        if answer is None:
            raise AttributeError(name)

        def call(**_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


# ---- the cases -------------------------------------------------------------------------------


def test_a_16_1_a_child_that_is_gone_counts_nothing() -> None:
    gone = FakeProcess(2, psutil.NoSuchProcess(2))
    parent = FakeProcess(1, 100 * MB, children=[gone, FakeProcess(3, 50 * MB)])
    tree = tree_memory(parent)
    assert tree.memory_bytes == 150 * MB
    assert not tree.partial


def test_a_16_2_children_denied_is_partial() -> None:
    parent = FakeProcess(1, 100 * MB, children=psutil.AccessDenied(1))
    tree = tree_memory(parent)
    assert (tree.memory_bytes, tree.partial) == (100 * MB, True)
    assert "permission denied" in str(tree.note)


def test_a_16_5_short_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.1 s or more"):
        monitor_resources(interval_s=0.005)
    assert cpu_percent_of_usable(0.02, 0.005, cpus=4) is None


def test_a_16_5_cpu_use_is_a_share_of_the_usable_cpus() -> None:
    assert cpu_percent_of_usable(3.8, 1.0, cpus=4) == pytest.approx(95.0)
    assert cpu_percent_of_usable(0.38, 0.1, cpus=4) == pytest.approx(95.0)


def test_a_16_6_no_io_counters() -> None:
    assert disk_read_bytes(FakeProcess(1, MB)) is None


def test_a_16_7_detailed_call_denied() -> None:
    memory = read_memory(FakeProcess(1, 200 * MB, memory_full_info=PermissionError(13, "no")))
    assert (memory.memory_bytes, memory.label) == (200 * MB, "resident")
    assert "permission denied" in str(memory.note)


def test_a_16_8_all_counters_zero() -> None:
    memory = read_memory(FakeProcess(1, 0, status="?"))
    assert (memory.rss_bytes, memory.pss_bytes, memory.uss_bytes) == (None, None, None)
    assert memory.memory_bytes is None
    assert "unreliable" in str(memory.note)
    assert tree_memory(FakeProcess(1, 0, status="?")).memory_bytes is None


# ---- processes -------------------------------------------------------------------------------


def test_pss_is_preferred_then_uss_then_rss() -> None:
    full = SimpleNamespace(rss=30, pss=20, uss=10)
    assert read_memory(FakeProcess(1, 30, memory_full_info=full)).memory_bytes == 20
    no_pss = SimpleNamespace(rss=30, uss=10)  # macOS, Windows
    memory = read_memory(FakeProcess(1, 30, memory_full_info=no_pss))
    assert (memory.memory_bytes, memory.label, memory.pss_bytes) == (10, "uss", None)
    assert read_memory(FakeProcess(1, 30, memory_footprint=full)).label == "pss"  # psutil 8
    assert read_memory(FakeProcess(1, 30), detailed=False).label == "resident"


def test_mixed_figures_are_labelled() -> None:
    tree = sum_memory([ProcessMemory(1, 30, 20, 10), ProcessMemory(2, 5)])
    assert (tree.memory_bytes, tree.label) == (25, "pss + resident")


def test_a_child_that_refuses_makes_the_sum_partial() -> None:
    parent = FakeProcess(1, 100, children=[FakeProcess(7, psutil.AccessDenied(7))])
    tree = tree_memory(parent)
    assert (tree.memory_bytes, tree.partial) == (100, True)
    assert "process 7" in str(tree.note)


def test_a_zombie_holds_nothing() -> None:
    zombie = FakeProcess(2, 0, status=psutil.STATUS_ZOMBIE)
    assert not tree_memory(FakeProcess(1, 100, children=[zombie])).partial


PYTHON = ["python", "train.py"]
SPAWN = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(...)"]
SERVER = ["python", "-c", "from multiprocessing.forkserver import main; main(...)"]
TRACKER = ["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"]


@pytest.mark.parametrize(
    ("name", "cmdline", "parent", "role"),
    [
        ("python", PYTHON, PYTHON, "worker"),  # fork
        ("pt_data_worker", PYTHON, PYTHON, "worker"),
        ("python", SPAWN, PYTHON, "worker"),
        ("python.exe", ["python.exe", "--multiprocessing-fork"], PYTHON, "worker"),
        ("python", SERVER, PYTHON, "helper"),
        ("python", SERVER, SERVER, "worker"),
        ("python", TRACKER, PYTHON, "helper"),
        ("ffmpeg", ["ffmpeg", "-i", "film"], PYTHON, "helper"),
        ("python", [], PYTHON, "worker"),  # it refuses to tell
    ],
)
def test_roles(name: str, cmdline: list[str], parent: list[str], role: str) -> None:
    assert role_of(name, cmdline, PYTHON, parent) == role


def test_a_process_between_fork_and_exec_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    child = FakeProcess(2, MB, name="python", cmdline=PYTHON, ppid=1)
    main = FakeProcess(1, MB, cmdline=PYTHON, children=[child])
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    monkeypatch.setattr(psutil, "Process", lambda pid: main)
    for first, later, role in (
        (PYTHON, TRACKER, "helper"),
        ([], TRACKER, "helper"),
        (PYTHON, PYTHON, "worker"),
    ):
        tree = ProcessTree(main)
        child.answers["cmdline"] = first
        tree.refresh()
        assert tree.roles == {1: "main", 2: "helper"}  # not decided yet
        child.answers["cmdline"] = later
        tree.refresh()
        assert tree.roles[2] == role
        child.answers["cmdline"] = ["renamed"]
        tree.refresh()
        assert tree.roles[2] == role


def test_a_program_started_by_a_spawned_worker_is_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = FakeProcess(2, MB, name="python", cmdline=SPAWN, ppid=1)
    program = FakeProcess(3, MB, name="python", cmdline=SPAWN, ppid=2)  # before its exec
    main = FakeProcess(1, MB, cmdline=PYTHON, children=[worker, program])
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    monkeypatch.setattr(psutil, "Process", lambda pid: {1: main, 2: worker}[pid])
    tree = ProcessTree(main)
    tree.refresh()
    assert tree.roles == {1: "main", 2: "worker", 3: "helper"}
    program.answers["cmdline"] = ["ldconfig", "-p"]
    tree.refresh()
    assert tree.roles == {1: "main", 2: "worker", 3: "helper"}


def test_a_reused_number_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = FakeProcess(1, MB, cmdline=PYTHON)
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    monkeypatch.setattr(psutil, "Process", lambda pid: main)
    tree = ProcessTree(main)
    for name, cmdline, role in (("python", SPAWN, "worker"), ("ffmpeg", ["ffmpeg"], "helper")):
        main.answers["children"] = [FakeProcess(2, MB, name=name, cmdline=cmdline, ppid=1)]
        tree.refresh()
        assert tree.roles[2] == role
        main.answers["children"] = []
        tree.refresh()
        assert tree.roles == {1: "main"}


@linux_only
def test_child_pids_agree_with_psutil() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while len(child_pids(child.pid) or []) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        found = child_pids(os.getpid()) or []
        known, note = list_children(psutil.Process())
        assert note is None
        assert sorted(found) == sorted(process.pid for process in known)
        assert child.pid in found
        assert len(found) >= 2  # the grandchild too
    finally:
        child.communicate(b"\n", timeout=20)
    assert child_pids(child.pid) is None  # ended
    assert child_pids(1, proc="/nowhere") is None


def test_rates_leave_out_processes_seen_once() -> None:
    assert summed_increase({1: 10.0, 2: 5.0}, {1: 11.0, 3: 90.0}) == 1.0
    assert summed_increase({1: 10.0}, {2: 5.0}) is None
    assert summed_increase({1: 10.0}, {1: 4.0}) == 0.0  # another process with the same number


def test_pressure_text(tmp_path: Path) -> None:
    text = "some avg10=2.05 avg60=0.97 avg300=0.29 total=2239532\nfull avg10=0 total=7\n"
    assert parse_pressure(text) == 2.239532
    assert parse_pressure("") is None
    (tmp_path / "io").write_text(text)
    assert pressure_stall_s("io", root=str(tmp_path)) == 2.239532
    assert pressure_stall_s("cpu", root=str(tmp_path)) is None


# ---- patterns: synthetic curves by seed ------------------------------------------------------

SUBSTEPS = 20  # a reading is the mean of this many moments, as NVML's own windows are


def readings(moments: np.ndarray) -> np.ndarray:
    return moments.reshape(-1, SUBSTEPS).mean(axis=1)


def sawtooth(rng: np.random.Generator, *, cycles: tuple[float, float] = (11, 30)) -> np.ndarray:
    """Period 3.5 to 20 readings, duty 15-85 %, up to 12 % jitter of each period, noise."""
    period, duty, jitter = rng.uniform(3.5, 20), rng.uniform(0.15, 0.85), rng.uniform(0, 0.12)
    count = int(period * rng.uniform(*cycles))
    moments = np.full(count * SUBSTEPS, rng.uniform(0, 0.25))
    top, start = rng.uniform(0.6, 1), -rng.uniform(0, period)
    while start < count:
        this = max(period * (1 + jitter * rng.standard_normal()), period * 0.3)
        stop = start + duty * this
        moments[int(max(start, 0) * SUBSTEPS) : int(max(stop, 0) * SUBSTEPS)] = top
        start += this
    noisy = readings(moments) + rng.normal(0, rng.uniform(0, 0.12), count)
    return 100 * np.clip(noisy, 0, 1)


def short_sawtooth(rng: np.random.Generator) -> np.ndarray:
    return sawtooth(rng, cycles=(3, 8.5))


def level(low: float, high: float, noise: float) -> Any:
    def curve(rng: np.random.Generator) -> np.ndarray:
        count = rng.integers(40, 400)
        values = rng.uniform(low, high) + rng.normal(0, rng.uniform(0, noise), count)
        return 100 * np.clip(values, 0, 1)

    return curve


def bursts(rng: np.random.Generator) -> np.ndarray:
    """On and off for random (exponential) times: stalls without a rhythm."""
    count, on, start = int(rng.integers(60, 400)), True, 0.0
    means = {True: rng.uniform(1, 6), False: rng.uniform(2, 8)}
    moments = np.zeros(count * SUBSTEPS)
    while start < count:
        stop = start + rng.exponential(means[on])
        moments[int(start * SUBSTEPS) : int(stop * SUBSTEPS)] = on
        start, on = stop, not on
    return 100 * readings(moments)


def white_noise(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 100, rng.integers(40, 400))


def slow_noise(rng: np.random.Generator) -> np.ndarray:
    """First-order autoregressive noise: it wanders, but has no period."""
    count, memory = int(rng.integers(60, 400)), rng.uniform(0.3, 0.95)
    values = np.zeros(count)
    for i in range(1, count):
        values[i] = memory * values[i - 1] + rng.standard_normal()
    return np.clip(50 + 25 * values / values.std(), 0, 100)


def count_names(curve: Any, seeds: int = 200) -> Counter[str]:
    return Counter(
        str(classify_pattern(curve(np.random.default_rng(seed)), 0.2)) for seed in range(seeds)
    )


@pytest.mark.parametrize(
    ("curve", "name", "least"),
    [
        (sawtooth, "sawtooth", 0.96),
        (level(0.8, 1.0, 0.07), "steady", 0.99),
        (level(0.1, 0.6, 0.2), "starved", 0.98),
        (level(0.0, 0.02, 0.01), "idle", 0.99),
        (bursts, "starved", 0.90),
        (white_noise, "starved", 0.97),
        (slow_noise, "starved", 0.94),
        (short_sawtooth, "unknown", 0.94),
    ],
)
def test_patterns_of_synthetic_curves(curve: Any, name: str, least: float) -> None:
    counts = count_names(curve)
    assert counts[name] >= least * counts.total(), counts
    if name != "sawtooth":
        assert counts["sawtooth"] <= 0.01 * counts.total(), counts


def test_period_of_a_sawtooth() -> None:
    errors = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        period, duty = rng.uniform(3.5, 20), rng.uniform(0.1, 0.9)
        moments = np.arange(int(period * 15) * SUBSTEPS) / SUBSTEPS
        values = 100 * readings((moments % period < duty * period).astype(float))
        pattern = classify_pattern(values + rng.normal(0, 8, len(values)), 0.2)
        if pattern == "sawtooth":
            assert pattern.period_s is not None
            errors.append(abs(pattern.period_s / (period * 0.2) - 1))
    assert len(errors) >= 95
    assert np.median(errors) < 0.02
    assert np.mean(np.array(errors) > 0.1) < 0.05


def test_too_short_says_so() -> None:
    square = [100, 100, 100, 0, 0, 0]
    pattern = classify_pattern(square * (MIN_PERIODS - 4), 0.1)
    assert pattern == "unknown"
    assert f"{MIN_PERIODS} are needed" in pattern.evidence["reason"]
    assert classify_pattern(square * (MIN_PERIODS + 1), 0.1) == "sawtooth"
    assert classify_pattern([50] * (MIN_READINGS - 1), 0.1).evidence["reason"].startswith("9 ")
    assert classify_pattern([], 0.1) == "unknown"


@pytest.mark.parametrize(("value", "name"), [(100, "steady"), (0, "idle"), (45, "starved")])
def test_constant_curves(value: float, name: str) -> None:
    assert classify_pattern([value] * 50, 0.2) == name
    assert classify_pattern([value] * 50 + [np.nan] * 5, 0.2) == name


def test_gaps_and_uneven_times() -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 30, 300))
    busy = 100.0 * (times % 1.5 < 0.7)
    busy[rng.choice(300, 15, replace=False)] = np.nan
    pattern = classify_pattern(busy, 0.15, times_s=times)
    assert pattern == "sawtooth"
    assert pattern.period_s == pytest.approx(1.5, rel=0.05)
    sparse = classify_pattern(busy, 0.01, times_s=times)  # far more bins than readings
    assert sparse == "unknown"
    assert "no reading" in sparse.evidence["reason"]


def test_idle_start_and_end_are_left_out() -> None:
    curve = [0] * 40 + [95, 97] * 20 + [0] * 40
    assert classify_pattern(curve, 0.2) == "steady"
    assert classify_pattern(curve, 0.2).evidence["bins"] == 40


def test_uneven_but_busy_is_unknown() -> None:
    rng = np.random.default_rng(1)
    curve = np.where(rng.random(200) < 0.15, 20, 100)
    assert classify_pattern(curve, 0.2) == "unknown"


def test_pattern_is_its_name() -> None:
    one = classify_pattern([100] * 20, 0.2)
    assert one == "steady"
    assert one == classify_pattern([100] * 30, 0.2)
    assert one != "idle"
    assert f"{one}" == "steady"
    assert {one: 1}["steady"] == 1  # type: ignore[index]
    assert repr(one) == "Pattern: steady (mean 100, within 100 to 100)"
    assert json.loads(json.dumps(one.to_dict()))["name"] == "steady"


def test_pattern_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="above 0"):
        classify_pattern([1, 2], 0)
    with pytest.raises(ValueError, match="2 values but 1 times"):
        even_bins([1, 2], 1.0, [0])


# ---- trends ----------------------------------------------------------------------------------


def trend_of(curve: np.ndarray, noise: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return classify_trend(np.arange(len(curve)) * 1.0, curve + rng.normal(0, noise, len(curve)))


def test_trends_of_synthetic_levels() -> None:
    flat, rise = np.full(30, 1000.0), 1000 + 4.0 * np.arange(30)
    names = {"flat": flat, "growing": rise, "shrinking": rise[::-1]}
    for name, curve in names.items():
        verdicts = Counter(str(trend_of(curve, 10, seed)) for seed in range(100))
        assert verdicts[name] >= 98, verdicts


def test_trend_of_a_leak() -> None:
    leak = 500e6 + 2e6 * np.arange(20)
    leak[7] = 3e9  # one wild reading
    trend = classify_trend(range(20), leak)
    assert trend == "growing"
    assert trend.slope_per_s == pytest.approx(2e6)
    assert trend.interval is not None
    assert trend.interval[0] <= 2e6 <= trend.interval[1]
    assert trend.points == 20


def test_trend_without_enough() -> None:
    assert classify_trend([0, 1, 2], [1, 2, 3]) == "unknown"
    assert classify_trend([5] * 9, range(9)).evidence["reason"] == "all readings at one moment"
    assert classify_trend(range(9), [np.nan] * 9).points == 0
    assert classify_trend(range(9), [0] * 9) == "flat"
    with pytest.raises(ValueError, match="values but"):
        classify_trend([0, 1], [1])


def test_trend_of_a_long_record() -> None:
    times = np.arange(5000) * 0.2
    assert classify_trend(times, 1e9 + 1e6 * times) == "growing"


# ---- the trace -------------------------------------------------------------------------------


def test_columns_come_late_and_stay_away() -> None:
    table = Columns()
    table.append(0.0, {"a": 1})
    table.append(0.5, {"b": 2, "a": None})
    frame = table.frame()
    assert frame.index.name == "time_s"
    assert frame["a"].tolist()[0] == 1
    assert np.isnan(frame["a"].tolist()[1])
    assert np.isnan(frame["b"].tolist()[0])


def made_trace() -> ResourceTrace:
    trace = ResourceTrace(0.2, cpus=4)
    for i in range(100):
        busy = 100.0 * (i % 5 < 2)
        row = {"gpu0_utilization": busy, "gpu10_power_w": 1.0, "gpu1_power_w": 1.0}
        trace.rows.append(i * 0.2, row | ({"memory_bytes": 1e9 + 1e7 * i} if i % 5 == 0 else {}))
    trace.gpu_source, trace.memory_label = "nvml", "pss"
    trace.notes["pressure_io_percent"] = "<none>"
    return trace


def test_trace_answers() -> None:
    trace = made_trace()
    assert list(trace.frame) == [
        "gpu0_utilization",
        "gpu1_power_w",
        "gpu10_power_w",
        "memory_bytes",
    ]
    pattern = trace.pattern("gpu0_utilization")
    assert pattern == "sawtooth"
    assert pattern.period_s == pytest.approx(1.0, rel=0.05)
    assert trace.trend("memory_bytes") == "growing"
    assert trace.trend("memory_bytes").points == 20
    assert trace.trend("memory_bytes", after_s=10.0).points == 10
    summary = trace.summary()
    assert list(summary.columns) == ["mean", "median", "min", "max", "p95", "readings"]
    assert summary.loc["gpu0_utilization", "mean"] == pytest.approx(40)
    assert summary.loc["memory_bytes", "readings"] == 20
    assert repr(trace) == (
        "ResourceTrace: 19.8 s, 100 readings, GPU0 40 % (nvml), memory up to 1.8 GiB (pss)"
    )


def test_what_was_not_read_has_a_reason() -> None:
    trace = made_trace()
    assert trace.pattern("gpu3_utilization") == "unknown"
    assert trace.trend("pressure_io_percent").evidence["reason"] == "<none>"
    with pytest.raises(KeyError, match=r"pressure_io_percent.*<none>"):
        trace.series("pressure_io_percent")
    with pytest.raises(ValueError, match="not in percent"):
        trace.pattern("memory_bytes")


def test_trace_is_kept_and_shown() -> None:
    trace = made_trace()
    record = json.loads(json.dumps(trace.to_dict()))
    assert record["frame"][1]["memory_bytes"] is None
    assert record["frame"][0]["time_s"] == 0
    again = pickle.loads(pickle.dumps(trace))
    assert repr(again) == repr(trace)
    page = trace._repr_html_()
    assert "&lt;none&gt;" in page
    assert "<none>" not in page


def test_a_trace_without_readings() -> None:
    trace = monitor_resources(gpu=False).trace
    assert repr(trace) == "ResourceTrace: 0 µs, 0 readings"
    assert trace.frame.empty
    assert list(trace.processes) == ["time_s", "pid", "role", "rss_bytes", "pss_bytes", "uss_bytes"]
    assert trace.gpu_samples.empty
    assert trace.pattern() == "unknown"
    assert trace.summary().empty


# ---- the sampler with a fake clock -----------------------------------------------------------


def sampled(monkeypatch: pytest.MonkeyPatch, times: list[float], **reads: Any) -> ResourceTrace:
    """Rows at the given times (the first is the start), with functions of `monitoring` replaced."""
    for name, values in reads.items():
        answers = iter(values)
        monkeypatch.setattr(monitoring, name, lambda *_, answers=answers, **__: next(answers))
    trace = ResourceTrace(0.2, cpus=4)
    clock = iter([times[0], *times])
    sampler = Sampler(trace, ProcessTree(workers=False), clock=lambda: next(clock))
    for _ in times:
        sampler.sample(last=True)  # last: whatever was dear before, read it now
    return trace


def test_rates_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sampled(
        monkeypatch,
        [10.0, 11.0, 11.005, 11.5],
        cpu_seconds=[1.0, 4.8, 4.9, 4.8],
        disk_read_bytes=[0, 500, 500, 1000],
        machine_cpu_seconds=[(0, 0), (2, 8), (2, 8), (2, 10)],
    )
    frame = trace.frame
    assert frame.index.tolist() == pytest.approx([0, 1, 1.005, 1.5])
    expected = {
        "cpu_percent_of_usable": [np.nan, 95, np.nan, 0],
        "cpu_percent": [np.nan, 25, np.nan, 0],
        "disk_read_bytes_per_s": [np.nan, 500, np.nan, 1000],
    }
    for column, values in expected.items():
        assert frame[column].tolist() == pytest.approx(values, nan_ok=True), column


def test_what_the_system_does_not_tell_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = [None] * 8
    trace = sampled(
        monkeypatch,
        [0.0, 1.0],
        cpu_seconds=nothing,
        disk_read_bytes=nothing,
        machine_cpu_seconds=nothing,
        open_files=nothing,
        shared_memory_used_bytes=nothing,
        pressure_stall_s=nothing,
        read_memory=[ProcessMemory(os.getpid(), note="memory: permission denied")] * 4,
    )
    assert trace.frame.columns.empty  # nothing is 0
    assert len(trace.frame) == 2
    assert "permission denied" in trace.notes["memory_bytes"]
    for column in (
        "cpu_percent_of_usable",
        "cpu_percent",
        "disk_read_bytes_per_s",
        "open_files",
        "shared_memory_used_bytes",
        "pressure_io_percent",
        "main_rss_bytes",
        "main_pss_bytes",
    ):
        assert trace.why_missing(column) != "no such column here", column


def test_dear_readings_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = iter([0.0, 0.01, 0.01, 0.01])
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    budget = monitoring.Budget(share=0.005, every_s=1.0)
    assert budget.due(0.0)
    with budget.spent(0.0):
        pass  # cost 10 ms: 0.5 % of 2 s
    assert not budget.due(1.9)
    assert budget.due(2.0)
    with budget.spent(2.0):
        pass  # cost nothing
    assert not budget.due(2.9)
    assert budget.due(3.0)


def test_many_workers_are_read_more_rarely() -> None:
    tree = ProcessTree(workers=False)
    sampler = Sampler(ResourceTrace(0.2, cpus=4), tree)
    tree.children = dict.fromkeys(range(monitoring.MANY_WORKERS + 1))
    sampler._find_processes(0.0, {})
    assert sampler._details_budget.every_s == monitoring.DETAILS_MANY_EVERY_S
    tree.children.popitem()
    sampler._find_processes(0.0, {})
    assert sampler._details_budget.every_s == monitoring.DETAILS_EVERY_S


def test_a_worker_that_dies_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    main, dying = psutil.Process(), FakeProcess(99_999_999, psutil.NoSuchProcess(1))
    tree = ProcessTree(main)
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    monkeypatch.setattr(processes, "list_children", lambda process: ([dying], None))
    trace = ResourceTrace(0.2, cpus=4)
    Sampler(trace, tree).sample()
    row = trace.frame.iloc[0]
    assert row["workers"] == 0
    assert row["workers_rss_bytes"] == 0
    assert row["memory_bytes"] > 0
    assert "memory_bytes" not in trace.notes


def test_a_worker_that_refuses_leaves_its_sum_out(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = FakeProcess(99_999_999, 5 * MB, memory_full_info=psutil.AccessDenied(1))
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    monkeypatch.setattr(processes, "list_children", lambda process: ([secret], None))
    trace = ResourceTrace(0.2, cpus=4)
    sampler = Sampler(trace, ProcessTree())
    sampler.sample()
    sampler.sample(last=True)
    row = trace.frame.iloc[-1]
    assert (row["workers"], row["workers_rss_bytes"]) == (1, 5 * MB)
    assert np.isnan(row["workers_uss_bytes"])
    assert "permission denied" in trace.notes["workers_uss_bytes"]
    assert "resident" in str(trace.memory_label)


# ---- the monitor, live -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name == "resource-monitor"]
    assert left == []


def test_frame_grows_while_it_runs_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with monitor_resources(interval_s=0.1) as trace:
        assert not trace.complete
        deadline = time.monotonic() + 20
        while len(trace.frame) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        rows = len(trace.frame)
        assert rows >= 3
        assert repr(trace).startswith("ResourceTrace")
    assert trace.complete
    assert len(trace.frame) > rows  # the last row
    frame = trace.frame
    assert frame.index.is_monotonic_increasing
    assert frame["cpu_percent_of_usable"].dropna().between(0, 100).all()
    assert frame["main_rss_bytes"].min() > 0
    assert frame["memory_bytes"].iloc[[0, -1]].notna().all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_thread_ends_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), monitor_resources(interval_s=0.1, gpu=False) as trace:
        raise error
    assert trace.complete
    assert len(trace.frame) >= 1


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to itself")
def test_a_real_interrupt_ends_the_thread() -> None:
    def interrupted_after_the_start() -> None:
        with monitor:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    monitor = monitor_resources(interval_s=0.1, gpu=False)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_the_start()
    assert monitor.trace.complete


def test_two_monitors_at_once() -> None:
    with monitor_resources(interval_s=0.1) as one:
        with monitor_resources(interval_s=0.1) as two:
            time.sleep(0.3)
        assert two.complete
        assert not one.complete
        rows = len(one.frame)
        time.sleep(0.3)
        assert len(one.frame) > rows
    assert len(two.frame) >= 2


def test_start_and_stop_without_a_block() -> None:
    monitor = monitor_resources(interval_s=0.1, gpu=False)
    trace = monitor.start()
    with pytest.raises(RuntimeError, match="used before"):
        monitor.start()
    assert monitor.stop() is trace
    assert monitor.stop() is trace
    assert trace.complete


def test_a_failing_sampler_is_noted_and_not_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitoring, "shared_memory_used_bytes", lambda: 1 / 0)
    with monitor_resources(interval_s=0.1, gpu=False) as trace:
        time.sleep(0.05)
    assert "ZeroDivisionError" in trace.notes["monitor"]
    assert trace.complete
    assert capfd.readouterr() == ("", "")


def test_nvml_is_closed_when_the_thread_can_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    nvml = SimpleNamespace(
        __enter__=lambda: None,
        close=lambda: closed.append(True),
        status="ok",
        reason=None,
        devices=[],
    )
    monitor = ResourceMonitor(interval_s=0.1, nvml=nvml)  # type: ignore[arg-type]

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        monitor.start()
    assert closed == [True]


@linux_only
def test_no_file_is_left_open() -> None:
    with monitor_resources(interval_s=0.1):
        pass  # what is imported or cached on first use
    before = psutil.Process().num_fds()
    for _ in range(5):
        with monitor_resources(interval_s=0.1):
            pass
    assert psutil.Process().num_fds() <= before


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 0.099, float("nan"), float("inf")])
def test_bad_intervals(interval_s: float) -> None:
    with pytest.raises(ValueError, match="interval_s"):
        monitor_resources(interval_s=interval_s)


def test_children_denied_still_watches_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "children", denied)
    monkeypatch.setattr(processes, "child_pids", lambda pid: None)
    with monitor_resources(interval_s=0.1, gpu=False) as trace:
        time.sleep(0.25)
    assert "workers" not in trace.frame.columns
    assert "permission denied" in trace.notes["workers"]
    assert "partial" in trace.notes["memory_bytes"]
    assert trace.frame["memory_bytes"].max() > 0


def test_without_workers_no_child_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("children were listed")

    monkeypatch.setattr(processes, "child_pids", forbidden)
    monkeypatch.setattr(processes, "list_children", forbidden)
    with monitor_resources(interval_s=0.1, gpu=False, workers=False) as trace:
        pass
    assert "monitor" not in trace.notes
    assert "workers" not in trace.frame.columns


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while, so that workers live as long as the test looks at them."""

    def __len__(self) -> int:
        return 10**6  # the loader never ends before the test has seen enough

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.zeros(8)


def watch_workers(context: str, stop_when: Any, seconds: float = 120) -> ResourceTrace:
    """Watch a loader with two workers until the trace shows what is wanted."""
    loader = DataLoader(Slow(), batch_size=4, num_workers=2, multiprocessing_context=context)
    with monitor_resources(interval_s=0.1, gpu=False) as trace:
        deadline = time.monotonic() + seconds
        iterator = iter(loader)
        try:
            for _ in iterator:
                if stop_when(trace, iterator) or time.monotonic() > deadline:
                    break
        finally:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            del iterator
    return trace


def uss_seen(trace: ResourceTrace, iterator: Any = None) -> bool:
    """Whether the memory of both workers was read (one may be there before the other)."""
    frame = trace.frame.reindex(columns=["workers", "workers_uss_bytes"])
    return bool(((frame["workers"] == 2) & (frame["workers_uss_bytes"] > 0)).any())


def workers_seen(trace: ResourceTrace, iterator: Any = None) -> bool:
    frame = trace.frame
    return "workers" in frame and bool((frame["workers"] > 0).any())


def test_workers_are_counted_on_every_system() -> None:
    trace = watch_workers("spawn", workers_seen)
    assert trace.frame["workers"].max() in (1, 2)
    assert trace.frame["workers_rss_bytes"].max() > 0


@linux_only
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_are_seen_with_their_memory(context: str) -> None:
    trace = watch_workers(context, uss_seen)
    frame = trace.frame
    assert uss_seen(trace)
    assert frame["workers"].max() == 2  # helpers of multiprocessing aren't counted
    seen = frame[frame["workers_uss_bytes"] > 0]
    assert (seen["workers_uss_bytes"] <= seen["workers_pss_bytes"]).all()
    assert (seen["memory_bytes"] >= seen["main_pss_bytes"] + seen["workers_pss_bytes"]).all()
    assert trace.memory_label == "pss"
    processes_seen = trace.processes
    assert {"main", "worker"} <= set(processes_seen["role"])
    workers = processes_seen[processes_seen["role"] == "worker"]
    by_time = workers.groupby("time_s")["uss_bytes"].sum()
    assert by_time.max() == seen["workers_uss_bytes"].max()


@linux_only
def test_a_worker_killed_while_watched() -> None:
    traces: list[ResourceTrace] = []

    def kill_one(trace: ResourceTrace, iterator: Any) -> bool:
        if uss_seen(trace) and not traces:
            traces.append(trace)
            iterator._workers[0].kill()
        return False

    # PyTorch says RuntimeError, or lets the broken connection through
    with pytest.raises((RuntimeError, OSError)):
        watch_workers("fork", kill_one)
    (trace,) = traces
    assert trace.complete
    assert "monitor" not in trace.notes
    assert "memory_bytes" not in trace.notes  # an ended process isn't a missing reading
    assert trace.frame["workers"].iloc[-1] == 0


# ---- the curve of a simulated accelerator ----------------------------------------------------


def test_a_starved_simulated_accelerator_shows_a_sawtooth_without_a_gpu() -> None:
    train_step = simulated_train_step(0.25)
    with monitor_resources(interval_s=0.1, gpu=False) as trace:
        for _ in range(13):
            time.sleep(0.25)  # waiting for a batch
            train_step(None)
    pattern = trace.pattern("train_step_percent")
    assert pattern == "sawtooth", pattern
    assert pattern.period_s == pytest.approx(0.5, rel=0.2)


def test_a_fed_simulated_accelerator_is_steady() -> None:
    train_step = simulated_train_step(0.25)
    with monitor_resources(interval_s=0.1, gpu=False) as trace:
        for _ in range(8):
            train_step(None)
    assert trace.pattern("train_step_percent") == "steady"


def test_a_step_under_way_counts_as_busy() -> None:
    meter = BusyMeter()
    with meter:
        time.sleep(0.02)
        first = meter.read_s()
        time.sleep(0.02)
        assert meter.read_s() > first >= 0.02
    after = meter.read_s()
    assert after == meter.busy_s >= 0.04


def test_a_step_that_raises_is_busy_no_longer() -> None:
    meter = BusyMeter()
    with pytest.raises(KeyError), meter:
        raise KeyError
    assert meter.read_s() == meter.busy_s
