"""The report, in text and HTML, on made-up results."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from dataloading import report
from dataloading.comparison import Comparison, judge_pairs
from dataloading.diagnosis import Diagnosis, diagnose
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.recommendation import Recommendation, recommend_settings
from dataloading.report import html_report, text_report, write_html_report
from dataloading.settings import LoaderSettings
from dataloading.wording import changed_settings, settings_snippet, verdict_sentence, words

MACHINE = Machine(
    usable_cpus=4,
    memory_bytes=16 * 2**30,
    available_memory_bytes=8 * 2**30,
    python_version="3.13.2",
    torch_version="2.11.0",
    platform="Linux-6.1-x86_64",
)
SCRIPT = "<script>alert('x')</script>"


def made_timing(steps: int = 50) -> LoaderTiming:
    return LoaderTiming(
        wait_s=np.full(steps, 0.123),
        transfer_s=np.zeros(steps),
        step_s=np.full(steps, 0.037),
        other_s=np.zeros(steps),
        samples=np.full(steps, 32),
        startup_s=0.41,
        notes=("the first note",),
    )


def made_diagnosis(**changes: Any) -> Diagnosis:
    evidence = Evidence(
        num_workers=0,
        cpu_s=0.11,
        sample_wall_s=0.004,
        replay_step_s=0.037,
        alone_period_s=0.12,
        pin_memory=False,
        persistent_workers=False,
    ).with_timing(made_timing())
    return diagnose(replace(evidence, **changes), MACHINE, timing=made_timing())


def made_comparison(ratio: float = 2.5, pairs: int = 8) -> Comparison:
    before = 200 + np.arange(pairs) % 3
    after = before * ratio * (1 + 0.01 * (np.arange(pairs) % 2))
    table = pd.DataFrame(
        {"before_samples_per_s": before, "after_samples_per_s": after, "ratio": after / before}
    )
    return judge_pairs(table)


def all_results(**changes: Any) -> tuple[Machine, Diagnosis, Recommendation]:
    diagnosis = made_diagnosis(**changes)
    return MACHINE, diagnosis, recommend_settings(diagnosis)


class Page(HTMLParser):
    """Reads a page: which tags, which addresses, which text, and whether tags close in order."""

    VOID = ("meta", "img", "br", "link", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.alternatives: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        self.alternatives += [value or "" for name, value in attributes if name == "alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def dressed_comparisons() -> dict[str, Comparison | None]:
    nothing = made_comparison().pairs.iloc[:0]
    return {
        "none": None,
        "faster": made_comparison(),
        "slower": made_comparison(0.5),
        "few pairs": made_comparison(pairs=3),
        "not comparable": Comparison(None, None, "not comparable", nothing, False, ("why not",)),
    }


# ---- Text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("comparison", dressed_comparisons().values(), ids=dressed_comparisons())
def test_text_fits_a_terminal_and_has_all_sections(comparison: Comparison | None) -> None:
    text = text_report(*all_results(), comparison)
    assert max(len(line) for line in text.splitlines()) <= 80
    titles = re.findall(r"^(.+)\n-+$", text, flags=re.MULTILINE)
    assert titles[:5] == ["Machine", "Baseline", "Diagnosis", "Recommendation", "Before and after"]


def test_text_contains_the_numbers_behind_each_move() -> None:
    text = text_report(*all_results(), made_comparison())
    for part in (
        "4 usable",  # machine
        "200 samples/s",  # baseline
        "123 ms",
        "77 %",  # share of waiting
        "after 410 ms",  # first batch
        "too-few-workers",
        "threshold of wait share 10 %",
        "num_workers=3,",
        "(95 % interval",
        "8 pairs",
        "the first note",
    ):
        assert part in text, part
    assert re.search(r"Predicted gain \d\.\d\d times the rate", text)


def test_text_wraps_what_is_long_and_keeps_it_in_one_column() -> None:
    machine, diagnosis, recommendation = all_results()
    found = replace(diagnosis.findings[0], message="word " * 60, evidence={"path": "x" * 200})
    text = text_report(machine, replace(diagnosis, findings=(found,)), recommendation)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("word") == 60


def test_text_of_an_inconclusive_diagnosis_says_no_verdict() -> None:
    diagnosis = diagnose(Evidence(reasons={"cpu_s": "no dataset"}), MACHINE)
    text = text_report(MACHINE, diagnosis, recommend_settings(diagnosis))
    assert "No verdict: from 0 steady steps" in text
    assert "Not measured." in text
    assert "No setting needs to change." in text
    assert "gain not predicted" in text.lower()
    assert "CPU not measured: no dataset" in text


def test_text_names_what_was_refused() -> None:
    machine, diagnosis, recommendation = all_results()
    refused = replace(recommendation, refused={"9 workers, prefetch 2": "needs 9 GiB of memory"})
    assert "9 workers, prefetch 2: needs 9 GiB of memory" in text_report(
        machine, diagnosis, refused
    )


def test_text_takes_a_baseline_of_its_own() -> None:
    slow = replace(made_timing(), wait_s=np.full(50, 1.963))
    text = text_report(*all_results(), baseline=slow)
    assert "1.96 s" in text


# ---- Sentences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (
            {"wait_share": 0.8, "step_share": 0.2},
            "Training waits for data 80 % of the time; the main",
        ),
        ({"wait_share": 0.01, "step_share": 0.99}, "The loader keeps up"),
        ({"wait_share": 0.07, "step_share": 0.93}, "Little is lost to the loader"),
        ({"wait_share": 0.1, "step_share": 0.4, "other_share": 0.5}, "Other work of the training"),
        ({"steps": 3}, "No verdict: from 3 steady steps"),
        ({"wait_share": None}, "No verdict: the share of waiting is not known"),
    ],
)
def test_each_verdict_has_its_sentence(shares: dict[str, Any], expected: str) -> None:
    sentence = verdict_sentence(made_diagnosis(**shares))
    assert sentence.startswith(expected)
    assert sentence.endswith(".")


def test_field_names_become_words() -> None:
    assert words("threshold_wait_share") == "threshold of wait share"
    assert words("usable_cpus") == "usable CPUs"
    assert words("replay_step_s") == "replay step"
    assert words("prefetch_factor") == "prefetch_factor"


def recommended(**settings: Any) -> Recommendation:
    return Recommendation(LoaderSettings(**settings), {}, None, None, {}, ())


def test_snippet_holds_only_what_changes_and_runs() -> None:
    present = LoaderSettings(num_workers=1, pin_memory=True)
    wanted = recommended(num_workers=4, pin_memory=True, prefetch_factor=2)
    snippet = settings_snippet(wanted, present)
    assert "num_workers=4" in snippet
    assert "pin_memory" not in snippet
    assert "prefetch_factor" not in snippet  # 2 is what PyTorch takes anyway
    made = eval(snippet, {"DataLoader": dict, "dataset": []})
    assert made == {"num_workers": 4}


def test_snippet_says_what_must_go_when_workers_go() -> None:
    present = LoaderSettings(num_workers=2, prefetch_factor=4, persistent_workers=True)
    wanted = recommended(num_workers=0)
    assert changed_settings(wanted, present)[1] == ["prefetch_factor", "persistent_workers"]
    assert "# without prefetch_factor, persistent_workers" in settings_snippet(wanted, present)


def test_snippet_is_empty_when_nothing_changes() -> None:
    present = LoaderSettings(num_workers=2)
    assert settings_snippet(recommended(num_workers=2, prefetch_factor=2), present) == ""


# ---- HTML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("comparison", dressed_comparisons().values(), ids=dressed_comparisons())
def test_page_is_whole_and_loads_nothing(comparison: Comparison | None) -> None:
    text = html_report(*all_results(), comparison)
    page = Page(text)
    assert page.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert '<meta charset="utf-8">' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.addresses
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?:|url\(|@import", text)
    assert all(page.alternatives)
    text.encode("utf-8")


def test_page_contains_the_numbers_behind_each_move() -> None:
    page = Page(html_report(*all_results(), made_comparison()))
    for part in (
        "Training waits for data 77 % of the time; the main cause is too-few-workers.",
        "200 samples/s",
        "123 ms",
        "num_workers=3,",
        "(95 % interval",
        "50 in 8 s",
        "Python 3.13.2",
        "torch 2.11.0",
        "the first note",
    ):
        assert part in page.text, part
    assert len(page.addresses) == 3  # ceilings, before and after, time split


def test_page_without_comparison_says_so_and_has_no_picture_of_it() -> None:
    page = Page(html_report(*all_results()))
    assert "Not measured: there was nothing to compare." in page.text
    assert len(page.addresses) == 2


def test_page_of_an_inconclusive_diagnosis() -> None:
    diagnosis = diagnose(Evidence(), MACHINE)
    page = Page(html_report(MACHINE, diagnosis, recommend_settings(diagnosis)))
    assert "No verdict: from 0 steady steps" in page.text
    assert "Nothing was found." in page.text
    assert page.addresses == []


def test_page_escapes_every_text_that_comes_from_outside() -> None:
    _, diagnosis, recommendation = all_results(reasons={"send_s": SCRIPT})
    found = replace(
        diagnosis.findings[0],
        message=SCRIPT,
        advice=SCRIPT,
        evidence={SCRIPT: SCRIPT, "dataset": SCRIPT},
    )
    diagnosis = replace(diagnosis, findings=(found,), machine=replace(MACHINE, platform=SCRIPT))
    recommendation = replace(
        recommendation, reasons={SCRIPT: SCRIPT}, refused={SCRIPT: SCRIPT}, advice=(SCRIPT,)
    )
    comparison = replace(made_comparison(), notes=(SCRIPT,))
    machine = replace(MACHINE, cpu_source=SCRIPT, notes=(SCRIPT,))
    baseline = replace(made_timing(), notes=(SCRIPT,), clock=SCRIPT)
    text = html_report(machine, diagnosis, recommendation, comparison, baseline)
    assert "<script" not in text.lower()
    assert Page(text).text.count(SCRIPT) >= 12


def test_page_leaves_no_figure_open() -> None:
    before = plt.get_fignums()
    html_report(*all_results(), made_comparison())
    assert plt.get_fignums() == before


# ---- Writing -------------------------------------------------------------------------------------


def test_write_replaces_an_older_report(tmp_path: Path) -> None:
    path = tmp_path / "Bericht Nr. 1 – ä.html"
    path.write_text("old", encoding="utf-8")
    assert write_html_report(path, *all_results()) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]


def test_write_keeps_the_older_report_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")

    def refuse(*names: object) -> None:
        raise PermissionError("the disk is read-only")

    monkeypatch.setattr(report.os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_html_report(path, *all_results())
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_names_a_missing_folder_and_a_path_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write_html_report(tmp_path / "nowhere" / "report.html", *all_results())
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        write_html_report(tmp_path, *all_results())


def test_write_takes_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_html_report("report.html", *all_results()).exists()
