"""What every result has in common: text, table, dict."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dataloading.results import (
    Result,
    format_bytes,
    format_seconds,
    format_value,
    html_table,
    to_plain,
)


@dataclass(frozen=True, repr=False, eq=False)
class Sample(Result):
    name: str
    waits_s: np.ndarray
    startup_s: float | None = None
    notes: tuple[str, ...] = ()

    derived = ("mean_s",)

    @property
    def mean_s(self) -> float:
        return float(self.waits_s.mean())

    def summary(self) -> str:
        return f"{self.name} is <b>fast</b>"


SAMPLE = Sample("a & b", np.array([0.1, 0.3]), None, ("first", "second"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (4e-5, "40 µs"),
        (0.00099999, "1 ms"),
        (0.16, "160 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (999.4, "999 s"),
        (999.9, "1,000 s"),
        (2988, "2,988 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 * 2**20, "64.0 MiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("wait_share", 0.8, "80 %"),
        ("startup_s", 0.0123, "12.3 ms"),
        ("memory_bytes", 3 * 2**30, "3.0 GiB"),
        ("samples_per_s", 12345.6, "12,346 samples/s"),
        ("samples_per_s", 0.25, "0.25 samples/s"),
        ("samples_per_s", math.inf, "not available"),
        ("ratio", 1.2345, "1.23"),
        ("samples", 1024.0, "1,024"),
        ("steps", 1500, "1,500"),
        ("done", True, "True"),
        ("startup_s", None, "not available"),
        ("startup_s", math.nan, "not available"),
        ("interval", (1.5, None), "1.5, not available"),
        ("notes", (), "none"),
        ("clock", "host", "host"),
    ],
)
def test_values_carry_the_unit_of_their_name(name: str, value: Any, text: str) -> None:
    assert format_value(name, value) == text


def test_one_stable_line() -> None:
    assert repr(SAMPLE) == "Sample: a & b is <b>fast</b>"


def test_the_table_is_escaped_and_leaves_arrays_out() -> None:
    html = SAMPLE._repr_html_()
    assert "&lt;b&gt;fast" in html
    assert "<b>" not in html
    assert "a &amp; b" in html
    assert "waits_s" not in html
    assert "200 ms" in html  # the derived mean
    assert "not available" in html
    assert "first, second" in html


def test_a_table_without_caption() -> None:
    assert "caption" not in html_table([("steps", 1)])


def test_a_result_becomes_json() -> None:
    assert json.loads(json.dumps(SAMPLE.to_dict())) == {
        "name": "a & b",
        "waits_s": [0.1, 0.3],
        "startup_s": None,
        "notes": ["first", "second"],
        "mean_s": 0.2,
    }


def test_everything_else_becomes_json_too() -> None:
    frame = pd.DataFrame({"index": [7], "wall_s": [math.nan]})
    timed = pd.DataFrame({"cpu": [1.5]}, index=pd.Index([0.25], name="time_s"))
    value = {
        1: np.float32(0.5),
        "inf": math.inf,
        "path": Path("a") / "b",
        "frame": frame,
        "timed": timed,
        "nested": [SAMPLE, {2}],
        "other": complex(1, 2),
    }
    plain = json.loads(json.dumps(to_plain(value)))
    assert plain["1"] == 0.5
    assert plain["inf"] is None
    assert plain["path"] == "a/b"
    assert plain["frame"] == [{"index": 7, "wall_s": None}]  # row numbers are no data
    assert plain["timed"] == [{"time_s": 0.25, "cpu": 1.5}]  # an index that says something is
    assert plain["nested"][0]["name"] == "a & b"
    assert plain["nested"][1] == [2]
    assert plain["other"] == "(1+2j)"
