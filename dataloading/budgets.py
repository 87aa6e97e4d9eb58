"""What a loader would hold, against what the machine has: memory, shared memory, open files."""

from __future__ import annotations

from dataloading.batch_costs import BatchCosts
from dataloading.machine import Machine
from dataloading.results import format_bytes, format_share
from dataloading.settings import LoaderSettings

WORKER_BYTES = {  # private memory of a worker that has loaded a few batches; torch imported anew
    "fork": 64 * 2**20,  # where the worker is not forked
    "forkserver": 320 * 2**20,
    "spawn": 320 * 2**20,
}
FILES_PER_WORKER = 6  # pipes and sentinels that each worker keeps open in the main process


def resource_needs(costs: BatchCosts, settings: LoaderSettings, machine: Machine) -> dict[str, int]:
    """Memory, shared memory and open files that a loader would hold.

    Args:
        costs: Costs of a batch at the batch size in question.
        settings: Workers and prefetch.
        machine: Its start method says what a worker weighs where that was not measured.

    Returns:
        `memory_bytes`, `shared_memory_bytes` and `open_files`.
    """
    queued = settings.queued_batches
    shared = queued * costs.batch_bytes
    per_worker = costs.worker_bytes
    method = settings.multiprocessing_context or machine.start_method
    if per_worker is None or method != costs.start_method:
        per_worker = WORKER_BYTES.get(method, WORKER_BYTES["spawn"]) + costs.batch_bytes
    pinned = shared if settings.pin_memory else 0
    return {
        "memory_bytes": settings.num_workers * per_worker + shared + pinned,
        "shared_memory_bytes": shared,
        "open_files": queued * costs.tensors + settings.num_workers * FILES_PER_WORKER,
    }


def over_budget(
    settings: LoaderSettings, costs: BatchCosts, machine: Machine, fraction: float = 0.8
) -> str | None:
    """Say which budget of the machine a setting would overrun, or None when it fits.

    Args:
        settings: Workers, prefetch and pinning.
        costs: Size of a batch.
        machine: What is free.
        fraction: Share of it that may be used. The ranks of a job share memory and shared memory;
            the limit of open files is that of each process.

    Returns:
        A sentence with need and budget, or None.

    Example:
        >>> costs = BatchCosts(0, 0, 0, batch_size=64, batch_bytes=9_630_000, tensors=1)
        >>> small = Machine(usable_cpus=8, shared_memory_free_bytes=64 * 2**20)
        >>> over_budget(LoaderSettings(num_workers=2, prefetch_factor=2), costs, small) is None
        True
        >>> over_budget(LoaderSettings(num_workers=3, prefetch_factor=2), costs, small)
        'needs 55.1 MiB of shared memory, and 80 % of what is free is 51.2 MiB'
    """
    needs = resource_needs(costs, settings, machine)
    ranks = machine.local_ranks
    for name, free, what in (
        ("memory_bytes", machine.available_memory_bytes, "memory"),
        ("shared_memory_bytes", machine.shared_memory_free_bytes, "shared memory"),
    ):
        if free is not None and ranks * needs[name] > fraction * free:
            each = f" for each of {ranks} ranks" if ranks > 1 else ""
            return (
                f"needs {format_bytes(needs[name])} of {what}{each}, and {format_share(fraction)} of "
                f"what is free is {format_bytes(fraction * free)}"
            )
    limit = machine.open_files_limit
    if limit is not None and needs["open_files"] > fraction * limit:
        return f"needs {needs['open_files']} open files, and the limit is {limit}"
    return None
