"""What an exception of a loader means: an error of the data set, a dead worker, or a hang."""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from dataloading.codes import Finding, finding
from dataloading.error_texts import (
    SHARED_HANDLE,
    SHARED_HANDLE_ADVICE,
    SHOWN_CHARACTERS,
    explain_text,
)
from dataloading.machine import open_files_limit
from dataloading.pickling import main_is_importable, probe_pickling
from dataloading.preflight import parts_for_workers
from dataloading.progress_notes import Failed, Progress
from dataloading.results import format_seconds
from dataloading.watchdog import ProbeTimeout

# What a signal that ended a worker means, by number and by the name that torch prints.
SIGNALS = {
    -9: ("killed", "was killed, most likely because memory ran out"),
    -7: ("bus error", "ran out of shared memory (bus error)"),
    -11: ("segmentation fault", "crashed in native code (segmentation fault)"),
}
DEATH_ADVICE = {
    -9: "Use fewer workers, a smaller prefetch factor or smaller batches, and look at the memory of "
    "the workers over time.",
    -7: "Use fewer workers, a smaller prefetch factor or smaller batches, or enlarge /dev/shm.",
    -11: "Look for a native library (decoder, database) that does not survive a fork or threads; try "
    "multiprocessing_context='spawn'.",
    1: "Run the data set with num_workers=0 to see the Python error that ended the worker.",
}
DEATH_UNKNOWN_ADVICE = (
    f"{DEATH_ADVICE[1]} If it runs, a library may not survive the fork: try "
    "multiprocessing_context='spawn'."
)
FAILED_START_ADVICE = (
    "Read what the worker printed before it ended: it lacks a class or an import, or the data set "
    "cannot be rebuilt there. Try pickle.loads(pickle.dumps(loader.dataset)) in a new Python."
)
FORKED_HANG_ADVICE = (
    "Fetch the sample with num_workers=0. If it comes, the fork is the cause: a lock or pool of "
    "threads that was in use at that moment cannot be used in a forked worker (libraries that use "
    "threads for large inputs only let only large samples hang). Then set "
    "multiprocessing_context='spawn', or give libraries one thread before the workers start "
    "(torch.set_num_threads(1), cv2.setNumThreads(0), OMP_NUM_THREADS=1), or keep num_workers=0."
)
# What a start of workers says that cannot be sent, or that end while they are being sent.
NOT_SENT = re.compile(
    r"can't pickle|cannot pickle|can't get local object|not picklable|broken pipe", re.I
)
NAMED_SIGNAL = re.compile(r"killed by signal: ([A-Za-z ]+)")
DEATH_WAIT_S = 0.5  # until a worker whose connection broke has ended
EXIT_CODE = re.compile(r"exit(?:ed)?(?: unexpectedly)? with (?:exit )?code:? (-?\d+)")


def explain_failure(
    error: BaseException,
    progress: Progress | None = None,
    dataloader: Any = None,
) -> Finding | None:
    """Turn an exception that came out of a loader into a finding.

    Args:
        error: The exception.
        progress: Word that the workers left, where they could.
        dataloader: The loader; of a failed start it shows the reason.

    Returns:
        `worker-error`, `worker-died`, `worker-hang`, `unpicklable`, or what a known text means;
        None for an exception of another kind.
    """
    failed = progress.failed() if progress is not None else None
    if failed is not None:
        return sample_error(failed)
    if isinstance(error, ProbeTimeout):
        return _hang(error, progress)
    text, codes = _said(error), getattr(error, "exit_codes", ())
    if codes or tells_of_death(error):
        code = exit_code(text)
        if code is None and codes:
            code = codes[0]
        if code is not None and code > 0 and progress is not None and not _has_begun(progress):
            return _what_cannot_be_sent(dataloader) or _failed_start(code, text)
        return worker_death(code, text, _sample_of_the_dead(progress))
    if NOT_SENT.search(f"{type(error).__name__} {text}"):
        return _what_cannot_be_sent(dataloader)
    known = explain_text(text)
    if known is not None and known.code == "file-descriptors-short":
        return explain_text(text, _open_files())
    return known


def tells_of_death(error: BaseException) -> bool:
    """Whether an exception is torch's word of a dead worker, which may come at any place."""
    text = _said(error)
    return "DataLoader worker" in text and (
        "killed by signal" in text or "exited unexpectedly" in text
    )


def _said(error: BaseException) -> str:
    chain = (error.__cause__, error.__context__, error)
    return " ".join(dict.fromkeys(str(one).strip() for one in chain if one))


def note_deaths(error: BaseException, iterator: Any) -> None:
    """Leave word on an exception of the workers that have ended: their exit codes.

    Batches under way from a worker that dies give a `ConnectionResetError`, an `EOFError` or the
    like, a moment before its death is known.

    Args:
        error: What came out of the iterator; gets an attribute `exit_codes`, or, where the workers
            live and do not answer, `start_method`.
        iterator: Of the loader, with its workers as they are now.
    """
    workers = getattr(iterator, "_workers", ())
    if isinstance(error, ProbeTimeout):
        methods = [start_method_of(worker) for worker in workers]
        error.start_method = methods[0] if methods else None  # type: ignore[attr-defined]
        return
    wait_s = DEATH_WAIT_S if isinstance(error, EOFError | OSError) else 0.0
    deadline = time.monotonic() + wait_s
    codes: list[int] = []
    while workers and not codes:
        try:
            codes = [worker.exitcode for worker in workers if worker.exitcode]
            if time.monotonic() >= deadline:
                break
            time.sleep(DEATH_WAIT_S / 50)
        except RuntimeError:  # torch's signal handler, which notices the death at this moment
            continue
    error.exit_codes = tuple(codes)  # type: ignore[attr-defined]


