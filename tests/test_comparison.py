"""Comparisons: the statistics on made-up pairs, the interleaving on fake and real loaders."""

import json
import math
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from benchmarks import compare
from dataloading import interleaving, paired_ratios
from dataloading.borrowing import borrowed
from dataloading.comparison import compare_dataloaders, judge_pairs, same_samples
from dataloading.interleaving import Block, LoaderBlocks, interleave
from dataloading.observing import queue_is_full
from dataloading.progress import time_bar
from dataloading.train_steps import simulated_train_step
from dataloading.watchdog import ProbeTimeout


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


def test_pairs_of_one_four_count_as_one_measurement():
    """A burst over the two blocks in the middle hits both pairs of a four alike."""
    bursts = np.repeat(noisy(1.0, 10, 0.05, 2), 2)
    alone = judge_pairs(pairs(bursts))
    together = judge_pairs(pairs(bursts).assign(four=np.repeat(np.arange(10), 2)))
    assert together.ratio == pytest.approx(alone.ratio)
    assert np.ptp(together.interval) > 1.2 * np.ptp(alone.interval)


def test_a_difference_too_small_to_matter_is_told_but_not_called_one():
    result = judge_pairs(pairs(noisy(1.003, 40, 0.001, 0)))
    assert result.interval[0] > 1
    assert result.verdict == "no difference shown"
    assert "less than 0.5 %" in result.notes[0]
    assert judge_pairs(pairs(noisy(0.99, 40, 0.001, 0))).verdict == "slower"


def test_it_shows_as_one_line_and_saves():
    result = judge_pairs(pairs(noisy(1.5, 10, 0.05, 0)))
    assert "\n" not in repr(result)
    assert "95 % interval" in repr(result)
    json.dumps(result.to_dict())


# ---- Made-up machines, whose truth is known -----------------------------------------------------

GRID_S = 0.05  # so fine is the speed of a made-up machine


class MadeUpMachine:
    """A clock and two loaders on a machine whose speed changes; after is faster by a factor."""

    def __init__(self, noise: Callable, seed: int, seconds: float, gain: float = 1.0):
        rng = np.random.default_rng(seed)
        speed = np.exp(noise(rng, int(3 * seconds / GRID_S)))
        self.work = np.concatenate([[0.0], np.cumsum(speed) * GRID_S])
        self.now = 0.0
        self.order: list[str] = []
        self.chance = np.random.default_rng(seed + 1)
        self.sides = {name: MadeUpSide(self, name, gain) for name in ("before", "after")}

    def clock(self) -> float:
        return self.now

    def done(self, at: float) -> float:
        return float(np.interp(at / GRID_S, np.arange(len(self.work)), self.work))

    def compare(self, seconds: float):
        seen = interleave(self.sides, seconds, clock=self.clock, chance=self.chance)
        return judge_pairs(pd.DataFrame(seen.rows), confidence=seen.confidence)


class MadeUpSide:
    def __init__(self, machine: MadeUpMachine, name: str, gain: float):
        self.machine, self.name, self.gain = machine, name, gain

    def block(self, seconds: float) -> Block:
        machine = self.machine
        machine.order.append(self.name)
        machine.now += 0.25 * seconds  # its queue is emptied
        done = machine.done(machine.now + seconds) - machine.done(machine.now)
        machine.now += seconds
        gain = self.gain if self.name == "after" else 1.0
        return Block(round(1e6 * gain * done), seconds, 10)


def white(rng, n):
    return rng.normal(0, 0.05, n)


def drifting(rng, n):
    return white(rng, n) - np.linspace(0, 1.0, n) + np.cumsum(rng.normal(0, 0.005, n))


def bursts(rng, n, depth=0.35, on_s=1.0):
    """Other work takes the machine for a fifth of the time."""
    logs, at = white(rng, n), 0
    while at < n:
        at += int(rng.exponential(4 * on_s) / GRID_S)
        length = 1 + int(rng.exponential(on_s) / GRID_S)
        logs[at : at + length] -= depth
        at += length
    return logs


def mild_bursts(rng, n):
    return bursts(rng, n, depth=0.05)


def outliers(rng, n):
    """Now and then a batch that takes far longer."""
    return white(rng, n) - np.where(rng.random(n) < 0.03, rng.lognormal(-1, 1, n), 0)


def rare_outliers(rng, n):
    return white(rng, n) - np.where(rng.random(n) < 0.01, rng.lognormal(-1.5, 0.8, n), 0)


