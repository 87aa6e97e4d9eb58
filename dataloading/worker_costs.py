"""What a batch costs inside the workers: the layout of their records, and what the records tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.results import Result, format_seconds, format_share

if TYPE_CHECKING:
    import pandas as pd

RECORD = np.dtype(
    [
        ("fetch_wall_ns", "i8"),
        ("fetch_cpu_ns", "i8"),
        ("collate_wall_ns", "i8"),
        ("collate_cpu_ns", "i8"),
        ("samples", "i8"),
        ("ended_ns", "i8"),
        # running totals of the worker: the difference of two records is what happened in between
        ("worker", "i8"),
        ("process_cpu_ns", "i8"),
        ("run_delay_ns", "i8"),
        ("switches", "i8"),
        ("forced_switches", "i8"),
        ("major_faults", "i8"),
        ("read_calls_bytes", "i8"),
        ("storage_bytes", "i8"),
        ("threads", "i8"),
        ("opens", "i8"),
        ("open_cost_ns", "i8"),  # of one, at that moment: no total
    ]
)
UNKNOWN = -1  # stands in a record where the system does not tell
FEWEST_FOR_TAIL = 30  # records below which a 99th percentile says nothing
TOTALS = (
    *("process_cpu_ns", "run_delay_ns", "read_calls_bytes", "storage_bytes", "opens"),
    *("switches", "forced_switches", "major_faults"),
    *("wall_ns", "cpu_ns", "samples"),
)


@dataclass(frozen=True, repr=False, eq=False)
class WorkerCosts(Result):
    """What one batch costs in the process that prepares it (medians over batches).

    Attributes:
        batches: How many batches were seen.
        fetch_s, fetch_cpu_s: Wall and CPU seconds for getting the samples of one batch.
        collate_s, collate_cpu_s: The same for putting them together.
        samples: Samples per batch.
        mean_batch_s: Mean wall seconds of a batch in the second half of each worker's batches, which
            rare long ones raise above the median.
        slow_batch_factor: 99th percentile of the batches over their median; None with few batches.
        run_delay_share: Share of the batch time spent waiting for a CPU; None where unknown.
        extra_cpu_share: CPU time of the process's other threads, as a share of the batch time.
        threads: Threads in the process.
        read_bytes_per_sample: Bytes read, from the page cache too.
        storage_share: Share of them that came from storage, in the second half of the run.
        first_storage_share: The same in the first quarter.
        opens_per_sample, open_share: Files opened for a sample, and the share of its time that
            opening them takes; None where there are no workers to count in.
        switches_per_sample, forced_switches_per_sample: Times that a sample gave the CPU up to wait,
            and that the CPU was taken from it.
        major_faults_per_sample: Page faults that had to read from storage.
        stages: What each stage costs inside the workers, as `SampleProfile.stages`; None where too
            few samples were timed in detail.
    """

    batches: int
    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    collate_cpu_s: float
    samples: float
    mean_batch_s: float | None = None
    slow_batch_factor: float | None = None
    run_delay_share: float | None = None
    extra_cpu_share: float | None = None
    threads: int | None = None
    read_bytes_per_sample: float | None = None
    storage_share: float | None = None
    first_storage_share: float | None = None
    opens_per_sample: float | None = None
    open_share: float | None = None
    switches_per_sample: float | None = None
    forced_switches_per_sample: float | None = None
    major_faults_per_sample: float | None = None
    stages: pd.DataFrame | None = None

    @classmethod
    def from_records(cls, records: np.ndarray) -> WorkerCosts | None:
        """Summarise records; None when there are none."""
        if len(records) == 0:
            return None

        def median(name: str) -> float:
            return float(np.median(records[name]))

        return cls(
            batches=len(records),
            fetch_s=median("fetch_wall_ns") / 1e9,
            fetch_cpu_s=median("fetch_cpu_ns") / 1e9,
            collate_s=median("collate_wall_ns") / 1e9,
            collate_cpu_s=median("collate_cpu_ns") / 1e9,
            samples=median("samples"),
            **extra_costs(records),
        )

    @property
    def batch_s(self) -> float:
        """Wall seconds that one batch takes in one worker."""
        return self.fetch_s + self.collate_s

    @property
    def cpu_share(self) -> float:
        """Share of that time in which the CPU worked; the rest was waiting."""
        return (self.fetch_cpu_s + self.collate_cpu_s) / self.batch_s if self.batch_s else 1.0

    def summary(self) -> str:
        """One line."""
        return (
            f"{format_seconds(self.fetch_s)} to fetch and {format_seconds(self.collate_s)} to "
            f"collate a batch of {self.samples:.0f}, CPU busy {format_share(self.cpu_share)} of it"
        )


def extra_costs(records: np.ndarray) -> dict[str, Any]:
    """What the running totals of the records tell about tails, threads, CPUs and storage."""
    wall = records["fetch_wall_ns"] + records["collate_wall_ns"]
    found: dict[str, Any] = {}
    if len(records) >= FEWEST_FOR_TAIL and np.median(wall) > 0:
        found["slow_batch_factor"] = float(np.percentile(wall, 99) / np.median(wall))
    later_ns = [own[len(own) // 2 :] for own in _by_worker(records, wall)]
    found["mean_batch_s"] = float(np.concatenate(later_ns).mean()) / 1e9
    known = records["threads"][records["threads"] > 0]
    found["threads"] = int(np.median(known)) if len(known) else None
    changes = [_changes(records[records["worker"] == w]) for w in np.unique(records["worker"])]
    total = {name: _sum(changes, name) for name in TOTALS}
    later = {name: _sum(changes, name, part=(0.5, 1.0)) for name in TOTALS}
    first = {name: _sum(changes, name, part=(0.0, 0.25)) for name in TOTALS}
    measured_ns, samples = total["wall_ns"], total["samples"]
    if measured_ns:
        found["run_delay_share"] = _ratio(total["run_delay_ns"], measured_ns)
        if total["process_cpu_ns"] is not None and total["cpu_ns"] is not None:
            extra_ns = max(0.0, total["process_cpu_ns"] - total["cpu_ns"])
            found["extra_cpu_share"] = _ratio(extra_ns, measured_ns)
        found["open_share"] = _open_share(records, total["opens"], measured_ns)
    if samples:
        found["read_bytes_per_sample"] = _ratio(total["read_calls_bytes"], samples)
        found["opens_per_sample"] = _ratio(total["opens"], samples)
        for name in ("switches", "forced_switches", "major_faults"):
            found[f"{name}_per_sample"] = _ratio(total[name], samples)
    found["storage_share"] = _storage_share(later)
    found["first_storage_share"] = _storage_share(first)
    return found


def _by_worker(records: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    return [values[records["worker"] == worker] for worker in np.unique(records["worker"])]


def _changes(own: np.ndarray) -> dict[str, np.ndarray]:
    """From record to record of one worker, what was added to each total."""
    parts: dict[str, np.ndarray] = {
        "wall_ns": (own["fetch_wall_ns"] + own["collate_wall_ns"])[1:],
        "cpu_ns": (own["fetch_cpu_ns"] + own["collate_cpu_ns"])[1:],
        "samples": own["samples"][1:],
    }
    for name in TOTALS:
        if name not in parts:
            known = (own[name][1:] != UNKNOWN) & (own[name][:-1] != UNKNOWN)
            step = np.diff(own[name]).astype(float)
            # a worker that started anew counts from zero again
            parts[name] = np.where(known & (step >= 0), step, np.nan)
    return parts


def _sum(
    changes: list[dict[str, np.ndarray]], name: str, part: tuple[float, float] = (0.0, 1.0)
) -> float | None:
    """One total over all workers and a part of the run; None where it is not known."""
    values = [c[name][int(part[0] * len(c[name])) : int(part[1] * len(c[name]))] for c in changes]
    joined = np.concatenate(values) if values else np.array([])
    known = joined[~np.isnan(joined.astype(float))]
    return float(known.sum()) if len(known) else None


def _open_share(records: np.ndarray, opens: float | None, measured_ns: float) -> float | None:
    """Share of the time that opening files takes: their number times what one costs."""
    known = records["open_cost_ns"][records["open_cost_ns"] > 0]
    if opens is None or (opens > 0 and len(known) == 0):
        return None
    cost_ns = float(known[-1]) if len(known) else 0.0  # the latest knows most
    return min(1.0, opens * cost_ns / measured_ns)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _storage_share(total: dict[str, float | None]) -> float | None:
    """Share of the bytes read that came from storage; pages of mapped files come without a call."""
    stored, read = total["storage_bytes"], total["read_calls_bytes"]
    return _ratio(stored, None if read is None else max(read, stored or 0.0))
