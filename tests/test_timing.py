"""The clocks of a training loop: arithmetic on made-up steps, then real loaders of every kind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from workloads import FOREVER_S, linux_only

from dataloading import timing as timing_module
from dataloading.loader_timing import LoaderTiming, StepLog, steady_steps
from dataloading.observing import has_arrived
from dataloading.settings import LoaderSettings
from dataloading.timing import CudaClock, HostClock, measure_dataloader, measure_replay
from dataloading.train_steps import METER, make_train_step, simulated_train_step
from dataloading.watchdog import ProbeTimeout
from dataloading.worker_costs import WorkerCosts

NO_WORKERS = LoaderSettings()
TRIES = 3  # neighbours on the machine only ever add waiting, so the best run counts
SLACK_S = 5.0  # for ending workers on a busy machine; what hangs takes far longer


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a probe half a second after its budget; forked workers start in less."""
    monkeypatch.setattr(timing_module, "LEAST_LIMIT_S", 0.5)


def forked(data: Any, workers: int, **options: Any) -> DataLoader:
    context = "fork" if workers else None
    return DataLoader(data, num_workers=workers, multiprocessing_context=context, **options)


def measure(loader: Any, step: Any = None, **options: Any) -> LoaderTiming:
    return measure_dataloader(loader, step, **{"seconds": 0.3, "progress": False, **options})


def logged(waits: Any, steps: Any = 0.0, samples: Any = 1, others: Any = 0.0) -> StepLog:
    """A log of one epoch; numbers stand for every step."""
    log = StepLog()
    columns = np.broadcast_arrays(waits, steps, samples, others)
    for wait, step, count, other in zip(*columns, strict=True):
        log.add(0, float(wait), float(step), int(count), other_s=float(other))
    return log


def timed(waits: Any, steps: Any, others: Any = 0.0, samples: Any = 1, **known: Any) -> Any:
    """A timing of made-up steady steps."""
    columns = np.broadcast_arrays(waits, steps, others, samples)
    wait, step, other, count = (np.array(column, dtype=float) for column in columns)
    return LoaderTiming(wait, np.zeros(len(wait)), step, other, count, **known)


# ---- cases on made-up numbers ------------------------------------------------------------------


def test_a_01_4_host_work_is_neither_waiting_nor_training() -> None:
    timing = timed(0.002 / 10, 0.030 / 10, [0.0] * 9 + [0.030])
    blocks = timed([0.02 / 10] * 100, [0.3 / 10] * 100, ([0.0] * 9 + [0.3]) * 10)
    for split in (timing, blocks):
        assert split.wait_share == pytest.approx(0.032, abs=0.001)
        assert split.step_share == pytest.approx(0.484, abs=0.001)
        assert split.other_share == pytest.approx(0.484, abs=0.001)
    assert "wait 3 %, transfer 0 %, step 48 %, other 48 %" in repr(blocks)


def test_a_03_3_the_first_batch_stands_apart() -> None:
    log = logged([32.8] + [0.015] * 195)
    log.startup_s = 32.8
    timing = log.timing(settings=NO_WORKERS)
    assert timing.startup_s == 32.8
    assert timing.median_wait_s == pytest.approx(0.015)
    assert timing.period_s == pytest.approx(0.015)  # the plain mean would be 0.182
    assert (timing.steps, timing.discarded_steps, timing.notes) == (195, 1, ())
    assert "15 ms a step" in repr(timing)
    assert "182" not in repr(timing)


def test_a_20_6_the_rate_is_weighted_by_time_and_has_a_range() -> None:
    seconds = [1 / 500] * 100 + [1 / 256] * 800 + [1 / 500] * 100
    timing = timed(seconds, 0.0)
    assert timing.samples_per_s == pytest.approx(284, abs=0.5)
    assert timing.fastest_samples_per_s == pytest.approx(500)
    assert timing.slowest_samples_per_s == pytest.approx(256)


def test_a_20_2_two_synchronisations_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(timing_module, "_make_clock", lambda log: CudaClock(log, cuda))
    timing = measure(DataLoader(workloads.Slow(100)), lambda batch: None, max_steps=100)
    assert cuda.synchronized == 2
    assert timing.clock == "cuda events"
    assert timing.steps + timing.discarded_steps == 100


