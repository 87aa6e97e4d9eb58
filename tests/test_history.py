"""The history of runs: what is kept, what survives, and when a run counts as slower."""

from __future__ import annotations

import getpass
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from torch.utils.data import DataLoader

from dataloading import json_lines
from dataloading.comparison import Comparison, judge_pairs
from dataloading.diagnosis import diagnose
from dataloading.drift import find_drift
from dataloading.evidence import Evidence
from dataloading.history import OngoingRun, read_runs, record_run
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine, inspect_machine
from dataloading.plots_history import plot_history
from dataloading.regression import RunTrend, find_regression, judge_run
from dataloading.results import Result
from dataloading.run_lines import row_of
from dataloading.settings import LoaderSettings

MACHINE = Machine(usable_cpus=8, platform="Linux-6.1", torch_version="2.7.0")
SETTINGS = LoaderSettings(num_workers=2, batch_size=32, prefetch_factor=2)
PROJECT = Path(__file__).resolve().parent.parent
SCATTER = (1.0, 1.01, 0.99, 1.005, 0.995)  # of the rate between equal runs


@pytest.fixture(autouse=True)
def no_figure_left() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.jsonl"


def made_timing(rate: float = 1000.0, **changes: Any) -> LoaderTiming:
    """A run of 40 equal steps at a rate in samples/s."""
    timing = LoaderTiming(
        wait_s=np.full(40, 16 / rate),
        transfer_s=np.zeros(40),
        step_s=np.full(40, 16 / rate),
        other_s=np.zeros(40),
        samples=np.full(40, 32),
        startup_s=0.5,
        steps_per_epoch=100,
        settings=SETTINGS,
    )
    return replace(timing, **changes)


def record(result: Any, path: Path, **options: Any) -> Any:
    return record_run(result, path, **({"name": "train", "machine": MACHINE} | options))


def record_rates(path: Path, rates: Sequence[float], **options: Any) -> Any:
    """Record runs at these rates; returns the last record."""
    return [record(made_timing(rate), path, **options) for rate in rates][-1]


def usual_runs(path: Path, rate: float = 1000.0, **options: Any) -> None:
    record_rates(path, [rate * factor for factor in SCATTER], **options)


# ---- what is kept ------------------------------------------------------------------------------


def test_a_run_is_kept_and_read(path: Path) -> None:
    run = record(made_timing(), path, notes="commit 1a2b\nsecond line é")
    runs = read_runs(path)
    row = runs.iloc[0]
    assert path.read_bytes().count(b"\n") == len(runs) == 1
    assert (row["name"], row["kind"], row["notes"]) == (
        "train",
        "LoaderTiming",
        "commit 1a2b\nsecond line é",
    )
    assert row["samples_per_s"] == pytest.approx(1000)
    assert row["wait_share"] == pytest.approx(0.5)
    assert (row["steps"], row["num_workers"], row["batch_size"]) == (40, 2, 32)
    assert row["samples_per_epoch"] == 3200
    assert (row["usable_cpus"], row["torch_version"], row["accelerators"]) == (8, "2.7.0", "none")
    assert row["figures"]["startup_s"] == 0.5
    assert row["time_utc"].tzinfo is not None
    assert run.line["version"] == 1
    assert runs.attrs["notes"] == []


def test_rows_stand_in_order_of_time(path: Path) -> None:
    record_rates(path, [100, 200, 300])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[2], lines[0], lines[1]]))
    assert read_runs(path)["samples_per_s"].round().tolist() == [100, 200, 300]


