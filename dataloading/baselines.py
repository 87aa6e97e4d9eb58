"""Which earlier runs a run is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataloading.results import format_count, format_value
from dataloading.run_lines import OF_SETTINGS

BASELINE_RUNS = 10  # the latest; enough for a spread, and few enough to follow intended changes
FEWEST_STEPS = 3  # a run of fewer steady steps shows its start-up
ENOUGH_FOR_OUTLIERS = 8  # runs; with fewer, leaving out the farthest makes the spread too small
FAR = 8.0  # robust standard deviations; of eight equal runs, one is so far out in 1 of 90 cases
LEAST_MISHAP = 0.1  # log ratio
NORMAL_MAD = 1.4826  # from median absolute deviation to standard deviation
MUST_MATCH = {  # column -> in words
    "kind": "kind of result",
    "batch_size": "batch size",
    "system": "operating system",
    "cpu_model": "CPU",
    "usable_cpus": "usable CPUs",
    "accelerators": "accelerators",
    "ranks": "ranks",
    "torch_version": "torch",
}
ARE_TOLD = (*(name for name in OF_SETTINGS if name not in MUST_MATCH), "python_version")

Row = Mapping[str, Any]


def usual_baseline(series: Sequence[Row]) -> list[Row]:
    """The latest runs, without those that were called slower, and without mishaps.

    A slow one with usual runs before and after it stays, since it is part of the spread, without
    which equal runs would be called slower too often; unless it is a mishap, far from all others.
    """
    slow = [False, *(row["trend"] == "slower" for row in series), True]
    kept = [
        row
        for i, row in enumerate(series, start=1)
        if not slow[i] or not (slow[i - 1] or slow[i + 1])
    ]
    return _without_mishaps(kept[-BASELINE_RUNS:])


def _without_mishaps(rows: list[Row]) -> list[Row]:
    """Leave out runs far from all others: they would hide every regression for ten runs."""
    if len(rows) < ENOUGH_FOR_OUTLIERS:
        return rows
    logs = np.log([row["samples_per_s"] for row in rows])
    away = np.abs(logs - np.median(logs))
    limit = max(FAR * NORMAL_MAD * float(np.median(away)), LEAST_MISHAP)
    return [row for row, far in zip(rows, away > limit, strict=True) if not far]


def has_rate(row: Row) -> bool:
    """Whether a row has a rate over enough steps."""
    enough = row["steps"] is None or row["steps"] >= FEWEST_STEPS
    return row["samples_per_s"] is not None and enough


def why_no_rate(row: Row) -> str:
    """Why the latest run cannot be compared with any."""
    if row["samples_per_s"] is None:
        return "the run has no rate in samples/s"
    return f"the run has {format_count(row['steps'], 'steady step')}, {FEWEST_STEPS} are needed"


def comparable(row: Row, latest: Row) -> bool:
    """Whether the rates of two runs may be compared: same kind, batch size, machine and versions."""
    return has_rate(row) and all(row[name] == latest[name] for name in MUST_MATCH)


def difference(row: Row, latest: Row) -> str:
    """Why a row cannot be compared with the latest."""
    if not has_rate(row):
        return f"no rate in samples/s over {FEWEST_STEPS} steady steps"
    found = [
        f"{words} {format_value('', latest[name])}, before {format_value('', row[name])}"
        for name, words in MUST_MATCH.items()
        if row[name] != latest[name]
    ]
    return "; ".join(found)


def left_out(wanted: Sequence[Row], latest: Row) -> list[str]:
    """How many rows cannot be compared, and why the last of them; no note where all can."""
    unfit = [row for row in wanted if not comparable(row, latest)]
    if not unfit:
        return []
    return [f"{format_count(len(unfit), 'run')} left out, such as: {difference(unfit[-1], latest)}"]


def changes(row: Row, latest: Row) -> list[str]:
    """What changed since the baseline and does not stand in the way of comparing."""
    notes = [
        f"{name} is {format_value('', latest[name])}, in the baseline {format_value('', row[name])}"
        for name in ARE_TOLD
        if row[name] != latest[name]
    ]
    length, before = latest["samples_per_epoch"], row["samples_per_epoch"]
    if length and before and length != before:
        notes.append(
            f"an epoch has {length:,} samples, in the baseline {before:,}; the rates are per second, "
            "so that alone is no regression"
        )
    return notes