# ---- steady steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "queued", "kept"),
    [
        ([0, 0, 0, 0], 0, [1, 2, 3]),
        ([0, 0, 1, 1], 0, [1, 2, 3]),  # without workers nothing was prepared ahead
        ([0] * 24, 2, range(4, 22)),  # twice the queue at the start, the queue at the end
        ([0] * 12, 100, range(4, 10)),  # at most a third and a sixth
        ([0, 0, 1, 1], 1, [1, 3]),
        ([0, 1, 2], 1, []),
        ([], 1, []),
    ],
)
def test_steady_steps(epochs: list[int], queued: int, kept: Any) -> None:
    assert np.flatnonzero(steady_steps(np.array(epochs), queued)).tolist() == list(kept)


def test_too_short_a_run_is_used_with_a_note() -> None:
    one = logged([0.5]).timing(settings=NO_WORKERS)
    assert (one.wait_s.tolist(), one.discarded_steps) == ([0.5], 0)
    three = logged([9.0, 0.1, 0.2]).timing(settings=LoaderSettings(num_workers=2))
    assert (three.wait_s.tolist(), three.discarded_steps) == ([0.1, 0.2], 1)
    for timing in (one, three):
        assert "too short for steady figures" in timing.notes[0]


def test_a_log_forgets_the_oldest_steps() -> None:
    log = logged([0.1, 0.2, 0.3])
    log.forget(keep=5)
    log.forget(keep=2)
    assert (log.wait_s, len(log.epoch), len(log.samples)) == ([0.2, 0.3], 2, 2)


# ---- figures -----------------------------------------------------------------------------------


def test_overlap_of_made_up_steps() -> None:
    assert timed(0.1, [0.1] * 20, fetch_s=0.1).overlap_ratio == pytest.approx(0.0)
    assert timed(0.005, [0.1] * 20, fetch_s=0.1).overlap_ratio == pytest.approx(0.95)
    assert timed(0.0, [0.1] * 20, fetch_s=0.1).overlap_ratio == pytest.approx(1.0)
    assert timed(0.1, [0.1] * 20).overlap_ratio is None  # fetching was not measured
    assert timed(0.1, [0.0] * 20, fetch_s=0.1).overlap_ratio is None  # nothing to overlap


def test_fetching_is_known_from_workers_or_where_there_are_none() -> None:
    costs = WorkerCosts(
        5, fetch_s=0.3, fetch_cpu_s=0.1, collate_s=0.1, collate_cpu_s=0.1, samples=8
    )
    workers = LoaderSettings(num_workers=1)
    log = logged([0.0, 0.2, 0.2, 0.2])
    assert log.timing(settings=NO_WORKERS).fetch_s == 0.2
    assert log.timing(settings=workers, workers=costs).fetch_s == pytest.approx(0.4)
    assert log.timing(settings=workers).fetch_s is None
    assert log.timing().fetch_s is None  # a loader of somebody's own may prefetch as well


def test_rare_long_steps_are_told_apart() -> None:
    steps = np.array([0.01] * 9 + [0.11])
    assert timed(0.0, steps).spike_share == pytest.approx(0.5)
    assert timed(0.0, [0.01] * 10).spike_share == 0.0


def test_an_epoch_is_its_restart_and_its_steps() -> None:
    first = timed(0.1, [0.1] * 3, startup_s=9.0, steps_per_epoch=10)
    assert first.epoch_s == pytest.approx(11.0)
    later = timed(0.1, [0.1] * 3, startup_s=9.0, epoch_restart_s=1.0, steps_per_epoch=10)
    assert later.epoch_s == pytest.approx(3.0)
    assert timed(0.1, [0.1] * 3).epoch_s is None


def test_a_timing_becomes_json() -> None:
    settings = LoaderSettings(num_workers=2)
    plain = json.loads(json.dumps(timed(0.1, [0.3, 0.3], settings=settings).to_dict()))
    assert plain["wait_share"] == pytest.approx(0.25)
    assert plain["settings"]["num_workers"] == 2
    assert plain["startup_s"] is None


# ---- clocks ------------------------------------------------------------------------------------


