"""Rules on how workers will start: what they are sent, and what the script does meanwhile."""

from __future__ import annotations

import re

from dataloading.codes import Finding, finding
from dataloading.preflight import Preflight
from dataloading.results import format_bytes, format_seconds

SHOWN_LINES = 3  # of a script
SLOW_START_S = 0.5  # sending a data set for longer than this is felt at every start
READ_BACK = 2.5  # a worker takes so many times as long to unpickle: it makes every object anew


# What belongs to one process and is opened again in each worker.
HANDLES = re.compile(r"'_io\.|socket|[Cc]onnection|_thread\.|lock'|generator|memoryview")
HANDLE_ADVICE = (
    "It belongs to this process. Make it in the worker, on first use: keep its path or address in "
    "the data set, and None in its place until then."
)


def unpicklable_rule(seen: Preflight) -> Finding | None:
    """A part that cannot be sent to workers."""
    for probe in seen.probes:
        if probe.error is None:
            continue
        return finding(
            "unpicklable",
            f"{probe.path} cannot be pickled ({probe.error}); workers started by "
            f"{_methods_that_pickle(seen)} need that.{_works_for_now(seen)}",
            {"path": probe.path, "error": probe.error, "start_method": seen.start_method},
            severity="critical" if pickles(seen) else "info",
            advice=HANDLE_ADVICE if HANDLES.search(probe.error) else None,
        )
    return None


def main_module_rule(seen: Preflight) -> Finding | None:
    """Classes of a notebook, which spawned workers cannot import."""
    names = [(p.name, name) for p in seen.probes for name in p.in_main if p.error is None]
    if not names or seen.main_importable:
        return None
    part, name = names[0]
    return finding(
        "unpicklable",
        f"{part}: {name} is defined in the notebook, where workers started by "
        f"{_methods_that_pickle(seen)} cannot import it.{_works_for_now(seen)}",
        {"part": part, "name": name, "start_method": seen.start_method},
        severity="critical" if pickles(seen) else "info",
        advice=f"Write {name} into a file beside the notebook with %%writefile, and import it "
        "from there.",
    )


def under_guard_rule(seen: Preflight) -> Finding | None:
    """Classes under the guard of a script, which its workers do not find."""
    if seen.script is None:
        return None
    hidden = [
        (probe.name, name)
        for probe in seen.probes
        for name in probe.in_main
        if probe.error is None and name.split(".")[0] in seen.script.under_guard
    ]
    if not hidden:
        return None
    part, name = hidden[0]
    return finding(
        "unpicklable",
        f"{part}: {name} is defined under `if __name__ == '__main__':` in {seen.script.name}, which "
        f"workers started by {_methods_that_pickle(seen)} do not run.{_works_for_now(seen)}",
        {"part": part, "name": name, "script": seen.script.name, "start_method": seen.start_method},
        severity="critical" if pickles(seen) else "info",
        advice=f"Move {name} above the guard: workers import the script, and find only what stands "
        "outside of it.",
    )


def no_guard_rule(seen: Preflight) -> Finding | None:
    """A script that its workers would run from top to bottom."""
    if seen.script is None or seen.script.has_guard or not pickles(seen):
        return None
    return finding(
        "unpicklable",
        f"{seen.script.name} has no `if __name__ == '__main__':`, so each worker started by "
        f"{seen.start_method} runs all of it again, and is refused when it comes to start workers.",
        {"script": seen.script.name, "start_method": seen.start_method},
        severity="critical",
        advice="Put all that is to run once under `if __name__ == '__main__':`, and leave imports, "
        "classes and functions above it.",
    )


def rerun_rule(seen: Preflight) -> Finding | None:
    """Lines of a script that every spawned worker runs again."""
    script = seen.script
    if script is None or not script.has_guard or not script.lines_run:
        return None
    if seen.start_method != "spawn" or not seen.settings.num_workers:
        return None
    workers = seen.settings.num_workers
    starts = 1 if seen.settings.persistent_workers else seen.epochs
    runs = "in all" if seen.settings.persistent_workers else "an epoch"
    if starts is not None and starts > 1:
        runs += f", {workers * starts} in {starts} epochs"
    lines = ", ".join(map(str, script.lines_run[:SHOWN_LINES]))
    return finding(
        "epoch-startup",
        f"Each spawned worker runs what stands outside of `if __name__ == '__main__':` in "
        f"{script.name} again (line {lines}): {workers} extra runs {runs}.",
        {
            "script": script.name,
            "lines": list(script.lines_run),
            "extra_runs_per_start": workers,
            "extra_runs": None if starts is None else workers * starts,
            "persistent_workers": seen.settings.persistent_workers,
        },
        severity="info",
        advice="Move what is to run once under the guard, and set persistent_workers=True.",
    )


def pickles(seen: Preflight) -> bool:
    """Whether this loader's workers are sent pickled parts."""
    return seen.start_method != "fork" and seen.settings.num_workers > 0


def _methods_that_pickle(seen: Preflight) -> str:
    return "spawn or forkserver" if seen.start_method == "fork" else seen.start_method


def _works_for_now(seen: Preflight) -> str:
    if not seen.settings.num_workers:
        return " There are no workers, so it works for now."
    return "" if pickles(seen) else " They are forked here, so it works for now."


def slow_start_rule(seen: Preflight) -> Finding | None:
    """A data set that takes long to send."""
    workers = seen.settings.num_workers
    if not pickles(seen) or not seen.probes:
        return None
    dataset = seen.probes[0]
    seconds = workers * dataset.seconds * (1 + READ_BACK)
    if dataset.error is not None or seconds < SLOW_START_S:
        return None
    least = "" if dataset.finished else "at least "
    return finding(
        "dataset-pickling",
        f"Starting {workers} worker(s) by {seen.start_method} sends each a copy of the data set "
        f"({least}{format_bytes(dataset.size_bytes)}): {least or 'about '}"
        f"{format_seconds(seconds)} every time.",
        {
            "pickled_bytes": dataset.size_bytes,
            "pickling_s": dataset.seconds,
            "num_workers": workers,
            "start_s": seconds,
            "threshold_s": SLOW_START_S,
            "start_method": seen.start_method,
        },
    )