def rhythm(rng, n):
    """Slow in each second and third of four blocks of 60 s: where ABBA runs after."""
    blocks = np.arange(n) * GRID_S / (1.25 * interleaving.block_seconds(60.0))
    return white(rng, n) - 0.1 * np.isin(blocks.astype(int) % 4, (1, 2))


@pytest.fixture
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same intervals, a little less exact and much sooner."""
    monkeypatch.setattr(paired_ratios, "RESAMPLES", 300)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("noise", [white, drifting, bursts, outliers, rhythm])
def test_equal_loaders_are_called_different_in_at_most_5_percent(noise):
    runs = 300
    results = [MadeUpMachine(noise, seed, 60.0).compare(60.0) for seed in range(runs)]
    wrong = np.mean([result.verdict != "no difference shown" for result in results])
    assert wrong <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / runs)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("noise", [white, drifting, mild_bursts, rare_outliers])
def test_a_true_gain_of_3_percent_is_found_within_90_seconds(noise):
    runs, found = 60, 0
    for seed in range(runs):
        machine = MadeUpMachine(noise, seed, 90.0, gain=1.03)
        found += machine.compare(90.0).verdict == "faster"
        assert machine.now <= 90.0
    assert found / runs >= 0.90


def test_a_quiet_machine_ends_early_and_a_noisy_one_uses_its_time():
    quiet = MadeUpMachine(lambda rng, n: rng.normal(0, 0.005, n), 0, 60.0)
    noisy_one = MadeUpMachine(bursts, 0, 60.0)
    first, second = quiet.compare(60.0), noisy_one.compare(60.0)
    assert quiet.now < 40 < noisy_one.now <= 60
    assert len(first.pairs) == 2 * paired_ratios.EARLY_LOOKS[0]
    assert math.log(first.interval[1] / first.interval[0]) < 2.2 * paired_ratios.PRECISE_ENOUGH
    assert len(second.pairs) > len(first.pairs)


def test_a_large_gain_need_not_be_known_to_a_percent():
    machine = MadeUpMachine(white, 0, 6.0, gain=2.0)
    assert machine.compare(6.0).verdict == "faster"
    assert machine.now < 4


def test_all_looks_together_have_five_percent():
    looks = paired_ratios.EARLY_LOOKS
    early = len(looks) * paired_ratios.LOOK_ERROR
    assert early + 1 - paired_ratios.last_confidence(1000) == pytest.approx(0.05)
    assert paired_ratios.last_confidence(looks[0] - 1) == 0.95


def test_blocks_come_in_fours_mirrored_by_chance():
    machine = MadeUpMachine(white, 0, 60.0)
    machine.compare(60.0)
    fours = {tuple(machine.order[at : at + 4]) for at in range(0, len(machine.order), 4)}
    assert fours == {interleaving.ORDER, interleaving.MIRRORED}


def test_a_run_that_is_cut_short_keeps_its_pairs():
    machine = MadeUpMachine(white, 0, 60.0)
    run = machine.sides["after"].block

    def block(seconds: float) -> Block:
        if machine.now > 30:
            raise ProbeTimeout("Waiting for a batch: stopped")
        return run(seconds)

    machine.sides["after"].block = block
    seen = interleave(machine.sides, 60.0, clock=machine.clock, chance=machine.chance)
    assert seen.notes == ["Waiting for a batch: stopped"]
    assert judge_pairs(pd.DataFrame(seen.rows), confidence=seen.confidence).interval is not None


# ---- The same samples ---------------------------------------------------------------------------


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


def test_subsets_are_told_apart_by_their_indices():
    whole = data()
    one = DataLoader(Subset(whole, range(32)), batch_size=8)
    assert same_samples(one, DataLoader(Subset(whole, range(31, -1, -1)), shuffle=True)) is True
    assert same_samples(one, DataLoader(Subset(whole, range(32, 64)), batch_size=8)) is False
    assert same_samples(one, DataLoader(Subset(data(), range(32)), batch_size=8)) is None


def test_samplers_of_ones_own_are_told_apart_by_what_they_give():
    whole = data()

    def chosen(indices):
        return DataLoader(whole, batch_size=8, sampler=SubsetRandomSampler(indices))

    assert same_samples(chosen(range(8)), chosen(range(7, -1, -1))) is True
    assert same_samples(chosen(range(8)), chosen(range(8, 16))) is False
    weighted = DataLoader(whole, sampler=WeightedRandomSampler(torch.ones(64), 64))
    assert same_samples(weighted, weighted) is None  # others in each epoch
    plain = DataLoader(whole, batch_size=8)
    batches = DataLoader(whole, batch_sampler=Batches([[i, i + 32] for i in range(32)]))
    assert same_samples(plain, batches) is True
    assert same_samples(plain, DataLoader(whole, batch_sampler=Batches([[0, 1]] * 32))) is False
    batched = BatchSampler(SequentialSampler(whole), 16, drop_last=False)
    assert same_samples(plain, DataLoader(whole, batch_sampler=batched)) is True


class Batches:
    """A batch sampler of one's own."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_looking_at_samplers_neither_hangs_nor_loads_nor_draws_from_the_users_random_numbers():
    class Endless(Batches):
        def __iter__(self):
            while True:
                yield [0]

    class Unread(TensorDataset):
        def __getitem__(self, index):
            raise AssertionError("a sample was loaded")

    whole = Unread(torch.arange(64).float())
    endless = DataLoader(whole, batch_sampler=Endless([]))
    generator = torch.Generator()
    own = RandomSampler(whole, num_samples=64, replacement=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    begun = time.monotonic()
    assert same_samples(endless, endless) is None
    assert time.monotonic() - begun < 20
    assert same_samples(DataLoader(whole, sampler=own), DataLoader(whole, sampler=own)) is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())


