"""The best settings for a loader, found by a model and checked by measurement.

A probe tells the model what a batch costs; the model says which settings are worth a trial; trials
run by turns; the winner is compared with the present settings. Where the first trial shows that the
model is off, all settings compete instead, and the better half goes on (successive halving).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from dataloading.arguments import check_device, check_seconds, check_share, check_train_step
from dataloading.comparison import COLUMNS, Comparison, judge_pairs
from dataloading.interleaving import interleave
from dataloading.machine import inspect_machine
from dataloading.making import MakeDataLoader, Maker
from dataloading.model import Prediction, predict_dataloader
from dataloading.progress import time_bar
from dataloading.results import Result, format_count, format_ratio, format_value
from dataloading.search import LEAST_BLOCK_S, PROOF_SHARE, Search, demand
from dataloading.settings import LoaderSettings
from dataloading.timing import LEAST_LIMIT_S, TrainStep
from dataloading.train_steps import state_kept
from dataloading.trials import FAILED, Bench, Trial, Turn, trial_table
from dataloading.watchdog import time_limit
from dataloading.workers import GOOD_ENOUGH

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False, eq=False)
class TuningResult(Result):
    """The best settings that were found, with everything that was tried.

    Attributes:
        settings: The winner.
        dataloader: A new loader with these settings, all else equal; no worker of it runs yet.
        trials: DataFrame with a row per setting, fastest first: settings, prediction, measured rate
            and its spread, blocks and steps, `status` (`tried`, `not tried`, `refused`, `failed`,
            `hung`, `out of memory`) with its `reason`, and `chosen`.
        predicted: What the model expected of the winner; None without a model.
        measured: The winner against the settings from before, by turns.
        samples_per_s: Measured rate of the winner; None where nothing could be tried.
        searched_by: `model` or `successive halving`.
        notes: What the reader should know.
    """

    settings: LoaderSettings
    dataloader: DataLoader
    trials: pd.DataFrame
    predicted: Prediction | None
    measured: Comparison
    samples_per_s: float | None
    searched_by: str
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The winner, its rate and what was shown of its gain."""
        rate = self.samples_per_s
        tried = int((self.trials["status"] == "tried").sum())
        runs = "" if rate is None else f": {format_value('samples_per_s', rate)}"
        return (
            f"{self.settings.summary()}{runs}, best of {format_count(tried, 'setting')} tried; "
            f"{self.measured.summary()}"
        )

    def rows(self) -> list[tuple[str, Any]]:
        """Winner, prediction, proof and every trial."""
        return [
            *((name, value) for name, value in self.settings.kwargs().items()),
            ("samples_per_s", self.samples_per_s),
            ("predicted", self.predicted.summary() if self.predicted else "no model"),
            ("measured", self.measured.summary()),
            ("searched by", self.searched_by),
            *((f"trial: {_short(row)}", _outcome(row)) for _, row in self.trials.iterrows()),
            *(("note", note) for note in self.notes),
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw measured rates over the number of workers, with predictions; returns the Axes."""
        from dataloading.plots import plot_tuning

        return plot_tuning(self, ax=ax)


def _short(row: pd.Series) -> str:
    prefetch = row["prefetch_factor"]
    return f"{row['num_workers']} workers" + (f", prefetch {prefetch:.0f}" if prefetch > 0 else "")


def _outcome(row: pd.Series) -> str:
    if row["status"] == "tried":
        return format_value("samples_per_s", row["samples_per_s"])
    return f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])


def tune_dataloader(
    dataloader: DataLoader | MakeDataLoader,
    train_step: TrainStep | None = None,
    *,
    seconds: float = 60.0,
    memory_fraction: float = 0.8,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> TuningResult:
    """Find the fastest settings for a loader, and prove them against the present ones.

    The batch size, the order of the samples and the samples themselves stay as they are (with workers
    that are kept between epochs, a seeded shuffle has other orders from the second epoch on). Settings
    that need more memory, shared memory or open files than there are get refused without a trial.

    Args:
        dataloader: A `DataLoader`, or a function that builds one from `LoaderSettings`.
        train_step: Called with each batch; None tunes the loader alone.
        seconds: Time budget, start-ups included; ends earlier where nothing is left to gain.
        memory_fraction: Share of what is free that the loader may take.
        device: Move each batch there first.
        progress: Show progress bars.

    Returns:
        A `TuningResult`.

    Raises:
        TypeError: A loader that cannot be built again with other settings.
        ValueError: A bad argument, or a loader that delivers no batch.
        Exception: What the train step raises, and what the data set raises with every setting.

    Example:
        >>> loader = DataLoader(range(1000), batch_size=10)
        >>> result = tune_dataloader(loader, seconds=20)  # doctest: +SKIP
        >>> for batch in result.dataloader: ...  # doctest: +SKIP

    Explained in: notebook 03
    """
    check_seconds(seconds)
    check_train_step(train_step)
    check_share("memory_fraction", memory_fraction)
    maker = Maker.of(dataloader)
    on_device = check_device(device)
    search = Search(maker, train_step, on_device, seconds, memory_fraction, inspect_machine())
    with (
        state_kept(train_step),
        time_bar(seconds, "Tuning", progress) as bar,
        Bench(maker, train_step, on_device, bar) as bench,
    ):
        search.ask_model(bar)
        search.run(bench)
        return _conclude(search, bench)


def _conclude(search: Search, bench: Bench) -> TuningResult:
    """Choose, prove against the present settings, and build the loader."""
    before, winner = search.trials[0], search.winner()
    if winner is None:  # nothing else ran: do at least the present settings?
        if not bench.run(before, LEAST_BLOCK_S, search.seconds) and bench.error is not None:
            raise bench.error
        winner = before
    measured = _prove(search, bench, before, winner)
    notes = list(search.notes)
    failed = [t for t in search.trials if t.status == FAILED and t.settings.num_workers]
    if failed and not any(t.rates for t in search.trials if t.settings.num_workers):
        notes.append(f"no workers could be started: {failed[0].reason}")
    if len(search.finalists) == 0:
        notes.append("no other setting could be tried within the time: allow more seconds")
    if winner is not before and before.usable and not is_worth_it(measured, winner, before):
        notes.append(
            f"the present settings stay: {winner.settings.summary()} won the trials, and ran at "
            f"{format_ratio(measured.ratio or 0.0)} times the present rate in the end"
        )
        winner = before
        measured = _without_pairs(1.0, "no difference shown", notes[-1])
    predicted = None
    if search.costs is not None:
        predicted = predict_dataloader(
            search.costs, winner.settings, step_s=search.step_s, machine=search.machine
        )
    return TuningResult(
        settings=winner.settings,
        dataloader=search.maker.make(winner.settings),
        trials=trial_table(search.trials, winner.settings),
        predicted=predicted,
        measured=measured,
        samples_per_s=winner.samples_per_s,
        searched_by=search.searched_by,
        notes=tuple(notes),
    )


def is_worth_it(measured: Comparison, winner: Trial, before: Trial) -> bool:
    """Whether to change settings: for those shown faster, or as fast and asking for less."""
    if measured.verdict == "faster" or measured.ratio is None:
        return True
    as_fast = measured.verdict != "slower" and measured.ratio * GOOD_ENOUGH >= 1
    return as_fast and demand(winner) <= demand(before)


def _prove(search: Search, bench: Bench, before: Trial, winner: Trial) -> Comparison:
    """The winner against the present settings, in blocks by turns."""
    if winner is before:
        return _without_pairs(
            1.0, "no difference shown", "the present settings are the best that was found"
        )
    budget_s = max(search.to_the_end_s, PROOF_SHARE * search.seconds / 2)
    if not before.usable or not bench.run(before, LEAST_BLOCK_S, budget_s):
        why = f"the present settings {before.status}: {before.reason}"
        return _without_pairs(None, "not comparable", why)
    together = len(search.that_fit_together([winner, before])) == 2
    bench.close_all_but(winner.settings)
    sides = {
        "before": Turn(bench, before.settings, alone=not together),
        "after": Turn(bench, winner.settings, alone=not together),
    }
    with time_limit(3 * budget_s + LEAST_LIMIT_S, lambda: bench.doing[0]):
        seen = interleave(sides, budget_s)
    return judge_pairs(_table(seen.rows), True, seen.notes, confidence=seen.confidence)


def _without_pairs(ratio: float | None, verdict: str, note: str) -> Comparison:
    return Comparison(ratio, None, verdict, _table([]), True, (note,))


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(COLUMNS))
