"""What the monitor saw: a table that grows while it watches and answers questions afterwards."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.patterns import Pattern, Trend, classify_pattern, classify_trend
from dataloading.results import format_seconds, format_value, html_table, to_plain

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# Columns of the frame in their order; those of a device start with its number, as in gpu0_power_w.
DEVICE_COLUMNS = {
    "utilization": "percent of the time in which any kernel was running",
    "memory_bytes": "device memory in use, by all processes",
    "process_memory_bytes": "device memory held by this process and its workers",
    "power_w": "power drawn",
    "sm_clock_mhz": "clock of the multiprocessors",
}
COLUMNS = {
    "train_step_percent": "busy time of the (real or simulated) train step; of steps made here only",
    "cpu_percent_of_usable": "CPU use of this process and its children, of the CPUs it may use",
    "cpu_percent": "CPU use of the whole machine, by everyone",
    "workers": "worker processes alive",
    "memory_bytes": "memory of this process and its children (see `memory_label`)",
    "main_rss_bytes": "resident memory of this process",
    "main_pss_bytes": "its proportional share, pages shared with workers divided",
    "main_uss_bytes": "what it alone holds",
    "workers_rss_bytes": "resident memory of the workers, shared pages counted once per worker",
    "workers_pss_bytes": "proportional share of the workers",
    "workers_uss_bytes": "what the workers alone hold: the cost of having them",
    "shared_memory_used_bytes": "in use in /dev/shm, by everyone",
    "open_files": "file descriptors of this process",
    "disk_read_bytes_per_s": "read from storage by this process and its children",
    "pressure_cpu_percent": "share of time in which some task of the machine waited for a CPU",
    "pressure_io_percent": "the same for storage",
    "pressure_memory_percent": "the same for memory",
}
PERCENT_ENDINGS = ("_utilization", "_percent", "_percent_of_usable")
SUMMARY_STATISTICS = ("mean", "median", "min", "max", "p95", "readings")


class Columns:
    """A growing table of numbers: 8 bytes a cell, NaN where a column wasn't read.

    One thread may append while another reads: the time of a row is written last.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.cells: dict[str, array[float]] = {}

    def append(self, time_s: float, row: dict[str, Any]) -> None:
        """Add a row; a new name makes a new column."""
        rows = len(self.times)
        for name in row.keys() - self.cells.keys():
            self.cells[name] = array("d", [np.nan]) * rows
        for name, column in self.cells.items():
            value = row.get(name)
            column.append(np.nan if value is None else value)
        self.times.append(time_s)

    def frame(self) -> DataFrame:
        """The complete rows as a DataFrame, indexed by `time_s`."""
        import pandas as pd

        rows = len(self.times)
        index = pd.Index(np.array(self.times[:rows]), name="time_s", dtype=float)
        data = {name: np.array(cells[:rows]) for name, cells in list(self.cells.items())}
        return pd.DataFrame(data, index=index, dtype=float)


