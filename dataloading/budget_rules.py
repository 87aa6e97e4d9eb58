"""Rules on what a loader will need, against what the machine has: memory, shared memory, files."""

from __future__ import annotations

from dataloading.budgets import WORKER_BYTES
from dataloading.codes import Finding, finding
from dataloading.preflight import Preflight
from dataloading.results import format_bytes, format_share
from dataloading.setup_rules import pins_memory
from dataloading.start_rules import pickles

OBJECT_BYTES = 64  # of private memory that a worker copies for each object it touches
LARGE_SHARE = 0.1  # of the free memory
BUDGET_SHARE = 0.8  # of what is free may be taken
FEW_DESCRIPTORS_SHARE = 0.8
RETAINED_BATCHES = 4  # batches that a usual loop still holds: this one, the last one, logging
PINNED_SHARE = 0.5  # of the memory limit; pinned pages can be neither swapped out nor moved


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
    return seen.probes[0].tensors if pickles(seen) and seen.probes else 0


def _sharing_strategy() -> str:
    import torch.multiprocessing

    return torch.multiprocessing.get_sharing_strategy()


def prefetch_rule(seen: Preflight) -> Finding | None:
    """A queue that takes a large part of the free memory."""
    available, need = seen.machine.available_memory_bytes, _queue_bytes(seen)
    if (pinned := _pinned_queue(seen, need)) is not None:
        return pinned
    if available is None or seen.batch is None or need <= LARGE_SHARE * available:
        return None
    return finding(
        "prefetch-memory",
        f"{seen.settings.queued_batches} batches prepared ahead take {format_bytes(need)}, "
        f"{format_share(need / available)} of the free memory.",
        {
            "queue_bytes": need,
            "available_memory_bytes": available,
            "threshold_share": LARGE_SHARE,
            "batch_bytes": seen.batch.batch_bytes,
            "prefetch_factor": seen.settings.prefetch_factor,
        },
        severity="critical" if need > BUDGET_SHARE * available else "warning",
    )


def _queue_bytes(seen: Preflight) -> int:
    """Bytes of the batches prepared ahead; pinned ones are copies, rounded up to a power of two."""
    if seen.batch is None:
        return 0
    return seen.settings.queued_batches * seen.batch.batch_bytes * (2 if _pins(seen) else 1)


def _pins(seen: Preflight) -> bool:
    """Whether batches are really pinned: without an accelerator PyTorch passes the option by."""
    return seen.settings.pin_memory and pins_memory(seen.machine)


def _pinned_queue(seen: Preflight, need: int) -> Finding | None:
    """A queue whose pinned copies take more than half of all memory there is."""
    limit, available = seen.machine.memory_bytes, seen.machine.available_memory_bytes
    if seen.batch is None or not _pins(seen) or not limit or need <= PINNED_SHARE * limit:
        return None
    fits = int(PINNED_SHARE * limit / (2 * seen.batch.batch_bytes))
    smaller = (
        f"let at most {fits} batch(es) wait: lower num_workers x prefetch_factor"
        if fits >= 1
        else "make the batches smaller: not even one fits"
    )
    return finding(
        "prefetch-memory",
        f"Up to {format_bytes(need)} of pinned batches may wait, {format_share(need / limit)} of the "
        f"memory limit of {format_bytes(limit)}; pinned memory cannot be swapped out.",
        {
            "queue_bytes": need,
            "memory_limit_bytes": limit,
            "pinned_share": need / limit,
            "threshold_share": PINNED_SHARE,
            "batch_bytes": seen.batch.batch_bytes,
            "queued_batches": seen.settings.queued_batches,
            "prefetch_factor": seen.settings.prefetch_factor,
        },
        severity="critical" if need > BUDGET_SHARE * (available or limit) else "warning",
        advice=f"Set pin_memory=False, or {smaller}.",
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
