"""What the benchmarks of model and tuner print, from made-up outcomes; and one tiny run of each."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest
from workloads import leaves_nothing, linux_only

from benchmarks import model, tuner
from benchmarks.workloads import WORKLOADS, Sample, Workload
from dataloading.settings import LoaderSettings
from dataloading.trials import Trial

nothing_left = pytest.fixture(leaves_nothing)
TINY = Workload("waiting", lambda _: Sample(wait_s=0.001), step_s=0.002, batch_size=4)


def cells(errors: list[float], *, is_real: bool = False, inside: bool = True) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "workload": "photos" if is_real else "waiting",
            "is_real": is_real,
            "error": errors,
            "inside": inside,
            "memory_error": [0.05] * len(errors),
        }
    )


def test_errors_of_the_model_are_summed_up_by_kind() -> None:
    table = pd.concat([cells([0.01, -0.02, 0.03]), cells([0.2, -0.1], is_real=True, inside=False)])
    synthetic, photos, memory = model.in_words(table)
    assert "3 cells, median error 2.0%" in synthetic
    assert "intervals hold 100%" in synthetic
    assert "2 cells, median error 15.0%" in photos
    assert "intervals hold 0%" in photos
    assert "100% within 10%" in memory
    assert model.by_workload(table).loc["photos", "bias"] == pytest.approx(0.05)


def test_a_hundred_cells_are_measured() -> None:
    assert sum(len(model.settings_of(workload)) for workload in WORKLOADS) >= 100


def test_choices_are_compared_round_by_round() -> None:
    first = Trial(LoaderSettings(num_workers=2), rates=[100.0, 50.0, 100.0], status="tried")
    other = Trial(LoaderSettings(num_workers=4), rates=[90.0, 45.0, 90.0], status="tried")
    assert tuner.ratio(other, first) == pytest.approx(0.9)
    assert tuner.ratio(None, first) is None
    assert tuner.ratio(Trial(LoaderSettings(), status="failed"), first) is None


def test_a_tuner_that_chooses_badly_is_printed_as_such() -> None:
    outcome = {"ratio": {"tuner": 0.6, "4": 1.0}, "tuner_s": 50.0}
    lines = tuner.in_words([outcome, {**outcome, "ratio": {"tuner": 1.0, "4": None}}])
    assert "tuner: 80% of the grid's best on average, 60% at worst, 1 of 2" in lines[0]
    assert "1 of 1 workloads" in lines[1]


@linux_only
def test_a_tiny_run_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr(model, "PROBE_S", 1.0)
    monkeypatch.setattr(model, "WORKERS", (0, 1))
    monkeypatch.setattr(model, "BATCH_FACTORS", (1,))
    table = model.run(TINY, tmp_path, 0.2, random.Random(0))
    assert len(table) == 3
    assert table["measured_s"].gt(0).all()
    assert table["memory_error"].notna().sum() == 2


@linux_only
def test_a_tiny_run_of_the_tuner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    for name, value in (("WORKERS", (0, 1)), ("FINAL_ROUNDS", 2), ("FINAL_BLOCK_S", 0.1)):
        monkeypatch.setattr(tuner, name, value)
    monkeypatch.setattr(tuner, "GRID_BLOCK_S", 0.1)
    monkeypatch.setattr(tuner, "rules", lambda batch_size: {"4": tuner.setting(1)})
    outcome = tuner.run(TINY, tmp_path, 2.0)
    assert set(outcome["ratio"]) == {"tuner", "4"}
    assert outcome["ratio"]["tuner"] > 0
    assert "samples/s" in tuner.line(outcome)
