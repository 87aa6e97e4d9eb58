"""A background sampler: GPU, CPU, memory per process, shared memory, files, disk and pressure.

It only reads: nothing of the machine or the process is changed, so nothing needs to be restored.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from dataloading.arguments import check_seconds
from dataloading.cpus import usable_cpu_count
from dataloading.nvml import NVML, OK, SAMPLE_BUFFER, TORCH, Device, Nvml, Reading, choose_reading
from dataloading.patterns import Pattern, Trend, classify_pattern, classify_trend
from dataloading.processes import (
    MIN_INTERVAL_S,
    WORKER,
    ProcessMemory,
    ProcessTree,
    cpu_percent_of_usable,
    cpu_seconds,
    disk_read_bytes,
    machine_cpu_seconds,
    open_files,
    pressure_stall_s,
    read_memory,
    shared_memory_used_bytes,
    sum_memory,
    summed_increase,
)
from dataloading.trace import COLUMNS, DEVICE_COLUMNS, Columns, ResourceTrace
from dataloading.train_steps import METER

__all__ = [
    "COLUMNS",
    "DEVICE_COLUMNS",
    "Pattern",
    "ResourceMonitor",
    "ResourceTrace",
    "Trend",
    "classify_pattern",
    "classify_trend",
    "monitor_resources",
]

COST_SHARE = 0.005  # of one CPU, for each kind of reading: a dearer one is made less often
DETAILS_EVERY_S = 1.0  # PSS and USS: 1 to 5 ms a process, and memory doesn't change faster
MANY_WORKERS = 16  # beyond this a sweep over all workers takes tens of milliseconds
DETAILS_MANY_EVERY_S = 5.0
STOP_TIMEOUT_S = 5.0  # a driver that hangs must not hang the training loop
PRESSURES = ("cpu", "io", "memory")

Row = dict[str, float | None]


def monitor_resources(
    *, interval_s: float = 0.2, gpu: bool = True, workers: bool = True
) -> ResourceMonitor:
    """Watch the machine while a `with` block runs.

    A thread of this process takes cheap readings every `interval_s`, and those that cost
    milliseconds every second or less often: each kind takes at most 0.5 % of one CPU.

    Args:
        interval_s: seconds between two readings, at least 0.1.
        gpu: read NVIDIA GPUs through NVML.
        workers: look at child processes too; False reads this process alone.

    Returns:
        A context manager; `with monitor_resources() as trace:` gives the `ResourceTrace`, which
        can be read while it grows. It also has `start()`, `stop()` and `trace`.

    Raises:
        ValueError: if `interval_s` is below 0.1 s.

    >>> with monitor_resources(gpu=False) as trace:
    ...     pass
    >>> bool(trace.frame["main_rss_bytes"].iloc[0] > 0)
    True

    Explained in: notebook 01
    """
    return ResourceMonitor(interval_s=interval_s, gpu=gpu, workers=workers)


class ResourceMonitor:
    """Runs a `Sampler` in a thread from `start` to `stop`, or for a `with` block.

    Args:
        interval_s: seconds between two readings, at least 0.1.
        gpu: read NVIDIA GPUs.
        workers: look at child processes too.
        nvml: an `Nvml` not yet entered; None makes one.
        tree: the processes to watch; None = this process and its children.

    Raises:
        ValueError: if `interval_s` is below 0.1 s or not a finite number.
    """

    def __init__(
        self,
        *,
        interval_s: float = 0.2,
        gpu: bool = True,
        workers: bool = True,
        nvml: Nvml | None = None,
        tree: ProcessTree | None = None,
    ) -> None:
        check_seconds(interval_s, "interval_s")
        if interval_s < MIN_INTERVAL_S:
            raise ValueError(
                f"interval_s={interval_s} is out of range: use {MIN_INTERVAL_S} s or more, as the "
                "system counts CPU time in steps of 10 ms and shorter readings show mostly rounding"
            )
        self.trace = ResourceTrace(float(interval_s), usable_cpu_count())
        self._nvml = (Nvml() if nvml is None else nvml) if gpu else None
        self._tree = ProcessTree(workers=workers) if tree is None else tree
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> ResourceTrace:
        """Start the readings.

        Returns:
            The trace, which grows until `stop`.

        Raises:
            RuntimeError: if it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this monitor was used before: call monitor_resources() again")
        try:
            if self._nvml is not None:
                self._nvml.__enter__()  # here, not in the thread: it imports modules
                _note_gpus(self.trace, self._nvml)
            self._thread = threading.Thread(target=self._run, name="resource-monitor", daemon=True)
            self._thread.start()
        except BaseException:
            self._stop.set()
            if self._nvml is not None:
                self._nvml.close()
            raise
        return self.trace

    def stop(self) -> ResourceTrace:
        """End the readings and wait for the thread; calling it again changes nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                self.trace.notes["monitor"] = f"a reading hung for more than {STOP_TIMEOUT_S:g} s"
        return self.trace

    def __enter__(self) -> ResourceTrace:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        interval_s, clock = self.trace.interval_s, time.perf_counter
        try:
            sampler = Sampler(self.trace, self._tree, self._nvml, clock)
            next_s = clock()
            while True:
                sampler.sample()
                next_s = max(next_s + interval_s, clock())  # a late reading isn't made up for
                if self._stop.wait(next_s - clock()):
                    break
            sampler.sample(last=True)
        except Exception as error:  # watching must never break or litter the run that is watched
            self.trace.notes["monitor"] = f"stopped early: {type(error).__name__}: {error}"
        finally:
            if self._nvml is not None:
                self._nvml.close()
            self.trace.complete = True


def _note_gpus(trace: ResourceTrace, nvml: Nvml) -> None:
    if nvml.status == OK:
        if nvml.reason:
            trace.notes["gpu"] = nvml.reason
        return
    trace.notes["gpu"] = f"{nvml.status}: {nvml.reason}. {nvml.advice}"


class Budget:
    """Says when a reading may be made again, so that it costs at most a share of one CPU.

    Args:
        share: CPU seconds per second that the reading may take.
        every_s: seconds between two readings even if they are cheap.
    """

    def __init__(self, share: float = COST_SHARE, every_s: float = 0.0) -> None:
        self.share = share
        self.every_s = every_s
        self._next_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether enough time has passed since the last reading."""
        return now_s >= self._next_s

    @contextlib.contextmanager
    def spent(self, now_s: float) -> Iterator[None]:
        """Measure what the block costs and put the next reading off accordingly."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            cost_s = time.thread_time() - start_s
            self._next_s = now_s + max(self.every_s, cost_s / self.share)


class Sampler:
    """Takes one reading of everything and appends it to a trace.

    Args:
        trace: where rows and notes go.
        tree: the processes to watch.
        nvml: an open `Nvml`, or None.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        trace: ResourceTrace,
        tree: ProcessTree,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.trace = trace
        self.tree = tree
        self.devices: list[Device] = [] if nvml is None else nvml.devices
        self._clock = clock
        self._start_s = clock()
        self._idle_s = METER.read_s()
        self._before: dict[str, tuple[float, Any]] = {}
        self._first_sample: dict[int, tuple[int, float]] = {}
        self._details_budget = Budget(every_s=DETAILS_EVERY_S)
        self._groups: list[tuple[Budget, Callable[[float, Row], None]]] = [
            (Budget(), self._read_devices),
            (Budget(), self._find_processes),
            (Budget(), self._read_processes),
            (Budget(), self._read_machine),
            (Budget(), self._read_train_step),
            (self._details_budget, self._read_details),
        ]

    def sample(self, *, last: bool = False) -> None:
        """Append a row with what is due now; the last row has everything."""
        now_s = self._clock() - self._start_s
        row: Row = {}
        for budget, read in self._groups:
            if last or budget.due(now_s):
                with budget.spent(now_s):
                    read(now_s, row)
        self.trace.rows.append(now_s, {name: v for name, v in row.items() if v is not None})

    def _find_processes(self, now_s: float, row: Row) -> None:
        self.tree.refresh()
        many = len(self.tree.children) > MANY_WORKERS
        self._details_budget.every_s = DETAILS_MANY_EVERY_S if many else DETAILS_EVERY_S

    def _read_devices(self, now_s: float, row: Row) -> None:
        for device in self.devices:
            self._read_device(device, now_s, row)

    def _read_device(self, device: Device, now_s: float, row: Row) -> None:
        samples = self._new_samples(device, now_s)
        if samples:
            utilization = Reading(sum(samples) / len(samples), SAMPLE_BUFFER)
        else:
            utilization = device.utilization()
        self._put(row, device, "utilization", utilization)
        self._put(row, device, "memory_bytes", device.memory_used())
        self._put(row, device, "power_w", device.power_w())
        self._put(row, device, "sm_clock_mhz", device.sm_clock_mhz())

    def _new_samples(self, device: Device, now_s: float) -> list[float]:
        """Percentages of the driver's ring buffer since the last reading, kept in the trace.

        The newest sample of the first reading is taken as "now", whatever clock the driver uses;
        what the buffer held from before the start is left out.
        """
        samples = device.new_samples()
        if not samples:
            return []
        if device.index not in self._first_sample:
            self._first_sample[device.index] = samples[-1][0], now_s
            self.trace.gpu_rows[device.index] = Columns()
            return []
        zero_us, zero_s = self._first_sample[device.index]
        for time_us, percent in samples:
            time_s = zero_s + (time_us - zero_us) / 1e6
            self.trace.gpu_rows[device.index].append(time_s, {"utilization": percent})
        return [percent for _, percent in samples]

    def _put(self, row: Row, device: Device, quantity: str, reading: Reading) -> None:
        column = f"gpu{device.index}_{quantity}"
        row[column] = reading.value
        if reading.value is None:
            self._note(column, reading.reason)
        elif reading.source in (NVML, SAMPLE_BUFFER) and self.trace.gpu_source != SAMPLE_BUFFER:
            self.trace.gpu_source = reading.source

    def _read_processes(self, now_s: float, row: Row) -> None:
        processes = self.tree.processes
        used = {pid: s for pid, p in processes.items() if (s := cpu_seconds(p)) is not None}
        read = {pid: b for pid, p in processes.items() if (b := disk_read_bytes(p)) is not None}
        self._rate(now_s, row, "cpu_percent_of_usable", used, self._percent_of_usable)
        self._rate(now_s, row, "disk_read_bytes_per_s", read, _per_second)

        row["open_files"] = open_files(self.tree.main)
        if row["open_files"] is None:
            self._note("open_files", "the system doesn't tell")
        memory = {pid: read_memory(p, detailed=False) for pid, p in processes.items()}
        self.tree.forget(pid for pid, each in memory.items() if each.gone)
        main = memory[self.tree.main.pid]
        row["main_rss_bytes"] = main.rss_bytes
        if main.rss_bytes is None:
            self._note("main_rss_bytes", main.note)
        workers = self._workers(memory)
        if workers is not None:
            row["workers"] = len(workers)
            row["workers_rss_bytes"] = self._sum(workers, "rss_bytes")

    def _read_details(self, now_s: float, row: Row) -> None:
        memory = {pid: read_memory(p) for pid, p in self.tree.processes.items()}
        whole = sum_memory(memory.values(), self.tree.note)
        row["memory_bytes"] = whole.memory_bytes
        self.trace.memory_label = whole.label or self.trace.memory_label
        if whole.partial:
            self._note("memory_bytes", f"partial: {whole.note}")
        main = memory[self.tree.main.pid]
        workers = self._workers(memory)
        for figure in ("pss_bytes", "uss_bytes"):
            row[f"main_{figure}"] = getattr(main, figure)
            if getattr(main, figure) is None:
                self._note(f"main_{figure}", main.note or "not available on this system")
            if workers is not None:
                row[f"workers_{figure}"] = self._sum(workers, figure)
        for pid, each in memory.items():
            if each.memory_bytes is not None:
                self.trace.roles[pid] = self.tree.roles.get(pid, WORKER)
                names = ("pid", "rss_bytes", "pss_bytes", "uss_bytes")
                self.trace.process_rows.append(now_s, {n: getattr(each, n) for n in names})
        for device in self.devices:
            self._read_process_memory(device, row)

    def _read_process_memory(self, device: Device, row: Row) -> None:
        by_driver = device.process_memory_bytes(self.tree.processes)
        by_torch = torch_reserved_bytes(device.index)
        reading = choose_reading([by_driver, by_torch])
        if reading is by_torch and by_torch.value is not None:
            self._note(
                f"gpu{device.index}_process_memory_bytes",
                f"PyTorch's own counter, for this process alone; {by_driver.reason}",
            )
        self._put(row, device, "process_memory_bytes", reading)

    def _read_machine(self, now_s: float, row: Row) -> None:
        busy = machine_cpu_seconds()
        if busy is None:
            self._note("cpu_percent", "the system doesn't tell")
        else:
            elapsed = self._elapsed(now_s, "cpu_percent", busy)
            if elapsed is not None and busy[1] > elapsed[1][1]:
                share = (busy[0] - elapsed[1][0]) / (busy[1] - elapsed[1][1])
                row["cpu_percent"] = 100 * min(1.0, max(0.0, share))
        row["shared_memory_used_bytes"] = shared_memory_used_bytes()
        if row["shared_memory_used_bytes"] is None:
            self._note("shared_memory_used_bytes", "no /dev/shm on this system")
        for kind in PRESSURES:
            column, stall_s = f"pressure_{kind}_percent", pressure_stall_s(kind)
            if stall_s is None:
                self._note(column, "the kernel keeps no pressure figures")
                continue
            elapsed = self._elapsed(now_s, column, stall_s)
            if elapsed is not None:
                row[column] = min(100.0, 100 * (stall_s - elapsed[1]) / elapsed[0])

    def _read_train_step(self, now_s: float, row: Row) -> None:
        busy_s = METER.read_s()
        elapsed = self._elapsed(now_s, "train_step_percent", busy_s, least_s=0.0)
        if elapsed is not None and busy_s > self._idle_s:  # else no such step is in use
            share = (busy_s - elapsed[1]) / elapsed[0]
            row["train_step_percent"] = 100 * min(1.0, max(0.0, share))

    def _rate(
        self,
        now_s: float,
        row: Row,
        column: str,
        counters: Mapping[int, float],
        to_rate: Callable[[float, float], float | None],
    ) -> None:
        """Put the rate of counters by process in the row, once there are two readings."""
        if not counters:
            self._note(column, "no process tells its counters here")
            return
        before = self._elapsed(now_s, column, counters)
        if before is not None and (grown := summed_increase(before[1], counters)) is not None:
            row[column] = to_rate(grown, before[0])

    def _elapsed(
        self, now_s: float, what: str, value: Any, least_s: float = MIN_INTERVAL_S
    ) -> tuple[float, Any] | None:
        """Seconds since the last reading of a counter, and that reading; remembers this one."""
        if what not in self._before:
            self._before[what] = now_s, value
            return None
        then_s, before = self._before[what]
        if now_s - then_s <= least_s:
            return None  # too short for the counters: wait for the next row
        self._before[what] = now_s, value
        return now_s - then_s, before

    def _percent_of_usable(self, used_s: float, elapsed_s: float) -> float | None:
        return cpu_percent_of_usable(used_s, elapsed_s, self.trace.cpus)

    def _workers(self, memory: dict[int, ProcessMemory]) -> list[ProcessMemory] | None:
        """The workers that are alive; None where children can't be or aren't to be listed."""
        if self.tree.note:
            self._note("workers", self.tree.note)
            return None
        if not self.tree.workers:
            return None
        return [m for pid, m in memory.items() if self.tree.roles.get(pid) == WORKER and not m.gone]

    def _sum(self, workers: list[ProcessMemory], figure: str) -> float | None:
        """The sum over all workers; None with a note if one of them couldn't be read."""
        values = [getattr(worker, figure) for worker in workers]
        if None in values:
            note = workers[values.index(None)].note
            self._note(f"workers_{figure}", note or "not available on this system")
            return None
        return sum(values)

    def _note(self, topic: str, reason: str | None) -> None:
        self.trace.notes.setdefault(topic, reason or "not available")


def _per_second(grown: float, elapsed_s: float) -> float:
    return grown / elapsed_s


def torch_reserved_bytes(index: int) -> Reading:
    """Device memory that PyTorch holds in this process, if it is using CUDA already."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return Reading(None, TORCH, "this process hasn't used CUDA")
        return Reading(int(torch.cuda.memory_reserved(index)), TORCH)
    except Exception as error:  # a driver may fail in any way: no value, with the reason
        return Reading(None, TORCH, str(error))