def fake_host_time(monkeypatch: pytest.MonkeyPatch, *readings: float) -> None:
    clock = SimpleNamespace(perf_counter=iter(readings).__next__)
    monkeypatch.setattr(timing_module, "time", clock)


def go(clock: HostClock | CudaClock, *, first: bool = False, busy_s: float = 0.0) -> None:
    """One step of a loop."""
    clock.asks()
    clock.got()
    clock.begins()
    clock.moved()
    METER.busy_s += busy_s
    clock.stepped(0, 4, first=first)


def test_the_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # made | asks got begins moved stepped left | asks ...
    first = (1.0, 4.0, 4.5, 4.7, 9.7, 10.0)
    second = (10.2, 11.2, 11.2, 11.5, 16.5, 17.0)
    fake_host_time(monkeypatch, 0.0, *first, *second)
    clock = HostClock(StepLog())
    go(clock, first=True)
    go(clock, busy_s=3.0)
    clock.finish()
    log = clock.log
    assert log.wait_s == pytest.approx([3.0, 1.0])
    assert log.transfer_s == pytest.approx([0.2, 0.3])  # counting the batch is our own doing
    assert log.step_s == pytest.approx([5.0, 3.0])  # what the meter saw, where it saw something
    assert log.other_s == pytest.approx([0.0, 2.0 + 0.2])
    assert log.samples == [4, 4]


class FakeCuda:
    """Stands for `torch.cuda`: events that read a made-up clock of the GPU, in seconds."""

    def __init__(self, *times: float) -> None:
        self.times = iter(times)
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self.times)


class FakeEvent:
    def __init__(self, times: Iterator[float]) -> None:
        self.times = times

    def record(self) -> None:
        self.at = next(self.times, 0.0)

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_the_cuda_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(*(5.0, 5.5, 6.5), *(6.5, 6.6, 8.0), *(9.0, 9.0, 10.0), *(12.0, 12.0, 12.5))
    host = (0.0, 2.0, 2.0), (3.0, 5.0, 5.0), (6.0, 8.0, 8.0), (9.0, 9.5, 9.5)  # asks got moved
    fake_host_time(monkeypatch, *(reading for step in host for reading in step))
    clock = CudaClock(StepLog(), cuda)
    go(clock, first=True)
    for _ in range(3):
        go(clock)
    clock.finish()
    log = clock.log
    # The first step; a wait hidden behind the GPU's work; a gap shorter than the wait; a longer one.
    assert log.wait_s == pytest.approx([2.0, 0.0, 1.0, 0.5])
    assert log.other_s == pytest.approx([0.0, 0.0, 0.0, 1.5])
    assert log.transfer_s == pytest.approx([0.5, 0.1, 0.0, 0.0])
    assert log.step_s == pytest.approx([1.0, 1.4, 1.0, 0.5])
    clock.finish()  # again adds nothing
    assert len(log.epoch) == 4


def test_logging_within_the_call_is_no_training_on_a_gpu_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(0.0, 0.0, 5.0)  # the call takes 5 s, 2 s of it training
    fake_host_time(monkeypatch, 0.0, 0.0, 0.0, 5.0)  # asks got moved stepped
    clock = CudaClock(StepLog(), cuda)
    go(clock, first=True, busy_s=2.0)
    clock.finish()
    assert clock.log.step_s == pytest.approx([2.0])
    assert clock.log.other_s == pytest.approx([3.0])
    assert clock.log.steps_are_training


# ---- cases on real loaders ---------------------------------------------------------------------


@linux_only
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_a_01_1_the_share_of_waiting() -> None:
    data = workloads.Together(8 * 30, seconds=0.020)
    step = simulated_train_step(0.040)
    alone = measure(forked(data, 0, batch_size=8), step, seconds=30, max_steps=10)
    assert alone.wait_share == pytest.approx(0.80, abs=0.05)
    assert alone.median_wait_s / float(np.median(alone.step_s)) == pytest.approx(4.0, rel=0.3)
    four = forked(data, 4, batch_size=8)
    assert any(
        measure(four, step, seconds=30, max_steps=30).wait_share <= 0.15 for _ in range(TRIES)
    )


