"""The GPU benchmark: its dry run on the CPU, its guards, and the table made of its figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import workloads

from benchmarks.gpu import idle, running, transfer, tuner, utilisation
from benchmarks.gpu.__main__ import main, parse
from benchmarks.gpu.plan import NotAvailable, Plan, Waiting, Work
from benchmarks.gpu.reporting import in_words, table
from benchmarks.gpu.running import (
    DRY_SECONDS,
    PARTS,
    choose_device,
    run_all,
    run_apart,
    run_here,
    run_part,
)
from dataloading.comparison import judge_pairs
from dataloading.settings import LoaderSettings

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def dry(seconds: float = 0.5) -> Plan:
    return Plan(CPU, seconds, dry_run=True)


def fake_part(monkeypatch: pytest.MonkeyPatch, name: str, measure: Any) -> None:
    """A part of its own, found as the real ones are."""
    module = ModuleType(name)
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"benchmarks.gpu.{name}", module)
    monkeypatch.setitem(PARTS, name, 0.1)


# ---- the dry run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> Any:
    """What a dry run gives, with a tuner that chooses at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dataloading.tuning", tuning_of(LoaderSettings(num_workers=0)))
        return run_all(3.0, dry_run=True)


def tuning_of(settings: LoaderSettings) -> ModuleType:
    """A tuner that chooses these settings."""

    def tune_dataloader(loader: Any, train_step: Any, **options: Any) -> Any:
        assert {"seconds", "device", "progress"} == options.keys()
        return SimpleNamespace(
            settings=settings.changed(batch_size=loader.batch_size),
            trials=pd.DataFrame({"num_workers": [0, 1]}),
            predicted=None,
            samples_per_s=123.0,
            measured=judge_pairs(pd.DataFrame({"ratio": [1.4, 1.5, 1.6] * 2})),
        )

    module = ModuleType("dataloading.tuning")
    module.tune_dataloader = tune_dataloader  # type: ignore[attr-defined]
    return module


def test_a_dry_run_says_so_and_can_be_written_as_json(results: Any) -> None:
    assert (results["device"], results["dry_run"]) == ("cpu", True)
    assert results["seconds_total"] <= DRY_SECONDS
    assert json.loads(json.dumps(results)) == results


@pytest.mark.parametrize("name", PARTS)
def test_each_part_of_a_dry_run_gives_figures(results: Any, name: str) -> None:
    outcome = results["parts"][name]
    assert "error" not in outcome
    assert outcome["figures"] or outcome["not_available"]
    assert outcome["seconds"] >= 0


def test_the_rungs_are_compared_with_pageable_copies_and_bring_the_same_data(results: Any) -> None:
    figures = results["parts"]["transfer"]["figures"]
    assert figures["same_data"]
    assert all(figures["same_data"].values())
    assert set(figures["wrong_reads"].values()) == {0}  # on a CPU nothing is still under way
    assert figures["batch_bytes"]["float32"] > 3 * figures["batch_bytes"]["uint8"]
    for dtype in ("float32", "uint8"):
        rungs = [f"{dtype}, {way}" for way in transfer.RUNGS]
        against = {
            row["after"] for row in figures["steps"] if row["before"] == f"{dtype}, pageable"
        }
        assert set(rungs) <= against
    for row in figures["steps"]:
        assert row["ratio"] > 0


def test_the_profiler_and_the_clock_see_waiting_alike(results: Any) -> None:
    loops = [row for row in results["parts"]["idle"]["figures"]["loops"] if row["steps"] > 1]
    assert len({row["step"] for row in loops}) == 2
    fed, starved = loops[0], loops[2]
    for by in ("events_idle_share", "profiler_idle_share"):
        assert 0 <= fed[by] < starved[by] <= 1
    for row in loops:
        assert row["difference"] == row["events_idle_share"] - row["profiler_idle_share"]


def test_the_real_tuner_or_the_reason_why_there_is_none() -> None:
    outcome = run_here("tuner", dry(2.0), 60.0)
    assert "error" not in outcome
    assert outcome["figures"].get("proof") or outcome["not_available"]


def test_the_command_writes_its_results_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    main(["--dry-run", "--only", "idle", "--seconds-total", "1", "--json", str(path)])
    written = json.loads(path.read_text(encoding="utf-8"))
    assert list(written["parts"]) == ["idle"]
    assert written["parts"]["idle"]["figures"]["loops"]
    printed = capsys.readouterr().out
    assert "idle: done" in printed
    assert table(written) in printed