def test_every_kind_of_result_is_kept(path: Path) -> None:
    after = np.array([210.0, 200.0, 190.0, 200.0, 205.0, 195.0, 200.0])
    pairs = pd.DataFrame({"after_samples_per_s": after, "ratio": after / 100, "after_steps": 10})
    diagnosis = diagnose(
        Evidence(steps=40, wait_share=0.5), MACHINE, timing=made_timing(500), profile=None
    )
    record(judge_pairs(pairs), path)
    record_run(diagnosis, path)
    record(MACHINE, path)
    record(Tuned(SETTINGS, made_timing(700)), path)
    record(Tuned(SETTINGS, judge_pairs(pairs)), path)
    record(Tuned(SETTINGS, judge_pairs(pairs[["ratio"]]), samples_per_s=300.0), path)
    runs = read_runs(path)
    assert runs["kind"].tolist() == ["Comparison", "Diagnosis", "Machine", *["Tuned"] * 3]
    assert runs["samples_per_s"].round().tolist()[:2] == [200, 500]
    assert np.isnan(runs["samples_per_s"][2])
    assert runs["samples_per_s"][3:].round().tolist() == [700, 200, 300]
    assert runs["verdict"][4] == "faster"
    assert runs["batch_size"][5] == 32
    assert runs["verdict"][0] == "faster"
    assert runs["interval_low"][0] < runs["ratio"][0] < runs["interval_high"][0]
    assert runs["steps"][0] == 70
    assert runs["usable_cpus"][1] == 8  # the machine of the diagnosis


@dataclass(frozen=True, repr=False, eq=False)
class Tuned(Result):
    """Looks like what a tuner returns."""

    settings: LoaderSettings
    measured: LoaderTiming | Comparison
    samples_per_s: float | None = None


def test_nan_and_infinity_are_never_written(path: Path) -> None:
    record(made_timing(startup_s=float("nan"), fetch_s=float("inf")), path)
    nothing = np.zeros(40)
    record(made_timing(wait_s=nothing, step_s=nothing), path)  # an infinite rate
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert np.isnan(read_runs(path)["samples_per_s"][1])


def test_nobody_is_named_in_the_file(path: Path) -> None:
    record_run(made_timing(), path, machine=inspect_machine())
    machine = json.loads(path.read_text())["machine"]
    for word in (platform.node(), getpass.getuser(), str(Path.home())):
        assert word not in machine.values()
        assert len(word) < 6 or word not in path.read_text()
    assert machine["cpu_model"]


def test_batches_of_one_size_tell_it_without_settings(path: Path) -> None:
    record(made_timing(settings=None), path)
    record(made_timing(settings=None, samples=np.arange(40) + 1), path)
    assert read_runs(path)["batch_size"].tolist() == [32, pd.NA]


# ---- the file ----------------------------------------------------------------------------------


def test_a_line_cut_off_by_a_crash_costs_nothing_else(path: Path) -> None:
    record_rates(path, [100, 200])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 3])
    with pytest.warns(UserWarning, match="line 3 is cut off"):
        assert len(read_runs(path)) == 2
    run = record(made_timing(300), path)
    assert "line 3 is cut off" in run.notes[0]
    with pytest.warns(UserWarning, match="line 3 cannot be read"):
        runs = read_runs(path)
    assert runs["samples_per_s"].round().tolist() == [100, 200, 300]
    assert path.read_bytes().startswith(whole)


def test_a_crash_in_the_very_first_line(path: Path) -> None:
    record(made_timing(), path)
    path.write_bytes(path.read_bytes()[:5])
    record(made_timing(200), path)
    with pytest.warns(UserWarning, match="line 1 cannot be read"):
        assert len(read_runs(path)) == 1


def test_a_last_line_without_its_break_counts(path: Path) -> None:
    record(made_timing(), path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().rstrip(b"\n"))  # as an editor leaves it
    record(made_timing(), path)
    assert len(read_runs(path)) == 2


def test_lines_of_a_newer_version_are_kept_and_told(path: Path) -> None:
    record(made_timing(), path)
    newer = b'{"version": 2, "samples_per_s": [1, 2]}\n'
    path.write_bytes(newer + path.read_bytes())
    record(made_timing(), path)
    with pytest.warns(UserWarning, match="line 1 of a newer version: kept in the file"):
        assert len(read_runs(path)) == 2
    assert path.read_bytes().startswith(newer)