@linux_only
def test_a_01_2_deeper_prefetch_does_not_shorten_the_wait() -> None:
    data, step = workloads.Together(8 * 40, seconds=0.012), simulated_train_step(0.016)
    waits = {}
    for prefetch in (2, 16):
        loader = forked(data, 2, batch_size=8, prefetch_factor=prefetch)
        waits[prefetch] = float(measure(loader, step, seconds=30, max_steps=40).wait_s.mean())
    assert waits[16] == pytest.approx(waits[2], rel=0.25)
    assert waits[2] == pytest.approx(0.032, rel=0.5)  # 96 ms / 2 workers - 16 ms


@linux_only
def test_a_01_6_overlap() -> None:
    data, step = workloads.Slow(20, seconds=0.080), simulated_train_step(0.080)
    alone = measure(forked(data, 0), step, seconds=30, max_steps=10)
    assert alone.overlap_ratio == pytest.approx(0.0, abs=0.1)
    two = forked(data, 2)
    ratios = (measure(two, step, seconds=30, max_steps=20).overlap_ratio for _ in range(TRIES))
    assert any(ratio is not None and ratio >= 0.8 for ratio in ratios)


@linux_only
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_17_8_a_probe_ends_with_its_budget(
    short_limit: None, workers: int, persistent: bool
) -> None:
    begun = time.monotonic()
    data = workloads.Slow(8, seconds=FOREVER_S)
    loader = forked(data, workers, persistent_workers=persistent)
    with pytest.raises(ProbeTimeout, match="Waiting for the first batch of epoch 0: stopped"):
        measure(loader, seconds=0.2)
    assert time.monotonic() - begun < SLACK_S


INTERRUPTED = """
import json, multiprocessing, sys, time
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
import workloads
from torch.utils.data import DataLoader
from dataloading.timing import measure_dataloader

data = workloads.Touching(Path(sys.argv[2]), begin=int(sys.argv[3]))
loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork",
                    persistent_workers=True)
try:
    measure_dataloader(loader, seconds=30, progress=False)
except KeyboardInterrupt:
    children = len(multiprocessing.active_children())
    print(json.dumps([time.monotonic(), children, loader._iterator is None]))
"""


def interrupt(tmp_path: Path, begin: int) -> None:
    """Interrupt a probe in a process of its own, and look at what is left."""
    touched = tmp_path / "touched"
    here = Path(__file__).parent
    paths = json.dumps([str(here.parent), str(here)])
    command = [sys.executable, "-c", INTERRUPTED, paths, str(touched), str(begin)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + FOREVER_S
        while not touched.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        # Python itself loses an interrupt that arrives in a finaliser; one presses the keys again
        for _ in range(3):
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SLACK_S)
                break
        out, err = process.communicate(timeout=FOREVER_S)
        ended, children, untouched = json.loads(out)
        assert ended - sent < SLACK_S
        assert (children, untouched) == (0, True)
        assert not any(worker.is_running() for worker in workers)
        assert "terminate called" not in err
    finally:
        process.kill()
        process.wait()


@linux_only
def test_a_17_8_an_interrupt_ends_a_hung_probe(tmp_path: Path) -> None:
    interrupt(tmp_path, begin=0)


@linux_only
def test_a_06_7_an_interrupt_in_mid_epoch(tmp_path: Path) -> None:
    interrupt(tmp_path, begin=20)


# ---- loaders of every kind ---------------------------------------------------------------------

