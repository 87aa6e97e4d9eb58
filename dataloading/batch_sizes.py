"""How large a batch may be: sizes are tried by whole training steps, within what the memory holds.

The search doubles the batch size while it passes, halves the gap once a size has run out of memory,
and stays a margin below. A batch size that has not passed is never returned.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloading.arguments import (
    check_amount,
    check_device,
    check_int,
    check_seconds,
    check_train_step,
)
from dataloading.batch_costs import BatchCosts
from dataloading.batches import batch_bytes, count_tensors, move_to, tensors_in
from dataloading.budgets import over_budget, resource_needs
from dataloading.held_things import generators_kept
from dataloading.machine import Machine, inspect_machine
from dataloading.memory import read_main
from dataloading.object_graph import walk
from dataloading.peeking import trial_copy
from dataloading.profiling import fetches_batches
from dataloading.progress import TimeBar, time_bar
from dataloading.results import (
    Result,
    format_bytes,
    format_count,
    format_share,
    format_value,
)
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.timing import length_of
from dataloading.train_steps import TrainStep, state_kept
from dataloading.watchdog import ProbeTimeout, generators_of, random_state_kept, time_limit

if TYPE_CHECKING:
    import pandas as pd

PASSED, OUT_OF_MEMORY, FAILED, NOT_TRIED = "passed", "out of memory", "failed", "not tried"
REFINED_TO = 32  # the gap is halved until it is a 32nd of the size: 3 %, well below the margin
TIMED_S, MOST_STEPS = 0.2, 5  # for the steps after the first, which are timed
READ_SHARE = 0.1  # of the time budget to fetch the samples of one batch; then they are repeated
OVERRUN_S = 10.0  # a single step may run past the budget by this much before it is stopped
READ_EVERY_S = 0.01  # resident memory during a step
READING_SHARE = 0.1  # of the time, at most, spent on that
BATCH_COPIES = 3  # of a batch in host memory: its samples, the batch made of them, a pinned copy
STEEPER = 2.0  # the next samples may take so many times the memory of the last: growth with n^2
NEARLY_BEST = 0.95  # of the best rate: a smaller batch that gives so much is worth a word
MUCH_COPIED = 0.05  # of the peak: a copy of the model that is worth a word

# What libraries say beside `torch.OutOfMemoryError`: cuBLAS, cuDNN 8 and 9, MPS, XPU, the CPU.
NO_MEMORY_LEFT = re.compile(
    r"out[ _]of[ _](\w+[ _])?memory|(cublas|cudnn|cusolver|cusparse|cufft)\w*alloc\w*failed|"
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|cannot allocate memory",
    re.IGNORECASE,
)


@dataclass(frozen=True, repr=False, eq=False)
class BatchSizeSearch(Result):
    """Which batch sizes passed a whole training step, and which one to take.

    Attributes:
        batch_size: The chosen size, which has passed; None where none has.
        largest_passed: The largest size that has passed within the memory budget, or None.
        present_batch_size: What the loader has now.
        steps_per_epoch: Steps an epoch with the present and with the chosen size; None where the
            data set does not say its length.
        sizes: DataFrame with a row per size: `batch_size`; `status` (`passed`, `out of memory`,
            `failed` where the step did not end in time, or `not tried: ...` with the reason);
            `samples_per_s` of training alone; `peak_memory_bytes` of the accelerator, or without
            one how far the memory of this process rose since the search began; `chosen`. What was
            not measured is NaN.
        notes: What the reader should know; also what another batch size changes in training.
    """

    batch_size: int | None
    largest_passed: int | None
    present_batch_size: int
    steps_per_epoch: tuple[int, int] | None
    sizes: pd.DataFrame
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The present and the chosen size."""
        if self.batch_size is None:
            return f"batch size {self.present_batch_size}: no size passed a training step"
        rate = self.sizes.loc[self.sizes["chosen"], "samples_per_s"].item()
        return (
            f"batch size {self.present_batch_size} -> {self.batch_size} "
            f"({format_value('samples_per_s', rate)}; largest that passed {self.largest_passed})"
        )

    def rows(self) -> list[tuple[str, Any]]:
        """What became of each size, then the notes."""
        rows: list[Any] = self.sizes.to_dict(orient="records")
        return [
            *((f"{row['batch_size']} samples", _in_words(row)) for row in rows),
            ("steps per epoch", self.steps_per_epoch and "{} -> {}".format(*self.steps_per_epoch)),
            *(("note", note) for note in self.notes),
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the rate of each size; returns the Axes."""
        from dataloading.plot_style import ACCENT, KINDS, axes_for, dress, legend_below, say_instead

        ax, title = axes_for(ax, 3.2), "Rate of training by batch size"
        passed = self.sizes[self.sizes["status"] == PASSED]
        if passed.empty:
            return say_instead(ax, title, "no size passed a training step")
        style = {"color": KINDS["step"].color, "linewidth": 1.8, "marker": "o"}
        ax.plot(passed["batch_size"], passed["samples_per_s"], label=PASSED, **style)
        if len(short := self.sizes.loc[self.sizes["status"] == OUT_OF_MEMORY, "batch_size"]):
            red = KINDS["wait"].color
            ax.scatter(short, [0] * len(short), marker="X", s=60, color=red, label=OUT_OF_MEMORY)
        best = passed[passed["chosen"]]
        label = f"chosen: {self.batch_size}"
        mark = {"s": 80, "marker": "D", "color": ACCENT, "zorder": 5}
        ax.scatter(best["batch_size"], best["samples_per_s"], label=label, **mark)
        ax.set_ylim(bottom=0)
        dress(ax, title=title, xlabel="batch size", ylabel="samples/s", grid="y")
        legend_below(ax, columns=3)
        return ax


def find_batch_sizes(
    dataloader: DataLoader,
    train_step: Callable[[Any], Any],
    *,
    largest: int | None = None,
    seconds: float = 30.0,
    margin: float = 0.1,
    memory_fraction: float = 0.8,
    machine: Machine | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> BatchSizeSearch:
    """Find the largest batch size that trains, by training on real batches of each size.

    Unlike all other settings of a loader the batch size changes the training itself, so nothing
    else in the project touches it; the notes of the result say what to look after.

    Batches are made in this process from a copy of the data set. The loader and the random states
    (and, with `make_train_step`, model and optimizer) stay as they were.

    Args:
        dataloader: The loader; the search starts at its batch size.
        train_step: Called with each batch: forward, backward and optimizer step, as in training.
        largest: Try nothing above this; None means as far as memory and data set go.
        seconds: Time budget.
        margin: How much more memory training may need than the trial, as a share. Where a size ran
            out of memory, the chosen size times `1 + margin` is at most the largest that passed.
        memory_fraction: Share of the free memory, shared memory and open files that the loader
            (with its workers and their queues) and, on a CPU, training may use.
        machine: Where training will run; None means here.
        device: Move each batch there first; None leaves moving to `train_step`.
        progress: Show a progress bar.

    Returns:
        A `BatchSizeSearch`; use it with
        `rebuild_dataloader(loader, LoaderSettings.of(loader).changed(batch_size=...))`.

    Raises:
        TypeError: An argument is of another kind, or the loader cannot be built again.
        ValueError: An argument is out of range, the data set is empty, or a batch sampler or the
            data set decides what comes together in a batch.
        ProbeTimeout: Not even one size was done in time.

    Errors of the data set and of the train step other than running out of memory are raised as they
    are, with a note of the batch size. In a distributed job (DDP) give no train step that talks to
    the other ranks, which may try other sizes.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = TrainStep(model, torch.nn.functional.cross_entropy, sgd, torch.device("cpu"))
        >>> data = [(torch.zeros(3), 1)] * 50
        >>> search = find_batch_sizes(DataLoader(data, batch_size=16), step, progress=False)
        >>> search.batch_size, search.steps_per_epoch
        (50, (4, 1))

    Explained in: notebook 05
    """
    check_train_step(train_step)
    if train_step is None:
        raise TypeError("train_step is None; expected the training whose memory is the limit.")
    check_int("largest", largest, least=1, optional=True)
    check_seconds(seconds)
    check_amount("margin", margin)
    check_amount("memory_fraction", memory_fraction)
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction} must be above 0 and at most 1.")
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"Expected a Machine from inspect_machine, got {type(machine).__name__}.")
    on_device = check_device(device)
    present = int(getattr(dataloader, "batch_size", None) or 1)
    rebuild_dataloader(dataloader, LoaderSettings(batch_size=present))  # raises where it cannot be
    held = list(walk(dataloader.dataset, "dataset"))
    with (
        random_state_kept(*generators_of(dataloader)),
        generators_kept(held),
        trial_copy(dataloader.dataset, held) as dataset,
        time_bar(seconds, "Searching the batch size", progress) as bar,
    ):
        trainer = _Trainer(dataloader, dataset, train_step, on_device, READ_SHARE * seconds)
        on_host = trainer.accelerator is None
        host = _HostBudget(LoaderSettings.of(dataloader), machine, memory_fraction, on_host)
        search = _Search(trainer, host, present, largest, _epoch_samples(dataloader), margin)
        try:
            with time_limit(seconds + OVERRUN_S, lambda: trainer.doing):
                search.run(time.perf_counter() + seconds, bar)
        except ProbeTimeout as error:
            search.give_up(error)
        trainer.release()  # also what the watchdog's traceback held
    return search.result(dataloader.drop_last)


@dataclass(frozen=True)
class Trial:
    """What became of one batch size."""

    batch_size: int
    status: str
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None


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
    return None if failed - passed - 1 <= passed // REFINED_TO else (passed + failed) // 2


def with_margin(size: int, margin: float) -> int:
    """The size whose need, grown by the margin, is at most that of `size`; at least 1.

    Example:
        >>> with_margin(1000, 0.1), with_margin(8, 0.0), with_margin(1, 0.5)
        (909, 8, 1)
    """
    return max(1, math.floor(size / (1 + margin) + 1e-9))  # 110 / 1.1 is a little below 100


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the host or the accelerator has no memory left.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY_LEFT.search(str(error)) is not None


class _Search:
    """Goes through sizes: up while they pass, into the gap, and down by the margin."""

    def __init__(
        self,
        trainer: _Trainer,
        host: _HostBudget,
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
        self.overrun: set[int] = set()  # sizes that passed and took more than the budget
        self.notes: list[str] = []

    @property
    def fitting(self) -> list[Trial]:
        """The sizes that passed within the memory budget, in ascending order."""
        known = [self.trials[size] for size in sorted(self.trials) if size not in self.overrun]
        return [trial for trial in known if trial.status == PASSED]

    @property
    def passed(self) -> int:
        """The largest size that passed; 0 where none has."""
        return max((trial.batch_size for trial in self.fitting), default=0)

    @property
    def failed(self) -> int | None:
        """The smallest size that ran out of memory, or out of the budget."""
        short = {t.batch_size for t in self.trials.values() if t.status == OUT_OF_MEMORY}
        return min(short | self.overrun, default=None)

    @property
    def wanted(self) -> int:
        """The largest size that may be chosen."""
        return self.passed if self.failed is None else with_margin(self.passed, self.margin)

    def run(self, until_s: float, bar: TimeBar) -> None:
        """Try sizes until the answer is known or the time is over."""
        self.host.look_at(self.trainer.one_sample())
        wished: int | None = self.present
        while wished is not None:
            allowed = min(wished, self.largest or wished, self.epoch_samples or wished)
            size = self.host.largest(allowed, self.passed)
            late = self.passed and time.perf_counter() + self.trainer.expects_s(size) > until_s
            if size <= self.passed or late:
                self._skip(wished, allowed, size)
                break
            self._try(size, bar)
            wished = next_size(self.passed, self.failed)
        size = self.wanted
        while self.passed and size >= 1 and size not in self.trials:
            if self._try(size, bar):
                break
            size = min(size - 1, with_margin(size, self.margin))

    def _try(self, size: int, bar: TimeBar) -> bool:
        """Try a size; returns whether it passed within the budget."""
        bar.update(format_count(size, "sample"))
        trial = self.trainer.attempt(size)
        if trial.batch_size < size:  # the data set has ended
            size = self.epoch_samples = trial.batch_size
        self.trials[size] = trial
        if trial.status != PASSED:
            return False
        self.host.learn(trial, self.trainer)
        if short := self.host.overrun(trial):
            self.overrun.add(size)
            self.notes.append(f"Batch size {size} passed, but {short}.")
        return size not in self.overrun

    def _skip(self, wished: int, allowed: int, size: int) -> None:
        """Note why nothing larger is tried."""
        if size > self.passed:
            reason, skipped = "the time is over", size
        elif size < allowed:
            reason, skipped = self.host.refusal(allowed) or "", allowed
        elif allowed == self.epoch_samples and allowed < wished:
            reason, skipped = f"an epoch has {format_count(allowed, 'sample')}", wished
        else:
            return  # the user's own limit
        self.trials[skipped] = Trial(skipped, f"{NOT_TRIED}: {reason}")

    def give_up(self, error: ProbeTimeout) -> None:
        """End with what has passed before the watchdog came.

        Raises:
            ProbeTimeout: Nothing has.
        """
        if not self.passed:
            raise error
        size = self.trainer.size
        self.trials.setdefault(size, Trial(size, FAILED))
        self.notes.append(str(error))

    def result(self, drop_last: bool) -> BatchSizeSearch:
        """The table, the choice and what to know about it."""
        import pandas as pd

        trials, passed = [self.trials[size] for size in sorted(self.trials)], self.fitting
        sizes = [t.batch_size for t in passed]
        chosen = max((s for s in sizes if s <= self.wanted), default=min(sizes, default=None))
        table = pd.DataFrame([vars(t) for t in trials], columns=list(Trial.__annotations__))
        table = table.astype({"samples_per_s": float, "peak_memory_bytes": float})
        table["chosen"] = table["batch_size"] == (chosen or 0)
        steps = None
        if chosen and self.epoch_samples:
            count = math.floor if drop_last else math.ceil
            before, after = (count(self.epoch_samples / s) for s in (self.present, chosen))
            steps = (before, after)
        notes = [*self._notes_on(chosen, steps, passed), *self.trainer.notes(passed), *self.notes]
        return BatchSizeSearch(
            chosen, max(sizes, default=None), self.present, steps, table, tuple(notes)
        )

    def _notes_on(
        self, chosen: int | None, steps: tuple[int, int] | None, passed: list[Trial]
    ) -> Iterator[str]:
        if chosen is None:
            yield "No size fits, down to the smallest that was tried: see the table for the reasons."
            return
        if chosen > self.wanted:
            yield "There was no time to keep the margin: the chosen size may run out of memory."
        if chosen != self.present:
            yield _on_training(self.present, chosen, steps)
        best = max(t.samples_per_s or 0.0 for t in passed)
        least = next(t for t in passed if (t.samples_per_s or 0.0) >= NEARLY_BEST * best)
        if least.batch_size <= chosen // 2:
            share = format_share((least.samples_per_s or 0.0) / max(best, 1e-12))
            yield (
                f"Batches of {least.batch_size} reach {share} of the best rate; larger ones need "
                "more memory and change training more."
            )


def _on_training(present: int, chosen: int, steps: tuple[int, int] | None) -> str:
    """What another batch size means for training.

    Sources: P. Goyal et al., Accurate, Large Minibatch SGD (2017), for SGD; S. Malladi et al., On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms (2022), for Adam.
    """
    ratio = chosen / present
    then = f": {steps[0]:,} -> {steps[1]:,} steps per epoch" if steps else ""
    return (
        f"Batch size {present:,} -> {chosen:,} changes training{then}. The learning rate usually "
        f"has to follow, about {ratio:.3g} times for SGD and {ratio**0.5:.3g} times for Adam, with a "
        "warm-up; check the accuracy again."
    )


class _HostBudget:
    """What the memory of the machine allows, learnt from the batches that have passed."""

    def __init__(
        self, settings: LoaderSettings, machine: Machine | None, fraction: float, trains_here: bool
    ) -> None:
        here = inspect_machine()
        self.settings = settings
        self.machine = machine or here
        self.fraction = fraction
        self.trains_here = trains_here
        known = (here.available_memory_bytes, self.machine.available_memory_bytes)
        self.free_bytes = min((free for free in known if free is not None), default=None)
        self.sample_bytes = 0.0
        self.tensors = 1
        self.grown: list[tuple[int, int]] = []  # size, and memory that training on it took

    def look_at(self, batch: Any, samples: int = 1) -> None:
        """Learn from a batch how much a sample holds."""
        self.sample_bytes = max(self.sample_bytes, batch_bytes(batch) / samples)
        self.tensors = max(self.tensors, count_tensors(batch))

    def learn(self, trial: Trial, trainer: _Trainer) -> None:
        """Learn from a size that passed."""
        self.sample_bytes = max(self.sample_bytes, trainer.batch_bytes / trial.batch_size)
        if self.trains_here and trial.batch_size > max((n for n, _ in self.grown), default=0):
            self.grown.append((trial.batch_size, trial.peak_memory_bytes or 0))

    def overrun(self, trial: Trial) -> str | None:
        """Why a size that passed does not fit after all, by the memory that it took."""
        took = trial.peak_memory_bytes if self.trains_here else None
        return self.refusal(trial.batch_size, took)

    def largest(self, size: int, passed: int) -> int:
        """The largest size up to `size` that fits; `passed` where nothing worth a trial does."""
        if self.refusal(size) is None:
            return size
        low, high = passed, size
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.refusal(middle) is None else (low, middle)
        return low if low - passed > passed // REFINED_TO else passed

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
        needs += self._training_bytes(size) if training_bytes is None else training_bytes
        if self.free_bytes is None or needs <= self.fraction * self.free_bytes:
            return None
        return (
            f"loader and training need {format_bytes(needs)} of memory, and "
            f"{format_share(self.fraction)} of what is free is "
            f"{format_bytes(self.fraction * self.free_bytes)}"
        )

    def _training_bytes(self, size: int) -> int:
        """Memory of this process while it trains on a batch.

        The kernel of Linux ends a process that needs too much; so this is estimated from the rise
        seen last, and not by trying.
        """
        copies = BATCH_COPIES * self.sample_bytes * size
        if not self.grown:
            return round(copies)
        last, most = self.grown[-1][0], max(grown for _, grown in self.grown)
        # Sizes close to each other differ by chance; the first one alone shows no slope but its own.
        earlier = [seen for seen in self.grown if 2 * seen[0] <= last] or [(0, 0)]
        slope = max((most - grown) / (last - before) for before, grown in earlier)
        return round(max(copies, most + STEEPER * slope * (size - last)))


class _Trainer:
    """Makes batches of any size, trains on them, and leaves nothing of them alive."""

    def __init__(
        self,
        dataloader: DataLoader,
        dataset: Any,
        train_step: Callable[[Any], Any],
        device: torch.device | None,
        read_s: float,
    ) -> None:
        self.dataloader = dataloader
        self.dataset = dataset
        self.train_step = train_step
        self.device = device
        self.read_s = read_s
        self.accelerator = _accelerator(train_step, device)
        self.kept_bytes = _kept_bytes(train_step)
        self.memory = _PeakMemory(self.accelerator)
        self.doing = "Starting"
        self.size = 0  # of the trial under way
        self.batch_bytes = 0
        self.repeated = False
        self.steps = 0
        self._last = (1, 0.0)  # size and seconds of the last trial

    def one_sample(self) -> Any:
        """A batch of one sample, to see what it holds."""
        self.doing = "Fetching a sample"
        return self.dataloader.collate_fn(self._read(1))

    def expects_s(self, size: int) -> float:
        """Seconds that a trial will take, by the last one."""
        return self._last[1] * size / self._last[0]

    def attempt(self, size: int) -> Trial:
        """Train on a batch of a size; what was made for it is gone when this returns."""
        begun = time.perf_counter()
        self.size = size
        self.doing = f"Training on a batch of {format_count(size, 'sample')}"
        with state_kept(self.train_step):
            trial = self._attempt(size)
            self.release()  # before the state is put back, which may take memory for a moment
        self._empty_cache()
        self._last = (size, time.perf_counter() - begun)
        return trial

    def _attempt(self, size: int) -> Trial:
        try:
            with self.memory.watched():
                samples, samples_per_s = self._train(size)
            return Trial(samples, PASSED, samples_per_s, self.memory.peak_bytes())
        except Exception as error:  # its traceback, and the batch with it, goes with this block
            if not is_out_of_memory(error):
                error.add_note(f"This came while trying a batch of {size} samples.")
                raise
            return Trial(size, OUT_OF_MEMORY, None, self.memory.peak_bytes())

    def _train(self, size: int) -> tuple[int, float]:
        """Samples of the batch, and samples/s of the steps after the first."""
        samples = self._read(size)
        count = len(samples)
        batch = self.dataloader.collate_fn(samples)
        del samples
        self.batch_bytes = batch_bytes(batch)
        if self.device is not None:
            batch = move_to(batch, self.device)
        times: list[float] = []
        self._step(batch)  # the first makes the optimizer's state, which the others need as well
        until = time.perf_counter() + TIMED_S
        while not times or (len(times) < MOST_STEPS and time.perf_counter() < until):
            begun = time.perf_counter()
            self._step(batch)
            times.append(time.perf_counter() - begun)
        return count, count / max(float(np.median(times)), 1e-9)

    def _step(self, batch: Any) -> None:
        """One step, waited for; on a copy of a dict or list, from which it may take things out."""
        mutable = isinstance(batch, MutableMapping | list)
        self.train_step(copy.copy(batch) if mutable else batch)
        self.steps += 1
        if self.accelerator is not None:
            torch.accelerator.synchronize(self.accelerator)

    def _read(self, size: int) -> list[Any]:
        """As many samples, fewer where the data set ends; repeated where fetching takes too long."""
        until = time.perf_counter() + self.read_s
        samples: list[Any] = []
        if fetches_batches(self.dataset):
            samples = list(self.dataset.__getitems__(list(islice(self.dataloader.sampler, size))))
        else:
            for sample in islice(self._samples(), size):
                samples.append(sample)
                if time.perf_counter() > until and len(samples) < size:
                    self.repeated = True
                    again = (copy.copy(samples[n % len(samples)]) for n in range(size))
                    return list(again)
        if not samples:
            name = type(self.dataset).__name__
            raise ValueError(f"The data set ({name}) gives no sample; expected at least one.")
        return samples

    def _samples(self) -> Iterable[Any]:
        if isinstance(self.dataset, IterableDataset):
            return self.dataset
        return (self.dataset[index] for index in self.dataloader.sampler)

    def release(self) -> None:
        """Free what nobody refers to, on the accelerator too."""
        gc.collect()
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self.accelerator is not None:
            getattr(torch, self.accelerator.type).empty_cache()

    def notes(self, passed: list[Trial]) -> Iterator[str]:
        """What to know about the trials."""
        if self.repeated:
            yield "Fetching takes long, so large batches were filled up with the same samples."
        if not isinstance(self.train_step, TrainStep):
            yield (
                f"The train step is your own, so what its {format_count(self.steps, 'step')} "
                "changed stays changed; with make_train_step it is put back."
            )
        peak = max((t.peak_memory_bytes or 0 for t in passed), default=0)
        if self.accelerator is not None and self.kept_bytes > MUCH_COPIED * peak:
            yield (
                f"The copy that puts model and optimizer back took {format_bytes(self.kept_bytes)} "
                "of the accelerator during the search; training has it in addition."
            )


class _PeakMemory:
    """The most memory that a trial took: of the accelerator, or else of this process."""

    def __init__(self, accelerator: torch.device | None) -> None:
        self.accelerator = accelerator
        self.start = None if accelerator is not None else read_main()
        self.peak = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again while the block runs."""
        self.peak = 0
        if self.accelerator is not None or self.start is None:
            if self._counter() is not None:
                torch.empty(0, device=self.accelerator)  # before it is in use, it counts nothing
                self._counter().reset_peak_memory_stats(self.accelerator)
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._read()  # a short trial may have been missed; its batch is still there
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        cost_s = 0.0
        while not stop.wait(max(READ_EVERY_S, cost_s / READING_SHARE)):
            begun = time.perf_counter()
            self._read()
            cost_s = time.perf_counter() - begun

    def _read(self) -> None:
        now = read_main() if self.start is not None else None
        if now is not None and self.start is not None:
            self.peak = max(self.peak, now[1] - self.start[1])

    def peak_bytes(self) -> int | None:
        """The peak in bytes; None where it cannot be read."""
        if self.accelerator is None:
            return self.peak if self.start is not None else None
        counter = self._counter()
        return None if counter is None else counter.max_memory_allocated(self.accelerator)

    def _counter(self) -> Any:
        """What counts the accelerator's memory, as `torch.cuda` does; None on MPS, which does not."""
        kind = getattr(torch, self.accelerator.type, None) if self.accelerator is not None else None
        return kind if hasattr(kind, "max_memory_allocated") else None


def _accelerator(
    train_step: Callable[[Any], Any], device: torch.device | None
) -> torch.device | None:
    """Where the steps run, unless that is the CPU; for a step of the user's own, CUDA if in use."""
    if device is None and isinstance(train_step, TrainStep):
        device = train_step.device
    elif device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    return None if device is None or device.type in ("cpu", "meta") else device


def _kept_bytes(train_step: Callable[[Any], Any]) -> int:
    """Bytes that `state_kept` copies."""
    if not isinstance(train_step, TrainStep):
        return 0
    state = [train_step.model.state_dict(), *train_step.optimizer.state.values()]
    return sum(tensor.nbytes for part in state for tensor in tensors_in(part))


def _epoch_samples(dataloader: DataLoader) -> int | None:
    """Samples of an epoch of this rank; None where nobody says."""
    stream = isinstance(dataloader.dataset, IterableDataset)
    return length_of(dataloader.dataset if stream else dataloader.sampler)


def _in_words(row: dict[str, Any]) -> str:
    """What became of a size."""
    if row["status"] != PASSED:
        return row["status"]
    rate, peak = (format_value(name, row[name]) for name in ("samples_per_s", "peak_memory_bytes"))
    return f"{PASSED}, {rate}, peak memory {peak}{', chosen' if row['chosen'] else ''}"
