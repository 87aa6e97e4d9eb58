"""Running a fault: which tool is asked, and in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.faults.cases import Built, Case, on_a_rank
from benchmarks.faults.scoring import Advice, Named, Outcome
from benchmarks.faults.surroundings import CannotRunHere, run_ranks

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0  # for one case, start of Python, files and advice included
DIAGNOSIS_S = 14.0
ADVICE_S = 10.0  # for comparing the recommended settings with the present ones


def run_apart(case: Case, seed: int, *, advise: bool) -> tuple[Outcome, str]:
    """Run one case in a process of its own; returns also what it printed."""
    command = [*case.launcher, sys.executable, "-W", "ignore", "-m", "benchmarks.faults"]
    command += ["--one", case.name, "--seed", str(seed), *(["--advise"] if advise else [])]
    outcome = Outcome(case.name, seed, case.right, case.control)
    if case.launcher and (refused := refused_by(case.launcher)):
        return outcome.changed(cannot_run=refused), ""
    code, said, complaints = run_limited(command, LIMIT_S)
    if code is None:
        return outcome.changed(error=f"no answer within {LIMIT_S:.0f} s"), complaints
    if code:
        last = (complaints.strip().splitlines() or ["?"])[-1]
        return outcome.changed(error=last), complaints
    return Outcome.from_dict(json.loads(said.strip().splitlines()[-1])), complaints


def run_limited(command: list[str], limit_s: float, **environ: str) -> tuple[int | None, str, str]:
    """Run a command; nothing of it is left afterwards, be it a process or a temporary file.

    Returns:
        Exit code (None when it had to be ended), standard output and standard error.
    """
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch, **environ},
            start_new_session=True,
        )
        try:
            said, complaints = process.communicate(timeout=limit_s)
            return process.returncode, said, complaints
        except subprocess.TimeoutExpired:
            _end_group(process.pid)
            said, complaints = process.communicate()
            return None, said, complaints
        finally:
            _end_group(process.pid)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def refused_by(launcher: tuple[str, ...]) -> str | None:
    """Why a launcher does not work here, or None."""
    try:
        tried = subprocess.run([*launcher, "true"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{launcher[0]}: {error}"
    return tried.stderr.strip() or f"{launcher[0]} failed" if tried.returncode else None


def run_here(case: Case, seed: int, *, advise: bool) -> Outcome:
    """Run one case in this process; what the tools found is printed on standard error."""
    outcome = Outcome(case.name, seed, case.right, case.control)
    try:
        built = case.build(Random(f"{case.name}-{seed}"))
        with built.around:
            started = time.perf_counter()
            named, diagnosis = ask(built)
            seconds = time.perf_counter() - started
            advice = apply_advice(built, diagnosis) if advise and diagnosis is not None else None
    except CannotRunHere as error:
        return outcome.changed(cannot_run=str(error))
    return outcome.changed(named=named, seconds=seconds, advice=advice, form=built.form)


def ask(built: Built) -> tuple[tuple[Named, ...], Any]:
    """Ask the tool that fits; returns what it named, and the diagnosis where it made one."""
    import helper_functions as h

    found: Sequence[Any]
    diagnosis = None
    if built.how == "compare":
        result = h.compare_dataloaders(
            built.loader, train_step=built.step, progress=False, **built.options
        )
        show(result)
        different = result.verdict != "no difference shown"
        return ((result.verdict, "warning"),) if different else (), None
    if built.how == "samples":
        found = h.check_samples(built.loader, **built.options).findings
    elif built.how == "check":
        found = h.check_dataloader(built.loader)
    elif built.how == "scaling":
        found = h.measure_scaling(built.loader, **built.options).findings
    elif built.how == "ranks":
        found = run_ranks(on_a_rank, built.options)
    else:
        diagnosis = h.diagnose_dataloader(
            built.loader, built.step, seconds=DIAGNOSIS_S, progress=False
        )
        found = diagnosis.findings
        show(diagnosis, {k: v for k, v in diagnosis.evidence.to_dict().items() if v is not None})
    show(*found)
    return tuple((f.code, f.severity) for f in found), diagnosis


def apply_advice(built: Built, diagnosis: Any) -> Advice | None:
    """Set what is recommended and compare; None where that changes nothing, or nothing was measured."""
    import helper_functions as h

    if not diagnosis.evidence.steps:
        return None
    settings = h.recommend_settings(diagnosis).settings
    present = h.LoaderSettings.of(built.loader)
    wanted = settings.changed(batch_size=present.batch_size)
    if wanted.kwargs() == present.kwargs():
        return None
    after = h.rebuild_dataloader(built.loader, settings)
    result = h.compare_dataloaders(
        built.loader, after, built.step, seconds=ADVICE_S, progress=False
    )
    show(settings, result)
    return Advice(wanted.summary(), result.ratio, result.interval)


def show(*results: Any) -> None:
    """Print for the reader, beside the result."""
    print(*results, sep="\n", file=sys.stderr)
