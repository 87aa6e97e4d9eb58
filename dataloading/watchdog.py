"""What keeps a probe from hanging, and from leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import random
import signal
import sys
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
BETWEEN = tuple(  # where a `with` block has not begun yet, or has ended already
    getattr(contextlib._GeneratorContextManager, name).__code__
    for name in ("__enter__", "__exit__")
)


class ProbeTimeout(TimeoutError):
    """A probe ran past its time limit; the text says what it was waiting for."""


def time_limit(
    seconds: float, doing: str | Callable[[], str]
) -> contextlib.AbstractContextManager[None]:
    """Raise `ProbeTimeout` in this thread when the block runs longer than `seconds`.

    In the main thread of Linux and macOS an alarm signal interrupts even a blocking call. Elsewhere
    the exception arrives as soon as Python code runs again.

    Args:
        seconds: The limit.
        doing: What the block does, or a function that says it, for the text of the error.

    Returns:
        A context manager around the block.

    Raises:
        ProbeTimeout: The limit was reached.
    """

    def text() -> str:
        what = doing if isinstance(doing, str) else doing()
        return f"{what}: stopped by the watchdog, {seconds:.3g} s after the probe began."

    main = threading.current_thread() is threading.main_thread()
    limit = _alarm if main and hasattr(signal, "setitimer") else _async_exception
    return limit(seconds, text)


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
        elif is_open and frame is not None and frame.f_code in BETWEEN:
            set_next()  # raised here, the exception would miss the `finally` below
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
    """The limit by an exception that another thread raises in this one, once."""
    thread_id = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    is_open, rang = True, False

    class Rang(ProbeTimeout):
        """Only a class can be raised in another thread, so the class brings its text."""

        def __init__(self, *_: Any) -> None:
            super().__init__(text())

    Rang.__name__ = Rang.__qualname__ = ProbeTimeout.__name__

    def ring() -> None:
        nonlocal rang
        with lock:
            if is_open:
                rang = True
                raise_in(thread_id, ctypes.py_object(Rang))

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        with lock:
            is_open = False
            if rang:
                raise_in(thread_id, None)  # one that has not arrived yet must not arrive later
        timer.cancel()
        timer.join()


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

    Its `__del__` expects a whole iterator, and would print an `AttributeError`. Its queues have
    threads, which would live as long as the error is kept.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        half_made: Any = frame.f_locals.get("self")
        if hasattr(half_made, "_shutdown_workers"):
            half_made._shutdown = True
            for queue in getattr(half_made, "_index_queues", ()):
                queue.cancel_join_thread()
                queue.close()


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

    if sys.is_finalizing():  # no thread starts any more: waiting for one would never end
        iterator._shutdown = True
        for queue in getattr(iterator, "_index_queues", ()):
            queue.cancel_join_thread()
            queue.close()
        force()
        return
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