@pytest.mark.parametrize(
    "change",
    [
        {"samples_per_s": "fast"},
        {"samples_per_s": -1},
        {"steps": 1.5},
        {"time": "yesterday"},
        {"name": 5},
        {"settings": [1]},
        {"interval": [1]},
        {"version": "1"},
        {"run": None},
    ],
)
def test_a_line_of_wrong_types_is_skipped(path: Path, change: dict[str, Any]) -> None:
    record_rates(path, [100, 200])
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | change)
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="line 1 without a readable run"):
        assert len(read_runs(path)) == 1


def test_garbage_between_lines(path: Path) -> None:
    record(made_timing(), path)
    garbage = [b"\x00" * 9, b"\xff\xfe", b"[" * 100_000, b"[1]", b'"text"', b"NaN"]
    path.write_bytes(path.read_bytes() + b"\n".join([*garbage, b""]))
    with pytest.warns(UserWarning, match=r"6 lines \(2, 3, 4, 5, 6, \.\.\.\) cannot be read"):
        assert len(read_runs(path)) == 1


def test_missing_empty_and_wrong_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no history"):
        read_runs(path)
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        record(made_timing(), tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist; make"):
        record(made_timing(), tmp_path / "missing" / "runs.jsonl")
    with pytest.raises(TypeError, match="the name of a file, got 5"):
        read_runs(5)
    path.write_text("")
    assert read_runs(path).empty
    assert find_regression(read_runs(path)).verdict == "too few runs"
    for text in ("print('hello')\n", '{"some": "settings"}\n', "a,b\n1,2\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no history"):
            record(made_timing(), path)
        assert path.read_text() == text


def test_wrong_arguments(path: Path) -> None:
    for wrong in (DataLoader([1]), {"samples_per_s": 1}, LoaderTiming, pd.DataFrame(), None):
        with pytest.raises(TypeError, match="Expected a result"):
            record(wrong, path)
    with pytest.raises(TypeError, match="name=5 must be text"):
        record(made_timing(), path, name=5)
    with pytest.raises(ValueError, match="notes is empty"):
        record(made_timing(), path, notes="")
    with pytest.raises(TypeError, match="Expected a Machine"):
        record(made_timing(), path, machine="laptop")
    assert not path.exists()


WRITER = """
import sys
from pathlib import Path
from dataloading.json_lines import append_line
for number in range(60):
    append_line(Path(sys.argv[1]), {"version": 1, "who": sys.argv[2], "n": number, "x": "x" * 5000})
"""


def test_processes_that_append_at_once_keep_lines_whole(path: Path) -> None:
    path.write_bytes(b'{"version": 1, "cut')  # and only one of them may begin a fresh line
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(who)], cwd=PROJECT)
        for who in range(4)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    lines, notes = json_lines.read_lines(path)
    assert notes == ["line 1 cannot be read as JSON: skipped"]
    assert path.read_bytes().count(b"\n") == 241
    for who in range(4):
        assert [line["n"] for _, line in lines if line["who"] == str(who)] == list(range(60))


@pytest.mark.skipif(sys.platform == "win32", reason="holds the lock as other systems do")
def test_a_lock_that_nobody_gives_back_does_not_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(json_lines, "LOCK_LIMIT_S", 0.05)
    record(made_timing(), path)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        record(made_timing(), path)
    assert len(read_runs(path)) == 2


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(json_lines, "_try_lock", refuse)
    record_rates(path, [100, 200])
    assert len(read_runs(path)) == 2