def test_loaders_over_different_samples_are_not_compared():
    result = compare_dataloaders(
        DataLoader(data(64), batch_size=8), DataLoader(data(32), batch_size=8), progress=False
    )
    assert result.verdict == "not comparable"
    assert result.ratio is None
    assert result.interval is None
    assert "\n" not in repr(result)


class Slept:
    """Batches that take a fixed time; a loader that is no DataLoader."""

    def __init__(self, seconds, batches=1000):
        self.seconds, self.batches = seconds, batches

    def __iter__(self):
        sleep = simulated_train_step(self.seconds)
        for _ in range(self.batches):
            sleep(None)
            yield torch.zeros(4, 1)


def test_a_loader_of_half_the_time_is_found_faster():
    result = compare_dataloaders(Slept(0.010), Slept(0.005), seconds=4, progress=False)
    assert result.verdict == "faster"
    assert 1.5 < result.ratio < 2.5
    assert result.interval[0] <= result.ratio <= result.interval[1]


def test_epochs_that_end_within_a_block_go_on_with_the_next():
    result = compare_dataloaders(
        Slept(0.002, batches=2), Slept(0.002, batches=3), seconds=1, progress=False
    )
    assert len(result.pairs) >= 1
    assert result.pairs["before_steps"].min() >= interleaving.FEWEST_BLOCK_STEPS


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


# ---- Training functions -------------------------------------------------------------------------


def trains(seconds, samples=None, calls=None):
    """A training function that takes a fixed time."""

    def train():
        if calls is not None:
            calls.append(seconds)
        time.sleep(seconds)
        return samples

    return train


def test_a_training_function_of_half_the_time_is_found_faster():
    result = compare_dataloaders(trains(0.02), trains(0.01), seconds=2, progress=False)
    assert result.verdict == "faster"
    assert 1.5 < result.ratio < 2.5
    assert "seconds a call" in result.notes[0]
    assert result.same_samples is None
    assert result.plot().get_xlabel() == "calls/s"
    json.dumps(result.to_dict())


def test_training_functions_are_compared_by_samples_where_they_count_them():
    result = compare_dataloaders(trains(0.01, 10), trains(0.01, 20), seconds=2, progress=False)
    assert result.verdict == "faster"
    assert 1.5 < result.ratio < 2.5
    assert "10 samples before and on 20 samples after" in result.notes[0]
    assert result.plot().get_xlabel() == "samples/s"


def test_a_call_is_a_block_and_the_first_is_left_out():
    calls = []
    result = compare_dataloaders(
        trains(0.05, calls=calls), trains(0.06, calls=calls), seconds=1, progress=False
    )
    assert set(result.pairs["before_steps"]) == {1}
    assert len(calls) == 2 + 2 * len(result.pairs)


def test_what_does_not_count_samples_is_not_taken_for_a_count():
    history = {"train_loss": [0.5]}
    for returned in (history, 0.5, True):
        result = compare_dataloaders(
            trains(0.002, returned), trains(0.002, 7), seconds=0.3, progress=False
        )
        assert "seconds a call" in result.notes[0]


