"""The page of HTML behind `report.html_report`: one file, pictures inside, every text escaped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

from dataloading.diagnosis import PARTS
from dataloading.machine import report_lines
from dataloading.plot_style import ROW_IN, render_png
from dataloading.results import format_value
from dataloading.wording import (
    all_notes,
    baseline_lines,
    cause_sentence,
    comparison_sentence,
    figure_text,
    measured_lines,
    nothing_to_set,
    outcome_sentence,
    predicted_gain,
    prediction_sentence,
    settings_snippet,
    stage_lines,
    verdict_sentence,
    words,
)

if TYPE_CHECKING:
    from dataloading.codes import Finding
    from dataloading.comparison import Comparison
    from dataloading.diagnosis import Diagnosis
    from dataloading.loader_timing import LoaderTiming
    from dataloading.machine import Machine
    from dataloading.recommendation import Recommendation

DPI = 150  # sharp on screens with two dots a pixel, about 60 KB a picture

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #5b6773; --line: #d9dee3; --paper: #ffffff;
  --tint: #f5f7f9; --accent: #174f7c; --warning: #a84d0b; --critical: #a3241c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebef; --soft: #a3aeb9; --line: #37414b;
  --paper: #14191e; --tint: #1d242b; --accent: #85c7ee; --warning: #f0a35e; --critical: #f08a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 0.95rem; font-weight: 600; color: var(--soft); margin: 0 0 0.6rem; }
.verdict { font-size: 1.5rem; line-height: 1.3; font-weight: 600; margin: 0 0 0.75rem;
  text-wrap: balance; }
.lead { font-size: 1.05rem; margin: 0 0 2rem; color: var(--soft); }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; padding-top: 1.25rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; }
figure { margin: 1.25rem 0; }
img { display: block; width: 100%; height: auto; border-radius: 6px; background: #ffffff; }
figcaption { font-size: 0.875rem; color: var(--soft); margin-top: 0.5rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.94rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.45rem 1rem 0.45rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); width: 34%; }
article { border: 1px solid var(--line); border-left: 4px solid var(--accent); border-radius: 6px;
  padding: 0.9rem 1.1rem; margin: 1rem 0; }
article.warning { border-left-color: var(--warning); }
article.critical { border-left-color: var(--critical); }
article h3, article p { margin: 0 0 0.35rem; }
article span { font-weight: 500; font-size: 0.85rem; color: var(--soft); margin-left: 0.6em; }
article.warning span { color: var(--warning); }
article.critical span { color: var(--critical); }
article i { font-style: normal; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: 0.5rem 1rem;
  margin: 0.9rem 0 0; padding-top: 0.8rem; border-top: 1px solid var(--line); }
dt { font-size: 0.82rem; color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; color: var(--accent); font-size: 0.94rem; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: 0.9rem 1.1rem;
  overflow-x: auto; font-size: 0.9rem; line-height: 1.5; }
code, pre { font-family: ui-monospace, "Cascadia Code", Menlo, Consolas, monospace; }
ul { padding-left: 1.2rem; } li { margin: 0.25rem 0; overflow-wrap: anywhere; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 34rem) { main { padding-top: 1.5rem; } .verdict { font-size: 1.25rem; }
  th, td { display: block; width: auto; padding-right: 0; } th { border: 0; padding-bottom: 0; }
  td { padding-top: 0; } figure { overflow-x: auto; } img { min-width: 34rem; } }
@media print { main { max-width: none; padding: 0; } article, figure, pre { break-inside: avoid; } }
"""


