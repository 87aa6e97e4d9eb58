"""Which batch sizes the memory of the machine allows, learnt from the batches that have passed.

The kernel of Linux ends a process that needs too much memory. So what a larger batch will need is
foreseen, and not tried.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from dataloading.batch_costs import BatchCosts
from dataloading.batch_trials import Trial
from dataloading.batches import batch_bytes, count_tensors
from dataloading.budgets import over_budget, resource_needs
from dataloading.machine import Machine, inspect_machine
from dataloading.results import format_bytes, format_share
from dataloading.settings import LoaderSettings

BATCH_COPIES = 3  # of a batch in host memory: its samples, the batch made of them, a pinned copy
STEEPER = 2.0  # the next samples may take so many times the memory of the last: growth with n^2
WORTH_A_TRIAL = 1 / 32  # of a size: a gap below 3 % is well below the margin


class HostBudget:
    """What loader and training may hold of the memory that is free."""

    def __init__(
        self,
        settings: LoaderSettings,
        machine: Machine | None,
        memory_fraction: float,
        trains_here: bool,
    ) -> None:
        """Look at the machine.

        Args:
            settings: Workers, prefetch and pinning of the loader.
            machine: Where training will run; None means here.
            memory_fraction: Share of what is free that may be used.
            trains_here: Whether training, too, takes the memory of this process.
        """
        here = inspect_machine()
        self.settings = settings
        self.machine = machine or here
        self.fraction = memory_fraction
        self.trains_here = trains_here
        known = (
            here.available_memory_bytes,
            self.machine.available_memory_bytes,
        )  # it is tried here
        self.free_bytes = min((free for free in known if free is not None), default=None)
        self.sample_bytes = 0.0
        self.tensors = 1
        self.grown: list[tuple[int, int]] = []  # size, and memory that training on it took

    def look_at(self, batch: Any) -> None:
        """Learn from a batch of one sample what it holds."""
        self.sample_bytes = batch_bytes(batch)
        self.tensors = max(1, count_tensors(batch))

    def learn(self, trial: Trial) -> None:
        """Learn from a size that passed."""
        self.sample_bytes = max(self.sample_bytes, trial.batch_bytes / trial.batch_size)
        if self.trains_here and trial.batch_size > max((n for n, _ in self.grown), default=0):
            self.grown.append((trial.batch_size, trial.peak_memory_bytes or 0))

    def largest(self, size: int, passed: int) -> int:
        """The largest size up to `size` that fits; `passed` where nothing worth a trial does."""
        sizes = range(passed + 1, size + 1)
        fits = passed + bisect_left(sizes, True, key=lambda n: self.refusal(n) is not None)
        return fits if fits == size or fits - passed > passed * WORTH_A_TRIAL else passed

    def overrun(self, trial: Trial) -> str | None:
        """Why a size that passed does not fit after all, by the memory that it took."""
        took = trial.peak_memory_bytes if self.trains_here else None
        return self.refusal(trial.batch_size, took)

    def refusal(self, size: int, training_bytes: int | None = None) -> str | None:
        """Why a size does not fit: need and budget; None where it does.

        Args:
            size: The batch size.
            training_bytes: Memory of this process while it trains; None means what is expected.
        """
        held = round(size * self.sample_bytes)
        costs = BatchCosts(0, 0, 0, batch_size=size, batch_bytes=held, tensors=self.tensors)
        if short := over_budget(self.settings, costs, self.machine, self.fraction):
            return short
        needs = resource_needs(costs, self.settings, self.machine)["memory_bytes"]
        needs += self._expected_bytes(size) if training_bytes is None else training_bytes
        if self.free_bytes is None or needs <= self.fraction * self.free_bytes:
            return None
        return (
            f"loader and training need {format_bytes(needs)} of memory, and "
            f"{format_share(self.fraction)} of what is free is "
            f"{format_bytes(self.fraction * self.free_bytes)}"
        )

    def _expected_bytes(self, size: int) -> int:
        """Memory of this process while it trains on a batch, by the rise seen so far."""
        copies = BATCH_COPIES * self.sample_bytes * size
        if not self.grown:
            return round(copies)
        last, most = self.grown[-1][0], max(grown for _, grown in self.grown)
        # Sizes close to each other differ by chance; the first one alone shows no slope but its own.
        earlier = [seen for seen in self.grown if 2 * seen[0] <= last] or [(0, 0)]
        slope = max((most - grown) / (last - before) for before, grown in earlier)
        return round(max(copies, most + STEEPER * slope * (size - last)))
