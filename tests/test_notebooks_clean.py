"""Every notebook is clean and in its frame; and the checkers themselves notice what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cleanliness
import execute
import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = execute.all_notebooks()
MADE_UP = cleanliness.HERE / "00_made_up.ipynb"  # only its name is used


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert cleanliness.problems(notebook, path) == []


# ---- The checkers, on made-up notebooks ----------------------------------------------------------


def tidy_notebook() -> NotebookNode:
    """A clean notebook: opening, set-up, a printing cell, a timing cell, an error as a lesson."""
    opening = f"{cleanliness.badge(MADE_UP)}\n\n# 00. What is this?"
    cells = [
        new_markdown_cell(opening),
        new_code_cell(
            cleanliness.setup_source(),
            metadata={"tags": ["setup"]},
            execution_count=1,
            outputs=[new_output("stream", text="The course is ready.\n")],
        ),
        new_code_cell("print(2)", execution_count=2, outputs=[new_output("stream", text="2\n")]),
        new_code_cell(
            "timing",
            metadata={"tags": ["nbval-ignore-output"]},
            execution_count=3,
            outputs=[
                new_output(
                    "execute_result",
                    {"text/plain": "3.1 ms <f at 0x7f00aa00bb00>"},
                    execution_count=3,
                )
            ],
        ),
        new_code_cell(
            "raise ValueError('no')",
            metadata={"tags": ["raises-exception"]},
            execution_count=4,
            outputs=[new_output("error", ename="ValueError", evalue="no", traceback=["..."])],
        ),
    ]
    return cleanliness.clean(new_notebook(cells=cells))


def show(cell: int, kind: str = "stream", **fields: object) -> Callable[[NotebookNode], None]:
    """Dirt: one more output in a cell."""

    def act(notebook: NotebookNode) -> None:
        notebook.cells[cell].outputs.append(new_output(kind, **fields))

    return act


def change(**fields: object) -> Callable[[NotebookNode], None]:
    """Dirt: other fields in the printing cell."""

    def act(notebook: NotebookNode) -> None:
        notebook.cells[2].update(nbformat.from_dict(fields))

    return act


def append_cells(number: int) -> Callable[[NotebookNode], None]:
    def act(notebook: NotebookNode) -> None:
        notebook.cells += [new_markdown_cell(f"text {i}") for i in range(number)]

    return act


def lose_badge(notebook: NotebookNode) -> None:
    notebook.cells[0].source = "# 00. What is this?"


def lose_number(notebook: NotebookNode) -> None:
    notebook.cells[0].source = notebook.cells[0].source.replace("00. ", "")


def edit_setup(notebook: NotebookNode) -> None:
    notebook.cells[1].source += "\nprint('more')"


def second_setup(notebook: NotebookNode) -> None:
    notebook.cells[2].metadata = NotebookNode({"tags": ["setup"]})


def lose_error(notebook: NotebookNode) -> None:
    notebook.cells[4].outputs = []


def quote_traceback(notebook: NotebookNode) -> None:
    notebook.cells[4].outputs[0].evalue = 'Caught in worker\n  File "torch/worker.py", line 3'


def store_widgets(notebook: NotebookNode) -> None:
    notebook.metadata["widgets"] = {"state": {}}


def random_id(notebook: NotebookNode) -> None:
    notebook.cells[2].id = "deadbeef"


def break_format(notebook: NotebookNode) -> None:
    notebook.cells[2].outputs = [{"output_type": "stream", "name": "stdout"}]


WIDGET = {cleanliness.WIDGET_VIEW: {"model_id": "1"}, "text/plain": "IntSlider(value=1)"}
BAR = {cleanliness.WIDGET_VIEW: {"model_id": "1"}, "text/plain": "  0%|          | 0/9 [00:00<?]"}
RAISED = {"ename": "KeyError", "evalue": "'x'", "traceback": ["..."]}
DIRT = {
    "badge": (lose_badge, "lacks this badge"),
    "title": (lose_number, "lacks a title"),
    "setup-edited": (edit_setup, "set-up cell differs"),
    "setup-twice": (second_setup, "2 cells are tagged 'setup'"),
    "too-long": (append_cells(cleanliness.MAX_CELLS), f"at most {cleanliness.MAX_CELLS}"),
    "not-run": (change(execution_count=None, outputs=[]), "not one run from top to bottom"),
    "run-twice": (change(execution_count=7), "numbered [1, 7, 3, 4]"),
    "tag": (change(metadata={"tags": ["nbval-ignore-ouput"]}), "cell 3: unknown tag"),
    "missing-output": (change(outputs=[]), "its output is missing"),
    "semicolon": (change(source="print(2);"), "assign to _"),
    "error": (show(2, "error", **RAISED), "raised KeyError ('x') without the tag"),
    "no-error": (lose_error, "it raised nothing"),
    "quoted-traceback": (quote_traceback, "quotes a traceback"),
    "warning": (show(2, name="stderr", text="UserWarning: slow\n"), "UserWarning: slow"),
    "warning-in-timing": (show(3, name="stderr", text="UserWarning: slow\n"), "cell 4: it writes"),
    "project-path": (show(2, text=f"{cleanliness.PROJECT}/data"), "holds a local path"),
    "linux-path": (show(2, text="saved in /home/ann/x.csv"), "local path: /home/ann/x.csv"),
    "mac-path": (show(3, text="'/Users/ann/x.csv'"), "cell 4: its output holds a local path"),
    "windows-path": (show(2, text=r"saved in C:\Users\ann"), r"local path: C:\Users\ann"),
    "path-in-table": (
        show(2, "display_data", data={"text/html": "<td>/tmp/ab/c.jpg</td>"}),
        "local path: /tmp",
    ),
    "address": (show(2, text="<object at 0x7f00aa00bb00>"), "address in memory"),
    "widget": (show(2, "display_data", data=WIDGET), "shows a widget"),
    "widget-cleaned": (
        show(2, "display_data", data={"text/plain": cleanliness.WIDGET_TEXT}),
        "shows a widget",
    ),
    "widget-in-timing": (show(3, "display_data", data=WIDGET), "not as execute.py leaves them"),
    "progress-bar": (show(2, "display_data", data=BAR), "shows a widget or a progress bar"),
    "widget-state": (store_widgets, "not as execute.py leaves them"),
    "random-id": (random_id, "not as execute.py leaves them"),
    "timestamps": (change(metadata={"execution": {"x": "1"}}), "not as execute.py leaves them"),
    "invalid": (break_format, "not a valid notebook"),
}


def test_a_tidy_notebook_has_no_problems() -> None:
    assert cleanliness.problems(tidy_notebook(), MADE_UP) == []


@pytest.mark.parametrize(("soil", "complaint"), DIRT.values(), ids=DIRT)
def test_dirt_is_noticed(soil: Callable[[NotebookNode], None], complaint: str) -> None:
    notebook = tidy_notebook()
    soil(notebook)
    faults = cleanliness.problems(notebook, MADE_UP)
    assert any(complaint in fault for fault in faults), faults


def test_harmless_text_is_not_taken_for_a_path() -> None:
    text = (
        "https://example.org/home/x, notebooks/tmp/x, /dev/shm, /proc/meminfo, 3 samples/s, a:\tb"
    )
    assert cleanliness.local_paths(text) == []


def test_a_notebook_without_cells_is_refused_with_sentences() -> None:
    faults = cleanliness.problems(new_notebook(), MADE_UP)
    assert any("lacks a title" in fault for fault in faults)


# ---- Cleaning ------------------------------------------------------------------------------------


def test_cleaning_twice_changes_nothing_more() -> None:
    notebook = tidy_notebook()
    store_widgets(notebook)
    random_id(notebook)
    notebook.cells[3].outputs.append(new_output("display_data", WIDGET))
    once = cleanliness.clean(notebook)
    assert cleanliness.clean(once) == once
    assert cleanliness.problems(once, MADE_UP) == []
    assert once.cells[3].outputs[-1].data == {"text/plain": cleanliness.WIDGET_TEXT}


def test_ids_change_only_where_the_text_does() -> None:
    before = tidy_notebook()
    after = tidy_notebook()
    after.cells.insert(2, new_markdown_cell("One more."))
    after.cells[3].source = "print(1 + 1)"
    ids = [cell.id for cell in cleanliness.clean(after).cells]
    assert ids[:2] + ids[4:] == [cell.id for cell in before.cells[:2] + before.cells[3:]]
    assert ids[3] != before.cells[2].id
    assert len(set(ids)) == len(ids)


def test_the_same_text_twice_gives_two_ids() -> None:
    notebook = new_notebook(cells=[new_markdown_cell("same"), new_markdown_cell("same")])
    first, second = cleanliness.clean(notebook).cells
    assert first.id != second.id


def test_progress_bars_go_only_where_output_is_not_compared() -> None:
    text = "  0%|          | 0/9 [00:00<?, ?it/s]\r 50%|#####     | 4/9 [00:01<00:01]\nUserWarning: slow\n"
    bar = new_output("stream", name="stderr", text=text)
    assert cleanliness.clean_output(bar, []).text == text
    assert cleanliness.clean_output(bar, ["nbval-ignore-output"]).text == "UserWarning: slow\n"
    widget = new_output("display_data", BAR)
    assert cleanliness.clean_output(widget, ["nbval-ignore-output"]) is None


def test_an_error_keeps_its_message_and_loses_the_machine() -> None:
    evalue = (
        'Caught ValueError in worker 0.\n  File "/home/ann/.venv/lib/python3.12/site-packages/torch/'
        f'worker.py", line 3\n  File "{cleanliness.PROJECT / "data_setup.py"}", line 5\nno'
    )
    error = new_output("error", ename="ValueError", evalue=evalue, traceback=["\x1b[31m", "long"])
    cleaned = cleanliness.clean_output(error, ["raises-exception"])
    assert 'File "site-packages/torch/worker.py", line 3' in cleaned.evalue
    assert 'File "data_setup.py", line 5' in cleaned.evalue
    assert cleaned.traceback == [f"ValueError: {cleaned.evalue}"]
    assert cleanliness.local_paths(cleanliness.shown_text(cleaned)) == []


def test_sync_writes_badge_and_setup_and_leaves_other_links() -> None:
    old = f"[![Open in Colab]({cleanliness.BADGE_IMAGE})](https://old.example/x)"
    notebook = new_notebook(
        cells=[
            new_markdown_cell(f"{old} [Slides](slides.html)\n\n# 00. What?"),
            new_code_cell("old text", metadata={"tags": ["setup"]}),
            new_code_cell("untouched"),
        ]
    )
    cleanliness.sync(notebook, MADE_UP)
    badge = cleanliness.badge(MADE_UP)
    assert notebook.cells[0].source == f"{badge} [Slides](slides.html)\n\n# 00. What?"
    assert notebook.cells[1].source == cleanliness.setup_source()
    assert notebook.cells[2].source == "untouched"
    notebook.cells[0].source = "# 00. What?"
    assert cleanliness.sync(notebook, MADE_UP).cells[0].source == f"{badge}\n\n# 00. What?"


def test_badge_follows_the_address_of_the_project() -> None:
    published = cleanliness.badge(MADE_UP, "https://github.com/ann/course.git")
    page = (
        "https://colab.research.google.com/github/ann/course/blob/main/notebooks/00_made_up.ipynb"
    )
    assert published.endswith(f"({page})")
    assert cleanliness.badge(MADE_UP, "").endswith("(https://colab.research.google.com/)")


# ---- Executing -----------------------------------------------------------------------------------


@pytest.fixture
def small_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a set-up cell of its own, for real runs that take little time."""
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    (notebooks / "setup_cell.py").write_text('REPOSITORY = ""\nprint("ready")\n', encoding="utf-8")
    for module in (cleanliness, execute):
        monkeypatch.setattr(module, "HERE", notebooks)
    monkeypatch.setattr(cleanliness, "PROJECT", tmp_path)
    return notebooks


