"""How many CPUs this process may use: the least of machine, affinity, quota and scheduler.

Cheap to import and to ask: no torch, no driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import psutil

from dataloading.cgroups import SYSTEM_ROOT, cgroup_cpu_limit, positive_int

UNKNOWN = "unknown"
LOGICAL = "logical CPUs"
PYTHON = "PYTHON_CPU_COUNT"
AFFINITY = "affinity"
QUOTA = "cgroup quota"

# What a batch scheduler granted. OMP_NUM_THREADS is missing on purpose: it sizes thread pools.
# LSB_DJOB_NUMPROC counts all hosts of a job, so it can be too high, never too low.
SCHEDULER_VARIABLES = ("SLURM_CPUS_PER_TASK", "PBS_NUM_PPN", "NCPUS", "LSB_DJOB_NUMPROC")

# How many training processes share this machine, the launcher nearest to the process first.
RANK_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


def usable_cpu_count() -> int:
    """CPUs this process may use, found without importing torch (not shared between ranks).

    >>> 1 <= usable_cpu_count() <= max(1, psutil.cpu_count() or 1)
    True
    """
    return usable_cpus(seen_cpu_limits())[0]


def usable_cpus(limits: Mapping[str, int | None]) -> tuple[int, str]:
    """The least limit and its name; of equal ones the first.

    Args:
        limits: CPUs by the name of the limit; None or less than 1 means "no such limit".

    Returns:
        CPUs, at least 1, and the name of what decided ("unknown" when there is no limit at all).

    >>> usable_cpus({"logical CPUs": 64, "affinity": 64, "cgroup quota": 2})
    (2, 'cgroup quota')
    """
    known = {name: count for name, count in limits.items() if count is not None and count >= 1}
    if not known:
        return 1, UNKNOWN
    source = min(known, key=lambda name: known[name])
    return known[source], source


def seen_cpu_limits() -> dict[str, int]:
    """Every CPU limit of this process, by name; those that do not exist here are left out."""
    limits = {
        LOGICAL: psutil.cpu_count(logical=True) or os.cpu_count(),
        AFFINITY: affinity_count(),
        QUOTA: cgroup_cpu_limit(SYSTEM_ROOT),
        **scheduler_limits(os.environ),
        PYTHON: python_cpu_count(),
    }
    return {name: count for name, count in limits.items() if count is not None and count >= 1}


def affinity_count() -> int | None:
    """CPUs this process may be scheduled on; None where the system has no affinity (macOS)."""
    try:
        if sys.platform == "linux":
            return len(os.sched_getaffinity(0))
        if sys.platform == "win32":  # empty where a process spans several processor groups
            return len(psutil.Process().cpu_affinity() or ()) or None
    except (OSError, psutil.Error):
        return None  # forbidden by a sandbox: the other limits still count
    return None


def python_cpu_count() -> int | None:
    """The number in `PYTHON_CPU_COUNT` or `-X cpu_count`, where Python was told one (3.13+)."""
    told = sys._xoptions.get("cpu_count") or os.environ.get(PYTHON)
    return os.cpu_count() if sys.version_info >= (3, 13) and told and told != "default" else None


def scheduler_limits(environ: Mapping[str, str]) -> dict[str, int]:
    """CPUs that a batch scheduler granted, by the variable that says so.

    >>> scheduler_limits({"SLURM_CPUS_PER_TASK": "8", "OMP_NUM_THREADS": "1"})
    {'SLURM_CPUS_PER_TASK': 8}
    """
    limits = {name: positive_int(environ.get(name)) for name in SCHEDULER_VARIABLES}
    if not any(name.startswith("PBS_") for name in environ):
        limits.pop("NCPUS")  # a name anybody may use; it means this only inside a PBS job
    return {name: count for name, count in limits.items() if count is not None}


def local_ranks(environ: Mapping[str, str]) -> tuple[int, str]:
    """Training processes on this machine, and the variable that says so.

    >>> local_ranks({"LOCAL_WORLD_SIZE": "4"}), local_ranks({})
    ((4, 'LOCAL_WORLD_SIZE'), (1, 'no launcher'))
    """
    for name in RANK_VARIABLES:
        if count := positive_int(environ.get(name)):
            return count, name
    return 1, "no launcher"


def ranks_are_slurm_tasks(ranks: int, environ: Mapping[str, str]) -> bool:
    """Whether Slurm granted CPUs to each rank alone: then they are not to be shared again."""
    tasks = positive_int(environ.get("SLURM_NTASKS_PER_NODE"))
    return tasks == ranks and "SLURM_CPUS_PER_TASK" in scheduler_limits(environ)


def cpu_count_changed(before: int | None, after: int | None) -> str | None:
    """A sentence with both numbers when this process may use fewer CPUs than before.

    Some libraries pin the process that imports them; its workers inherit that.

    >>> cpu_count_changed(8, 8) is None
    True
    """
    if before is None or after is None or after >= before:
        return None
    return (
        f"The CPU affinity of this process went from {before} to {count_of(after, 'CPU')} since the "
        "first import of this module, and workers inherit it. A library may have pinned the process "
        "(OpenMP settings such as KMP_AFFINITY or GOMP_CPU_AFFINITY); os.sched_setaffinity undoes it."
    )


AFFINITY_AT_IMPORT = affinity_count()


def cpu_notes(limits: Mapping[str, int], quota: float | None) -> list[str]:
    """Sentences about CPU limits that contradict each other or were rounded.

    Args:
        limits: every limit that was seen, by name.
        quota: the exact CPU quota, such as 1.5.
    """
    cpus, source = usable_cpus(limits)
    logical, affinity = limits.get(LOGICAL), limits.get(AFFINITY)
    notes = []
    if logical and affinity and affinity < logical:
        notes.append(
            f"This process may run on {affinity} of {logical} logical CPUs "
            "(affinity, as set by a scheduler, a container or taskset)."
        )
    notes += [
        f"The scheduler hint {name}={limits[name]} differs from the CPU affinity ({affinity}); "
        f"the least limit counts: {cpus} ({source})."
        for name in SCHEDULER_VARIABLES
        if affinity and limits.get(name, affinity) != affinity
    ]
    if quota is not None and source == QUOTA and quota != cpus:
        notes.append(
            f"The CPU quota of {quota:.3g} CPUs is counted as {cpus}: whole CPUs, at least one; "
            "what runs beyond the quota is held back by the system."
        )
    return notes


def variable_notes(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each launcher or scheduler variable that holds no number."""
    return [
        f"{name}={environ[name]!r} is not a whole number of at least 1, so it is ignored."
        for name in (*SCHEDULER_VARIABLES, *RANK_VARIABLES)
        if environ.get(name) and positive_int(environ[name]) is None
    ]


def count_of(count: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "rank"), count_of(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
