"""Errors, deaths and hangs of workers: named with their cause, their worker and their sample."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_workloads as faulty
import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading import failures, timing
from dataloading.codes import Finding
from dataloading.failures import (
    exit_code,
    explain_failure,
    note_deaths,
    sample_error,
    worker_death,
)
from dataloading.machine import Machine
from dataloading.progress_notes import Failed, Progress
from dataloading.raised_errors import raised_in_loader
from dataloading.timing import measure_dataloader
from dataloading.watchdog import ProbeTimeout

TESTS = Path(__file__).parent
TORCH_SAYS = "DataLoader worker (pid 7) is killed by signal: {}. "
TORCH_SAYS_CODE = (
    "DataLoader worker (pid 7) exited unexpectedly with exit code {}. Details are lost due to "
    "multiprocessing. Rerunning with num_workers=0 may give better error trace."
)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def progress(tmp_path: Path) -> Iterator[Progress]:
    made = Progress(tmp_path / "a.progress", workers=2)
    yield made
    made.remove()
    assert list(tmp_path.iterdir()) == []


def finding_of(error: BaseException) -> Finding:
    found = getattr(error, "finding", None)
    assert isinstance(found, Finding)
    json.dumps(found.to_dict())
    return found


# ---- deaths, from what torch says ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (TORCH_SAYS.format("Killed"), -9),
        (
            TORCH_SAYS.format("Bus error") + "It is possible that dataloader's workers are out of",
            -7,
        ),
        (TORCH_SAYS.format("Segmentation fault"), -11),
        (TORCH_SAYS_CODE.format(1), 1),
        (TORCH_SAYS_CODE.format(137), 137),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", None),
    ],
)
def test_exit_codes_are_read_off_what_torch_says(text: str, code: int | None) -> None:
    assert exit_code(text) == code
    found = explain_failure(RuntimeError(text))
    assert found is not None
    assert (found.code, found.severity, found.evidence["exit_code"]) == (
        "worker-died",
        "critical",
        code,
    )


@linux_only
@pytest.mark.parametrize(("name", "code"), [("Aborted", -6), ("Terminated", -15)])
def test_other_signals_are_no_python_errors(name: str, code: int) -> None:
    found = explain_failure(RuntimeError(TORCH_SAYS.format(name)))
    assert found is not None
    assert found.evidence["exit_code"] == code
    assert f"ended by signal {-code}" in found.message
    assert "Python" not in found.message


def test_a_04_3_a_killed_worker_is_out_of_memory_and_no_bug_of_the_data_set() -> None:
    found = explain_failure(RuntimeError(TORCH_SAYS.format("Killed")))
    assert found is not None
    assert "was killed, most likely because memory ran out" in found.message
    for remedy in ("fewer workers", "smaller prefetch factor", "smaller batches"):
        assert remedy in found.advice
    assert "data set" not in found.message
    assert "Killed" in found.evidence["text"]


def test_a_04_4_four_exit_codes_are_four_diagnoses() -> None:
    told = {code: worker_death(code) for code in (-11, -7, -9, 1)}
    assert len({found.message for found in told.values()}) == 4
    assert len({found.advice for found in told.values()}) == 4
    assert "native code" in told[-11].message
    assert "shared memory" in told[-7].message
    assert "memory ran out" in told[-9].message
    assert "Python error" in told[1].message
    assert "num_workers=0" in told[1].advice
    assert "exit code is not known" in worker_death(None).message


def test_a_04_6_the_commit_limit_of_windows_is_recognised() -> None:
    text = (
        "[WinError 1455] The paging file is too small for this operation to complete. Error loading "
        '"C:\\torch\\lib\\cudnn_cnn_infer64_8.dll" or one of its dependencies.'
    )
    found = explain_failure(OSError(text))
    assert found is not None
    assert "commit limit" in found.message
    assert "fewer workers" in found.advice
    assert "page file" in found.advice
    told = found.message + found.advice
    assert "GPU" not in told
    assert "data set" not in told


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        EOFError(),
        RuntimeError("received 0 items of ancdata"),
    ],
)
def test_a_connection_that_broke_is_a_worker_that_died(error: Exception) -> None:
    dead, alive = SimpleNamespace(exitcode=-9), SimpleNamespace(exitcode=None)
    note_deaths(error, SimpleNamespace(_workers=[alive, dead]))
    found = explain_failure(error)
    assert found is not None
    assert (found.code, found.evidence["exit_code"]) == ("worker-died", -9)


@pytest.mark.parametrize("error", [ConnectionResetError("a server of the data set"), OSError("x")])
def test_a_connection_that_broke_while_all_workers_live_is_something_else(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "DEATH_WAIT_S", 0.05)
    ended = SimpleNamespace(exitcode=0)  # as a worker does whose stream is at its end
    note_deaths(error, SimpleNamespace(_workers=[SimpleNamespace(exitcode=None), ended]))
    assert explain_failure(error) is None
    note_deaths(error, iter([]))
    assert explain_failure(error) is None


def test_a_death_is_waited_for_though_torch_reports_it_meanwhile() -> None:
    class Dying:
        asked = 0

        @property
        def exitcode(self) -> int | None:
            self.asked += 1
            if self.asked == 3:
                raise RuntimeError(TORCH_SAYS.format("Killed"))
            return -11 if self.asked > 4 else None

    error = EOFError()
    note_deaths(error, SimpleNamespace(_workers=[Dying()]))
    assert error.exit_codes == (-11,)  # type: ignore[attr-defined]


def test_the_cause_behind_an_exception_is_read_too() -> None:
    try:
        try:
            raise RuntimeError(TORCH_SAYS.format("Killed"))
        except RuntimeError as cause:
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from cause
    except RuntimeError as error:
        found = explain_failure(error)
    assert found is not None
    assert found.evidence["exit_code"] == -9


@pytest.mark.parametrize(
    "error", [ValueError("a bad argument"), KeyError(3), RuntimeError("CUDA out of memory")]
)
def test_other_exceptions_are_not_explained(error: Exception) -> None:
    assert explain_failure(error) is None


def test_a_dead_worker_is_named_with_its_sample(progress: Progress) -> None:
    progress.begin(0, 3)
    progress.end(0)
    progress.begin(1, 37)
    found = explain_failure(RuntimeError(TORCH_SAYS.format("Killed")), progress)
    assert found is not None
    assert found.evidence["index"] == 37
    assert "at sample 37" in found.message
    progress.begin(0, 4)  # two workers are at a sample: which of them died is not known
    found = explain_failure(RuntimeError(TORCH_SAYS.format("Killed")), progress)
    assert found is not None
    assert found.evidence["index"] is None


# ---- what the workers leave word of -------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "known"),
    [(3, 3), (np.int64(3), 3), (torch.tensor(3), 3), ("a key", None), ([1, 2], None), (-1, None)],
)
def test_a_sample_is_named_whatever_the_type_of_its_index(
    index: Any, known: int | None, progress: Progress
) -> None:
    progress.begin(1, index)
    (stuck,) = progress.stuck()
    assert (stuck.worker, stuck.index) == (1, known)
    progress.fail(1, index, ValueError("bad"))
    failed = progress.failed()
    assert failed is not None
    assert failed.index == (known if known is not None else repr(index))


def test_the_worker_that_began_first_stands_in_front(progress: Progress) -> None:
    assert progress.stuck() == []
    progress.begin(1, 5)
    progress.begin(0, 6)
    assert [(stuck.worker, stuck.index) for stuck in progress.stuck()] == [(1, 5), (0, 6)]
    progress.end(1)
    assert [stuck.worker for stuck in progress.stuck()] == [0]
    assert progress.stuck()[0].seconds >= 0


def test_another_process_reads_the_same(progress: Progress) -> None:
    other = pickle.loads(pickle.dumps(progress))
    other.begin(0, 9)
    assert [stuck.index for stuck in progress.stuck()] == [9]


def test_the_first_failure_is_kept(progress: Progress) -> None:
    assert progress.failed() is None
    for index in (4, 5):
        try:
            raise faulty.TwoArguments("a.txt", index)
        except faulty.TwoArguments as error:
            progress.fail(0, index, error)
    failed = progress.failed()
    assert failed is not None
    assert (failed.error, failed.message, failed.index, failed.worker) == (
        "TwoArguments",
        "a.txt is broken at line 4",
        4,
        0,
    )
    assert failed.where.startswith("test_failures.py, line ")


def test_a_failure_that_is_half_written_is_none(progress: Progress) -> None:
    progress._failure.write_text('{"error": "Val', encoding="utf-8")
    assert progress.failed() is None
    progress._failure.write_text('{"error": "ValueError"}', encoding="utf-8")
    assert progress.failed() is None


def test_an_error_of_a_sample_explains_any_exception_that_follows(progress: Progress) -> None:
    progress.fail(0, 3, faulty.NeedsKeyword(reason="no"))
    for error in (RuntimeError("anything"), ProbeTimeout("late")):
        found = explain_failure(error, progress)
        assert found is not None
        assert (found.code, found.evidence["index"]) == ("worker-error", 3)


# ---- errors, in real loaders --------------------------------------------------------------------


def failed_run(dataset: Any, workers: int, **options: Any) -> Finding:
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, **options)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        measure_dataloader(loader, seconds=5.0, progress=False)
    found = finding_of(raised.value)
    assert any(found.message in note for note in raised.value.__notes__)
    return found


@linux_only
def test_a_21_1_an_exception_with_two_arguments_keeps_class_text_and_index() -> None:
    found = failed_run(faulty.FailsAt("two arguments"), workers=2)
    assert (found.code, found.severity) == ("worker-error", "critical")
    assert found.evidence["error"] == "TwoArguments"
    assert found.evidence["message"] == "a.txt is broken at line 7"
    assert found.evidence["index"] == 3
    assert found.evidence["worker"] == 1  # the second batch of two
    assert found.evidence["where"].startswith("faulty_workloads.py, line ")
    assert found.message.startswith("Sample 3 raised TwoArguments: a.txt is broken at line 7")


@linux_only
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("http", "HTTPError", "404"),
        ("keyword", "NeedsKeyword", "the licence ran out"),
        ("unprintable", "Unprintable", "its text cannot be read"),
    ],
)
def test_a_21_2_exceptions_that_do_not_travel_well_are_readable(
    kind: str, error: str, text: str
) -> None:
    found = failed_run(faulty.FailsAt(kind), workers=1)
    assert found.evidence["error"] == error
    assert text in found.evidence["message"]
    assert found.evidence["index"] == 3


@linux_only
def test_a_21_3_the_report_is_the_same_with_and_without_workers() -> None:
    reports = [failed_run(faulty.FailsAt("two arguments"), workers).evidence for workers in (0, 2)]
    for name in ("error", "message", "index", "where"):
        assert reports[0][name] == reports[1][name]


def test_an_index_of_numpy_or_of_a_tensor_is_named() -> None:
    sampler = [np.int64(number) for number in range(8)]
    assert failed_run(faulty.FailsAt("http"), 0, sampler=sampler).evidence["index"] == 3
    tensors = list(torch.arange(8))
    assert failed_run(faulty.FailsAt("http"), 0, sampler=tensors).evidence["index"] == 3


def test_streams_and_whole_batches_are_named_too() -> None:
    stream = failed_run(faulty.FailsInStream(), workers=0)
    assert (stream.evidence["error"], stream.evidence["index"]) == ("TwoArguments", 3)
    at_once = failed_run(faulty.FailsAtOnce(16), workers=0)
    assert (at_once.evidence["error"], at_once.evidence["index"]) == ("TwoArguments", "[2, 3]")


def test_an_error_of_the_train_step_is_not_the_loader_s() -> None:
    def broken(batch: Any) -> None:
        raise ValueError("in training")

    with pytest.raises(ValueError, match="in training") as raised:
        measure_dataloader(DataLoader(workloads.Slow()), broken, seconds=1.0, progress=False)
    assert not hasattr(raised.value, "finding")
    assert not getattr(raised.value, "__notes__", [])


def test_a_finding_reads_well() -> None:
    found = sample_error(Failed("KeyError", "'label'", "3", 1, "data.py, line 7"))
    assert repr(found) == (
        "Finding: [critical] worker-error: Sample 3 raised KeyError: 'label' (data.py, line 7)."
    )


# ---- hangs, in real loaders ---------------------------------------------------------------------


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that does not wait for workers to import torch."""
    monkeypatch.setattr(timing, "LEAST_LIMIT_S", 2.0)