def write_notebook(path: Path, *code: str) -> None:
    cells = [new_markdown_cell("# 07. Does it run?")]
    cells += [new_code_cell("old", metadata={"tags": ["setup"]})]
    cells += [new_code_cell(text) for text in code]
    nbformat.write(new_notebook(cells=cells), path)


def test_execute_runs_cleans_saves_and_refuses(
    small_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = small_project / "07_good.ipynb", small_project / "08_bad.ipynb"
    write_notebook(good, "import os\nprint(os.path.exists('07_good.ipynb'))", "6 * 7")
    write_notebook(bad, "import warnings\nwarnings.warn('slow')", "1 / 0")
    bad_before = bad.read_bytes()

    assert execute.main(["--check", "07_good"]) == 1  # not run yet
    assert execute.main([str(good)]) == 0
    assert execute.main(["--check", "07_good.ipynb"]) == 0
    cells = json.loads(good.read_text(encoding="utf-8"))["cells"]
    assert cells[1]["source"] == ['REPOSITORY = ""\n', 'print("ready")']
    assert cells[2]["outputs"][0]["text"] == ["True\n"]  # it ran in its own folder
    assert cells[3]["outputs"][0]["data"] == {"text/plain": ["42"]}
    assert not any(cell["metadata"].get("execution") for cell in cells)

    capsys.readouterr()
    assert execute.main(["08_bad"]) == 1
    said = capsys.readouterr().out
    assert "08_bad.ipynb: not clean, not saved" in said
    assert "ZeroDivisionError" in said
    assert bad.read_bytes() == bad_before


def test_execute_names_a_missing_notebook(small_project: Path) -> None:
    with pytest.raises(SystemExit, match=r"No notebook 'nowhere'"):
        execute.main(["nowhere"])
