"""The headless main job: real photos, bad input, and an interrupt."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from dataloading.sample_images import create_sample_images

PROJECT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, str(PROJECT / "helper_functions.py")]


def run(*arguments, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=150
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Photos in a folder with a space and letters beyond ASCII in its name."""
    return create_sample_images(
        tmp_path_factory.mktemp("images") / "fotos für später", images=24, size=128
    )


def test_the_four_moves_are_made_and_a_report_is_written(photos, tmp_path):
    done = run(photos, "--batch-size", 4, "--step-ms", 5, "--seconds", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("Machine", "Baseline", "Diagnosis", "Recommendation", "Before and after"):
        assert f"{part}\n" in done.stdout
    assert "predicted" in done.stdout.lower()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "Traceback" not in done.stderr


def test_a_flat_folder_and_the_cnn_and_another_report(photos, tmp_path):
    flat = photos / "class_0"
    report = tmp_path / "other.html"
    done = run(flat, "--batch-size", 4, "--seconds", 6, "--report", report, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 class(es)" in done.stdout
    assert "a small CNN" in done.stdout
    assert report.is_file()
    assert not (tmp_path / "report.html").exists()


def refused(done, *texts):
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for text in texts:
        assert str(text) in last


def test_a_missing_folder_is_named(tmp_path):
    refused(run(tmp_path / "nowhere", cwd=tmp_path), tmp_path / "nowhere")


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    refused(run(tmp_path, cwd=tmp_path), tmp_path, "Expected")


def test_unreadable_images_are_named(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_text("this is text")
    refused(run(tmp_path, "--batch-size", 2, cwd=tmp_path), tmp_path / "0.jpg", "not an image")


def test_three_images_and_a_larger_batch(tmp_path):
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
    refused(run(tmp_path, cwd=tmp_path), tmp_path, "32", "--batch-size 3")


def test_three_images_one_by_one(tmp_path):
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
    done = run(tmp_path, "--batch-size", 1, "--seconds", 4, "--step-ms", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_report_that_cannot_be_written_is_refused_first(photos, tmp_path):
    started = time.monotonic()
    refused(run(photos, "--report", tmp_path / "no" / "r.html", cwd=tmp_path), tmp_path / "no")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("bad", [("--batch-size", "0"), ("--step-ms", "-1"), ("--seconds", "x")])
def test_bad_options_are_named(bad, tmp_path):
    done = run(*bad, cwd=tmp_path)
    assert done.returncode == 2
    assert bad[0] in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_leaves_nothing_running(photos, tmp_path):
    process = subprocess.Popen(
        [*COMMAND, str(photos), "--batch-size", "4", "--seconds", "60"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while not family.children() and time.monotonic() < deadline:
            time.sleep(0.1)
        children = family.children(recursive=True)
        assert children, "the workers never started"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not (tmp_path / "report.html").exists()
