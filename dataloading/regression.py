"""Whether a run is slower than earlier ones, with their spread taken into account."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.arguments import check_amount
from dataloading.baselines import (
    Row,
    changes,
    comparable,
    difference,
    has_rate,
    left_out,
    usual_baseline,
    why_no_rate,
)
from dataloading.drift import Drift, find_drift
from dataloading.results import Result, format_count, format_ratio, format_share
from dataloading.run_lines import COLUMNS, rows_of, table_of

if TYPE_CHECKING:
    import pandas as pd

FEWEST_RUNS = 3  # earlier ones; the spread of two says next to nothing
DRIFT_RUNS = 30
FEWEST_DRIFT_RUNS = 6  # every push is judged: of six runs, chance alone lets 1 in 120 fall
LEAST_CHANGE = 0.03  # a smaller one is not worth a red build
CONFIDENCE = 0.95


@dataclass(frozen=True, repr=False, eq=False)
class RunTrend(Result):
    """How the latest run compares with earlier ones.

    Attributes:
        verdict: `slower`, `faster`, `no difference shown`, `not comparable` or `too few runs`.
        ratio: Rate (samples/s) of the latest run over the mean rate of the baseline (geometric);
            None where there is no baseline.
        interval: 95 % interval of the ratio, from the spread of the earlier runs; None without one.
        compared: DataFrame with a row a run, in order of time, the latest last: comparable earlier
            runs, and `in_baseline`.
        drift: Trend of the rate over all of these runs (at most 30).
        least_change: Smaller changes than this share are not told.
        notes: What the reader should know: what was left out, and what changed.
    """

    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None
    compared: pd.DataFrame
    drift: Drift | None = None
    least_change: float = LEAST_CHANGE
    notes: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether the latest run is slower than its baseline."""
        return self.verdict == "slower"

    @property
    def is_drifting(self) -> bool:
        """Whether the rate has been falling from run to run, too slowly for the baseline to tell."""
        known = self.drift is not None and len(self.drift.values) >= FEWEST_DRIFT_RUNS
        return known and self.drift is not None and self.drift.verdict == "falling"

    def summary(self) -> str:
        """Verdict, ratio and interval, and the drift where there is one."""
        drift = f"; drift: {self.drift.summary()}" if self.drift and self.is_drifting else ""
        if self.ratio is None:
            return f"{self.verdict} ({'; '.join(self.notes)}){drift}"
        runs = format_count(int(self.compared["in_baseline"].sum()), "run")
        ratio = f"{format_ratio(self.ratio)}x"
        if self.interval is None:
            return f"{self.verdict} ({ratio} the rate of {runs}; {'; '.join(self.notes)}){drift}"
        low, high = map(format_ratio, self.interval)
        change = abs(self.ratio - 1)
        told = f"{format_share(change, 0 if change >= 0.1 else 1)} {self.verdict} than"
        if self.verdict == "no difference shown":
            told = f"{self.verdict} from"
        known = f"{ratio}, 95 % interval {low} to {high}"
        return f"{told} the baseline of {runs} ({known}){drift}"

    def plot(self, ax: Any = None) -> Any:
        """Draw the runs, the baseline and the latest run; returns the Axes."""
        from dataloading.plots_history import plot_history

        return plot_history(self, ax=ax)


def find_regression(
    runs: pd.DataFrame,
    *,
    baseline: int | str | pd.DataFrame | None = None,
    least_change: float = LEAST_CHANGE,
) -> RunTrend:
    """Compare the latest run with earlier ones: is it slower than their spread explains?

    Rates are compared in samples/s, so a data set that has grown is no regression. Runs of another
    batch size, torch version, number of ranks or kind of machine (system, CPU, accelerators) are
    left out; other settings may differ, since their effect is what one wants to see, and are told.

    The usual baseline is the ten latest comparable runs of the same name: an intended change is the
    new normal after a few runs, without anybody editing a file. Runs that were called slower in a
    row are left out of it, so that a regression stays flagged until it is mended; to accept a new
    rate, give the runs a new name. What creeps in below the spread shows in `drift`.

    By chance a run is called slower about 1 time in 40, on machines whose runs scatter by less than
    `least_change` far more rarely. That takes earlier runs as independent of one another: on a
    machine that is busy for days, it happens about twice as often.

    Args:
        runs: What `read_runs` gives, or a part of it. The latest run is judged.
        baseline: What to compare with instead: a row's index, a name, or the rows themselves (the
            result of a filter). With fewer than three rows, the spread is that of the other
            comparable runs.
        least_change: Changes below this share are not told.

    Returns:
        A `RunTrend`.

    Raises:
        TypeError: `runs` is no such table, or `baseline` is none of these.
        ValueError: `baseline` names no run, or `least_change` is negative.

    Example:
        >>> find_regression(read_runs("runs.jsonl"))  # doctest: +SKIP
        RunTrend: 12 % slower than the baseline of 5 runs (0.88x, 95 % interval 0.84 to 0.92)

    Source: interval for one further value, G. J. Hahn, W. Q. Meeker, Statistical Intervals (1991),
    chapter 4.

    Explained in: notebook 09
    """
    check_runs(runs)
    check_amount("least_change", least_change)
    rows = rows_of(runs)
    picked = picked_rows(runs, baseline)
    if not rows:
        return _without_ratio("too few runs", "the history has no run yet", [])
    return judge_run(rows[-1], rows[:-1], picked, least_change)


