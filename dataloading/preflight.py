"""What will go wrong, seen before anything starts.

No worker of the loader is started, no random state is touched, and nothing of the loader changes.
Looking takes at most a few seconds, also for a data set of a million items.
"""

from __future__ import annotations

import gc
import io
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from dataloading.batches import batch_bytes, count_tensors
from dataloading.machine import Machine, inspect_machine
from dataloading.object_graph import walk
from dataloading.pickling import PickleProbe, main_is_importable, probe_pickling
from dataloading.profiling import StageClock, with_clocks
from dataloading.settings import LoaderSettings, ineffective_options
from dataloading.watchdog import ProbeTimeout, generators_of, random_state_kept, time_limit

SAMPLE_LIMIT_S = 2.0  # fetching a few samples for their size and shape may take so long
IMAGES = 64  # files of an image folder that are decoded
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SAMPLES = 4  # fetched to see whether shapes differ
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


@dataclass(frozen=True)
class Handle:
    """Something open that workers would share: where it hangs, and what it is."""

    path: str
    kind: str


@dataclass(frozen=True)
class BatchSize:
    """What a batch would hold, from a few samples."""

    batch_bytes: int
    tensors: int


@dataclass(frozen=True)
class Preflight:
    """Everything that was seen; the rules of `preflight_rules` read it.

    Attributes:
        loader: The loader.
        settings: Its settings.
        machine: Where it would run.
        start_method: The start method that its workers would use.
        probes: What pickling its parts showed; empty where that was not asked for.
        main_importable: Whether children can import what is defined in `__main__`.
        handles: Open handles that its data set holds.
        on_accelerator: Paths of tensors on an accelerator.
        objects: Path and number of Python objects in the longest list or dict, or None.
        batch: Size of a batch, or None with the reason in `notes`.
        uneven: Field and shapes that cannot be collated, or None.
        unpinnable: Name of a batch type that pinning passes by, or None.
        ineffective: Options without effect.
        bad_images: Path and reason of image files that cannot be read, among those looked at.
        live_queued_batches: Batches that other loaders with living workers may hold.
        epochs: How many epochs are planned, or None.
    """

    loader: DataLoader
    settings: LoaderSettings
    machine: Machine
    start_method: str
    probes: tuple[PickleProbe, ...] = ()
    main_importable: bool = True
    handles: tuple[Handle, ...] = ()
    on_accelerator: tuple[str, ...] = ()
    objects: tuple[str, int] | None = None
    batch: BatchSize | None = None
    uneven: tuple[str, tuple[str, ...]] | None = None
    unpinnable: str | None = None
    ineffective: dict[str, str] | None = None
    bad_images: tuple[tuple[str, str], ...] = ()
    live_queued_batches: int = 0
    epochs: int | None = None


def look_at(
    dataloader: DataLoader, *, epochs: int | None = None, spawn_check: bool = True
) -> Preflight:
    """Look at a loader without starting it.

    Args:
        dataloader: The loader.
        epochs: How many epochs are planned.
        spawn_check: Also try whether workers could be started by spawn or forkserver.

    Returns:
        A `Preflight`.

    Raises:
        TypeError: It is not a `DataLoader`.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}: only a "
            "DataLoader can be checked before it starts."
        )
    settings = LoaderSettings.of(dataloader)
    machine = inspect_machine()
    method = settings.multiprocessing_context or machine.start_method
    probes: tuple[PickleProbe, ...] = ()
    if spawn_check or method != "fork":
        probes = tuple(probe_pickling(part, name) for name, part in parts_for_workers(dataloader))
    things = list(walk(dataloader.dataset, "dataset"))
    with random_state_kept(*generators_of(dataloader)):
        batch, uneven, unpinnable = _try_samples(dataloader)
    return Preflight(
        loader=dataloader,
        settings=settings,
        machine=machine,
        start_method=method,
        probes=probes,
        main_importable=main_is_importable(),
        handles=tuple(handles_among(things)),
        on_accelerator=tuple(path for path, thing in things if is_on_accelerator(thing)),
        objects=most_objects(things),
        batch=batch,
        uneven=uneven,
        unpinnable=unpinnable,
        ineffective=ineffective_options(dataloader),
        bad_images=_bad_images(dataloader.dataset),
        live_queued_batches=_live_queues(dataloader),
        epochs=epochs,
    )


def parts_for_workers(dataloader: DataLoader) -> list[tuple[str, Any]]:
    """What every worker is given, with its name."""
    parts = [("dataset", dataloader.dataset), ("collate_fn", dataloader.collate_fn)]
    if dataloader.worker_init_fn is not None:
        parts.append(("worker_init_fn", dataloader.worker_init_fn))
    return parts


def handles_among(things: list[tuple[str, Any]]) -> Iterator[Handle]:
    """Open files, sockets and connections among what a data set holds."""
    for path, thing in things:
        if isinstance(thing, io.IOBase):
            if not thing.closed and _descriptor(thing) is not None:
                yield Handle(path, "open file")
        elif isinstance(thing, socket.socket):
            if thing.fileno() >= 0:
                yield Handle(path, "socket")
        elif not isinstance(thing, type) and (kind := _known_handle(thing)):
            yield Handle(path, kind)


def _descriptor(thing: Any) -> int | None:
    try:
        return int(thing.fileno())
    except (OSError, ValueError):  # an in-memory file has none
        return None


def _known_handle(thing: Any) -> str | None:
    module = (type(thing).__module__ or "").split(".")[0]
    if module in HANDLE_MODULES and any(hasattr(thing, name) for name in HANDLE_METHODS):
        in_memory = getattr(thing, "fp", True) is None  # a zip file that was closed
        return None if in_memory else HANDLE_MODULES[module]
    return None


def is_on_accelerator(thing: Any) -> bool:
    """Whether a tensor or module lives on an accelerator."""
    if isinstance(thing, torch.Tensor):
        return thing.device.type in ACCELERATORS
    if isinstance(thing, torch.nn.Module):
        first = next(thing.parameters(), None)
        return first is not None and first.device.type in ACCELERATORS
    return False


def most_objects(things: list[tuple[str, Any]]) -> tuple[str, int] | None:
    """The longest list or dict of Python objects, and how many it holds.

    Each object has a counter of its own that reading it writes to, so that forked workers copy the
    pages they lie on. Numbers in an array have none.
    """
    longest: tuple[str, int] | None = None
    for path, thing in things:
        if isinstance(thing, list | tuple | dict | set) and (
            longest is None or len(thing) > longest[1]
        ):
            longest = (path, len(thing) * _objects_per_item(thing))
        elif (columns := _object_columns(thing)) and (longest is None or columns > longest[1]):
            longest = (path, columns)
    return longest if longest is not None and longest[1] >= MANY_OBJECTS else None


def _objects_per_item(thing: Any) -> int:
    first = next(iter(thing.values() if isinstance(thing, dict) else thing), None)
    return 1 + (len(first) if isinstance(first, list | tuple | dict) else 0)


def _object_columns(thing: Any) -> int:
    """Python objects in a data frame's object columns, or in an object array."""
    dtypes = getattr(thing, "dtypes", None)
    if hasattr(thing, "columns") and dtypes is not None:
        return len(thing) * sum(1 for dtype in dtypes if str(dtype) in ("object", "str", "string"))
    if str(getattr(thing, "dtype", "")) == "object" and hasattr(thing, "size"):
        return int(thing.size)
    return 0


