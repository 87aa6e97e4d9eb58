"""Blocks of two loaders, or of two training functions, run in turn: what a comparison measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from dataloading.batches import count_samples, move_to
from dataloading.borrowing import Borrowed
from dataloading.observing import finished_batches, has_arrived, queue_is_full
from dataloading.paired_ratios import (
    CONFIDENCE,
    FEWEST_PAIRS,
    LOOK_ERROR,
    is_precise,
    last_confidence,
)
from dataloading.progress import TimeBar
from dataloading.storage_reads import FROM_STORAGE, Reads, reads_since, reads_so_far
from dataloading.timing import TrainStep
from dataloading.watchdog import ProbeTimeout, close_iterator, open_iterator

WANTED_FOURS = 12  # the budget is cut into this many fours of blocks when steps are short enough
BLOCKS_SHARE = 0.7  # of the time; the rest goes to emptying queues
LATEST = 1.5  # times the budget: so long it may take to get the fewest pairs
WARM_SHARE = 1 / 3  # of the budget, at most, to get files into the page cache
MOST_EMPTYING = 3  # queues; a loader that is faster than its batches are taken is never empty
POLL_S = 0.002
WARM_UP_STEPS = 2  # trained after the queue is empty, before a block is timed
FEWEST_BLOCK_STEPS = 3  # a block of fewer steps is mostly its edges
SIDES = ("before", "after")
ORDER = ("before", "after", "after", "before")  # ABBA: slow drift hits both alike
MIRRORED = ("after", "before", "before", "after")  # chance decides: so do rhythms of the machine

_END = object()


@dataclass(frozen=True)
class Block:
    """A stretch of steps with one of the two.

    Attributes:
        samples: Samples trained on; None where a training function does not tell.
        elapsed_s: How long it took, without what was run to get there.
        steps: Batches, or calls of a training function.
        reads: What was read meanwhile; None where that is not known.
    """

    samples: int | None
    elapsed_s: float
    steps: int
    reads: Reads | None = None


class Blocks(Protocol):
    """Something that runs block after block."""

    def block(self, seconds: float) -> Block:
        """Run one block of about so many seconds."""


@dataclass
class Interleaved:
    """What the blocks showed.

    Attributes:
        rows: One a pair of neighbouring blocks, as in `Comparison.pairs`.
        reads: What each compared block of a side has read.
        confidence: Of the interval to take, so that all looks together go wrong in 5 % of runs.
        notes: What the reader should know.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    reads: dict[str, list[Reads | None]] = field(default_factory=lambda: {s: [] for s in SIDES})
    confidence: float = CONFIDENCE
    notes: list[str] = field(default_factory=list)

    def add(self, four: int, half: Mapping[str, Block], counted: bool) -> None:
        """Note a pair.

        Raises:
            ValueError: Samples should be counted, and a training function did not tell them.
        """
        row: dict[str, Any] = {"four": four}
        rates = {}
        for side, block in half.items():
            if counted and block.samples is None:
                raise ValueError(
                    f"{side}() returned no number of samples, but did so when it was called before; "
                    "return it always, or never."
                )
            done = block.samples if counted and block.samples is not None else block.steps
            rates[side] = done / block.elapsed_s
            row[f"{side}_samples_per_s"] = rates[side] if counted else math.nan
            row[f"{side}_steps"] = block.steps
            row[f"{side}_step_s"] = block.elapsed_s / block.steps
            share = block.reads.storage_share if block.reads is not None else None
            row[f"{side}_storage_share"] = math.nan if share is None else share
        for side, block in half.items():
            self.reads[side].append(block.reads)
        self.rows.append(row | {"ratio": rates["after"] / rates["before"]})

    def log_ratios(self) -> np.ndarray:
        """Mean log ratio of each four; all are complete when this is asked."""
        return np.log([row["ratio"] for row in self.rows]).reshape(-1, 2).mean(axis=1)


def warm_up(
    sides: Mapping[str, Blocks],
    seconds: float,
    block_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[Block]], float]:
    """Run blocks that are not compared: for start-up, lazy imports, and files still on storage.

    Args:
        sides: What to run, by name.
        seconds: So long both go on as long as they read from storage.
        block_s: Length of their blocks.
        clock: Gives the time in seconds.

    Returns:
        The blocks of each side, and the seconds spent after the start.
    """
    blocks = {name: [side.block(0.0)] for name, side in sides.items()}
    begun = clock()
    while any(_is_cold(own[-1]) for own in blocks.values()) and clock() - begun < seconds:
        for name, side in sides.items():
            blocks[name].append(side.block(block_s))
    return blocks, clock() - begun


def block_seconds(seconds: float) -> float:
    """Length of a block, for a budget."""
    return BLOCKS_SHARE * seconds / (len(ORDER) * WANTED_FOURS)