@linux_only
@pytest.mark.usefixtures("watchful")
def test_a_06_6_the_sample_that_never_comes_and_its_worker_are_named() -> None:
    data = faulty.SleepsAt(64, 37)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    seen = measure_dataloader(loader, seconds=1.0, progress=False)
    assert seen.steps > 0  # the other samples were measured
    assert np.isfinite(seen.wait_s).all()
    (note,) = [note for note in seen.notes if "watchdog" in note]
    assert "worker 0 has been at sample 37 for" in note  # batch 18 of 32


@linux_only
@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_hang_before_the_first_batch_is_an_error_with_a_finding(workers: int) -> None:
    loader = DataLoader(faulty.SleepsAt(64, 1), batch_size=2, num_workers=workers)
    with pytest.raises(ProbeTimeout) as raised:
        measure_dataloader(loader, seconds=1.0, progress=False)
    found = finding_of(raised.value)
    assert (found.code, found.severity) == ("worker-hang", "critical")
    assert (found.evidence["worker"], found.evidence["index"]) == (0, 1)
    assert found.evidence["at_sample_s"] > 0.5
    assert "worker 0 has been at sample 1 for" in found.message


def test_a_hang_outside_of_any_sample_says_so(progress: Progress) -> None:
    found = explain_failure(ProbeTimeout("Waiting for batch 3"), progress)
    assert found is not None
    assert found.code == "worker-hang"
    assert found.message == "No batch came: no worker was at a sample."
    assert explain_failure(ProbeTimeout("Waiting"), None) is not None


