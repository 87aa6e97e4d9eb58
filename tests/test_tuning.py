"""Tuning: what the search tries, what it refuses, what it survives, and what it leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from workloads import Sharded, Slow, leaves_nothing, linux_only, random_state

from benchmarks.faults.running import refused_by
from benchmarks.faults.surroundings import WITH_SMALL_SHARED_MEMORY
from dataloading import probing, search, timing, trials, tuning
from dataloading.batch_costs import BatchCosts
from dataloading.comparison import Comparison
from dataloading.interleaving import Block
from dataloading.machine import Machine, inspect_machine
from dataloading.making import Maker
from dataloading.progress import time_bar
from dataloading.search import Search, demand, spaced
from dataloading.settings import LoaderSettings
from dataloading.train_steps import simulated_train_step
from dataloading.trials import Bench, Trial, Turn, trial_table
from dataloading.tuning import TuningResult, is_worth_it, tune_dataloader

nothing_left = pytest.fixture(leaves_nothing)
COLUMNS = {"num_workers", "prefetch_factor", "samples_per_s", "spread_share", "status", "chosen"}


class EndsInWorkers(Slow):
    """Its workers die; the training process does not."""

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            os._exit(1)
        return super().__getitem__(index)


class HangsWithMany(Slow):
    """With more than one worker, no sample ever comes."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            threading_wait()
        return super().__getitem__(index)


class NoMemoryForMany(Slow):
    """With more than one worker, memory runs out."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise MemoryError("no more pages")
        return super().__getitem__(index)


class OwnLoader(DataLoader):
    """A subclass that cannot be built again from its attributes."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)


