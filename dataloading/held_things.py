"""What hangs on a data set that workers should not share, or that grows in them."""

from __future__ import annotations

import contextlib
import io
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import sharedctypes
from typing import Any

import numpy as np
import torch

from dataloading.object_graph import is_a

STANDARD_STREAMS = 3  # descriptors 0 to 2: shared by every child on purpose
MANY_OBJECTS = 100_000  # fewer Python objects than this cost each worker little
ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu")

# Connections and files of libraries that do not survive a fork, by module: what they are called.
# A file object or a socket is recognised by its descriptor, whatever it is called.
HANDLE_MODULES = {
    "h5py": "HDF5 file",
    "lmdb": "LMDB environment",
    "sqlite3": "SQLite connection",
    "zipfile": "open archive",
    "tarfile": "open archive",
    "netCDF4": "netCDF file",
    "pymongo": "database connection",
    "psycopg": "database connection",
    "psycopg2": "database connection",
    "redis": "database connection",
    "requests": "HTTP session",
    "httpx": "HTTP client",
    "boto3": "S3 client",
    "botocore": "S3 client",
    "s3fs": "remote file system",
    "gcsfs": "remote file system",
}
HANDLE_METHODS = ("close", "cursor", "get_object", "begin", "request")  # what a handle can do
INNER_FILES = ("fp", "fileobj")  # where an archive keeps its file: None or closed once it is closed


@dataclass(frozen=True)
class Handle:
    """Something open that workers would share: where it hangs, and what it is."""

    path: str
    kind: str
    thing: Any


def handles_among(things: list[tuple[str, Any]]) -> Iterator[Handle]:
    """Open files, sockets and connections among what a data set holds."""
    for path, thing in things:
        if kind := _kind_of_handle(thing):
            yield Handle(path, kind, thing)


def _kind_of_handle(thing: Any) -> str | None:
    if is_a(thing, io.IOBase):
        return None if thing.closed or not _has_own_descriptor(thing) else "open file"
    if is_a(thing, socket.socket):
        return "socket" if thing.fileno() >= 0 else None
    kind = type(thing)
    known = HANDLE_MODULES.get(str(kind.__module__).split(".")[0])
    if known is None or not any(hasattr(kind, name) for name in HANDLE_METHODS):
        return None
    return None if _is_closed(thing) else known


def _has_own_descriptor(file: Any) -> bool:
    try:
        return int(file.fileno()) >= STANDARD_STREAMS
    except (OSError, ValueError, AttributeError):  # a file in memory has none
        return False


def _is_closed(archive: Any) -> bool:
    own = getattr(archive, "__dict__", {})
    return any(
        own[name] is None or getattr(own[name], "closed", False)
        for name in INNER_FILES
        if name in own
    )


def is_on_accelerator(thing: Any) -> bool:
    """Whether a tensor lives on an accelerator."""
    return is_a(thing, torch.Tensor) and thing.device.type in ACCELERATORS


def shares_state(things: list[tuple[str, Any]]) -> bool:
    """Whether there is memory that running workers see change: how a data set learns the epoch."""
    return any(
        is_a(thing, sharedctypes.SynchronizedBase)
        or (is_a(thing, torch.Tensor) and thing.device.type == "cpu" and thing.is_shared())
        for _, thing in things
    )


def most_objects(things: list[tuple[str, Any]]) -> tuple[str, int] | None:
    """The part of a data set with the most Python objects, and how many it holds.

    Each object has a counter of its own that reading it writes to, so that forked workers copy the
    pages they lie on. Numbers in an array have none.

    Args:
        things: Paths and parts of the data set, from `walk`.

    Returns:
        Path and count; None where no part holds more than `MANY_OBJECTS`.

    Example:
        >>> most_objects([("dataset.names", ["a name"] * 200_000)])
        ('dataset.names', 200000)
    """
    counted = [(path, *_objects_in(thing)) for path, thing in things]
    path, below, count = max(counted, key=lambda one: one[2], default=("", "", 0))
    return (path + below, count) if count >= MANY_OBJECTS else None


def _objects_in(thing: Any) -> tuple[str, int]:
    """Where below a container its Python objects are, and how many."""
    if is_a(thing, list | tuple | dict | set | frozenset):
        return "", len(thing) * _objects_per_item(thing)
    if is_a(thing, np.ndarray):
        return "", thing.size if thing.dtype == object else 0
    if str(type(thing).__module__).split(".")[0] != "pandas":
        return "", 0
    if type(thing).__name__ == "DataFrame":
        columns = [name for name, dtype in thing.dtypes.items() if _is_of_objects(dtype)]
        below = f"[{columns[0]!r}]" if len(columns) == 1 else f"[{columns!r}]"
        return below, len(thing) * len(columns)
    return "", len(thing) if _is_of_objects(getattr(thing, "dtype", None)) else 0


def _objects_per_item(thing: Any) -> int:
    first: Any = next(iter(dict.values(thing) if is_a(thing, dict) else thing), None)
    return 1 + (len(first) if is_a(first, list | tuple | dict) else 0)


def _is_of_objects(dtype: Any) -> bool:
    """Whether a pandas column holds Python objects: strings in Arrow are none."""
    if str(dtype) in ("str", "string"):
        return getattr(dtype, "storage", "python") != "pyarrow"
    return str(dtype) == "object"


@contextlib.contextmanager
def generators_kept(things: list[tuple[str, Any]]) -> Iterator[None]:
    """Put the random generators that a data set holds back as they were."""
    kept: list[tuple[Any, Any]] = []
    for _, thing in things:
        if is_a(thing, np.random.Generator):
            kept.append((thing, thing.bit_generator.state))
        elif is_a(thing, np.random.RandomState | torch.Generator):
            kept.append((thing, thing.get_state()))
        elif is_a(thing, random.Random) and not is_a(thing, random.SystemRandom):
            kept.append((thing, thing.getstate()))
    try:
        yield
    finally:
        for thing, state in kept:
            if is_a(thing, np.random.Generator):
                thing.bit_generator.state = state
            elif is_a(thing, random.Random):
                thing.setstate(state)
            else:
                thing.set_state(state)
