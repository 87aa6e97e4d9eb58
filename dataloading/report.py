"""The one-page report: plain text for a terminal, and a page of HTML that stands alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloading.diagnosis import PARTS
from dataloading.machine import report_lines
from dataloading.wording import (
    all_notes,
    baseline_lines,
    cause_sentence,
    comparison_sentence,
    figure_text,
    nothing_to_set,
    predicted_gain,
    prediction_sentence,
    settings_snippet,
    stage_lines,
    verdict_sentence,
    words,
)

if TYPE_CHECKING:
    from dataloading.comparison import Comparison
    from dataloading.diagnosis import Diagnosis
    from dataloading.loader_timing import LoaderTiming
    from dataloading.machine import Machine
    from dataloading.recommendation import Recommendation

WIDTH = 80  # columns of a terminal that nobody has widened


def text_report(
    machine: Machine,
    diagnosis: Diagnosis,
    recommendation: Recommendation,
    comparison: Comparison | None = None,
    baseline: LoaderTiming | None = None,
    *,
    about: str = "",
) -> str:
    """All four moves as text of at most 80 columns.

    Args:
        machine: Where it ran.
        diagnosis: What was found.
        recommendation: What to set.
        comparison: Before and after, where it was measured.
        baseline: The first run; None takes the run behind the diagnosis.
        about: What was measured: the data and the train step, in a sentence.

    Returns:
        Lines without a line break at the end.

    Explained in: notebook 00
    """
    check_parts(machine, diagnosis, recommendation, comparison, baseline)
    sections = [("Measured", _wrap(about))] if about else []
    sections += [
        ("Machine", [line for text in report_lines(machine) for line in _wrap(text, after=7)]),
        ("Baseline", _baseline(baseline or diagnosis.timing)),
        ("Diagnosis", _diagnosis(diagnosis)),
        ("Recommendation", _recommendation(diagnosis, recommendation)),
        ("Before and after", _comparison(comparison)),
    ]
    notes = all_notes(diagnosis, baseline)
    if notes:
        sections.append(("Notes", [line for note in notes for line in _item(note)]))
    return "\n\n".join("\n".join([_heading(title), *lines]) for title, lines in sections)


def _heading(title: str) -> str:
    return f"{title}\n{'-' * len(title)}"


def _baseline(timing: LoaderTiming | None) -> list[str]:
    if timing is None:
        return _wrap("Not measured.")
    return _table(baseline_lines(timing))


def _diagnosis(diagnosis: Diagnosis) -> list[str]:
    lines = _wrap(f"{verdict_sentence(diagnosis)} {cause_sentence(diagnosis)}")
    for number, found in enumerate(diagnosis.findings, start=1):
        lines += [
            "",
            *_item(f"{found.code} ({found.severity}). {found.message}", mark=f"{number}. "),
        ]
        evidence = [f"{words(k)} {figure_text(k, v)}" for k, v in found.evidence.items()]
        lines += _item(f"Evidence: {', '.join(evidence)}.", mark="   ")
        lines += _item(
            f"Advice: {found.advice} ({predicted_gain(found.expected_gain)})", mark="   "
        )
    ceilings = [
        (PARTS[part], figure_text("samples_per_s", rate))
        for part, rate in diagnosis.ceilings.items()
        if rate is not None
    ]
    if ceilings:
        lines += ["", "What each part could reach alone:", *_table(ceilings)]
    where, stages = stage_lines(diagnosis)
    if stages:
        lines += ["", f"What a sample costs, {where}:", *_table(stages)]
    return lines


def _recommendation(diagnosis: Diagnosis, recommendation: Recommendation) -> list[str]:
    snippet = settings_snippet(recommendation, diagnosis.evidence.settings)
    lines = snippet.splitlines() or [nothing_to_set(recommendation)]
    lines += ["", *_wrap(prediction_sentence(diagnosis, recommendation))]
    for title, texts in (
        ("Why", [f"{name}: {why}" for name, why in recommendation.reasons.items()]),
        ("Refused", [f"{what}: {why}" for what, why in recommendation.refused.items()]),
        ("Beyond settings", list(recommendation.advice)),
        (
            "Often advised without measuring",
            [f"{rule}: {text}" for rule, text in recommendation.rules_in_words()],
        ),
    ):
        if texts:
            lines += ["", f"{title}:", *(line for text in texts for line in _item(text))]
    return lines


def _comparison(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return _wrap("Not measured: there was nothing to compare.")
    return _wrap(comparison_sentence(comparison))


def _item(text: str, mark: str = "- ") -> list[str]:
    """One text behind a mark, wrapped below its first word."""
    return _wrap(text, mark, len(mark))


def _wrap(text: str, before: str = "", after: int = 0) -> list[str]:
    """Lines of at most 80 columns; all but the first are indented by `after` blanks."""
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=before,
        subsequent_indent=" " * after,
        break_on_hyphens=False,
    )


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Names and texts in two columns."""
    wide = max(len(name) for name, _ in rows)
    return [
        line for name, text in rows for line in _wrap(text, f"  {name.ljust(wide)}  ", wide + 4)
    ]


