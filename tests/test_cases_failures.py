"""Cases of failures: forks that hang, workers that cannot start, texts with a known meaning."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_workloads as cases
import faulty_workloads as faulty
import pytest
import workloads
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading import timing
from dataloading.codes import Finding
from dataloading.error_texts import KNOWN_TEXTS, explain_text
from dataloading.failures import explain_failure, sample_error, worker_death
from dataloading.progress_notes import Failed
from dataloading.timing import measure_dataloader
from helper_functions import diagnose_dataloader

TESTS = Path(__file__).parent
LIMIT_S = 2.0


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that does not wait for workers to import torch."""
    monkeypatch.setattr(timing, "LEAST_LIMIT_S", LIMIT_S)


def found_in(error: BaseException) -> Finding:
    found = getattr(error, "finding", None)
    assert isinstance(found, Finding)
    json.dumps(found.to_dict())
    return found


# ---- hangs after a fork -------------------------------------------------------------------------


@linux_only
@pytest.mark.usefixtures("watchful")
def test_a_06_1_a_lock_held_by_a_thread_during_the_fork_is_diagnosed_in_time() -> None:
    data = cases.TakesALock([1] * 16)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with cases.held_by_a_thread(data.lock):
        begun = time.monotonic()
        diagnosis = diagnose_dataloader(loader, seconds=1.0, progress=False)
        assert time.monotonic() - begun < LIMIT_S + 5.0
        assert multiprocessing.active_children() == []
    assert (diagnosis.verdict, diagnosis.cause) == ("inconclusive", "worker-hang")
    found = diagnosis.findings[0]
    assert "forked from a process with" in found.message
    assert "threads" in found.message
    assert "the fork is the cause" in found.advice
    assert found.evidence["start_method"] == "fork"
    assert found.evidence["threads"] >= 2
    assert found.evidence["index"] in (0, 2)  # the first sample of one of the workers


@linux_only
@pytest.mark.usefixtures("watchful")
def test_a_06_2_a_hang_of_large_samples_only_lists_three_ways_around_it() -> None:
    pixels = [cases.MEGAPIXEL // 2] * 40 + [2 * cases.MEGAPIXEL] + [cases.MEGAPIXEL // 2] * 23
    data = cases.TakesALock(pixels, largest_without=cases.MEGAPIXEL)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with cases.held_by_a_thread(data.lock):
        seen = measure_dataloader(loader, seconds=1.0, progress=False)
    assert seen.steps > 0  # the small ones came
    found = seen.failure
    assert found is not None
    assert (found.code, found.evidence["index"]) == ("worker-hang", 40)
    assert "only large samples hang" in found.advice
    for way in ("multiprocessing_context='spawn'", "torch.set_num_threads(1)", "num_workers=0"):
        assert way in found.advice
    assert found.evidence["intraop_threads"] >= 1
    assert "corrupt" not in found.message + found.advice


@linux_only
@pytest.mark.usefixtures("watchful")
def test_a_hang_without_workers_does_not_blame_a_fork() -> None:
    with pytest.raises(TimeoutError) as raised:
        measure_dataloader(DataLoader(faulty.Hanging()), seconds=1.0, progress=False)
    found = found_in(raised.value)
    assert found.code == "worker-hang"
    assert "forked" not in found.message
    assert "start_method" not in found.evidence


# ---- known texts --------------------------------------------------------------------------------

TOKENIZERS = (
    "huggingface/tokenizers: The current process just got forked, after parallelism has already "
    "been used. Disabling parallelism to avoid deadlocks...\nTo disable this warning, you can ..."
)
ONE_SET_UP = (  # what one loader of videos, forked after the library was used, said in three runs
    "multiprocessing.context.AuthenticationError: digest received was wrong",
    "RuntimeError: Pin memory thread exited unexpectedly",
    "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
)


def test_a_06_5_a_noisy_warning_is_only_a_note() -> None:
    found = explain_text(f"epoch 1\n{TOKENIZERS}\nepoch 2")
    assert found is not None
    assert found.severity == "info"
    assert "harmless" in found.message
    assert "TOKENIZERS_PARALLELISM=false before the tokenizer is first used" in found.advice
    assert found.evidence["text"].startswith("process just got forked")


def test_a_06_8_three_texts_of_one_set_up_have_one_cause() -> None:
    found = explain_text("\n".join(ONE_SET_UP))
    assert found is not None
    assert found.code == "fork-unsafe-handle"
    assert "fork-unsafe library" in found.message
    assert "multiprocessing_context='spawn'" in found.advice
    by_itself = [explain_failure(RuntimeError(text)) for text in ONE_SET_UP]
    assert [one.code for one in by_itself if one] == [found.code, found.code, "worker-died"]
    assert all("multiprocessing_context='spawn'" in one.advice for one in by_itself if one)


def test_what_forked_workers_share_is_not_called_damaged() -> None:
    texts = ("Bad CRC-32 for file 'b/1'", "Can't read data (inflate() failed)")
    for text in texts:
        found = sample_error(Failed("OSError", text, "3", 1, "data.py, line 7"))
        assert found.code == "worker-error"
        assert "open it in the worker" in found.advice
    usual = sample_error(Failed("OSError", "no such file", "3", 1, "data.py, line 7"))
    assert "open it in the worker" not in usual.advice


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("RuntimeError: received 0 items of ancdata", "file-descriptors-short"),
        ("OSError: [Errno 24] Too many open files", "file-descriptors-short"),
        (
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...",
            "accelerator-in-worker",
        ),
        ("OSError: [WinError 1455] ...", "worker-died"),
    ],
)
def test_known_texts_are_told_apart(text: str, code: str) -> None:
    found = explain_text(text)
    assert found is not None
    assert (found.code, found.severity) == (code, "critical")