LOADERS: dict[str, tuple[Callable[[], Any], int | None, int]] = {  # batches an epoch, samples each
    "tensors": (lambda: DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4), 10, 4),
    "iterable": (lambda: DataLoader(workloads.Counting(40), batch_size=4), 10, 4),
    "iterable with len": (lambda: DataLoader(workloads.CountingWithLen(40), batch_size=4), 10, 4),
    "dicts": (lambda: DataLoader(workloads.Dicts(40), batch_size=4), 10, 4),
    "dataclass": (
        lambda: DataLoader(workloads.Slow(40), batch_size=4, collate_fn=workloads.collate_pair),
        10,
        4,
    ),
    "lists of samples": (
        lambda: DataLoader(workloads.Slow(40), batch_size=4, collate_fn=list),
        10,
        4,
    ),
    "not batched": (lambda: DataLoader(workloads.Slow(40), batch_size=None), 40, 1),
    "batch sampler": (
        lambda: DataLoader(
            workloads.Slow(40),
            batch_sampler=BatchSampler(SequentialSampler(range(40)), 5, drop_last=False),
        ),
        8,
        5,
    ),
    "subclass": (lambda: workloads.SameConstructor(workloads.Slow(40), batch_size=4), 10, 4),
    "own constructor": (lambda: workloads.OwnConstructor(40), 10, 4),
    "list of batches": (lambda: [torch.zeros(4, 2)] * 10, 10, 4),
    "generator": (lambda: (torch.zeros(4, 2) for _ in range(10)), 10, 4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader(kind: str) -> None:
    make, steps_per_epoch, samples = LOADERS[kind]
    seen = 0

    def step(batch: Any) -> None:
        nonlocal seen
        seen += 1

    timing = measure(make(), step, seconds=30, max_steps=45)
    assert timing.steps_per_epoch == steps_per_epoch
    assert timing.samples.tolist() == [samples] * timing.steps
    assert timing.steps + timing.discarded_steps == seen
    assert seen == (10 if kind == "generator" else 45)  # a generator has one epoch only
    assert timing.startup_s is not None
    assert (timing.epoch_restart_s is None) == (seen <= (steps_per_epoch or 0))
    assert timing.samples_per_s > 0
    assert timing.notes == ()


def test_a_generator_goes_on_after_the_measurement() -> None:
    batches = (torch.full((2,), float(number)) for number in range(100))
    assert measure(batches, max_steps=5).steps_per_epoch is None
    assert next(batches).tolist() == [5.0, 5.0]


class OneEpoch:
    """Can be iterated over once; after that it delivers nothing."""

    def __init__(self, count: int) -> None:
        self.batches = iter(torch.zeros(count, 4, 2))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def test_a_second_epoch_without_a_batch_ends_the_measurement() -> None:
    timing = measure(OneEpoch(10))
    assert timing.steps == 9
    assert timing.steps_per_epoch == 10


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(method: str) -> None:
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip("not on this platform")
    loader = DataLoader(
        workloads.Dicts(40),
        batch_size=4,
        num_workers=1,
        collate_fn=None,
        multiprocessing_context=method,
    )
    timing = measure(loader, seconds=60, max_steps=10)
    assert timing.settings is not None
    assert timing.settings.multiprocessing_context == method
    assert timing.workers is not None
    assert timing.workers.samples == 4
    assert timing.startup_s is not None
    assert timing.startup_s > timing.p95_wait_s


@linux_only
def test_a_worker_init_fn_gives_each_worker_its_part() -> None:
    loader = forked(workloads.Sharded(16), 2, batch_size=2, worker_init_fn=workloads.give_part)
    assert measure(loader, seconds=30, max_steps=20).steps_per_epoch == 8


@linux_only
@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_one_batch(workers: int) -> None:
    loader = forked(workloads.Slow(4), workers, batch_size=4)
    timing = measure(loader, seconds=30, max_steps=6)
    assert timing.steps_per_epoch == 1
    assert timing.epoch_restart_s is not None
    assert timing.steps >= 1
    assert bool(timing.notes) == (workers == 1)  # with workers, every step is a first one


@linux_only
def test_a_long_epoch_leaves_time_for_one_restart() -> None:
    timing = measure(forked(workloads.Slow(1000, seconds=0.005), 1), seconds=1.5)
    assert timing.epoch_restart_s is not None
    assert timing.steps_per_epoch == 1000


@linux_only
def test_a_restart_does_not_wait_for_what_was_under_way() -> None:
    data = workloads.Slow(1000, seconds=0.050)
    loader = forked(data, 1, prefetch_factor=8, persistent_workers=True)
    timing = measure(loader, seconds=1.0)  # cut short with 8 batches of 50 ms under way
    assert timing.epoch_restart_s is not None
    assert timing.epoch_restart_s < 0.3  # 8 batches would take 0.4 s


def test_the_batch_is_moved_where_a_device_is_given() -> None:
    devices = set()

    def step(batch: Any) -> None:
        devices.add(batch[0].device.type)

    timing = measure(DataLoader(workloads.Slow(40)), step, device="meta", max_steps=10)
    assert devices == {"meta"}
    assert (timing.transfer_s > 0).all()


def test_other_work_in_the_step_is_told_apart() -> None:
    train = simulated_train_step(0.005)

    def step(batch: Any) -> None:
        train(batch)
        time.sleep(0.005)

    timing = measure(DataLoader(workloads.Slow(40)), step, max_steps=20)
    assert timing.step_share == pytest.approx(0.5, abs=0.2)
    assert timing.other_share == pytest.approx(0.5, abs=0.2)


def test_at_most_so_many_steps() -> None:
    calls: list[Any] = []
    timing = measure(DataLoader(workloads.Slow(8)), calls.append, seconds=30, max_steps=20)
    assert len(calls) == 20
    assert timing.steps + timing.discarded_steps == 20


def test_a_progress_bar_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    measure_dataloader(DataLoader(workloads.Slow(8)), seconds=0.3)
    assert "Measuring the loader alone" in capsys.readouterr().err


# ---- nothing is changed ------------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize("workers", [0, 1])
def test_random_states_stay(workers: int) -> None:
    generator, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    data = workloads.Random(40)
    sampler = RandomSampler(data, generator=own)
    before = workloads.random_state(), generator.get_state().tolist(), own.get_state().tolist()
    measure(forked(data, workers, sampler=sampler, generator=generator))
    measure(forked(data, workers, shuffle=True))
    after = workloads.random_state(), generator.get_state().tolist(), own.get_state().tolist()
    assert after == before


def test_the_same_batches_come_after_the_measurement() -> None:
    loader = DataLoader(workloads.Slow(20), shuffle=True)
    torch.manual_seed(5)
    expected = [int(index) for _, index in loader]
    torch.manual_seed(5)
    measure(loader)
    assert [int(index) for _, index in loader] == expected


def test_persistent_workers_of_the_user_are_left_alone() -> None:
    loader = DataLoader(workloads.Slow(20), num_workers=1, persistent_workers=True)
    measure(loader, max_steps=5, seconds=60)
    assert loader._iterator is None
    epoch = iter(loader)
    assert [int(next(epoch)[1]) for _ in range(3)] == [0, 1, 2]
    measure(loader, max_steps=5, seconds=60)
    assert [int(index) for _, index in epoch] == list(range(3, 20))  # still in mid-epoch
    assert loader._iterator is epoch
    loader._iterator = None
    epoch._shutdown_workers()  # type: ignore[attr-defined]


def test_model_and_optimizer_stay() -> None:
    model = torch.nn.Linear(3, 50)
    optimizer = torch.optim.Adam(model.parameters())
    step = make_train_step(model, torch.nn.CrossEntropyLoss(), optimizer)
    before = model.weight.tolist()
    loader = DataLoader(workloads.Slow(40), batch_size=4)
    measure(loader, step)
    measure_replay(next(iter(loader)), step, seconds=0.1)
    assert model.weight.tolist() == before
    assert len(optimizer.state) == 0


# ---- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seconds": 0}, ValueError, "seconds=0 must be a finite number above 0"),
        ({"seconds": float("nan")}, ValueError, "seconds=nan must be a finite number"),
        ({"seconds": float("inf")}, ValueError, "seconds=inf must be a finite number"),
        ({"max_steps": 0}, ValueError, "max_steps=0 must be at least 1"),
        ({"max_steps": 2.5}, TypeError, r"max_steps=2\.5 must be a whole number"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        measure(DataLoader(workloads.Slow(4)), **options)


def test_something_that_cannot_be_iterated() -> None:
    with pytest.raises(TypeError, match="to be a loader to iterate over, got int"):
        measure(5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DataLoader(workloads.Slow(0)), r"its dataset \(Slow\) has 0 samples"),
        (
            lambda: DataLoader(workloads.Slow(3), batch_size=4, drop_last=True),
            "has 3 samples, the batch size is 4 and drop_last is True",
        ),
        (lambda: DataLoader(workloads.Counting(0)), r"its dataset \(Counting\) has None samples"),
        (lambda: [], "expected an iterable that yields batches"),
        (lambda: iter(()), "a generator can be gone through only once"),
    ],
)
def test_a_loader_that_delivers_nothing(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"The loader delivered no batch.*{text}"):
        measure(make())