def test_a_budget_must_be_a_positive_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).seconds_total == 420
    for seconds in ("0", "-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            parse(["--seconds-total", seconds])
    assert "above 0" in capsys.readouterr().err


# ---- guards -------------------------------------------------------------------------------------


def test_a_part_that_fails_keeps_its_figures_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(plan: Plan, figures: dict[str, Any]) -> None:
        figures["first"] = 1.0
        raise RuntimeError("CUDA error: out of memory")

    def lacks(plan: Plan, figures: dict[str, Any]) -> None:
        raise NotAvailable("no such device")

    def works(plan: Plan, figures: dict[str, Any]) -> None:
        figures["second"] = plan.seconds

    for name, measure in {"fails": fails, "lacks": lacks, "works": works}.items():
        fake_part(monkeypatch, name, measure)
    monkeypatch.setitem(PARTS, "is not there", 0.1)
    kept: list[list[str]] = []
    results = run_all(
        1.0,
        dry_run=True,
        only=("fails", "is not there", "lacks", "works"),
        keep=lambda so_far: kept.append(list(so_far["parts"])),
    )
    failed, missing, lacking, worked = results["parts"].values()
    assert failed["figures"] == {"first": 1.0}
    assert failed["error"] == "RuntimeError: CUDA error: out of memory"
    assert "ModuleNotFoundError" in missing["error"]
    assert lacking["not_available"] == "no such device"
    assert worked["figures"] == {"second": pytest.approx(0.1)}
    assert [len(names) for names in kept] == [1, 2, 3, 4]
    assert "failed: RuntimeError" in in_words("fails", failed)
    assert "not available: no such" in in_words("lacks", lacking)


def test_a_part_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(plan: Plan, figures: dict[str, Any]) -> None:
        figures["before"] = True
        time.sleep(workloads.FOREVER_S)

    fake_part(monkeypatch, "hangs", hangs)
    outcome = run_here("hangs", dry(), 0.2)
    assert outcome["figures"] == {"before": True}
    assert "ProbeTimeout: part 'hangs'" in outcome["error"]
    assert outcome["seconds"] < workloads.FOREVER_S / 2


def test_a_part_that_would_come_too_late_is_not_begun() -> None:
    outcome = run_part("transfer", dry(100.0), left_s=10.0)
    assert outcome == {"seconds": 0.0, "figures": {}, "error": "not run: the time was over"}


@pytest.mark.skipif(sys.platform == "win32", reason="parts run in this process there")
def test_parts_on_a_gpu_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_apart("idle", dry(0.5), limit_s=workloads.FOREVER_S)
    assert outcome["figures"]["loops"]
    monkeypatch.setattr(running, "KILLING_S", 0.0)
    late = run_apart("idle", dry(0.5), limit_s=0.2)  # too short even to start Python
    assert "no answer" in late["error"]
    asked: list[str] = []
    monkeypatch.setattr(running, "run_apart", lambda name, *more: asked.append(name) or {})
    run_part("idle", Plan(torch.device("cuda:0"), 1.0), left_s=60.0)
    assert asked == ["idle"]


@pytest.mark.skipif(sys.platform == "win32", reason="parts run in this process there")
def test_a_process_that_breaks_is_reported_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = (-11, "", "one line\nFatal Python error: Segmentation fault\n")
    monkeypatch.setattr(running, "run_limited", lambda command, limit_s: answer)
    outcome = run_apart("idle", dry(), limit_s=1.0)
    assert outcome["error"] == "ended with exit code -11: Fatal Python error: Segmentation fault"


def test_only_the_first_cuda_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(choose_device(dry_run=False)) == "cuda:0"
    assert str(choose_device(dry_run=True)) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert str(choose_device(dry_run=False)) == "cpu"


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [transfer.PAGEABLE, *transfer.RUNGS])
def test_each_way_delivers_the_batches_in_turn_epoch_after_epoch(way: str) -> None:
    batches = [[torch.full((2,), float(n))] for n in range(3)]
    sent = transfer.Sent(batches, CPU, way)
    for _ in range(2):
        came = [float(images[0]) for (images,) in sent]
        assert came == [n % 3 for n in range(transfer.EPOCH)]
    assert (next(iter(sent))[0] is batches[0][0]) is (way == transfer.ON_DEVICE)


def test_data_that_does_not_arrive_as_it_was_is_noticed() -> None:
    plan = dry()
    host = transfer.make_batches(plan, torch.uint8)
    wrong = [[images + 1, labels] for images, labels in host[transfer.PAGEABLE]]
    assert transfer.same_data(transfer.sources(host, plan, transfer.PINNED), host, plan)
    assert not transfer.same_data(transfer.Sent(wrong, CPU, transfer.PINNED), host, plan)


def test_numbers_that_are_read_too_early_are_counted() -> None:
    stale = iter([0.0, *[-1.0] * transfer.READS])
    count = transfer.wrong_reads(dry(), lambda numbers, plan: numbers * 0 + next(stale))
    assert count == transfer.READS - 1


