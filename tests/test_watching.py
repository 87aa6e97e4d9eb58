"""Watching a loader in somebody's own loop."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_workloads
import pytest
import torch
import workloads
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from workloads import linux_only

from dataloading import watching
from dataloading.history import read_runs, record_run
from dataloading.kept_workers import worker_ids
from dataloading.watchdog import close_iterator
from dataloading.watching import EpochTotals, planned_sizes, watch_dataloader


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    importlib.import_module("scipy.stats")  # its import adds warning filters of its own
    yield from workloads.leaves_nothing()


class WithEpoch(SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def train(loader: Any, epochs: int = 1) -> list[Any]:
    return [batch for _ in range(epochs) for batch in loader]


# ---- what is seen ------------------------------------------------------------------------------


def test_the_batches_are_those_of_the_loader() -> None:
    loader = DataLoader(workloads.Slow(10), batch_size=4)
    watched = watch_dataloader(loader, report=False)
    seen = [targets.tolist() for _, targets in train(watched)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert watched.timing.samples.tolist() == [4, 2]  # the first batch stands apart
    assert watched.timing.steps_per_epoch == 3


def test_waits_and_steps_are_told_apart() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(20, seconds=0.02)), report=False)
    for _ in watched:
        time.sleep(0.01)
    timing = watched.timing
    assert timing.wait_share == pytest.approx(2 / 3, abs=0.15)
    assert timing.step_share == pytest.approx(1 / 3, abs=0.15)
    assert timing.startup_s is not None
    assert timing.startup_s >= 0.02


def test_epochs_are_noted() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(5)), report=False)
    train(watched, epochs=3)
    assert watched.timing.steps == 14
    assert watched.timing.epoch_restart_s is not None
    assert repr(watched) == "watched DataLoader (15 steps seen)"


def test_a_loop_that_breaks_off() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(50), num_workers=1), report=False)
    for number, _ in enumerate(watched):
        if number == 3:
            break
    assert repr(watched) == "watched DataLoader (3 steps seen)"
    assert watched.timing.steps_per_epoch is None


def test_a_loop_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    watched = watch_dataloader(DataLoader(workloads.Failing(20)))
    with pytest.raises(KeyError, match="broken sample 5"):
        train(watched)
    assert capsys.readouterr().out.startswith("epoch 0: ")


def test_nothing_seen_yet() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(5)))
    with pytest.raises(ValueError, match="Nothing was watched yet"):
        _ = watched.timing


def test_anything_that_yields_batches() -> None:
    watched = watch_dataloader([torch.zeros(4, 2)] * 6, report=False)
    assert len(train(watched)) == len(watched) == 6
    assert watched.timing.settings is None
    assert watched.timing.samples.tolist() == [4] * 5
    with pytest.raises(TypeError, match="to be a loader to iterate over, got int"):
        watch_dataloader(5)


def test_an_epoch_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "STEPS_KEPT", 10)
    watched = watch_dataloader(DataLoader(workloads.Slow(1000)), report=False)
    for _ in watched:
        assert len(watched._log.epoch) <= 20
    assert watched.timing.steps == 9
    assert watched.timing.steps_per_epoch == 1000


def test_a_diagnosis_from_what_was_seen() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(30, seconds=0.003)), report=False)
    train(watched)
    diagnosis = watched.diagnosis()
    assert diagnosis.timing is not None
    assert diagnosis.timing.steps == 29
    assert diagnosis.profile is None


# ---- what is printed ---------------------------------------------------------------------------


def test_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    train(watch_dataloader(DataLoader(workloads.Slow(5))), epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("epoch 1: ")
    train(watch_dataloader(DataLoader(workloads.Slow(5)), report=False))
    assert capsys.readouterr().out == ""


def test_the_line_has_rate_share_and_worst_wait() -> None:
    seen = EpochTotals()
    for wait_s, step_s in ((0.1, 0.1), (0.5, 0.1), (0.1, 0.1)):
        seen.add(wait_s, step_s, samples=20)
    assert seen.line() == (
        "60 samples/s, waiting for data 70 % of the time, worst wait 500 ms (batch 1)"
    )
    assert "0 %" in EpochTotals().line()


# ---- answering for the loader ------------------------------------------------------------------


def test_attributes_and_length() -> None:
    loader = DataLoader(workloads.Slow(10), batch_size=4)
    watched = watch_dataloader(loader)
    assert len(watched) == 3
    assert watched.dataset is loader.dataset
    assert watched.batch_size == 4
    with pytest.raises(AttributeError, match="missing"):
        _ = watched.missing


def test_set_epoch_goes_to_whoever_has_it() -> None:
    data = workloads.Slow(8)
    direct, inside = WithEpoch(data), WithEpoch(data)
    watch_dataloader(DataLoader(data, sampler=direct)).set_epoch(3)
    batches = BatchSampler(inside, 2, drop_last=False)
    watch_dataloader(DataLoader(data, batch_sampler=batches)).set_epoch(4)
    assert (direct.epoch, inside.epoch) == (3, 4)
    with pytest.raises(AttributeError, match="Neither the loader"):
        watch_dataloader(DataLoader(data)).set_epoch(1)


@linux_only
def test_a_09_7_a_new_persistent_loader_for_each_epoch_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = workloads.Slow(20)

    def made() -> DataLoader:
        return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)

    ids = []
    for _ in range(2):  # the mistake: the loader is made inside the loop over epochs
        loader = made()
        watched = watch_dataloader(loader)
        train(watched)
        ids.append(worker_ids(loader))
        close_iterator(loader._iterator)
        del loader
    assert ids[0] != ids[1]
    assert "keep one loader" in capsys.readouterr().out
    (found,) = [f for f in watched.diagnosis().findings if f.code == "epoch-startup"]
    assert "made for an epoch" in found.message


@linux_only
def test_a_loader_that_is_kept_keeps_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    data = workloads.Slow(20)
    loaders = [
        DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True) for _ in range(2)
    ]
    ids = []
    for _ in range(2):  # two loaders side by side, as for training and testing
        for loader in loaders:
            train(watch_dataloader(loader))
            ids.append(worker_ids(loader))
    assert ids[:2] == ids[2:]
    assert "keep one loader" not in capsys.readouterr().out
    for loader in loaders:
        close_iterator(loader._iterator)


# ---- over epochs, and over runs ----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands until a test moves `now`."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(watching, "time", clock)
    return clock


def run_epochs(watched: Any, clock: SimpleNamespace, seconds: Sequence[float]) -> None:
    """Train for epochs of 10 batches that take so many seconds each."""
    for epoch_s in seconds:
        for _ in watched:
            clock.now += epoch_s / 10


def ten_batches() -> list[torch.Tensor]:
    return [torch.zeros(4, 2)] * 10


def test_a_20_5_epochs_that_get_slower_are_told(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = watch_dataloader(ten_batches())
    run_epochs(watched, clock, [60, 66, 73, 80])
    lines = capsys.readouterr().out.splitlines()
    assert not any("get slower" in line for line in lines[:3])
    assert "epochs get slower, time for a sample rising: +10.1 % per epoch" in lines[3]
    assert "+10.1 % per epoch" in watched.timing.notes[0]
    # the rate is that of all epochs, not of a single one
    assert watched.timing.samples_per_s == pytest.approx(160 / (60 + 66 + 73 + 80), rel=0.02)


def test_steady_epochs_and_a_slow_first_one_are_no_trend(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = watch_dataloader(ten_batches())
    run_epochs(watched, clock, [90, 60, 61, 59, 60, 62, 60])
    assert "get slower" not in capsys.readouterr().out
    assert watched.timing.notes == ()


def test_longer_epochs_are_not_slower_ones(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = ten_batches()
    watched = watch_dataloader(batches)
    for _ in range(6):  # a data set that grows
        for _ in watched:
            clock.now += 1
        batches += ten_batches()
    assert "get slower" not in capsys.readouterr().out


def test_a_history_has_one_row_a_run_and_tells_a_slower_one(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    for epoch_s in (10.0, 10.1, 9.9, 10.0):
        run_epochs(
            watch_dataloader(ten_batches(), history=path, name="train"), clock, [epoch_s] * 2
        )
    runs = read_runs(path)
    assert runs["samples_per_s"].tolist() == pytest.approx([4, 3.96, 4.04, 4], abs=0.01)
    assert runs["epochs"].tolist() == [2] * 4
    assert runs["name"].tolist() == ["train"] * 4
    assert "history" not in capsys.readouterr().out
    run_epochs(watch_dataloader(ten_batches(), history=path, name="train"), clock, [13.0])
    out = capsys.readouterr().out
    assert "history: train: 3.1 samples/s, 23 % slower than the baseline of 4 runs" in out


def test_a_loop_that_breaks_off_is_recorded_and_a_failed_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    watched = watch_dataloader(ten_batches(), history=path, report=False)
    for number, _ in enumerate(watched):
        if number == 5:
            break
    assert len(read_runs(path)) == 1
    failing = watch_dataloader(DataLoader(workloads.Failing(20)), history=path, report=False)
    with pytest.raises(KeyError, match="broken sample 5"):
        train(failing)
    assert len(read_runs(path)) == 1


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(watching, "_is_first", lambda: False)
    train(watch_dataloader(ten_batches(), history=path, report=False))
    assert not path.exists()


def test_training_goes_on_without_its_history(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    watched = watch_dataloader(ten_batches(), history=folder / "runs.jsonl", report=False)
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match="The history was not written"):
        assert len(train(watched)) == 10


def test_a_wrong_history_is_refused_before_training(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not a history")
    with pytest.raises(ValueError, match="is no history"):
        watch_dataloader(ten_batches(), history=notes)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        watch_dataloader(ten_batches(), history=tmp_path)
    with pytest.raises(ValueError, match="give history= too"):
        watch_dataloader(ten_batches(), name="train")


def test_a_watched_loader_may_be_recorded_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    watched = watch_dataloader(ten_batches(), report=False)
    with pytest.raises(ValueError, match="Nothing was watched yet"):
        record_run(watched, path)
    for steps in (9, 19):  # again when it got further
        train(watched)
        assert record_run(watched, path).line["steps"] == steps
        assert read_runs(path)["steps"].tolist() == [steps]


# ---- samples of batches that need not be looked at -----------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 8, 10, 16])
def test_planned_sizes_are_those_of_the_batches(count: int, drop_last: bool) -> None:
    loader = DataLoader(workloads.Slow(count), batch_size=8, drop_last=drop_last)
    planned = planned_sizes(loader)
    assert planned is not None
    assert [len(indices) for _, indices in loader] == list(islice(planned, len(loader)))


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(workloads.Slow(10), batch_size=None),
        DataLoader(workloads.Slow(10), batch_size=4, collate_fn=list),
        DataLoader(workloads.Slow(10), batch_sampler=[[0], [1, 2]]),
        DataLoader(workloads.Counting(10), batch_size=4),
        DataLoader(workloads.Slow(10), batch_size=4, sampler=iter(range(10))),
    ],
)
def test_where_settings_do_not_tell_batches_are_counted(loader: Any) -> None:
    assert planned_sizes(loader) is None


def test_samples_of_an_epoch_are_counted_with_its_last_batch() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(10), batch_size=4), report=False)
    list(watched)
    assert watched.timing.samples.tolist() == [4, 2]  # the first step is no steady one


@linux_only
def test_the_diagnosis_knows_of_a_worker_that_died() -> None:
    watched = watch_dataloader(
        DataLoader(faulty_workloads.EndsAt(9, 13), batch_size=4, num_workers=1), report=False
    )
    with pytest.raises(RuntimeError):
        list(watched)
    assert watched.diagnosis().cause == "worker-died"


def test_the_diagnosis_names_an_error_that_a_sample_raised() -> None:
    watched = watch_dataloader(
        DataLoader(faulty_workloads.FailsAt("two arguments"), batch_size=2), report=False
    )
    with pytest.raises(faulty_workloads.TwoArguments):
        list(watched)
    diagnosis = watched.diagnosis()
    assert diagnosis.cause == "worker-error"
    assert "TwoArguments" in diagnosis.findings[0].message
    assert diagnosis.timing is not None  # of the batch that came before


def test_an_error_of_the_loop_itself_is_no_failure_of_the_loader() -> None:
    watched = watch_dataloader(DataLoader(workloads.Slow(80), batch_size=4), report=False)
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in watched]
    list(watched)
    assert watched.diagnosis().cause not in ("worker-error", "worker-died")
