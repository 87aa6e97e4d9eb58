"""What keeps a probe from hanging, and from leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

GRACE_S = 1.0  # how long workers may take to end by themselves before they are terminated


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
    def ring(signum: int, frame: Any) -> None:
        raise ProbeTimeout(text())

    previous = signal.signal(signal.SIGALRM, ring)
    outer_left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer_left:  # somebody else's alarm: give it back the time it has left
            left = max(outer_left - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left)


@contextlib.contextmanager
def _async_exception(seconds: float, text: Callable[[], str]) -> Iterator[None]:
    thread_id = threading.get_ident()
    lock = threading.Lock()
    state = {"open": True, "rang": False}

    def ring() -> None:
        with lock:
            if state["open"]:
                state["rang"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread_id), ctypes.py_object(ProbeTimeout)
                )

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ProbeTimeout:
        if state["rang"]:
            raise ProbeTimeout(text()) from None
        raise
    finally:
        with lock:
            state["open"] = False
        timer.cancel()
        timer.join()


def close_iterator(iterator: Any) -> None:
    """End the workers of a `DataLoader` iterator, by force where they do not end by themselves.

    Uses the private `_shutdown_workers` and `_workers` of torch's multiprocessing iterator where
    they exist (torch 2.6 to 2.14); any other iterator is only closed.

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
    timer.start()
    try:
        shutdown()
    except RuntimeError as error:  # torch reports the worker that was killed just now
        if "DataLoader worker" not in str(error):
            raise
    finally:
        timer.cancel()
        timer.join()
        force()
        for worker in workers:
            worker.join(timeout=GRACE_S)


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
