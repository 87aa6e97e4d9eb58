"""What one run leaves in a history: from a result to a line of the file, and from there to a row."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from dataloading.loader_timing import RATE_PARTS, LoaderTiming
from dataloading.machine import Machine
from dataloading.results import Result, to_plain
from dataloading.settings import LoaderSettings

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1  # of the lines; goes up when an older reader would misread them
OF_SETTINGS = tuple(field.name for field in dataclasses.fields(LoaderSettings))
OF_MACHINE = (
    *("system", "cpu_model", "usable_cpus", "accelerators", "ranks"),
    *("torch_version", "python_version", "platform"),
)
TYPES = {  # of the columns that are not text; nullable where a number is whole
    "samples_per_s": "float64",
    "rate_error": "float64",
    "wait_share": "float64",
    "ratio": "float64",
    "interval_low": "float64",
    "interval_high": "float64",
    "steps": "Int64",
    "samples_per_epoch": "Int64",
    "epochs": "Int64",
    "num_workers": "Int64",
    "batch_size": "Int64",
    "prefetch_factor": "Int64",
    "usable_cpus": "Int64",
    "ranks": "Int64",
}
COLUMNS = (
    *("time_utc", "name", "kind", "samples_per_s", "rate_error", "wait_share", "steps"),
    *("samples_per_epoch", "epochs", "trend", "verdict", "cause", "ratio", "interval_low"),
    *("interval_high", *OF_SETTINGS, *OF_MACHINE, "notes", "remarks", "figures", "run"),
)


def line_of(result: Any, machine: Machine | None) -> dict[str, Any]:
    """The part of a line that the result fills.

    Args:
        result: What was measured.
        machine: Where; None where it is not known.

    Returns:
        Plain values, ready for `json.dumps`.
    """
    timing = timing_of(result)
    settings = settings_of(result, timing)
    rate, error, steps = rate_of(result)
    batch_size = None if timing is None else usual_batch(timing)
    per_epoch = None
    if timing is not None and timing.steps_per_epoch and batch_size:
        per_epoch = timing.steps_per_epoch * batch_size
    judged = result if hasattr(result, "verdict") else getattr(result, "measured", None)
    of_settings = to_plain(settings) if settings is not None else {}
    line = {
        "kind": type(result).__name__,
        "samples_per_s": rate,
        "rate_error": error,
        "wait_share": timing.wait_share if timing is not None else None,
        "steps": steps,
        "samples_per_epoch": per_epoch,
        "verdict": getattr(judged, "verdict", None),
        "cause": getattr(judged, "cause", None),
        "ratio": getattr(judged, "ratio", None),
        "interval": getattr(judged, "interval", None),
        "settings": of_settings | {"batch_size": of_settings.get("batch_size") or batch_size},
        "machine": machine_line(machine),
        "figures": figures_of(timing if timing is not None else result),
        "remarks": remarks_of(result, timing),
    }
    return to_plain(line)


def timing_of(result: Any) -> LoaderTiming | None:
    """The run behind a result: itself, its `timing` or what it `measured`."""
    parts = (result, getattr(result, "timing", None), getattr(result, "measured", None))
    return next((part for part in parts if isinstance(part, LoaderTiming)), None)


def settings_of(result: Any, timing: LoaderTiming | None) -> LoaderSettings | None:
    """The settings that a result speaks of."""
    parts = (result, getattr(result, "settings", None), getattr(timing, "settings", None))
    return next((part for part in parts if isinstance(part, LoaderSettings)), None)


def rate_of(result: Any) -> tuple[float | None, float | None, int | None]:
    """Samples per second, the error of its logarithm within the run, and the steps behind it.

    The rate of a comparison is that of `after`.
    """
    timing = timing_of(result)
    if timing is not None:
        chunks = np.array_split(np.arange(timing.steps), min(RATE_PARTS, timing.steps))
        parts = [timing.samples[c].sum() / max(timing.total_s[c].sum(), 1e-9) for c in chunks]
        return _positive(timing.samples_per_s), _log_error(parts), timing.steps
    pairs: Any = getattr(result, "pairs", None)
    if hasattr(pairs, "columns") and "after_samples_per_s" in pairs.columns and len(pairs):
        rates = pairs["after_samples_per_s"].to_numpy(dtype=float)
        steps = int(pairs["after_steps"].sum()) if "after_steps" in pairs.columns else None
        return _positive(float(np.exp(np.log(rates).mean()))), _log_error(rates), steps
    measured = getattr(result, "measured", None)
    if measured is not None and (known := rate_of(measured))[0] is not None:
        return known
    return _positive(getattr(result, "samples_per_s", None)), None, None


def _positive(rate: Any) -> float | None:
    known = isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    return float(rate) if known else None


def _log_error(rates: Iterable[float]) -> float | None:
    """Standard error of the mean log rate over parts of a run; None where they do not tell."""
    parts = np.array(list(rates), dtype=float)
    if len(parts) < 2 or not (np.isfinite(parts).all() and (parts > 0).all()):
        return None
    return float(np.log(parts).std(ddof=1) / math.sqrt(len(parts)))


def usual_batch(timing: LoaderTiming) -> int | None:
    """Samples in a batch, where nearly all batches have as many."""
    if timing.settings is not None and timing.settings.batch_size is not None:
        return timing.settings.batch_size
    sizes, counts = np.unique(timing.samples, return_counts=True)
    return int(sizes[counts.argmax()]) if counts.max() >= 0.9 * timing.steps else None


def figures_of(result: Any) -> dict[str, Any]:
    """The single numbers of a result; arrays and tables would make a history of megabytes."""
    if not dataclasses.is_dataclass(result):
        return {}
    names = [*(f.name for f in dataclasses.fields(result)), *getattr(result, "derived", ())]
    values = {name: to_plain(getattr(result, name)) for name in names if _is_number(result, name)}
    return {name: value for name, value in values.items() if value is not None}


def _is_number(result: Any, name: str) -> bool:
    return isinstance(getattr(result, name), int | float | np.number | np.bool_)


def remarks_of(result: Any, timing: LoaderTiming | None) -> list[str]:
    """What a result itself says about its figures."""
    notes = [*getattr(result, "notes", ())] if isinstance(result, Result) else []
    if timing is not None and timing is not result:
        notes += timing.notes
    if timing is not None and timing.failure is not None:
        notes.append(f"cut short: {timing.failure.message}")
    return [str(note) for note in notes]


def machine_line(machine: Machine | None) -> dict[str, Any]:
    """What of a machine decides about speed; no name of it, and nothing of its user."""
    if machine is None:
        return {}
    here = machine.platform == platform.platform()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    return {
        "system": machine.platform.split("-")[0],
        "cpu_model": cpu_model() if here else None,
        "usable_cpus": machine.usable_cpus,
        "accelerators": [accelerator.name for accelerator in machine.accelerators],
        "ranks": ranks or machine.local_ranks,
        "torch_version": machine.torch_version,
        "python_version": machine.python_version,
        "platform": machine.platform,
    }


def cpu_model() -> str:
    """The CPU as its maker calls it, or else its architecture.

    Machines of one kind with the same number of CPUs, as a cloud lends them, differ in this.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not on Linux
        text = ""
    models = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return models[0].strip() if models else platform.processor() or platform.machine()


