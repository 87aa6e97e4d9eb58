"""How epoch time grows with the data: the fit on made-up times, and real loaders with wide bounds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import audit_workloads as data
import numpy as np
import pytest
import scipy.stats  # noqa: F401  (at its import it adds warning filters for good)
import torch
import workloads
from torch.utils.data import DataLoader

from dataloading import scaling
from dataloading.scaling import ScalingFit, fit_growth, measure_scaling
from dataloading.watchdog import ProbeTimeout, close_iterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZES = np.array([1000, 2000, 4000, 8000, 16000])


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


# ---- The fit, on made-up times -------------------------------------------------------------------

GROWTH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda n: 1e-5 * n,
    "n log n": lambda n: 1e-6 * n * np.log2(n),
    "quadratic": lambda n: 1e-9 * n.astype(float) ** 2,
    "constant": lambda n: 0.01 + 0.0 * n,
    "linear with a fixed cost": lambda n: 0.05 + 1e-5 * n,
    "linear with a small quadratic part": lambda n: 1e-5 * n + 1e-11 * n.astype(float) ** 2,
}


def noisy(name: str, seed: int, spread: float, sizes: np.ndarray = SIZES) -> ScalingFit:
    """A fit through times of which each is off by a random factor."""
    times = GROWTH[name](sizes) * np.exp(np.random.default_rng(seed).normal(0, spread, len(sizes)))
    return fit_growth(sizes, times)


@pytest.mark.parametrize(
    ("name", "exponent"),
    [("linear", 1.0), ("quadratic", 2.0), ("constant", 0.0), ("n log n", 1.12)],
)
def test_exponents_of_exact_times(name: str, exponent: float) -> None:
    fit = fit_growth(SIZES, GROWTH[name](SIZES))
    assert fit.exponent == pytest.approx(exponent, abs=0.01)
    low, high = fit.interval
    assert low <= fit.exponent <= high


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(
    "name", ["linear", "constant", "linear with a fixed cost", "linear with a small quadratic part"]
)
def test_what_grows_in_proportion_is_rarely_called_superlinear(name: str, spread: float) -> None:
    called = [bool(noisy(name, seed, spread).findings) for seed in range(200)]
    assert np.mean(called) <= 0.05


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_quadratic_growth_is_found(spread: float) -> None:
    found = [bool(noisy("quadratic", seed, spread).findings) for seed in range(200)]
    assert np.mean(found) >= 0.95


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_n_log_n_is_at_most_a_warning(spread: float) -> None:
    """Its exponent lies a little above the threshold, but a sample costs just 1.4 times as much."""
    fits = [noisy("n log n", seed, spread) for seed in range(100)]
    severities = {f.severity for fit in fits for f in fit.findings}
    assert severities <= {"warning"}
    assert np.mean([fit.exponent for fit in fits]) == pytest.approx(1.12, abs=0.02)


@pytest.mark.parametrize("name", ["linear", "quadratic"])
def test_the_interval_covers_the_truth(name: str) -> None:
    truth = {"linear": 1.0, "quadratic": 2.0}[name]
    fits = [noisy(name, seed, 0.1) for seed in range(300)]
    covered = [fit.interval[0] <= truth <= fit.interval[1] for fit in fits]
    assert np.mean(covered) >= 0.92


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fewer_than_five_sizes_prove_nothing(count: int) -> None:
    sizes = SIZES[:count]
    fit = fit_growth(sizes, GROWTH["quadratic"](sizes))
    assert fit.exponent == pytest.approx(2.0)
    assert fit.findings == ()
    assert f"{count} sizes prove no growth" in fit.notes[-1]
    assert np.isinf(fit.interval).all() == (count == 2)


def test_the_finding_carries_its_numbers() -> None:
    fit = fit_growth(SIZES, GROWTH["quadratic"](SIZES))
    (finding,) = fit.findings
    assert (finding.code, finding.group, finding.severity) == (
        "superlinear-dataset",
        "time",
        "critical",
    )
    assert finding.evidence["exponent"] == pytest.approx(2.0)
    assert finding.evidence["sizes"] == 5
    assert finding.evidence["threshold"] == scaling.SUPERLINEAR
    assert finding.evidence["cost_factor"] == pytest.approx(16.0)
    assert finding.evidence["interval_low"] > scaling.SUPERLINEAR
    assert finding.expected_gain == pytest.approx(16.0)
    assert "16.0 times" in finding.message


def test_a_time_of_zero_does_not_break_the_fit() -> None:
    assert np.isfinite(fit_growth(SIZES, np.array([0.0, 1e-4, 2e-4, 4e-4, 8e-4])).exponent)


# ---- Real loaders --------------------------------------------------------------------------------


def over(kind: Any, workers: int = 0, **options: Any) -> Callable[[int], DataLoader]:
    return lambda size: DataLoader(kind(size), batch_size=50, num_workers=workers, **options)


def test_f21_a_search_through_all_samples_is_found() -> None:
    fit = measure_scaling(
        over(data.Searched), [250, 500, 1000, 2000, 4000], seconds=6, progress=False
    )
    assert [f.code for f in fit.findings] == ["superlinear-dataset"]
    assert 1.3 < fit.exponent < 2.5
    assert fit.sizes.tolist() == [250, 500, 1000, 2000, 4000]
    assert (np.diff(fit.seconds_per_epoch) > 0).all()


def test_a_look_up_is_not() -> None:
    fit = measure_scaling(
        over(data.Looked), [1000, 2000, 4000, 8000, 16000], seconds=6, progress=False
    )
    assert fit.findings == ()
    assert 0.6 < fit.exponent < 1.25


@pytest.mark.parametrize("batch_size", [50, 100])
def test_a_search_grows_with_workers_too(batch_size: int) -> None:
    """The smallest set gives two workers 20 batches, or 10: enough to time them, or too few."""
    fit = measure_scaling(
        lambda size: DataLoader(data.Searched(size), batch_size=batch_size, num_workers=2),
        [1000, 2000, 4000, 8000],
        seconds=3,
        progress=False,
    )
    assert fit.exponent > 1.2
    assert any("Measured without workers" in note for note in fit.notes) is (batch_size == 100)


def test_few_batches_for_many_workers_are_not_called_growth() -> None:
    """Two batches for four workers: start and end of the workers would be all that is timed."""
    pauses = dict.fromkeys([64, 128, 256, 512, 1024], 0.0)

    def make(size: int) -> DataLoader:
        return DataLoader(workloads.Slow(size, 5e-4), batch_size=32, num_workers=4)

    fit = measure_scaling(make, list(pauses), seconds=4, progress=False)
    assert fit.findings == ()
    assert 0.8 < fit.exponent < 1.2
    assert any("Measured without workers" in note for note in fit.notes)


def test_a_loader_that_cannot_be_built_again_keeps_its_workers() -> None:
    fit = measure_scaling(
        lambda size: data.OwnLoader(size, 1), [16, 32, 64], seconds=3, progress=False
    )
    assert (fit.seconds_per_epoch > 0).all()
    assert fit.findings == ()


def test_a_stream_without_a_length() -> None:
    fit = measure_scaling(
        lambda size: DataLoader(data.Copies(size), batch_size=10, num_workers=1),
        [100, 200, 400],
        seconds=3,
        progress=False,
    )
    assert (fit.seconds_per_epoch > 0).all()


def test_the_train_step_is_timed_too() -> None:
    calls: dict[int, int] = {}

    def step(batch: Any) -> None:
        time.sleep(0.002)
        calls[len(calls)] = len(batch)

    def make(size: int) -> list[list[int]]:
        return [[0] * 10] * (size // 10)

    alone = measure_scaling(make, [20, 40], seconds=0.5, progress=False)
    trained = measure_scaling(make, [20, 40], train_step=step, seconds=0.5, progress=False)
    assert (trained.seconds_per_epoch >= [0.004, 0.008]).all()
    assert (alone.seconds_per_epoch < [0.004, 0.008]).all()
    assert set(calls.values()) == {10}


# ---- Budget, progress, state ---------------------------------------------------------------------


class FakeEpochs:
    """Epochs that take seconds on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, growth: Callable[[int], float]) -> None:
        self.now = 0.0
        self.growth = growth
        self.order: list[int] = []
        monkeypatch.setattr(scaling.time, "perf_counter", lambda: self.now)

    def make(self, size: int) -> Iterator[int]:
        self.order.append(size)

        class Epoch:
            def __iter__(inner) -> Iterator[int]:
                for _ in range(10):
                    self.now += self.growth(size) / 10
                    yield 0

        return Epoch()  # type: ignore[return-value]


