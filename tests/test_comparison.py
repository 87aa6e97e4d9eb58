"""Comparisons: the statistics on made-up pairs, the interleaving on fake and real loaders."""

import json

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from dataloading import comparison
from dataloading.comparison import compare_dataloaders, judge_pairs, same_samples
from dataloading.train_steps import simulated_train_step


def pairs(ratios) -> pd.DataFrame:
    ratios = np.asarray(ratios, dtype=float)
    return pd.DataFrame(
        {
            "before_samples_per_s": 100.0,
            "after_samples_per_s": 100.0 * ratios,
            "ratio": ratios,
            "before_steps": 20,
            "after_steps": 20,
        }
    )


def noisy(true_ratio, count, spread, seed):
    return true_ratio * np.exp(np.random.default_rng(seed).normal(0, spread, count))


def test_a_clear_gain_is_called_faster_and_its_reverse_slower():
    assert judge_pairs(pairs(noisy(1.5, 10, 0.05, 0))).verdict == "faster"
    assert judge_pairs(pairs(noisy(1 / 1.5, 10, 0.05, 0))).verdict == "slower"


def test_equal_loaders_are_rarely_called_different():
    called = [
        judge_pairs(pairs(noisy(1.0, 10, 0.05, seed))).verdict != "no difference shown"
        for seed in range(400)
    ]
    assert np.mean(called) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)


def test_the_interval_covers_the_truth():
    covered = []
    for seed in range(300):
        low, high = judge_pairs(pairs(noisy(1.2, 10, 0.05, seed))).interval
        covered.append(low <= 1.2 <= high)
    assert np.mean(covered) >= 0.92


def test_few_pairs_prove_nothing_and_say_so():
    result = judge_pairs(pairs([2.0, 2.1, 2.0]))
    assert result.verdict == "no difference shown"
    assert result.interval is None  # an interval of three pairs would mean nothing
    assert "3 of the 6 pairs" in repr(result)
    assert "3 pairs fit into the time" in result.notes[0]


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [1.0, float("nan")]])
def test_pairs_without_a_ratio_are_refused(ratios):
    with pytest.raises(ValueError, match="positive"):
        judge_pairs(pairs(ratios))


def test_pairs_without_spread_give_a_point():
    assert judge_pairs(pairs([1.25] * 8)).interval == pytest.approx((1.25, 1.25))


def test_it_shows_as_one_line_and_saves():
    result = judge_pairs(pairs(noisy(1.5, 10, 0.05, 0)))
    assert "\n" not in repr(result)
    assert "95 % interval" in repr(result)
    json.dumps(result.to_dict())


def data(rows=64):
    return TensorDataset(torch.arange(rows).float())


def test_same_samples_is_true_false_or_unknown():
    whole = data()
    one, two = DataLoader(whole, batch_size=8), DataLoader(whole, batch_size=8, shuffle=True)
    assert same_samples(one, two) is True
    assert same_samples(one, DataLoader(Subset(whole, range(32)), batch_size=8)) is False
    assert same_samples(one, DataLoader(data(), batch_size=8)) is None
    assert same_samples([1, 2], one) is None
    replacing = torch.utils.data.RandomSampler(whole, replacement=True)
    assert same_samples(one, DataLoader(whole, batch_size=8, sampler=replacing)) is None


def test_loaders_over_different_samples_are_not_compared():
    result = compare_dataloaders(
        DataLoader(data(64), batch_size=8), DataLoader(data(32), batch_size=8), progress=False
    )
    assert result.verdict == "not comparable"
    assert result.ratio is None
    assert result.interval is None
    assert "\n" not in repr(result)


class Slept:
    """Batches that take a fixed time, counted; a loader that is no DataLoader."""

    def __init__(self, seconds, batches=1000, log=None, name=""):
        self.seconds, self.batches = seconds, batches
        self.log, self.name = log, name

    def __iter__(self):
        sleep = simulated_train_step(self.seconds)
        for _ in range(self.batches):
            sleep(None)
            if self.log is not None:
                self.log.append(self.name)
            yield torch.zeros(4, 1)


def test_a_loader_of_half_the_time_is_found_faster():
    result = compare_dataloaders(Slept(0.010), Slept(0.005), seconds=4, progress=False)
    assert result.verdict == "faster"
    assert 1.5 < result.ratio < 2.5
    assert result.interval[0] <= result.ratio <= result.interval[1]


def test_blocks_come_in_abba_order():
    log = []
    compare_dataloaders(
        Slept(0.002, log=log, name="before"),
        Slept(0.002, log=log, name="after"),
        seconds=1,
        progress=False,
    )
    turns = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
    # before and after warm up in turn; then the order is A BB A A BB A ..., neighbours merged
    assert turns[:6] == ["before", "after", "before", "after", "before", "after"]


def test_epochs_that_end_within_a_block_go_on_with_the_next():
    result = compare_dataloaders(
        Slept(0.002, batches=2), Slept(0.002, batches=3), seconds=1, progress=False
    )
    assert len(result.pairs) >= 1
    assert result.pairs["before_steps"].min() >= comparison.FEWEST_BLOCK_STEPS


def test_a_loader_that_is_empty_is_named():
    with pytest.raises(ValueError, match="'after'"):
        compare_dataloaders(Slept(0.001), Slept(0.001, batches=0), seconds=1, progress=False)


def test_a_one_shot_iterator_is_refused_in_words():
    once = iter([torch.zeros(4)] * 5)
    with pytest.raises(ValueError, match="again and again"):
        compare_dataloaders(Slept(0.001), once, seconds=1, progress=False)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_bad_budget_is_named(seconds):
    with pytest.raises(ValueError, match="seconds"):
        compare_dataloaders([1], [1], seconds=seconds)


def test_workers_end_and_random_states_stay():
    loader = DataLoader(data(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    before = torch.get_rng_state()
    children = {child.pid for child in psutil.Process().children()}
    compare_dataloaders(loader, loader, seconds=1.5, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert {child.pid for child in psutil.Process().children()} <= children
    assert loader._iterator is None


def test_an_error_in_the_train_step_comes_through_and_nothing_is_left():
    def fails(batch):
        raise ZeroDivisionError("in the step")

    loader = DataLoader(data(), batch_size=8, num_workers=1)
    children = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ZeroDivisionError, match="in the step"):
        compare_dataloaders(loader, loader, fails, seconds=1, progress=False)
    assert {child.pid for child in psutil.Process().children()} <= children
