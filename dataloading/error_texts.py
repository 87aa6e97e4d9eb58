"""Known texts of errors and warnings around data loading, and what each of them means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloading.codes import Finding, finding

SHOWN_CHARACTERS = 200  # of a text, kept as evidence


@dataclass(frozen=True)
class KnownText:
    """A text that has one meaning, whichever library prints it."""

    pattern: str
    code: str
    severity: str
    message: str
    advice: str | None = None


# The first one that is found counts: what is most telling stands first.
KNOWN_TEXTS = (
    KnownText(
        # Windows promises memory before it is used, and every process that loads torch needs much.
        r"WinError 1455|error 1455|paging file is too small",
        "worker-died",
        "critical",
        "A worker could not start: all memory that Windows may promise is promised (commit limit, "
        "error 1455).",
        "Use fewer workers, or enlarge the page file.",
    ),
    KnownText(
        r"Cannot re-initialize (CUDA|XPU|MTIA) in forked subprocess",
        "accelerator-in-worker",
        "critical",
        "A forked worker uses the accelerator, which the training process has opened.",
        "Keep data on the CPU and move batches in the training loop, or start workers with "
        "multiprocessing_context='spawn'.",
    ),
    KnownText(
        # What a forked copy of a connection, a pinning thread or a library with threads says.
        r"digest (received was wrong|sent was rejected)|Pin memory thread exited unexpectedly",
        "fork-unsafe-handle",
        "critical",
        "A fork-unsafe library: one that was in use when the workers were forked does not work in "
        "them.",
        "Start workers with multiprocessing_context='spawn', or use the library in the workers only.",
    ),
    KnownText(
        r"Too many open files|received \d+ items of ancdata",
        "file-descriptors-short",
        "critical",
        "No file descriptor was left: each tensor that came from a worker holds one for as long as "
        "something refers to it, such as a list of batches, or a NumPy view of one.",
    ),
    KnownText(
        r"process just got forked, after parallelism has already been used",
        "fork-unsafe-handle",
        "info",
        "The tokenizer had used threads before the workers were forked, and goes on without them: "
        "harmless, but it says so in every worker.",
        "Set the environment variable TOKENIZERS_PARALLELISM=false before the tokenizer is first "
        "used, at the top of the script or notebook.",
    ),
)

# What a file says that several processes read through one handle; the file itself may be whole.
SHARED_HANDLE = re.compile(
    r"Bad CRC-32|Bad magic number for file header|inflate\(\) failed|wrong B-tree signature|"
    r"bad object header version|Error -3 while decompressing|disk image is malformed",
    re.IGNORECASE,
)
SHARED_HANDLE_ADVICE = (
    "Read it once with num_workers=0. If that works, the file is whole, and forked workers disturb "
    "one another through one open file: open it in the worker, on first use."
)


def explain_text(text: str, evidence: Mapping[str, Any] | None = None) -> Finding | None:
    """What an error or warning means, from its text or from a whole log.

    Args:
        text: What was printed.
        evidence: Numbers that are known besides.

    Returns:
        The finding of the most telling text that is in it; None where none is known.

    Example:
        >>> explain_text("RuntimeError: received 0 items of ancdata").code
        'file-descriptors-short'
    """
    for known in KNOWN_TEXTS:
        if found := re.search(known.pattern, text, re.IGNORECASE):
            shown = text[found.start() :][:SHOWN_CHARACTERS]
            return finding(
                known.code,
                known.message,
                {"text": shown, **(evidence or {})},
                severity=known.severity,
                advice=known.advice,
            )
    return None