def test_the_lock_of_windows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    busy = [True]  # somebody else holds the lock at first

    def locking(file: int, mode: str, count: int) -> None:
        if mode == "lock" and busy:
            busy.pop()
            raise PermissionError
        calls.append(mode)

    monkeypatch.setitem(
        sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK="lock", LK_UNLCK="unlock")
    )
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("json_lines_windows", json_lines.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    module.append_line(path, {"version": 1})
    module.append_line(path, {"version": 1})
    assert calls == ["lock", "unlock"] * 2
    assert path.read_bytes() == b'{"version": 1}\n' * 2


def test_a_full_disk_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = json_lines.os.write
    monkeypatch.setattr(json_lines.os, "write", lambda file, line: write(file, line[:20]))
    with pytest.raises(OSError, match="Only a part of the line was written"):
        record(made_timing(), path)
    monkeypatch.undo()
    record(made_timing(), path)
    with pytest.warns(UserWarning, match="line 1 cannot be read"):
        assert len(read_runs(path)) == 1


# ---- slower, faster, or not shown --------------------------------------------------------------


def test_a_slower_run_is_flagged(path: Path) -> None:
    usual_runs(path)
    run = record(made_timing(880), path)
    assert run.is_regression
    assert run.trend.verdict == "slower"
    assert run.trend.ratio == pytest.approx(0.88, abs=0.001)
    assert run.trend.interval[0] < 0.88 < run.trend.interval[1] < 1
    assert repr(run).startswith(
        "RunRecord: train: 880 samples/s, 12 % slower than the baseline of 5 runs "
        "(0.88x, 95 % interval 0.8"
    )
    with pytest.raises(SystemExit) as stop:
        sys.exit(run.is_regression)
    assert stop.value.code == 1
    trend = find_regression(read_runs(path))
    assert (trend.verdict, trend.ratio) == ("slower", pytest.approx(run.trend.ratio))
    assert read_runs(path)["trend"].tolist()[-2:] == ["no difference shown", "slower"]
    json.dumps(run.to_dict())
    assert "baseline of 5 runs" in run._repr_html_()


def test_an_equal_and_a_faster_run(path: Path) -> None:
    usual_runs(path)
    equal = record(made_timing(985), path)
    assert equal.trend.verdict == "no difference shown"
    assert "no difference shown from the baseline of 5 runs" in equal.summary()
    assert record(made_timing(1300), path).trend.verdict == "faster"
    assert not equal.is_regression


def test_the_spread_of_the_earlier_runs_counts(path: Path) -> None:
    record_rates(path, [1000, 800, 1150, 900, 1100])
    assert record(made_timing(880), path).trend.verdict == "no difference shown"


def test_a_run_that_is_unsure_itself_is_not_flagged(path: Path) -> None:
    usual_runs(path)
    steps = np.where(np.arange(40) < 8, 0.1, 0.016)  # slow in one part of the run
    unsure = made_timing(step_s=steps)
    assert unsure.samples_per_s < 700
    sure = made_timing(unsure.samples_per_s)
    assert record(unsure, path).trend.verdict == "no difference shown"
    path.unlink()
    usual_runs(path)
    assert record(sure, path).trend.verdict == "slower"


def test_small_changes_are_not_told_unless_wanted(path: Path) -> None:
    record_rates(path, [1000, 1001, 999, 1000, 1001])
    run = record(made_timing(985), path)
    assert run.trend.verdict == "no difference shown"
    assert "smaller than 3.0 % and not told" in run.trend.notes[0]
    assert find_regression(read_runs(path), least_change=0.01).verdict == "slower"
    with pytest.raises(ValueError, match="least_change=-1"):
        find_regression(read_runs(path), least_change=-1)


def test_too_few_runs(path: Path) -> None:
    first = record(made_timing(), path)
    assert first.trend.verdict == "too few runs"
    assert "no earlier run of this name" in first.summary()
    second = record(made_timing(500), path)
    assert not second.is_regression
    assert second.trend.ratio == pytest.approx(0.5)
    assert "3 comparable earlier runs are needed" in second.summary()
    short = made_timing(**{n: np.full(2, 0.01) for n in ("wait_s", "transfer_s", "step_s")})
    short = replace(short, other_s=np.zeros(2), samples=np.full(2, 32))
    assert "2 steady steps, 3 are needed" in record(short, path).summary()


@pytest.mark.parametrize(
    ("machine", "settings", "reason"),
    [
        (replace(MACHINE, usable_cpus=4), SETTINGS, "usable CPUs 4, before 8"),
        (replace(MACHINE, torch_version="2.8.0"), SETTINGS, "torch 2.8.0, before 2.7.0"),
        (replace(MACHINE, platform="Windows-11"), SETTINGS, "operating system Windows"),
        (MACHINE, replace(SETTINGS, batch_size=64), "batch size 64, before 32"),
    ],
)
def test_other_machines_batches_and_versions_are_not_comparable(
    path: Path, machine: Machine, settings: LoaderSettings, reason: str
) -> None:
    usual_runs(path)
    run = record(made_timing(500, settings=settings), path, machine=machine)
    assert run.trend.verdict == "not comparable"
    assert reason in run.summary()
    assert not run.is_regression
    # unless there are comparable ones further back
    back = record(made_timing(880), path)
    assert back.trend.verdict == "slower"
    assert f"1 run left out, such as: {reason.split()[0]}" in back.trend.notes[0]


def test_the_kernel_of_the_system_may_change(path: Path) -> None:
    usual_runs(path)
    newer = replace(MACHINE, platform="Linux-6.8")
    assert record(made_timing(880), path, machine=newer).is_regression


def test_a_grown_data_set_is_no_regression_and_is_told(path: Path) -> None:
    usual_runs(path)
    run = record(made_timing(1000, steps_per_epoch=250), path)
    assert run.trend.verdict == "no difference shown"
    assert "an epoch has 8,000 samples, in the baseline 3,200" in run.trend.notes[0]
    assert "per second" in run.trend.notes[0]


def test_other_settings_are_compared_and_told(path: Path) -> None:
    usual_runs(path)
    run = record(made_timing(700, settings=replace(SETTINGS, num_workers=1)), path)
    assert run.is_regression
    assert run.trend.notes == ("num_workers is 1, in the baseline 2",)


def test_other_names_and_kinds_are_left_alone(path: Path) -> None:
    usual_runs(path)
    assert record(made_timing(500), path, name="test").trend.verdict == "too few runs"
    assert record(made_timing(500), path, name=None).trend.verdict == "too few runs"
    assert record(Tuned(SETTINGS, made_timing(500)), path).trend.verdict == "not comparable"


def test_a_run_without_a_rate(path: Path) -> None:
    run = record(MACHINE, path)
    assert "the run has no rate in samples/s" in run.summary()
    assert not run.is_regression


# ---- the baseline ------------------------------------------------------------------------------


def test_a_regression_stays_flagged_until_it_is_mended(path: Path) -> None:
    usual_runs(path)
    assert all(record(made_timing(900 * f), path).is_regression for f in (*SCATTER, *SCATTER))
    assert record(made_timing(1000), path).trend.verdict == "no difference shown"
    assert record(made_timing(900), path).is_regression
    assert record_rates(path, [900], name="train, new decoder").trend.verdict == "too few runs"


def test_an_improvement_becomes_the_new_normal(path: Path) -> None:
    usual_runs(path)
    usual_runs(path, 1500)
    usual_runs(path, 1500)
    assert record(made_timing(1300), path).is_regression


def test_a_single_slow_run_is_part_of_the_spread(path: Path) -> None:
    usual_runs(path)
    assert record(made_timing(800), path).is_regression
    next_run = record(made_timing(1000), path)
    assert next_run.trend.compared["in_baseline"].sum() == 5  # not known yet whether it stays slow
    later = record(made_timing(1000), path)
    assert later.trend.compared["in_baseline"].sum() == 7


def test_a_mishap_does_not_hide_later_regressions(path: Path) -> None:
    record_rates(path, [1000 * f for f in (*SCATTER, 0.5, *SCATTER)])
    run = record(made_timing(900), path)
    assert run.is_regression
    assert run.trend.compared["in_baseline"].sum() == 9


def test_a_baseline_of_ones_own(path: Path) -> None:
    usual_runs(path, 1200, name="release")
    usual_runs(path)
    run = record(made_timing(1000), path, baseline="release")
    assert run.is_regression
    assert run.trend.ratio == pytest.approx(1000 / 1200, abs=0.001)
    runs = read_runs(path)
    assert find_regression(runs).verdict == "no difference shown"
    for baseline in ("release", runs[runs["name"] == "release"], 0):
        trend = find_regression(runs, baseline=baseline)
        assert trend.verdict == "slower", baseline
        assert trend.ratio == pytest.approx(1000 / 1200, abs=0.001)
    assert find_regression(runs, baseline=7).verdict == "no difference shown"


def test_a_baseline_that_cannot_be(path: Path) -> None:
    usual_runs(path)
    runs = read_runs(path)
    with pytest.raises(ValueError, match=r"names no run; the names are \['train'\]"):
        find_regression(runs, baseline="tset")
    with pytest.raises(ValueError, match="no index of the 5 runs, from 0 to 4"):
        find_regression(runs, baseline=9)
    with pytest.raises(TypeError, match="a row's index, a name or rows"):
        find_regression(runs, baseline=0.5)
    with pytest.raises(TypeError, match="the table that read_runs"):
        find_regression(path)
    with pytest.raises(TypeError, match="runs lacks"):
        find_regression(runs[["name"]])
    with pytest.raises(ValueError, match="names no run"):
        record(made_timing(), path, baseline="tset")
    assert len(read_runs(path)) == 5
    other = record(made_timing(settings=replace(SETTINGS, batch_size=8)), path, baseline=0)
    assert "batch size 8, before 32" in other.summary()


# ---- error rates, by simulation ----------------------------------------------------------------


def made_row(rate: float, run: int, trend: str = "no difference shown") -> dict[str, Any]:
    line = {"run": str(run), "time": f"2025-01-01T00:{run // 60:02}:{run % 60:02}", "kind": "x"}
    return row_of(line | {"samples_per_s": rate, "trend": trend, "rate_error": 0.005})


def judged(rates: Sequence[float]) -> list[str]:
    """Verdicts over a history, each run judged as it is recorded."""
    rows: list[dict[str, Any]] = []
    for number, rate in enumerate(rates):
        row = made_row(rate, number)
        rows.append(row | {"trend": judge_run(row, rows, least_change=0.0).verdict})
    return [row["trend"] for row in rows]


@pytest.mark.parametrize("earlier", [3, 5, 10])
def test_equal_runs_are_called_different_in_at_most_5_percent(earlier: int) -> None:
    rng = np.random.default_rng(earlier)
    called = []
    for _ in range(300):
        *rates, last = np.exp(0.03 * rng.standard_normal(earlier + 1)) * 1000
        rows = [made_row(rate, number) for number, rate in enumerate(rates)]
        called.append(judge_run(made_row(last, 99), rows, least_change=0.0).verdict)
    different = np.mean([verdict in ("slower", "faster") for verdict in called])
    assert different <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)  # twice the error of 300 tries


