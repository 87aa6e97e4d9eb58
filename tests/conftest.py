"""Shared by all tests: figures without windows, and the browser that the widget tests drive."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session", autouse=True)
def figures_without_windows() -> None:
    """Draw into memory; set here and not by MPLBACKEND, which the notebook tests would inherit."""
    import matplotlib

    matplotlib.use("Agg")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The program to give Playwright as `executable_path`; skips without one, but fails in CI."""
    path = find_chromium()
    if path:
        return path
    message = "no Chromium: install it, or run `python -m playwright install chromium`"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def find_chromium() -> str | None:
    """A Chromium or Chrome on the PATH, or else the one that Playwright itself has installed."""
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None