def check_runs(runs: Any) -> None:
    """Refuse what is not a table of runs.

    Raises:
        TypeError: It is no DataFrame, or lacks columns.
    """
    if not hasattr(runs, "columns"):
        raise TypeError(f"Expected the table that read_runs(path) gives, got {runs!r}.")
    if missing := [name for name in COLUMNS if name not in runs.columns]:
        raise TypeError(f"runs lacks {missing[:3]}; expected the table that read_runs(path) gives.")


def picked_rows(runs: pd.DataFrame, baseline: Any) -> list[dict[str, Any]] | None:
    """The rows that a baseline stands for; None for the usual one."""
    if baseline is None:
        return None
    if hasattr(baseline, "columns"):
        check_runs(baseline)
        return rows_of(baseline)
    if isinstance(baseline, str):
        rows = rows_of(runs[runs["name"] == baseline])
        if not rows:
            names = sorted({str(name) for name in runs["name"].dropna()})
            raise ValueError(f"baseline={baseline!r} names no run; the names are {names}.")
        return rows
    if isinstance(baseline, int | np.integer) and not isinstance(baseline, bool):
        if baseline not in runs.index:
            first = f", from {runs.index[0]} to {runs.index[-1]}" if len(runs) else ""
            raise ValueError(f"baseline={baseline} is no index of the {len(runs)} runs{first}.")
        return rows_of(runs.loc[[baseline]])
    raise TypeError(
        f"Expected baseline to be a row's index, a name or rows of the table, got {baseline!r}."
    )


def judge_run(
    latest: Row,
    earlier: Sequence[Row],
    picked: Sequence[Row] | None = None,
    least_change: float = LEAST_CHANGE,
) -> RunTrend:
    """Judge one run.

    Args:
        latest: Its row.
        earlier: Rows of the runs before it, in order of time.
        picked: Rows to compare with; None takes the latest comparable ones.
        least_change: Changes below this share are not told.

    Returns:
        A `RunTrend`.
    """
    if not has_rate(latest):
        return _without_ratio("not comparable", why_no_rate(latest), [latest])
    same_name = [row for row in earlier if row["name"] == latest["name"]]
    wanted = same_name if picked is None else [r for r in picked if r["run"] != latest["run"]]
    series = [row for row in same_name if comparable(row, latest)]
    usable = [row for row in wanted if comparable(row, latest)]
    if not usable:
        if wanted:
            reason = difference(wanted[-1], latest)
            return _without_ratio("not comparable", reason, [latest])
        reason = (
            f"no earlier run {'has no name either' if latest['name'] is None else 'of this name'}"
        )
        return _without_ratio("too few runs", reason, [latest])
    chosen = usual_baseline(series) if picked is None else usable
    spread = chosen if len(chosen) >= FEWEST_RUNS else usual_baseline(series)
    notes = [*left_out(wanted, latest), *changes(chosen[-1], latest)]
    shown = sorted(
        {row["run"]: row for row in (*series, *chosen)}.values(), key=lambda row: row["time_utc"]
    )
    rates = [row["samples_per_s"] for row in (*series, latest)][-DRIFT_RUNS:]
    trend = RunTrend(
        verdict="too few runs",
        ratio=float(latest["samples_per_s"] / _mean_rate(chosen)),
        interval=None,
        compared=_compared([*shown, latest], {row["run"] for row in chosen}),
        drift=find_drift(rates),
        least_change=least_change,
        notes=tuple(notes),
    )
    if len(spread) < FEWEST_RUNS:
        reason = f"{FEWEST_RUNS} comparable earlier runs are needed for their spread"
        return replace(trend, notes=(reason, *notes))
    return _with_verdict(trend, _half_width(spread, len(chosen), latest))


def _with_verdict(trend: RunTrend, half_width: float) -> RunTrend:
    ratio = trend.ratio or 1.0
    low, high = ratio * math.exp(-half_width), ratio * math.exp(half_width)
    verdict, notes = "no difference shown", trend.notes
    if (high < 1 or low > 1) and abs(ratio - 1) < trend.least_change:
        least = format_share(trend.least_change, 1)
        notes = (f"the difference is smaller than {least} and not told", *notes)
    elif high < 1:
        verdict = "slower"
    elif low > 1:
        verdict = "faster"
    return replace(trend, verdict=verdict, interval=(low, high), notes=notes)


def _half_width(spread: Sequence[Row], averaged: int, latest: Row) -> float:
    """Half of the interval of the log ratio of one further run to the mean of `averaged` runs.

    The spread between few runs can be small by luck, so it never counts less than the spread inside
    the runs; a latest run that is less sure than they are widens the interval.
    """
    from scipy import stats

    between = float(np.log([row["samples_per_s"] for row in spread]).var(ddof=1))
    inside = float(np.mean([(row["rate_error"] or 0.0) ** 2 for row in spread]))
    surplus = max(0.0, (latest["rate_error"] or 0.0) ** 2 - inside)
    variance = max(between, inside) * (1 + 1 / averaged) + surplus
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(spread) - 1) * math.sqrt(variance))


def _mean_rate(rows: Sequence[Row]) -> float:
    return float(np.exp(np.log([row["samples_per_s"] for row in rows]).mean()))


def _compared(rows: Sequence[Row], baseline: set[str]) -> pd.DataFrame:
    frame = table_of([dict(row) for row in rows])
    frame.insert(1, "in_baseline", frame["run"].isin(baseline))
    return frame


def _without_ratio(verdict: str, reason: str, rows: Sequence[Row]) -> RunTrend:
    return RunTrend(verdict, None, None, _compared(rows, set()), notes=(reason,))