def test_a_history_of_equal_runs_alarms_in_at_most_5_percent() -> None:
    rng = np.random.default_rng(0)
    called = [v for _ in range(30) for v in judged(np.exp(0.03 * rng.standard_normal(20)) * 1000)]
    known = [verdict for verdict in called if verdict != "too few runs"]
    assert np.mean([verdict == "slower" for verdict in known]) <= 0.05


def test_a_loss_of_10_percent_is_found() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        rates = np.exp(0.02 * rng.standard_normal(11)) * 1000
        rates[-1] *= 0.9
        found.append(judged(rates)[-1] == "slower")
    assert np.mean(found) >= 0.9


# ---- slow trends -------------------------------------------------------------------------------


def test_a_20_5_epochs_that_get_slower_are_a_trend() -> None:
    times = find_drift([60, 66, 73, 80], each="epoch")
    assert times.verdict == "rising"
    assert times.change_share == pytest.approx(0.10, abs=0.005)
    assert "+10.1 % per epoch" in times.summary()
    assert find_drift([50, 65, 80, 92], each="epoch").verdict == "rising"  # memory in use
    for part in ([60], [60, 66], [60, 66, 73]):  # no verdict from a single epoch, nor two or three
        assert find_drift(part, each="epoch").verdict == "too few values"