def _try_samples(
    dataloader: DataLoader,
) -> tuple[BatchSize | None, tuple[str, tuple[str, ...]] | None, str | None]:
    """Fetch a few samples on a copy of the data set: size of a batch, shapes, type of a batch."""
    if isinstance(dataloader.dataset, IterableDataset) or not hasattr(
        dataloader.dataset, "__len__"
    ):
        return None, None, None
    count = len(dataloader.dataset)
    if count == 0:
        return None, None, None
    dataset = with_clocks(dataloader.dataset, StageClock())
    picked = sorted({0, count // 3, 2 * count // 3, count - 1})[:SAMPLES]
    samples = []
    try:
        with time_limit(SAMPLE_LIMIT_S, "Looking at a few samples"):
            for index in picked:
                samples.append(dataset[index])
    except ProbeTimeout:
        if not samples:
            return None, None, None
    except Exception:  # the data set's own code; running the loader will report it with its index
        return None, None, None
    size = sum(batch_bytes(s) for s in samples) / len(samples)
    per_batch = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None) or 1
    batch = BatchSize(int(size * per_batch), max(1, count_tensors(samples[0])))
    uneven = None
    if dataloader.collate_fn is torch.utils.data.default_collate:
        uneven = uneven_field(samples)
    return batch, uneven, _unpinnable(dataloader, samples)


def _bad_images(dataset: Any) -> tuple[tuple[str, str], ...]:
    """Files of an image folder that cannot be read, among some spread over all of them."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or not samples or "torchvision" not in sys.modules:
        return ()
    first = samples[0][0] if isinstance(samples[0], tuple) else None
    if not isinstance(first, str) or not first.lower().endswith(IMAGE_ENDINGS):
        return ()
    from dataloading.images import check_images

    try:
        with time_limit(SAMPLE_LIMIT_S, "Looking at image files"):
            return tuple(check_images([path for path, *_ in samples], limit=IMAGES))
    except ProbeTimeout:  # a slow disk: running the loader will meet the files anyway
        return ()


def uneven_field(samples: list[Any]) -> tuple[str, tuple[str, ...]] | None:
    """The field whose shapes differ between samples, and the shapes.

    Example:
        >>> uneven_field([(torch.zeros(3), 1), (torch.zeros(4), 1)])
        ('sample[0]', ('(3,)', '(4,)'))
    """
    shapes: dict[str, list[str]] = {}
    for sample in samples:
        for path, thing in walk(sample, "sample"):
            if isinstance(thing, torch.Tensor) or hasattr(thing, "shape"):
                shapes.setdefault(path, []).append(str(tuple(thing.shape)))
    for path, seen in shapes.items():
        if len(set(seen)) > 1:
            return path, tuple(dict.fromkeys(seen))
    return None


def _unpinnable(dataloader: DataLoader, samples: list[Any]) -> str | None:
    """The name of a batch type that `pin_memory` passes by without a word."""
    if not dataloader.pin_memory or dataloader.batch_sampler is None:
        return None
    try:
        batch = dataloader.collate_fn(samples)
    except Exception:  # the user's own code; running the loader will report it
        return None
    known = (torch.Tensor, str, bytes, dict, list, tuple)
    if isinstance(batch, known) or hasattr(batch, "pin_memory") or hasattr(batch, "keys"):
        return None
    return type(batch).__name__


def _live_queues(dataloader: DataLoader) -> int:
    """Batches that the queues of other loaders with living workers may hold."""
    return sum(
        LoaderSettings.of(thing).queued_batches
        for thing in gc.get_objects()
        if issubclass(type(thing), DataLoader)
        and thing is not dataloader
        and getattr(thing, "_iterator", None) is not None
    )
