"""The probe of a loader: what it measures, on loaders whose costs are known, and what it leaves."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader
from workloads import Slow, SlowAt, leaves_nothing, linux_only, random_state

from dataloading.batch_costs import BatchCosts
from dataloading.model import predict_dataloader
from dataloading.probing import measure_batch_costs
from dataloading.settings import LoaderSettings

nothing_left = pytest.fixture(leaves_nothing)


@linux_only
def test_a_batch_that_waits_is_measured_with_no_one_and_many_workers(nothing_left: None) -> None:
    loader = DataLoader(Slow(400, 0.005), batch_size=4, num_workers=3)
    before = random_state()
    costs = measure_batch_costs(loader, seconds=4, progress=False)
    assert random_state() == before
    assert costs.batch_size == 4
    assert costs.tensors == 2
    assert costs.batch_bytes == 4 * (3 * 4 + 8)
    assert costs.alone_s == pytest.approx(0.021, rel=0.4)
    assert costs.batch_s == pytest.approx(0.021, rel=0.4)
    assert costs.cpu_share < 0.4
    assert costs.handover_s < costs.batch_s
    assert costs.worker_bytes > 10**6
    assert costs.start_method == "fork"
    assert "a batch of 4" in repr(costs)


@linux_only
def test_what_it_found_predicts_what_comes_out(nothing_left: None) -> None:
    from dataloading.timing import measure_dataloader

    loader = DataLoader(Slow(600, 0.005), batch_size=4)
    costs = measure_batch_costs(loader, seconds=4, progress=False)
    expected = predict_dataloader(costs, LoaderSettings(num_workers=2), step_s=0.0)
    seen = measure_dataloader(
        DataLoader(Slow(600, 0.005), batch_size=4, num_workers=2), seconds=2, progress=False
    )
    assert expected.step_s == pytest.approx(seen.period_s, rel=0.3)


@linux_only
def test_uneven_batches_are_seen_as_such(nothing_left: None) -> None:
    costs = measure_batch_costs(
        DataLoader(SlowAt(400, 207, 0.05), batch_size=4), seconds=3, progress=False
    )
    assert costs.batch_factors.max() > 3
    assert costs.batch_factors.mean() == pytest.approx(1.0, abs=0.2)


@linux_only
def test_spawned_workers_are_probed_too(nothing_left: None) -> None:
    loader = DataLoader(
        Slow(200, 0.002), batch_size=4, multiprocessing_context="spawn", num_workers=1
    )
    costs = measure_batch_costs(loader, seconds=3, progress=False)
    assert costs.start_method == "spawn"
    assert costs.cycle_s is not None


def test_costs_for_another_batch_size_are_less_spread() -> None:
    costs = BatchCosts(0.1, 0.2, 0.01, 8, 800, 1, batch_factors=np.array([0.5, 1.5]))
    twice = costs.for_batch_size(32)
    assert twice.cpu_s == pytest.approx(0.4)
    assert twice.batch_bytes == 3200
    assert np.std(twice.batch_factors) == pytest.approx(0.25)
    assert costs.for_batch_size(None) is costs
