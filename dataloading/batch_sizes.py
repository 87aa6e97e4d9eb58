"""How large a batch may be: sizes are tried by whole training steps, within what the memory holds.

The search doubles the batch size while it passes, halves the gap once a size has run out of memory,
and stays a margin below. A batch size that has not passed is never returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloading.arguments import (
    check_amount,
    check_device,
    check_int,
    check_seconds,
    check_share,
    check_train_step,
)
from dataloading.batch_trials import PASSED, Trainer
from dataloading.batches import tensors_in
from dataloading.held_things import generators_kept
from dataloading.host_budget import HostBudget
from dataloading.machine import Machine
from dataloading.making import MakeDataLoader, Maker
from dataloading.object_graph import walk
from dataloading.peeking import trial_copy
from dataloading.progress import time_bar
from dataloading.results import Result, format_bytes, format_count, format_share, format_value
from dataloading.settings import LoaderSettings
from dataloading.size_search import SizeSearch
from dataloading.timing import length_of
from dataloading.train_steps import TrainStep
from dataloading.watchdog import ProbeTimeout, generators_of, random_state_kept, time_limit

if TYPE_CHECKING:
    import pandas as pd

READ_SHARE = 0.1  # of the time budget to fetch the samples of one batch; then they are repeated
OVERRUN_S = 10.0  # a single step may run past the budget by this much before it is stopped
NEARLY_BEST = 0.95  # of the best rate: a smaller batch that gives so much is worth a word
MUCH_COPIED = 0.05  # of the peak: a copy of the model that is worth a word
MEASURED = ("batch_size", "status", "samples_per_s", "peak_memory_bytes")  # of a trial


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
            `failed` where the step did not end in time, `over the budget: ...` where it passed and
            took too much of the host's memory, or `not tried: ...`); `samples_per_s` of training
            alone; `peak_memory_bytes` of the accelerator, or without one how far the memory of
            this process rose since the search began; `chosen`. What was not measured is NaN.
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
        return [
            *((f"{row['batch_size']} samples", _outcome(row)) for _, row in self.sizes.iterrows()),
            ("steps per epoch", self.steps_per_epoch and "{} -> {}".format(*self.steps_per_epoch)),
            *(("note", note) for note in self.notes),
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the rate of each size; returns the Axes."""
        from dataloading.plots_batch_sizes import plot_batch_sizes

        return plot_batch_sizes(self, ax=ax)


def _outcome(row: pd.Series) -> str:
    if row["status"] != PASSED:
        return row["status"]
    rate, peak = (format_value(name, row[name]) for name in MEASURED[2:])
    return f"{PASSED}, {rate}, peak memory {peak}{', chosen' if row['chosen'] else ''}"


def find_batch_sizes(
    dataloader: DataLoader | MakeDataLoader,
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
        dataloader: The loader, or a function that builds one from `LoaderSettings`; the search
            starts at its batch size.
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
    check_share("memory_fraction", memory_fraction)
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"Expected a Machine from inspect_machine, got {type(machine).__name__}.")
    on_device = check_device(device)
    maker = Maker.of(dataloader)
    dataloader = maker.present
    present = int(dataloader.batch_size or 1)
    maker.make(maker.settings.changed(batch_size=present))  # raises where it cannot be set
    held = list(walk(dataloader.dataset, "dataset"))
    with (
        random_state_kept(*generators_of(dataloader)),
        generators_kept(held),
        trial_copy(dataloader.dataset, held) as dataset,
        time_bar(seconds, "Searching the batch size", progress) as bar,
    ):
        trainer = Trainer(dataloader, dataset, train_step, on_device, READ_SHARE * seconds)
        on_host = trainer.accelerator is None
        search = SizeSearch(
            trainer,
            HostBudget(LoaderSettings.of(dataloader), machine, memory_fraction, on_host),
            present=present,
            largest=largest,
            epoch_samples=_epoch_samples(dataloader),
            margin=margin,
        )
        late: tuple[str, ...] = ()
        try:
            with time_limit(seconds + OVERRUN_S, lambda: search.doing):
                search.run(time.perf_counter() + seconds, bar)
        except ProbeTimeout as error:
            if not search.passed:
                raise
            search.stop()
            late = (str(error),)
        trainer.release()  # also what the watchdog's traceback held
    return _result(search, dataloader.drop_last, late)


def _epoch_samples(dataloader: DataLoader) -> int | None:
    """Samples of an epoch of this rank; None where nobody says."""
    stream = isinstance(dataloader.dataset, IterableDataset)
    return length_of(dataloader.dataset if stream else dataloader.sampler)


def _result(search: SizeSearch, drop_last: bool, late: tuple[str, ...]) -> BatchSizeSearch:
    """The table, the choice and what to know about it."""
    import pandas as pd

    sizes = [trial.batch_size for trial in search.passed]
    chosen = max((s for s in sizes if s <= search.wanted), default=min(sizes, default=None))
    rows = [
        [getattr(trial, name) for name in MEASURED] for _, trial in sorted(search.trials.items())
    ]
    table = pd.DataFrame(rows, columns=list(MEASURED))
    table = table.astype({"samples_per_s": float, "peak_memory_bytes": float})
    table["chosen"] = table["batch_size"] == (chosen or 0)
    steps = None
    if chosen and search.epoch_samples:
        count = math.floor if drop_last else math.ceil
        before, after = (count(search.epoch_samples / size) for size in (search.present, chosen))
        steps = (before, after)
    notes = (*_on_choice(search, chosen, steps), *_on_trials(search), *late)
    return BatchSizeSearch(chosen, max(sizes, default=None), search.present, steps, table, notes)


def _on_choice(
    search: SizeSearch, chosen: int | None, steps: tuple[int, int] | None
) -> Iterator[str]:
    """What to know about the chosen size."""
    if chosen is None:
        yield "No size fits, down to the smallest that was tried: see the table for the reasons."
        return
    if chosen > search.wanted:
        yield "There was no time to keep the margin: the chosen size may run out of memory."
    if chosen != search.present:
        yield _on_training(search.present, chosen, steps)
    rates = {trial.batch_size: trial.samples_per_s or 0.0 for trial in search.passed}
    best = max(rates.values())
    least = next(size for size, rate in rates.items() if rate >= NEARLY_BEST * best)
    if least <= chosen // 2:
        yield (
            f"Batches of {least} reach {format_share(rates[least] / best)} of the best rate; larger "
            "ones need more memory and change training more."
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


def _on_trials(search: SizeSearch) -> Iterator[str]:
    """What to know about how the sizes were tried."""
    trainer, train_step = search.trainer, search.trainer.train_step
    if trainer.repeated:
        yield "Fetching takes long, so large batches were filled up with the same samples."
    if not isinstance(train_step, TrainStep):
        yield (
            f"The train step is your own, so what its {format_count(trainer.steps, 'step')} "
            "changed stays changed; with make_train_step it is put back."
        )
        return
    peak = max((trial.peak_memory_bytes or 0 for trial in search.passed), default=0)
    state = [train_step.model.state_dict(), *train_step.optimizer.state.values()]
    copied = sum(tensor.nbytes for part in state for tensor in tensors_in(part))
    if trainer.accelerator is not None and copied > MUCH_COPIED * peak:
        yield (
            f"The copy that puts model and optimizer back took {format_bytes(copied)} of the "
            "accelerator during the search; training has it in addition."
        )