@linux_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_train_step_that_raises(
    workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def step(batch: Any) -> None:
        raise ZeroDivisionError("in my step")

    loader = forked(workloads.Slow(40), workers, persistent_workers=workers > 0)
    with pytest.raises(ZeroDivisionError, match="in my step"):
        measure(loader, step)
    assert list(tmp_path.iterdir()) == []


@linux_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises(workers: int) -> None:
    with pytest.raises(KeyError, match="broken sample 5"):
        measure(forked(workloads.Failing(40), workers), seconds=30)


@linux_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_hangs_later_leaves_the_steps_before(short_limit: None, workers: int) -> None:
    timing = measure(forked(workloads.SlowAt(40, 20, FOREVER_S), workers), seconds=1.0)
    assert timing.steps + timing.discarded_steps == 20
    assert timing.notes[0].startswith("Waiting for batch 20 of epoch 0: stopped by the watchdog")
    assert "The figures are those of the steps before. No batch came: worker" in timing.notes[0]


@linux_only
def test_the_same_with_events_that_are_read_at_the_end(
    short_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_module, "_make_clock", lambda log: CudaClock(log, FakeCuda()))
    timing = measure(DataLoader(workloads.SlowAt(40, 20, FOREVER_S)), seconds=1.0)
    assert timing.steps + timing.discarded_steps == 20


@linux_only
def test_a_train_step_that_hangs(short_limit: None) -> None:
    calls: list[Any] = []

    def step(batch: Any) -> None:
        calls.append(batch)
        if len(calls) == 4:
            time.sleep(FOREVER_S)

    timing = measure(DataLoader(workloads.Slow(40)), step)
    assert timing.notes[0].startswith("Train step 3: stopped by the watchdog")


def test_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = workloads.in_thread(lambda: measure(DataLoader(workloads.Slow(20)), max_steps=10))
    assert timing.steps == 9
    monkeypatch.setattr(timing_module, "LEAST_LIMIT_S", 0.5)
    error = workloads.in_thread(lambda: measure(DataLoader(workloads.Dozing(20)), seconds=0.2))
    assert isinstance(error, ProbeTimeout)
    assert "Waiting for the first batch" in str(error)


# ---- replay ------------------------------------------------------------------------------------


def test_a_replay_never_waits() -> None:
    calls: list[Any] = []
    batch = torch.zeros(8, 3)
    timing = measure_replay(batch, calls.append, seconds=5, max_steps=30)
    assert len(calls) == 30
    assert all(one is batch for one in calls)
    assert timing.samples.tolist() == [8] * 29
    assert timing.wait_share < 0.5  # of steps that take no time either
    assert timing.overlap_ratio is None


def test_a_replay_moves_its_batch_once() -> None:
    seen: set[int] = set()
    measure_replay(torch.zeros(8, 3), lambda b: seen.add(id(b)), device="meta", max_steps=5)
    assert len(seen) == 1


@linux_only
def test_a_replay_that_hangs_is_stopped(short_limit: None) -> None:
    with pytest.raises(ProbeTimeout, match="Replaying one batch"):
        measure_replay(torch.zeros(2), lambda batch: time.sleep(FOREVER_S), seconds=0.2)


# ---- batches that stand ready -----------------------------------------------------------------


@linux_only
def test_the_hand_over_of_ready_batches_is_told_from_waiting_for_late_ones() -> None:
    loader = DataLoader(workloads.Slow(200, seconds=0.0), batch_size=4, num_workers=1)
    fed = measure(loader, simulated_train_step(0.02), seconds=1.5)
    assert fed.observed is not None
    assert fed.observed.handover_s is not None
    assert fed.observed.handover_s < 0.02
    slow = DataLoader(workloads.Slow(200, seconds=0.02), batch_size=4, num_workers=1)
    starved = measure(slow, seconds=1.5)
    assert starved.observed is not None
    assert starved.observed.handover_s is None


def test_a_loader_without_a_queue_hands_nothing_over() -> None:
    assert not has_arrived(iter([1]))
    timing = measure(DataLoader(workloads.Slow(50, seconds=0.0), batch_size=4))
    assert timing.observed is None or timing.observed.handover_s is None
