"""What README, notebooks and docstrings say is there is there."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import execute
import nbformat
import pytest

import dataloading
import helper_functions

PROJECT = Path(__file__).resolve().parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = execute.all_notebooks()
TITLED = [p for p in NOTEBOOKS if p.parent == execute.HERE and p.name[:2].isdigit()]
LINK = re.compile(r"\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")
COURSE_HELPERS = {
    "walk_through_dir",
    "plot_decision_boundary",
    "plot_predictions",
    "accuracy_fn",
    "print_train_time",
    "plot_loss_curves",
    "pred_and_plot_image",
    "set_seeds",
    "download_data",
}
MODULES = [
    "helper_functions",
    "data_setup",
    "dataloading",
    *(f"dataloading.{module.name}" for module in pkgutil.iter_modules(dataloading.__path__)),
]


# ---- The commands of the README ------------------------------------------------------------------


def command(marker: str) -> str:
    """The text of the first fenced block after a marker in the README."""
    block = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", README, flags=re.DOTALL)
    assert block, f"README.md has no fenced block after <!-- {marker} -->"
    return block[1]


@pytest.mark.parametrize("shell", ["", "-cmd", "-powershell"])
def test_both_commands_make_the_environment_in_one_line(shell: str) -> None:
    opens, tests = command(f"open-command{shell}"), command(f"test-command{shell}")
    for line in (opens, tests):
        assert "\n" not in line
        assert "-m venv .venv" in line
        assert "-m pip install -r requirements.txt" in line
        assert shell != "-powershell" or "&&" not in line  # PowerShell 5 does not know it
    notebook = re.search(r"jupyter lab (\S+)$", opens)
    assert notebook
    assert (PROJECT / notebook[1].replace("\\", "/")).is_file()
    assert tests.endswith("python -m pytest")


@pytest.mark.skipif(os.name == "nt", reason=".ci/run is for Linux and macOS")
def test_ci_runs_the_test_command_as_worded() -> None:
    shown = subprocess.run(
        ["bash", ".ci/run", "--show"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert shown.stdout == command("test-command") + "\n"
    if (PROJECT / ".git").exists():
        assert os.access(PROJECT / ".ci" / "run", os.X_OK)


def test_the_workflow_runs_the_same_commands() -> None:
    workflow = (PROJECT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "run: bash .ci/run\n" in workflow
    assert f"run: {command('test-command-cmd')}\n" in workflow
    for check in ("ruff check .", "ruff format --check .", "mypy"):
        assert f"run: {check}\n" in workflow
        assert check.replace(" --check", "") in README


def test_modules_that_the_readme_runs_exist() -> None:
    modules = re.findall(r"python -m (benchmarks\.\w+)", README)
    scripts = re.findall(r"python (\w+\.py|notebooks/\w+\.py)", README)
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    missing += [script for script in scripts if not (PROJECT / script).is_file()]
    assert modules
    assert scripts
    assert missing == []


def test_python_in_the_readme_uses_names_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    imports = [n for b in blocks for n in ast.walk(ast.parse(b)) if isinstance(n, ast.ImportFrom)]
    assert imports
    for statement in imports:
        module = importlib.import_module(str(statement.module))
        for alias in statement.names:
            assert hasattr(module, alias.name), f"README.md: {statement.module}.{alias.name}"


def test_requirements_ask_for_what_the_package_needs() -> None:
    text = (PROJECT / "requirements.txt").read_text(encoding="utf-8")
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["course"]
    assert set(needed) <= set(lines)
    assert [line for line in lines if line][-1] == "-e ."


# ---- Links ---------------------------------------------------------------------------------------


def markdown_of(path: Path) -> str:
    """The Markdown in a file."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def broken_links(text: str, path: Path) -> list[str]:
    """Relative links to files and headings that are not there."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    anchors = {slug(heading) for heading in headings(text)}
    broken = []
    for link in LINK.findall(prose):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):  # https:, mailto:
            continue
        there = (path.parent / unquote(target)).exists() if target else anchor.lower() in anchors
        if not there:
            broken.append(link)
    return broken


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and JupyterLab make it (in lower case)."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_broken_links_are_found() -> None:
    text = (
        "# 1. What now?\n[a](README.md) [b](#1-what-now) [c](https://x.example/none) `[e](none.md)`\n"
        "[d](none.md) [f](#none) [![g](https://x.example/g.svg)](none.ipynb)"
    )
    assert broken_links(text, PROJECT / "README.md") == ["none.md", "#none", "none.ipynb"]


@pytest.mark.parametrize("path", [PROJECT / "README.md", *NOTEBOOKS], ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    assert broken_links(markdown_of(path), path) == []


def test_the_readme_lists_every_notebook_and_no_other() -> None:
    listed = re.findall(r"^\| \[\w+\]\(notebooks/(\w+)\.ipynb\)", README, flags=re.MULTILINE)
    there = [path.stem for path in NOTEBOOKS if path.parent == execute.HERE]
    assert listed == there


@pytest.mark.parametrize("path", TITLED, ids=lambda path: path.stem)
def test_the_readme_asks_the_question_of_the_notebook(path: Path) -> None:
    row = re.search(rf"^\| \[{path.stem}\]\S+ \| (.+) \|$", README, flags=re.MULTILINE)
    assert row
    assert headings(markdown_of(path))[0] == f"{path.name[:2]}. {row[1]}"


# ---- Docstrings ----------------------------------------------------------------------------------

NAMES = list(getattr(helper_functions, "__all__", []))


def test_the_front_door_exports_the_helpers_of_the_course_that_it_replaces() -> None:
    assert COURSE_HELPERS - set(NAMES) == set()


def docstring_faults(function: Callable[..., object]) -> list[str]:
    """What the docstring and the type hints of a public function lack."""
    text = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    hints = function.__annotations__
    faults = [f"no type hint for {name}" for name in [*parameters, "return"] if name not in hints]
    if not text:
        return [*faults, "no docstring"]
    sections = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)
    named = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name in parameters:
        if not re.search(
            rf"^ +(?:\w+, )*\*{{0,2}}{name}\b[^:\n]*:", named.get("Args", ""), flags=re.MULTILINE
        ):
            faults.append(f"Args does not explain {name}")
    if str(hints.get("return", "")) != "None" and not {"Returns", "Yields"} & set(named):
        faults.append("no Returns")
    if not re.search(r"^Explained in: notebook \d\d\b", text, flags=re.MULTILINE):
        faults.append("no line 'Explained in: notebook NN'")
    return faults


def test_docstring_faults_are_found() -> None:
    def bare(x, *more: int):  # type: ignore[no-untyped-def]
        pass

    def half(x: int, y: int) -> int:
        """Add.

        Args:
            x: One number.
        """
        return x + y

    def whole(x: int, *, y: int = 0) -> int:
        """Add.

        Args:
            x: One number.
            y (int): Another one.

        Returns:
            The sum.

        Explained in: notebook 00
        """
        return x + y

    assert docstring_faults(bare) == [
        "no type hint for x",
        "no type hint for return",
        "no docstring",
    ]
    assert docstring_faults(half) == [
        "Args does not explain y",
        "no Returns",
        "no line 'Explained in: notebook NN'",
    ]
    assert docstring_faults(whole) == []


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_documented(name: str) -> None:
    value = getattr(helper_functions, name)
    if inspect.isclass(value):
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}(")  # what dataclass writes by itself
    else:
        assert docstring_faults(value) == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
