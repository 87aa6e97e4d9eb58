"""Run the notebooks from top to bottom and keep their outputs, clean.

python notebooks/execute.py                  every notebook
python notebooks/execute.py 00_start_here    one of them, by name or by path
python notebooks/execute.py --check          run nothing, only say what is not clean

The shared set-up cell and the Colab badge are written in before a run. A notebook that shows a
local path, a warning or an error that is not its lesson is not saved, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from cleanliness import HERE, KERNEL, clean, problems, sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

CELL_TIMEOUT_S = 180  # the limit that the tests give a cell (pyproject.toml)


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="a name or a path")
    parser.add_argument("--check", action="store_true", help="run nothing, only check")
    options = parser.parse_args(arguments)
    paths = [find_notebook(name) for name in options.notebooks] or all_notebooks()
    verdicts = [refresh(path, check=options.check) for path in paths]
    return 0 if all(verdicts) else 1


def refresh(path: Path, *, check: bool = False) -> bool:
    """Execute, clean and save one notebook, or only check it; say how it went; True when clean."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    try:
        if not check:
            notebook = clean(execute(sync(notebook, path), path.parent))
        faults = problems(notebook, path)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        faults = [f"stopped: {str(error).strip()}"]
    seconds = time.perf_counter() - begin

    if not faults and not check:
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    verdict = "clean" if not faults else "not clean" if check else "not clean, not saved"
    print(f"{path.name}: {verdict}; {len(notebook.cells)} cells, {seconds:.1f} s", flush=True)
    for fault in faults:
        print(f"  {fault}", flush=True)
    return not faults


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells in a fresh kernel that works in `folder`; fills in the notebook it was given."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute()


def all_notebooks() -> list[Path]:
    """Every notebook of the course, exercises and solutions included."""
    return sorted(p for p in HERE.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def find_notebook(name: str) -> Path:
    """The notebook of the course that a path means, or a name with or without its ending."""
    for path in all_notebooks():
        if Path(name).resolve() == path or name in (path.name, path.stem):
            return path
    raise SystemExit(f"No notebook {name!r} in {HERE}: give its path, or its name as it is there.")


if __name__ == "__main__":
    sys.exit(main())
