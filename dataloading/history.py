"""A history of runs: one JSON line each, and an alarm when a run is slower than the ones before."""

from __future__ import annotations

import uuid
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dataloading.json_lines import append_line, checked_path, named_lines, read_lines
from dataloading.machine import Machine, inspect_machine
from dataloading.regression import RunTrend, judge_run, picked_rows
from dataloading.results import Result, format_value
from dataloading.run_lines import VERSION, line_of, row_of, table_of, timing_of

if TYPE_CHECKING:
    import pandas as pd

BEGINS = b'{"version"'  # each line; so a history is known even if its only line was cut off


@dataclass(frozen=True, repr=False, eq=False)
class RunRecord(Result):
    """One run as it was written into a history, and how it compares with earlier ones.

    Attributes:
        path: The file.
        line: What was written.
        trend: The comparison with earlier runs of the same name on the same kind of machine.
        notes: What could not be read in the file.
    """

    path: Path
    line: dict[str, Any]
    trend: RunTrend
    notes: tuple[str, ...] = ()

    derived: ClassVar[tuple[str, ...]] = ("is_regression", "is_drifting")

    @property
    def is_regression(self) -> bool:
        """Whether this run is slower than its baseline: `sys.exit(run.is_regression)` in CI."""
        return self.trend.is_regression

    @property
    def is_drifting(self) -> bool:
        """Whether the rate has been falling slowly from run to run."""
        return self.trend.is_drifting

    def summary(self) -> str:
        """Name, rate, and the comparison."""
        rate = self.line["samples_per_s"]
        told = "" if rate is None else f"{format_value('samples_per_s', rate)}, "
        return f"{self.line['name'] or self.line['kind']}: {told}{self.trend.summary()}"

    def rows(self) -> list[tuple[str, Any]]:
        """What was written, the comparison, and the notes."""
        shown = ("name", "kind", "time", "samples_per_s", "wait_share", "steps")
        return [
            *((name, self.line[name]) for name in shown),
            ("compared with earlier runs", self.trend.summary()),
            *(("note", note) for note in (*self.trend.notes, *self.notes)),
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw this run among the earlier ones; returns the Axes."""
        return self.trend.plot(ax=ax)


def record_run(
    result: Any,
    path: Any,
    *,
    name: str | None = None,
    notes: str | None = None,
    machine: Machine | None = None,
    baseline: int | str | pd.DataFrame | None = None,
) -> RunRecord:
    """Append a result to a history, and compare it with the earlier runs of the same name.

    Lines are only ever appended, in one write each, so that several processes may share a file and
    a crash loses one line at most. Written are the figures, the settings and what of the machine
    decides about speed (system, CPU, accelerators, versions); arrays, names of machines, users and
    files are not.

    Args:
        result: What `measure_dataloader`, `compare_dataloaders`, `diagnose_dataloader` or another
            function returned, or a watched loader. A watched loader may be recorded again when it
            got further; `read_runs` shows its latest line.
        path: The file, such as "runs.jsonl"; it is made if it does not exist, its folder is not.
        name: What was run; only runs of one name are compared.
        notes: What you will want to know later, such as a commit.
        machine: Where it ran; None means where the result says so, or else here.
        baseline: What to compare with, as in `find_regression`.

    Returns:
        A `RunRecord`; `.is_regression` says whether the run is slower than its baseline.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: The file exists and is no history, or `baseline` names no run.
        OSError: The file cannot be read or written.

    Example:
        In CI, a red build when loading got slower:

        >>> run = record_run(measure_dataloader(loader), "runs.jsonl", name="train")
        ... # doctest: +SKIP
        >>> sys.exit(run.is_regression)  # doctest: +SKIP

    Explained in: notebook 09
    """
    file = checked_path(path)
    _check_result(result)
    for what, text in (("name", name), ("notes", notes)):
        _check_text(what, text)
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"Expected a Machine from inspect_machine, got {type(machine).__name__}.")
    if machine is None:
        machine = getattr(result, "machine", None)
    if not isinstance(machine, Machine):
        machine = inspect_machine()
    run = None if isinstance(result, Result) else getattr(result, "run_id", None)
    return _append(file, line_of(result, machine), name, notes, run=run, baseline=baseline)


def read_runs(path: Any) -> pd.DataFrame:
    """Read a history as a table.

    Lines that cannot be read, or that a newer version wrote, are left out with a warning, which
    `runs.attrs["notes"]` holds too; they stay in the file.

    Args:
        path: The file that `record_run` or `watch_dataloader(history=...)` wrote.

    Returns:
        DataFrame with a row a run, in order of time. The columns: `time_utc, name, kind`; the rate
        `samples_per_s` with its relative standard error within the run, `rate_error`;
        `wait_share, steps, samples_per_epoch, epochs`; `trend`, the verdict against earlier runs
        when it was recorded; `verdict, cause, ratio, interval_low, interval_high` where the result
        has them; the loader's settings; the machine (`system, cpu_model, usable_cpus, accelerators,
        ranks, torch_version, python_version, platform`); `notes` (yours), `remarks` (of the
        result), `figures` (a dict of its other numbers), `run` (an id).

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: There is no such file.
        ValueError: It is no history.

    Explained in: notebook 09
    """
    file = checked_path(path)
    if not file.exists():
        raise FileNotFoundError(f"There is no history {file}; record_run(result, path) makes one.")
    rows, notes = _read_rows(file)
    for note in notes:
        warnings.warn(f"{file}: {note}", stacklevel=2)
    frame = table_of(rows)
    frame.attrs["notes"] = notes
    return frame


class OngoingRun:
    """A run that is recorded again whenever it got further, as after each epoch of training.

    It is compared with the earlier runs as they were after as many epochs: the first epoch is often
    slower, which is no regression.

    Args:
        path: The file.
        name: What is run.
    """

    def __init__(self, path: Any, name: str | None = None) -> None:
        self.path = checked_path(path)
        if self.path.exists():
            _read_rows(self.path)  # refuse a wrong file now, and not after the first epoch
        _check_text("name", name)
        self.name = name
        self.run_id = uuid.uuid4().hex
        self._machine: Machine | None = None

    def record(self, watched: Any, epochs: int) -> RunRecord:
        """Append a line about the run so far.

        Args:
            watched: The watched loader.
            epochs: How many it has gone through.

        Returns:
            A `RunRecord`.
        """
        if self._machine is None:
            self._machine = inspect_machine()
        line = line_of(watched, self._machine) | {"epochs": epochs}
        return _append(self.path, line, self.name, None, run=self.run_id)


def _append(
    file: Path,
    facts: dict[str, Any],
    name: str | None,
    notes: str | None,
    *,
    run: str | None = None,
    baseline: Any = None,
) -> RunRecord:
    line = {
        "version": VERSION,
        "run": run or uuid.uuid4().hex,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "name": name,
        "notes": notes,
        **facts,
    }
    rows, unread = _read_rows(file, line.get("epochs")) if file.exists() else ([], [])
    rows = [row for row in rows if row["run"] != line["run"]]
    frame = table_of(rows) if baseline is not None else None
    picked = picked_rows(frame, baseline) if frame is not None else None
    earlier = sorted(rows, key=lambda row: row["time_utc"])
    trend = judge_run(row_of(line), earlier, picked)
    line["trend"] = trend.verdict
    append_line(file, line)
    return RunRecord(file, line, trend, tuple(unread))


def _read_rows(file: Path, epochs: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The latest line of each run (of a watched one, with at most `epochs`), as rows; and notes."""
    lines, notes = read_lines(file)
    rows: dict[str, dict[str, Any]] = {}
    newer, wrong = [], []
    for number, line in lines:
        version = line.get("version")
        if isinstance(version, int) and version > VERSION:
            newer.append(number)
            continue
        if version != VERSION:
            wrong.append(number)
            continue
        try:
            row = row_of(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            wrong.append(number)
            continue
        if epochs is None or row["epochs"] is None or row["epochs"] <= epochs:
            rows[row["run"]] = row
    if newer:
        notes.append(
            f"{named_lines(newer)} of a newer version: kept in the file, not read; update this "
            "package to see them"
        )
    if wrong:
        notes.append(f"{named_lines(wrong)} without a readable run: skipped")
    if not rows and not newer:
        _check_history(file)
    return list(rows.values()), notes


def _check_history(file: Path) -> None:
    """Refuse to append to somebody's notes, code or data.

    Raises:
        ValueError: The file has content and is no history.
    """
    with file.open("rb") as stream:
        begin = stream.read(4096).lstrip()
    if begin and not begin.startswith((BEGINS, BEGINS[: len(begin)])):
        raise ValueError(f"{file} is no history: none of its lines is a run. Name another file.")


def _check_result(result: Any) -> None:
    if isinstance(result, type) or not (isinstance(result, Result) or timing_of(result)):
        raise TypeError(
            f"Expected a result, such as measure_dataloader(loader) returns, got a "
            f"{type(result).__name__}."
        )


def _check_text(what: str, text: Any) -> None:
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{what}={text!r} must be text, not {type(text).__name__}.")
    if text == "":
        raise ValueError(f"{what} is empty; leave it out or say something.")