def row_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table from one line of version 1.

    Raises:
        KeyError, TypeError, ValueError: The line is not what `line_of` makes.
    """
    settings, machine = line.get("settings") or {}, line.get("machine") or {}
    low, high = line.get("interval") or (None, None)
    time = datetime.fromisoformat(line["time"])
    flat: dict[str, Any] = {
        **{name: line.get(name) for name in COLUMNS},
        **{name: settings.get(name) for name in OF_SETTINGS},
        **{name: machine.get(name) for name in OF_MACHINE},
        "time_utc": time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC),
        "interval_low": low,
        "interval_high": high,
        "accelerators": _joined(machine.get("accelerators")),
        "run": _text(line["run"]),
        "name": None if line.get("name") is None else _text(line["name"]),
        "kind": _text(line["kind"]),
    }
    for name, kind in TYPES.items():
        flat[name] = _number(flat[name], whole=kind == "Int64")
    if flat["samples_per_s"] is not None and flat["samples_per_s"] <= 0:
        raise ValueError("a rate must be above 0")
    return flat


def _number(value: Any, *, whole: bool) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{value!r} is not a number")
    return value if whole else float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _joined(names: Any) -> str | None:
    return None if names is None else ", ".join(map(str, names)) or "none"


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a DataFrame, one a run, in order of time."""
    import pandas as pd

    ordered = sorted(rows, key=lambda row: row["time_utc"])
    frame = pd.DataFrame(ordered, columns=list(COLUMNS), dtype=object)
    frame["time_utc"] = pd.to_datetime(frame["time_utc"], utc=True)
    return frame.astype(TYPES)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table that `table_of` made, in order of time; what is missing is None."""
    import pandas as pd

    def plain(value: Any) -> Any:
        is_missing = (
            value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value)
        )
        return None if is_missing else value

    rows = [{str(k): plain(v) for k, v in row.items()} for row in frame.to_dict(orient="records")]
    return sorted(rows, key=lambda row: row["time_utc"])
