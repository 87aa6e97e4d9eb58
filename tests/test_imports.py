"""Imports run one way, stay light, and need nothing optional."""

from __future__ import annotations

import ast
import graphlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FRONT = {"helper_functions", "data_setup"}
PARTS = {f"dataloading.{p.stem}" for p in (PROJECT / "dataloading").glob("*.py")} - {
    "dataloading.__init__"
}
MODULES = sorted(FRONT | PARTS | {"dataloading"})
ON_TOP = {"dataloading.widgets", "dataloading.plots"}  # shown last, imported when they are needed
LIGHT = {"numpy", "psutil", "torch", "dataloading", *FRONT}  # all else is imported where it is used
MAY_ALSO = {  # image folders and transforms are torchvision's
    f"dataloading.{part}": {"torchvision"}
    for part in ("images", "batch_transforms", "transform_steps")
} | {"dataloading.draft_crops": {"torchvision", "PIL"}}
OPTIONAL = ("ipywidgets", "torchvision", "pynvml", "IPython", "matplotlib")
HEAVY = (*OPTIONAL, "pandas", "scipy", "PIL")


def source_of(module: str) -> str:
    path = PROJECT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


def imported_at_once(source: str, module: str) -> set[str]:
    """Modules that the import of a file imports: everything outside functions and TYPE_CHECKING."""
    return {name for node in at_module_level(ast.parse(source)) for name in names(node, module)}


def imported_anywhere(source: str, module: str) -> set[str]:
    return {name for node in ast.walk(ast.parse(source)) for name in names(node, module)}


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


def names(node: ast.AST, module: str) -> Iterator[str]:
    """The full names of the modules that one import statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module if module == "dataloading" else module.rpartition(".")[0]
        base = ".".join(filter(None, [package if node.level else "", node.module]))
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def in_fresh_python(code: str) -> dict:
    """What a new interpreter prints as its last line, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- The reader of imports itself ----------------------------------------------------------------


def test_imports_are_read_from_where_they_act() -> None:
    source = """
from __future__ import annotations
import numpy as np
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import pandas
try:
    import torchvision
except ImportError:
    torchvision = None
from . import plots
from .results import Result
class A:
    import scipy.stats
def f():
    import matplotlib.pyplot as plt
    from helper_functions import x
"""
    at_once = imported_at_once(source, "dataloading.made_up")
    assert {"numpy", "torchvision", "scipy.stats", "dataloading.results"} <= at_once
    assert "dataloading.plots" in at_once
    assert not {"pandas", "matplotlib.pyplot", "helper_functions"} & at_once
    assert {"pandas", "helper_functions"} <= imported_anywhere(source, "dataloading.made_up")
    assert "dataloading.plots" in imported_at_once("from . import plots", "dataloading")


# ---- The rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted(PARTS))
def test_no_part_imports_the_front_door(module: str) -> None:
    wrong = FRONT & imported_anywhere(source_of(module), module)
    assert not wrong, f"{module} imports {wrong}: imports run from the front door to the parts"


@pytest.mark.parametrize("module", sorted(set(MODULES) - ON_TOP))
def test_plots_and_widgets_are_imported_where_they_are_used(module: str) -> None:
    wrong = ON_TOP & imported_at_once(source_of(module), module)
    assert not wrong, f"{module}: import {wrong} inside the function that needs it"


@pytest.mark.parametrize("module", MODULES)
def test_only_light_packages_are_imported_at_once(module: str) -> None:
    packages = {name.split(".")[0] for name in imported_at_once(source_of(module), module)}
    wrong = packages - LIGHT - MAY_ALSO.get(module, set()) - set(sys.stdlib_module_names)
    assert not wrong, f"{module}: import {wrong} inside the function that needs it"


def test_no_part_waits_for_itself() -> None:
    graph = {
        m: set(MODULES) & imported_at_once(source_of(m), m) - {m, "dataloading"} for m in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules in a circle


def test_import_works_without_optional_packages() -> None:
    answer = in_fresh_python(f"""
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ImportError(f"{{name}} is blocked by the test")

sys.meta_path.insert(0, Blocked())
try:
    import ipywidgets
    blocked = False
except ImportError:
    blocked = True
import helper_functions
print(json.dumps({{"blocked": blocked, "names": len(helper_functions.__all__)}}))
""")
    assert answer["blocked"]
    assert answer["names"] > 0


def test_import_brings_nothing_heavy_that_torch_does_not_bring() -> None:
    answer = in_fresh_python(f"""
import json, sys
import torch
before = set(sys.modules)
import helper_functions
helper_functions.__all__
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(new & set({HEAVY!r}))))
""")
    assert answer == []


def test_import_takes_less_than_twice_the_time_of_torch() -> None:
    code = """
import json, time
begin = time.perf_counter()
import {module}
getattr({module}, "__all__")
print(json.dumps(time.perf_counter() - begin))
"""
    seconds: dict[str, list[float]] = {"torch": [], "helper_functions": []}
    for _ in range(3):  # in turn, so that a busy machine slows both
        for module, times in seconds.items():
            times.append(in_fresh_python(code.format(module=module)))
    torch_s, ours_s = (statistics.median(times) for times in seconds.values())
    assert ours_s < 2 * torch_s, f"import helper_functions {ours_s:.2f} s, torch {torch_s:.2f} s"
