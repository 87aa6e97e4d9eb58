"""What a cache may take: no more than it is given, and a share of what is free."""

from __future__ import annotations

import shutil
from pathlib import Path

from dataloading.cache_storage import RowPlan, least_bytes, rows_within
from dataloading.cgroups import SYSTEM_ROOT, cgroup_memory
from dataloading.machine import host_memory, shared_memory, usable_memory
from dataloading.results import format_bytes

FREE_SHARE = 0.8  # of free memory or disk, at most; the rest is for the batches and everybody else


def most_rows(count: int, row_bytes: int, max_bytes: int | None) -> int:
    """How many of `count` rows fit into `max_bytes`; None is no limit.

    Raises:
        ValueError: Not even one.
    """
    all_bytes = RowPlan(count, row_bytes).total_bytes
    if max_bytes is None or max_bytes >= all_bytes:
        return count
    most = rows_within(max_bytes, row_bytes)
    if most < 1:
        raise ValueError(
            f"max_bytes={max_bytes} has no room for a single sample; give at least "
            f"{least_bytes(row_bytes)} ({format_bytes(all_bytes)} keep all samples)."
        )
    return min(most, count)


def free_bytes(file: Path | None) -> tuple[int | None, str]:
    """What is free for the cache in a file, or (None) in shared memory, and what that is called.

    What the file takes already counts as free for it.
    """
    if file is not None:
        return free_disk_bytes(file.parent) + used_bytes(file), "free disk"
    memory = usable_memory(*host_memory(), cgroup_memory(SYSTEM_ROOT))[1]
    shared = shared_memory()[1]
    known = [
        (free, what)
        for free, what in ((memory, "free memory"), (shared, "free shared memory"))
        if free is not None
    ]
    return min(known) if known else (None, "free memory")


def free_disk_bytes(folder: Path) -> int:
    """Bytes that are free where the folder is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def used_bytes(path: Path) -> int:
    """Bytes that a file takes on disk; 0 without a file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return getattr(status, "st_blocks", 0) * 512 or status.st_size
