"""Iterable data sets whose workers each deliver everything: told, and never advised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats  # noqa: F401  sets warning filters of its own
import torch
import workloads
from evidence_made_up import WAITING, loop
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import helper_functions as h
from dataloading.diagnosis import diagnose
from dataloading.machine import Machine
from dataloading.sharding import gives_shares

EIGHT = Machine(usable_cpus=8)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


class Noise(IterableDataset):
    """Random samples, not shared out."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(20):
            yield random.random()


class Same(IterableDataset):
    """Samples that cannot be told apart."""

    def __iter__(self) -> Iterator[int]:
        yield from [0] * 20


class Endless(IterableDataset):
    """The same sample for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Fails(IterableDataset):
    """Cannot be read here."""

    def __iter__(self) -> Iterator[int]:
        raise OSError("no connection")
        yield


class OneShot(IterableDataset):
    """Holds a generator, which cannot be copied."""

    def __init__(self) -> None:
        self.source = (number for number in range(20))

    def __iter__(self) -> Iterator[int]:
        return self.source


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (workloads.Slow(20), True),
        (workloads.Counting(20), True),
        (workloads.Sharded(20), False),
        (Noise(), False),
        (Same(), False),
        (Endless(), None),
        (Fails(), None),
        (OneShot(), None),
    ],
)
def test_shares_are_told_by_the_first_samples_of_two_workers(data: Any, told: bool | None) -> None:
    assert gives_shares(DataLoader(data, num_workers=2)) is told
    assert get_worker_info() is None


def test_a_worker_init_fn_may_share_out_so_nothing_is_said() -> None:
    loader = DataLoader(workloads.Sharded(20), num_workers=2, worker_init_fn=workloads.give_part)
    assert gives_shares(loader) is None


def test_looking_changes_nothing_of_the_users_stream() -> None:
    data = OneShot()
    gives_shares(DataLoader(data))
    assert list(data.source) == list(range(20))


def test_copies_are_found_before_anything_starts_and_by_a_diagnosis() -> None:
    loader = DataLoader(workloads.Sharded(20), batch_size=4, num_workers=2)
    (found,) = [f for f in h.check_dataloader(loader) if f.group == "samples"]
    assert (found.code, found.severity) == ("duplicate-samples", "critical")
    assert "get_worker_info" in found.advice
    evidence = loop(workers=2, wait=0.05, shares_out=False, **WAITING)
    top = diagnose(evidence, EIGHT).top("samples")
    assert top is not None
    assert top.code == "duplicate-samples"
    assert diagnose(replace(evidence, shares_out=True), EIGHT).top("samples") is None


def test_more_than_one_worker_is_refused_where_each_would_deliver_everything() -> None:
    copies = diagnose(loop(workers=0, wait=0.162, shares_out=False, **WAITING), EIGHT)
    recommendation = h.recommend_settings(copies)
    assert recommendation.settings.num_workers <= 1
    assert any("each would deliver all samples" in why for why in recommendation.refused.values())
    assert "get_worker_info" in copies.findings[0].advice
    shared = diagnose(loop(workers=0, wait=0.162, shares_out=True, **WAITING), EIGHT)
    assert h.recommend_settings(shared).settings.num_workers > 1


def test_where_it_cannot_be_told_no_more_workers_are_advised() -> None:
    unknown = loop(workers=0, wait=0.162, is_stream=True, **WAITING)
    refusal = h.recommend_settings(diagnose(unknown, EIGHT))
    assert refusal.settings.num_workers <= 1
    assert any("check_samples" in why for why in refusal.refused.values())
    known = loop(workers=0, wait=0.162, is_stream=True, shares_out=True, **WAITING)
    assert h.recommend_settings(diagnose(known, EIGHT)).settings.num_workers > 1


def test_copies_are_no_gain_in_a_comparison() -> None:
    data = workloads.Sharded(200)
    before, after = (DataLoader(data, batch_size=4, num_workers=n) for n in (0, 2))
    result = h.compare_dataloaders(before, after, seconds=1.0, progress=False)
    assert result.verdict == "not comparable"
    shared = workloads.Counting(200)
    before, after = (DataLoader(shared, batch_size=4, num_workers=n) for n in (0, 2))
    assert h.compare_dataloaders(before, after, seconds=1.0, progress=False).ratio is not None


def test_torch_is_left_as_it_was_when_a_stream_fails() -> None:
    before = torch.random.get_rng_state()
    gives_shares(DataLoader(Fails(), num_workers=2))
    assert get_worker_info() is None
    assert torch.equal(before, torch.random.get_rng_state())