def test_functions_that_cannot_be_compared_are_refused_in_words():
    loader = DataLoader(data(), batch_size=8)
    train = trains(0.001)

    def generator():
        yield 1

    for before, after, match in [
        (train, loader, "before is a function, and after is a DataLoader"),
        (loader, train, "after is a function, and before is a DataLoader"),
        (lambda batch: None, train, "before cannot be called without arguments"),
        (train, lambda batch: None, "after cannot be called without arguments"),
        (lambda: loader, train, "before\\(\\) returned a DataLoader"),
        (train, generator, "after\\(\\) returned a generator"),
        (train, None, "after is a NoneType"),
        (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), "Expected before to be a loader"),
    ]:
        with pytest.raises(TypeError, match=match):
            compare_dataloaders(before, after, seconds=0.2, progress=False)
    with pytest.raises(ValueError, match="train_step must be None"):
        compare_dataloaders(train, train, lambda batch: None, progress=False)
    with pytest.raises(ValueError, match="device must be None"):
        compare_dataloaders(train, train, device="cpu", progress=False)
    with pytest.raises(ValueError, match="returned 0"):
        compare_dataloaders(lambda: 0, train, seconds=0.2, progress=False)


def test_a_function_that_stops_counting_is_told():
    counts = iter([8, 8, 8])
    with pytest.raises(ValueError, match="always, or never"):
        compare_dataloaders(lambda: next(counts, None), lambda: 8, seconds=0.3, progress=False)


def test_training_functions_leave_random_states_and_their_errors_come_through():
    before = torch.get_rng_state()
    compare_dataloaders(lambda: torch.rand(1) and None, trains(0.001), seconds=0.2, progress=False)
    assert torch.equal(torch.get_rng_state(), before)

    def fails():
        raise ZeroDivisionError("in the training")

    with pytest.raises(ZeroDivisionError, match="in the training"):
        compare_dataloaders(trains(0.001), fails, seconds=0.2, progress=False)


def test_a_training_function_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dataloading.comparison.START_LIMIT_S", 0.5)
    with pytest.raises(ProbeTimeout, match="Running after"):
        compare_dataloaders(trains(0.001), lambda: workloads.doze(60), seconds=0.3, progress=False)


# ---- The benchmark ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--disturbed"]])
def test_the_benchmark_runs_and_counts(options, tmp_path, capsys):
    path = tmp_path / "outcomes.json"
    arguments = ["--runs", "2", "--seconds", "0.6", "--effect", "60", "--json", str(path)]
    children = {child.pid for child in psutil.Process().children()}
    compare.main([*arguments, *options])
    left = [child for child in psutil.Process().children() if child.pid not in children]
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]
    seen = json.loads(path.read_text(encoding="utf-8"))
    assert [len(seen["outcomes"][kind]) for kind in ("A/A", "effect")] == [2, 2]
    assert all(one["ratio"] > 1.2 for one in seen["outcomes"]["effect"])
    assert "of 2 (" in capsys.readouterr().out


@workloads.linux_only
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_block_holds_as_many_batches_of_each_worker_and_leaves_a_full_queue():
    loader = DataLoader(workloads.Slow(4000, 0.001), batch_size=4, num_workers=3)
    with (
        borrowed(loader) as lent,
        time_bar(1.0, "", enabled=False) as bar,
        LoaderBlocks(lent, "before", None, None, bar, [""]) as blocks,
    ):
        for seconds in (0.0, 0.1):
            block = blocks.block(seconds)
            assert block.steps % 3 == 0
            assert block.samples == 4 * block.steps
        deadline = time.monotonic() + 5.0  # a block of no length leaves no time for it
        while not queue_is_full(blocks.iterator) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert queue_is_full(blocks.iterator)
        blocks.step(train=False)  # and a worker begins with the next one
        assert not queue_is_full(blocks.iterator)


def test_what_has_no_queue_is_not_said_to_be_full():
    assert queue_is_full(iter([1, 2])) is None
    assert queue_is_full(iter(DataLoader(range(4)))) is None


def test_a_loader_without_a_batch_is_refused():
    full = DataLoader(range(8), batch_size=4)
    for none in (DataLoader([]), DataLoader(range(3), batch_size=4, drop_last=True)):
        with pytest.raises(ValueError, match="'after' delivers no batch"):
            compare_dataloaders(full, none, seconds=1, progress=False)
