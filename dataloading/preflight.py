"""What will go wrong, seen before anything starts.

No worker of the loader is started, no random state is touched, and nothing of the loader changes.
Looking takes at most a few seconds, also for a data set of a million items.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from dataloading.arguments import check_int
from dataloading.held_things import (
    Handle,
    generators_kept,
    handles_among,
    is_on_accelerator,
    most_objects,
    shares_state,
)
from dataloading.machine import Machine, inspect_machine
from dataloading.main_script import MainScript, read_main_script
from dataloading.object_graph import is_a, walk
from dataloading.peeking import BatchSize, Peek, peek
from dataloading.pickling import PickleProbe, main_is_importable, probe_pickling
from dataloading.settings import LoaderSettings, ineffective_options
from dataloading.sharding import gives_shares
from dataloading.storage import Storage, find_network_storage
from dataloading.watchdog import ProbeTimeout, generators_of, random_state_kept, time_limit

IMAGES = 64  # files of an image folder that are decoded
IMAGE_LIMIT_S = 1.0  # for decoding them
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


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
        script: The script that is running, or None.
        handles: Open handles that its data set holds, or opens when asked for its length.
        on_accelerator: Paths of tensors on an accelerator, in the data set or in a sample.
        objects: Path and number of Python objects in the part that holds most, or None.
        shares_state: Whether the data set holds memory that running workers see change.
        peek: What the length and a few samples showed.
        ineffective: Options without effect.
        shares_out: Whether each of several workers gets samples of its own; None where not told.
        storage: Its files on a network mount, or None.
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
    script: MainScript | None = None
    handles: tuple[Handle, ...] = ()
    on_accelerator: tuple[str, ...] = ()
    objects: tuple[str, int] | None = None
    shares_state: bool = False
    peek: Peek = field(default_factory=Peek)
    ineffective: dict[str, str] = field(default_factory=dict)
    shares_out: bool | None = None
    storage: Storage | None = None
    bad_images: tuple[tuple[str, str], ...] = ()
    live_queued_batches: int = 0
    epochs: int | None = None

    @property
    def batch(self) -> BatchSize | None:
        """Size of a batch, or None where no sample could be fetched."""
        return self.peek.batch


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
    check_int("epochs", epochs, least=1, optional=True)
    settings = LoaderSettings.of(dataloader)
    machine = inspect_machine()
    method = settings.multiprocessing_context or machine.start_method
    held = list(walk(dataloader.dataset, "dataset"))
    probes: list[PickleProbe] = []
    with random_state_kept(*generators_of(dataloader)), generators_kept(held):
        if spawn_check or method != "fork":
            probes = [probe_pickling(part, name) for name, part in parts_for_workers(dataloader)]
        seen = peek(dataloader, held)
    on_accelerator = [path for path, thing in held if is_on_accelerator(thing)]
    return Preflight(
        loader=dataloader,
        settings=settings,
        machine=machine,
        start_method=method,
        probes=tuple(probes),
        main_importable=main_is_importable(),
        script=read_main_script(),
        handles=(*handles_among(held), *seen.opened_by_len),
        on_accelerator=(*on_accelerator, *seen.on_accelerator),
        objects=most_objects(held),
        shares_state=shares_state(held),
        peek=seen,
        ineffective=ineffective_options(dataloader),
        shares_out=gives_shares(dataloader) if settings.num_workers > 1 else None,
        storage=find_network_storage(held),
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


def _bad_images(dataset: Any) -> tuple[tuple[str, str], ...]:
    """Files of an image folder that cannot be read, among some spread over all of them."""
    parts = getattr(dataset, "__dict__", {})
    while "samples" not in parts and "dataset" in parts:  # a subset, a cache and the like
        parts = getattr(parts["dataset"], "__dict__", {})
    samples = parts.get("samples")
    if not isinstance(samples, list) or not samples or "torchvision" not in sys.modules:
        return ()
    first = samples[0][0] if isinstance(samples[0], tuple) and samples[0] else None
    if not isinstance(first, str) or not first.lower().endswith(IMAGE_ENDINGS):
        return ()
    from dataloading.images import check_images

    try:
        with time_limit(IMAGE_LIMIT_S, "Looking at image files"):
            return tuple(check_images([path for path, *_ in samples], limit=IMAGES))
    except ProbeTimeout:  # a slow disk: running the loader will meet the files anyway
        return ()


def _live_queues(dataloader: DataLoader) -> int:
    """Batches that the queues of other loaders with living workers may hold."""
    if not multiprocessing.active_children():  # going through all objects takes its time
        return 0
    return sum(
        LoaderSettings.of(thing).queued_batches
        for thing in gc.get_objects()
        if is_a(thing, DataLoader)
        and thing is not dataloader
        and getattr(thing, "_iterator", None) is not None
    )
