"""The scoring of the fault benchmark, with made-up outcomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.faults.__main__ import BY_NAME, QUICK, line, parse
from benchmarks.faults.cases import CASES
from benchmarks.faults.figure import figure_png
from benchmarks.faults.rivals import RIVALS, read_as
from benchmarks.faults.running import run_limited
from benchmarks.faults.scoring import (
    Advice,
    Outcome,
    confusion,
    in_words,
    summary,
)
from dataloading.codes import CODES

FAST = Advice("num_workers=4", 1.5, (1.4, 1.6))
SAME = Advice("num_workers=4", 0.99, (0.95, 1.03))
LOSS = Advice("num_workers=4", 0.9, (0.85, 0.95))


def fault(*named: str, right: str = "cpu-bound", severity: str = "warning", **more: Any) -> Outcome:
    pairs = tuple((code, severity) for code in named)
    return Outcome("F", 0, (right,), named=pairs, seconds=10.0, **more)


def control(*named: tuple[str, str], right: tuple[str, ...] = ()) -> Outcome:
    return Outcome("K", 0, right, control=True, named=named, seconds=20.0)


RUNS = [
    fault("cpu-bound", advice=FAST),
    fault("transfer", "cpu-bound", advice=SAME),
    fault("worker-memory-leak", right="worker-memory-leak", advice=LOSS),
    fault(right="duplicate-samples"),
    fault(error="no answer within 120 s"),
    fault(cannot_run="no page cache to empty"),
    control(("compute", "info"), right=("compute",)),
    control(("cpu-bound", "warning")),
]


# ---- one outcome ---------------------------------------------------------------------------------


def test_the_right_code_must_be_first_in_its_group() -> None:
    assert fault("cpu-bound").is_right
    assert fault("prefetch-memory", "cpu-bound").is_right  # of another group
    assert not fault("transfer", "cpu-bound").is_right
    assert not fault("prefetch-memory").is_right
    assert not fault().is_right


def test_any_of_several_right_codes_will_do() -> None:
    either = Outcome("F", 0, ("compute", "interference"), named=(("interference", "info"),))
    assert either.is_right


def test_a_failed_run_is_wrong_and_one_that_cannot_run_does_not_count() -> None:
    assert not fault("cpu-bound", error="killed").is_right
    assert fault("cpu-bound", error="killed").counts
    assert not fault(cannot_run="no unshare").counts


def test_a_control_may_have_remarks_but_no_warning() -> None:
    assert control().is_right
    assert control(("interference", "info")).is_right
    assert not control(("transfer", "warning")).is_right
    assert control(("transfer", "warning"), right=("transfer",)).is_right
    assert control(("transfer", "critical")).alarms == ("transfer",)
    assert fault("transfer").alarms == ()


def test_a_control_with_a_right_code_must_have_it() -> None:
    assert control(("compute", "info"), right=("compute",)).is_right
    assert not control(right=("compute",)).is_right
    leaking = control(("compute", "info"), ("main-memory-leak", "critical"), right=("compute",))
    assert not leaking.is_right


def test_a_difference_between_equal_loaders_is_an_alarm() -> None:
    different = control(("faster", "warning"))
    assert not different.is_right
    assert different.alarms == ("faster",)
    assert different.first == "faster"


def test_an_outcome_survives_json() -> None:
    for one in RUNS:
        assert Outcome.from_dict(json.loads(json.dumps(one.to_dict()))) == one


# ---- sums ----------------------------------------------------------------------------------------


def test_the_summary_counts_what_ran() -> None:
    figures = summary(RUNS)
    assert figures["faults"] == {"yes": 2, "of": 5, "share": 0.4}
    assert figures["by_group"]["time"] == {"yes": 1, "of": 3, "share": 1 / 3}
    assert figures["by_group"]["memory"]["yes"] == 1
    assert figures["by_group"]["samples"]["yes"] == 0
    assert figures["controls"] == {"yes": 1, "of": 2, "share": 0.5}
    assert figures["false_alarms"] == {"yes": 1, "of": 2, "share": 0.5}
    assert figures["failed"] == ["F seed 0: no answer within 120 s"]


def test_advice_is_faster_the_same_or_a_loss() -> None:
    assert (FAST.is_faster, FAST.costs) == (True, False)
    assert (SAME.is_faster, SAME.costs) == (False, False)
    assert (LOSS.is_faster, LOSS.costs) == (False, True)
    unknown = Advice("num_workers=4", 1.2, None)
    assert (unknown.is_faster, unknown.costs) == (False, False)
    assert summary(RUNS)["advice"] == {
        "tried": 3,
        "faster": 1,
        "costs_over_2_percent": 1,
        "not_costing_share": 2 / 3,
    }


def test_the_median_leaves_failed_runs_out() -> None:
    assert summary(RUNS)["median_s"] == 10.0
    assert summary([fault(error="killed")])["median_s"] is None


def test_nothing_ran() -> None:
    figures = summary([])
    assert figures["faults"]["share"] is None
    assert in_words(figures) == [
        "right cause first: none ran of the faults",
        "controls judged right: none ran",
        "false alarms: none ran of the controls",
    ]


def test_confusion_has_the_right_code_in_rows_and_the_named_one_in_columns() -> None:
    table = confusion(RUNS)
    assert table.loc["cpu-bound"].to_dict() == {
        "cpu-bound": 1,
        "worker-memory-leak": 0,
        "compute": 0,
        "failed": 1,
        "nothing": 0,
        "transfer": 1,
    }
    assert table.loc["duplicate-samples", "nothing"] == 1
    assert table.loc["nothing", "cpu-bound"] == 1
    assert int(table.to_numpy().sum()) == sum(one.counts for one in RUNS)


def test_the_words_say_what_advice_brought() -> None:
    said = "\n".join(in_words(summary(RUNS)))
    assert "right cause first: 2 of 5 (40%) of the faults" in said
    assert "tried 3 times: faster 1, no loss over 2 % shown 1, loss over 2 % 1" in said


def test_the_figure_is_a_picture() -> None:
    assert figure_png(RUNS).startswith(b"\x89PNG")


# ---- the cases and the command -------------------------------------------------------------------


def test_every_case_has_a_name_of_its_own_and_known_codes() -> None:
    assert len(BY_NAME) == len(CASES)
    assert {code for case in CASES for code in case.right} <= set(CODES)
    assert set(QUICK) <= set(BY_NAME)


def test_a_line_tells_what_cannot_run() -> None:
    said = line(CASES[0], fault(cannot_run="no page cache to empty"))
    assert "cannot run here: no page cache to empty" in said
    assert "WRONG" not in said


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "F99"])
    assert "F99" in capsys.readouterr().err


def test_a_run_beyond_its_limit_is_ended_with_its_children() -> None:
    code, said, _ = run_limited(["sh", "-c", "echo begun; sleep 60 & sleep 60"], 0.5)
    assert code is None
    assert said == "begun\n"


# ---- the verdicts of other packages --------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "verdict", "right", "named"),
    [
        ("traceml", "INPUT_BOUND", "storage-bound", "storage-bound"),  # its advice names storage
        ("traceml", "INPUT_BOUND", "transfer", "too-few-workers"),
        ("loadtune", "is **compute-bound** (data wait 2%)", "compute", "compute"),
        ("gpuprof", "Dataloader stall + CPU pegged (95%)", "cpu-quota", "cpu-quota"),
        ("gpu-idle", "dataloader: Worker processes are already in use", "cpu-bound", "cpu-bound"),
        ("fournex", "input_bound", "too-few-workers", "too-few-workers"),
    ],
)
def test_a_verdict_is_read_generously(tool: str, verdict: str, right: str, named: str) -> None:
    assert [code for code, _ in read_as(RIVALS[tool], verdict, (right,))] == [named]


def test_a_verdict_without_a_meaning_names_nothing() -> None:
    assert read_as(RIVALS["traceml"], "NO_CLEAR_PERFORMANCE_BOTTLENECK", ("cpu-bound",)) == ()


def test_all_is_fine_is_no_alarm() -> None:
    assert read_as(RIVALS["loadtune"], "compute-bound", ()) == (("compute", "info"),)


def test_verdicts_mean_known_codes_and_packages_are_pinned() -> None:
    for rival in RIVALS.values():
        assert {code for _, codes in rival.means for code in codes} <= set(CODES)
        assert "==" in rival.package
