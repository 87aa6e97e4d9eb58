"""Time limits, ended workers, and global state that is put back."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import DataLoader, RandomSampler
from workloads import FOREVER_S, doze, in_thread, linux_only

from dataloading import watchdog
from dataloading.watchdog import (
    ProbeTimeout,
    close_iterator,
    generators_of,
    loader_warnings_hidden,
    one_thread,
    open_iterator,
    random_state_kept,
    receive_rest,
    time_limit,
)

LIMIT_S = 0.2
PATIENCE_S = 5.0  # far more than any of this takes, far less than what hangs


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


# ---- time limits -----------------------------------------------------------------------------


@linux_only
def test_a_blocking_call_is_interrupted() -> None:
    begun = time.monotonic()
    with (
        pytest.raises(ProbeTimeout, match=r"^Reading: stopped by the watchdog, 0\.2 s after"),
        time_limit(LIMIT_S, "Reading"),
    ):
        time.sleep(FOREVER_S)
    assert time.monotonic() - begun < PATIENCE_S


def test_the_text_is_made_when_the_limit_is_reached() -> None:
    doing = ["Starting"]
    with (  # noqa: PT012
        pytest.raises(ProbeTimeout, match=r"^Waiting for batch 7: "),
        time_limit(LIMIT_S, lambda: doing[0]),
    ):
        doing[0] = "Waiting for batch 7"
        doze(PATIENCE_S)


def test_a_block_in_time_is_left_alone() -> None:
    with time_limit(LIMIT_S, "Reading"):
        pass
    doze(2 * LIMIT_S)  # nothing rings later


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), time_limit(FOREVER_S, "Reading"):
        raise KeyError("x")


def test_a_time_out_of_an_inner_block_keeps_its_own_text() -> None:
    def inner() -> None:
        with time_limit(FOREVER_S, "Outer"):
            raise ProbeTimeout("mine")

    with pytest.raises(ProbeTimeout, match=r"^mine$"):
        inner()
    assert str(in_thread(inner)) == "mine"


@linux_only
def test_code_that_swallows_the_time_out_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "AGAIN_S", LIMIT_S)
    swallowed = 0
    with pytest.raises(ProbeTimeout), time_limit(LIMIT_S, "Reading"):  # noqa: PT012
        try:  # as a dataset does that skips what it cannot read
            doze(PATIENCE_S)
        except Exception:
            swallowed += 1
        doze(PATIENCE_S)
    assert swallowed == 1


def test_in_a_thread() -> None:
    def hang() -> None:
        with time_limit(LIMIT_S, "Reading"):
            doze(PATIENCE_S)

    error = in_thread(hang)
    assert isinstance(error, ProbeTimeout)
    assert str(error).startswith("Reading: stopped by the watchdog")


def just_in_time() -> list[Exception]:
    """Blocks that end when their limit is reached; quiet times between them."""
    errors: list[Exception] = []
    for _ in range(100):
        try:
            with time_limit(0.005, "Reading"):
                doze(0.005)
        except ProbeTimeout as error:
            errors.append(error)
    doze(4 * LIMIT_S)
    return errors


@pytest.mark.parametrize("run", [lambda function: function(), in_thread])
def test_nothing_arrives_after_the_block(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "AGAIN_S", LIMIT_S)
    errors = run(just_in_time)
    assert isinstance(errors, list)  # and not what was raised elsewhere
    assert all(str(error).startswith("Reading: stopped") for error in errors)
    assert all(type(error).__name__ == "ProbeTimeout" for error in errors)


@linux_only
def test_the_outer_limit_is_kept_inside_a_longer_one() -> None:
    begun = time.monotonic()
    with (
        pytest.raises(ProbeTimeout, match=r"^Outer"),
        time_limit(LIMIT_S, "Outer"),
        time_limit(FOREVER_S, "Inner"),
    ):
        time.sleep(FOREVER_S)
    assert time.monotonic() - begun < PATIENCE_S


@linux_only
def test_the_outer_limit_goes_on_after_an_inner_one() -> None:
    with pytest.raises(ProbeTimeout, match=r"^Outer"), time_limit(3 * LIMIT_S, "Outer"):  # noqa: PT012
        with pytest.raises(ProbeTimeout, match=r"^Inner"), time_limit(LIMIT_S, "Inner"):
            time.sleep(FOREVER_S)
        time.sleep(FOREVER_S)


@linux_only
def test_somebody_elses_alarm_keeps_ringing() -> None:
    rang: list[float] = []

    def handler(signum: int, frame: Any) -> None:
        rang.append(time.monotonic())

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(ProbeTimeout), time_limit(0.5, "Reading"):
            time.sleep(FOREVER_S)
        inside = len(rang)
        assert inside >= 3
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.05)
        doze(0.3)
        assert len(rang) > inside
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# ---- workers ---------------------------------------------------------------------------------


def test_any_iterator_is_closed() -> None:
    closed = []

    def batches() -> Iterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    iterator = batches()
    next(iterator)
    close_iterator(iterator)
    assert closed == [True]
    close_iterator(iter([1, 2]))
    close_iterator(None)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_in_mid_epoch(persistent: bool) -> None:
    loader = DataLoader(workloads.Slow(100), num_workers=2, persistent_workers=persistent)
    iterator = open_iterator(loader)
    next(iterator)
    workers = iterator._workers  # type: ignore[attr-defined]
    close_iterator(iterator)
    close_iterator(iterator)  # twice is as good as once
    assert not any(worker.is_alive() for worker in workers)
    loader._iterator = None


def hung_iterator() -> Iterator[Any]:
    """Its worker sleeps for ever in the third batch."""
    data = workloads.SlowAt(8, 2, FOREVER_S)
    iterator = open_iterator(DataLoader(data, num_workers=1, multiprocessing_context="fork"))
    next(iterator)
    next(iterator)
    return iterator


@linux_only
def test_hung_workers_end_by_force() -> None:
    iterator = hung_iterator()
    begun = time.monotonic()
    close_iterator(iterator)
    assert time.monotonic() - begun < 3 * watchdog.GRACE_S
    doze(0.2)  # torch's report on the killed worker would come here


@linux_only
def test_ending_by_force_in_a_thread_does_not_hit_the_main_thread() -> None:
    iterator = hung_iterator()
    thread = threading.Thread(target=close_iterator, args=(iterator,))
    thread.start()
    doze(2 * watchdog.GRACE_S)  # torch's report would be raised here
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_start_that_is_interrupted_leaves_no_worker() -> None:
    workloads.InterruptedStart.starts = 0
    loader = DataLoader(
        workloads.InterruptedStart(8), num_workers=2, multiprocessing_context="spawn"
    )
    with pytest.raises(KeyboardInterrupt):
        open_iterator(loader)
    gc.collect()  # the half-made iterator goes without a complaint
    assert workloads.InterruptedStart.starts == 2


def test_what_is_under_way_is_received() -> None:
    loader = DataLoader(workloads.Slow(100), num_workers=2, prefetch_factor=4)
    iterator: Any = open_iterator(loader)
    next(iterator)
    assert iterator._tasks_outstanding > 0
    receive_rest(iterator)
    assert iterator._tasks_outstanding == 0
    close_iterator(iterator)


@linux_only
def test_receiving_ends_when_nothing_comes() -> None:
    iterator = hung_iterator()
    begun = time.monotonic()
    receive_rest(iterator)
    assert time.monotonic() - begun < 3 * watchdog.GRACE_S
    close_iterator(iterator)


@linux_only
def test_receiving_does_not_swallow_the_time_limit() -> None:
    iterator = hung_iterator()
    with pytest.raises(ProbeTimeout), time_limit(LIMIT_S, "Receiving"):
        receive_rest(iterator)
    close_iterator(iterator)


@linux_only
def test_nothing_comes_from_a_worker_that_died() -> None:
    iterator: Any = hung_iterator()
    watchdog._forget_pids(iterator)
    for worker in iterator._workers:
        worker.kill()
    receive_rest(iterator)
    close_iterator(iterator)


def test_there_is_nothing_to_receive_elsewhere() -> None:
    receive_rest(None)
    receive_rest(iter(DataLoader(workloads.Slow(4))))


# ---- global state ----------------------------------------------------------------------------


def test_every_random_state_is_put_back() -> None:
    generator = torch.Generator().manual_seed(1)
    expected = generator.get_state().tolist()
    before = workloads.random_state()
    with pytest.raises(KeyError), random_state_kept(generator, None):  # noqa: PT012
        torch.rand(3)
        torch.rand(3, generator=generator)
        np.random.rand()
        random.random()
        raise KeyError("x")
    assert workloads.random_state() == before
    assert generator.get_state().tolist() == expected


def test_generators_that_iterating_advances() -> None:
    first, second = torch.Generator(), torch.Generator()
    sampler = RandomSampler(range(4), generator=second)
    loader = DataLoader(range(4), sampler=sampler, generator=first)  # type: ignore[arg-type]
    found = generators_of(loader)
    assert any(generator is first for generator in found)
    assert any(generator is second for generator in found)
    assert generators_of([1, 2]) == []


def test_one_thread() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_only_warnings_about_tried_settings_are_hidden() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loader_warnings_hidden():
            warnings.warn("This DataLoader will create 9 worker processes in total.", stacklevel=1)
            warnings.warn("'pin_memory' argument is set as true but no accelerator", stacklevel=1)
            warnings.warn("your images are corrupt", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["your images are corrupt"]