@pytest.mark.parametrize(
    ("busy", "steps", "expected"),
    [
        ([(0, 10), (10, 20), (20, 30)], 3, 0.0),
        ([(0, 10), (20, 30), (40, 50)], 3, 0.5),
        ([(0, 10), (20, 60), (30, 50), (70, 80)], 4, 20 / 70),  # a copy beside a kernel
        ([(0, 4), (5, 9), (18, 22), (23, 27)], 2, 10 / 18),  # two kernels a step
        ([(0, 10)], 1, 0.0),
    ],
)
def test_idle_time_is_what_no_interval_covers(
    busy: list[tuple[float, float]], steps: int, expected: float
) -> None:
    assert idle.idle_share(busy, steps) == pytest.approx(expected)


def test_kernels_and_copies_are_the_work_of_a_gpu() -> None:
    def event(cat: str, ts: float, name: str = "x") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 5.0}

    events = [
        event("gpu_memcpy", 30.0),
        event("kernel", 10.0),
        event("cpu_op", 0.0),
        event("gpu_user_annotation", 0.0, idle.MARK),
        event("user_annotation", 2.0, idle.MARK),
        event("user_annotation", 1.0, "another"),
        {"ph": "s", "cat": "ac2g", "ts": 1.0},
    ]
    assert idle.busy_intervals(events, on_gpu=True) == [(10.0, 15.0), (30.0, 35.0)]
    assert idle.busy_intervals(events, on_gpu=False) == [(2.0, 7.0)]
    with pytest.raises(NotAvailable, match="no work"):
        idle.busy_intervals(events[2:], on_gpu=True)


def test_waiting_is_hidden_behind_a_step_that_nobody_awaits() -> None:
    assert idle.expected_idle(0.5, awaited=False) == 0
    assert idle.expected_idle(4.0, awaited=False) == 0.75
    assert idle.expected_idle(3.0, awaited=True) == 0.75


def test_a_device_is_kept_busy_for_about_the_share_that_is_asked_for() -> None:
    work = Work(dry(), 0.0005)
    little, much = (utilisation.keep_busy(work, 0.02, duty, 0.2) for duty in (0.1, 0.9))
    assert 0 < little < much <= 1


def test_a_slow_source_waits_before_each_batch() -> None:
    batches = iter(Waiting(0.01, "batch"))
    started = time.perf_counter()
    assert [next(batches) for _ in range(3)] == ["batch"] * 3
    assert time.perf_counter() - started >= 0.03


def test_a_grid_has_two_dozen_points_on_a_usual_gpu_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "usable_cpu_count", lambda: 16)
    grid = list(tuner.settings_grid(Plan(torch.device("cuda:0"), 100.0)))
    assert len(grid) == 22
    assert {s.num_workers for s in grid} == {0, 2, 4, 6, 8, 10, 12, 16}
    assert all(s.pin_memory for s in grid)
    assert [s.num_workers for s in tuner.settings_grid(dry())] == [0, 1]


def test_the_tuner_is_compared_with_the_best_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LoaderSettings(num_workers=2, prefetch_factor=4)  # not in the grid of a dry run
    monkeypatch.setitem(sys.modules, "dataloading.tuning", tuning_of(chosen))
    figures = run_here("tuner", dry(2.0), 60.0)["figures"]
    assert len(figures["grid"]) == 2
    assert figures["best"] == max(figures["grid"], key=lambda row: row["samples_per_s"])
    assert [row["num_workers"] for row in figures["tuner"]["trials"]] == [0, 1]
    assert figures["tuner"]["gain"]["verdict"] == "faster"
    assert figures["proof"]["same_settings"] is False
    assert figures["proof"]["ratio"] > 0


def test_no_tuner_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dataloading.tuning", None)
    outcome = run_here("tuner", dry(), 60.0)
    assert outcome["not_available"].startswith("the tuner cannot be imported: ")
    assert outcome["figures"] == {}


# ---- the table ----------------------------------------------------------------------------------

