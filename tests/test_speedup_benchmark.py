"""What the speed-up benchmark prints, from made-up rates; and one tiny run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from workloads import leaves_nothing, linux_only

from benchmarks import speedup, speedup_arms
from benchmarks.speedup_rivals import Rival
from dataloading.sample_images import create_sample_images

nothing_left = pytest.fixture(leaves_nothing)
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
ARMS = [
    *("ceiling", "default", "fast", "fast, uint8"),
    *("warm cache", "warm cache, uint8", "cold cache", "cold cache, uint8"),
]


def test_ratios_are_taken_within_rounds() -> None:
    drifting = np.array([100.0, 50.0, 200.0, 80.0, 120.0])
    rates = pd.DataFrame({"default": drifting, "fast": drifting * 2, "ceiling": drifting * 2.5})
    table = speedup.summed_up(rates)
    assert table.loc["fast", "ratio"] == pytest.approx(2.0)
    assert table.loc["fast", "low"] == pytest.approx(2.0)
    assert table.loc["fast", "high"] == pytest.approx(2.0)
    assert table.loc["fast", "ceiling_share"] == pytest.approx(0.8)
    assert table.loc["default", "samples_per_s"] == 100


def test_the_interval_holds_the_median_and_widens_with_noise() -> None:
    chance = np.random.default_rng(3)
    calm, noisy = 2 + 0.01 * chance.standard_normal(9), 2 + 0.4 * chance.standard_normal(9)
    widths = []
    for ratios in (calm, noisy):
        low, high = speedup.median_interval(ratios)
        assert low <= np.median(ratios) <= high
        widths.append(high - low)
    assert widths[0] < widths[1]


def test_lines_name_what_was_promised() -> None:
    rates = pd.DataFrame({"default": [10.0, 10.0], "warm cache": [60.0, 62.0]})
    lines = speedup.in_words(speedup.summed_up(rates), 2)
    assert "promised >= 5" in lines[2]
    assert "6.10" in lines[2]
    assert "promised" not in lines[1]


def test_an_arm_that_fails_is_told_of_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(seconds: float) -> float:
        raise RuntimeError("no such package")

    arms = {"default": lambda _: 10.0, "broken": failing, "fast": lambda _: 20.0}
    rates = speedup.run_rounds(arms, 2, 0.1)
    assert list(rates.columns) == ["default", "fast"]
    assert len(rates) == 2
    assert capsys.readouterr().out.count("broken: not measured: no such package") == 1


def test_arms_run_forwards_and_backwards() -> None:
    order: list[str] = []

    def arm(name: str) -> speedup_arms.Rate:
        return lambda _: float(len(order.append(name) or order))

    speedup.run_rounds({name: arm(name) for name in ("default", "b", "c")}, 2, 0.1)
    assert order == ["default", "b", "c", "c", "b", "default"]


@linux_only
def test_a_tiny_run_measures_every_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr(speedup_arms, "BATCH_SIZE", 2)
    monkeypatch.setattr(speedup_arms, "usable_cpu_count", lambda: 2)
    monkeypatch.setattr(speedup_arms.os, "cpu_count", lambda: 2)
    root = create_sample_images(tmp_path / "photos", images=24, size=64)
    path = tmp_path / "rates.json"
    table = speedup.main([str(root), "--seconds", "0.1", "--rounds", "1", "--json", str(path)])
    assert list(table.index) == ARMS
    assert table["samples_per_s"].gt(0).all()
    assert table["ratio"].gt(0).all()
    assert table.loc["ceiling", "ceiling_share"] == 1
    assert {
        name: len(rates) for name, rates in json.loads(path.read_text()).items()
    } == dict.fromkeys(ARMS, 1)


def test_counting_leaves_the_start_out_and_takes_whole_turns() -> None:
    import torch

    seen: list[int] = []
    batches = (torch.zeros(4, 2) for _ in range(9))
    samples, elapsed_s = speedup_arms.counted(batches, 2, 60.0, lambda batch: seen.append(1))
    assert samples == (9 - 2 * speedup_arms.FIRST_TURNS) * 4
    assert len(seen) == 9
    assert elapsed_s > 0
    with pytest.raises(ValueError, match="Too few images"):
        speedup_arms.counted(iter([torch.zeros(4, 2)]), 2, 60.0, seen.append)


def test_a_rival_that_does_not_run_says_why(tmp_path: Path, nothing_left: None) -> None:
    with (
        pytest.raises(RuntimeError, match=r"does not run: .*no-such-tool"),
        Rival(Path(sys.executable), "no-such-tool", tmp_path, tmp_path / "scratch"),
    ):
        pass
