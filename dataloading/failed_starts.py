"""Why workers could not start: what they cannot be given, and what they cannot rebuild."""

from __future__ import annotations

import multiprocessing
import re
from typing import Any

from torch.utils.data import DataLoader

from dataloading.codes import Finding, finding
from dataloading.error_texts import SHOWN_CHARACTERS
from dataloading.pickling import main_is_importable, probe_pickling
from dataloading.preflight import look_at, parts_for_workers
from dataloading.progress_notes import Progress
from dataloading.settings import LoaderSettings
from dataloading.start_rules import no_guard_rule, under_guard_rule

# What a start of workers says that cannot be sent, or that end while they are being sent.
NOT_SENT = re.compile(
    r"can't pickle|cannot pickle|can't get local object|not picklable|broken pipe", re.I
)
FAILED_START_ADVICE = (
    "Read what the worker printed before it ended: it lacks a class or an import, or the data set "
    "cannot be rebuilt there. Try pickle.loads(pickle.dumps(loader.dataset)) in a new Python."
)


def start_method_of(worker: Any) -> str | None:
    """How a worker process was started; None where it does not tell."""
    own = getattr(worker, "_start_method", None)  # None in processes of the default method
    return own or multiprocessing.get_start_method(allow_none=True)


def has_begun(progress: Progress) -> bool:
    """Whether any worker has come to a first sample."""
    places = [progress.entry(worker) for worker in range(progress.workers)]
    return any(entries[place + 1] for entries, place in places)


def what_cannot_be_sent(dataloader: Any) -> Finding | None:
    """The part of a loader that its workers cannot be given, or cannot import."""
    if not isinstance(dataloader, DataLoader) or not dataloader.num_workers:
        return None
    method = LoaderSettings.of(dataloader).multiprocessing_context
    if (method or multiprocessing.get_start_method(allow_none=True)) == "fork":
        return None  # forked workers are sent nothing
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
    return _script(dataloader)


def _script(dataloader: DataLoader) -> Finding | None:
    """What the script that is running keeps from its workers, or makes them do."""
    seen = look_at(dataloader, spawn_check=False)
    return under_guard_rule(seen) or no_guard_rule(seen)


def failed_start(code: int, text: str) -> Finding:
    """Workers that ended before their first sample, though they could be sent everything."""
    return finding(
        "worker-died",
        f"Workers cannot start: one ended with exit code {code} (a Python error) before its first "
        "sample.",
        {"exit_code": code, "index": None, "text": text[:SHOWN_CHARACTERS]},
        severity="critical",
        advice=FAILED_START_ADVICE,
    )
