"""Rules on what was seen before anything starts: each a pure function of a `Preflight`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dataloading.codes import SEVERITIES, Finding, finding
from dataloading.model import WORKER_BYTES
from dataloading.preflight import Preflight, look_at
from dataloading.results import format_bytes, format_seconds, format_share
from dataloading.setup_rules import pins_memory
from dataloading.storage import BULK_BYTES_PER_S

SLOW_START_S = 0.5  # sending a data set for longer than this is felt at every start
READ_BACK = 2.5  # a worker takes so many times as long to unpickle: it makes every object anew
OBJECT_BYTES = 64  # of private memory that a worker copies for each object it touches
LARGE_SHARE = 0.1  # of the free memory
BUDGET_SHARE = 0.8  # of what is free may be taken
FEW_DESCRIPTORS_SHARE = 0.8
SHOWN_LINES = 3  # of a script
MANY_FILES = 1000  # of small ones: the first pass over a network takes minutes
SLOW_READING_S = 60.0  # a first pass that takes longer than this is worth an archive
RETAINED_BATCHES = 4  # batches that a usual loop still holds: this one, the last one, logging

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


def unpicklable_rule(seen: Preflight) -> Finding | None:
    """A part that cannot be sent to workers."""
    for probe in seen.probes:
        if probe.error is None:
            continue
        return finding(
            "unpicklable",
            f"{probe.path} cannot be pickled ({probe.error}); workers started by "
            f"{_methods_that_pickle(seen)} need that.{_works_for_now(seen)}",
            {"path": probe.path, "error": probe.error, "start_method": seen.start_method},
            severity="critical" if _pickles(seen) else "info",
        )
    return None


def main_module_rule(seen: Preflight) -> Finding | None:
    """Classes of a notebook, which spawned workers cannot import."""
    names = [(p.name, name) for p in seen.probes for name in p.in_main if p.error is None]
    if not names or seen.main_importable:
        return None
    part, name = names[0]
    return finding(
        "unpicklable",
        f"{part}: {name} is defined in the notebook, where workers started by "
        f"{_methods_that_pickle(seen)} cannot import it.{_works_for_now(seen)}",
        {"part": part, "name": name, "start_method": seen.start_method},
        severity="critical" if _pickles(seen) else "info",
        advice=f"Write {name} into a file beside the notebook with %%writefile, and import it "
        "from there.",
    )


def under_guard_rule(seen: Preflight) -> Finding | None:
    """Classes under the guard of a script, which its workers do not find."""
    if seen.script is None:
        return None
    hidden = [
        (probe.name, name)
        for probe in seen.probes
        for name in probe.in_main
        if probe.error is None and name.split(".")[0] in seen.script.under_guard
    ]
    if not hidden:
        return None
    part, name = hidden[0]
    return finding(
        "unpicklable",
        f"{part}: {name} is defined under `if __name__ == '__main__':` in {seen.script.name}, which "
        f"workers started by {_methods_that_pickle(seen)} do not run.{_works_for_now(seen)}",
        {"part": part, "name": name, "script": seen.script.name, "start_method": seen.start_method},
        severity="critical" if _pickles(seen) else "info",
        advice=f"Move {name} above the guard: workers import the script, and find only what stands "
        "outside of it.",
    )


def no_guard_rule(seen: Preflight) -> Finding | None:
    """A script that its workers would run from top to bottom."""
    if seen.script is None or seen.script.has_guard or not _pickles(seen):
        return None
    return finding(
        "unpicklable",
        f"{seen.script.name} has no `if __name__ == '__main__':`, so each worker started by "
        f"{seen.start_method} runs all of it again, and is refused when it comes to start workers.",
        {"script": seen.script.name, "start_method": seen.start_method},
        severity="critical",
        advice="Put all that is to run once under `if __name__ == '__main__':`, and leave imports, "
        "classes and functions above it.",
    )


def rerun_rule(seen: Preflight) -> Finding | None:
    """Lines of a script that every spawned worker runs again."""
    script = seen.script
    if script is None or not script.has_guard or not script.lines_run:
        return None
    if seen.start_method != "spawn" or not seen.settings.num_workers:
        return None
    workers = seen.settings.num_workers
    starts = 1 if seen.settings.persistent_workers else seen.epochs
    runs = "in all" if seen.settings.persistent_workers else "an epoch"
    if starts is not None and starts > 1:
        runs += f", {workers * starts} in {starts} epochs"
    lines = ", ".join(map(str, script.lines_run[:SHOWN_LINES]))
    return finding(
        "epoch-startup",
        f"Each spawned worker runs what stands outside of `if __name__ == '__main__':` in "
        f"{script.name} again (line {lines}): {workers} extra runs {runs}.",
        {
            "script": script.name,
            "lines": list(script.lines_run),
            "extra_runs_per_start": workers,
            "extra_runs": None if starts is None else workers * starts,
            "persistent_workers": seen.settings.persistent_workers,
        },
        severity="info",
        advice="Move what is to run once under the guard, and set persistent_workers=True.",
    )


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


def _pickles(seen: Preflight) -> bool:
    """Whether this loader's workers are sent pickled parts."""
    return seen.start_method != "fork" and seen.settings.num_workers > 0


