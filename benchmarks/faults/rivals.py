"""Other packages on the same faults, in an environment of their own, at documented defaults.

Their first verdict is read generously: it counts as right where any reader could take it so. They
are asked only about faults that show in a running loop of one process.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import make_environment
from benchmarks.faults.cases import Case
from benchmarks.faults.running import run_limited
from benchmarks.faults.scoring import Outcome, in_words, summary

LIMIT_S = 75.0  # for one fault, start of Python included
INPUT = ("too-few-workers", "storage-bound", "cold-storage")  # "input-bound; more workers, prefetch
# or storage throughput": what the advice names counts as meant
BUSY = ("cpu-bound", "cpu-quota", "thread-oversubscription", "per-sample-overhead")
FINE = ("compute",)


@dataclass(frozen=True)
class Rival:
    """A package, and what its verdicts may mean: the first text that is found in one counts."""

    package: str
    means: tuple[tuple[str, tuple[str, ...]], ...]
    note: str


RIVALS = {
    "traceml": Rival(
        "traceml-ai==0.5.0",
        (
            ("INPUT_STRAGGLER", ("slow-rank",)),
            ("INPUT_BOUND", INPUT),
            ("H2D", ("host-to-device", "transfer")),
            ("RESIDUAL", ("host-work",)),
            ("COMPUTE_BOUND", FINE),
        ),
        "runs on a CPU",
    ),
    "gpuprof": Rival(
        "gpuprof==0.7.1",
        (
            ("CPU pegged", BUSY),
            ("disk hot", ("storage-bound", "too-few-workers", "small-files")),
            ("Cold-cache", ("cold-storage",)),
            ("Cache thrashing", ("storage-bound",)),
            ("imbalance", ("straggler",)),
            ("Prefetch queue", ("too-few-workers", "straggler")),
            ("waiting on the loader", INPUT),
            ("memory pressure", ("worker-memory-leak", "main-memory-leak", "prefetch-memory")),
            ("variance", ("straggler", "host-work")),
        ),
        "runs on a CPU, with figures of a made-up GPU",
    ),
    "gpu-idle": Rival(
        "gpu-idle==0.1.0",
        (
            ("dataloader: Worker processes are already", (*BUSY, "storage-bound", "small-files")),
            ("dataloader", INPUT),
            ("unattributed", ("host-work", "compute")),
        ),
        "runs on a CPU, but needs GPU kernels: it reads every loop as 0 % busy",
    ),
    "loadtune": Rival(
        "loadtune==0.3.0",
        (("CPU already saturated", BUSY), ("input-bound", INPUT), ("compute-bound", FINE)),
        "runs on a CPU; builds the loader itself and starts without workers, so that faults in "
        "workers, settings and samplers are lost on it",
    ),
    "fournex": Rival(
        "fournex==0.3.1",
        (
            ("input_bound", INPUT),
            ("copy_bound", ("host-to-device", "transfer")),
            ("sync_bound", ("host-work",)),
            ("underutilized_gpu", ("compute",)),
        ),
        "runs on a CPU, without figures of a GPU",
    ),
}


def install_all(python: Path) -> None:
    """Install the pinned packages."""
    pins = [rival.package for rival in RIVALS.values()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)


def read_as(rival: Rival, verdict: str, right: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """What a verdict names: a right code where it may mean one, else the first that it may mean."""
    for text, codes in rival.means:
        if text in verdict:
            code = next((code for code in codes if code in right), codes[0])
            return ((code, "info" if code in FINE else "warning"),)
    return ()


def ask(python: Path, tool: str, case: Case, seed: int) -> tuple[Outcome, str]:
    """Ask one tool about one fault; returns also its own words. To be silent on a control is right."""
    right = () if case.control else case.right
    outcome = Outcome(case.name, seed, right, case.control)
    command = [str(python), "-W", "ignore", "-m", "benchmarks.faults.rival_tools"]
    command += ["--tool", tool, "--one", case.name, "--seed", str(seed)]
    code, said, complaints = run_limited(command, LIMIT_S)
    if code is None:
        return outcome.changed(error=f"no answer within {LIMIT_S:.0f} s"), ""
    if code:
        return outcome.changed(error=(complaints.strip().splitlines() or ["?"])[-1]), ""
    answer = json.loads(said.strip().splitlines()[-1])
    if (reason := answer.get("cannot_run")) is not None:
        return outcome.changed(cannot_run=reason), ""
    verdict = answer["verdict"]
    return outcome.changed(named=read_as(RIVALS[tool], verdict, case.right)), verdict


def run_rivals(cases: list[Case], seeds: int, folder: Path | None, json_path: Path | None) -> None:
    """Ask every tool about every fault, and print verdicts and sums."""
    with tempfile.TemporaryDirectory() as scratch:
        python = make_environment(folder or Path(scratch, "environment"))
        install_all(python)
        results = {}
        for tool, rival in RIVALS.items():
            print(f"\n{rival.package}: {rival.note}")
            outcomes = []
            for case in cases:
                for seed in range(seeds):
                    outcome, verdict = ask(python, tool, case, seed)
                    print(f"  {case.name:5} seed {seed}  {_said(outcome, verdict)}", flush=True)
                    outcomes.append(outcome)
            figures = summary(outcomes) | {"median_s": None, "failed": []}
            print(*in_words(figures), sep="\n")
            results[tool] = [one.to_dict() for one in outcomes]
    if json_path:
        json_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _said(outcome: Outcome, verdict: str) -> str:
    """An answer in one line."""
    if outcome.cannot_run is not None:
        return f"not asked: {outcome.cannot_run}"
    if outcome.error is not None:
        return f"wrong  failed: {outcome.error}"
    return f"{'right' if outcome.is_right else 'wrong'}  {verdict[:100] or 'nothing'}"