@pytest.mark.parametrize("text", ["", "ValueError: a bad argument", "CUDA out of memory"])
def test_other_texts_are_not_explained(text: str) -> None:
    assert explain_text(text) is None
    assert len({known.pattern for known in KNOWN_TEXTS}) == len(KNOWN_TEXTS)


# ---- workers that cannot start ------------------------------------------------------------------


def test_a_10_2_a_data_set_that_cannot_be_rebuilt_is_told_within_the_limit() -> None:
    loader = DataLoader(cases.CannotBeRebuilt(), num_workers=1, multiprocessing_context="spawn")
    begun = time.monotonic()
    diagnosis = diagnose_dataloader(loader, seconds=2.0, progress=False)
    assert time.monotonic() - begun < 30.0
    assert multiprocessing.active_children() == []
    found = diagnosis.findings[0]
    assert found.code == "worker-died"
    assert found.message.startswith("Workers cannot start: one ended with exit code 1")
    assert "cannot be rebuilt" in found.advice


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("OSError: [Errno 32] Broken pipe")]
)
def test_a_10_5_a_broken_pipe_is_the_data_set_that_cannot_be_pickled(error: Exception) -> None:
    data = faulty.Transformed(faulty.Chain([abs, lambda value: value]))

    def told(dataset: Any, method: str, workers: int = 2) -> Finding | None:
        options = {"num_workers": workers, "multiprocessing_context": method} if workers else {}
        return explain_failure(error, None, DataLoader(dataset, **options))

    found = told(data, "spawn")
    assert found is not None
    assert found.code == "unpicklable"
    assert "dataset.transform.transforms[1] cannot be pickled" in found.message
    assert "network" not in found.message + found.advice
    assert told(faulty.Blobs(), "spawn") is None
    assert told(data, "spawn", workers=0) is None  # nothing is sent
    if sys.platform == "linux":
        assert told(data, "fork") is None


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_10_5_what_cannot_be_sent_is_named_in_a_real_start() -> None:
    data = faulty.Transformed(lambda value: value)
    loader = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    diagnosis = diagnose_dataloader(loader, seconds=1.0, progress=False)
    assert diagnosis.cause == "unpicklable"
    assert diagnosis.findings[0].evidence["path"] == "dataset.transform"


def test_deaths_without_a_code_advise_to_leave_the_fork_too() -> None:
    assert "num_workers=0" in worker_death(None).advice
    assert "spawn" in worker_death(None).advice


# ---- open files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """What became of loops that keep batches, NumPy views of them, and copies."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", "import case_workloads; case_workloads.report_kept_batches()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@linux_only
@pytest.mark.parametrize("way", [0, 1])
def test_a_05_4_batches_that_are_kept_use_up_the_open_files(
    way: int, kept: list[dict[str, Any]]
) -> None:
    seen, found = kept[way], kept[way]["found"]
    assert 150 < seen["kept"] < 256
    assert found["code"] == "file-descriptors-short"
    assert "a list of batches" in found["message"]
    assert found["evidence"]["open_files_limit"] == 256
    assert seen["kept"] < found["evidence"]["open_files"] <= 256
    assert "clone" in found["advice"]
    assert seen["children"] == 0


@linux_only
def test_a_05_4_copies_of_batches_use_none(kept: list[dict[str, Any]]) -> None:
    assert kept[2] == {"found": None, "kept": 2000, "children": 0}
