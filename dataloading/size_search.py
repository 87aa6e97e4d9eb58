"""The way through batch sizes: up while they pass, into the gap, and down by the margin."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from dataloading.batch_trials import OUT_OF_MEMORY, PASSED, Trainer, Trial
from dataloading.host_budget import WORTH_A_TRIAL, HostBudget
from dataloading.progress import TimeBar
from dataloading.results import format_count

OVER_BUDGET, FAILED, NOT_TRIED = "over the budget", "failed", "not tried"


def next_size(passed: int, failed: int | None) -> int | None:
    """The size to try after these: double, or halfway; None when the gap is small enough.

    Args:
        passed: The largest size that passed; 0 where none has.
        failed: The smallest that failed; None where none has.

    Example:
        >>> next_size(8, None), next_size(8, 16), next_size(8, 9), next_size(0, 64)
        (16, 12, None, 32)
    """
    if failed is None:
        return 2 * passed
    return None if failed - passed - 1 <= passed * WORTH_A_TRIAL else (passed + failed) // 2


def with_margin(size: int, margin: float) -> int:
    """The size whose need, grown by the margin, is at most that of `size`; at least 1.

    Example:
        >>> with_margin(1000, 0.1), with_margin(8, 0.0), with_margin(1, 0.5)
        (909, 8, 1)
    """
    return max(1, math.floor(size / (1 + margin) + 1e-9))  # 110 / 1.1 is a little below 100


class SizeSearch:
    """Tries sizes and keeps what became of each.

    Attributes:
        trials: By batch size.
        epoch_samples: Samples of an epoch; None where nobody says and the end was not seen.
        doing: What goes on, in words for the watchdog.
    """

    def __init__(
        self,
        trainer: Trainer,
        host: HostBudget,
        *,
        present: int,
        largest: int | None,
        epoch_samples: int | None,
        margin: float,
    ) -> None:
        self.trainer = trainer
        self.host = host
        self.present = present
        self.largest = largest
        self.epoch_samples = epoch_samples
        self.margin = margin
        self.trials: dict[int, Trial] = {}
        self.doing = "Fetching a sample"
        self._size = present  # under way

    @property
    def passed(self) -> list[Trial]:
        """What passed within the memory budget, in ascending order."""
        trials = [self.trials[size] for size in sorted(self.trials)]
        return [trial for trial in trials if trial.status == PASSED]

    @property
    def largest_passed(self) -> int:
        """The largest size that passed; 0 where none has."""
        return max((trial.batch_size for trial in self.passed), default=0)

    @property
    def failed(self) -> int | None:
        """The smallest size that ran out of memory, or out of the budget."""
        short = (OUT_OF_MEMORY, OVER_BUDGET)
        sizes = [size for size, trial in self.trials.items() if trial.status.startswith(short)]
        return min(sizes, default=None)

    @property
    def wanted(self) -> int:
        """The largest size that may be chosen."""
        largest = self.largest_passed
        return largest if self.failed is None else with_margin(largest, self.margin)

    def run(self, until_s: float, bar: TimeBar) -> None:
        """Try sizes until the answer is known or the time is over (on the performance counter)."""
        self.host.look_at(self.trainer.one_sample())
        wished: int | None = self.present
        while wished is not None:
            allowed = min(wished, self.largest or wished, self.epoch_samples or wished)
            size = self.host.largest(allowed, self.largest_passed)
            if size <= self.largest_passed or self._too_late(size, until_s):
                self._skip(wished, allowed, size)
                break
            self._try(size, bar)
            wished = next_size(self.largest_passed, self.failed)
        size = self.wanted
        while self.passed and size >= 1 and size not in self.trials:
            if self._try(size, bar):
                break
            size = min(size - 1, with_margin(size, self.margin))

    def _too_late(self, size: int, until_s: float) -> bool:
        """Whether a trial would end after the time is over; the first one may."""
        if not self.passed:
            return False
        last = self.passed[-1]
        return time.perf_counter() + last.elapsed_s * size / last.batch_size > until_s

    def _try(self, size: int, bar: TimeBar) -> bool:
        """Try a size; returns whether it passed within the budget."""
        bar.update(format_count(size, "sample"))
        self._size = size
        self.doing = f"Training on a batch of {format_count(size, 'sample')}"
        trial = self.trainer.attempt(size)
        if trial.batch_size < size:  # the data set has ended
            self.epoch_samples = trial.batch_size
        if trial.status == PASSED:
            self.host.learn(trial)
            if short := self.host.overrun(trial):
                trial = replace(trial, status=f"{OVER_BUDGET}: {short}")
        self.trials[trial.batch_size] = trial
        return trial.status == PASSED

    def _skip(self, wished: int, allowed: int, size: int) -> None:
        """Note why nothing larger is tried."""
        if size > self.largest_passed:
            reason, skipped = "the time is over", size
        elif size < allowed:
            reason, skipped = self.host.refusal(allowed) or "", allowed
        elif allowed == self.epoch_samples and allowed < wished:
            reason, skipped = f"an epoch has {format_count(allowed, 'sample')}", wished
        else:
            return  # the user's own limit
        self.trials[skipped] = Trial(skipped, f"{NOT_TRIED}: {reason}")

    def stop(self) -> None:
        """End within a trial, which failed."""
        self.trials.setdefault(self._size, Trial(self._size, FAILED))