def test_scatter_is_no_trend() -> None:
    assert find_drift([60, 73, 66, 62, 70]).verdict == "none shown"
    assert find_drift([100, 100.1, 100.2, 100.3, 100.4]).verdict == "none shown"  # 0.4 % in all
    assert find_drift([100] * 8).verdict == "none shown"
    rng = np.random.default_rng(0)
    shown = [find_drift(rng.uniform(90, 110, 12)).verdict != "none shown" for _ in range(200)]
    assert np.mean(shown) <= 0.08


def test_an_outlier_makes_no_trend_and_hides_none() -> None:
    falling = 1000 * 0.97 ** np.arange(12)
    falling[5] *= 2
    assert find_drift(falling).verdict == "falling"
    assert find_drift([100, 101, 99, 100, 101, 99, 500]).verdict == "none shown"
    with pytest.raises(ValueError, match="finite numbers above 0"):
        find_drift([1, 2, 0])


def test_a_slow_drift_shows_though_no_run_is_flagged(path: Path) -> None:
    scatter = np.array([*SCATTER, *SCATTER, *SCATTER])
    rates = 1000 * 0.99 ** np.arange(15) * (1 + 2 * (scatter - 1))
    run = record_rates(path, rates)
    assert run.is_drifting
    assert "drift: falling: -1." in run.summary()
    assert record_rates(path, 1000 * scatter, name="steady").is_drifting is False


