"""Memory over time: what grows, what it means, and what does not fit."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import workloads
from evidence_made_up import loop
from workloads import linux_only

from dataloading import memory
from dataloading.codes import CODES
from dataloading.diagnosis import RULES, diagnose
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.memory import (
    FEWEST_READINGS,
    SETTLING_READINGS,
    Growth,
    MemoryLog,
    Readings,
    find_growth,
    read_main,
    read_sum,
    worker_pids,
)
from dataloading.memory_rules import LEAST_GROWTH_BYTES, MEMORY_RULES
from dataloading.observing import Observed

TESTS = Path(__file__).parent
MIB = 2**20
MACHINE = Machine(
    usable_cpus=8,
    available_memory_bytes=16 * 2**30,
    shared_memory_free_bytes=2**30,
    open_files_limit=1024,
    start_method="fork",
)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


# ---- rules, from made-up evidence ---------------------------------------------------------------


def grown(uss: float, rss: float, batches: int = 200, **more: Any) -> Evidence:
    """A loop whose workers grew by so many MiB."""
    return loop(
        workers=4,
        worker_uss_growth_bytes=int(uss * MIB),
        worker_rss_growth_bytes=int(rss * MIB),
        worker_growth_levels_off=more.pop("levels_off", False),
        worker_growth_batches=batches,
        **more,
    )


def queued(size_mib: float, prefetch: int = 2, **more: Any) -> Evidence:
    """A loop with four workers and batches of so many MiB."""
    size = int(size_mib * MIB)
    return loop(
        workers=4,
        prefetch_factor=prefetch,
        batch_bytes=size,
        queue_bytes=4 * prefetch * size,
        **more,
    )


FIRES: dict[str, tuple[Evidence, Machine, str]] = {
    "copy-on-write-growth": (grown(100, 2), MACHINE, "warning"),
    "worker-memory-leak": (grown(100, 100), MACHINE, "critical"),
    "main-memory-leak": (
        loop(main_uss_growth_bytes=100 * MIB, main_growth_batches=200),
        MACHINE,
        "critical",
    ),
    "prefetch-memory": (
        queued(8, prefetch=16),
        replace(MACHINE, available_memory_bytes=2**30),
        "warning",
    ),
    "shared-memory-short": (
        queued(8),
        replace(MACHINE, shared_memory_free_bytes=64 * MIB),
        "critical",
    ),
    "file-descriptors-short": (
        queued(1, tensors_per_batch=50),
        replace(MACHINE, open_files_limit=256),
        "critical",
    ),
}


def found_in(evidence: Evidence, machine: Machine = MACHINE, rules: Any = RULES) -> list[Any]:
    return [found for rule in rules if (found := rule(evidence, machine)) is not None]


@pytest.mark.parametrize("code", FIRES)
def test_a_rule_fires_on_its_fault_and_its_neighbours_do_not(code: str) -> None:
    evidence, machine, severity = FIRES[code]
    (found,) = found_in(evidence, machine, MEMORY_RULES)
    assert (found.code, found.severity) == (code, severity)
    assert found.group == CODES[code].group == "memory"
    assert found.advice
    assert found.evidence
    assert "\n" not in repr(found)
    json.dumps(found.to_dict())
    assert diagnose(evidence, machine).top("memory").code == code  # type: ignore[union-attr]


NOT_A_FAULT: dict[str, tuple[Evidence, Machine]] = {
    "what an allocator keeps of large batches": (
        grown(4 * 500, 4 * 500, 55, batch_bytes=35 * MIB),
        MACHINE,
    ),
    "nothing was read": (loop(workers=4), MACHINE),
    "little growth": (grown(10, 10), MACHINE),
    "little private growth": (grown(10, 500), MACHINE),
    "growth that ends": (grown(100, 100, levels_off=True), MACHINE),
    "growth of a few bytes a batch": (grown(100, 100, batches=10**6), MACHINE),
    "shrinking": (grown(-100, -100), MACHINE),
    "little growth of the main process": (
        loop(main_uss_growth_bytes=10 * MIB, main_growth_batches=200),
        MACHINE,
    ),
    "a few bytes a step": (
        loop(main_uss_growth_bytes=100 * MIB, main_growth_batches=10**6),
        MACHINE,
    ),
    "a small queue": (queued(8), MACHINE),
    "no workers, no descriptors": (loop(workers=0, tensors_per_batch=10**6), MACHINE),
    "a machine that tells nothing": (
        queued(10**4, tensors_per_batch=10**4),
        Machine(usable_cpus=1),
    ),
}


@pytest.mark.parametrize("name", NOT_A_FAULT)
def test_silence_is_right_where_nothing_is_wrong(name: str) -> None:
    assert found_in(*NOT_A_FAULT[name], MEMORY_RULES) == []


def test_copying_and_leaking_are_told_apart_by_resident_memory() -> None:
    for resident in (0, 25, 49):
        assert [f.code for f in found_in(grown(100, resident), rules=MEMORY_RULES)] == [
            "copy-on-write-growth"
        ]
    for resident in (51, 100, 150):
        assert [f.code for f in found_in(grown(100, resident), rules=MEMORY_RULES)] == [
            "worker-memory-leak"
        ]


def test_a_leak_of_whole_batches_is_named_once_it_is_more_than_an_allocator_keeps() -> None:
    kept = grown(200 * 35, 200 * 35, batches=200, batch_bytes=35 * MIB)
    assert [f.code for f in found_in(kept, rules=MEMORY_RULES)] == ["worker-memory-leak"]


def test_copying_ends_and_is_named_all_the_same() -> None:
    (found,) = found_in(grown(100, 0, levels_off=True), rules=MEMORY_RULES)
    assert found.code == "copy-on-write-growth"
    assert found.evidence["levels_off"] is True


def test_memory_that_only_wanders_is_no_leak() -> None:
    grew = loop(main_uss_growth_bytes=100 * MIB, main_growth_batches=200, main_growth_goes_on=False)
    assert found_in(grew, rules=MEMORY_RULES) == []
    workers = replace(grown(100, 100), worker_growth_goes_on=False)
    assert found_in(workers, rules=MEMORY_RULES) == []


@pytest.mark.parametrize(
    ("readings", "goes_on"),
    [
        (range(20), True),
        ([0, 23, -23, 0, 10, -5, 40, 0, 46, 46, 0, 46], False),
        ([0, 0, 0, 0, 0, 0, 40, 40, 40, 40, 40, 40], False),  # one step, then rest
        ([5] * 12, False),
        ([n + (n % 3) for n in range(24)], True),
    ],
)
def test_a_leak_grows_in_every_part_of_a_run(readings: Any, goes_on: bool) -> None:
    memory = np.outer(np.array(readings, dtype=float) * MIB, [1.0, 1.0])
    growth = find_growth(np.arange(len(memory)) * 10, memory)
    assert growth is not None
    assert growth.goes_on is goes_on


def test_a_04_5_a_training_loop_that_keeps_memory_clears_the_loader() -> None:
    evidence = loop(workers=0, main_uss_growth_bytes=400 * MIB, main_growth_batches=100)
    memory_findings = found_in(evidence, rules=MEMORY_RULES)
    assert [found.code for found in memory_findings] == ["main-memory-leak"]
    assert "The training process grew by 400.0 MiB" in memory_findings[0].message
    assert "loss.item()" in memory_findings[0].advice
    assert "worker" not in memory_findings[0].advice


@pytest.mark.parametrize(("uss", "rss"), [(5, 950), (45, 1000), (0, 1000)])
def test_a_04_7_reading_a_mapped_file_is_no_leak(uss: float, rss: float) -> None:
    assert found_in(grown(uss, rss, batches=100), rules=MEMORY_RULES) == []


def test_leaks_say_how_much_a_batch_they_take() -> None:
    (found,) = found_in(grown(200, 200, batches=100), rules=MEMORY_RULES)
    assert "grew by 200.0 MiB in 100 batches, about 2.0 MiB a batch" in found.message
    assert found.evidence["worker_growth_batches"] == 100


def test_growth_reaches_the_rules_through_the_evidence() -> None:
    timing = LoaderTiming(
        wait_s=np.zeros(20),
        transfer_s=np.zeros(20),
        step_s=np.full(20, 0.04),
        other_s=np.zeros(20),
        samples=np.full(20, 8),
        observed=Observed(
            worker_growth=Growth(
                100 * MIB, 90 * MIB, 1e6, False, batches=50, readings=9, goes_on=True
            )
        ),
    )
    evidence = Evidence().with_timing(timing)
    assert [f.code for f in found_in(evidence, rules=MEMORY_RULES)] == ["worker-memory-leak"]
    assert evidence.worker_growth_batches == 50


# ---- growth, from made-up readings --------------------------------------------------------------


def growth_of(uss_mib: Any, rss_mib: Any = None, batches: Any = None) -> Growth | None:
    uss = np.asarray(uss_mib, dtype=float) * MIB
    rss = uss if rss_mib is None else np.asarray(rss_mib, dtype=float) * MIB
    numbers = np.arange(len(uss)) * 10 if batches is None else np.asarray(batches)
    return find_growth(numbers, np.stack([uss, rss], axis=1))


def test_a_leak_grows_and_goes_on() -> None:
    growth = growth_of(100 + 2 * np.arange(22))
    assert growth is not None
    assert growth.uss_bytes == growth.rss_bytes == 2 * 19 * MIB  # without the settling readings
    assert growth.uss_per_batch_bytes == pytest.approx(0.2 * MIB)
    assert (growth.levels_off, growth.batches, growth.readings) == (False, 190, 20)


def test_a_plateau_levels_off() -> None:
    growth = growth_of(100 + 50 * (1 - np.exp(-np.arange(22) / 4)))
    assert growth is not None
    assert growth.levels_off


def test_growth_per_batch_counts_not_growth_per_second() -> None:
    """The workers slow down; what they keep of each batch stays the same."""
    batches = np.cumsum(np.r_[np.full(11, 20), np.full(11, 5)])
    growth = growth_of(100 + 0.1 * batches, batches=batches)
    assert growth is not None
    assert not growth.levels_off
    assert growth.uss_per_batch_bytes == pytest.approx(0.1 * MIB)


def test_growth_that_begins_late_does_not_level_off() -> None:
    growth = growth_of(np.r_[np.full(12, 100), 100 + np.arange(10)])
    assert growth is not None
    assert not growth.levels_off


def test_constant_and_falling_memory_is_no_growth() -> None:
    for readings in (np.full(22, 100), 200 - np.arange(22)):
        growth = growth_of(readings)
        assert growth is not None
        assert growth.uss_bytes <= 0


def test_what_happens_while_workers_start_does_not_count() -> None:
    growth = growth_of([10, 60, *([100] * 10)])
    assert growth is not None
    assert growth.uss_bytes == 0


def test_few_readings_show_nothing() -> None:
    fewest = FEWEST_READINGS + SETTLING_READINGS
    assert growth_of(np.arange(fewest - 1)) is None
    assert growth_of(np.arange(fewest)) is not None
    assert Readings().growth() is None


# ---- the log ------------------------------------------------------------------------------------


class FakeIterator:
    """An iterator with workers of the given process ids."""

    def __init__(self, *pids: int, alive: bool = True) -> None:
        self._workers = [SimpleNamespace(pid=pid, is_alive=lambda: alive) for pid in pids]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock and memory readings under the test's control."""
    state = SimpleNamespace(now=0.0, workers=(MIB, MIB), main=(MIB, MIB), asked=[])

    def summed(pids: Any) -> tuple[int, int] | None:
        state.asked.append(list(pids))
        return state.workers

    monkeypatch.setattr(memory.time, "perf_counter", lambda: state.now)
    monkeypatch.setattr(memory, "read_sum", summed)
    monkeypatch.setattr(memory, "read_main", lambda: state.main)
    return state


