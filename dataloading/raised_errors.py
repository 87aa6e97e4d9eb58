"""What raised an exception that came out of a loader without clocks in it: class, text, line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from dataloading.codes import Finding, finding

# How torch passes on what a worker raised: these words, the worker's traceback, class and text.
FROM_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
PLACE = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)
ADVICE = (
    "Fetch samples with num_workers=0 under a debugger, or let diagnose_dataloader(loader) name the "
    "sample."
)


def raised_in_loader(error: Exception) -> Finding:
    """Turn an exception that a loader raised, in a worker or here, into a finding.

    Args:
        error: As it came out of iterating over the loader.

    Returns:
        A `worker-error` with class, message, worker (None: the training process) and line. The
        sample is not known: nobody had looked when it was fetched.
    """
    text = str(error)
    if caught := FROM_WORKER.search(text):
        name, worker = caught.group(1), int(caught.group(2))
        places = PLACE.findall(text)
        last_line = list(re.finditer(rf"^[\w.]*\b{name}: ", text, re.MULTILINE))[-1:]
        message = text[last_line[0].end() :].strip() if last_line else ""
    else:
        name, worker, message = type(error).__name__, None, text
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, frame.lineno) for frame in frames]
    file, line = places[-1] if places else ("unknown", "?")
    where = f"{Path(file).name}, line {line}"
    inside = "in the training process" if worker is None else f"in worker {worker}"
    return finding(
        "worker-error",
        f"The loader raised {name} {inside}: {message} ({where}).",
        {"error": name, "message": message, "index": None, "worker": worker, "where": where},
        severity="critical",
        advice=ADVICE,
    )
