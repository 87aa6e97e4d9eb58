"""Where the time of each training step goes: waiting for data, moving it, training, the rest.

The loop that measures never synchronises with the accelerator inside a step. On a GPU the steps are
read off CUDA events after the loop; on a CPU, host clocks say the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dataloading.arguments import (
    check_device,
    check_int,
    check_loader,
    check_seconds,
    check_train_step,
)
from dataloading.batches import count_samples, move_to
from dataloading.borrowing import Borrowed, borrowed
from dataloading.codes import Finding
from dataloading.failures import explain_failure, note_deaths, tells_of_death
from dataloading.loader_timing import LoaderTiming, StepLog
from dataloading.observing import Observer
from dataloading.progress import TimeBar, time_bar
from dataloading.progress_notes import Progress
from dataloading.train_steps import METER, state_kept
from dataloading.watchdog import (
    ProbeTimeout,
    close_iterator,
    open_iterator,
    random_state_kept,
    receive_rest,
    time_limit,
)

TrainStep = Callable[[Any], Any]

OVERRUN_S = 0.5  # how far the last step may run past the budget before the watchdog ends it
LEAST_LIMIT_S = 10.5  # spawned workers import torch first: even a short budget waits this long
RESTART_SHARE = 0.2  # of the budget, kept for one restart of a loader with long epochs


class HostClock:
    """Times steps with the host's clock: right wherever the step ends when its call returns."""

    name = "host"

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self._left = time.perf_counter()

    def asks(self) -> None:
        """The loop is about to ask for a batch."""
        self._asked = time.perf_counter()

    def got(self) -> float:
        """The batch is there; returns the seconds of waiting."""
        self._got = time.perf_counter()
        return self._got - self._asked

    def begins(self) -> None:
        """The loop begins to work with the batch; what it did since `got` was our own doing."""
        self._begun = time.perf_counter()

    def moved(self) -> None:
        """The batch is on the device."""
        self._moved = time.perf_counter()
        self._busy = METER.busy_s

    def stepped(self, epoch: int, samples: int, *, first: bool) -> None:
        """The train step has returned."""
        now = time.perf_counter()
        call = now - self._moved
        busy = METER.busy_s - self._busy
        step = busy if busy > 0 else call
        self.log.steps_are_training = busy > 0
        loop = 0.0 if first else self._asked - self._left
        self.log.add(
            epoch,
            wait_s=self._got - self._asked,
            step_s=step,
            samples=samples,
            transfer_s=self._moved - self._begun,
            other_s=max(0.0, call - step) + max(0.0, loop),
        )
        self._left = time.perf_counter()

    def finish(self) -> None:
        """Nothing is pending on the host."""


class CudaClock:
    """Times steps with CUDA events, read once at the end: two synchronisations a run.

    The GPU's idle gap before a step counts as waiting only as far as the host was waiting for data
    at that time; the rest of the gap is other work of the host.
    """

    name = "cuda events"

    def __init__(self, log: StepLog, cuda: Any = torch.cuda) -> None:
        self.log = log
        self._cuda = cuda
        self._marks: list[tuple[Any, Any, Any]] = []
        self._host: list[tuple[int, float, int, bool, float]] = []
        cuda.synchronize()

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def asks(self) -> None:
        """The loop is about to ask for a batch."""
        self._asked = time.perf_counter()

    def got(self) -> float:
        """The batch is there; returns the seconds of waiting."""
        self._wait = time.perf_counter() - self._asked
        return self._wait

    def begins(self) -> None:
        """The loop begins to work with the batch."""
        self._start = self._event()

    def moved(self) -> None:
        """The copy to the device is queued."""
        self._on_device = self._event()
        self._busy = METER.busy_s
        self._called = time.perf_counter()

    def stepped(self, epoch: int, samples: int, *, first: bool) -> None:
        """The train step is queued."""
        busy = METER.busy_s - self._busy
        # a step that reports its own time tells what else the callable did, such as logging
        other = max(0.0, time.perf_counter() - self._called - busy) if busy > 0 else 0.0
        self._marks.append((self._start, self._on_device, self._event()))
        self._host.append((epoch, self._wait, samples, first, other))

    def finish(self) -> None:
        """Wait for the GPU once and read all events."""
        self._cuda.synchronize()
        self.log.steps_are_training = True
        ended = None
        for (start, on_device, end), (epoch, wait, samples, first, other) in zip(
            self._marks, self._host, strict=True
        ):
            gap = wait if ended is None or first else ended.elapsed_time(start) / 1e3
            exposed = min(wait, gap)
            self.log.add(
                epoch,
                wait_s=exposed,
                step_s=max(0.0, on_device.elapsed_time(end) / 1e3 - other),
                samples=samples,
                transfer_s=start.elapsed_time(on_device) / 1e3,
                other_s=max(0.0, gap - exposed) + other,
            )
            ended = end
        self._marks.clear()
        self._host.clear()


