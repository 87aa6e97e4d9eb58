"""Whether worker processes could be given a loader's parts, and what that would cost.

Nothing is sent anywhere, and no tensor is moved to shared memory: a pickler that counts bytes and
throws them away goes through the object as a start of workers by spawn or forkserver would.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import pickle
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, queues, sharedctypes, synchronize
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from dataloading.object_graph import is_a, parts
from dataloading.watchdog import ProbeTimeout, time_limit

LIMIT_S = 1.5  # pickling that takes longer has shown that it takes long
CULPRIT_S = 1.0  # for finding the path to what cannot be pickled
SENT_BYTES_PER_S = 1e9  # writing to a pipe; reading at its other end takes about as long
SHARED_BY_SYSTEM = (  # handed over by the start method itself, not copied
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
    socket.socket,
    synchronize.SemLock,
    synchronize.Condition,
    synchronize.Event,
    synchronize.Barrier,
    sharedctypes.SynchronizedBase,
    ctypes.Array,
    ctypes.Structure,
    ctypes._SimpleCData,
    connection.Connection,
    queues.Queue,
    queues.SimpleQueue,
)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # says nothing to the reader, and differs every time


class _Sink:
    """A file that counts and forgets."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        """Count bytes."""
        size = memoryview(data).nbytes
        self.count += size
        return size


class CountingPickler(pickle.Pickler):
    """Pickles as for a worker, counts bytes and tensors, and notes what lives in `__main__`."""

    def __init__(self) -> None:
        self.sink = _Sink()
        self.in_main: list[str] = []
        self.tensors = 0
        super().__init__(self.sink, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=self._buffer)
        self.dispatch_table = copyreg.dispatch_table | getattr(
            ForkingPickler, "_extra_reducers", {}
        )

    def _buffer(self, buffer: Any) -> None:
        self.sink.count += buffer.raw().nbytes

    def reducer_override(self, thing: Any) -> Any:
        """Leave out what is shared anyway; look out for names that a child could not import."""
        if is_a(thing, SHARED_BY_SYSTEM):
            if is_a(thing, torch.Tensor):
                self._share(thing)
            return int, ()
        kind = type(thing)
        named = thing if issubclass(kind, type) or hasattr(kind, "__get__") else None  # a function
        if named is not None and getattr(named, "__module__", None) == "__main__":
            self.in_main.append(getattr(named, "__qualname__", repr(named)))
        return NotImplemented

    def _share(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf:  # torch refuses such a tensor
            raise RuntimeError("a tensor of a gradient graph cannot be sent; detach() it")
        self.tensors += 1


@dataclass(frozen=True)
class PickleProbe:
    """What pickling one part of a loader showed.

    Attributes:
        name: The part, such as "dataset".
        error: Why it cannot be pickled, or None.
        path: Attribute path to what cannot be pickled, such as `dataset.transform.transforms[2]`.
        size_bytes: Bytes that each worker would be sent; tensors are shared and do not count.
        seconds: How long pickling them and writing them to a pipe takes.
        in_main: Classes and functions defined in `__main__`.
        tensors: Tensors, which are shared one by one.
        finished: False where pickling was cut short: then the figures are lower limits.
    """

    name: str
    error: str | None
    path: str | None
    size_bytes: int
    seconds: float
    in_main: tuple[str, ...] = field(default=())
    tensors: int = 0
    finished: bool = True


def probe_pickling(thing: Any, name: str) -> PickleProbe:
    """Try to pickle a part of a loader, without keeping the bytes.

    Takes `LIMIT_S` at most, and `CULPRIT_S` more where it fails.

    Args:
        thing: The part.
        name: What to call it in paths.

    Returns:
        A `PickleProbe`.

    Example:
        >>> probe_pickling([1, lambda x: x], "collate_fn").path
        'collate_fn[1]'
    """
    started = time.perf_counter()
    tried = _attempt(thing, LIMIT_S)
    seconds = time.perf_counter() - started + tried.pickler.sink.count / SENT_BYTES_PER_S
    return PickleProbe(
        name=name,
        error=tried.error,
        path=_path_to_culprit(thing, name) if tried.error is not None else None,
        size_bytes=tried.pickler.sink.count,
        seconds=seconds,
        in_main=tuple(dict.fromkeys(tried.pickler.in_main)),
        tensors=tried.pickler.tensors,
        finished=tried.finished,
    )


@dataclass(frozen=True)
class _Attempt:
    pickler: CountingPickler
    error: str | None = None
    finished: bool = True


def _attempt(thing: Any, limit_s: float) -> _Attempt:
    pickler = CountingPickler()
    try:
        with time_limit(limit_s, "Pickling"):
            pickler.dump(thing)
    except ProbeTimeout:
        return _Attempt(pickler, finished=False)
    except Exception as error:  # the object's own code may raise anything
        return _Attempt(pickler, f"{type(error).__name__}: {ADDRESS.sub('', str(error))}")
    return _Attempt(pickler)


def _path_to_culprit(thing: Any, name: str) -> str:
    """Go down to the innermost part that cannot be pickled by itself."""
    deadline = time.perf_counter() + CULPRIT_S
    path, seen = name, {id(thing)}
    while True:
        for part_path, part in _pickled_parts(thing, path):
            left = deadline - time.perf_counter()
            if left <= 0:
                return path
            if id(part) not in seen and _attempt(part, left).error is not None:
                path, thing = part_path, part
                seen.add(id(part))
                break
        else:
            return path


def _pickled_parts(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The parts that are pickled along: not those that `__getstate__` leaves out."""
    if is_a(thing, dict | list | tuple | functools.partial):
        yield from parts(thing, path, most=None)
        return
    if is_a(thing, SHARED_BY_SYSTEM):
        return
    try:
        reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # the object's own code: then the object itself is the culprit
        return
    if not is_a(reduced, tuple):  # a function or class, pickled by its name
        return
    state: Any = reduced[2] if len(reduced) > 2 else None
    # a class with slots gives two: what stands in its __dict__, and what in its slots
    for part in state if is_a(state, tuple) and len(state) == 2 else (state,):
        if is_a(part, dict):
            yield from ((f"{path}.{key}", value) for key, value in part.items())
        elif part is not None:
            yield f"{path}.__getstate__()", part
    for number, part in enumerate(reduced[1]):
        if not is_a(part, type):  # the object's own class
            yield f"{path}.__reduce__()[1][{number}]", part


def main_is_importable() -> bool:
    """Whether a spawned child can import what is defined in `__main__`: not in a notebook."""
    main = sys.modules.get("__main__")
    return (
        getattr(main, "__file__", None) is not None
        and not hasattr(sys, "ps1")
        and ("ipykernel" not in sys.modules or getattr(main, "__spec__", None) is not None)
    )