def interleave(
    sides: Mapping[str, Blocks],
    seconds: float,
    *,
    counted: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    chance: np.random.Generator | None = None,
) -> Interleaved:
    """Run fours of blocks until the time is over, or an early look finds them precise enough.

    Args:
        sides: What to run: `before` and `after`.
        seconds: The budget; up to half of it more for the fewest pairs.
        counted: Compare samples per second; else seconds.
        clock: Gives the time in seconds.
        chance: Draws the order of each four.

    Returns:
        What the blocks showed; at least one pair.

    Raises:
        ProbeTimeout: The time limit around all this passed before the first pair.
    """
    chance = chance or np.random.default_rng()  # of our own: global random states stay
    seen = Interleaved()
    begun, longest, four = clock(), 0.0, 0
    try:
        while True:
            order = ORDER if chance.random() < 0.5 else MIRRORED
            for pair in (order[:2], order[2:]):
                now = clock()
                enough = len(seen.rows) >= FEWEST_PAIRS and len(seen.rows) % 2 == 0
                limit = seconds if enough else LATEST * seconds
                needed = 2 * longest if enough else longest  # a four is not left half done
                if seen.rows and now - begun + needed > limit:
                    seen.confidence = last_confidence(four)
                    return seen
                half = {turn: sides[turn].block(block_seconds(seconds)) for turn in pair}
                seen.add(four, half, counted)
                longest = max(longest, clock() - now)
            four += 1
            if is_precise(seen.log_ratios()):
                seen.confidence = 1 - LOOK_ERROR
                return seen
    except ProbeTimeout as error:
        if not seen.rows:
            raise
        seen.notes.append(str(error))
        seen.confidence = last_confidence(four)
        return seen


class LoaderBlocks:
    """An endless run over the epochs of one loader, taken block by block."""

    def __init__(
        self,
        lent: Borrowed,
        name: str,
        train_step: TrainStep | None,
        device: torch.device | None,
        bar: TimeBar,
        doing: list[str],
    ) -> None:
        self.loader = lent.loader
        self.name = name
        self.train_step = train_step
        self.device = device
        self.bar = bar
        self.doing = doing
        self.iterator: Any = None
        self.queued = lent.queued_batches
        self.workers = max(1, lent.settings.num_workers) if lent.settings is not None else 1
        self.batched = lent.batched

    def __enter__(self) -> LoaderBlocks:
        return self

    def __exit__(self, *error: object) -> None:
        if self.iterator is not getattr(self.loader, "_iterator", None):
            close_iterator(self.iterator)

    def step(self, *, train: bool = True) -> int:
        """Load one batch and train on it; returns its samples."""
        self.doing[0] = f"Waiting for a batch of the loader {self.name!r}"
        if self.iterator is None:
            self.iterator = open_iterator(self.loader)
        batch = next(self.iterator, _END)
        if batch is _END:  # an epoch ends; the restart belongs to the run
            self.iterator = open_iterator(self.loader)
            batch = next(self.iterator, _END)
            if batch is _END:
                raise ValueError(
                    f"The loader {self.name!r} delivers no (further) batch; expected a loader that "
                    "can be iterated again and again."
                )
        if self.device is not None:
            batch = move_to(batch, self.device)
        if train and self.train_step is not None:
            self.doing[0] = f"Training on a batch of the loader {self.name!r}"
            self.train_step(batch)
        self.bar.update()
        return count_samples(batch, batched=self.batched)

    def block(self, seconds: float) -> Block:
        """Run one block; its samples, seconds and steps are those without the warm-up.

        Every worker delivers the same number of batches in it. Afterwards the workers fill their
        queue, before the other loader is measured.
        """
        earlier = self._reads()
        self._empty_queue()
        for _ in range(WARM_UP_STEPS):
            self.step()
        synchronize()
        started = time.perf_counter()
        samples = steps = 0
        while (
            steps < FEWEST_BLOCK_STEPS
            or steps % self.workers
            or time.perf_counter() - started < seconds
        ):
            samples += self.step()
            steps += 1
        synchronize()
        elapsed_s = time.perf_counter() - started
        block = Block(samples, elapsed_s, steps, reads_since(earlier, self._reads()))
        self._fill_queue(elapsed_s)
        return block

    def _empty_queue(self) -> None:
        """Take what was prepared while the other loader ran, until a batch has to be waited for.

        Without training, since training would let the queue fill again; workers finish some more
        batches meanwhile, which the steps after them must not find ready either.
        """
        for number in range(MOST_EMPTYING * self.queued):
            ready = has_arrived(self.iterator) or bool(finished_batches(self.iterator))
            self.step(train=False)
            if number >= self.queued and not ready:
                return

    def _fill_queue(self, block_s: float) -> None:
        """Let the workers rest with a full queue: filling it takes the CPUs from whoever runs next.

        Takes no longer than the block did.
        """
        deadline = time.perf_counter() + block_s
        batch_s = block_s / max(1, self.queued)
        while self.queued and time.perf_counter() < deadline:
            if queue_is_full(self.iterator):
                return
            time.sleep(min(batch_s, POLL_S))

    def _reads(self) -> Reads | None:
        workers = getattr(self.iterator, "_workers", ())
        return reads_so_far(worker.pid for worker in workers if worker.pid is not None)


def _is_cold(block: Block) -> bool:
    share = block.reads.storage_share if block.reads is not None else None
    return share is not None and share > FROM_STORAGE


def synchronize() -> None:
    """Wait for the GPU, where one is in use: at the edges of a block, nowhere else."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
