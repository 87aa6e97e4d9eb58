"""What watching costs: import time, and throughput of a loop of 5 ms steps with and without it.

    python -m benchmarks.overhead [--pairs 20]

Every figure is a ratio within one run: blocks with and without watching alternate (ABBA), and each
pair gives one ratio. The step waits 5 ms, as for an accelerator: what watching takes from the
interpreter delays it. With --computing the step is fixed work on the CPU instead, which shows what
watching takes from the CPU too, but only on a quiet machine: the control says how far to trust it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dataloading.borrowing import borrowed
from dataloading.comparison import ORDER, Comparison, judge_pairs
from dataloading.watchdog import close_iterator
from helper_functions import inspect_machine, monitor_resources, watch_dataloader

STEP_S = 0.005
STEPS_PER_BLOCK = 100
SAMPLES_PER_BATCH = 16
WORKERS = 2
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


class Waiting(Dataset[int]):
    """Samples that wait, so that a worker makes a batch in little more than a step."""

    def __len__(self) -> int:
        return (STEPS_PER_BLOCK + WORKERS * 2) * SAMPLES_PER_BATCH

    def __getitem__(self, index: int) -> int:
        time.sleep(STEP_S / SAMPLES_PER_BATCH)
        return index


Step = Callable[[], object]


def plain_block(step: Step) -> float:
    """Seconds of one block of steps."""
    started = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        step()
    return time.perf_counter() - started


def monitored_block(step: Step) -> float:
    """The same while the resource monitor runs; its start and end are not part of a step."""
    with monitor_resources():
        return plain_block(step)


def loader_block(step: Step, wrap: Callable[[DataLoader], Iterable[Any]]) -> float:
    """Seconds of one epoch of steps over a loader without workers, whose samples cost nothing."""
    loader = DataLoader(TensorDataset(torch.zeros(STEPS_PER_BLOCK, 16)), batch_size=1)
    started = time.perf_counter()
    for _ in wrap(loader):
        step()
    return time.perf_counter() - started


def clocked_block(step: Step, *, clocks: bool) -> float:
    """Seconds of an epoch of steps over a loader whose workers have, or have no, clocks inside."""
    loader = DataLoader(Waiting(), batch_size=SAMPLES_PER_BATCH, num_workers=WORKERS)
    with borrowed(loader, clocks=clocks) as lent:
        iterator = iter(lent.loader)
        for _ in range(WORKERS * 2):
            next(iterator)
        started = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            next(iterator)
            step()
        return time.perf_counter() - started


@contextlib.contextmanager
def workers_running() -> Iterator[None]:
    """Workers of a loader in the background, idle, for the monitor to watch."""
    loader = DataLoader(range(100), num_workers=WORKERS, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    try:
        yield
    finally:
        close_iterator(iterator)


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
        f"{STEPS_PER_BLOCK} steps)",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--computing", action="store_true", help="the step computes on the CPU")
    options = parser.parse_args()
    print(inspect_machine())
    print(f"import helper_functions: {import_ratio():.2f} x import torch")
    with single_thread():
        step: Step = FixedWork() if options.computing else lambda: time.sleep(STEP_S)
        kind = "computes" if options.computing else "waits"
        seconds = plain_block(step) / STEPS_PER_BLOCK
        print(f"a step {kind} {seconds * 1e3:.2f} ms")

        def loading(wrap: Callable[[DataLoader], Iterable[Any]]) -> Callable[[], float]:
            return lambda: loader_block(step, wrap)

        def plain() -> float:
            return plain_block(step)

        arms = {
            "A/A control": (plain, plain),
            "monitor_resources": (plain, lambda: monitored_block(step)),
            "watch_dataloader": (
                loading(lambda loader: loader),
                loading(lambda loader: watch_dataloader(loader, report=False)),
            ),
            "clocks inside workers": (
                lambda: clocked_block(step, clocks=False),
                lambda: clocked_block(step, clocks=True),
            ),
        }
        with workers_running():
            for what, (before, after) in arms.items():
                show(what, interleave(before, after, options.pairs))


if __name__ == "__main__":
    main()