# ---- deaths, in real loaders --------------------------------------------------------------------


@pytest.fixture(scope="module")
def deaths() -> list[dict[str, Any]]:
    """What was found of workers that ended in five ways, in a process of their own."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", "import faulty_workloads; faulty_workloads.report_deaths()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@linux_only
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (0, -9, "memory ran out"),
        (1, -7, "shared memory"),
        (2, -11, "native code"),
        (3, -6, "signal 6"),
        (4, 1, "Python error"),
        (5, -9, "memory ran out"),  # while the training process was training
    ],
)
def test_a_04_4_workers_that_end_are_told_apart(
    number: int, code: int, words: str, deaths: list[dict[str, Any]]
) -> None:
    found = deaths[number]
    assert found["code"] == "worker-died"
    assert found["evidence"]["exit_code"] == code
    assert words in found["message"]
    assert found["evidence"]["index"] == 5
    assert found["children"] == 0
    assert any(found["advice"] in note for note in found["notes"])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_collate_function_is_a_finding_too(workers: int) -> None:
    found = failed_run(faulty.ReturnsNoneAt(3), workers)
    assert found.code == "worker-error"
    assert found.message.startswith("Putting a batch together raised TypeError")
    assert found.evidence["index"] is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sample_that_does_not_fit_into_its_batch_is_named(workers: int) -> None:
    found = failed_run(faulty.LongerAt(7), workers)
    assert found.message.startswith("Putting a batch together at sample 7 raised RuntimeError")
    assert found.evidence["index"] == 7


@pytest.mark.parametrize(("free_gib", "doubts"), [(22, True), (1, False), (None, False)])
def test_memory_that_is_free_after_a_kill_raises_a_doubt(
    free_gib: int | None, doubts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = None if free_gib is None else free_gib * 2**30
    machine = Machine(usable_cpus=2, available_memory_bytes=free)
    monkeypatch.setattr(failures, "inspect_machine", lambda: machine)
    assert ("22.0 GiB are free now" in worker_death(-9).advice) == doubts
    assert "free now" not in worker_death(-11).advice


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_loader_without_clocks_is_read_from_its_traceback(workers: int) -> None:
    loader = DataLoader(faulty.FailsAt("two arguments"), batch_size=2, num_workers=workers)
    found = None
    try:  # the traceback keeps the iterator, and with it the worker
        list(loader)
    except Exception as error:
        found = raised_in_loader(error)
    assert found is not None
    assert found.code == "worker-error"
    assert found.evidence["error"] == "TwoArguments"
    assert found.evidence["message"] == "a.txt is broken at line 7"
    assert found.evidence["worker"] == (0 if workers else None)
    assert found.evidence["where"].startswith("faulty_workloads.py, line ")
