"""The model: bounds, predictions, and the timeline behind them."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from dataloading.batch_costs import BatchCosts
from dataloading.machine import Machine
from dataloading.model import predict_dataloader, simulate_timeline, step_bounds
from dataloading.settings import LoaderSettings

TWO = Machine(usable_cpus=2, start_method="fork")
WAITS = BatchCosts(0.001, 0.160, 0.001, batch_size=8, batch_bytes=10**6, tensors=1)
COMPUTES = BatchCosts(0.160, 0.0, 0.001, batch_size=8, batch_bytes=10**6, tensors=1)


def predict(costs, workers, *, step_s=0.040, machine=TWO, **more):
    settings = LoaderSettings(num_workers=workers, **more)
    return predict_dataloader(costs, settings, step_s=step_s, machine=machine)


def test_without_workers_loading_and_training_take_turns():
    assert predict(WAITS, 0).step_s == pytest.approx(0.201)
    assert predict(WAITS, 0).wait_share == pytest.approx(0.161 / 0.201)


def test_waiting_scales_beyond_the_cpus_and_computing_does_not():
    assert predict(WAITS, 4).step_s == pytest.approx(0.161 / 4, rel=0.01)
    assert predict(COMPUTES, 4).step_s == pytest.approx(0.161 / 2, rel=0.01)
    assert predict(COMPUTES, 4).limit == "cpu"
    assert predict(COMPUTES, 1).limit in ("workers", "cpu")


def test_the_train_step_is_the_floor():
    result = predict(WAITS, 8)
    assert result.step_s == pytest.approx(0.040)
    assert result.limit == "compute"
    assert result.wait_share == pytest.approx(0.0)


def test_a_train_step_that_uses_the_cpu_takes_its_share():
    costs = BatchCosts(0.1, 0, 0, 8, 1000, 1, step_cpu_s=0.1)
    assert step_bounds(costs, LoaderSettings(num_workers=2), 0.05, TWO)["cpu"] == pytest.approx(0.1)


def test_intervals_hold_the_figure():
    result = predict(COMPUTES, 2)
    for name in ("step_s", "samples_per_s", "wait_share", "memory_bytes", "open_files"):
        low, high = getattr(result, f"{name}_interval")
        assert low <= getattr(result, name) <= high
    assert result.wait_share_interval[0] >= 0


def test_another_machine_has_other_limits():
    assert predict(COMPUTES, 4, machine=Machine(usable_cpus=16)).limit == "workers"
    assert predict(COMPUTES, 8, machine=Machine(usable_cpus=16)).limit == "compute"


def test_a_batch_size_scales_the_work():
    settings = LoaderSettings(num_workers=0, batch_size=16)
    result = predict_dataloader(WAITS, settings, step_s=0.040, machine=TWO)
    assert result.step_s == pytest.approx(2 * 0.161 + 0.040)


# ---- costs that were measured with no, one and many workers ----------------------------------------

MEASURED = replace(
    COMPUTES,
    cycle_s=0.170,
    alone_s=0.150,
    fixed_s=0.010,
    handover_s=0.002,
    crowding=1.2,
    crowd=2,
    cpus=2.0,
    error_share=0.01,
)


def test_without_workers_the_time_measured_there_counts():
    assert predict(MEASURED, 0).step_s == pytest.approx(0.150 + 0.040)


def test_a_batch_that_stands_ready_costs_its_handover():
    result = predict(MEASURED, 2, step_s=0.300)
    assert result.step_s == pytest.approx(0.302)
    assert result.wait_share == pytest.approx(0.002 / 0.302, rel=0.01)


def test_busy_workers_slow_one_another_down_as_measured():
    assert predict(MEASURED, 1).step_s == pytest.approx(0.170)
    assert predict(MEASURED, 2).step_s == pytest.approx(0.170 * 1.2 / 2)
    assert predict(replace(MEASURED, crowd=0), 2).step_s == pytest.approx(0.085, rel=0.01)


def test_crowding_comes_with_the_cpus_in_use():
    many = replace(MEASURED, crowd=8, cpus=8.0)
    crowded = [many.crowding_with(n, 8) for n in (1, 2, 4, 8, 16)]
    assert crowded == sorted(crowded)
    assert crowded[0] == 1.0
    assert crowded[3] == crowded[4] == pytest.approx(1.2)


def test_waiting_workers_do_not_crowd():
    waits = replace(MEASURED, cpu_s=0.01, wait_s=0.16, crowding=1.0)
    assert predict(waits, 4).step_s == pytest.approx(0.0425, rel=0.01)


def test_more_workers_than_cpus_use_what_was_idle_as_measured():
    full = replace(MEASURED, saturated_s=0.095)
    assert predict(full, 2).step_s == pytest.approx(0.102, rel=0.01)
    assert predict(full, 3).step_s == pytest.approx(0.0985, rel=0.01)
    assert predict(full, 4).step_s == pytest.approx(0.095, rel=0.01)
    assert predict(full, 8).step_s == pytest.approx(0.095, rel=0.01)


def test_the_fixed_part_of_a_batch_does_not_grow():
    settings = LoaderSettings(num_workers=1, batch_size=16)
    result = predict_dataloader(MEASURED, settings, step_s=0.040, machine=TWO)
    assert result.step_s == pytest.approx(0.010 + 2 * 0.160)


def test_uneven_batches_cost_more_than_their_mean():
    spread = np.r_[np.full(95, 0.5), np.full(5, 10.5)]
    uneven = replace(WAITS, batch_factors=spread)
    even = predict(WAITS, 4)
    assert predict(uneven, 4).step_s > 1.2 * even.step_s
    assert predict(uneven, 4, prefetch_factor=8).step_s < predict(uneven, 4).step_s
    assert predict(uneven, 4, in_order=False).step_s < predict(uneven, 4).step_s
    assert predict(replace(WAITS, batch_factors=np.ones(50)), 4).step_s == even.step_s


def test_the_interval_is_as_wide_as_what_was_not_measured():
    def width(costs, workers, **more):
        low, high = predict(costs, workers, **more).step_s_interval
        return high / low

    known = width(MEASURED, 2)
    assert known < width(replace(MEASURED, error_share=0.05), 2)
    assert known < width(MEASURED, 4)
    assert known < width(MEASURED, 2, batch_size=64)
    assert known < width(MEASURED, 2, machine=Machine(usable_cpus=3))
    assert width(WAITS, 2) > 1.2
    assert width(MEASURED, 2, step_s=0.5) < known


def test_what_does_not_fit_is_said():
    tight = Machine(usable_cpus=2, shared_memory_free_bytes=10**6)
    assert "shared memory" in predict(WAITS, 2, machine=tight).shortage
    assert "does not fit" in repr(predict(WAITS, 2, machine=tight))
    assert predict(WAITS, 2).shortage is None


def test_a_weighed_worker_takes_the_place_of_the_usual_weight():
    weighed = replace(WAITS, worker_bytes=10**8, start_method="fork")
    assert predict(weighed, 2).memory_bytes == 2 * 10**8 + 4 * 10**6
    usual = predict(WAITS, 2, multiprocessing_context="spawn").memory_bytes
    assert predict(weighed, 2, multiprocessing_context="spawn").memory_bytes == usual


def test_bad_step_time_is_named():
    with pytest.raises(ValueError, match="step_s"):
        predict(WAITS, 0, step_s=-1)


def timeline(workers, *, costs=WAITS, step_s=0.040, **more):
    settings = LoaderSettings(
        num_workers=workers,
        **{k: more.pop(k) for k in list(more) if k in ("prefetch_factor", "in_order")},
    )
    return simulate_timeline(costs, settings, step_s=step_s, machine=TWO, **more)


@pytest.mark.parametrize("workers", [0, 1, 2, 4, 8])
def test_the_timeline_agrees_with_the_bounds(workers):
    played = timeline(workers, batches=100)
    steady = np.diff(played["step_begun_s"].to_numpy())[50:].mean()
    assert steady == pytest.approx(predict(WAITS, workers).step_s, rel=0.03)


def test_every_batch_is_delivered_once_and_workers_do_one_thing_at_a_time():
    played = timeline(3, batches=50)
    assert played["batch"].tolist() == list(range(50))
    for _, own in played.groupby("worker"):
        assert (own["begun_s"].to_numpy()[1:] >= own["ready_s"].to_numpy()[:-1] - 1e-12).all()
    assert (played["step_begun_s"] >= played["ready_s"] - 1e-12).all()


def test_a_straggler_blocks_the_line_in_order_and_not_out_of_order():
    factors = np.ones(40)
    factors[4] = 10
    ordered = timeline(4, batches=40, batch_factors=factors)
    free = timeline(4, batches=40, batch_factors=factors, in_order=False)
    assert ordered["wait_s"].max() > 1.0
    assert free["step_ended_s"].max() < ordered["step_ended_s"].max()
    assert sorted(free["batch"]) == sorted(ordered["batch"])


def test_a_13_6_four_slow_workers_deliver_in_bursts_of_four():
    costs = BatchCosts(0.0, 4.0, 0.0, batch_size=1, batch_bytes=1, tensors=1)
    played = timeline(4, costs=costs, step_s=0.05, batches=40)
    waits = played["wait_s"].to_numpy()[4:]
    assert waits[::4].min() == pytest.approx(3.8, abs=0.1)
    assert waits.reshape(-1, 4)[:, 1:].max() == pytest.approx(0.0, abs=1e-6)
    assert waits.mean() == pytest.approx(0.95, abs=0.02)


def test_a_01_2_prefetch_does_not_change_the_rate():
    costs = BatchCosts(0.0, 0.240, 0.0, batch_size=8, batch_bytes=1, tensors=1)
    for prefetch in (2, 16):
        played = timeline(2, costs=costs, batches=60, prefetch_factor=prefetch)
        assert played["wait_s"].to_numpy()[40:].mean() == pytest.approx(0.080, rel=0.1)


def test_two_hundred_batches_play_fast_enough_for_a_slider():
    timeline(4, batches=200)
    started = time.perf_counter()
    timeline(4, batches=200)
    assert time.perf_counter() - started < 0.5  # the goal is 50 ms; a busy machine gets slack


def test_a_prediction_shows_as_one_line():
    assert "\n" not in repr(predict(WAITS, 2))
    json.dumps(predict(WAITS, 2).to_dict())
