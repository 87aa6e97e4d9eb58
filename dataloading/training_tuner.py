"""Tuning inside the real training: each epoch is trained once, and is a trial at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from dataloading.arguments import check_int, check_share
from dataloading.batch_costs import BatchCosts
from dataloading.batches import SampleCounter, batch_bytes, count_tensors
from dataloading.loader_timing import LoaderTiming, StepLog
from dataloading.machine import inspect_machine
from dataloading.making import MakeDataLoader, Maker
from dataloading.results import format_value
from dataloading.search import MODEL_OFF, Search
from dataloading.settings import LoaderSettings
from dataloading.trials import TRIED, Trial, trial_table
from dataloading.watchdog import close_iterator, loader_warnings_hidden, open_iterator, receive_rest
from dataloading.worker_clock import instrument
from dataloading.worker_records import WorkerRecords
from dataloading.workers import GOOD_ENOUGH

if TYPE_CHECKING:
    import pandas as pd

TRIAL_EPOCHS = 4  # of the training, in the first of which settings may change
LEAST_GAIN = 1.02  # a change must promise more than this, its start of workers included


class TrainingTuner:
    """The epochs of a training, each with the settings that promise most; see
    `tune_while_training`.

    Attributes:
        settings: The settings of the present epoch, in the end the best that was found.
        notes: What the reader should know.
    """

    def __init__(self, maker: Maker, epochs: int, memory_fraction: float) -> None:
        self.epochs = epochs
        self.settings = maker.settings
        self.notes: list[str] = []
        self._maker = maker
        self._search = Search(maker, None, None, 1.0, memory_fraction, inspect_machine())
        self._search.trials = [Trial(maker.settings)]
        self._loader: DataLoader | None = None
        self._plain = maker.present
        self._records: WorkerRecords | None = None

    def __len__(self) -> int:
        return self.epochs

    def __iter__(self) -> Iterator[TunedEpoch]:
        """Yield the epochs; workers end when the last one is done, or the loop is left."""
        try:
            for number in range(self.epochs):
                trial = self._search.trials[0] if number == 0 else self._next(number)
                epoch = self._epoch(number, trial)
                yield epoch
                self._learn(epoch, trial)
                if number == 0:  # the clocks in its workers have done their work
                    self._put_away()
        finally:
            self._put_away()

    @property
    def costs(self) -> BatchCosts | None:
        """What a batch costs, as the first epoch showed; None before it, or without clocks."""
        return self._search.costs

    @property
    def trials(self) -> pd.DataFrame:
        """A row per setting: prediction, measured rate, steps; as `TuningResult.trials`."""
        return trial_table(self._search.trials, self.settings)

    @property
    def dataloader(self) -> DataLoader:
        """A new loader with the best settings so far."""
        return self._maker.make(self.settings)

    def _epoch(self, number: int, trial: Trial) -> TunedEpoch:
        """The epoch with a setting; workers of the same setting go on, others end."""
        if self._loader is None or trial.settings != self.settings:
            self._put_away()
            self.settings = trial.settings
            self._plain = self._loader = self._maker.make(trial.settings)
            if number == 0:
                with contextlib.suppress(TypeError):  # a loader that cannot be given clocks
                    self._loader, self._records, _ = instrument(self._plain, trial.settings)
        sampler: Any = getattr(self._plain, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        return TunedEpoch(number, self._loader, self._plain, trial.settings, self._records)

    def _learn(self, epoch: TunedEpoch, trial: Trial) -> None:
        """Note what the epoch gave; after the first one, ask the model about all settings."""
        timing = epoch.timing()
        if timing is None:  # the loop left it out, or broke it off at once
            return
        if epoch.number == 0 and (costs := epoch.costs(timing)) is not None:
            self._search.costs = costs
            self._search.step_s = float(timing.step_s.mean())
            self._search.list_trials()
            trial = self._search.trials[0]
        trial.rates.append(timing.samples_per_s)
        trial.steps += timing.steps
        trial.status = TRIED

    def _next(self, number: int) -> Trial:
        """The trial of the next epoch: what the model likes, then its neighbours, then the best."""
        search, best = self._search, self._best()
        if number >= min(TRIAL_EPOCHS, self.epochs - 1):
            return best
        fresh = [t for t in search.trials if t.usable and not t.rates]
        if number > 1 and self._is_as_predicted(best):
            fresh = [t for t in search.neighbours(best) if not t.rates]
        first = search.expected_best(fresh)
        return first if first is not None and self._promises(first, best) else best

    def _best(self) -> Trial:
        tried = [t for t in self._search.trials if t.rates]
        if not tried:
            return self._search.trials[0]
        fastest = max(t.samples_per_s or 0.0 for t in tried)
        good = [t for t in tried if (t.samples_per_s or 0.0) * GOOD_ENOUGH >= fastest]
        return min(good, key=lambda t: (t.settings.num_workers, -(t.samples_per_s or 0.0)))

    def _promises(self, trial: Trial, best: Trial) -> bool:
        """Whether a setting is predicted to be noticeably faster than the best so far."""
        rate, expected = best.samples_per_s, trial.predicted_samples_per_s
        if self._is_as_predicted(best):
            rate = best.predicted_samples_per_s  # two predictions err in the same direction
        return rate is not None and expected is not None and expected > LEAST_GAIN * rate

    def _is_as_predicted(self, trial: Trial) -> bool:
        rate, expected = trial.samples_per_s, trial.predicted_samples_per_s
        return rate is not None and expected is not None and abs(rate / expected - 1) <= MODEL_OFF

    def _put_away(self) -> None:
        """End the workers of the present loader."""
        loader, self._loader = self._loader, None
        if (iterator := getattr(loader, "_iterator", None)) is not None:
            close_iterator(iterator)
            loader._iterator = None  # type: ignore[union-attr]
        if self._records is not None:
            self._records.remove()
            self._records = None

    def __repr__(self) -> str:
        best = self._best()
        rate = best.samples_per_s
        seen = f" at {format_value('samples_per_s', rate)}" if rate is not None else ""
        return f"TrainingTuner: {best.settings.summary()}{seen}, over {self.epochs} epochs"


class TunedEpoch:
    """One epoch of the training: iterate over it as over a loader.

    It answers for its loader in every other way: `len`, attributes.

    Attributes:
        number: Counted from 0.
        settings: What its loader is set to.
    """

    def __init__(
        self,
        number: int,
        loader: DataLoader,
        plain: DataLoader,
        settings: LoaderSettings,
        records: WorkerRecords | None = None,
    ) -> None:
        self.number = number
        self.settings = settings
        self._loader = loader
        self._plain = plain  # the same without clocks
        self._records = records
        self._log = StepLog()
        self._size: tuple[int, int, int] | None = None  # samples, bytes and tensors of a batch
        self._cpu_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        clock, log = time.perf_counter, self._log
        count = SampleCounter(batched=self._loader.batch_sampler is not None)
        receive_rest(getattr(self._loader, "_iterator", None))  # of an epoch that was broken off
        began_cpu_s = time.process_time()
        asked = clock()
        with loader_warnings_hidden():  # more workers than CPUs are meant: they wait
            iterator = open_iterator(self._loader)
        try:
            for batch in iterator:
                got = clock()
                samples = count(batch)
                if self._size is None:
                    self._size = samples, batch_bytes(batch), count_tensors(batch)
                yield batch
                back = clock()
                log.add(self.number, got - asked, back - got, samples)
                asked = clock()
            log.steps_per_epoch = len(log.epoch)
        finally:
            self._cpu_s = time.process_time() - began_cpu_s

    def timing(self) -> LoaderTiming | None:
        """What was seen of it; None where it was not iterated."""
        if not self._log.epoch:
            return None
        workers = self._records.summary() if self._records is not None else None
        return self._log.timing(settings=self.settings, workers=workers)

    def costs(self, timing: LoaderTiming) -> BatchCosts | None:
        """What a batch costs, as the clocks in its workers saw it; None without clocks."""
        workers = timing.workers
        if workers is None or self._size is None:
            return None
        samples, size, tensors = self._size
        cycle_s = workers.batch_s
        cpu_s = min(cycle_s, workers.fetch_cpu_s + workers.collate_cpu_s)
        own_cpu_s = self._cpu_s / len(self._log.epoch)
        in_main = self.settings.num_workers == 0
        return BatchCosts(
            cpu_s=cpu_s,
            wait_s=cycle_s - cpu_s,
            send_s=(workers.extra_cpu_share or 0.0) * cycle_s if not in_main else 0.0,
            batch_size=samples,
            batch_bytes=size,
            tensors=tensors,
            step_cpu_s=max(0.0, own_cpu_s - cpu_s) if in_main else own_cpu_s,
            alone_s=float(timing.wait_s.mean()) if in_main else None,
        )

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __repr__(self) -> str:
        return f"epoch {self.number} with {self.settings.summary()}"


def tune_while_training(
    dataloader: DataLoader | MakeDataLoader, *, epochs: int, memory_fraction: float = 0.8
) -> TrainingTuner:
    """Go through the epochs of a training with better and better settings, at no extra cost.

        tuner = tune_while_training(loader, epochs=10)
        for epoch in tuner:
            for batch in epoch:
                ...                      # your training, unchanged
        tuner.settings                   # the best that was found

    The first epoch runs with the present settings and clocks in the workers; from it a model
    predicts all others. The next few epochs try what it promises, the rest run with the best. Each
    epoch is gone through once, with one setting, so that every sample comes as often as it would
    anyway; a sampler with `set_epoch` is told the number of each epoch. The batch size stays; with
    another number of workers, random transforms draw other numbers, and with workers that are kept
    between epochs a seeded shuffle has other orders from the second epoch on.

    Args:
        dataloader: A `DataLoader`, or a function that builds one from `LoaderSettings`.
        epochs: How many epochs the training has.
        memory_fraction: Share of what is free that the loader may take.

    Returns:
        A `TrainingTuner`: iterate over it once; `.settings`, `.trials` and `.dataloader` tell what
        was found.

    Raises:
        TypeError: A loader that cannot be built again with other settings.
        ValueError: A bad argument.

    Example:
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> [len(list(epoch)) for epoch in tune_while_training(loader, epochs=3)]
        [2, 2, 2]

    Explained in: notebook 03
    """
    check_int("epochs", epochs, least=1)
    check_share("memory_fraction", memory_fraction)
    return TrainingTuner(Maker.of(dataloader), epochs, memory_fraction)
