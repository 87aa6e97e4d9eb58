"""What an exception of a loader means: an error of the data set, a dead worker, or a hang."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

from dataloading.codes import Finding, finding
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
# Windows promises memory before it is used, and every process that loads torch is promised much.
COMMIT_LIMIT = re.compile(r"WinError 1455|error 1455|paging file is too small", re.IGNORECASE)
NAMED_SIGNAL = re.compile(r"killed by signal: ([A-Za-z ]+)")
DEATH_WAIT_S = 0.5  # until a worker whose connection broke has ended
EXIT_CODE = re.compile(r"exit(?:ed)?(?: unexpectedly)? with (?:exit )?code:? (-?\d+)")


def explain_failure(error: BaseException, progress: Progress | None = None) -> Finding | None:
    """Turn an exception that came out of a loader into a finding.

    Args:
        error: The exception.
        progress: Word that the workers left, where they could.

    Returns:
        `worker-error`, `worker-died` or `worker-hang`; None for an exception of another kind.
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
        return worker_death(code, text, _sample_of_the_dead(progress))
    return _commit_limit(text) if COMMIT_LIMIT.search(text) else None


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
        error: What came out of the iterator; gets an attribute `exit_codes`.
        iterator: Of the loader, with its workers as they are now.
    """
    if isinstance(error, ProbeTimeout):
        return
    workers = getattr(iterator, "_workers", ())
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
        {"exit_code": code, "index": index, "text": text[:200]},
        severity="critical",
        advice=DEATH_ADVICE.get(1 if code is None else code, DEATH_ADVICE[1]),
    )


def _commit_limit(text: str) -> Finding:
    return finding(
        "worker-died",
        "A worker could not start: all memory that Windows may promise is promised (commit limit, "
        "error 1455).",
        {"exit_code": None, "text": text[:200]},
        severity="critical",
        advice="Use fewer workers, or enlarge the page file.",
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
    return finding(
        "worker-hang",
        f"No batch came: {where}.",
        evidence,
        severity="critical",
    )
