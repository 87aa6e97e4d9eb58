"""Counting, moving and copying batches of every shape."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches import (
    SampleCounter,
    arrays_in,
    batch_bytes,
    clone_batch,
    count_samples,
    count_tensors,
    move_to,
    tensors_in,
)

META = torch.device("meta")  # a second device that every machine has
Point = namedtuple("Point", "x y")
IMAGE, MASK = torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)
TARGET = {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)}


@dataclass(frozen=True)
class Frozen:
    inputs: torch.Tensor
    name: str = "batch"


@dataclass
class WithInitVar:
    inputs: torch.Tensor
    scale: InitVar[float]
    inits: int = 0

    def __post_init__(self, scale: float) -> None:
        self.inits += 1


class OwnBatch:
    """A batch class of somebody's own, which moves itself."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def to(self, device: torch.device) -> OwnBatch:
        return OwnBatch(self.inputs.to(device))


# ---- counting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4)), 4),
        ([[torch.zeros(4, 2), torch.zeros(4, 7)], torch.zeros(4)], 4),
        ({"pixels": torch.zeros(6, 3), "text": ["a"] * 6}, 6),
        ({"text": ["a", "b", "c"]}, 3),
        (["a", "b"], 2),
        (Frozen(torch.zeros(7, 2)), 7),
        (SimpleNamespace(x=torch.zeros(3, 2)), 3),
        (Point(torch.zeros(2, 2), torch.zeros(2)), 2),
        ((np.zeros((9, 3)), np.zeros(9)), 9),
        ((torch.zeros(4, 2), torch.tensor(0.5)), 4),  # a 0-d tensor says nothing
        ((torch.zeros(4, 2), 17), 4),
        ({"x": torch.zeros(12, 3), "edges": torch.zeros(2, 40)}, 12),  # a graph: its nodes
        ({}, 1),
        ([], 1),
        (None, 1),
        ("text", 1),
        (torch.zeros(0, 3), 1),
    ],
)
def test_samples_of_a_stacked_batch(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (((IMAGE,) * 4, (TARGET,) * 4), 4),  # tuple(zip(*samples)), as in torchvision's detection
        (([IMAGE] * 4, [TARGET] * 4), 4),
        (((IMAGE,) * 4, (0, 1, 2, 3)), 4),
        (((IMAGE,) * 5, torch.zeros(5)), 5),
        ((torch.zeros(5, 3, 8, 8), (TARGET,) * 5), 5),
        ([(IMAGE, 0), (IMAGE, 1), (IMAGE, 2)], 3),  # collate_fn=list
        ([(IMAGE, MASK), (IMAGE, MASK), (IMAGE, MASK)], 3),
        ([{"image": IMAGE, "label": 0}] * 6, 6),
        ([SimpleNamespace(image=IMAGE, label=0)] * 2, 2),
        ([[1, 2, 3], [4]], 2),
    ],
)
def test_samples_of_an_unstacked_batch(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


@pytest.mark.parametrize(
    ("delivered", "count"),
    [
        (IMAGE, 1),
        ((IMAGE, 3), 1),
        ((torch.zeros(10), torch.tensor(1)), 1),
        ((torch.zeros(32, 10), torch.zeros(32)), 32),  # the dataset batches by itself
    ],
)
def test_without_batching_a_shared_dimension_counts(delivered: Any, count: int) -> None:
    assert count_samples(delivered, batched=False) == count


def test_tensors_arrays_and_bytes() -> None:
    batch = {"x": torch.zeros(2, 3), "y": [np.zeros(4, dtype="u1"), "text"], "z": (1, 2)}
    assert [array.shape[0] for array in arrays_in(batch)] == [2, 4]
    assert [tensor.numel() for tensor in tensors_in(batch)] == [6]
    assert count_tensors(batch) == 1
    assert batch_bytes(batch) == 2 * 3 * 4 + 4


def test_a_batch_that_holds_itself_ends() -> None:
    loop: list[Any] = [torch.zeros(2)]
    loop.append(loop)
    assert count_samples(loop) == 2


# ---- moving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2),
        [torch.zeros(2), "text"],
        (torch.zeros(2), 3),
        Point(torch.zeros(2), None),
        {"x": torch.zeros(2)},
        OrderedDict(x=torch.zeros(2)),
        defaultdict(list, x=torch.zeros(2)),
        UserDict(x=torch.zeros(2)),
        Frozen(torch.zeros(2)),
        OwnBatch(torch.zeros(2)),
        {"deep": [Frozen(torch.zeros(2)), (OwnBatch(torch.zeros(2)),)]},
        WithInitVar(torch.zeros(2), scale=2.0),
    ],
)
def test_moving_keeps_every_type(batch: Any) -> None:
    moved = move_to(batch, META)
    assert type(moved) is type(batch)
    assert count_tensors(moved) == count_tensors(batch) > 0
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(batch))


def test_moving_a_mapping_that_cannot_be_changed_gives_a_dict() -> None:
    moved = move_to(MappingProxyType({"x": torch.zeros(2)}), META)
    assert type(moved) is dict
    assert moved["x"].device == META


def test_moving_does_not_run_a_dataclass_constructor_again() -> None:
    moved = move_to(WithInitVar(torch.zeros(2), scale=2.0), META)
    assert moved.inits == 1


@pytest.mark.parametrize("batch", [None, 3, "text", SimpleNamespace(x=torch.zeros(2))])
def test_anything_else_stays_as_it_is(batch: Any) -> None:
    assert move_to(batch, META) is batch


# ---- copying ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        (torch.ones(2), [torch.ones(3)]),
        Point(torch.ones(2), 1),
        defaultdict(list, x=torch.ones(2)),
        Frozen(torch.ones(2)),
        SimpleNamespace(x=torch.ones(2)),
    ],
)
def test_a_copy_owns_its_memory(batch: Any) -> None:
    cloned = clone_batch(batch)
    assert type(cloned) is type(batch)
    for tensor, original in zip(tensors_in(cloned), tensors_in(batch), strict=True):
        assert tensor.data_ptr() != original.data_ptr()
        assert torch.equal(tensor, original)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(1, 3)],
        [(torch.zeros(4, 3), [1, 2, 3, 4]), (torch.zeros(2, 3), [1, 2])],
        [
            {"a": np.zeros((5, 2)), "b": torch.zeros(5)},
            {"a": np.zeros((3, 2)), "b": torch.zeros(3)},
        ],
        [[torch.zeros(3, 8, 8)] * 3, [torch.zeros(3, 8, 8)] * 2],  # a list of images of 3 channels
        [torch.zeros(4, 3), (torch.zeros(2, 3), torch.zeros(2)), {"a": torch.zeros(6)}, ["a", "b"]],
        [(), (torch.zeros(2),)],
        [5, torch.tensor(3.0)],
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_counting_batch_after_batch_says_the_same_as_counting_each(
    batches: list[Any], batched: bool
) -> None:
    count = SampleCounter(batched=batched)
    for batch in batches:
        assert count(batch) == count_samples(batch, batched=batched)
