"""What psutil and /proc say about this process, its workers and the machine.

Every read is guarded where it is made: a process may end, refuse or not know at any moment.
What could not be read is None with a note, never 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

MIN_INTERVAL_S = 0.1  # the system counts CPU time in steps of 10 ms: below this, mostly rounding

# What psutil raises for a process that ended, refuses, or whose files vanish while being read;
# AttributeError and NotImplementedError where this system has no such counter.
READ_ERRORS = (psutil.Error, OSError, AttributeError, NotImplementedError, ValueError)

MAIN, WORKER, HELPER = "main", "worker", "helper"
HELPER_WORDS = ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker")
SPAWN_WORDS = ("multiprocessing.spawn", "--multiprocessing-fork")
FORKSERVER_WORD = "multiprocessing.forkserver"
TORCH_WORKER_NAME = "pt_data_worker"  # the name torch gives a DataLoader worker (since 2.7)

PRESSURE_ROOT = "/proc/pressure"  # pressure stall information, Linux 4.20 and newer
SHARED_MEMORY_ROOT = "/dev/shm"


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process.

    Args:
        pid: process number.
        rss_bytes: resident: all pages in memory, shared ones counted in full.
        pss_bytes: proportional: shared pages divided among the processes that share them.
        uss_bytes: unique: what would be freed if this process ended.
        note: why something is missing.
        gone: True if the process ended, so that it holds nothing.
    """

    pid: int
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    uss_bytes: int | None = None
    note: str | None = None
    gone: bool = False

    @property
    def memory_bytes(self) -> int | None:
        """The best figure there is: PSS, else USS, else RSS."""
        known = (self.pss_bytes, self.uss_bytes, self.rss_bytes)
        return next((value for value in known if value is not None), None)

    @property
    def label(self) -> str | None:
        """Which figure `memory_bytes` is: "pss", "uss" or "resident"."""
        if self.pss_bytes is not None:
            return "pss"
        if self.uss_bytes is not None:
            return "uss"
        return "resident" if self.rss_bytes is not None else None


@dataclass(frozen=True)
class TreeMemory:
    """Memory of a process and its children together.

    Args:
        memory_bytes: the sum of what could be read; None if nothing could.
        label: which figures were summed, e.g. "pss", or "pss + resident".
        partial: True if a living process could not be read.
        note: why it is partial.
        processes: the readings behind it.
    """

    memory_bytes: int | None
    label: str | None
    partial: bool
    note: str | None
    processes: tuple[ProcessMemory, ...] = ()


def read_memory(process: Any, *, detailed: bool = True) -> ProcessMemory:
    """Read the memory of one process, as much of it as this system tells.

    PSS needs Linux, USS also works on macOS and Windows for own processes. The detailed read
    walks the page tables: 1 to 5 ms a process, against 0.02 ms for the resident size.

    Args:
        process: a `psutil.Process`.
        detailed: also read PSS and USS.

    Returns:
        A `ProcessMemory`; an ended process, or one that refuses, gives None and a note.

    >>> read_memory(psutil.Process()).rss_bytes > 0
    True
    """
    pid = getattr(process, "pid", -1)
    try:
        rss = process.memory_info().rss
    except (psutil.NoSuchProcess, ProcessLookupError):
        return ProcessMemory(pid, note="process ended", gone=True)
    except READ_ERRORS as error:
        return ProcessMemory(pid, note=f"memory: {describe(error)}")
    if not rss:  # no living process is without pages
        return _empty_process(process, pid)
    if not detailed:
        return ProcessMemory(pid, rss_bytes=rss)
    try:  # psutil 8 renames the call
        call = getattr(process, "memory_footprint", None) or process.memory_full_info
        full = call()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return ProcessMemory(pid, note="process ended", gone=True)
    except READ_ERRORS as error:
        return ProcessMemory(pid, rss_bytes=rss, note=f"PSS and USS: {describe(error)}")
    return ProcessMemory(pid, rss, getattr(full, "pss", None), getattr(full, "uss", None))


def _empty_process(process: Any, pid: int) -> ProcessMemory:
    """A process with no memory at all: a zombie, or a system that doesn't tell."""
    try:
        status = process.status()
    except READ_ERRORS:
        status = "?"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ProcessMemory(pid, note=f"process ended ({status})", gone=True)
    return ProcessMemory(pid, note=f"unreliable: all counters are 0 (status {status!r})")


def list_children(process: Any) -> tuple[list[Any], str | None]:
    """All descendants of a process.

    Args:
        process: a `psutil.Process`.

    Returns:
        The processes, and why the list may be incomplete (None if it is complete).
    """
    try:
        return list(process.children(recursive=True)), None
    except READ_ERRORS as error:
        return [], f"child processes: {describe(error)}"


