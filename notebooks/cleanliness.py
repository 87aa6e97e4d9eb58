"""What every notebook has in common, and what keeps one from being published.

`sync` writes the shared parts, `clean` takes out what differs between machines and runs, and
`problems` says in sentences what is still wrong. `execute.py` and the tests use all three.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode, ValidationError

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent

MAX_CELLS = 45  # one question a notebook: what is longer wants splitting
TAGS = {
    "setup": "the shared set-up cell",
    "nbval-ignore-output": "timings, progress bars and widgets: tested, but output not compared",
    "raises-exception": "the error is the lesson",
}
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_TEXT = "Interactive: run this notebook to move the controls."

BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
BADGE = re.compile(rf"\[!\[[^\]]*\]\({re.escape(BADGE_IMAGE)}\)\]\([^)]*\)")
PROGRESS_BAR = re.compile(r"\d+%\|.*\||\d+\w* \[\d\d:\d\d.*\]")  # as tqdm draws them
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")  # of an object in memory: another one in each run
DATA_URI = re.compile(r"data:[\w/+.-]+;base64,[\w/+=]+")
LOCAL_PATH = re.compile(
    r"(?<![\w.:/\\])"  # not the middle of a web address or of a relative path
    r"(?:/(?:home|Users|root|tmp|var|private|opt|mnt|content|kaggle)/[^\s'\"<>]*"
    r"|[A-Za-z]:\\[^\s'\"<>]+)"
)
INSTALLED_IN = re.compile(r"[^\s'\"<>]*[/\\](?=site-packages[/\\]|python3\.\d+[/\\])")


# ---- The shared parts ----------------------------------------------------------------------------


def sync(notebook: NotebookNode, path: Path) -> NotebookNode:
    """Write the set-up cell and the badge into a notebook, in place."""
    for cell in notebook.cells:
        if "setup" in tags(cell):
            cell.source = setup_source()
    if notebook.cells:
        opening = notebook.cells[0]
        if not BADGE.search(opening.source):
            opening.source = f"{badge(path)}\n\n{opening.source}"
        opening.source = BADGE.sub(lambda _: badge(path), opening.source)
    return notebook


def setup_source() -> str:
    """The text of the set-up cell."""
    return (HERE / "setup_cell.py").read_text(encoding="utf-8").strip()


def repository() -> str:
    """The address of the published course, from the one place that has it; empty before that."""
    for statement in ast.parse(setup_source()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "REPOSITORY":
            return str(ast.literal_eval(statement.value))
    raise ValueError(f"{HERE / 'setup_cell.py'} sets no REPOSITORY.")


def badge(path: Path, address: str | None = None) -> str:
    """The Colab badge of a notebook; until the course is published it opens Colab's own page."""
    address = repository() if address is None else address
    owner_and_name = address.removeprefix("https://github.com/").removesuffix(".git")
    file = path.resolve().relative_to(PROJECT.resolve()).as_posix()
    page = f"github/{owner_and_name}/blob/main/{file}" if address else ""
    return f"[![Open in Colab]({BADGE_IMAGE})](https://colab.research.google.com/{page})"


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


# ---- After a run: take out what differs between machines and runs --------------------------------


def clean(notebook: NotebookNode) -> NotebookNode:
    """The notebook as any machine could have made it; cleaning it again changes nothing."""
    cells = []
    ids: set[str] = set()
    for cell in notebook.cells:
        kept = NotebookNode(cell_type=cell.cell_type, id=stable_id(cell, ids), source=cell.source)
        kept.metadata = NotebookNode({"tags": tags(cell)} if tags(cell) else {})
        if cell.cell_type == "code":
            outputs = [clean_output(output, tags(cell)) for output in cell.outputs]
            kept.outputs = [output for output in outputs if output is not None]
            kept.execution_count = cell.execution_count
        cells.append(kept)
    metadata = {"kernelspec": dict(KERNEL), "language_info": {"name": "python"}}
    return nbformat.from_dict(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    )


def stable_id(cell: NotebookNode, taken: set[str]) -> str:
    """A cell id that follows from the cell's text, so that it changes only when the text does."""
    text = cell.source
    while (identity := hashlib.sha256(text.encode()).hexdigest()[:8]) in taken:
        text += " "  # the same text once more in this notebook
    taken.add(identity)
    return identity


def clean_output(output: NotebookNode, cell_tags: list[str]) -> NotebookNode | None:
    """One output as it is kept; None for a progress bar in a cell whose output is not compared."""
    output = nbformat.from_dict(output)
    passing = "nbval-ignore-output" in cell_tags
    if "metadata" in output:
        output.metadata = NotebookNode()
    if output.output_type == "error":
        output.evalue = shorten_paths(output.evalue)
        output.traceback = [f"{output.ename}: {output.evalue}"]
    elif output.output_type == "stream":
        if "raises-exception" in cell_tags:
            output.text = shorten_paths(output.text)
        if output.name == "stderr" and passing:
            output.text = without_progress_bars(output.text)
            return output if output.text else None
    elif WIDGET_VIEW in output.data:
        if passing and is_progress_bar(output.data.get("text/plain", "")):
            return None
        output.data = NotebookNode({"text/plain": WIDGET_TEXT})
    return output


def without_progress_bars(text: str) -> str:
    """What is left of a text when the progress bars in it are taken out."""
    lines = re.split(r"(?<=[\r\n])", text)
    return "".join(line for line in lines if not is_progress_bar(line))