def _methods_that_pickle(seen: Preflight) -> str:
    return "spawn or forkserver" if seen.start_method == "fork" else seen.start_method


def _works_for_now(seen: Preflight) -> str:
    if not seen.settings.num_workers:
        return " There are no workers, so it works for now."
    return "" if _pickles(seen) else " They are forked here, so it works for now."


def slow_start_rule(seen: Preflight) -> Finding | None:
    """A data set that takes long to send."""
    workers = seen.settings.num_workers
    if not _pickles(seen) or not seen.probes:
        return None
    dataset = seen.probes[0]
    seconds = workers * dataset.seconds * (1 + READ_BACK)
    if dataset.error is not None or seconds < SLOW_START_S:
        return None
    least = "" if dataset.finished else "at least "
    return finding(
        "dataset-pickling",
        f"Starting {workers} worker(s) by {seen.start_method} sends each a copy of the data set "
        f"({least}{format_bytes(dataset.size_bytes)}): {least or 'about '}"
        f"{format_seconds(seconds)} every time.",
        {
            "pickled_bytes": dataset.size_bytes,
            "pickling_s": dataset.seconds,
            "num_workers": workers,
            "start_s": seconds,
            "threshold_s": SLOW_START_S,
            "start_method": seen.start_method,
        },
    )


def handle_rule(seen: Preflight) -> Finding | None:
    """Open files and connections that forked workers share."""
    if not seen.handles or not seen.settings.num_workers or seen.start_method != "fork":
        return None
    first = seen.handles[0]
    return finding(
        "fork-unsafe-handle",
        f"{first.path} is an {first.kind} that is open before the workers are forked: they share "
        "its position, and disturb one another."
        if first.kind.startswith("open")
        else f"{first.path} is a {first.kind} that is open before the workers are forked: they "
        "share it, and disturb one another.",
        {"path": first.path, "kind": first.kind, "handles": len(seen.handles)},
        severity="critical",
    )


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


def shared_memory_rule(seen: Preflight) -> Finding | None:
    """Queued batches of this and other live loaders against free shared memory."""
    free, batch = seen.machine.shared_memory_free_bytes, seen.batch
    if free is None or batch is None or not seen.settings.num_workers:
        return None
    own = seen.settings.queued_batches * batch.batch_bytes
    need = own + seen.live_queued_batches * batch.batch_bytes
    if need <= BUDGET_SHARE * free:
        return None
    fits = int(BUDGET_SHARE * free / max(1, batch.batch_bytes))
    advice = (
        f"At most {fits} batch(es) fit: lower num_workers x prefetch_factor, or the batch size, or "
        "enlarge /dev/shm."
        if fits >= 1
        else "Not even one batch fits: use num_workers=0, smaller batches, or enlarge /dev/shm."
    )
    return finding(
        "shared-memory-short",
        f"Up to {format_bytes(need)} of finished batches wait in shared memory, and "
        f"{format_bytes(free)} are free.",
        {
            "shared_memory_need_bytes": need,
            "shared_memory_free_bytes": free,
            "budget_share": BUDGET_SHARE,
            "batch_bytes": batch.batch_bytes,
            "queued_batches": seen.settings.queued_batches,
            "queued_by_other_loaders": seen.live_queued_batches,
        },
        severity="critical" if need > free else "warning",
        advice=advice,
    )