def measure_dataloader(
    dataloader: Iterable[Any],
    train_step: TrainStep | None = None,
    *,
    seconds: float = 10.0,
    max_steps: int | None = None,
    device: str | torch.device | None = None,
    clocks: bool = True,
    progress: bool = True,
) -> LoaderTiming:
    """Measure where the time of a training loop goes.

    Other work inside `train_step` (logging, hooks) is told apart from training where the step is, or
    calls, one made by `make_train_step` or `simulated_train_step`.

    A `DataLoader` is measured through a copy with clocks inside its workers, so the loader, the
    random states and (with `make_train_step`) the model stay as they were. A loader that cannot be
    copied is measured as it is.

    Args:
        dataloader: A `DataLoader`, or anything that yields batches.
        train_step: Called with each batch; None measures the loader alone.
        seconds: Time budget, start-up included.
        max_steps: Stop after this many batches; None means as many as the time allows.
        device: Move each batch there first, and time it; None leaves moving to `train_step`.
        clocks: Time the samples inside the workers as well (`LoaderTiming.workers`).
        progress: Show a progress bar.

    Returns:
        A `LoaderTiming`.

    Raises:
        TypeError: `dataloader` cannot be iterated, or `max_steps` is not a whole number.
        ValueError: A bad argument, or a loader that delivers no batch.
        ProbeTimeout: A batch or a step took far longer than the budget.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(100), batch_size=10)
        >>> timing = measure_dataloader(loader, seconds=0.2, progress=False)
        >>> timing.steps_per_epoch
        10

    Explained in: notebook 01
    """
    check_loader(dataloader)
    check_train_step(train_step)
    check_seconds(seconds)
    check_int("max_steps", max_steps, least=1, optional=True)
    on_device = check_device(device)
    with borrowed(dataloader, clocks=clocks) as lent, state_kept(train_step):
        log = StepLog(steps_per_epoch=length_of(dataloader))
        clock = _make_clock(log)
        doing = (
            "Measuring the loader alone" if train_step is None else "Measuring the training loop"
        )
        with time_bar(seconds, doing, progress) as bar:
            loop = _Loop(lent, train_step, clock, max_steps=max_steps, device=on_device, bar=bar)
            try:
                note = loop.run(seconds)
            except Exception as error:
                if loop.is_loading or tells_of_death(error):  # not the train step's own error
                    left_word = lent.records.progress if lent.records else None
                    tell_failure(error, left_word, dataloader)
                raise
        clock.finish()
        if not log.epoch:
            raise ValueError(_nothing_delivered(dataloader))
        return log.timing(
            clock=clock.name,
            settings=lent.settings,
            workers=lent.records.summary() if lent.records is not None else None,
            observed=loop.observer.observed(lent.sampler_s),
            failure=loop.failure,
            note=note,
        )


def measure_replay(
    batch: Any,
    train_step: TrainStep,
    *,
    seconds: float = 2.0,
    max_steps: int = 200,
    device: str | torch.device | None = None,
) -> LoaderTiming:
    """Train on one fixed batch again and again: what the step could do if data were free.

    Args:
        batch: A batch of the loader.
        train_step: Called with the batch.
        seconds: Time budget.
        max_steps: Stop after this many steps.
        device: Move the batch there once, before the clock starts.

    Returns:
        A `LoaderTiming` without waits.
    """
    if device is not None:
        batch = move_to(batch, torch.device(device), non_blocking=False)
    samples = count_samples(batch)
    log = StepLog()
    with (
        random_state_kept(),
        state_kept(train_step),
        time_limit(max(seconds + OVERRUN_S, LEAST_LIMIT_S), "Replaying one batch"),
    ):
        clock = _make_clock(log)
        deadline = time.perf_counter() + seconds
        for number in range(max_steps):
            clock.asks()
            clock.got()
            clock.begins()
            clock.moved()
            train_step(batch)
            clock.stepped(0, samples, first=number == 0)
            if time.perf_counter() > deadline:
                break
        clock.finish()
    return log.timing(clock=clock.name)


def tell_failure(error: Exception, progress: Progress | None, dataloader: Any) -> None:
    """Leave word on an exception of the loader: a note for the reader, a `finding` for the tools."""
    found = explain_failure(error, progress, dataloader)
    if found is not None:
        error.add_note(f"{found.message} {found.advice}")
        error.finding = found  # type: ignore[attr-defined]