def is_progress_bar(text: str) -> bool:
    """Whether a text is what tqdm draws, or the blank with which tqdm wipes that out."""
    return not text.strip() or PROGRESS_BAR.search(text) is not None


def shorten_paths(text: str) -> str:
    """The text of an error, with paths as seen from the project or from the installed packages."""
    text = INSTALLED_IN.sub("", text)
    for separator in ("/", "\\"):
        text = text.replace(f"{PROJECT}{separator}", "")
    return text


# ---- What is wrong with a notebook: each checker yields sentences --------------------------------


def problems(notebook: NotebookNode, path: Path) -> list[str]:
    """All that keeps a notebook from being published, a sentence each; none when it is clean."""
    try:
        nbformat.validate(notebook)
    except ValidationError as error:
        return [f"not a valid notebook: {error.message}"]
    faults = [*frame_problems(notebook, path), *order_problems(notebook)]
    for number, cell in enumerate(notebook.cells, start=1):
        checks = [*tag_problems(cell)]
        if cell.cell_type == "code":
            checks += output_problems(cell)
        faults += [f"cell {number}: {fault}" for fault in checks]
    if not faults and clean(notebook) != notebook:
        faults.append("ids, metadata or outputs are not as execute.py leaves them: run it")
    return faults


def frame_problems(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """The opening block, the set-up cell and the length."""
    opening = notebook.cells[0].source if notebook.cells else ""
    if badge(path) not in opening:
        yield f"the first cell lacks this badge: {badge(path)}"
    number = "".join(re.findall(r"^\d\d(?=_)", path.name))
    title = f"# {number}. " if number else "# "
    if not re.search(rf"^{re.escape(title)}\w", opening, flags=re.MULTILINE):
        yield f"the first cell lacks a title that begins with {title!r}"
    setups = [cell for cell in notebook.cells if "setup" in tags(cell)]
    if len(setups) != 1:
        yield f"{len(setups)} cells are tagged 'setup': there must be exactly one"
    elif setups[0].source != setup_source():
        yield "the set-up cell differs from notebooks/setup_cell.py"
    if len(notebook.cells) > MAX_CELLS:
        yield f"{len(notebook.cells)} cells, at most {MAX_CELLS}: split the question"


def order_problems(notebook: NotebookNode) -> Iterator[str]:
    """One run from top to bottom numbers the code cells 1, 2, 3 ..."""
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if counts != list(range(1, len(counts) + 1)):
        yield f"not one run from top to bottom: the code cells are numbered {counts}"


def tag_problems(cell: NotebookNode) -> Iterator[str]:
    """Tags that nobody acts on, misspelt ones above all."""
    for tag in tags(cell):
        if tag not in TAGS:
            yield f"unknown tag {tag!r}; known: {', '.join(TAGS)}"


def output_problems(cell: NotebookNode) -> Iterator[str]:
    """What a cell shows, against what its tags allow."""
    compared = "nbval-ignore-output" not in tags(cell)
    may_raise = "raises-exception" in tags(cell)
    errors = [output for output in cell.outputs if output.output_type == "error"]
    for error in errors:
        if not may_raise:
            yield f"raised {error.ename} ({error.evalue}) without the tag 'raises-exception'"
        elif compared and 'File "' in error.evalue:
            yield "its error quotes a traceback: tag it 'nbval-ignore-output' as well"
    if may_raise and not errors:
        yield "tagged 'raises-exception', but it raised nothing"
    if not cell.outputs and prints(cell.source):
        yield "it prints something, but its output is missing"
    if compared and cell.source.rstrip().endswith(";"):
        yield "the tests see what a last ';' hides: assign to _ instead"

    for output in cell.outputs:
        text = shown_text(output)
        for path in local_paths(text):
            yield f"its output holds a local path: {path}"
        if output.get("name") == "stderr" and not may_raise:
            yield f"it writes to stderr (a warning?): {text.strip()[:200]}"
        if compared and ADDRESS.search(text):
            yield "its output holds an address in memory: show less, or tag it 'nbval-ignore-output'"
        if compared and (WIDGET_TEXT in text or WIDGET_VIEW in output.get("data", {})):
            yield "it shows a widget or a progress bar: tag it 'nbval-ignore-output'"


def prints(source: str) -> bool:
    """Whether a cell calls `print` or `display`, outside of functions, loops and conditions."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # IPython's own syntax (%timeit, !ls)
        return False
    calls = [line.value for line in statements if isinstance(line, ast.Expr)]
    return any(
        isinstance(call, ast.Call) and ast.unparse(call.func) in ("print", "display")
        for call in calls
    )


def shown_text(output: NotebookNode) -> str:
    """All text of an output; pictures left out."""
    parts = [output.get("text", ""), output.get("ename", ""), output.get("evalue", "")]
    parts += output.get("traceback", [])
    for kind, data in output.get("data", {}).items():
        if not kind.startswith("image/") or kind == "image/svg+xml":
            parts.append(data if isinstance(data, str) else repr(data))
    return DATA_URI.sub("", "\n".join(parts))


def local_paths(text: str) -> list[str]:
    """Absolute paths of this machine, or of some other one, in a text."""
    return [str(PROJECT)] if str(PROJECT) in text else LOCAL_PATH.findall(text)[:3]
