"""An environment of its own for other packages, which also sees the packages of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path) -> Path:
    """Make the environment, unless it is there.

    Returns:
        Its Python.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
        seen = Path(done.stdout.strip(), "packages_of_the_project.pth")
        seen.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python
