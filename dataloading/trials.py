"""Trying settings for real: blocks of steps with each, by turns; what fails is noted and left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataloading.borrowing import borrowed
from dataloading.interleaving import Block, LoaderBlocks
from dataloading.making import Maker
from dataloading.memory_errors import ran_out_of_memory
from dataloading.progress import TimeBar
from dataloading.settings import LoaderSettings
from dataloading.timing import LEAST_LIMIT_S, TrainStep
from dataloading.watchdog import (
    ProbeTimeout,
    generators_of,
    loader_warnings_hidden,
    random_state_kept,
    time_limit,
)

if TYPE_CHECKING:
    import pandas as pd

TRIED, REFUSED, FAILED, HUNG, SHORT = "tried", "refused", "failed", "hung", "out of memory"
SLOWEST = 10.0  # times its length: a block that takes longer hangs
COLUMNS = (
    *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size"),
    *("predicted_samples_per_s", "samples_per_s", "spread_share", "blocks", "steps"),
    *("status", "reason", "chosen"),
)


@dataclass(eq=False)
class Trial:
    """One setting, what was expected of it and what it gave.

    Attributes:
        settings: What was tried.
        predicted_samples_per_s: By the model; None where there is none.
        rates: Samples per second of each block.
        steps: Steps in all blocks.
        status: `tried`, `refused` (not started: over a budget), `failed`, `hung`, `out of memory`,
            or "" as long as nothing was run.
        reason: Why it was refused or failed.
    """

    settings: LoaderSettings
    predicted_samples_per_s: float | None = None
    rates: list[float] = field(default_factory=list)
    steps: int = 0
    status: str = ""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether nothing spoke against it so far."""
        return self.status in ("", TRIED)

    @property
    def samples_per_s(self) -> float | None:
        """Geometric mean over the blocks."""
        return float(np.exp(np.mean(np.log(self.rates)))) if self.rates else None

    @property
    def spread_share(self) -> float | None:
        """Standard deviation over the blocks, as a share; None with a single one."""
        return float(np.std(np.log(self.rates), ddof=1)) if len(self.rates) > 1 else None

    def add(self, block: Block) -> None:
        """Note a block."""
        self.rates.append((block.samples or 0) / block.elapsed_s)
        self.steps += block.steps
        self.status = TRIED


def trial_table(trials: list[Trial], chosen: LoaderSettings) -> pd.DataFrame:
    """A row per trial, fastest first; what did not run comes last."""
    import pandas as pd

    rows = [
        {
            **{name: getattr(t.settings, name) for name in COLUMNS[:5]},
            **{name: getattr(t, name) for name in COLUMNS[5:8]},
            "blocks": len(t.rates),
            "steps": t.steps,
            "status": t.status or "not tried",
            "reason": t.reason,
            "chosen": t.settings == chosen,
        }
        for t in trials
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = ["predicted_samples_per_s", "samples_per_s", "spread_share"]
    table[numbers] = table[numbers].astype(float)
    return table.sort_values("samples_per_s", ascending=False, ignore_index=True, kind="stable")


class Bench:
    """Runs blocks with any settings; loaders stay open, with their workers, until the block ends."""

    def __init__(
        self,
        maker: Maker,
        train_step: TrainStep | None,
        device: torch.device | None,
        bar: TimeBar,
    ) -> None:
        self.maker = maker
        self.train_step = train_step
        self.device = device
        self.bar = bar
        self.doing = ["Starting"]
        self.error: Exception | None = None  # the first one, should nothing run at all
        self._open: dict[LoaderSettings, tuple[LoaderBlocks, contextlib.ExitStack]] = {}

    def __enter__(self) -> Bench:
        # Each loader keeps random states and warning filters as well, but loaders end in another
        # order than they began in: what counts is how things stood before the first of them.
        generators = generators_of(self.maker.present)
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_state_kept(*generators))
            stack.enter_context(loader_warnings_hidden())
            self._kept = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._kept:
            self.close_all()

    def blocks(self, settings: LoaderSettings) -> LoaderBlocks:
        """The blocks of a setting, started where they are not."""
        if settings not in self._open:
            with contextlib.ExitStack() as stack:
                lent = stack.enter_context(borrowed(self.maker.make(settings)))
                blocks = LoaderBlocks(
                    lent, settings.summary(), self.train_step, self.device, self.bar, self.doing
                )
                stack.enter_context(blocks)
                blocks.block(0.0)  # start-up and lazy imports are not compared
                self._open[settings] = blocks, stack.pop_all()
        return self._open[settings][0]

    def run(self, trial: Trial, seconds: float, limit_s: float) -> bool:
        """Run one block of a trial, and note what it gave or why it gave nothing.

        Args:
            trial: What to try.
            seconds: Length of the block.
            limit_s: When to give up, start of the workers included.

        Returns:
            Whether it went well.

        Raises:
            Exception: What the train step raises, unless memory ran out.
        """
        limit = max(limit_s, SLOWEST * seconds, LEAST_LIMIT_S)
        try:
            with time_limit(limit, lambda: self.doing[0]):
                trial.add(self.blocks(trial.settings).block(seconds))
        except ProbeTimeout as error:
            self.error = self.error or error
            trial.status, trial.reason = HUNG, str(error)
        except Exception as error:
            if ran_out_of_memory(error):
                trial.status, trial.reason = SHORT, in_one_line(error)
            elif self.doing[0].startswith("Training"):
                raise  # the user's own code failed, with these settings as with any
            else:
                self.error = self.error or error
                trial.status, trial.reason = FAILED, in_one_line(error)
        if not trial.usable:
            self.close(trial.settings)
        return trial.usable

    def close(self, settings: LoaderSettings) -> None:
        """End the workers of a setting, where it has any."""
        if (entry := self._open.pop(settings, None)) is not None:
            entry[1].close()

    def close_all_but(self, kept: LoaderSettings) -> None:
        """End the workers of all other settings."""
        for settings in [one for one in self._open if one != kept]:
            self.close(settings)

    def close_all(self) -> None:
        """End all workers."""
        with contextlib.ExitStack() as stack:
            for _, own in self._open.values():
                stack.push(own)
            self._open.clear()


class Turn:
    """Blocks of one setting, for whoever runs them by turns with those of others.

    Args:
        bench: Runs them.
        settings: The setting.
        alone: End the workers of all others first, where the machine cannot hold both.
    """

    def __init__(self, bench: Bench, settings: LoaderSettings, *, alone: bool) -> None:
        self.bench = bench
        self.settings = settings
        self.alone = alone

    def block(self, seconds: float) -> Block:
        """Run one block."""
        if self.alone:
            self.bench.close_all_but(self.settings)
        return self.bench.blocks(self.settings).block(seconds)


def in_one_line(error: BaseException) -> str:
    """What an error says; of one from a worker, what was raised there."""
    if "bootstrapping phase" in str(error):  # of multiprocessing, in the copy that is a worker
        return "the script has no `if __name__ == '__main__':`, which workers that are spawned need"
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("Caught "):  # torch puts the worker's traceback in between
        return lines[-1].strip()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def rounds(trials: list[Trial]) -> Iterator[list[Trial]]:
    """All trials by turns, each round in the opposite order of the one before."""
    order = list(trials)
    while True:
        yield list(order)
        order.reverse()