def page(
    machine: Machine,
    diagnosis: Diagnosis,
    recommendation: Recommendation,
    comparison: Comparison | None,
    baseline: LoaderTiming | None,
    about: str = "",
) -> str:
    """The whole page; see `report.html_report`."""
    notes = all_notes(diagnosis, baseline)
    parts = [
        "<h1>Where the training time goes</h1>",
        f"<p>{escape(about)}</p>" if about else "",
        f'<p class="verdict">{escape(verdict_sentence(diagnosis))}</p>',
        f'<p class="lead">{escape(cause_sentence(diagnosis))} '
        f"{escape(outcome_sentence(recommendation, comparison))}</p>",
        _ceilings(diagnosis),
        _section(
            "Findings", "".join(map(_finding, diagnosis.findings)) or "<p>Nothing was found.</p>"
        ),
        _stages(diagnosis),
        _section("Settings", _settings(diagnosis, recommendation)),
        _section("Before and after", _comparison(comparison)),
        _section("Baseline", _baseline(baseline)),
        _section(
            "How it was measured", _rows(measured_lines(diagnosis, baseline)) + _machine(machine)
        ),
        _section("Notes", _list(notes)) if notes else "",
    ]
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Where the training time goes: {escape(diagnosis.verdict)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f"\n<footer>Made on {escape(made)}.</footer>\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _ceilings(diagnosis: Diagnosis) -> str:
    from dataloading.plots import plot_ceilings

    known = {part: rate for part, rate in diagnosis.ceilings.items() if rate is not None}
    if not known:
        return ""
    numbers = ", ".join(
        f"{PARTS[part]} {format_value('samples_per_s', r)}" for part, r in known.items()
    )
    return _picture(
        lambda ax: plot_ceilings(diagnosis, ax=ax),
        1.5 + ROW_IN * max(2, len(known)),
        alt=f"Rate that each part could reach alone: {numbers}",
        caption="What each part could reach if all others were free; the dashed line is the real run.",
    )


def _stages(diagnosis: Diagnosis) -> str:
    where, lines = stage_lines(diagnosis)
    if not lines:
        return ""
    return _section("What a sample costs", f"<p>Measured {where}.</p>" + _rows(lines))


def _finding(found: Finding) -> str:
    numbers = "".join(
        f"<div><dt>{escape(words(name))}</dt><dd>{escape(figure_text(name, value))}</dd></div>"
        for name, value in found.evidence.items()
    )
    gain = predicted_gain(found.expected_gain)
    return (
        f'<article class="{escape(found.severity)}">'
        f"<h3>{escape(found.code)}<span>{escape(found.severity)}</span></h3>"
        f"<p>{escape(found.message)}</p>"
        f"<p><b>Advice:</b> {escape(found.advice)} <i>{escape(gain[0].upper() + gain[1:])}.</i></p>"
        f"<dl>{numbers}</dl></article>"
    )


def _settings(diagnosis: Diagnosis, recommendation: Recommendation) -> str:
    snippet = settings_snippet(recommendation, diagnosis.evidence.settings)
    parts = [
        f"<pre><code>{escape(snippet)}</code></pre>"
        if snippet
        else f"<p>{escape(nothing_to_set(recommendation))}</p>"
    ]
    parts.append(f"<p>{escape(prediction_sentence(diagnosis, recommendation))}</p>")
    if recommendation.reasons:
        parts.append("<h3>Why</h3>" + _rows(recommendation.reasons.items()))
    if recommendation.refused:
        parts.append("<h3>Refused</h3>" + _rows(recommendation.refused.items()))
    if recommendation.advice:
        parts.append("<h3>Beyond settings</h3>" + _list(recommendation.advice))
    if rules := recommendation.rules_in_words():
        parts.append("<h3>Often advised without measuring</h3>" + _rows(rules))
    return "".join(parts)


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return "<p>Not measured: there was nothing to compare.</p>"
    text = f"<p>{escape(comparison_sentence(comparison))}</p>"
    if comparison.ratio is None or not len(comparison.pairs):
        return text
    from dataloading.plots import plot_comparison

    picture = _picture(
        lambda ax: plot_comparison(comparison, ax=ax),
        min(2.1 + 0.5 * ROW_IN * len(comparison.pairs), 6.0),
        alt=comparison.summary(),
        caption="Neighbouring blocks of steps, run in turn, so that a drift of the machine hits both.",
    )
    return text + picture


def _baseline(timing: LoaderTiming | None) -> str:
    if timing is None or timing.steps == 0:
        return "<p>Not measured.</p>"
    from dataloading.plots import plot_time_split

    picture = _picture(
        lambda ax: plot_time_split(timing, ax=ax),
        1.35 + ROW_IN * 1.15,
        alt=timing.summary(),
        caption="",
    )
    return picture + _rows(baseline_lines(timing))


def _machine(machine: Machine) -> str:
    return (
        f"<details><summary>All about the machine</summary>{_list(report_lines(machine))}</details>"
    )


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows
    )
    return f"<table>{cells}</table>"


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _picture(draw: Callable[[Any], Any], height_in: float, *, alt: str, caption: str) -> str:
    """A picture inside the page."""
    png = render_png(lambda figure: draw(figure.add_subplot()), height_in, dpi=DPI)
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    data = base64.b64encode(png).decode("ascii")
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}">{below}</figure>'