def start_method_of(worker: Any) -> str | None:
    """How a worker process was started; None where it does not tell."""
    own = getattr(worker, "_start_method", None)  # None in processes of the default method
    return own or multiprocessing.get_start_method(allow_none=True)


def _has_begun(progress: Progress) -> bool:
    """Whether any worker has come to a first sample."""
    places = [progress.entry(worker) for worker in range(progress.workers)]
    return any(entries[place + 1] for entries, place in places)


def _what_cannot_be_sent(dataloader: Any) -> Finding | None:
    """The part of a loader that its workers cannot be given, or cannot import."""
    if not isinstance(dataloader, DataLoader):
        return None
    for name, part in parts_for_workers(dataloader):
        probe = probe_pickling(part, name)
        if probe.error is not None:
            return finding(
                "unpicklable",
                f"Workers cannot start: {probe.path} cannot be pickled ({probe.error}).",
                {"path": probe.path, "error": probe.error},
                severity="critical",
            )
        if probe.in_main and not main_is_importable():
            return finding(
                "unpicklable",
                f"Workers cannot start: {name}: {probe.in_main[0]} is defined in the notebook, "
                "where they cannot import it.",
                {"part": name, "name": probe.in_main[0]},
                severity="critical",
            )
    return None


def _failed_start(code: int, text: str) -> Finding:
    return finding(
        "worker-died",
        f"Workers cannot start: one ended with exit code {code} (a Python error) before its first "
        "sample.",
        {"exit_code": code, "index": None, "text": text[:SHOWN_CHARACTERS]},
        severity="critical",
        advice=FAILED_START_ADVICE,
    )


def _open_files() -> dict[str, int | None]:
    """How many files this process has open, and may open."""
    process = psutil.Process()
    try:
        count = process.num_fds() if hasattr(process, "num_fds") else None
    except OSError:  # reading the list takes a descriptor too
        count = None
    return {"open_files": count, "open_files_limit": open_files_limit()}


def _sample_of_the_dead(progress: Progress | None) -> int | None:
    """The sample that a worker was at when it ended: the one that was begun last."""
    stuck = progress.stuck() if progress is not None else []
    return stuck[-1].index if len(stuck) == 1 else None


def sample_error(failed: Failed) -> Finding:
    """An exception that the data set raised."""
    return finding(
        "worker-error",
        f"Sample {failed.index} raised {failed.error}: {failed.message} ({failed.where}).",
        {
            "error": failed.error,
            "message": failed.message,
            "index": failed.index,
            "worker": failed.worker,
            "where": failed.where,
        },
        severity="critical",
        advice=SHARED_HANDLE_ADVICE if SHARED_HANDLE.search(failed.message) else None,
    )


def exit_code(text: str) -> int | None:
    """Exit code of a worker from torch's message: negative for a signal; None where it tells none.

    Example:
        >>> exit_code("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible ...")
        -7
        >>> exit_code("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details ...")
        1
    """
    if named := NAMED_SIGNAL.search(text):
        said = named.group(1).strip().lower()
        for number, (name, _) in SIGNALS.items():
            if said.startswith(name):
                return number
        for known in signal.valid_signals():
            if (signal.strsignal(known) or "").lower().startswith(said):
                return -int(known)
    if code := EXIT_CODE.search(text):
        return int(code.group(1))
    return None


def worker_death(code: int | None, text: str = "", index: int | None = None) -> Finding:
    """A worker that ended by itself: four exit codes mean four different things.

    Args:
        code: Exit code; negative for a signal, as in `multiprocessing.Process.exitcode`; None where
            it is not known.
        text: The message that came with it.
        index: The sample it was at, where that is known.
    """
    if code is None:
        said = "ended, and its exit code is not known"
    elif code in SIGNALS:
        said = SIGNALS[code][1]
    elif code < 0:
        said = f"was ended by signal {-code}"
    else:
        said = f"ended with exit code {code} (a Python error)"
    return finding(
        "worker-died",
        f"A worker {said}" + (f", at sample {index}." if index is not None else "."),
        {"exit_code": code, "index": index, "text": text[:SHOWN_CHARACTERS]},
        severity="critical",
        advice=DEATH_UNKNOWN_ADVICE if code is None else DEATH_ADVICE.get(code, DEATH_ADVICE[1]),
    )


def _hang(error: ProbeTimeout, progress: Progress | None) -> Finding:
    stuck = progress.stuck() if progress is not None else []
    evidence: dict[str, Any] = {"waited": str(error)}
    where = "no worker was at a sample"
    if stuck:
        first = stuck[0]
        evidence |= {"worker": first.worker, "index": first.index, "at_sample_s": first.seconds}
        sample = "a sample" if first.index is None else f"sample {first.index}"
        where = f"worker {first.worker} has been at {sample} for {format_seconds(first.seconds)}"
    method = getattr(error, "start_method", None)
    if method is not None:
        threads = psutil.Process().num_threads()
        evidence |= {"start_method": method, "threads": threads}
        evidence["intraop_threads"] = torch.get_num_threads()
        if method == "fork":
            where += f"; it was forked from a process with {threads} threads"
    return finding(
        "worker-hang",
        f"No batch came: {where}.",
        evidence,
        severity="critical",
        advice=FORKED_HANG_ADVICE if method == "fork" else None,
    )
