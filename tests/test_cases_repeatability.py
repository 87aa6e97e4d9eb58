"""Cases of runs that should repeat: order and values of two runs, compared apart."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import audit_workloads as data
import pytest
import torch
import workloads
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading.repeatability import StreamComparison, compare_streams
from dataloading.watchdog import random_state_kept


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def seeded(dataset: Any, workers: int = 0, seed: int = 0, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers} | options
    if workers:
        options["multiprocessing_context"] = "fork"
    return DataLoader(dataset, generator=torch.Generator().manual_seed(seed), **options)


@linux_only
def test_a_11_4_order_and_augmentation_are_judged_apart() -> None:
    dataset = data.Augmented(24)
    seen = compare_streams(seeded(dataset, 0), seeded(dataset, 2))
    assert (seen.same_samples, seen.same_order, seen.same_values) == (True, True, False)
    assert seen.verdict == "same order, augmentation may differ"
    assert repr(seen) == ("StreamComparison: same order, augmentation may differ (over 24 samples)")
    plain = data.Numbers(24)
    assert compare_streams(seeded(plain, 0), seeded(plain, 2)).verdict == "repeatable"


@linux_only
@pytest.mark.parametrize("workers", [0, 2])
def test_a_11_5_a_loader_that_repeats_is_cleared(workers: int) -> None:
    """Two trainings differ, though the loader delivers the same: the model is to blame."""
    dataset = data.Augmented(24)

    def train() -> float:
        with random_state_kept():
            loaded = sum(float(values.sum()) for values, _ in seeded(dataset, workers))
        return loaded + random.SystemRandom().random()

    assert train() != train()
    assert (
        compare_streams(seeded(dataset, workers), seeded(dataset, workers)).verdict == "repeatable"
    )
    once = seeded(dataset, workers)
    assert compare_streams(once, once).verdict == "repeatable"


def test_other_orders_and_other_samples_are_told() -> None:
    dataset = data.Numbers(24)
    other_order = compare_streams(seeded(dataset), seeded(dataset, seed=1))
    assert other_order.verdict == "same samples in another order"
    fewer = compare_streams(seeded(dataset), seeded(data.Numbers(20)))
    assert (fewer.verdict, fewer.samples) == ("other samples", 20)


def test_a_generator_of_the_data_set_without_a_seed_does_not_repeat() -> None:
    one, two = (seeded(data.OwnGenerator(24, seed=None)) for _ in range(2))
    assert compare_streams(one, two).verdict == "same order, augmentation may differ"
    assert compare_streams(one, one).verdict == "repeatable"  # its state is put back


@linux_only
def test_streams_are_compared_by_what_is_in_them() -> None:
    shared = [DataLoader(workloads.Counting(20), batch_size=4, num_workers=n) for n in (0, 2)]
    assert compare_streams(shared[1], shared[1]).verdict == "repeatable"
    assert compare_streams(*shared).verdict == "same samples in another order"


def test_samplers_without_batches_and_long_epochs() -> None:
    single = seeded(data.Numbers(24), batch_size=None)
    assert compare_streams(single, single).samples == 24
    assert compare_streams(single, single, samples=10).samples == 10


def test_nothing_is_changed() -> None:
    loader = seeded(data.Augmented(24))
    before = workloads.random_state(), loader.generator.get_state().tolist()
    compare_streams(loader, loader)
    assert before == (workloads.random_state(), loader.generator.get_state().tolist())


def test_what_is_no_loader_is_named() -> None:
    with pytest.raises(TypeError, match="Expected a DataLoader, got list"):
        compare_streams(seeded(data.Numbers(4)), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples"):
        compare_streams(seeded(data.Numbers(4)), seeded(data.Numbers(4)), samples=0)


def test_it_is_a_result() -> None:
    seen = StreamComparison(True, True, True, 8)
    assert json.loads(json.dumps(seen.to_dict()))["verdict"] == "repeatable"
    assert "<table>" in seen._repr_html_()
