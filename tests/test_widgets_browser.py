"""The sliders and the live view in a real JupyterLab and a real browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

PROJECT = Path(__file__).resolve().parent.parent
SERVER_S, KERNEL_MS, STEP_MS = 30, 40_000, 15_000  # how long each may take
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CELLS = [
    f"""
    import sys
    sys.path.insert(0, {str(PROJECT)!r})
    from dataloading.diagnosis import diagnose
    from dataloading.evidence import Evidence
    from dataloading.machine import Machine
    from dataloading.widgets import explore_settings, live_monitor
    evidence = Evidence(steps=60, num_workers=0, batch_size=32, replay_step_s=0.03, cpu_s=0.12)
    explore_settings(diagnose(evidence, Machine(usable_cpus=8)))
    """,
    "live_monitor(0.1)",
]
COUNT_PICTURES = """area => {
    window.shown = [];
    new MutationObserver(() => {
        const now = [...area.querySelectorAll('img')].map(image => image.src).join();
        if (now && now !== window.shown.at(-1)) window.shown.push(now);
    }).observe(area, {subtree: true, childList: true, attributes: true, attributeFilter: ['src']});
}"""


@pytest.fixture(scope="module")
def notebook_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab of its own, with no settings of the user, on a notebook with both widgets."""
    folder = tmp_path_factory.mktemp("lab")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in CELLS]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # or it asks
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "widgets.ipynb")
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
    ]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    own = {f"JUPYTER_{name}": str(folder / name.lower()) for name in names}
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    log = folder / "lab.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=os.environ | own, stdout=output, stderr=output, cwd=folder
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(server, f"{address}/api/status?token={token}", log)
        yield f"{address}/lab/tree/widgets.ipynb?token={token}"
    finally:
        stop(server, address, token)


def wait_for_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + SERVER_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start: {log.read_text(errors='replace')[-2000:]}")


def stop(server: subprocess.Popen[bytes], address: str, token: str) -> None:
    """Ask the server to end its kernels and itself; make sure that it did."""
    request = urllib.request.Request(
        f"{address}/api/shutdown", method="POST", headers={"Authorization": f"token {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5):
            pass
        server.wait(10)
    except (urllib.error.URLError, OSError, subprocess.TimeoutExpired):
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5)


@pytest.fixture(scope="module")
def page(chromium_path: str, notebook_url: str) -> Iterator[Any]:
    """The notebook in a browser, its cells run."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium_path, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 1500})
            page.set_default_timeout(STEP_MS)
            page.goto(notebook_url)
            page.locator(".jp-Notebook .jp-Cell .cm-content").first.wait_for(timeout=KERNEL_MS)
            for number in range(len(CELLS)):
                run_cell(page, number)
            page.locator(".jp-OutputArea img").first.wait_for(timeout=KERNEL_MS)
            page.get_by_role("button", name="Start", exact=True).wait_for()
            yield page
        finally:
            browser.close()


def run_cell(page: Any, number: int) -> None:
    """Run one cell; again, as long as the kernel is not connected yet and takes no notice."""
    cell = page.locator(".jp-Notebook .jp-Cell").nth(number)
    until = time.monotonic() + KERNEL_MS / 1e3
    while time.monotonic() < until:
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        try:
            cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[[*\d]+\]")).wait_for(
                timeout=1000
            )
            return
        except playwright.TimeoutError:
            continue
    pytest.fail(f"cell {number} was not run")


def test_a_17_3_each_release_of_a_slider_draws_once_and_nothing_moves(page: Any) -> None:
    cell, following = (page.locator(".jp-Notebook .jp-Cell").nth(n) for n in (0, 1))
    area = cell.locator(".jp-OutputArea .jp-OutputArea").filter(has=page.locator("img")).last
    height = area.evaluate("a => a.closest('.jupyter-widgets').getBoundingClientRect().height")
    place = following.bounding_box()
    first = area.locator("img").get_attribute("src")
    area.evaluate(COUNT_PICTURES)
    handle = cell.locator(".noUi-handle").first
    handle.focus()
    for presses in range(1, 11):
        page.keyboard.press("ArrowRight")
        wait_for_pictures(page, presses)
        assert area.locator("img").count() == 1

    grip = handle.bounding_box()
    x, y = grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for move in range(1, 31):
        page.mouse.move(x - 2 * move, y)
    assert float(handle.get_attribute("aria-valuenow")) < 10, "the slider follows the mouse"
    page.mouse.up()
    wait_for_pictures(page, 11)
    page.keyboard.press("Home")  # back to where it began: this picture is known, and the last one
    page.wait_for_function("first => window.shown.at(-1) === first", arg=first)

    pictures = page.evaluate("window.shown.length")
    assert pictures == 12, "ten keys, one drag, one key"
    assert page.evaluate("new Set(window.shown.slice(0, 10)).size") == 10
    assert (
        area.evaluate("a => a.closest('.jupyter-widgets').getBoundingClientRect().height") == height
    )
    assert following.bounding_box() == place
    assert area.evaluate("a => a.scrollHeight <= a.clientHeight && a.scrollWidth <= a.clientWidth")


def wait_for_pictures(page: Any, count: int) -> None:
    page.wait_for_function("count => window.shown.length >= count", arg=count)


def test_a_17_6_the_live_view_draws_by_itself_and_stops(page: Any) -> None:
    cell = page.locator(".jp-Notebook .jp-Cell").nth(1)
    picture = cell.locator(".jp-OutputArea img")
    cell.evaluate(COUNT_PICTURES)
    page.get_by_role("button", name="Start", exact=True).click()
    wait_for_pictures(page, 3)
    assert picture.count() == 1
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Start", exact=True).wait_for()
    cell.get_by_text("readings").wait_for()
    assert picture.count() == 1