def test_rounds_go_up_and_down_and_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEpochs(monkeypatch, lambda size: size / 100)
    fit = measure_scaling(fake.make, [400, 100, 200], seconds=25, progress=False)
    # a round takes 7 s: three fit into 25 s, a fourth would not
    assert fake.order[-9:] == [100, 200, 400, 400, 200, 100, 100, 200, 400]
    assert fit.seconds_per_epoch == pytest.approx([1.0, 2.0, 4.0])
    assert fake.now == pytest.approx(21.0)


def test_every_size_is_measured_once_though_the_budget_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeEpochs(monkeypatch, lambda size: 1.0)
    fit = measure_scaling(fake.make, [1, 2, 3, 4, 5], seconds=2, progress=False)
    assert fake.now == pytest.approx(5.0)
    assert fit.exponent == pytest.approx(0.0)


def test_rounds_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEpochs(monkeypatch, lambda size: 0.001)
    measure_scaling(fake.make, [1, 2], seconds=1000, progress=False)
    assert fake.now == pytest.approx(0.001 * 2 * scaling.MOST_ROUNDS)


def test_an_epoch_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "OVERRUN_S", 0.3)

    def make(size: int) -> DataLoader:
        return DataLoader(workloads.Slow(size, workloads.FOREVER_S if size == 2 else 0.0))

    with pytest.raises(ProbeTimeout, match="An epoch of 2 samples"):
        measure_scaling(make, [1, 2], seconds=0.2, progress=False)


