"""Counters of a thread, and the files that a worker opens."""

from __future__ import annotations

import builtins
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_workloads as faulty
import numpy as np
import pytest
import workloads
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading import file_opens, thread_counters
from dataloading.faults import burn_cpu
from dataloading.file_opens import ONE_IN, OpenCounter
from dataloading.settings import LoaderSettings
from dataloading.thread_counters import ThreadCounters, read_counters
from dataloading.worker_clock import instrument
from dataloading.worker_costs import RECORD, UNKNOWN, WorkerCosts, extra_costs

NAMES = (
    "run_delay_ns",
    "switches",
    "forced_switches",
    "major_faults",
    "read_calls_bytes",
    "storage_bytes",
    "threads",
)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


# ---- counters of a thread -----------------------------------------------------------------------


def test_a_difference_is_taken_name_by_name_and_never_negative() -> None:
    earlier = ThreadCounters(5, 10, 7, 0, 100, None, 3)
    later = ThreadCounters(9, 8, 7, 2, None, 50, 4)
    assert later.since(earlier) == ThreadCounters(4, 0, 0, 2, None, None, 4)


@linux_only
def test_linux_tells_all_of_them() -> None:
    counters = read_counters()
    assert {name for name in NAMES if getattr(counters, name) is None} == set()


@linux_only
def test_waiting_and_reading_are_counted_for_this_thread_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 2**20)
    others = threading.Thread(target=lambda: (burn_cpu(0.01), path.read_bytes()))
    before = read_counters()
    others.start()
    others.join()
    without = read_counters().since(before)
    path.read_bytes()
    for _ in range(10):
        time.sleep(1e-3)
    seen = read_counters().since(before)
    assert without.read_calls_bytes is not None
    assert without.read_calls_bytes < 2**20
    assert seen.read_calls_bytes is not None
    assert seen.read_calls_bytes >= 2**20
    assert seen.switches is not None
    assert seen.switches >= 10  # each sleep gives the CPU up