class Fat(Slow):
    """Samples of a MiB that wait."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return torch.zeros(2**18)


def threading_wait() -> None:
    import threading

    threading.Event().wait(60)


def tune(
    loader: Any, step_s: float | None = 0.004, seconds: float = 6.0, **more: Any
) -> TuningResult:
    step = simulated_train_step(step_s) if step_s is not None else None
    return tune_dataloader(loader, step, seconds=seconds, progress=False, **more)


# ---- real loaders --------------------------------------------------------------------------------


@linux_only
def test_waiting_samples_get_workers_and_the_gain_is_proven(nothing_left: None) -> None:
    dataset = Slow(400, seconds=0.004)
    loader = DataLoader(dataset, batch_size=4)
    before = random_state()
    result = tune(loader, seconds=12.0)
    assert random_state() == before
    assert result.settings.num_workers >= 2
    assert result.measured.verdict == "faster"
    assert result.measured.ratio > 1.5
    assert result.dataloader.num_workers == result.settings.num_workers
    assert result.dataloader.dataset is dataset
    assert result.dataloader.batch_size == 4
    assert set(result.trials.columns) >= COLUMNS
    assert result.trials["chosen"].sum() == 1
    assert result.trials[result.trials["chosen"]]["status"].item() == "tried"
    assert result.predicted.settings == result.settings
    assert "\n" not in repr(result)
    assert "num_workers" in result._repr_html_()
    json.dumps(result.to_dict())
    assert loader.num_workers == 0


def test_present_settings_stay_where_nothing_is_to_be_gained(nothing_left: None) -> None:
    result = tune(DataLoader(Slow(400), batch_size=4), step_s=0.01)
    assert result.settings.num_workers <= 1
    assert result.measured.verdict != "slower"


@linux_only
def test_a_data_set_whose_workers_die_is_tuned_without_them(nothing_left: None) -> None:
    result = tune(DataLoader(EndsInWorkers(200, 0.001), batch_size=4))
    assert result.settings.num_workers == 0
    failed = result.trials[result.trials["num_workers"] > 0]
    assert not failed["chosen"].any()
    assert "tried" not in set(failed["status"])
    assert any("no model" in note for note in result.notes)


@linux_only
def test_settings_that_hang_are_noted_and_never_chosen(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (timing, trials, tuning):
        monkeypatch.setattr(part, "LEAST_LIMIT_S", 2.0)
    result = tune(DataLoader(HangsWithMany(400, 0.004), batch_size=4), seconds=8.0)
    assert result.settings.num_workers <= 1
    assert "hung" in set(result.trials["status"])


@linux_only
def test_settings_that_run_out_of_memory_are_noted_and_never_chosen(nothing_left: None) -> None:
    result = tune(DataLoader(NoMemoryForMany(400, 0.004), batch_size=4), seconds=8.0)
    assert result.settings.num_workers <= 1
    short = result.trials[result.trials["status"] == "out of memory"]
    assert "no more pages" in short.iloc[0]["reason"]


def test_what_the_train_step_raises_is_raised(nothing_left: None) -> None:
    def broken(batch: Any) -> None:
        raise ZeroDivisionError("my own mistake")

    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        tune_dataloader(DataLoader(Slow(40), batch_size=4), broken, seconds=2, progress=False)


def test_what_the_data_set_raises_with_every_setting_is_raised(nothing_left: None) -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        tune(DataLoader(Broken(40), batch_size=4), seconds=2.0)


@linux_only
def test_a_stream_that_is_not_shared_out_gets_no_more_workers(nothing_left: None) -> None:
    result = tune(DataLoader(Sharded(400), batch_size=4), seconds=4.0)
    assert result.trials["num_workers"].max() <= 1


@linux_only
def test_a_function_builds_loaders_that_cannot_be_built_again(nothing_left: None) -> None:
    asked: list[LoaderSettings] = []

    def make_dataloader(settings: LoaderSettings) -> DataLoader:
        asked.append(settings)
        return OwnLoader(Slow(400, 0.002), **{"batch_size": 4, **settings.kwargs()})

    with pytest.raises(TypeError, match=r"make_dataloader\(settings\)"):
        tune(OwnLoader(Slow(400), batch_size=4))
    result = tune(make_dataloader, seconds=6.0)
    assert type(result.dataloader) is OwnLoader
    assert result.dataloader.num_workers == result.settings.num_workers
    assert {settings.num_workers for settings in asked} >= {0, 1}


@linux_only
def test_under_little_shared_memory_no_setting_is_tried_that_does_not_fit() -> None:
    if refused := refused_by(WITH_SMALL_SHARED_MEMORY):
        pytest.skip(f"no small /dev/shm can be made here: {refused}")
    command = [*WITH_SMALL_SHARED_MEMORY, sys.executable, "-W", "ignore", __file__]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environ
    )
    assert ran.returncode == 0, ran.stderr
    free, batch, trials = json.loads(ran.stdout.splitlines()[-1])
    ran_with_workers = [t for t in trials if t["num_workers"] and t["blocks"]]
    assert ran_with_workers
    for trial in ran_with_workers:
        assert trial["num_workers"] * trial["prefetch_factor"] * batch <= 0.8 * free
    assert {t["status"] for t in trials} <= {"tried", "not tried", "refused"}
    assert "refused" in {t["status"] for t in trials}


@pytest.mark.parametrize(
    ("verdict", "ratio", "workers", "changes"),
    [
        ("faster", 1.4, 4, True),
        ("no difference shown", 1.3, 4, False),  # more workers only for a gain that is shown
        ("no difference shown", 1.0, 1, True),  # as fast with fewer
        ("no difference shown", 0.74, 0, False),
        ("slower", 0.65, 0, False),
    ],
)
def test_settings_change_only_for_a_gain_or_for_less(
    verdict: str, ratio: float, workers: int, changes: bool
) -> None:
    before, winner = (
        Trial(LoaderSettings(num_workers=2)),
        Trial(LoaderSettings(num_workers=workers)),
    )
    seen = Comparison(ratio, None, verdict, pd.DataFrame(), True, ())
    assert is_worth_it(seen, winner, before) == changes


def test_a_function_that_names_its_batch_size_is_tuned_with_it(nothing_left: None) -> None:
    def make(settings: LoaderSettings) -> DataLoader:
        return DataLoader(Slow(80), batch_size=10, **settings.kwargs())

    result = tune(make, seconds=2.0)
    assert result.dataloader.batch_size == 10
    with pytest.raises(TypeError, match=r"'batch_size': 32, \*\*settings.kwargs"):
        Maker.of(make).make(LoaderSettings(batch_size=20))


def test_settings_that_do_not_fit_together_are_compared_one_at_a_time(nothing_left: None) -> None:
    with time_bar(1.0, "", enabled=False) as bar:
        maker = Maker.of(DataLoader(Slow(80), batch_size=4))
        with Bench(maker, None, None, bar) as bench:
            one, two = (Turn(bench, LoaderSettings(num_workers=n), alone=True) for n in (0, 1))
            assert one.block(0.01).steps >= 3
            assert two.block(0.01).steps >= 3
            assert [child.is_alive() for child in multiprocessing.active_children()] == [True]
            one.block(0.01)
            assert not multiprocessing.active_children()


def test_loaders_that_end_before_those_begun_earlier_leave_nothing_changed(
    nothing_left: None,
) -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Slow(80), batch_size=4, shuffle=True, generator=generator)
    before = random_state(), generator.get_state().tolist(), list(warnings.filters)
    first, second = LoaderSettings(), LoaderSettings(in_order=False)
    with time_bar(1.0, "", enabled=False) as bar, Bench(Maker.of(loader), None, None, bar) as bench:
        bench.blocks(first).block(0.0)
        torch.rand(1)
        bench.blocks(second).block(0.0)
        bench.close(first)
    assert (random_state(), generator.get_state().tolist(), list(warnings.filters)) == before


# ---- bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([1, 2], "cannot be built again"),
        (Slow(8), "is a data set"),
        (lambda settings: [1], "must return a DataLoader"),
        (DataLoader, "is the class"),
        (None, "Expected dataloader to be a loader"),
    ],
)
def test_what_cannot_be_tuned_isrefused_by_with_the_reason(loader: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        tune(loader)


def test_a_function_that_ignores_the_settings_isrefused_by() -> None:
    maker = Maker.of(lambda settings: DataLoader(Slow(8)))
    with pytest.raises(ValueError, match="num_workers=0 where 2"):
        maker.make(LoaderSettings(num_workers=2))


@pytest.mark.parametrize(
    "options", [{"seconds": 0}, {"seconds": float("nan")}, {"memory_fraction": 0}]
)
def test_bad_numbers_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        tune_dataloader(DataLoader(Slow(8)), **options)


# ---- the search, with made-up costs and rates ----------------------------------------------------


class MadeUpBench:
    """Gives made-up rates instead of running anything."""

    error = None

    def __init__(self, rate: Callable[[LoaderSettings], float]) -> None:
        self.rate = rate
        self.tried: list[LoaderSettings] = []

    def run(self, trial: Trial, seconds: float, limit_s: float) -> bool:
        self.tried.append(trial.settings)
        trial.add(Block(samples=int(1000 * self.rate(trial.settings)), elapsed_s=1000.0, steps=9))
        return True

    def close(self, settings: LoaderSettings) -> None:
        """Nothing is open."""


class Patience:
    """A clock for the search: each trial takes a tenth of the budget."""

    def __init__(self, bench: MadeUpBench) -> None:
        self.bench = bench

    def perf_counter(self) -> float:
        return 6.0 * len(self.bench.tried)


def searched(
    monkeypatch: pytest.MonkeyPatch,
    rate: Callable[[LoaderSettings], float],
    *,
    machine: Machine,
    costs: BatchCosts | None,
    step_s: float = 0.01,
    dataset: Any = None,
) -> tuple[Search, MadeUpBench]:
    bench = MadeUpBench(rate)
    monkeypatch.setattr(search, "time", Patience(bench))
    loader = DataLoader(dataset or Slow(80), batch_size=8)
    found = Search(Maker.of(loader), None, None, 60.0, 0.8, machine)
    found.costs, found.step_s = costs, step_s
    found.list_trials()
    found.run(bench)  # type: ignore[arg-type]
    return found, bench


WAITS = BatchCosts(0.004, 0.076, 0.0, batch_size=8, batch_bytes=10**6, tensors=1)


def modelled(settings: LoaderSettings) -> float:
    """The rate that the model expects of `WAITS`, on many CPUs."""
    return 8 / max(0.01, 0.08 / max(settings.num_workers, 0.9))


def test_a_model_that_is_right_needs_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    found, bench = searched(monkeypatch, modelled, machine=Machine(usable_cpus=16), costs=WAITS)
    assert found.searched_by == "model"
    assert found.winner().settings.num_workers in (8, 9)
    assert len({*bench.tried}) <= 4


def test_a_model_that_is_off_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(
        settings: LoaderSettings,
    ) -> float:  # more than two workers get into each other's way
        return {0: 90.0, 1: 100.0, 2: 190.0}.get(settings.num_workers, 120.0)

    found, _ = searched(monkeypatch, locked, machine=Machine(usable_cpus=16), costs=WAITS)
    assert found.searched_by == "successive halving"
    assert found.winner().settings.num_workers == 2
    assert any("off" in note for note in found.notes)


def test_without_a_model_all_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = searched(
        monkeypatch,
        lambda settings: 100.0 - abs(settings.num_workers - 3),
        machine=Machine(usable_cpus=6),
        costs=None,
    )
    assert found.searched_by == "successive halving"
    assert found.winner().settings.num_workers in (1, 2, 3)  # within 2 % of the best: the smallest


def test_it_stops_where_training_alone_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found, bench = searched(
        monkeypatch, lambda settings: 800.0, machine=Machine(usable_cpus=16), costs=WAITS
    )
    assert len(bench.tried) == 1
    assert found.winner().settings == bench.tried[0]
    assert any("stopped early" in note for note in found.notes)


def test_what_does_not_fit_isrefused_by_and_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = Machine(usable_cpus=16, shared_memory_free_bytes=10 * 10**6)
    found, bench = searched(monkeypatch, modelled, machine=tight, costs=WAITS)
    for settings in bench.tried:
        assert settings.queued_batches * 10**6 <= 8 * 10**6
    refused = [trial for trial in found.trials if trial.status == "refused"]
    assert refused
    assert all("shared memory" in trial.reason for trial in refused)


@pytest.mark.parametrize("seed", range(40))
def test_trials_that_are_open_together_fit_together(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random

    dice = random.Random(seed)
    tight = Machine(
        usable_cpus=dice.choice([2, 8, 32]),
        start_method="fork",
        available_memory_bytes=dice.randint(300, 8000) * 2**20,
        shared_memory_free_bytes=dice.randint(8, 200) * 10**6,
    )
    bench = MadeUpBench(modelled)
    found = Search(Maker.of(DataLoader(Slow(80), batch_size=8)), None, None, 60.0, 0.8, tight)
    found.costs, found.step_s = WAITS, 0.01
    found.list_trials()
    open_trials = found.that_fit_together([t for t in found.trials if t.usable])
    held = sum(t.settings.queued_batches for t in open_trials) * WAITS.batch_bytes
    if len(open_trials) > 1:
        assert held <= 0.8 * tight.shared_memory_free_bytes
    assert open_trials
    assert bench.tried == []


def test_of_equal_settings_the_least_demanding_wins() -> None:
    few, many = (Trial(LoaderSettings(num_workers=n, prefetch_factor=2)) for n in (2, 6))
    deep = Trial(LoaderSettings(num_workers=2, prefetch_factor=4))
    assert min([many, deep, few], key=demand) is few


def test_numbers_of_workers_become_sparser() -> None:
    assert spaced(0) == [0]
    assert spaced(2) == [0, 1, 2]
    numbers = spaced(100)
    assert numbers[-1] == 100
    assert len(numbers) < 22
    assert numbers == sorted(set(numbers))


# ---- trials --------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_setting_whatever_became_of_it() -> None:
    good = Trial(LoaderSettings(num_workers=1), 90.0, rates=[100.0, 110.0], steps=8, status="tried")
    bad = Trial(LoaderSettings(num_workers=2), status="failed", reason="RuntimeError: worker died")
    new = Trial(LoaderSettings(num_workers=3), 120.0)
    table = trial_table([new, bad, good], good.settings)
    assert table.iloc[0]["samples_per_s"] == pytest.approx(104.9, abs=0.1)
    assert table.iloc[0]["spread_share"] == pytest.approx(0.067, abs=0.001)
    assert table["status"].tolist()[0] == "tried"
    assert set(table["status"]) == {"tried", "failed", "not tried"}
    assert table["chosen"].tolist() == [True, False, False]


def test_the_probe_names_what_cannot_be_probed() -> None:
    with pytest.raises(ValueError, match="seconds"):
        probing.measure_batch_costs(DataLoader(Slow(8)), seconds=0)

    class Empty(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="no batch"):
        probing.measure_batch_costs(DataLoader(Empty()), seconds=1, progress=False)


def tune_in_a_small_place() -> None:
    """For a process of its own: tune fat batches, print what is free, a batch, and the trials."""
    free = inspect_machine().shared_memory_free_bytes
    result = tune(DataLoader(Fat(400, 0.004), batch_size=4), seconds=8.0)
    rows = json.loads(result.trials.to_json(orient="records"))
    print(json.dumps([free, 4 * 2**20, rows]))


if __name__ == "__main__":
    tune_in_a_small_place()


def test_a_script_without_a_guard_is_named_as_the_reason() -> None:
    error = RuntimeError(
        "\n  An attempt has been made to start a new process before the\n  current process has "
        "finished its bootstrapping phase.\n"
    )
    assert "__name__ == '__main__'" in trials.in_one_line(error)
