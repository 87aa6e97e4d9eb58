"""Rules on what was seen before anything starts: each a pure function of a `Preflight`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dataloading.budget_rules import (
    copy_on_write_rule,
    descriptors_rule,
    prefetch_rule,
    shared_memory_rule,
    worker_memory_rule,
)
from dataloading.codes import SEVERITIES, Finding, finding
from dataloading.preflight import Preflight, look_at
from dataloading.results import format_bytes, format_seconds
from dataloading.setup_rules import copies_of_a_stream, pins_memory, shared_handle
from dataloading.start_rules import (
    main_module_rule,
    no_guard_rule,
    rerun_rule,
    slow_start_rule,
    under_guard_rule,
    unpicklable_rule,
)
from dataloading.storage import BULK_BYTES_PER_S

MANY_FILES = 1000  # of small ones: the first pass over a network takes minutes
SLOW_READING_S = 60.0  # a first pass that takes longer than this is worth an archive
Rule = Callable[[Preflight], Finding | None]


def check_dataloader(
    dataloader: DataLoader, *, epochs: int | None = None, spawn_check: bool = True
) -> list[Finding]:
    """Find what will go wrong with a loader, before anything starts.

    Starts none of its workers, changes nothing, touches no random state, and takes a few seconds
    at most.

    Args:
        dataloader: The loader.
        epochs: How many epochs are planned; None leaves out what depends on it.
        spawn_check: Also look for what would fail under spawn or forkserver (Windows, macOS,
            Python 3.14), where workers are forked here.

    Returns:
        Findings, most severe first; an empty list when nothing is wrong.

    Raises:
        TypeError: It is not a `DataLoader`.

    Example:
        >>> [f.code for f in check_dataloader(DataLoader(range(8), worker_init_fn=print))]
        ['invalid-settings']

    Explained in: notebook 10
    """
    seen = look_at(dataloader, epochs=epochs, spawn_check=spawn_check)
    found = [f for rule in RULES if (f := rule(seen)) is not None]
    found.sort(key=lambda f: -SEVERITIES.index(f.severity))
    return found


def network_rule(seen: Preflight) -> Finding | None:
    """Files on a network mount."""
    storage = seen.storage
    if storage is None:
        return None
    many_small = storage.are_small and storage.files >= MANY_FILES
    each, all_s, once_s = storage.file_s, storage.one_by_one_s, storage.at_once_s
    slow = all_s is not None and all_s > max(SLOW_READING_S, once_s)
    estimate = ""
    if each is not None and all_s is not None:
        estimate = (
            f" One by one they take about {format_seconds(all_s)} ({format_seconds(each)} each), as "
            f"one archive about {format_seconds(once_s)} at "
            f"{format_bytes(BULK_BYTES_PER_S)}/s."
        )
    name = os.path.basename(storage.folder)
    archive, local = f"{storage.folder}.tar", f"/tmp/{name}"
    advice = (
        f"Copy them to a local disk, as one file: once `tar -cf {archive} -C {storage.folder} .`, "
        f"then before each run `mkdir -p {local} && tar -xf {archive} -C {local}`, and read from "
        f"{local}."
    )
    if many_small:
        advice += (
            " If they do not fit there, read archives or shards of many samples in order; shuffling "
            "is then limited to the order of the shards and a buffer of samples."
        )
    return finding(
        "small-files" if many_small else "storage-bound",
        f"The {storage.files:,} files of the data set lie on a network mount ({storage.kind} at "
        f"{storage.mount}).{estimate}",
        {
            "storage_class": "network mount",
            "mount": storage.mount,
            "file_system": storage.kind,
            "files": storage.files,
            "file_bytes": storage.file_bytes,
            "file_s": each,
            "one_by_one_s": all_s,
            "at_once_s": once_s,
            "threshold_s": SLOW_READING_S,
        },
        severity="warning" if slow else "info",
        advice=advice,
    )


def handle_rule(seen: Preflight) -> Finding | None:
    """Open files and connections that forked workers share."""
    if not seen.handles or not seen.settings.num_workers or seen.start_method != "fork":
        return None
    first = seen.handles[0]
    return shared_handle(first.path, first.kind, len(seen.handles), "critical")


def accelerator_rule(seen: Preflight) -> Finding | None:
    """Accelerator tensors in a data set that workers get, or that they make."""
    if not seen.on_accelerator or not seen.settings.num_workers:
        return None
    why = "each worker would need a context of its own there, with its memory"
    if seen.start_method == "fork":
        why = "a forked worker cannot use what the training process has opened"
    return finding(
        "accelerator-in-worker",
        f"{seen.on_accelerator[0]} is on an accelerator: {why}.",
        {
            "path": seen.on_accelerator[0],
            "tensors": len(seen.on_accelerator),
            "start_method": seen.start_method,
        },
        severity="critical" if seen.start_method == "fork" else "warning",
    )


def ineffective_rule(seen: Preflight) -> Finding | None:
    """Options without effect."""
    if not seen.ineffective:
        return None
    named = "; ".join(f"{name}: {why}" for name, why in seen.ineffective.items())
    return finding("invalid-settings", f"Settings without effect: {named}.", seen.ineffective)


def unpinnable_rule(seen: Preflight) -> Finding | None:
    """A batch type that pinning passes by."""
    name = seen.peek.unpinnable
    if name is None:
        return None
    return finding(
        "invalid-settings",
        f"pin_memory=True passes by batches of type {name}, which has no pin_memory method.",
        {"batch_type": name},
        advice=f"Give {name} a method pin_memory(self) that pins its tensors and returns self.",
    )


def pin_rule(seen: Preflight) -> Finding | None:
    """Pinned memory without an accelerator that uses it."""
    if not seen.settings.pin_memory or pins_memory(seen.machine):
        return None
    return finding(
        "pin-without-accelerator",
        "pin_memory=True, but no accelerator here copies from pinned memory.",
        {"pin_memory": True},
        severity="info",
    )


def uneven_rule(seen: Preflight) -> Finding | None:
    """Samples that cannot be stacked."""
    if seen.peek.uneven is None:
        return None
    path, shapes = seen.peek.uneven
    return finding(
        "uneven-shapes",
        f"{path} has different shapes in different samples: {', '.join(shapes)}.",
        {"field": path, "shapes": list(shapes)},
        severity="critical",
    )


def bad_images_rule(seen: Preflight) -> Finding | None:
    """Image files that cannot be read."""
    if not seen.bad_images:
        return None
    path, reason = seen.bad_images[0]
    more = len(seen.bad_images) - 1
    message = reason + (f" ({more} more of those looked at)" if more else "")
    left_out = callable(getattr(seen.loader, "skipped", None))
    return finding(
        "bad-images",
        f"{message} This loader leaves out what it cannot read." if left_out else message,
        {"path": path, "reason": reason, "files": [path for path, _ in seen.bad_images]},
        severity="info" if left_out else "critical",
    )


def no_batch_rule(seen: Preflight) -> Finding | None:
    """A loader that will deliver nothing, or loses much to drop_last."""
    loader = seen.loader
    size = loader.batch_size
    count = seen.peek.epoch_samples
    if count == 0 and not isinstance(loader.dataset, IterableDataset):
        return finding(
            "invalid-settings",
            "Each epoch has 0 batches: there is no sample to choose "
            f"({type(loader.dataset).__name__}, {type(loader.sampler).__name__}).",
            {"samples": 0},
            severity="critical",
            advice="Look at how the data set is filled: its folder, filter or split.",
        )
    if size is None or isinstance(loader.dataset, IterableDataset) or not loader.drop_last:
        return None
    if count is None or count >= size:
        return None
    advice = "Use a smaller batch, or drop_last=False."
    if isinstance(loader.sampler, DistributedSampler):
        advice = "Use a smaller batch, fewer ranks, or drop_last=False."
    return finding(
        "dropped-samples",
        f"Each epoch has 0 batches: {count} sample(s) do not fill a batch of {size}, and drop_last "
        "drops them.",
        {"samples": count, "batch_size": size, "drop_last": True},
        severity="critical",
        advice=advice,
    )


def copies_rule(seen: Preflight) -> Finding | None:
    """An iterable data set that every worker goes through as a whole."""
    return copies_of_a_stream(seen.shares_out, seen.settings.num_workers)


def stale_epoch_rule(seen: Preflight) -> Finding | None:
    """A data set that is told the epoch, in workers that keep an old copy of it."""
    kind = type(seen.loader.dataset)
    if not hasattr(kind, "set_epoch") or not seen.settings.persistent_workers:
        return None
    if seen.shares_state or seen.epochs == 1:
        return None
    return finding(
        "epoch-not-set",
        f"{kind.__name__} is told the epoch by set_epoch, but persistent "
        "workers keep the copy they started with and never hear of it.",
        {"persistent_workers": True, "epochs": seen.epochs},
        advice="Keep the epoch in shared memory (torch.tensor(0).share_memory_() or "
        "multiprocessing.Value), or set persistent_workers=False.",
    )


def distributed_rule(seen: Preflight) -> Finding | None:
    """A distributed job whose loader does not know of it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    if isinstance(seen.loader.dataset, IterableDataset) or _knows_ranks(seen.loader):
        return None
    return finding(
        "missing-distributed-sampler",
        f"{dist.get_world_size()} ranks are running, and {type(seen.loader.sampler).__name__} "
        "gives each the whole data set.",
        {"ranks": dist.get_world_size(), "sampler": type(seen.loader.sampler).__name__},
        severity="critical",
    )


def _knows_ranks(loader: DataLoader) -> bool:
    owners: tuple[Any, ...] = (loader.sampler, loader.batch_sampler)
    return any(
        hasattr(owner, name) for owner in owners for name in ("num_replicas", "rank", "world_size")
    )


RULES: tuple[Rule, ...] = (
    unpicklable_rule,
    main_module_rule,
    under_guard_rule,
    no_guard_rule,
    slow_start_rule,
    handle_rule,
    accelerator_rule,
    uneven_rule,
    bad_images_rule,
    no_batch_rule,
    copies_rule,
    distributed_rule,
    prefetch_rule,  # what does not even fit into memory does not fit into shared memory either
    shared_memory_rule,
    descriptors_rule,
    worker_memory_rule,
    copy_on_write_rule,
    stale_epoch_rule,
    network_rule,
    rerun_rule,
    ineffective_rule,
    unpinnable_rule,
    pin_rule,
)