def test_readings_are_taken_now_and_then(fake: SimpleNamespace) -> None:
    log = MemoryLog()
    for batch in range(1, 101):
        fake.now += 0.01
        log.read(batch, FakeIterator(1, 2))
    assert len(fake.asked) == pytest.approx(1.0 / memory.READ_EVERY_S, abs=1)
    assert len(log.main.batches) == pytest.approx(1.0 / memory.MAIN_EVERY_S, abs=1)
    assert fake.asked[0] == [1, 2]
    assert log.workers.batches[0] == 1


def test_new_workers_begin_a_new_series_and_the_longest_one_counts(fake: SimpleNamespace) -> None:
    log = MemoryLog()
    for batch, pids in enumerate([(1,), (2,), (2,), (2,), (3,), (3,)]):
        fake.now += 1.0
        log.read(batch, FakeIterator(*pids))
    assert log.workers.batches == [1, 2, 3]
    assert log.main.batches == [0, 1, 2, 3, 4, 5]


def test_a_reading_that_failed_is_left_out(fake: SimpleNamespace) -> None:
    log = MemoryLog()
    for batch in range(4):
        fake.now += 1.0
        fake.workers = None if batch == 2 else (MIB, MIB)
        log.read(batch, FakeIterator(1))
    assert log.workers.batches == [0, 1, 3]