def html_report(
    machine: Machine,
    diagnosis: Diagnosis,
    recommendation: Recommendation,
    comparison: Comparison | None = None,
    baseline: LoaderTiming | None = None,
    *,
    about: str = "",
) -> str:
    """All four moves as one page of HTML with its pictures inside; it loads nothing from the net.

    Args:
        machine: Where it ran.
        diagnosis: What was found.
        recommendation: What to set.
        comparison: Before and after, where it was measured.
        baseline: The first run; None takes the run behind the diagnosis.
        about: What was measured: the data and the train step, in a sentence.

    Returns:
        The page as text, to be saved as UTF-8.

    Explained in: notebook 00
    """
    from dataloading.report_page import page

    check_parts(machine, diagnosis, recommendation, comparison, baseline)
    timing = baseline or diagnosis.timing
    return page(machine, diagnosis, recommendation, comparison, timing, about)


def check_parts(
    machine: Any, diagnosis: Any, recommendation: Any, comparison: Any, baseline: Any
) -> None:
    """Refuse what is no part of a report, with a `TypeError` that says where it comes from."""
    from dataloading.comparison import Comparison
    from dataloading.diagnosis import Diagnosis
    from dataloading.loader_timing import LoaderTiming
    from dataloading.machine import Machine
    from dataloading.recommendation import Recommendation

    for part, kind, source in (
        (machine, Machine, "inspect_machine"),
        (diagnosis, Diagnosis, "diagnose_dataloader"),
        (recommendation, Recommendation, "recommend_settings"),
        (comparison, Comparison | None, "compare_dataloaders"),
        (baseline, LoaderTiming | None, "measure_dataloader"),
    ):
        if not isinstance(part, kind):
            raise TypeError(f"Expected what {source} returns, got {type(part).__name__}.")


def write_html_report(
    path: str | os.PathLike[str],
    machine: Machine,
    diagnosis: Diagnosis,
    recommendation: Recommendation,
    comparison: Comparison | None = None,
    baseline: LoaderTiming | None = None,
    *,
    about: str = "",
) -> Path:
    """Write `html_report` to a file; an older file is replaced only once the new one is complete.

    Args:
        path: Where to write, such as "report.html"; its folder must exist.
        machine, diagnosis, recommendation, comparison, baseline, about: As for `html_report`.

    Returns:
        The path.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: The path is a folder.

    Explained in: notebook 00
    """
    path = Path(path)
    check_report_path(path)
    text = html_report(machine, diagnosis, recommendation, comparison, baseline, about=about)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        with contextlib.suppress(OSError):  # mkstemp's files are private; a report need not be
            os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no report can be written to, before anything is measured.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: The path is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"Cannot write the report to {path}: it is a folder. Give the path of a file in it, "
            f"such as {path / 'report.html'}."
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write the report to {path}: the folder {path.parent} does not exist. Make it "
            "first, or give another path."
        )
