"""The set-up cell finds the course from any folder, and is not taken in by namesakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CELL = Path(__file__).resolve().parent.parent / "notebooks" / "setup_cell.py"
RUN_CELL = f"exec(open({str(CELL)!r}, encoding='utf-8').read())\n"
READY = "The course is ready.\n"
OURS = "def diagnose_dataloader(): ...\n\ndef place(*_):\n    return __file__\n"
THEIRS = "def walk_through_dir(dir_path): ...\n"  # the file of the Learn PyTorch course
OUTSIDE = ("PYTHONPATH", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "DATALOADING_REPOSITORY")


def make_course(folder: Path) -> Path:
    """A stand-in for the project: no more than what the cell looks for."""
    (folder / "dataloading").mkdir(parents=True)
    (folder / "dataloading" / "__init__.py").write_text('__version__ = "0"\n', encoding="utf-8")
    (folder / "helper_functions.py").write_text(OURS, encoding="utf-8")
    return folder


def run_cell(folder: Path, then: str = "", before: str = "", **environment: str) -> str:
    """What the cell prints in `folder`, with no installed package in sight (-S); "" if it raised."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", before + RUN_CELL + then],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in OUTSIDE} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        assert "ImportError: The course's helper module was not found." in done.stderr, done.stderr
        return ""
    return done.stdout


@pytest.mark.parametrize("folder", [".", "notebooks", "notebooks/exercises"])
def test_a_copy_of_the_project_is_found_from_its_folders(tmp_path: Path, folder: str) -> None:
    course = make_course(tmp_path / "My Kurs ü")
    (course / folder).mkdir(parents=True, exist_ok=True)
    assert run_cell(course / folder) == READY


def test_an_installed_course_wins_over_a_namesake_in_the_folder(tmp_path: Path) -> None:
    installed = make_course(tmp_path / "site")
    (tmp_path / "here" / "dataloading").mkdir(parents=True)  # a folder of the reader's own
    (tmp_path / "here" / "helper_functions.py").write_text(THEIRS, encoding="utf-8")
    then = "print(helper_functions.place())"
    printed = run_cell(tmp_path / "here", then, PYTHONPATH=str(installed))
    assert printed == f"{READY}{installed / 'helper_functions.py'}\n"


def test_the_file_of_another_course_alone_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "helper_functions.py").write_text(THEIRS, encoding="utf-8")
    assert run_cell(tmp_path) == ""


def test_a_package_of_that_name_without_the_version_mark_is_not_enough(tmp_path: Path) -> None:
    course = make_course(tmp_path)
    (course / "dataloading" / "__init__.py").write_text("", encoding="utf-8")
    assert run_cell(course) == ""


def test_another_file_imported_earlier_asks_for_a_restart(tmp_path: Path) -> None:
    course = make_course(tmp_path / "course")
    (course / "notebooks").mkdir()
    (course / "notebooks" / "helper_functions.py").write_text(THEIRS, encoding="utf-8")
    assert run_cell(course / "notebooks", before="import helper_functions\n") == ""
    assert run_cell(course / "notebooks") == READY


def test_spawned_workers_find_the_same_files(tmp_path: Path) -> None:
    """A worker started by spawn, and by forkserver, imports ours too, with theirs in the folder."""
    installed = make_course(tmp_path / "site")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "helper_functions.py").write_text(THEIRS, encoding="utf-8")
    then = """
import multiprocessing
for method in set(multiprocessing.get_all_start_methods()) - {"fork"}:
    with multiprocessing.get_context(method).Pool(1) as pool:
        print(pool.map(helper_functions.place, [0])[0])
"""
    lines = run_cell(tmp_path / "here", then, PYTHONPATH=str(installed)).splitlines()
    assert set(lines[1:]) == {str(installed / "helper_functions.py")}
    assert len(lines) >= 2


# The real subprocess.run is replaced by one that "installs" by making the stand-in importable.
FAKE_PIP = """
import os, subprocess, sys

def fake_run(command, **options):
    print(command[1:])
    sys.path.append(os.environ["COURSE"])

subprocess.run = fake_run
"""


@pytest.mark.parametrize("host", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_hosted_notebooks_install_the_course_without_dependencies(
    tmp_path: Path, host: str
) -> None:
    course = make_course(tmp_path / "published")
    (tmp_path / "content").mkdir()
    address = "https://git.example/ann/course"
    environment = {"COURSE": str(course), "DATALOADING_REPOSITORY": address, host: "x"}
    command = ["-m", "pip", "install", "-q", "--no-deps", f"git+{address}"]
    printed = run_cell(tmp_path / "content", before=FAKE_PIP, **environment)
    assert printed == f"{command}\n{READY}"


@pytest.mark.parametrize(
    "environment",
    [
        {"DATALOADING_REPOSITORY": "https://git.example/ann/course"},  # nobody's own machine
        {"COLAB_RELEASE_TAG": "x", "DATALOADING_REPOSITORY": ""},  # not published yet
    ],
)
def test_nothing_is_installed_elsewhere_or_from_nowhere(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    course = make_course(tmp_path / "published")
    (tmp_path / "content").mkdir()
    folder = tmp_path / "content"
    assert run_cell(folder, before=FAKE_PIP, COURSE=str(course), **environment) == ""


def test_an_installed_course_is_not_installed_again(tmp_path: Path) -> None:
    course = make_course(tmp_path / "site")
    (tmp_path / "content").mkdir()
    environment = {
        "COURSE": str(course),
        "PYTHONPATH": str(course),
        "COLAB_RELEASE_TAG": "x",
        "DATALOADING_REPOSITORY": "https://git.example/ann/course",
    }
    assert run_cell(tmp_path / "content", before=FAKE_PIP, **environment) == READY
