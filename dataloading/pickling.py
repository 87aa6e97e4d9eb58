"""Whether worker processes could be given a loader's parts, and what that would cost.

Nothing is sent anywhere, and no tensor is moved to shared memory: a pickler that counts bytes and
throws them away goes through the object as a start of workers by spawn or forkserver would.
"""

from __future__ import annotations

import copyreg
import pickle
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, queues, synchronize
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from dataloading.object_graph import parts

BUDGET_S = 3.0  # for finding the path to what cannot be pickled
SHARED_BY_SYSTEM = (  # handed over by the start method itself, not copied
    torch.Tensor,
    synchronize.SemLock,
    connection.Connection,
    queues.Queue,
)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # says nothing to the reader, and differs every time
FAILURES = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, RecursionError)


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
    """Pickles as for a worker, counts bytes, and notes what lives in `__main__`."""

    def __init__(self) -> None:
        self.sink = _Sink()
        self.in_main: list[str] = []
        super().__init__(self.sink, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=self._buffer)
        self.dispatch_table = copyreg.dispatch_table | getattr(
            ForkingPickler, "_extra_reducers", {}
        )

    def _buffer(self, buffer: Any) -> None:
        self.sink.count += buffer.raw().nbytes

    def reducer_override(self, thing: Any) -> Any:
        """Leave out what is shared anyway; look out for names that a child could not import."""
        if isinstance(thing, SHARED_BY_SYSTEM):
            return int, ()
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            self.in_main.append(thing.__qualname__)
        return NotImplemented


@dataclass(frozen=True)
class PickleProbe:
    """What pickling one part of a loader showed.

    Attributes:
        name: The part, such as "dataset".
        error: Why it cannot be pickled, or None.
        path: Attribute path to what cannot be pickled, such as `dataset.transform.transforms[2]`.
        size_bytes: Bytes that each worker would be sent.
        seconds: How long pickling took.
        in_main: Classes and functions defined in `__main__`.
    """

    name: str
    error: str | None
    path: str | None
    size_bytes: int
    seconds: float
    in_main: tuple[str, ...] = field(default=())


def probe_pickling(thing: Any, name: str) -> PickleProbe:
    """Try to pickle a part of a loader, without keeping the bytes.

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
    error, pickler = _attempt(thing)
    seconds = time.perf_counter() - started
    path = _path_to_culprit(thing, name) if error is not None else None
    return PickleProbe(
        name, error, path, pickler.sink.count, seconds, tuple(dict.fromkeys(pickler.in_main))
    )


def _attempt(thing: Any) -> tuple[str | None, CountingPickler]:
    pickler = CountingPickler()
    try:
        pickler.dump(thing)
    except FAILURES as error:
        return f"{type(error).__name__}: {ADDRESS.sub('', str(error))}", pickler
    return None, pickler


def _path_to_culprit(thing: Any, name: str) -> str:
    """Go down to the innermost part that cannot be pickled by itself."""
    deadline = time.perf_counter() + BUDGET_S
    path, seen = name, {id(thing)}
    while True:
        for part_path, part in _all_parts(thing, path):
            if time.perf_counter() > deadline:
                return path
            if id(part) not in seen and _attempt(part)[0] is not None:
                path, thing = part_path, part
                seen.add(id(part))
                break
        else:
            return path


def _all_parts(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Like `parts`, but through long lists to their end."""
    if isinstance(thing, list | tuple):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(thing))
    else:
        yield from parts(thing, path)


def main_is_importable() -> bool:
    """Whether a spawned child can import what is defined in `__main__`: not in a notebook."""
    main = sys.modules.get("__main__")
    return (
        getattr(main, "__file__", None) is not None
        and not hasattr(sys, "ps1")
        and ("ipykernel" not in sys.modules or getattr(main, "__spec__", None) is not None)
    )