def child_pids(pid: int, proc: str = "/proc") -> list[int] | None:
    """Numbers of all descendants, from the kernel's own lists: 30 times cheaper than a search.

    Args:
        pid: the process.
        proc: where /proc is.

    Returns:
        Process numbers, or None where this system keeps no such lists.
    """
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return None
    lists = [_read(f"{proc}/{pid}/task/{thread}/children") for thread in threads]
    known = [text for text in lists if text is not None]  # a thread may end in between
    if not known:
        return None
    direct = [int(number) for text in known for number in text.split()]
    return direct + [below for child in direct for below in child_pids(child, proc) or []]


def tree_memory(process: Any) -> TreeMemory:
    """Memory of a process and all its descendants.

    Args:
        process: a `psutil.Process`.

    Returns:
        The sum of PSS where it can be read. A child that ended meanwhile counts nothing; one
        that refuses makes the sum partial.

    >>> tree_memory(psutil.Process()).memory_bytes > 0
    True
    """
    children, note = list_children(process)
    return sum_memory([read_memory(each) for each in (process, *children)], note)


def sum_memory(readings: Iterable[ProcessMemory], note: str | None = None) -> TreeMemory:
    """Add the memory of several processes up.

    Args:
        readings: one per process.
        note: why processes may be missing from `readings`.

    Returns:
        The sum of each process's best figure, with its label.
    """
    processes = tuple(readings)
    known = [p for p in processes if p.memory_bytes is not None]
    unread = [p for p in processes if p.memory_bytes is None and not p.gone]
    notes = [note] if note else []
    notes += [f"process {p.pid}: {p.note}" for p in unread[:1]]
    return TreeMemory(
        memory_bytes=sum(p.memory_bytes or 0 for p in known) if known else None,
        label=" + ".join(sorted({str(p.label) for p in known})) or None,
        partial=bool(notes),
        note="; ".join(notes) or None,
        processes=processes,
    )


def role_of(
    name: str, cmdline: Sequence[str], main_cmdline: Sequence[str], parent_cmdline: Sequence[str]
) -> str:
    """Tell a worker from the helpers of multiprocessing and from other programs.

    Args:
        name: the child's process name.
        cmdline: its command line; empty where it can't be read.
        main_cmdline: command line of this process, which forked workers share.
        parent_cmdline: command line of the child's parent.

    Returns:
        "worker" or "helper".

    >>> role_of("python", ["python", "-c", "from multiprocessing.resource_tracker import main"],
    ...         ["python", "train.py"], ["python", "train.py"])
    'helper'
    """
    words, parent = " ".join(cmdline), " ".join(parent_cmdline)
    if name == TORCH_WORKER_NAME or any(word in words for word in SPAWN_WORDS):
        return WORKER
    if any(word in words for word in HELPER_WORDS):
        return HELPER
    if FORKSERVER_WORD in words:  # the server itself, or a worker that it forked
        return WORKER if FORKSERVER_WORD in parent else HELPER
    return WORKER if not words or list(cmdline) == list(main_cmdline) else HELPER


class ProcessTree:
    """This process and its children, kept between readings so that rates can be taken.

    Args:
        process: the `psutil.Process` at the root; None = this one.
        workers: also look at its children.
    """

    def __init__(self, process: Any = None, *, workers: bool = True) -> None:
        self.main = psutil.Process() if process is None else process
        self.workers = workers
        self.children: dict[int, Any] = {}
        self.roles: dict[int, str] = {self.main.pid: MAIN}
        self.note: str | None = None
        self._decided: set[int] = set()  # children whose role is known for good

    @property
    def processes(self) -> dict[int, Any]:
        """Process by number, this one first."""
        return {self.main.pid: self.main, **self.children}

    def refresh(self) -> None:
        """Look for children that came or went."""
        if not self.workers:
            return
        pids = child_pids(self.main.pid) if sys.platform == "linux" else None
        if pids is None:
            found, self.note = list_children(self.main)
        else:
            found = [self.children.get(pid) or self._open(pid) for pid in pids]
        self.children = {child.pid: child for child in found if child is not None}
        known = self.roles
        self.roles = {self.main.pid: MAIN}
        self._decided &= self.children.keys()
        for pid, child in self.children.items():
            self.roles[pid] = (
                known[pid] if pid in self._decided else self._role(child, pid in known)
            )

    def _open(self, pid: int) -> Any:
        try:
            return psutil.Process(pid)
        except READ_ERRORS:
            return None  # ended since it was listed

    def _role(self, child: Any, seen_before: bool) -> str:
        """The child's role; decided once it can't be another program about to be started.

        Between fork and exec a new process looks like a copy of its parent, or has no command
        line: so looks a forked worker too, until it is named.
        """
        try:
            name, cmdline, main_cmdline = child.name(), child.cmdline(), self.main.cmdline()
            parent_cmdline = psutil.Process(child.ppid()).cmdline()
        except READ_ERRORS:
            name, cmdline, main_cmdline, parent_cmdline = "", [], [], []
        starting = cmdline in ([], parent_cmdline) and name != TORCH_WORKER_NAME
        if starting and not seen_before:
            return HELPER  # for now: asked again at the next reading
        self._decided.add(child.pid)
        return role_of(name, cmdline, main_cmdline, parent_cmdline)

    def forget(self, pids: Iterable[int]) -> None:
        """Drop children that turned out to have ended."""
        for pid in pids:
            self.children.pop(pid, None)


