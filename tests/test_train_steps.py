"""Train steps to measure with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import workloads

from dataloading.train_steps import (
    METER,
    make_train_step,
    simulated_train_step,
    split_batch,
    state_kept,
)

BATCH = (torch.randn(8, 3), torch.zeros(8, dtype=torch.long))


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


def a_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, as plain values."""
    return {
        "model": {name: value.tolist() for name, value in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "state": {
            f"{i}.{name}": value.tolist() if isinstance(value, torch.Tensor) else value
            for i, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        },
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
    }


# ---- simulated -------------------------------------------------------------------------------


def test_a_simulated_step_only_waits() -> None:
    step = simulated_train_step(0.02)
    before, begun, cpu = METER.busy_s, time.perf_counter(), time.thread_time()
    step(None)
    elapsed = time.perf_counter() - begun
    assert 0.019 <= METER.busy_s - before <= elapsed
    assert time.thread_time() - cpu < elapsed / 2
    assert repr(step) == "simulated_train_step(0.02)"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_bad_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be a finite number of at least 0"):
        simulated_train_step(seconds)


# ---- real ------------------------------------------------------------------------------------


def test_a_step_trains() -> None:
    model = torch.nn.Linear(3, 2)
    model.eval()
    step = make_train_step(
        model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    before, weight = METER.busy_s, model.weight.clone()
    losses = [step(BATCH) for _ in range(5)]
    assert all(isinstance(loss, float) for loss in losses)
    assert losses == sorted(losses, reverse=True)
    assert not torch.equal(model.weight, weight)
    assert model.training
    assert METER.busy_s > before


def test_one_step_is_the_textbook_step() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    make_train_step(
        ours, torch.nn.functional.cross_entropy, torch.optim.SGD(ours.parameters(), lr=0.1)
    )(BATCH)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(theirs(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_everything_is_put_back(kind: Any, trained: bool) -> None:
    model = a_model()
    optimizer = kind(model.parameters(), lr=0.1)
    step = make_train_step(model, torch.nn.CrossEntropyLoss(), optimizer)
    if trained:  # gradients and momenta are there already
        step(BATCH)
        model.eval()
        model[1].train()
    before = snapshot(model, optimizer)
    parameters = list(model.parameters())
    with pytest.raises(KeyError), state_kept(step):  # noqa: PT012
        for _ in range(3):
            step(BATCH)
        assert snapshot(model, optimizer)["model"] != before["model"]
        raise KeyError("the probe failed")
    assert snapshot(model, optimizer) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))


@pytest.mark.parametrize("step", [None, print, simulated_train_step(0)])
def test_other_steps_keep_their_own_state(step: Any) -> None:
    with state_kept(step):
        pass


def test_the_device_is_that_of_the_model() -> None:
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters())
    assert make_train_step(model, torch.nn.MSELoss(), sgd).device == torch.device("cpu")
    moved = make_train_step(model, torch.nn.MSELoss(), sgd, device="meta")
    assert moved.device == torch.device("meta")
    assert model.weight.device.type == "meta"
    nothing = make_train_step(torch.nn.Identity(), torch.nn.MSELoss(), sgd)
    assert nothing.device == torch.device("cpu")


@pytest.mark.parametrize(
    "batch",
    [
        BATCH,
        list(BATCH),
        {"pixels": BATCH[0], "label": BATCH[1]},
        workloads.Pair(*BATCH),
        SimpleNamespace(inputs=BATCH[0], targets=BATCH[1]),
        (*BATCH, "file name"),
    ],
)
def test_inputs_and_targets_of_any_batch(batch: Any) -> None:
    inputs, targets = split_batch(batch)
    assert inputs is BATCH[0]
    assert targets is BATCH[1]


@pytest.mark.parametrize("batch", [torch.zeros(2), [torch.zeros(2)], "text"])
def test_a_batch_without_targets(batch: Any) -> None:
    with pytest.raises(TypeError, match="write your own train_step"):
        split_batch(batch)