class ResourceTrace:
    """Resources over time; grows inside the `with` block and is complete after it.

    A cell is NaN where its column was not read at that moment: rates need two readings, and PSS
    and USS are read about once a second, since each takes milliseconds. A column that could not
    be read at all is absent. Either way the reason stands in `notes`, and nothing is ever 0
    because it was not measured. An hour at the default interval takes about 3 MB.

    Attributes:
        interval_s: seconds between two rows.
        cpus: CPUs that this process may use (100 % of `cpu_percent_of_usable`).
        notes: column or topic -> why it is missing or incomplete.
        gpu_source: "nvml sample buffer", "nvml", or None without GPU numbers.
        memory_label: what `memory_bytes` sums: "pss", "uss", "resident" or a mixture.
        complete: True once the monitor has stopped.
    """

    def __init__(self, interval_s: float, cpus: int) -> None:
        self.interval_s = interval_s
        self.cpus = cpus
        self.notes: dict[str, str] = {}
        self.gpu_source: str | None = None
        self.memory_label: str | None = None
        self.complete = False
        self.rows = Columns()  # what the sampler fills
        self.process_rows = Columns()
        self.roles: dict[int, str] = {}
        self.gpu_rows: dict[int, Columns] = {}

    @property
    def frame(self) -> DataFrame:
        """One row a reading, indexed by `time_s` (seconds since the start); see `COLUMNS`."""
        frame = self.rows.frame()
        names = sorted(self.rows.cells.keys() & set(frame.columns), key=_column_order)
        return frame[names]

    @property
    def processes(self) -> DataFrame:
        """Memory by process: time_s, pid, role ("main", "worker", "helper"), rss/pss/uss_bytes."""
        frame = self.process_rows.frame().reset_index()
        names = ["time_s", "pid", "role", "rss_bytes", "pss_bytes", "uss_bytes"]
        frame = frame.reindex(columns=[name for name in names if name != "role"])
        frame["pid"] = frame["pid"].astype(int)
        frame.insert(2, "role", [self.roles.get(pid, "helper") for pid in frame["pid"]])
        return frame

    @property
    def gpu_samples(self) -> DataFrame:
        """The driver's own utilisation samples, where it keeps them: time_s, gpu, utilization."""
        import pandas as pd

        frames = [rows.frame().assign(gpu=gpu) for gpu, rows in list(self.gpu_rows.items())]
        names = ["time_s", "gpu", "utilization"]
        if not frames:
            return pd.DataFrame({name: pd.Series(dtype=float) for name in names})
        return pd.concat(frames).reset_index().reindex(columns=names)

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the last reading."""
        return self.rows.times[-1] if len(self.rows.times) else 0.0

    def series(self, column: str, *, after_s: float = 0.0) -> Series:
        """The readings of one column without gaps; of a GPU's utilisation the finest there are.

        Args:
            column: a column of `frame`.
            after_s: leave out what is older than this, such as the start of workers.

        Raises:
            KeyError: if the column was not read, with the reason.
        """
        series = self._finest_utilization(column)
        if series is None:
            frame = self.frame
            if column not in frame.columns:
                reason = self.why_missing(column)
                raise KeyError(f"{column!r} was not read: {reason}; columns: {list(frame.columns)}")
            series = frame[column].dropna()
        return series[series.index >= after_s]

    def why_missing(self, column: str) -> str:
        """The note on a column, or on the topic it belongs to."""
        topic = "gpu" if column.startswith("gpu") else column
        return self.notes.get(column) or self.notes.get(topic) or "no such column here"

    def summary(self) -> DataFrame:
        """One row a column: mean, median, min, max, p95 and the number of readings."""
        import pandas as pd

        frame = self.frame
        table = pd.DataFrame(
            {
                "mean": frame.mean(),
                "median": frame.median(),
                "min": frame.min(),
                "max": frame.max(),
                "p95": frame.quantile(0.95),
                "readings": frame.count(),
            },
            columns=list(SUMMARY_STATISTICS),
        )
        table.index.name = "column"
        return table

    def pattern(self, column: str = "gpu0_utilization", *, after_s: float = 0.0) -> Pattern:
        """Shape of a busy curve: steady, sawtooth, starved, idle or unknown.

        Args:
            column: a column in percent.
            after_s: leave out what is older than this.

        Returns:
            The `Pattern`; `unknown` with the reason if the column was not read.

        Raises:
            ValueError: if the column isn't in percent, so that "busy" means nothing.
        """
        if not column.endswith(PERCENT_ENDINGS):
            raise ValueError(f"{column!r} is not in percent; a pattern needs a busy curve")
        try:
            series = self.series(column, after_s=after_s)
        except KeyError:
            return Pattern("unknown", None, {"reason": self.why_missing(column)})
        times_s = series.index.to_numpy(dtype=float)
        return classify_pattern(
            series.to_numpy(dtype=float), self._spacing_s(times_s), times_s=times_s
        )

    def trend(self, column: str = "memory_bytes", *, after_s: float = 0.0) -> Trend:
        """Whether a level grows: growing, flat, shrinking or unknown, with its slope.

        Args:
            column: a column of `frame`.
            after_s: leave out what is older than this, such as the start of workers.

        Returns:
            The `Trend`; `unknown` with the reason if the column was not read.
        """
        try:
            series = self.series(column, after_s=after_s)
        except KeyError:
            return Trend("unknown", None, None, 0, {"reason": self.why_missing(column)})
        return classify_trend(series.index.to_numpy(dtype=float), series.to_numpy(dtype=float))

    def plot(self, ax: Any = None) -> Any:
        """Draw the curves; returns the Axes."""
        from dataloading.plots import plot_resources

        return plot_resources(self, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain lists, dicts, numbers and strings, ready for `json.dumps`."""
        names = ("interval_s", "duration_s", "cpus", "gpu_source", "memory_label", "complete")
        return {
            **{name: to_plain(getattr(self, name)) for name in names},
            "notes": dict(self.notes),
            "frame": to_plain(self.frame),
            "processes": to_plain(self.processes.set_index("time_s")),
        }

    def __repr__(self) -> str:
        table = self.summary().astype(float)
        parts = [f"{format_seconds(self.duration_s)}, {len(self.rows.times)} readings"]
        for column in map(str, table.index):
            if column.startswith("gpu") and column.endswith("_utilization"):
                mean = table["mean"][column]
                parts.append(f"{column[:-12].upper()} {mean:.0f} % ({self.gpu_source})")
        if "cpu_percent_of_usable" in table.index:
            mean = table["mean"]["cpu_percent_of_usable"]
            parts.append(f"CPU {mean:.0f} % of {self.cpus}")
        if "memory_bytes" in table.index:
            most = format_value("memory_bytes", table["max"]["memory_bytes"])
            parts.append(f"memory up to {most} ({self.memory_label})")
        if "workers" in table.index:
            parts.append(f"up to {table['max']['workers']:.0f} workers")
        return "ResourceTrace: " + ", ".join(parts)

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Any]] = []
        for column, line in self.summary().iterrows():
            name = str(column)
            median, most = (format_value(name, float(line[key])) for key in ("median", "max"))
            rows.append((name, f"median {median}, highest {most}"))
        rows += [(f"note on {topic}", note) for topic, note in self.notes.items()]
        return html_table(rows, caption=repr(self))

    def _finest_utilization(self, column: str) -> Series | None:
        """The driver's samples of a GPU if they are denser than the rows of the frame."""
        gpu = column.removeprefix("gpu").removesuffix("_utilization")
        if not (column.startswith("gpu") and column.endswith("_utilization") and gpu.isdecimal()):
            return None
        samples = self.gpu_rows.get(int(gpu))
        if samples is None or len(samples.times) < len(self.rows.times):
            return None
        return samples.frame()["utilization"].rename(column)

    def _spacing_s(self, times_s: Any) -> float:
        """Usual distance of two readings."""
        return float(np.median(np.diff(times_s))) if len(times_s) > 1 else self.interval_s


def _column_order(column: str) -> tuple[int, int, str]:
    """Devices by number first, then the columns in the order of `COLUMNS`."""
    device, _, quantity = column.partition("_")
    if device.startswith("gpu"):
        names = list(DEVICE_COLUMNS)
        return int(device[3:]), names.index(quantity) if quantity in names else 99, column
    names = list(COLUMNS)
    return 10_000, names.index(column) if column in names else 99, column