@linux_only
def test_threads_of_the_process_are_counted() -> None:
    before = read_counters().threads
    release = threading.Event()
    waiting = [threading.Thread(target=release.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    during = read_counters().threads
    release.set()
    for thread in waiting:
        thread.join()
    assert before is not None
    assert during == before + 3


def test_what_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError("not here")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(thread_counters, "resource", None)
    counters = read_counters()
    monkeypatch.undo()
    assert counters == ThreadCounters()
    assert counters.since(counters) == ThreadCounters()


# ---- what a worker opens ------------------------------------------------------------------------


def opened(counter: OpenCounter, *arguments: Any) -> None:
    counter._on_event("open", arguments)


def counting() -> OpenCounter:
    counter = OpenCounter()
    counter.count = 0
    return counter


def test_in_the_training_process_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "addaudithook", lambda hook: pytest.fail("a hook cannot be undone"))
    counter = OpenCounter()
    counter.begin()
    assert (counter.count, counter.cost_ns) == (None, None)
    opened(counter, "a.txt", "r", os.O_RDONLY)
    assert counter.count is None


def test_files_that_are_read_are_counted(tmp_path: Path) -> None:
    counter = counting()
    for path in (str(tmp_path / "a"), os.fsencode(tmp_path / "b")):
        opened(counter, path, "r", os.O_RDONLY)
        opened(counter, path, None, os.O_RDONLY)
    assert counter.count == 4
    opened(counter, str(tmp_path), "w", os.O_WRONLY | os.O_CREAT)
    opened(counter, str(tmp_path), None, os.O_WRONLY | os.O_APPEND)
    opened(counter, 7, "r", os.O_RDONLY)  # a descriptor that is open already
    opened(counter, "/proc/self/io", "r", os.O_RDONLY)
    counter._on_event("import", ("module",))
    assert counter.count == 4


def test_one_open_in_some_is_measured_by_opening_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    ticks = iter(range(0, 10**6, 250))  # each look at the clock 250 ns after the last one
    monkeypatch.setattr(file_opens.time, "perf_counter_ns", lambda: next(ticks))
    counter = counting()
    for _ in range(2 * ONE_IN):
        opened(counter, str(path), "r", os.O_RDONLY)
    assert len(counter._measured_ns) == 2
    assert counter.cost_ns == 250


def test_a_cost_that_could_not_be_measured_is_none(tmp_path: Path) -> None:
    counter = counting()
    assert (counter.count, counter.cost_ns) == (0, None)
    opened(counter, str(tmp_path / "missing"), "r", os.O_RDONLY)
    assert (counter.count, counter.cost_ns) == (1, None)


@pytest.mark.parametrize("path", ["a\0b", b"\xff\xfe", ""])
def test_odd_paths_do_not_disturb_the_open_itself(path: Any) -> None:
    counter = counting()
    opened(counter, path, "r", os.O_RDONLY)
    assert counter.count == 1


def test_a_counter_travels_without_its_count() -> None:
    counter = counting()
    opened(counter, "a.txt", "r", os.O_RDONLY)
    assert pickle.loads(pickle.dumps(counter)).count is None


@linux_only
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_count_what_their_samples_open(method: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    loader = DataLoader(
        faulty.Opens(path, 3), batch_size=2, num_workers=1, multiprocessing_context=method
    )
    timed, records, _ = instrument(loader, LoaderSettings.of(loader))
    try:
        assert len(list(timed)) == 6
        costs = records.summary()
    finally:
        records.remove()
    assert costs is not None
    assert costs.opens_per_sample == pytest.approx(3.0)  # and not the file that is written
    assert costs.open_share is not None
    assert 0 < costs.open_share < 1
    assert costs.read_bytes_per_sample is not None
    assert costs.read_bytes_per_sample >= 3000


# ---- what the running totals of the records tell ------------------------------------------------


def records(worker: int, batches: int, **per_batch: int) -> np.ndarray:
    """Records of one worker: totals grow by so much from batch to batch."""
    made = np.zeros(batches, dtype=RECORD)
    made["worker"] = worker
    made["ended_ns"] = np.arange(1, batches + 1)
    made["samples"] = 8
    made["fetch_wall_ns"] = 10_000
    made["fetch_cpu_ns"] = 4_000
    made["threads"] = 3
    for name in ("run_delay_ns", "read_calls_bytes", "storage_bytes", "opens", "open_cost_ns"):
        made[name] = UNKNOWN
    for name, step in per_batch.items():
        made[name] = (
            step if name in ("threads", "open_cost_ns") else 5_000 + step * np.arange(batches)
        )
    return made


def test_totals_are_taken_from_record_to_record() -> None:
    found = extra_costs(
        records(
            0,
            40,
            run_delay_ns=2_500,
            process_cpu_ns=9_000,
            read_calls_bytes=800,
            storage_bytes=200,
            opens=16,
            open_cost_ns=62,
            threads=7,
        )
    )
    assert found["run_delay_share"] == pytest.approx(0.25)
    assert found["extra_cpu_share"] == pytest.approx(0.5)  # 9 of 10 µs, less the 4 of the batch
    assert found["read_bytes_per_sample"] == pytest.approx(100)
    assert found["storage_share"] == found["first_storage_share"] == pytest.approx(0.25)
    assert found["opens_per_sample"] == pytest.approx(2)
    assert found["open_share"] == pytest.approx(16 * 62 / 10_000)
    assert found["threads"] == 7


def test_what_no_worker_tells_is_none() -> None:
    found = extra_costs(records(0, 40, threads=UNKNOWN))
    unknown = ("run_delay_share", "read_bytes_per_sample", "storage_share", "opens_per_sample")
    assert {name: found[name] for name in (*unknown, "open_share", "threads")} == dict.fromkeys(
        (*unknown, "open_share", "threads")
    )


def test_workers_are_taken_apart_before_their_totals_are_compared() -> None:
    two = np.concatenate([records(0, 20, opens=8), records(1, 20, opens=24)])
    two["opens"][20:] += 10**6  # a worker that has counted for longer
    assert extra_costs(two)["opens_per_sample"] == pytest.approx(2)


def test_a_worker_that_started_anew_counts_from_nought_again() -> None:
    again = np.concatenate([records(0, 20, opens=8), records(0, 20, opens=8)])
    assert extra_costs(again)["opens_per_sample"] == pytest.approx(38 * 8 / (39 * 8))


def test_a_first_pass_from_storage_is_told_from_later_ones() -> None:
    made = records(0, 41, read_calls_bytes=1000, storage_bytes=0)
    made["storage_bytes"] = 1000 * np.minimum(np.arange(41), 10)
    found = extra_costs(made)
    assert found["first_storage_share"] == pytest.approx(1.0)
    assert found["storage_share"] == 0.0


def test_the_tail_needs_enough_batches() -> None:
    made = records(0, 100)
    made["fetch_wall_ns"][::20] = 100_000
    assert extra_costs(made)["slow_batch_factor"] == pytest.approx(10)
    assert "slow_batch_factor" not in extra_costs(made[:20])
    costs = WorkerCosts.from_records(made[:20])
    assert costs is not None
    assert costs.slow_batch_factor is None


def test_a_single_batch_tells_no_totals() -> None:
    costs = WorkerCosts.from_records(records(0, 1, opens=8))
    assert costs is not None
    assert (costs.opens_per_sample, costs.run_delay_share, costs.storage_share) == (
        None,
        None,
        None,
    )
