"""What keeps a probe from hanging, and from leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

GRACE_S = 1.0  # how long workers may take to end by themselves before they are terminated
AGAIN_S = 5.0  # code that swallowed the time-out (`except Exception`) is told again after this
LEAST_TIMER_S = 1e-3  # a timer set to zero would never ring


class ProbeTimeout(TimeoutError):
    """A probe ran past its time limit; the text says what it was waiting for."""


@contextlib.contextmanager
def time_limit(seconds: float, doing: str | Callable[[], str]) -> Iterator[None]:
    """Raise `ProbeTimeout` in this thread when the block runs longer than `seconds`.

    In the main thread of Linux and macOS an alarm signal interrupts even a blocking call. Elsewhere
    the exception arrives as soon as Python code runs again.

    Args:
        seconds: The limit.
        doing: What the block does, or a function that says it, for the text of the error.

    Raises:
        ProbeTimeout: The limit was reached.
    """

    def text() -> str:
        what = doing if isinstance(doing, str) else doing()
        return f"{what}: stopped by the watchdog, {seconds:.3g} s after the probe began."

    main = threading.current_thread() is threading.main_thread()
    if main and hasattr(signal, "setitimer"):
        with _alarm(seconds, text):
            yield
    else:
        with _async_exception(seconds, text):
            yield


@contextlib.contextmanager
def _alarm(seconds: float, text: Callable[[], str]) -> Iterator[None]:
    """The limit by an alarm signal; somebody else's alarm (an outer limit) keeps its time."""
    previous = signal.getsignal(signal.SIGALRM)
    outer_left, outer_interval = signal.getitimer(signal.ITIMER_REAL)
    now = time.monotonic()
    due = now + seconds
    outer_due = now + outer_left if outer_left else math.inf
    is_open = True

    def set_next() -> None:
        first = min(due, outer_due) if callable(previous) else due
        signal.setitimer(signal.ITIMER_REAL, max(first - time.monotonic(), LEAST_TIMER_S))

    def ring(signum: int, frame: Any) -> None:
        nonlocal due, outer_due
        now = time.monotonic()
        if callable(previous) and outer_due <= now + LEAST_TIMER_S:
            outer_due = now + outer_interval if outer_interval else math.inf
            set_next()
            previous(signum, frame)
        elif is_open:
            due = now + AGAIN_S
            set_next()
            raise ProbeTimeout(text())

    signal.signal(signal.SIGALRM, ring)
    try:
        try:
            set_next()
            yield
        finally:
            is_open = False  # an alarm that comes while we put things back is ignored
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
        if outer_due < math.inf:
            left = max(outer_due - time.monotonic(), LEAST_TIMER_S)
            signal.setitimer(signal.ITIMER_REAL, left, outer_interval)


@contextlib.contextmanager
def _async_exception(seconds: float, text: Callable[[], str]) -> Iterator[None]:
    """The limit by an exception that another thread raises in this one."""
    thread_id = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    closed, rang = threading.Event(), threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        wait_s = seconds
        while not closed.wait(wait_s):
            with lock:
                if not closed.is_set():
                    rang.set()
                    raise_in(thread_id, ctypes.py_object(ProbeTimeout))
            wait_s = AGAIN_S

    watcher = threading.Thread(target=watch, name="probe time limit", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                closed.set()
    except ProbeTimeout:
        if rang.is_set():
            raise ProbeTimeout(text()) from None
        raise
    finally:
        closed.set()
        if rang.is_set():
            raise_in(thread_id, None)  # one that has not arrived yet must not arrive later
        watcher.join()


def open_iterator(dataloader: Any) -> Iterator[Any]:
    """`iter(dataloader)`; where starting its workers is cut short, those that run are ended."""
    before = multiprocessing.active_children()
    try:
        return iter(dataloader)
    except BaseException as error:
        _hush_half_made(error)
        begun = [child for child in multiprocessing.active_children() if child not in before]
        for child in begun:
            child.kill()
        for child in begun:
            child.join(timeout=GRACE_S)
        raise


def _hush_half_made(error: BaseException) -> None:
    """Tell the iterator whose constructor failed that there is nothing to shut down any more.

    Its `__del__` expects a whole iterator, and would print an `AttributeError`.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        half_made: Any = frame.f_locals.get("self")
        if hasattr(half_made, "_shutdown_workers"):
            half_made._shutdown = True


def close_iterator(iterator: Any) -> None:
    """End the workers of a `DataLoader` iterator, by force where they do not end by themselves.

    Uses private parts of torch's multiprocessing iterator where they exist (torch 2.6 to 2.14):
    `_shutdown_workers`, `_workers`, `_tasks_outstanding`, `_try_get_data`, `_worker_pids_set`. Any
    other iterator is only closed.

    Args:
        iterator: What `iter(dataloader)` gave, or None.
    """
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        if hasattr(iterator, "close"):
            iterator.close()
        return
    workers = list(getattr(iterator, "_workers", ()))

    def force() -> None:
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    timer = threading.Timer(GRACE_S, force)
    timer.daemon = True
    try:
        _forget_pids(iterator)
        if any(_ends_in_full(worker) for worker in workers):
            receive_rest(iterator)
        timer.start()
        shutdown()
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        force()
        for worker in workers:
            worker.join(timeout=GRACE_S)


def _forget_pids(iterator: Any) -> None:
    """Take our workers off torch's watch list: it would report those that we end by force.

    The report is an exception that comes with the signal of the ended child, at any place in the
    main thread.
    """
    remove = getattr(torch.utils.data._utils.signal_handling, "_remove_worker_pids", None)
    if remove is not None and getattr(iterator, "_worker_pids_set", False):
        iterator._worker_pids_set = False
        remove(id(iterator))


def receive_rest(iterator: Any) -> None:
    """Take the batches that the workers of a `DataLoader` iterator still have under way.

    Waits `GRACE_S` for them at most. Any other iterator is left alone.
    """
    deadline = time.monotonic() + GRACE_S
    try:
        while getattr(iterator, "_tasks_outstanding", 0) > 0:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            arrived, _ = iterator._try_get_data(timeout=left)
            iterator._tasks_outstanding -= int(arrived)
    except ProbeTimeout:  # an OSError as well
        raise
    except (RuntimeError, AttributeError, EOFError, OSError):
        return  # a worker has died: nothing more will come


def _ends_in_full(worker: Any) -> bool:
    """Whether a worker process ends its interpreter in full, as spawned ones do.

    If the thread of its queue is sharing tensors at that moment, C++ aborts the worker: "terminate
    called without an active exception". With nothing under way that thread is idle.
    """
    method = getattr(worker, "_start_method", None)
    return (method or multiprocessing.get_start_method(allow_none=True)) == "spawn"


@contextlib.contextmanager
def random_state_kept(*generators: torch.Generator | None) -> Iterator[None]:
    """Put every global random state, and the given generators, back as they were.

    Example:
        >>> with random_state_kept():
        ...     _ = torch.manual_seed(1)
    """
    known = [g for g in generators if g is not None]
    states = [g.get_state() for g in known]
    python, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in zip(known, states, strict=True):
            generator.set_state(state)


def generators_of(dataloader: Any) -> list[torch.Generator | None]:
    """The random generators that iterating a loader advances."""
    sampler = getattr(dataloader, "sampler", None)
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    owners = (dataloader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [g for g in found if isinstance(g, torch.Generator)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run with one intra-op thread, as a DataLoader worker does, and put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def loader_warnings_hidden() -> Iterator[None]:
    """Hide torch's warnings about worker counts and pinning while we try settings on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will create .* worker processes")
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        yield
