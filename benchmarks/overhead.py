"""What watching costs: import time, and throughput of a loop of 5 ms steps with and without it.

    python -m benchmarks.overhead [--pairs 20]

Every figure is a ratio within one run: blocks with and without watching alternate (ABBA), and each
pair gives one ratio. The step is fixed work (matrix products), so whatever watching takes from the
CPU or the interpreter shows as lost throughput.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pandas as pd
import torch
from torch.utils.data import DataLoader

from dataloading.comparison import ORDER, Comparison, judge_pairs
from helper_functions import inspect_machine, monitor_resources, watch_dataloader

STEP_S = 0.005
STEPS_PER_BLOCK = 100
IMPORT_ROUNDS = 5


class FixedWork:
    """A step of as many small matrix products as take about 5 ms here, on one thread."""

    def __init__(self) -> None:
        self.matrix = torch.rand(64, 64)
        self.products = 1
        for _ in range(6):  # settle on a number while the CPU warms up
            started = time.perf_counter()
            self()
            seconds = time.perf_counter() - started
            self.products = max(1, round(self.products * STEP_S / max(seconds, 1e-7)))

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)


def plain_block(step: FixedWork) -> float:
    """Seconds of one block of steps."""
    started = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        step()
    return time.perf_counter() - started


def monitored_block(step: FixedWork) -> float:
    """The same while the resource monitor runs; its start and end are not part of a step."""
    with monitor_resources():
        return plain_block(step)


def loader_block(step: FixedWork, wrap: Callable[[DataLoader], object]) -> float:
    """Seconds of one epoch of steps over a loader without work of its own."""
    loader = DataLoader(range(STEPS_PER_BLOCK * 4), batch_size=4)
    started = time.perf_counter()
    for _ in wrap(loader):  # type: ignore[attr-defined]
        step()
    return time.perf_counter() - started


def interleave(before: Callable[[], float], after: Callable[[], float], pairs: int) -> Comparison:
    """ABBA blocks; a ratio below 1 is what watching costs."""
    blocks = {"before": before, "after": after}
    before(), after()  # warm up
    rows, half = [], {}
    while len(rows) < pairs:
        for turn in ORDER:
            half[turn] = STEPS_PER_BLOCK / blocks[turn]()
            if len(half) == 2:
                rows.append({"ratio": half["after"] / half["before"], **half})
                half = {}
    return judge_pairs(pd.DataFrame(rows))


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """One intra-op thread, so that the second core is free for the monitor, as beside a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def import_ratio() -> float:
    """Median time of `import helper_functions` over that of `import torch`, fresh processes."""

    def seconds(module: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return time.perf_counter() - started

    seconds("helper_functions")  # compile and cache
    times: dict[str, list[float]] = {"torch": [], "helper_functions": []}
    for number in range(IMPORT_ROUNDS):
        for module in sorted(times, reverse=number % 2 == 0):
            times[module].append(seconds(module))
    return statistics.median(times["helper_functions"]) / statistics.median(times["torch"])


def show(what: str, result: Comparison) -> None:
    """Print a cost with its interval."""
    assert result.ratio is not None
    assert result.interval is not None
    low, high = (1 - bound for bound in reversed(result.interval))
    print(
        f"{what}: costs {1 - result.ratio:+.2%} of throughput "
        f"(95 % interval {low:+.2%} to {high:+.2%}, {len(result.pairs)} pairs of "
        f"{STEPS_PER_BLOCK} steps)"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    print(inspect_machine())
    print(f"import helper_functions: {import_ratio():.2f} x import torch")
    threads: AbstractContextManager[None] = single_thread()
    with threads:
        step = FixedWork()
        print(f"one step: {plain_block(step) / STEPS_PER_BLOCK * 1e3:.2f} ms")
        show("A/A control", interleave(lambda: plain_block(step), lambda: plain_block(step), pairs))
        show(
            "monitor_resources",
            interleave(lambda: plain_block(step), lambda: monitored_block(step), pairs),
        )
        show(
            "watch_dataloader",
            interleave(
                lambda: loader_block(step, lambda loader: loader),
                lambda: loader_block(step, lambda loader: watch_dataloader(loader, report=False)),
                pairs,
            ),
        )


if __name__ == "__main__":
    main()
