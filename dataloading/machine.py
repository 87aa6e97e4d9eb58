"""What this machine lets a DataLoader use: CPUs, memory, shared memory, open files, accelerators.

The number of CPUs in the box says little: a scheduler, a container or an affinity mask may leave
a process far fewer. Every limit is read where the system keeps it; the least one counts, and it
is shown by name. Nothing here starts CUDA or fixes the multiprocessing start method, so looking
at the machine never changes what happens afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dataloading.accelerators import Accelerator, find_accelerators
from dataloading.cgroups import (
    SYSTEM_ROOT,
    CgroupMemory,
    cgroup_cpu_limit,
    cgroup_cpu_quota,
    cgroup_memory,
)
from dataloading.cpus import (
    AFFINITY_AT_IMPORT,
    UNKNOWN,
    affinity_count,
    count_of,
    cpu_count_changed,
    cpu_notes,
    local_ranks,
    ranks_are_slurm_tasks,
    seen_cpu_limits,
    usable_cpu_count,
    usable_cpus,
    variable_notes,
)
from dataloading.results import MISSING, Result, format_bytes, format_value

__all__ = [
    "Accelerator",
    "Machine",
    "cgroup_cpu_limit",
    "cgroup_memory",
    "cpu_count_changed",
    "inspect_machine",
    "report_lines",
    "thread_report",
    "usable_cpu_count",
    "usable_cpus",
]

# Eight workers with two batches of 64 float images (224 x 224 x 3) each hold about 0.6 GiB there;
# Docker gives 64 MiB unless told otherwise.
SMALL_SHARED_MEMORY_BYTES = 2**30
# Usual soft limit on Linux; each tensor waiting in a worker's queue may hold one descriptor.
FEW_OPEN_FILES = 1024
# Below this share of free memory, workers are likely to push the machine into swapping.
LOW_MEMORY_SHARE = 0.1


@dataclass(frozen=True, repr=False, eq=False)
class Machine(Result):
    """What one process may use of the machine it runs on.

    Only `usable_cpus` must be given, so that a test or a what-if can make one by hand.

    Args:
        usable_cpus: CPUs this process may use, before they are shared between local ranks.
        cpu_source: the limit that decided, such as "affinity".
        cpu_limits: every CPU limit that was seen, by name.
        logical_cpus: hardware threads of the machine.
        physical_cpus: cores of the machine.
        local_ranks: training processes on this machine.
        memory_bytes: memory that may be used in total (host or cgroup, whichever is less).
        available_memory_bytes: what is free of it now, page cache counted as free.
        memory_source: "host" or "cgroup".
        shared_memory_bytes: size of /dev/shm, through which workers hand batches over on Linux.
        shared_memory_free_bytes: what is free of it now.
        open_files_limit: soft limit on open files; None on Windows and where there is none.
        start_method: how multiprocessing starts workers unless a loader says otherwise.
        accelerators: devices that PyTorch can train on.
        platform: operating system with its version.
        environment: "script", "jupyter", "colab" or "kaggle".
        python_version: such as "3.13.2".
        torch_version: such as "2.11.0+cu128".
        intraop_threads: threads that one PyTorch operation uses in this process.
        notes: sentences for the reader about what is unusual here.
        cpus_are_per_rank: whether `usable_cpus` is this rank's own share already, as when Slurm
            grants CPUs per task and each rank is a task.

    >>> machine = Machine(usable_cpus=8, cpu_source="affinity", local_ranks=4)
    >>> machine.cpus_per_rank
    2
    >>> machine
    Machine: 8 usable CPUs (affinity), 2 per rank for 4 ranks, no accelerator
    """

    usable_cpus: int
    cpu_source: str = "given"
    cpu_limits: dict[str, int] = field(default_factory=dict)
    logical_cpus: int | None = None
    physical_cpus: int | None = None
    local_ranks: int = 1
    memory_bytes: int | None = None
    available_memory_bytes: int | None = None
    memory_source: str = "host"
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    open_files_limit: int | None = None
    start_method: str = UNKNOWN
    accelerators: tuple[Accelerator, ...] = ()
    platform: str = UNKNOWN
    environment: str = "script"
    python_version: str = UNKNOWN
    torch_version: str = UNKNOWN
    intraop_threads: int | None = None
    notes: tuple[str, ...] = ()
    cpus_are_per_rank: bool = False

    @property
    def cpus_per_rank(self) -> int:
        """CPUs for one training process and its workers, at least 1."""
        if self.cpus_are_per_rank:
            return max(1, self.usable_cpus)
        return max(1, self.usable_cpus // max(1, self.local_ranks))

    @property
    def cpu_time_per_rank(self) -> float:
        """CPU seconds that a rank can have in a second: below 1 where ranks outnumber the CPUs."""
        if self.cpus_are_per_rank:
            return float(self.usable_cpus)
        return self.usable_cpus / self.local_ranks

    def __post_init__(self) -> None:
        """Refuse a machine that cannot be."""
        for name in ("usable_cpus", "local_ranks"):  # without torch, which `arguments` imports
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name}={count!r} must be a whole number.")
            if count < 1:
                raise ValueError(f"{name}={count} must be at least 1.")

    def summary(self) -> str:
        """One line: CPUs with their source, ranks, memory, accelerators, versions."""
        parts = [f"{count_of(self.usable_cpus, 'usable CPU')} ({self.cpu_source})"]
        if self.local_ranks > 1:
            parts.append(f"{self.cpus_per_rank} per rank for {self.local_ranks} ranks")
        if self.memory_bytes is not None:
            parts.append(f"{format_bytes(self.memory_bytes)} memory ({self.memory_source})")
        parts.append(", ".join(map(str, self.accelerators)) or "no accelerator")
        if self.python_version != UNKNOWN:
            parts.append(f"Python {self.python_version}")
        if self.torch_version != UNKNOWN:
            parts.append(f"torch {self.torch_version}")
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, Any]]:
        """The lines of the notebook table, each limit with its source."""
        limits = ", ".join(f"{name} {count}" for name, count in self.cpu_limits.items())
        return [
            ("usable CPUs", f"{self.usable_cpus} ({self.cpu_source})"),
            ("CPU limits seen", limits or MISSING),
            ("physical cores", self.physical_cpus),
            ("ranks on this machine", self.local_ranks),
            ("CPUs per rank", self.cpus_per_rank),
            ("memory", f"{memory_text(self.memory_bytes)} ({self.memory_source})"),
            ("free memory", memory_text(self.available_memory_bytes)),
            ("shared memory", memory_text(self.shared_memory_bytes)),
            ("free shared memory", memory_text(self.shared_memory_free_bytes)),
            ("open files allowed", self.open_files_limit),
            ("start method of workers", self.start_method),
            ("accelerators", ", ".join(map(str, self.accelerators)) or "none"),
            ("threads per PyTorch operation", self.intraop_threads),
            ("platform", self.platform),
            ("environment", self.environment),
            ("Python", self.python_version),
            ("PyTorch", self.torch_version),
            *(("note", note) for note in self.notes),
        ]


def inspect_machine() -> Machine:
    """Find what this process may use: CPUs, memory, shared memory, open files, accelerators.

    Nothing is changed by looking: CUDA stays uninitialised, so that forked workers can still be
    started, and the multiprocessing start method stays open. What the system does not tell is
    None.

    Returns:
        A `Machine`. Counts are for this process; `cpus_per_rank` shares them between the ranks
        that torchrun, MPI or Slurm started on this machine.

    >>> machine = inspect_machine()
    >>> machine.usable_cpus >= machine.cpus_per_rank >= 1
    True

    Explained in: notebook 00
    """
    import torch

    limits = seen_cpu_limits()
    cpus, source = usable_cpus(limits)
    ranks, rank_source = local_ranks(os.environ)
    memory = usable_memory(*host_memory(), cgroup_memory(SYSTEM_ROOT))
    shared_bytes, shared_free_bytes = shared_memory(SYSTEM_ROOT)
    accelerators, accelerator_notes = find_accelerators(torch)
    notes = [
        *cpu_notes(limits, cgroup_cpu_quota(SYSTEM_ROOT)),
        *variable_notes(os.environ),
        *accelerator_notes,
    ]
    if ranks > 1:
        notes.append(f"{ranks} ranks are counted on this machine ({rank_source}).")
    if changed := cpu_count_changed(AFFINITY_AT_IMPORT, affinity_count()):
        notes.append(changed)
    return Machine(
        usable_cpus=cpus,
        cpu_source=source,
        cpu_limits=limits,
        logical_cpus=psutil.cpu_count(logical=True),
        physical_cpus=psutil.cpu_count(logical=False),
        local_ranks=ranks,
        memory_bytes=memory[0],
        available_memory_bytes=memory[1],
        memory_source=memory[2],
        shared_memory_bytes=shared_bytes,
        shared_memory_free_bytes=shared_free_bytes,
        open_files_limit=open_files_limit(),
        start_method=start_method(),
        accelerators=accelerators,
        platform=platform.platform(),
        environment=environment(os.environ),
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        intraop_threads=torch.get_num_threads(),
        notes=tuple(notes),
        cpus_are_per_rank=ranks > 1 and ranks_are_slurm_tasks(ranks, os.environ),
    )


def report_lines(machine: Machine) -> list[str]:
    """The machine as an environment check: a line a subject, `[OK]` or `[NOTE]` in front.

    A `[NOTE]` is no error: it marks what limits the loader here or is worth a look.

    >>> for line in report_lines(Machine(usable_cpus=1, cpu_source="affinity"))[:2]:
    ...     print(line)
    [NOTE] CPU: 1 usable (affinity)
    [NOTE] Memory: not available
    """
    subjects = (
        cpu_line,
        memory_line,
        shared_memory_line,
        open_files_line,
        start_method_line,
        accelerator_line,
        versions_line,
    )
    checks = [subject(machine) for subject in subjects]
    if machine.intraop_threads and (
        threads := thread_report(machine, threads_per_rank=machine.intraop_threads)
    ):
        checks.append((False, threads))
    checks += [(False, note) for note in machine.notes]
    return [f"{'[OK]' if fine else '[NOTE]'} {text}" for fine, text in checks]


def thread_report(machine: Machine, *, threads_per_rank: int) -> str | None:
    """Say so when the ranks' PyTorch threads outnumber the CPUs they may use.

    Args:
        machine: where the ranks run.
        threads_per_rank: intra-op threads of each rank (`torch.get_num_threads()`).

    Returns:
        A sentence with the better number, or None when the threads fit.

    Raises:
        ValueError: `threads_per_rank` is below 1.

    >>> print(thread_report(Machine(usable_cpus=8, local_ranks=4), threads_per_rank=8))
    4 ranks with 8 intra-op threads each make 32 threads on 8 usable CPUs. Use 2 per rank: torch.set_num_threads(2), or OMP_NUM_THREADS=2 before the start.
    >>> thread_report(Machine(usable_cpus=8, local_ranks=4), threads_per_rank=2) is None
    True
    """
    if threads_per_rank < 1:
        raise ValueError(f"threads_per_rank must be at least 1, not {threads_per_rank}.")
    cpus = machine.usable_cpus * (machine.local_ranks if machine.cpus_are_per_rank else 1)
    threads = machine.local_ranks * threads_per_rank
    if threads <= cpus:
        return None
    found = (
        f"{count_of(machine.local_ranks, 'rank')} with {count_of(threads_per_rank, 'intra-op thread')} "
        f"each make {threads} threads on {count_of(cpus, 'usable CPU')}."
    )
    better = machine.cpus_per_rank
    if threads_per_rank <= better:
        return f"{found} Start fewer ranks, or ask for more CPUs."
    return (
        f"{found} Use {better} per rank: torch.set_num_threads({better}), "
        f"or OMP_NUM_THREADS={better} before the start."
    )


# Memory, files, start method, environment


def host_memory() -> tuple[int | None, int | None]:
    """Memory of the whole machine and what is available of it, in bytes."""
    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, psutil.Error):
        return None, None  # no /proc/meminfo, as in some sandboxes
    return memory.total, memory.available


def usable_memory(
    host_bytes: int | None, host_available_bytes: int | None, cgroup: CgroupMemory
) -> tuple[int | None, int | None, str]:
    """Total and free memory of this process, in bytes, and which limit decided.

    >>> usable_memory(128 * 2**30, 100 * 2**30, CgroupMemory(4 * 2**30, 1 * 2**30))
    (4294967296, 1073741824, 'cgroup')
    """
    limit = cgroup.limit_bytes
    if limit is None or (host_bytes is not None and limit >= host_bytes):
        return host_bytes, host_available_bytes, "host"
    if cgroup.available_bytes is None or host_available_bytes is None:
        return limit, cgroup.available_bytes, "cgroup"
    return limit, min(cgroup.available_bytes, host_available_bytes), "cgroup"


def shared_memory(root: Path = SYSTEM_ROOT) -> tuple[int | None, int | None]:
    """Size of /dev/shm and what is free of it, in bytes; None off Linux or where it is missing."""
    if sys.platform == "win32":
        return None, None
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    if not status.f_blocks:  # mounted without a size: as large as memory, so no limit of its own
        return None, None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def open_files_limit() -> int | None:
    """Soft limit on open files; None on Windows, and where the limit is "unlimited"."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def start_method() -> str:
    """How multiprocessing starts processes here, found without fixing the choice."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]  # documented: the default is first


def environment(environ: Mapping[str, str]) -> str:
    """Where the code runs: "kaggle", "colab", "jupyter" or "script"."""
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return "kaggle"
    if "COLAB_RELEASE_TAG" in environ or "google.colab" in sys.modules:
        return "colab"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return "jupyter" if hasattr(shell, "kernel") else "script"


# The lines of the report: whether it is fine, and what to say


def cpu_line(machine: Machine) -> tuple[bool, str]:
    """CPUs with their source, and per rank where there are several."""
    text = f"CPU: {machine.usable_cpus} usable ({machine.cpu_source})"
    if machine.logical_cpus is not None:
        text += f", {machine.logical_cpus} logical"
    if machine.physical_cpus is not None:
        text += f", {count_of(machine.physical_cpus, 'physical core')}"
    if machine.local_ranks > 1:
        text += f"; {machine.cpus_per_rank} for each of {machine.local_ranks} ranks"
    whole = machine.logical_cpus is None or machine.usable_cpus >= machine.logical_cpus
    return whole and machine.usable_cpus > 1, text


def memory_line(machine: Machine) -> tuple[bool, str]:
    """Memory: free, total, share in use, and whose limit it is."""
    total, free = machine.memory_bytes, machine.available_memory_bytes
    if total is None:
        return False, f"Memory: {MISSING}"
    limit = f"{format_bytes(total)} ({machine.memory_source})"
    if free is None:
        return False, f"Memory: {limit}, free memory {MISSING}"
    used = format_value("used_share", 1 - free / total)
    fine = free >= LOW_MEMORY_SHARE * total
    return fine, f"Memory: {format_bytes(free)} free of {limit}, {used} in use"


def shared_memory_line(machine: Machine) -> tuple[bool, str]:
    """Size of /dev/shm, with advice where it is small."""
    free, total = machine.shared_memory_free_bytes, machine.shared_memory_bytes
    if total is None or free is None:
        on_linux = machine.platform.startswith("Linux")
        return (
            not on_linux,
            f"Shared memory: no limit of /dev/shm {'found' if on_linux else 'here'}",
        )
    text = f"Shared memory: {format_bytes(free)} free of {format_bytes(total)} in /dev/shm"
    if free >= SMALL_SHARED_MEMORY_BYTES:
        return True, text
    return False, f"{text}; a container gets more with --shm-size=8g or --ipc=host"


def open_files_line(machine: Machine) -> tuple[bool, str]:
    """Soft limit on open files, with advice where it is low."""
    limit = machine.open_files_limit
    if limit is None:
        return True, "Open files: no limit here"
    if limit >= FEW_OPEN_FILES:
        return True, f"Open files: up to {limit:,}"
    return False, f"Open files: up to {limit:,}; raise it with `ulimit -n 4096` before the start"


def start_method_line(machine: Machine) -> tuple[bool, str]:
    """How workers start, and what that asks of a data set in a notebook."""
    text = f"Start method: {machine.start_method}"
    if machine.start_method not in ("spawn", "forkserver"):
        return True, text
    text += "; workers get the data set by pickling"
    if machine.environment == "script":
        return True, f'{text}, so start training below `if __name__ == "__main__":`'
    return False, f"{text}, so define it in a .py file, not in a cell"


def accelerator_line(machine: Machine) -> tuple[bool, str]:
    """The devices, or that there is none."""
    if not machine.accelerators:
        return False, "Accelerator: none, training runs on the CPU"
    return True, "Accelerator: " + ", ".join(f"{a} [{a.kind}]" for a in machine.accelerators)


def versions_line(machine: Machine) -> tuple[bool, str]:
    """Python, PyTorch, system and environment."""
    return True, (
        f"Versions: Python {machine.python_version}, PyTorch {machine.torch_version}, "
        f"{machine.platform.split('-')[0]}, {machine.environment}"
    )


def memory_text(count: int | None) -> str:
    """Bytes with a unit, or that they are not known."""
    return format_value("memory_bytes", count)