def length_of(dataloader: Any) -> int | None:
    """Batches of an epoch, or None where the loader does not know."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def _nothing_delivered(dataloader: Any) -> str:
    text = "The loader delivered no batch"
    dataset = getattr(dataloader, "dataset", None)
    if isinstance(dataloader, Iterator):
        return f"{text}: a generator can be gone through only once, and this one is used up."
    if dataset is None:
        return f"{text}; expected an iterable that yields batches."
    return (
        f"{text}: its dataset ({type(dataset).__name__}) has {length_of(dataset)} samples, the batch "
        f"size is {getattr(dataloader, 'batch_size', None)} and drop_last is "
        f"{getattr(dataloader, 'drop_last', None)}. Expected at least one batch an epoch."
    )


def _make_clock(log: StepLog) -> HostClock | CudaClock:
    return CudaClock(log) if torch.cuda.is_available() else HostClock(log)


class _Loop:
    """A training loop that marks each of its steps."""

    def __init__(
        self,
        lent: Borrowed,
        train_step: TrainStep | None,
        clock: HostClock | CudaClock,
        *,
        max_steps: int | None,
        device: torch.device | None,
        bar: TimeBar,
    ) -> None:
        self.dataloader = lent.loader
        self.once = isinstance(lent.loader, Iterator)  # a generator: it cannot start again
        self.train_step = train_step
        self.clock = clock
        self.log = clock.log
        self.steps = 0
        self.max_steps = max_steps
        self.device = device
        self.bar = bar
        self.batched = lent.batched
        self.observer = Observer()
        self.progress = lent.records.progress if lent.records is not None else None
        self.failure: Finding | None = None
        self.doing = "Starting"
        self.epochs = 0
        self.ended_s: float | None = None  # when the last step of the last whole epoch was done

    def run(self, seconds: float) -> str | None:
        """Go through epochs for `seconds`; returns a note when it had to be cut short."""
        begun = time.perf_counter()
        deadline = begun + seconds
        try:
            with time_limit(max(seconds + OVERRUN_S, LEAST_LIMIT_S), lambda: self.doing):
                # a long first epoch leaves time for one restart; short ones bring their own
                self.epoch(deadline - (0.0 if self.once else RESTART_SHARE * seconds))
                while not self.once and not self.enough and time.perf_counter() < deadline:
                    if not self.epoch(deadline):
                        break
        except ProbeTimeout as error:
            if not self.steps:
                raise
            if self.is_loading:
                self.failure = explain_failure(error, self.progress)
            stuck = f" {self.failure.message}" if self.failure is not None else ""
            return f"{error} The figures are those of the steps before.{stuck}"
        return None

    @property
    def is_loading(self) -> bool:
        """Whether the loop is waiting for the loader."""
        return not self.doing.startswith("Train step")

    @property
    def enough(self) -> bool:
        """Whether as many steps as were asked for are done."""
        return self.steps == self.max_steps

    def epoch(self, until_s: float) -> bool:
        """Go through one epoch, or as much of it as the time allows.

        Returns:
            Whether the loader had anything to deliver.
        """
        restarting = self.epochs > 0
        if restarting and self.ended_s is None:  # cut short, which an ordinary restart is not
            receive_rest(getattr(self.dataloader, "_iterator", None))
        asked = time.perf_counter()
        self.doing = f"Waiting for the first batch of epoch {self.epochs}"
        self.clock.asks()
        iterator = open_iterator(self.dataloader)
        try:
            for number in itertools.count():
                if number:
                    self.doing = f"Waiting for batch {number} of epoch {self.epochs}"
                    self.observer.asks(iterator)
                    self.clock.asks()
                try:
                    batch = next(iterator)
                except StopIteration:
                    self.log.steps_per_epoch = number or self.log.steps_per_epoch
                    return number > 0
                except (OSError, EOFError, RuntimeError) as error:
                    note_deaths(error, iterator)  # before the other workers are ended too
                    raise
                waited_s = self.clock.got()
                if number:
                    self.observer.got(iterator, waited_s)
                if number == 0:
                    self._note_first_batch(asked, restarting)
                self._step(batch, number)
                self.ended_s = time.perf_counter()
                if self.enough or self.ended_s > until_s:
                    self.ended_s = None
                    return True
            raise AssertionError("an endless count has ended")
        finally:
            self.epochs += 1
            if not self.once and iterator is not getattr(self.dataloader, "_iterator", None):
                close_iterator(iterator)

    def _note_first_batch(self, asked_s: float, restarting: bool) -> None:
        now = time.perf_counter()
        if restarting:
            self.log.restarts_s.append(now - (self.ended_s or asked_s))
        else:
            self.log.startup_s = now - asked_s

    def _step(self, batch: Any, number: int) -> None:
        samples = count_samples(batch, batched=self.batched)
        self.bar.update()
        self.clock.begins()
        if self.device is not None:
            batch = move_to(batch, self.device)
        self.clock.moved()
        if self.train_step is not None:
            self.doing = f"Train step {self.steps}"
            self.train_step(batch)
        self.clock.stepped(self.epochs, samples, first=number == 0)
        self.steps += 1
