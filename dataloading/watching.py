"""Watching a loader inside anyone's training loop, the way `tqdm` is used."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from dataloading.arguments import check_loader
from dataloading.batches import SampleCounter
from dataloading.codes import Finding
from dataloading.diagnosis import Diagnosis, diagnose, failed_diagnosis
from dataloading.drift import FEWEST_VALUES, LEAST_TOTAL, find_drift
from dataloading.evidence import Evidence
from dataloading.failures import explain_failure
from dataloading.history import OngoingRun
from dataloading.kept_workers import count_replaced
from dataloading.loader_timing import LoaderTiming, StepLog
from dataloading.machine import inspect_machine
from dataloading.raised_errors import raised_in_loader
from dataloading.ranks import tell_wait, waits_told
from dataloading.results import format_seconds, format_value
from dataloading.settings import LoaderSettings, ineffective_options

WATCHED = "watched"  # the kind of the waits that ranks tell one another
STEPS_AT_ONCE = 200  # steps between two updates of the log
STEPS_KEPT = 20_000  # per loader; a run of days must not fill the memory with its own timings
EPOCHS_KEPT = 30  # for their trend


@dataclass
class EpochTotals:
    """Sums over one epoch, its first batch included."""

    steps: int = 0
    samples: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    worst_wait_s: float = 0.0
    worst_batch: int = 0

    def add(self, wait_s: float, step_s: float, samples: int) -> None:
        """Count one step."""
        if wait_s > self.worst_wait_s:
            self.worst_wait_s, self.worst_batch = wait_s, self.steps
        self.steps += 1
        self.samples += samples
        self.wait_s += wait_s
        self.step_s += step_s

    def line(self) -> str:
        """Rate, share of waiting and the worst wait, in one line."""
        elapsed = max(self.wait_s + self.step_s, 1e-9)
        return (
            f"{format_value('samples_per_s', self.samples / elapsed)}, waiting for data "
            f"{format_value('wait_share', self.wait_s / elapsed)} of the time, "
            f"worst wait {format_seconds(self.worst_wait_s)} (batch {self.worst_batch})"
        )


class WatchedLoader:
    """A loader that notes, step by step, how long the training loop waited for it.

    It answers for the loader in every other way: `len`, attributes, `set_epoch`.
    """

    def __init__(
        self, dataloader: Any, *, history: OngoingRun | None = None, report: bool = True
    ) -> None:
        self._loader = dataloader
        self._report = report
        self._history = history
        self.run_id = uuid.uuid4().hex if history is None else history.run_id
        self._sample_s: deque[float] = deque(maxlen=EPOCHS_KEPT)  # seconds a sample, each epoch
        self._failure: Finding | None = None
        self._log = StepLog()
        self._epochs = self._replaced = 0
        self._totals: dict[int, EpochTotals] = {}  # of the epochs under way
        self._steps: list[tuple[int, float, float, int]] = []  # not yet in the log

    def __iter__(self) -> Iterator[Any]:
        clock, steps, epoch = time.perf_counter, self._steps, self._epochs
        self._epochs += 1
        self._totals[epoch] = EpochTotals()
        count = SampleCounter(batched=getattr(self._loader, "batch_sampler", True) is not None)
        planned = planned_sizes(self._loader)
        ended = failed = False
        asked = clock()
        try:
            for batch in self._loader:  # as little as possible in here: it costs the loop
                got = clock()
                samples = count(batch) if planned is None else next(planned)
                yield batch
                back = clock()
                steps.append((epoch, got - asked, back - got, samples))
                asked = back
                if len(steps) >= STEPS_AT_ONCE:
                    self._keep_steps()
                    asked = clock()
            ended = True
        except GeneratorExit:  # the loop broke off
            raise
        except BaseException as error:  # the loader's: the loop's own do not come in here
            failed = True
            self._failure = explain_failure(error, dataloader=self._loader)
            if self._failure is None and isinstance(error, Exception):
                self._failure = raised_in_loader(error)
            raise
        finally:
            self._keep_steps()
            self._end_epoch(epoch, self._totals.pop(epoch), ended)
            if not failed:
                self._record()

    def _keep_steps(self) -> None:
        """Take the latest steps into the log and the sums of their epochs."""
        latest = self._steps[:]
        del self._steps[: len(latest)]
        for epoch, wait_s, step_s, samples in latest:
            if self._totals[epoch].steps == 0:
                self._note_first_batch(wait_s, epoch)
            self._totals[epoch].add(wait_s, step_s, samples)
            self._log.add(epoch, wait_s, step_s, samples)
        self._log.forget(STEPS_KEPT)

    def _end_epoch(self, epoch: int, seen: EpochTotals, ended: bool) -> None:
        if not seen.steps:
            return
        self._replaced = count_replaced(self._loader)
        if ended:
            self._log.steps_per_epoch = seen.steps
            self._sample_s.append(max(seen.wait_s + seen.step_s, 1e-9) / max(seen.samples, 1))
        tell_wait(WATCHED, seen.wait_s / seen.steps)
        if self._report:
            again = "; its persistent workers are new: keep one loader for all epochs"
            slower = self._slower_epochs()
            print(
                f"epoch {epoch}: {seen.line()}{again if self._replaced else ''}"
                f"{f'; {slower}' if slower else ''}"
            )

    def _slower_epochs(self) -> str | None:
        """That each epoch takes longer than the one before, where it does.

        Seconds a sample are compared, so that epochs of different lengths are alike.
        """
        costs = list(self._sample_s)
        if len(costs) < FEWEST_VALUES:
            return None
        half = len(costs) // 2
        if statistics.median(costs[half:]) < (1 + LEAST_TOTAL) * statistics.median(costs[:half]):
            return None  # as nearly always; so scipy need not be imported into the training
        drift = find_drift(costs, each="epoch")
        if drift.verdict != "rising":
            return None
        return f"epochs get slower, time for a sample {drift.summary()}"

    def _record(self) -> None:
        """Append a line to the history, and tell if the run is slower than earlier ones."""
        if self._history is None or not self._log.epoch or sys.is_finalizing() or not _is_first():
            return
        try:
            run = self._history.record(self, self._epochs)
        except (OSError, ValueError) as error:  # training goes on without its history
            warnings.warn(f"The history was not written: {error}", RuntimeWarning, stacklevel=2)
            return
        if self._report and (run.is_regression or run.is_drifting):
            print(f"history: {run.summary()}")

    def _note_first_batch(self, wait_s: float, epoch: int) -> None:
        if epoch == 0:
            self._log.startup_s = wait_s
        else:
            self._log.restarts_s.append(wait_s)

    @property
    def timing(self) -> LoaderTiming:
        """What was seen so far.

        Raises:
            ValueError: No batch has been delivered yet.
        """
        self._keep_steps()
        if not self._log.epoch:
            raise ValueError("Nothing was watched yet: iterate over the loader first.")
        return self._log.timing(settings=self._settings, note=self._slower_epochs())

    @property
    def _settings(self) -> LoaderSettings | None:
        loader = self._loader
        return LoaderSettings.of(loader) if isinstance(loader, DataLoader) else None

    def diagnosis(self) -> Diagnosis:
        """Judge what was seen, without any extra run.

        In a distributed job whose ranks all watch, each tells the others its waits at the end of an
        epoch, so that any of them can name a slow rank.
        """
        machine = inspect_machine()
        if self._failure is not None:
            timing = self.timing if self._log.epoch or self._steps else None
            return failed_diagnosis(self._failure, machine, timing, self._settings)
        timing = self.timing
        reasons = {
            "cpu_s": "watching sees waits and steps, not what a sample costs (diagnose_dataloader does)"
        }
        waits, reason = waits_told(WATCHED)
        evidence = Evidence(
            dropped_settings=ineffective_options(self._loader),
            rank_waits_s=waits,
            replaced_loaders=self._replaced,
            reasons=reasons | ({"rank_waits_s": reason} if reason else {}),
        ).with_timing(timing)
        return diagnose(evidence, machine, timing=timing)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the loader, or to the sampler or dataset that wants it.

        Raises:
            AttributeError: None of them has a `set_epoch`.
        """
        loader = self._loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        owners: tuple[Any, ...] = (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        )
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
                return
        raise AttributeError(
            f"Neither the loader ({type(loader).__name__}) nor its sampler, batch sampler or "
            "dataset has set_epoch."
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        self._keep_steps()
        return f"watched {type(self._loader).__name__} ({len(self._log.epoch)} steps seen)"


def planned_sizes(dataloader: Any) -> Iterator[int] | None:
    """Samples of each batch to come, where the loader's settings tell; None where they do not.

    Looking into a batch costs a loop that waits for an accelerator some 30 µs a step, since nothing
    of it is in the caches.

    Example:
        >>> list(itertools.islice(planned_sizes(DataLoader(range(10), batch_size=4)), 3))
        [4, 4, 2]
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return None
    size = dataloader.batch_size
    plain = type(dataloader.batch_sampler) is BatchSampler
    if size is None or not plain or dataloader.collate_fn is not default_collate:
        return None
    try:
        full, rest = divmod(len(dataloader.sampler), size)  # type: ignore[arg-type]
    except TypeError:  # a sampler without a length
        return None
    last = [rest] if rest and not dataloader.drop_last else []
    return itertools.chain(itertools.repeat(size, full), last, itertools.repeat(size))


def _is_first() -> bool:
    """Whether this process is rank 0, or the only one: ranks are one run, and not several."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def watch_dataloader(
    dataloader: Any,
    *,
    history: str | os.PathLike[str] | None = None,
    name: str | None = None,
    report: bool = True,
) -> WatchedLoader:
    """Watch a loader in your own training loop: `for batch in watch_dataloader(loader):`.

    Watching sees waiting and the rest of the loop; it cannot tell training from other work in it.
    It keeps everything as it is: the loader is iterated as your loop would, nothing is
    synchronised, and each step costs a few clock readings.

    With a `history`, the run so far is appended to that file whenever an epoch ends, or is left by
    `break`: a run that dies keeps what it had, and `read_runs` shows the latest line of each run.
    Earlier runs are compared as they were after as many epochs, and a slower run is told. In a
    distributed job, rank 0 writes. A history that cannot be written later on is warned of; training
    goes on.

    Args:
        dataloader: A `DataLoader`, or anything that yields batches.
        history: File to append the run to, as `record_run` does; None keeps none.
        name: What is run, for the history; name the loaders for training and testing apart.
        report: Print one line per epoch: rate, share of time waiting, worst wait; and whether
            epochs get slower, or the run is slower than earlier ones.

    Returns:
        The loader, watched; `.timing` and `.diagnosis()` tell what was seen.

    Raises:
        TypeError: The argument cannot be iterated, or `history` is no path.
        ValueError: `history` is a file that is no history, or `name` comes without a history.
        OSError: `history` cannot be a file: it is a folder, or lies in none.

    Example:
        >>> loader = watch_dataloader(DataLoader(range(100), batch_size=10), report=False)
        >>> for batch in loader:
        ...     pass
        >>> loader.timing.steps_per_epoch, len(loader)
        (10, 10)

    Explained in: notebook 01
    """
    check_loader(dataloader)
    if history is None and name is not None:
        raise ValueError(f"name={name!r} is for a history; give history= too.")
    ongoing = None if history is None else OngoingRun(history, name)
    return WatchedLoader(dataloader, history=ongoing, report=report)