def test_what_was_measured_before_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "OVERRUN_S", 0.5)
    made: list[int] = []

    def make(size: int) -> Any:
        made.append(size)
        stuck = len(made) > 4
        return DataLoader(workloads.Slow(size, workloads.FOREVER_S if stuck else 0.001))

    fit = measure_scaling(make, [1, 2], seconds=1.0, progress=False)
    assert "stopped by the watchdog" in fit.notes[0]
    assert (fit.seconds_per_epoch > 0).all()


@pytest.mark.parametrize("progress", [True, False])
def test_the_bar_can_be_left_out(capfd: pytest.CaptureFixture[str], progress: bool) -> None:
    measure_scaling(lambda n: [[0]] * n, [10, 20], seconds=0.1, progress=progress)
    assert ("Measuring growth" in capfd.readouterr().err) is progress


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([100], "two different sizes"),
        ([100, 100], "two different sizes"),
        ([], "two different sizes"),
        ([0, 100], "at least 1"),
    ],
)
def test_sizes_that_do_not_do_are_named(sizes: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        measure_scaling(over(data.Looked), sizes, progress=False)


def test_an_empty_loader_is_named() -> None:
    with pytest.raises(ValueError, match="delivers no batch"):
        measure_scaling(lambda n: [], [1, 2], seconds=0.1, progress=False)


def test_random_states_and_persistent_workers_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        data.Augmented(64),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        generator=generator,
    )
    iterator = iter(loader)
    try:
        next(iterator)
        before = [workloads.random_state(), generator.get_state().tolist()]
        measure_scaling(lambda size: loader, [1, 2], seconds=0.5, progress=False)
        assert [workloads.random_state(), generator.get_state().tolist()] == before
        assert loader._iterator is iterator
        assert len(list(iterator)) == 31
    finally:
        close_iterator(iterator)
        loader._iterator = None


def test_an_error_in_the_train_step_comes_through_and_nothing_is_left() -> None:
    def fails(batch: Any) -> None:
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        measure_scaling(over(data.Looked, 1), [1000, 2000], train_step=fails, progress=False)


# ---- How it shows --------------------------------------------------------------------------------


def test_it_shows_as_one_line_a_table_a_dict_and_a_picture() -> None:
    fit = fit_growth(SIZES, GROWTH["quadratic"](SIZES), ["seen <twice>"])
    assert repr(fit) == (
        "ScalingFit: epoch time ~ size^2.00 (95 % interval 2.00 to 2.00, 5 sizes): "
        "grows faster than the data"
    )
    shown = fit._repr_html_()
    assert "superlinear-dataset" in shown
    assert "seen &lt;twice&gt;" in shown
    saved = json.loads(json.dumps(fit.to_dict()))
    assert saved["sizes"] == SIZES.tolist()
    assert saved["seconds_per_epoch"] == pytest.approx(GROWTH["quadratic"](SIZES).tolist())
    assert saved["findings"][0]["code"] == "superlinear-dataset"

    import matplotlib.pyplot as plt

    axes = fit.plot()
    try:
        assert "2.00" in axes.get_title(loc="left")
        assert axes.get_xscale() == axes.get_yscale() == "log"
    finally:
        plt.close(axes.figure)


def test_an_interval_that_is_not_known_is_saved_as_none() -> None:
    fit = fit_growth(SIZES[:2], GROWTH["linear"](SIZES[:2]))
    assert json.loads(json.dumps(fit.to_dict()))["interval"] == [None, None]
    assert repr(fit) == (
        "ScalingFit: epoch time ~ size^1.00 (no interval from 2 sizes): "
        "no growth beyond the data shown"
    )
