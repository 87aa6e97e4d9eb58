"""What an exception of a loader means: an error of the data set, a dead worker, or a hang."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from dataloading.codes import Finding, finding
from dataloading.error_texts import (
    SHARED_HANDLE,
    SHARED_HANDLE_ADVICE,
    SHOWN_CHARACTERS,
    explain_text,
)
from dataloading.failed_starts import (
    NOT_SENT,
    failed_start,
    has_begun,
    start_method_of,
    what_cannot_be_sent,
)
from dataloading.machine import inspect_machine, open_files_limit
from dataloading.progress_notes import Failed, Progress
from dataloading.results import format_bytes, format_seconds
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
AMPLE_BYTES = 2**33  # so much free memory after a death makes one doubt that it had run out
KILLED_OTHERWISE = (
    "if as much was free before, something else sent the signal, such as the limit of a job or "
    "container, or somebody's kill."
)
DEATH_UNKNOWN_ADVICE = (
    f"{DEATH_ADVICE[1]} If it runs, a library may not survive the fork: try "
    "multiprocessing_context='spawn'."
)
FORKED_HANG_ADVICE = (
    "Fetch the sample with num_workers=0. If it comes, the fork is the cause: a lock or pool of "
    "threads that was in use at that moment cannot be used in a forked worker (libraries that use "
    "threads only for large inputs let only large samples hang). Then set "
    "multiprocessing_context='spawn', or give libraries one thread before the workers start "
    "(torch.set_num_threads(1), cv2.setNumThreads(0), OMP_NUM_THREADS=1), or keep num_workers=0."
)
HANG_ADVICE = "Look at the sample and at what it waits for: a network, a lock, another process."
NO_DESCRIPTOR = "Too many open files"
NEARLY_OUT = 0.9  # of the open files that are allowed
DEATH_WAIT_S = 0.5  # until a worker whose connection broke has ended
NAMED_SIGNAL = re.compile(r"killed by signal: ([A-Za-z ]+)")
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
        if NO_DESCRIPTOR in failed.message:  # whatever the sample wanted to open is not to blame
            return explain_text(failed.message, _open_files(error))
        return sample_error(failed)
    if isinstance(error, ProbeTimeout):
        return _hang(error, progress)
    text, codes = _said(error), getattr(error, "exit_codes", ())
    if codes or tells_of_death(error):
        code = exit_code(text)
        if code is None and codes:
            code = codes[0]
        if code is not None and code > 0 and progress is not None and not has_begun(progress):
            return what_cannot_be_sent(dataloader) or failed_start(code, text)
        return worker_death(code, text, _sample_of_the_dead(progress))
    if NOT_SENT.search(f"{type(error).__name__} {text}"):
        return what_cannot_be_sent(dataloader)
    known = explain_text(text)
    if (
        known is None
        and isinstance(error, EOFError | OSError)
        and _files_are_out(files := _open_files(error))
    ):
        return explain_text(NO_DESCRIPTOR, files)  # the other end of a connection says no more
    if known is not None and known.code == "file-descriptors-short":
        return explain_text(text, _open_files(error))
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
    error.open_files = most_open_files(getattr(worker, "pid", None) for worker in workers)  # type: ignore[attr-defined]


def most_open_files(pids: Iterable[int | None]) -> int | None:
    """Files that the one of some processes has open which has most; None where it cannot be read."""
    counts = []
    for pid in pids:
        if pid is None:  # not started; psutil would take this process
            continue
        with contextlib.suppress(psutil.Error, OSError, AttributeError):  # ended, or Windows
            counts.append(psutil.Process(pid).num_fds())
    return max(counts, default=None)


def _open_files(error: BaseException) -> dict[str, int | None]:
    """How many files are open, here or in a worker (the larger number), and how many may be."""
    here = most_open_files([psutil.Process().pid])  # None as well where no descriptor is left
    in_workers = getattr(error, "open_files", None)
    count = here if here is None or in_workers is None else max(here, in_workers)
    return {"open_files": count, "open_files_limit": open_files_limit()}


def _files_are_out(files: dict[str, int | None]) -> bool:
    """Whether nearly as many files are open as may be; unreadable where not even one is left."""
    count, limit = files["open_files"], files["open_files_limit"]
    if limit is None:
        return False
    return hasattr(psutil.Process, "num_fds") if count is None else count >= NEARLY_OUT * limit


def _sample_of_the_dead(progress: Progress | None) -> int | None:
    """The sample that a worker was at when it ended: the one that was begun last."""
    stuck = progress.stuck() if progress is not None else []
    return stuck[-1].index if len(stuck) == 1 else None


def sample_error(failed: Failed) -> Finding:
    """An exception that the data set, or the collate function, raised."""
    sample = "A sample" if failed.index is None else f"Sample {failed.index}"
    what = sample
    if failed.collating:
        at = "" if failed.index is None else f" at {sample.lower()}"
        what = f"Putting a batch together{at}"
    return finding(
        "worker-error",
        f"{what} raised {failed.error}: {failed.message} ({failed.where}).",
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
    evidence = {"exit_code": code, "index": index, "text": text[:SHOWN_CHARACTERS]}
    advice = DEATH_UNKNOWN_ADVICE if code is None else DEATH_ADVICE.get(code, DEATH_ADVICE[1])
    if code == -9:
        evidence["available_memory_bytes"] = free = inspect_machine().available_memory_bytes
        if free is not None and free >= AMPLE_BYTES:
            advice += f" {format_bytes(free)} are free now: {KILLED_OTHERWISE}"
    return finding(
        "worker-died",
        f"A worker {said}" + (f", at sample {index}." if index is not None else "."),
        evidence,
        severity="critical",
        advice=advice,
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
        advice={"fork": FORKED_HANG_ADVICE, None: HANG_ADVICE}.get(method),
    )
