"""Asking each of the other packages about one fault; runs in the environment that has them.

    python -m benchmarks.faults.rival_tools --tool gpuprof --one F01

Each is used as its own page of introduction says, and its first verdict is printed as JSON. Files
that a tool writes go to the folder for temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.cases import Built
from benchmarks.faults.plain_loop import Net, build, train
from benchmarks.faults.surroundings import CannotRunHere

ROOT = Path(__file__).resolve().parents[2]
TRACED = "traceml-loop"  # the training script that `traceml run` is given


def ask_gpuprof(built: Built, name: str, seed: int) -> str:
    """The first insight; remarks about money are left out."""
    import gpuprof
    from gpuprof import insights

    with gpuprof.profile("fault"):
        train(built)
    found = insights.analyze("gpuprof.db", 1)["insights"]
    titles = [one["title"] for one in found if not one["title"].startswith("Estimated cost")]
    return titles[0] if titles else ""


def ask_gpu_idle(built: Built, name: str, seed: int) -> str:
    """The first finding in a trace of thirty steps, with its advice."""
    import analyzer
    from torch import profiler

    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        schedule=profiler.schedule(wait=0, warmup=10, active=30, repeat=1),
    ) as running:
        train(built, after_step=running.step)
    running.export_chrome_trace("trace.json")
    found = analyzer.analyze("trace.json")["findings"]
    return f"{found[0]['cause']}: {found[0]['fix']}" if found else ""


def ask_fournex(built: Built, name: str, seed: int) -> str:
    """The bottleneck that it would show to the user, with its loader clock in place."""
    import fournex

    fournex.init(job_name="fault")
    numbers = count()
    train(
        built,
        fournex.instrument_dataloader(built.loader),
        step_context=lambda model: fournex.step_context(next(numbers), model=model),
    )
    seen = fournex.summarize_run(fournex.get_local_events())
    return seen["diagnosis"]["user_facing_bottleneck"] or ""


def ask_loadtune(built: Built, name: str, seed: int) -> str:
    """Its explanation of the baseline, which it always takes without workers."""
    from loadtune import Workload
    from loadtune.api import profile
    from loadtune.heuristic import HeuristicBrain

    def step(model: Net, optimizer: Any, batch: Any, device: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss

    workload = Workload(
        name="fault",
        make_dataset=lambda: built.loader.dataset,
        make_model=lambda: Net(built.step),
        train_step=step,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        default_batch_size=built.loader.batch_size,
    )
    baseline = profile(workload)
    if baseline.error:
        raise RuntimeError(baseline.error)
    return HeuristicBrain().explain(baseline, [])


def ask_traceml(built: Built, name: str, seed: int) -> str:
    """The primary diagnosis of `traceml run`."""
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).parent / "traceml"), "run"]
    command += ["--logs-dir", str(folder), "--run-name", "fault", __file__]
    command += ["--args", "--tool", TRACED, "--one", name, "--seed", str(seed)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    summary = next(folder.rglob("final_summary.json"))
    primary = json.loads(summary.read_text(encoding="utf-8"))["primary_diagnosis"]
    return primary.get("kind") or primary.get("status") or ""


def train_traced(built: Built, name: str, seed: int) -> str:
    """What `traceml run` runs."""
    import traceml_ai

    traceml_ai.init(mode="auto")
    train(built, step_context=traceml_ai.trace_step)
    return ""


TOOLS: dict[str, Callable[[Built, str, int], str]] = {
    "traceml": ask_traceml,
    "gpuprof": ask_gpuprof,
    "gpu-idle": ask_gpu_idle,
    "loadtune": ask_loadtune,
    "fournex": ask_fournex,
    TRACED: train_traced,
}


def main() -> None:
    """Ask one tool about one fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool", choices=[*TOOLS], required=True)
    parser.add_argument("--one", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(tempfile.gettempdir())
    try:
        built = build(options.one, options.seed)
        if built.how != "diagnose":
            raise CannotRunHere("it does not show in a running loop of one process")
        with built.around:
            verdict = TOOLS[options.tool](built, options.one, options.seed)
    except CannotRunHere as error:
        print(json.dumps({"cannot_run": str(error)}))
        return
    print(json.dumps({"verdict": verdict}))


if __name__ == "__main__":
    main()