# ---- the picture -------------------------------------------------------------------------------


def test_the_picture_shows_runs_and_verdict(path: Path) -> None:
    usual_runs(path)
    record(made_timing(500, settings=replace(SETTINGS, batch_size=8)), path)  # not in the picture
    ax = record(made_timing(880), path).plot()
    assert ax.get_title(loc="left") == "Latest run: 0.88 times the rate of the baseline, slower"
    assert ax.get_ylabel() == "samples/s"
    points = np.concatenate(
        [dots.get_offsets() for dots in ax.collections if len(dots.get_offsets())]
    )
    assert sorted(points[:, 1].round().tolist()) == [880, 990, 995, 1000, 1005, 1010]
    assert {"baseline", "latest", "expected (95 %)"} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }


def test_a_picture_without_runs_says_why(path: Path) -> None:
    figure, ax = plt.subplots()
    trend = record(MACHINE, path).trend
    assert isinstance(trend, RunTrend)
    assert plot_history(trend, ax=ax) is ax
    assert "no rate in samples/s" in ax.texts[0].get_text()
    assert len(figure.axes) == 1
    record_rates(path, [100, 100])  # a ratio, but no interval
    assert find_regression(read_runs(path)).plot().get_title(loc="left").endswith("too few runs")


# ---- runs that go on ---------------------------------------------------------------------------


def test_a_run_that_goes_on_is_one_row_and_compared_epoch_by_epoch(path: Path) -> None:
    for scatter in SCATTER:  # the first epoch is slower in every run
        run = OngoingRun(path, "train")
        for epochs, rate in enumerate((600, 900, 1000), start=1):
            record_of = run.record(made_timing(rate * scatter), epochs)
            assert not record_of.is_regression
    runs = read_runs(path)
    assert len(runs) == 5
    assert runs["samples_per_s"].round().tolist() == [1000, 1010, 990, 1005, 995]
    assert runs["epochs"].tolist() == [3] * 5
    assert path.read_bytes().count(b"\n") == 15
    slow = OngoingRun(path, "train")
    assert slow.record(made_timing(500), 1).is_regression
