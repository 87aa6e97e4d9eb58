"""Rules about memory: which growth is a leak, which one ends, and what does not fit."""

from __future__ import annotations

from dataloading.codes import Finding, finding
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.results import format_bytes, format_share

LEAST_GROWTH_BYTES = 16 * 2**20  # less than this is allocators settling down
LEAST_PER_BATCH_BYTES = 4096  # a page for each batch: less cannot be told from noise
COPIED_SHARE = 0.5  # of the growth in private memory that resident memory does not show
SETTLING_BATCHES = 24  # an allocator was seen to keep up to 19 batches of memory in a worker
OWN_SHARE = 0.5  # of the growth in resident memory; with less of it private, files are being mapped
LARGE_SHARE = 0.1  # of the free memory
BUDGET_SHARE = 0.8  # of what is free may be taken


def copy_on_write_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Private memory of workers grows, resident memory does not."""
    uss, rss = evidence.worker_uss_growth_bytes, evidence.worker_rss_growth_bytes
    if uss is None or rss is None or uss < LEAST_GROWTH_BYTES:
        return None
    if rss > (1 - COPIED_SHARE) * uss:
        return None
    return finding(
        "copy-on-write-growth",
        f"Private memory of the workers grew by {format_bytes(uss)} while resident memory changed "
        f"by {format_bytes(rss)}: they copy pages that they shared.",
        _growth(evidence) | {"threshold_copied_share": COPIED_SHARE},
    )


def worker_leak_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Private and resident memory of workers grow together, without end."""
    uss, rss = evidence.worker_uss_growth_bytes, evidence.worker_rss_growth_bytes
    ends = evidence.worker_growth_levels_off or evidence.worker_growth_goes_on is False
    if uss is None or rss is None or ends:
        return None
    per_batch = uss / max(1, evidence.worker_growth_batches or 1)
    if min(uss, rss) < LEAST_GROWTH_BYTES or per_batch < LEAST_PER_BATCH_BYTES:
        return None
    if rss <= (1 - COPIED_SHARE) * uss or uss < OWN_SHARE * rss:
        return None
    if uss < SETTLING_BATCHES * (evidence.batch_bytes or 0) * max(1, evidence.num_workers or 1):
        return None  # an allocator that keeps what large batches leave behind grows as much
    return finding(
        "worker-memory-leak",
        f"The workers grew by {format_bytes(uss)} in {evidence.worker_growth_batches} batches, about "
        f"{format_bytes(per_batch)} a batch, and go on.",
        _growth(evidence),
        severity="critical",
    )


def main_leak_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """The training process grows with each step."""
    growth = evidence.main_uss_growth_bytes
    if growth is None or growth < LEAST_GROWTH_BYTES or evidence.main_growth_goes_on is False:
        return None
    per_step = growth / max(1, evidence.main_growth_batches or 1)
    if per_step < LEAST_PER_BATCH_BYTES:
        return None
    return finding(
        "main-memory-leak",
        f"The training process grew by {format_bytes(growth)} in {evidence.main_growth_batches} steps, "
        f"about {format_bytes(per_step)} a step, and goes on.",
        {
            "main_uss_growth_bytes": growth,
            "main_growth_batches": evidence.main_growth_batches,
            "threshold_bytes": LEAST_GROWTH_BYTES,
        },
        severity="critical",
    )


def prefetch_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """A queue that takes a large part of the free memory."""
    need, available = evidence.queue_bytes, machine.available_memory_bytes
    if need is None or not available or need <= LARGE_SHARE * available:
        return None
    return finding(
        "prefetch-memory",
        f"Batches prepared ahead may take {format_bytes(need)}, {format_share(need / available)} of the free "
        "memory.",
        {
            "queue_bytes": need,
            "available_memory_bytes": available,
            "threshold_share": LARGE_SHARE,
            "prefetch_factor": evidence.prefetch_factor,
            "num_workers": evidence.num_workers,
        },
    )


def shared_memory_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """A queue that does not fit into shared memory."""
    need, free = evidence.queue_bytes, machine.shared_memory_free_bytes
    if need is None or free is None or need <= BUDGET_SHARE * free:
        return None
    return finding(
        "shared-memory-short",
        f"Batches prepared ahead may take {format_bytes(need)} of shared memory, and "
        f"{format_bytes(free)} are free.",
        {
            "queue_bytes": need,
            "shared_memory_free_bytes": free,
            "threshold_share": BUDGET_SHARE,
            "batch_bytes": evidence.batch_bytes,
        },
        severity="critical",
    )


def descriptors_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """More tensors in flight than files may be open."""
    tensors, limit = evidence.tensors_per_batch, machine.open_files_limit
    if tensors is None or limit is None or not evidence.num_workers:
        return None
    need = evidence.settings.queued_batches * tensors
    if need <= BUDGET_SHARE * limit:
        return None
    return finding(
        "file-descriptors-short",
        f"{need} tensors in flight need a file descriptor each, and the limit is {limit}.",
        {
            "descriptors_needed": need,
            "open_files_limit": limit,
            "threshold_share": BUDGET_SHARE,
            "tensors_per_batch": tensors,
        },
        severity="critical",
    )


def _growth(evidence: Evidence) -> dict[str, object]:
    return {
        "worker_uss_growth_bytes": evidence.worker_uss_growth_bytes,
        "worker_rss_growth_bytes": evidence.worker_rss_growth_bytes,
        "levels_off": evidence.worker_growth_levels_off,
        "worker_growth_batches": evidence.worker_growth_batches,
        "threshold_bytes": LEAST_GROWTH_BYTES,
        "num_workers": evidence.num_workers,
    }


MEMORY_RULES = (
    copy_on_write_rule,
    worker_leak_rule,
    main_leak_rule,
    shared_memory_rule,
    descriptors_rule,
    prefetch_rule,
)
