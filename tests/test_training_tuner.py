"""Tuning inside the real training: every sample once an epoch, and better settings as it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Slow, leaves_nothing, linux_only, random_state

from dataloading.budgets import resource_needs
from dataloading.machine import Machine
from dataloading.training_tuner import TrainingTuner, tune_while_training

nothing_left = pytest.fixture(leaves_nothing)


def train(tuner: TrainingTuner, step_s: float = 0.0) -> list[list[int]]:
    """Train; returns the samples of each epoch in the order they came."""
    epochs = []
    for epoch in tuner:
        seen: list[int] = []
        for _, indices in epoch:
            time.sleep(step_s)
            seen += indices.tolist()
        epochs.append(seen)
    return epochs


@linux_only
def test_every_sample_comes_once_an_epoch_and_settings_get_better(nothing_left: None) -> None:
    loader = DataLoader(Slow(120, 0.006), batch_size=4, shuffle=True)
    tuner = tune_while_training(loader, epochs=5)
    epochs = train(tuner, 0.004)
    assert [sorted(seen) for seen in epochs] == [list(range(120))] * 5
    assert epochs[0] != epochs[1] != epochs[2]
    assert tuner.settings.num_workers >= 2
    assert tuner.dataloader.num_workers == tuner.settings.num_workers
    tried = tuner.trials[tuner.trials["status"] == "tried"]
    before = tried[tried["num_workers"] == 0]["samples_per_s"].item()
    assert tried["samples_per_s"].iloc[0] > 1.5 * before
    assert tuner.trials["chosen"].sum() == 1
    assert loader.num_workers == 0
    assert "\n" not in repr(tuner)


def test_the_order_is_that_of_the_loader_itself(nothing_left: None) -> None:
    def shuffled() -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(Slow(24), batch_size=4, shuffle=True, generator=generator)

    loader = shuffled()
    plain = [[i for _, indices in loader for i in indices.tolist()] for _ in range(3)]
    assert train(tune_while_training(shuffled(), epochs=3)) == plain


def test_global_random_states_go_on_as_they_would(nothing_left: None) -> None:
    loader = DataLoader(Slow(24), batch_size=4)
    torch.manual_seed(3)
    for _ in range(3):
        list(loader)
    plain = random_state()
    torch.manual_seed(3)
    train(tune_while_training(loader, epochs=3))
    assert random_state() == plain


@linux_only
def test_where_nothing_waits_nothing_changes(nothing_left: None) -> None:
    loader = DataLoader(Slow(80), batch_size=4)
    tuner = tune_while_training(loader, epochs=4)
    train(tuner, 0.005)
    assert tuner.settings.num_workers <= 1


@linux_only
def test_workers_end_when_the_loop_is_left(nothing_left: None) -> None:
    tuner = tune_while_training(DataLoader(Slow(80, 0.004), batch_size=4, num_workers=2), epochs=4)
    for epoch in tuner:
        for number, _ in enumerate(epoch):
            if number == 3:
                break
        if epoch.number == 2:
            break
    del epoch, tuner


@linux_only
def test_an_epoch_that_was_broken_off_leaves_no_batch_for_the_next(nothing_left: None) -> None:
    loader = DataLoader(
        Slow(80, 0.002), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4
    )
    tuner = tune_while_training(loader, epochs=5)
    for epoch in tuner:
        if epoch.number % 2 == 0:
            next(iter(epoch))
        else:
            assert [i for _, indices in epoch for i in indices.tolist()] == list(range(80))


def test_an_epoch_that_is_left_out_does_no_harm(nothing_left: None) -> None:
    tuner = tune_while_training(DataLoader(Slow(8), batch_size=4), epochs=3)
    assert len([epoch for epoch in tuner if epoch.number != 1]) == 2
    assert tuner.settings.num_workers == 0


def test_the_sampler_is_told_the_epoch() -> None:
    sampler = DistributedSampler(Slow(16), num_replicas=2, rank=0, shuffle=True)
    loader = DataLoader(Slow(16), batch_size=4, sampler=sampler)
    orders = train(tune_while_training(loader, epochs=3))
    assert orders[0] != orders[1]
    assert sampler.epoch == 2


def test_epochs_answer_for_their_loader() -> None:
    loader = DataLoader(Slow(10), batch_size=4)
    for epoch in tune_while_training(loader, epochs=2):
        assert len(epoch) == 3
        assert epoch.batch_size == 4
        assert epoch.dataset is loader.dataset
        list(epoch)


def test_errors_of_the_training_and_of_the_data_pass_through(nothing_left: None) -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such row")

    with pytest.raises(KeyError, match="no such row"):
        train(tune_while_training(DataLoader(Broken(8)), epochs=2))
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for epoch in tune_while_training(DataLoader(Slow(8)), epochs=2) for _ in epoch]


def test_settings_that_do_not_fit_are_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataloading import training_tuner

    tight = Machine(usable_cpus=8, start_method="fork", shared_memory_free_bytes=200)
    monkeypatch.setattr(training_tuner, "inspect_machine", lambda: tight)
    tuner = tune_while_training(DataLoader(Slow(60, 0.005), batch_size=4), epochs=4)
    train(tuner)
    for _, row in tuner.trials.iterrows():
        if row["status"] == "tried" and row["num_workers"]:
            queued = row["num_workers"] * row["prefetch_factor"]
            assert queued * tuner.costs.batch_bytes <= 0.8 * 200
    assert "refused" in set(tuner.trials["status"])
    assert resource_needs(tuner.costs, tuner.settings, tight)["shared_memory_bytes"] <= 160


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"epochs": 0}, ValueError),
        ({"epochs": 2.5}, TypeError),
        ({"epochs": 3, "memory_fraction": 0}, ValueError),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"epochs|memory_fraction"):
        tune_while_training(DataLoader(Slow(8)), **options)


def test_what_cannot_be_built_again_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be built again"):
        tune_while_training([1, 2], epochs=3)


@linux_only
@pytest.mark.parametrize("ending", ["pass", "raise ValueError('in training')"])
def test_a_loop_that_leaves_its_epoch_open_lets_the_process_end(
    ending: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\n"
        "from workloads import Slow\n"
        "from helper_functions import tune_while_training\n"
        "loader = DataLoader(Slow(200), batch_size=4, num_workers=2, persistent_workers=True)\n"
        "epochs = iter(tune_while_training(loader, epochs=5))\n"
        "batches = iter(next(epochs))\n"
        f"next(batches)\n{ending}\n"
    )
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,  # it never ended
        check=False,
    )
    assert done.returncode == (0 if ending == "pass" else 1), done.stderr
