"""The parts of the benchmark, and running each with a time limit and a guard."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.running import run_limited
from benchmarks.gpu.plan import NotAvailable, Plan
from dataloading.machine import inspect_machine
from dataloading.results import to_plain
from dataloading.watchdog import loader_warnings_hidden, random_state_kept, time_limit

Outcome = dict[str, Any]

PARTS = {  # a module of this package with a function `measure`; its share of the time
    "transfer": 0.23,
    "idle": 0.09,
    "utilisation": 0.13,
    "pattern": 0.12,
    "tuner": 0.37,  # the rest is for starting
}
DRY_SECONDS = 6.0  # for all parts of a dry run
LATEST = 1.1  # times the whole budget: when everything has ended, whatever happens
OVERRUN = 1.5  # times its own budget: so long a part may take
STARTING_S = 15.0  # importing torch, and the first use of the GPU, on top of that
KILLING_S = 5.0  # a part that does not end by itself is ended so long after its limit


def choose_device(*, dry_run: bool) -> torch.device:
    """The first CUDA device, or the CPU for a dry run; other accelerators are not used."""
    on_gpu = not dry_run and torch.cuda.is_available()
    return torch.device("cuda:0") if on_gpu else torch.device("cpu")


def run_all(
    seconds: float,
    *,
    dry_run: bool = False,
    only: tuple[str, ...] = tuple(PARTS),
    keep: Callable[[Outcome], None] = lambda results: None,
) -> Outcome:
    """Run the parts one after another.

    On a GPU each part has a process of its own, so that one that hangs or breaks CUDA ends alone.

    Args:
        seconds: Time for everything; a dry run takes `DRY_SECONDS` at most.
        dry_run: Run on the CPU with tiny sizes even where there is a GPU.
        only: Names of the parts to run.
        keep: Called with the results so far after each part.

    Returns:
        The results, ready for `json.dumps`: what they were measured on, and `parts` by name, each
        with `seconds` and `figures`, and with `error` or `not_available` where it did not end well.
    """
    device = choose_device(dry_run=dry_run)
    dry_run = device.type == "cpu"
    seconds = min(seconds, DRY_SECONDS) if dry_run else seconds
    begun = time.perf_counter()
    results = surroundings(device, dry_run=dry_run) | {"seconds_total": seconds, "parts": {}}
    for name in only:
        plan = Plan(device, seconds * PARTS[name], dry_run)
        left = LATEST * seconds + STARTING_S * dry_run - (time.perf_counter() - begun)
        results["parts"][name] = run_part(name, plan, left)
        results["seconds"] = time.perf_counter() - begun
        keep(results)
    return results


def surroundings(device: torch.device, *, dry_run: bool) -> Outcome:
    """What the figures were measured on."""
    machine = inspect_machine()
    on_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "dry_run": dry_run,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.system(),
        "usable_cpus": machine.usable_cpus,
    }


def run_part(name: str, plan: Plan, left_s: float) -> Outcome:
    """Run one part within what is left of the time, in a process of its own on a GPU."""
    apart = plan.device.type == "cuda" and platform.system() != "Windows"
    limit_s = min(OVERRUN * plan.seconds + STARTING_S, left_s - KILLING_S * apart)
    if limit_s < plan.seconds / 2:
        return {"seconds": 0.0, "figures": {}, "error": "not run: the time was over"}
    return run_apart(name, plan, limit_s) if apart else run_here(name, plan, limit_s)


def run_here(name: str, plan: Plan, limit_s: float) -> Outcome:
    """Run one part in this process; whatever happens, what it had measured so far is kept."""
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    outcome: Outcome = {}
    try:
        with (
            time_limit(limit_s, f"part {name!r}"),
            loader_warnings_hidden(),
            random_state_kept(),
        ):
            importlib.import_module(f"benchmarks.gpu.{name}").measure(plan, figures)
    except NotAvailable as reason:
        outcome = {"not_available": str(reason)}
    except Exception as error:  # a part that fails must not take the others with it
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - started, "figures": to_plain(figures), **outcome}


def run_apart(name: str, plan: Plan, limit_s: float) -> Outcome:
    """Run one part in a new process, which is ended when it is late."""
    started = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--part", name]
    command += ["--seconds-total", str(plan.seconds), "--limit", str(limit_s)]
    command += ["--dry-run"] if plan.dry_run else []
    code, said, complaints = run_limited(command, limit_s + KILLING_S)
    if code == 0:
        return json.loads(said.strip().splitlines()[-1])
    reason = f"no answer within {limit_s + KILLING_S:.0f} s"
    if code is not None:
        last = (complaints.strip().splitlines() or ["no message"])[-1]
        reason = f"ended with exit code {code}: {last}"
    return {"seconds": time.perf_counter() - started, "figures": {}, "error": reason}
