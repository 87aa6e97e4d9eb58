"""Counters of the calling thread that the system keeps anyway: Linux only, None elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True)
class ThreadCounters:
    """What one thread has used so far, or between two readings.

    Attributes:
        run_delay_ns: Waiting for a CPU while ready to run; None where the system does not tell.
        switches: Times it gave the CPU up by itself, to wait for something.
        forced_switches: Times the CPU was taken from it.
        major_faults: Page faults that had to read from storage.
        read_calls_bytes: Bytes it asked for by reading, from the page cache too.
        storage_bytes: Bytes that came from storage.
        threads: Threads of its process at the moment of the reading.
    """

    run_delay_ns: int | None = None
    switches: int | None = None
    forced_switches: int | None = None
    major_faults: int | None = None
    read_calls_bytes: int | None = None
    storage_bytes: int | None = None
    threads: int | None = None

    def since(self, earlier: ThreadCounters) -> ThreadCounters:
        """The difference to an earlier reading; the number of threads is that of now."""

        def minus(name: str) -> int | None:
            now, before = getattr(self, name), getattr(earlier, name)
            return None if now is None or before is None else max(0, now - before)

        return ThreadCounters(
            run_delay_ns=minus("run_delay_ns"),
            switches=minus("switches"),
            forced_switches=minus("forced_switches"),
            major_faults=minus("major_faults"),
            read_calls_bytes=minus("read_calls_bytes"),
            storage_bytes=minus("storage_bytes"),
            threads=self.threads,
        )


def read_counters() -> ThreadCounters:
    """Read the counters of the calling thread; about 40 µs on Linux.

    Example:
        >>> read_counters().since(read_counters()).switches in (0, None)
        True
    """
    io = _io_counters()
    switches = forced = faults = None
    if resource is not None and hasattr(resource, "RUSAGE_THREAD"):
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        switches, forced, faults = usage.ru_nvcsw, usage.ru_nivcsw, usage.ru_majflt
    return ThreadCounters(
        run_delay_ns=_run_delay_ns(),
        switches=switches,
        forced_switches=forced,
        major_faults=faults,
        read_calls_bytes=io.get("rchar"),
        storage_bytes=io.get("read_bytes"),
        threads=_threads(),
    )


def _run_delay_ns() -> int | None:
    """Second number of schedstat: nanoseconds spent waiting on a run queue."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux, or not told
        return None


def _io_counters() -> dict[str, int]:
    try:
        with open("/proc/thread-self/io") as file:
            return {key: int(value) for key, _, value in (line.partition(": ") for line in file)}
    except (OSError, ValueError):  # not Linux, or forbidden
        return {}


def _threads() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return None
