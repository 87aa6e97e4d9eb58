"""Training on a batch of a given size, to see whether it passes, how fast, and in how much memory."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloading.batches import batch_bytes, move_to
from dataloading.memory_errors import ran_out_of_memory
from dataloading.peak_memory import PeakMemory
from dataloading.profiling import fetches_batches
from dataloading.train_steps import TrainStep, state_kept

PASSED, OUT_OF_MEMORY = "passed", "out of memory"
TIMED_S, MOST_STEPS = 0.2, 5  # for the steps after the first, which are timed


@dataclass(frozen=True)
class Trial:
    """What became of one batch size.

    Attributes:
        batch_size: Samples in the batch.
        status: `passed`, `out of memory`, or what the search makes of it.
        samples_per_s: Rate of training alone.
        peak_memory_bytes: See `PeakMemory.peak_bytes`.
        batch_bytes: What the tensors of the batch held.
        elapsed_s: Duration of the trial, fetching included.
    """

    batch_size: int
    status: str
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    batch_bytes: int = 0
    elapsed_s: float = 0.0


class Trainer:
    """Makes batches of any size, trains on them, and leaves nothing of them alive.

    Attributes:
        accelerator: Where the steps run; None on the CPU.
        repeated: Whether a batch was filled up with the same samples, as fetching took long.
        steps: Steps taken so far.
    """

    def __init__(
        self,
        dataloader: DataLoader,
        dataset: Any,
        train_step: Callable[[Any], Any],
        device: torch.device | None,
        read_s: float,
    ) -> None:
        """Get ready.

        Args:
            dataloader: Its sampler and collate function make the batches.
            dataset: Where samples are fetched from, a copy of the loader's.
            train_step: Called with each batch.
            device: Move each batch there first; None leaves moving to `train_step`.
            read_s: How long fetching the samples of one batch may take.
        """
        self.dataloader = dataloader
        self.dataset = dataset
        self.train_step = train_step
        self.device = device
        self.read_s = read_s
        self.accelerator = accelerator_of(train_step, device)
        self.repeated = False
        self.steps = 0
        self._memory = PeakMemory(self.accelerator)

    def one_sample(self) -> Any:
        """A batch of one sample, to see what it holds."""
        return self.dataloader.collate_fn(self._fetch(1))

    def attempt(self, size: int) -> Trial:
        """Train on a batch of a size; what was made for it is gone when this returns.

        Returns:
            The trial; its batch is smaller than `size` where the data set has fewer samples.

        Raises:
            Exception: What data set or train step raise, unless memory ran out; with a note.
        """
        begun = time.perf_counter()
        with state_kept(self.train_step):  # an optimizer stopped while making its state is broken
            try:
                with self._memory.watched():
                    trial = self._train(size)
            except Exception as error:  # its traceback, and the batch with it, goes with this block
                if not ran_out_of_memory(error):
                    error.add_note(f"This came while trying a batch of {size} samples.")
                    raise
                trial = Trial(size, OUT_OF_MEMORY)
            self.release()  # before the state is put back, which may take memory for a moment
        return replace(
            trial,
            peak_memory_bytes=self._memory.peak_bytes,
            elapsed_s=time.perf_counter() - begun,
        )

    def release(self) -> None:
        """Free what nobody refers to, on the accelerator too."""
        gc.collect()
        if self.accelerator is not None:
            getattr(torch, self.accelerator.type).empty_cache()

    def _train(self, size: int) -> Trial:
        samples = self._fetch(size)
        count = len(samples)
        batch = self.dataloader.collate_fn(samples)
        del samples
        held = batch_bytes(batch)
        if self.device is not None:
            batch = move_to(batch, self.device)
        times: list[float] = []
        self._step(batch)  # the first makes the optimizer's state, which the others need as well
        until = time.perf_counter() + TIMED_S
        while not times or (len(times) < MOST_STEPS and time.perf_counter() < until):
            begun = time.perf_counter()
            self._step(batch)
            times.append(time.perf_counter() - begun)
        rate = count / max(float(np.median(times)), 1e-9)
        return Trial(count, PASSED, samples_per_s=rate, batch_bytes=held)

    def _step(self, batch: Any) -> None:
        """One step, waited for; on a copy of a dict or list, from which it may take things out."""
        mutable = isinstance(batch, MutableMapping | list)
        self.train_step(copy.copy(batch) if mutable else batch)
        self.steps += 1
        if self.accelerator is not None:
            torch.accelerator.synchronize(self.accelerator)

    def _fetch(self, size: int) -> list[Any]:
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
                    return [copy.copy(samples[n % len(samples)]) for n in range(size)]
        if not samples:
            name = type(self.dataset).__name__
            raise ValueError(f"The data set ({name}) gives no sample; expected at least one.")
        return samples

    def _samples(self) -> Iterable[Any]:
        if isinstance(self.dataset, IterableDataset):
            return self.dataset
        return (self.dataset[index] for index in self.dataloader.sampler)


def accelerator_of(
    train_step: Callable[[Any], Any], device: torch.device | None
) -> torch.device | None:
    """Where the steps run, unless that is the CPU; for a step of the user's own, CUDA if in use."""
    if device is None and isinstance(train_step, TrainStep):
        device = train_step.device
    elif device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    return None if device is None or device.type in ("cpu", "meta") else device