def descriptors_rule(seen: Preflight) -> Finding | None:
    """Tensors in flight against the limit of open files."""
    limit, batch = seen.machine.open_files_limit, seen.batch
    if limit is None or not seen.settings.num_workers or _sharing_strategy() != "file_descriptor":
        return None
    if (kept := _kept_tensors(seen)) > FEW_DESCRIPTORS_SHARE * limit:
        return finding(
            "file-descriptors-short",
            f"The data set holds {kept} tensors, which need a file descriptor each to be shared "
            f"with workers; the limit is {limit}.",
            {"descriptors_needed": kept, "open_files_limit": limit},
            severity="critical" if kept > limit else "warning",
            advice="Pack them into one tensor (torch.stack, or one long tensor with offsets), which "
            "needs one descriptor.",
        )
    if batch is None:
        return None
    in_flight = seen.settings.queued_batches + seen.live_queued_batches + RETAINED_BATCHES
    need = in_flight * batch.tensors
    if need <= FEW_DESCRIPTORS_SHARE * limit:
        return None
    return finding(
        "file-descriptors-short",
        f"{need} tensors in flight need a file descriptor each, and the limit is {limit}.",
        {
            "descriptors_needed": need,
            "open_files_limit": limit,
            "tensors_per_batch": batch.tensors,
            "queued_batches": seen.settings.queued_batches,
        },
        severity="critical" if need > limit else "warning",
    )


def _kept_tensors(seen: Preflight) -> int:
    """Tensors of the data set that are shared with workers one by one: not with forked ones."""
    return seen.probes[0].tensors if _pickles(seen) and seen.probes else 0


def _sharing_strategy() -> str:
    import torch.multiprocessing

    return torch.multiprocessing.get_sharing_strategy()


def prefetch_rule(seen: Preflight) -> Finding | None:
    """A queue that takes a large part of the free memory."""
    available, batch = seen.machine.available_memory_bytes, seen.batch
    if available is None or batch is None or not seen.settings.num_workers:
        return None
    need = seen.settings.queued_batches * batch.batch_bytes * (2 if seen.settings.pin_memory else 1)
    if need <= LARGE_SHARE * available:
        return None
    return finding(
        "prefetch-memory",
        f"{seen.settings.queued_batches} batches prepared ahead take {format_bytes(need)}, "
        f"{format_share(need / available)} of the free memory.",
        {
            "queue_bytes": need,
            "available_memory_bytes": available,
            "threshold_share": LARGE_SHARE,
            "batch_bytes": batch.batch_bytes,
            "prefetch_factor": seen.settings.prefetch_factor,
        },
        severity="critical" if need > BUDGET_SHARE * available else "warning",
    )


def copy_on_write_rule(seen: Preflight) -> Finding | None:
    """Very many Python objects in a data set that workers are forked with."""
    if seen.objects is None or not seen.settings.num_workers or seen.start_method != "fork":
        return None
    path, count = seen.objects
    growth = seen.settings.num_workers * count * OBJECT_BYTES
    available = seen.machine.available_memory_bytes
    large = available is not None and growth > LARGE_SHARE * available
    return finding(
        "copy-on-write-growth",
        f"{path} holds about {count:,} Python objects: each forked worker comes to copy the memory "
        f"of those it reads, about {format_bytes(growth)} in all.",
        {
            "path": path,
            "objects": count,
            "num_workers": seen.settings.num_workers,
            "growth_bytes": growth,
            "bytes_per_object": OBJECT_BYTES,
        },
        severity="critical" if large else "info",
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
    return finding(
        "bad-images",
        reason + (f" ({more} more of those looked at)" if more else ""),
        {"path": path, "reason": reason, "files": [path for path, _ in seen.bad_images]},
        severity="critical",
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


def worker_memory_rule(seen: Preflight) -> Finding | None:
    """More workers than the memory holds."""
    available = seen.machine.available_memory_bytes
    per_worker = WORKER_BYTES.get(seen.start_method, WORKER_BYTES["spawn"])
    need = seen.settings.num_workers * per_worker
    if available is None or need <= BUDGET_SHARE * available:
        return None
    return finding(
        "prefetch-memory",
        f"{seen.settings.num_workers} workers weigh about {format_bytes(need)} before they load "
        f"anything, and {format_bytes(available)} are free.",
        {
            "workers_bytes": need,
            "available_memory_bytes": available,
            "num_workers": seen.settings.num_workers,
        },
        severity="critical",
        advice="Use fewer workers.",
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