def test_without_workers_only_the_main_process_is_read(fake: SimpleNamespace) -> None:
    log = MemoryLog()
    log.read(1, iter([]))
    assert fake.asked == []
    assert log.workers.batches == []
    assert log.main.batches == [1]


def test_only_living_workers_are_read() -> None:
    assert worker_pids(FakeIterator(1, 2)) == [1, 2]
    assert worker_pids(FakeIterator(1, alive=False)) == []
    assert worker_pids(iter([])) == []


# ---- reading real memory ------------------------------------------------------------------------


def test_a_process_that_is_gone_gives_none() -> None:
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    assert child.pid is not None
    assert read_sum([child.pid]) is None
    assert read_sum([os.getpid(), child.pid]) is None
    assert read_sum([]) == (0, 0)


@linux_only
def test_memory_that_is_kept_is_seen() -> None:
    before, before_all = read_main(), read_sum([os.getpid()])
    # new pages, where malloc would use again what other tests have freed
    pages = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept = np.frombuffer(pages, dtype="u1")
    kept[:] = 1
    after, after_all = read_main(), read_sum([os.getpid()])
    for old, new in ((before, after), (before_all, after_all)):
        assert old is not None
        assert new is not None
        for was, now in zip(old, new, strict=True):
            assert now - was > 0.9 * kept.nbytes