MADE_UP: dict[str, Any] = {
    "device": "cuda:0",
    "device_name": "A GPU",
    "dry_run": False,
    "torch": "2.11.0+cu130",
    "usable_cpus": 16,
    "parts": {
        "transfer": {
            "seconds": 90.0,
            "figures": {
                "batch_bytes": {"float32": 64 * 2**20},
                "wrong_reads": {"non-blocking, read at once": 50, "blocking": 0},
                "same_data": {"float32, pinned": True, "float32, side stream": False},
                "copies": [
                    {
                        "dtype": "float32",
                        "way": "pinned",
                        "call_s": 0.0011,
                        "arrived_s": 0.0012,
                        "bytes_per_s": 52 * 2**30,
                        "copies": 60,
                    }
                ],
                "steps": [
                    {
                        "step": "reads the loss",
                        "before": "float32, pageable",
                        "after": after,
                        "ratio": ratio,
                        "interval": interval,
                        "verdict": verdict,
                        "pairs": 10,
                    }
                    for after, ratio, interval, verdict in [
                        ("float32, pageable", 1.0, [0.99, 1.01], "no difference shown"),
                        ("float32, pinned", 1.18, [1.16, 1.2], "faster"),
                    ]
                ],
            },
        },
        "idle": {
            "seconds": 30.0,
            "figures": {
                "loops": [
                    {
                        "step": "matrix products",
                        "step_s": 0.01,
                        "wait_s": 0.03,
                        "expected_idle_share": 2 / 3,
                        "events_idle_share": 0.66,
                        "profiler_idle_share": 0.67,
                        "steps": 59,
                    }
                ]
            },
            "error": "RuntimeError: it broke | afterwards\nwith a second line",
        },
        "utilisation": {
            "seconds": 50.0,
            "figures": {
                "loads": [
                    {
                        "period_s": 1.0,
                        "busy_share": 0.25,
                        "read_share": None,
                        "source": "nvml sample buffer",
                        "readings": 1,
                        "polled_share": 0.3,
                    }
                ]
            },
        },
        "pattern": {
            "seconds": 50.0,
            "figures": {
                "loads": [
                    {
                        "load": "starved in bursts",
                        "expected": "sawtooth",
                        "found": found,
                        "right": found == "sawtooth",
                        "reason": "as it was",
                    }
                    for found in ("sawtooth", "starved")
                ]
            },
        },
        "tuner": {"seconds": 0.0, "figures": {}, "not_available": "there is none"},
    },
}

PROOF = {
    "grid": [{"num_workers": 8}] * 22,
    "best": {"num_workers": 8, "prefetch_factor": 4},
    "tuner": {"settings": "num_workers=10"},
    "proof": {"same_settings": False, "ratio": 0.99, "interval": None, "verdict": "no difference"},
}


def cells(text: str) -> dict[str, str]:
    """What was printed for each thing."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {what.removeprefix("| "): printed for what, printed, _ in rows[1:]}


def test_the_table_shows_what_was_measured() -> None:
    text = table(MADE_UP)
    assert text.startswith("On A GPU with 16 CPUs, PyTorch 2.11.0+cu130;")
    shown = cells(text)
    step = "small CNN, step reads the loss: "
    assert shown[f"{step}float32, pinned against float32, pageable"] == (
        "1.18 x (1.16 to 1.20): faster"
    )
    assert f"{step}float32, pageable against itself (control)" in shown
    assert shown["copying a float32 batch (64.0 MiB), pinned"].startswith("52.0 GiB/s")
    assert shown["copies to the host that were wrong when read: non-blocking, read at once"] == "50"
    assert shown["copies that arrive as a blocking copy does"] == "not: float32, side stream"
    idle_row = "idle GPU, matrix products of 10 ms, batches after 30 ms"
    assert shown[idle_row] == "events 66 %, profiler 67 %, expected 67 % (59 steps)"
    busy = "utilisation of a GPU busy 25 % of each 1 s"
    assert shown[busy].startswith("not available (nvml sample buffer, 1 reading); polled 30 %")
    assert shown["tuner"] == "not available: there is none"


def test_rows_that_failed_or_are_wrong_say_so() -> None:
    text = table(MADE_UP)
    assert "| idle | failed: RuntimeError: it broke \\| afterwards with a second line |" in text
    assert "sawtooth: right (as it was)" in text
    assert "starved: expected sawtooth (as it was)" in text
    for line in text.splitlines()[2:]:
        assert line.replace("\\|", "").count("|") == 4


def test_the_command_stands_in_the_first_row_only() -> None:
    lines = table(MADE_UP).splitlines()[4:]
    assert lines[0].endswith("`python -m benchmarks.gpu` |")
    assert all(line.endswith("| the same |") for line in lines[1:])


def test_the_tuner_has_a_row_with_its_proof() -> None:
    results = {**MADE_UP, "parts": {"tuner": {"seconds": 1.0, "figures": PROOF}}}
    (printed,) = cells(table(results)).values()
    assert printed == "0.99 x: no difference"
    same = {**PROOF, "proof": {"same_settings": True, "ratio": 1.0, "interval": None}}
    results = {**MADE_UP, "parts": {"tuner": {"seconds": 1.0, "figures": same}}}
    ((what, printed),) = cells(table(results)).items()
    assert printed == "the same settings"
    assert "grid of 22 points" in what


def test_a_dry_run_is_not_mistaken_for_a_measurement() -> None:
    assert "mean nothing" in table({**MADE_UP, "dry_run": True}).splitlines()[0]