def cpu_seconds(process: Any) -> float | None:
    """CPU time that a process has used, in user and system mode; None if it can't be read."""
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except READ_ERRORS:
        return None


def disk_read_bytes(process: Any) -> int | None:
    """Bytes that a process has had read from storage since it started.

    On Linux and macOS what the page cache holds isn't counted. None where the system or the
    process has no such counter.

    Args:
        process: a `psutil.Process`.
    """
    try:
        return int(process.io_counters().read_bytes)
    except READ_ERRORS:
        return None


def open_files(process: Any) -> int | None:
    """File descriptors (on Windows: handles) that a process holds; None if it can't be read."""
    try:
        return int(process.num_handles() if sys.platform == "win32" else process.num_fds())
    except READ_ERRORS:
        return None


def machine_cpu_seconds() -> tuple[float, float] | None:
    """Busy and total CPU seconds of the whole machine since it started, over all CPUs."""
    try:
        times = psutil.cpu_times()
    except READ_ERRORS:
        return None
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # inside user, nice
    total = sum(times) - guests
    return total - times.idle - getattr(times, "iowait", 0.0), total


def summed_increase(before: Mapping[int, float], after: Mapping[int, float]) -> float | None:
    """By how much the counters grew, over the processes that stand in both readings.

    >>> summed_increase({1: 10.0, 2: 5.0}, {1: 11.0, 3: 90.0})
    1.0
    """
    shared = before.keys() & after.keys()
    return sum(max(0.0, after[pid] - before[pid]) for pid in shared) if shared else None


def cpu_percent_of_usable(used_s: float, elapsed_s: float, cpus: float) -> float | None:
    """CPU use as a percentage of the CPUs that this process may use.

    Args:
        used_s: CPU seconds used, over all processes and threads.
        elapsed_s: seconds that passed.
        cpus: usable CPUs (a quota may make it a fraction).

    Returns:
        0 to 100; None if less than 0.1 s passed, as the counters are too coarse for that.

    >>> cpu_percent_of_usable(3.8, 1.0, cpus=4)  # a process at 380 %
    95.0
    >>> cpu_percent_of_usable(0.02, 0.005, cpus=4) is None
    True
    """
    if elapsed_s < MIN_INTERVAL_S or not cpus > 0:
        return None
    return min(100.0, 100.0 * used_s / elapsed_s / cpus)


def shared_memory_used_bytes(root: str = SHARED_MEMORY_ROOT) -> int | None:
    """Bytes in use in the shared-memory file system, by everyone; None where there is none."""
    try:
        stat = os.statvfs(root)
    except READ_ERRORS:  # AttributeError on Windows
        return None
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def pressure_stall_s(kind: str, root: str = PRESSURE_ROOT) -> float | None:
    """Seconds, since the start of the machine, in which some task waited for a resource.

    Args:
        kind: "cpu", "io" or "memory".
        root: where the kernel keeps the files.

    Returns:
        The "some" total; None where the kernel doesn't keep it.
    """
    text = _read(f"{root}/{kind}")
    return None if text is None else parse_pressure(text)


def parse_pressure(text: str) -> float | None:
    """The "some" total of a pressure file, in seconds.

    >>> parse_pressure("some avg10=2.05 avg60=0.97 avg300=0.29 total=2239532")
    2.239532
    """
    for line in text.splitlines():
        kind, _, fields = line.partition(" ")
        if kind == "some" and "total=" in fields:
            return int(fields.split("total=")[1].split()[0]) / 1e6
    return None


def _read(path: str) -> str | None:
    """Text of a small file of /proc; plain system calls, as `open` takes three times as long."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(number, 4096):
            parts.append(part)
        return b"".join(parts).decode()
    except OSError:
        return None  # the process ended, or the kernel keeps the file but not the figures
    finally:
        os.close(number)


def describe(error: BaseException) -> str:
    """An error in a few words: psutil's own texts are often empty or only a number."""
    if isinstance(error, psutil.AccessDenied | PermissionError):
        return "permission denied"
    if isinstance(error, AttributeError | NotImplementedError):
        return "not available on this system"
    return f"{type(error).__name__}: {error}"
