"""Ways to wait, to burn the CPU and to hold one another up, so that no fault has only one form.

All are chosen by name, so that what carries them can be pickled.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.multiprocessing as mp

NOISE = np.random.default_rng(0).random(2000)
BYTES = NOISE.tobytes()[:4096]


def _wait_for_socket(seconds: float) -> None:
    """Wait for an answer that never comes."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(seconds)
        try:
            here.recv(1)
        except TimeoutError:
            return


WAITS: dict[str, Callable[[float], Any]] = {
    "sleep": time.sleep,
    "event": lambda seconds: threading.Event().wait(seconds),
    "select": lambda seconds: select.select([], [], [], seconds),
    "socket": _wait_for_socket,
}

BURNS: dict[str, Callable[[], Any]] = {  # some 50 microseconds of work each
    "Python": lambda: sum(range(2000)),
    "NumPy": lambda: np.sin(NOISE).sum(),
    "zlib": lambda: zlib.compress(BYTES, 1),
    "hashlib": lambda: hashlib.sha256(BYTES * 8).digest(),
}


def wait(seconds: float, how: str = "sleep") -> None:
    """Wait without using the CPU."""
    WAITS[how](seconds)


def burn(seconds: float, how: str = "Python") -> None:
    """Use the CPU of this thread for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        BURNS[how]()


class FileLock:
    """A lock on a file; each process opens the file for itself."""

    def __init__(self) -> None:
        self.path = tempfile.mkstemp(suffix=".lock")[1]

    def __enter__(self) -> None:
        import fcntl

        self.file = open(self.path, "wb")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


class Token:
    """One byte in a pipe: who has read it may go on, and writes it back."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        os.write(self.sink, b"t")

    def __enter__(self) -> None:
        os.read(self.source, 1)

    def __exit__(self, *error: object) -> None:
        os.write(self.sink, b"t")


LOCKS: dict[str, Callable[[], Any]] = {
    "lock": mp.Lock,
    "semaphore": lambda: mp.Semaphore(1),
    "file lock": FileLock,
    "token in a pipe": Token,
}
