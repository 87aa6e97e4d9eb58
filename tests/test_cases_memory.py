"""The case of a long list of Python objects: how it grows in workers, and how a packed array does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workloads import linux_only

from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.memory_rules import MEMORY_RULES

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def names() -> list[dict[str, Any]]:
    """What two passes over many names showed: as a list, and packed."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", "import case_workloads; case_workloads.report_names()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def grown(told: dict[str, Any]) -> tuple[int, list[str]]:
    """Private growth of the workers in bytes, and the memory findings."""
    evidence = Evidence.from_dict(told["evidence"])
    assert evidence.worker_uss_growth_bytes is not None
    found = [rule(evidence, Machine(usable_cpus=4)) for rule in MEMORY_RULES]
    return evidence.worker_uss_growth_bytes, [one.code for one in found if one is not None]


@linux_only
def test_a_04_1_a_long_list_of_strings_is_copied_into_the_workers(
    names: list[dict[str, Any]],
) -> None:
    told = names[0]
    (flagged,) = [one for one in told["before"] if one["code"] == "copy-on-write-growth"]
    assert flagged["evidence"]["path"] == "dataset.names"
    assert flagged["evidence"]["objects"] == 400_000
    growth, codes = grown(told)
    # each worker copies what it reads: a quarter in each shuffled pass, towards four copies
    assert 1.0 * told["held_bytes"] < growth < 4.0 * told["held_bytes"]
    assert codes == ["copy-on-write-growth"]


@linux_only
def test_a_04_1_a_packed_array_is_not(names: list[dict[str, Any]]) -> None:
    told = names[1]
    assert "copy-on-write-growth" not in [one["code"] for one in told["before"]]
    growth, codes = grown(told)
    assert growth < 0.1 * told["held_bytes"]
    assert codes == []