@linux_only
def test_batches_in_shared_memory_count_as_kept() -> None:
    before = read_main()
    kept = torch.ones(32 * MIB, dtype=torch.uint8).share_memory_()
    after = read_main()
    assert before is not None
    assert after is not None
    assert after[0] - before[0] > 0.9 * kept.numel()


@linux_only
def test_a_04_7_pages_of_a_mapped_file_are_not_counted(tmp_path: Path) -> None:
    path = sparse_file(tmp_path, 128)
    before, before_all = read_main(), read_sum([os.getpid()])
    resident = psutil.Process().memory_info().rss
    array = np.memmap(path, dtype="u1", mode="r")
    assert int(array[::4096].sum()) == 0
    assert (
        psutil.Process().memory_info().rss - resident > 100 * MIB
    )  # what others would call a leak
    after, after_all = read_main(), read_sum([os.getpid()])
    for old, new in ((before, after), (before_all, after_all)):
        assert old is not None
        assert new is not None
        assert max(now - was for was, now in zip(old, new, strict=True)) < LEAST_GROWTH_BYTES


def sparse_file(folder: Path, mib: int) -> Path:
    path = folder / "array.bin"
    with open(path, "wb") as file:
        file.truncate(mib * MIB)
    return path


# ---- real loaders -------------------------------------------------------------------------------


# They run in a process of their own: where much memory was used and freed, what is kept lands on
# pages that are there already, and does not show as growth.


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    """What runs over real loaders showed, by what the loader does."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    program = "import sys, faulty_workloads; faulty_workloads.report_memory(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path_factory.mktemp("mapped"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {name: Evidence.from_dict(values) for name, values in lines}


@linux_only
def test_a_leak_in_workers_is_found_in_a_real_loader(real: dict[str, Evidence]) -> None:
    seen = real["leak"]
    assert seen.worker_uss_growth_bytes is not None
    kept = 4 * 128 * 1024 * (seen.worker_growth_batches or 0)
    assert seen.worker_uss_growth_bytes == pytest.approx(kept, rel=0.3)
    assert seen.worker_growth_levels_off is False
    assert [one.code for one in found_in(seen, rules=MEMORY_RULES)] == ["worker-memory-leak"]


@linux_only
def test_a_04_7_reading_a_mapped_file_is_no_leak_in_a_real_loader(
    real: dict[str, Evidence],
) -> None:
    seen = real["mapped"]
    assert seen.worker_uss_growth_bytes is not None
    assert seen.worker_uss_growth_bytes < LEAST_GROWTH_BYTES
    assert found_in(seen, rules=MEMORY_RULES) == []


@linux_only
def test_copied_pages_are_told_from_a_leak_in_a_real_loader(real: dict[str, Evidence]) -> None:
    seen = real["touched"]
    assert [one.code for one in found_in(seen, rules=MEMORY_RULES)] == ["copy-on-write-growth"]
    assert seen.worker_rss_growth_bytes is not None
    assert seen.worker_rss_growth_bytes < LEAST_GROWTH_BYTES


@linux_only
def test_a_04_5_a_loop_that_keeps_its_results_is_found_in_a_real_loop(
    real: dict[str, Evidence],
) -> None:
    kept, nothing = real["kept by the loop"], real["kept by nobody"]
    assert [one.code for one in found_in(kept, rules=MEMORY_RULES)] == ["main-memory-leak"]
    assert nothing.main_uss_growth_bytes is not None
    assert found_in(nothing, rules=MEMORY_RULES) == []
