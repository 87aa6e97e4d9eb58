"""The search for the best settings: which to try, in what order, and which of them wins."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from dataloading.arms import replay_batch
from dataloading.batch_costs import BatchCosts
from dataloading.batches import move_to
from dataloading.borrowing import borrowed
from dataloading.budgets import over_budget
from dataloading.machine import Machine
from dataloading.making import Maker
from dataloading.model import step_seconds
from dataloading.probing import probe
from dataloading.progress import TimeBar
from dataloading.results import format_value
from dataloading.settings import DEFAULT_PREFETCH_FACTOR, LoaderSettings
from dataloading.setup_rules import pins_memory
from dataloading.sharding import gives_shares
from dataloading.timing import TrainStep
from dataloading.trials import REFUSED, Bench, Trial, in_one_line, rounds
from dataloading.watchdog import ProbeTimeout, close_iterator, open_iterator, time_limit
from dataloading.workers import GOOD_ENOUGH, worker_cap

PROBE_SHARE, REPLAY_SHARE, PROOF_SHARE = 0.2, 0.03, 0.35  # of the time; the rest is for trials
LONGEST_PROBE_S = 10.0
MODEL_OFF = 0.10  # a first trial further from its prediction than this: the model is not trusted
NEAR = 1.08  # settings predicted to be this close to the best are tried too
REACHED = 0.97  # of the rate of training alone: no other setting can do noticeably better
LEAST_ROUNDS = 3  # blocks of each finalist
FINALISTS = 4
LEAST_BLOCK_S = 0.3
BLOCKS_SHARE = 0.7  # of the time of trials; the rest goes to starts and to emptying queues
PREFETCH_FACTORS = (2, 4)
FEW_WORKERS = 4  # up to here every number is an option, above each is a quarter more than the last


class Search:
    """One search: what may be tried, and what came of the trials.

    Attributes:
        present: The settings from before; always the first of the trials.
        costs: What a batch costs; None where the probe failed.
        step_s: Seconds of the train step when data is free.
        trials: All settings that come into question.
        searched_by: `model` or `successive halving`.
        notes: What the reader should know.
    """

    def __init__(
        self,
        maker: Maker,
        train_step: TrainStep | None,
        device: torch.device | None,
        seconds: float,
        memory_fraction: float,
        machine: Machine,
    ) -> None:
        self.begun = time.perf_counter()
        self.maker = maker
        self.train_step = train_step
        self.device = device
        self.seconds = seconds
        self.memory_fraction = memory_fraction
        self.machine = machine
        self.present = maker.settings.changed()
        self.costs: BatchCosts | None = None
        self.step_s = 0.0
        self.trials: list[Trial] = []
        self.finalists: list[Trial] = []
        self.searched_by = "model"
        self.notes: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the proof has to begin."""
        return self.to_the_end_s - PROOF_SHARE * self.seconds

    @property
    def to_the_end_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.perf_counter() - self.begun)

    # -- what may be tried

    def ask_model(self, bar: TimeBar) -> None:
        """Probe the loader and the train step, and list what may be tried."""
        probe_s = min(LONGEST_PROBE_S, PROBE_SHARE * self.seconds)
        try:
            self.costs = probe(self.maker, self.machine, probe_s, bar)
        except (ProbeTimeout, RuntimeError, OSError, MemoryError) as error:
            self.notes.append(f"no model: {in_one_line(error)}")
        if self.train_step is not None:
            self._measure_step(self.train_step)
        self.list_trials()

    def list_trials(self) -> None:
        """All settings that come into question, with what the model expects of each."""
        self.trials = [Trial(settings) for settings in self._options()]
        for trial in self.trials:
            self._predict(trial)

    def _measure_step(self, train_step: TrainStep) -> None:
        """Seconds and CPU seconds of the train step when data is free."""
        with borrowed(self.maker.make(self.present.changed(num_workers=0))) as lent:
            iterator = open_iterator(lent.loader)
            try:
                with time_limit(max(self.seconds, 60.0), "Loading one batch to train on"):
                    batch = next(iterator)
            finally:
                close_iterator(iterator)
        if self.device is not None:
            batch = move_to(batch, self.device, non_blocking=False)
        timing, cpu_s = replay_batch(batch, train_step, REPLAY_SHARE * self.seconds)
        self.step_s = timing.period_s
        if self.costs is not None:
            self.costs = replace(self.costs, step_cpu_s=cpu_s)

    def _options(self) -> list[LoaderSettings]:
        """All settings that come into question, the present ones first."""
        share = self.costs.cpu_share if self.costs is not None else 0.5
        cap = max(worker_cap(self.machine, share), 1)
        if gives_shares(self.maker.present) is not True:  # each worker might deliver everything
            cap = min(cap, max(1, self.present.num_workers))
        pins = pins_memory(self.machine)
        options = [self.present]
        for pin in (True, False) if pins and self.device is not None else (pins,):
            for workers in spaced(cap):
                prefetch = PREFETCH_FACTORS if workers else (None,)
                options += [
                    self.present.changed(
                        num_workers=workers,
                        prefetch_factor=factor,
                        pin_memory=pin,
                        persistent_workers=workers > 0,
                    )
                    for factor in prefetch
                ]
        return list(dict.fromkeys(options))

    def _predict(self, trial: Trial) -> None:
        """Refuse what does not fit; else note what the model expects."""
        if self.costs is None:
            return
        short = over_budget(trial.settings, self.costs, self.machine, self.memory_fraction)
        if short is not None:
            trial.status, trial.reason = REFUSED, short
            return
        step = step_seconds(self.costs, trial.settings, self.step_s, self.machine)
        trial.predicted_samples_per_s = self.costs.batch_size / step

    # -- the search

    def run(self, bench: Bench) -> None:
        """Try what the model thinks best; where it is off, let all compete."""
        open_to = [trial for trial in self.trials if trial.usable]
        first = self.expected_best(open_to)
        if first is None:
            self._halve(bench, open_to)
            return
        if not bench.run(first, self._block_s(FINALISTS), self.left_s):
            self._halve(bench, open_to)
            return
        rate, expected = first.samples_per_s, first.predicted_samples_per_s
        if rate is None or expected is None or abs(rate / expected - 1) > MODEL_OFF:
            self.notes.append(
                "the model was off in the first trial: "
                f"{format_value('samples_per_s', expected)} predicted, "
                f"{format_value('samples_per_s', rate)} measured"
            )
            self._halve(bench, open_to)
            return
        if self._is_at_the_ceiling(rate):
            self.finalists = [first]
            self.notes.append("stopped early: the first trial is as fast as training alone")
            return
        self._finals(bench, [first, *self.neighbours(first)][:FINALISTS])

    def expected_best(self, trials: list[Trial]) -> Trial | None:
        """The least demanding of the settings that are predicted to be within 2 % of the best."""
        ranked = self._by_prediction(trials)
        if not ranked:
            return None
        best = ranked[0].predicted_samples_per_s or 0.0
        good = [t for t in ranked if (t.predicted_samples_per_s or 0.0) * GOOD_ENOUGH >= best]
        return min(good, key=demand)

    def _by_prediction(self, trials: Iterable[Trial]) -> list[Trial]:
        known = [t for t in trials if t.predicted_samples_per_s is not None]
        return sorted(known, key=lambda t: (-(t.predicted_samples_per_s or 0.0), demand(t)))

    def neighbours(self, first: Trial) -> list[Trial]:
        """What is next to a setting and predicted to be nearly as fast: workers, prefetch, pinning."""
        least = (first.predicted_samples_per_s or 0.0) / NEAR
        others = [t for t in self.trials if t.usable and t is not first]
        near = [t for t in others if (t.predicted_samples_per_s or 0.0) >= least]
        workers = first.settings.num_workers
        alike = [t for t in near if demand(t)[1] == demand(first)[1]]
        fewer = [t for t in alike if t.settings.num_workers < workers]
        more = [t for t in alike if t.settings.num_workers > workers]
        same = [t for t in near if t.settings.num_workers == workers]
        return [*fewer[-1:], *more[:1], *same[:1], *more[1:2]]

    def _is_at_the_ceiling(self, samples_per_s: float) -> bool:
        """Whether training alone would not be noticeably faster."""
        if self.costs is None or self.step_s <= 0:
            return False
        least_s = self.step_s + self.costs.handover_s
        return samples_per_s * least_s / self.costs.batch_size >= REACHED

    def _block_s(self, trials: int) -> float:
        """Seconds of one block, so that each of so many trials gets its rounds."""
        return max(LEAST_BLOCK_S, BLOCKS_SHARE * self.left_s / (trials * LEAST_ROUNDS))

    def _halve(self, bench: Bench, trials: list[Trial]) -> None:
        """Successive halving: short blocks for all, longer ones for the better half."""
        self.searched_by = "successive halving"
        entrants = [t for t in trials if t.usable and _is_plain(t.settings)]
        stage_s = self.left_s / max(1, len(entrants).bit_length())
        while entrants and self.left_s > 0:
            block_s = max(LEAST_BLOCK_S, 0.5 * stage_s / len(entrants))
            for trial in entrants:
                if self.left_s > 0:
                    bench.run(trial, block_s, self.left_s)
                bench.close(trial.settings)  # too many to keep their workers
            entrants = [t for t in entrants if t.usable and t.rates]
            entrants.sort(key=lambda t: -(t.samples_per_s or 0.0))
            if len(entrants) <= 2:
                break
            entrants = entrants[: (len(entrants) + 1) // 2]
        self._finals(bench, entrants[:FINALISTS])

    def _finals(self, bench: Bench, finalists: list[Trial]) -> None:
        """Blocks by turns until the time for trials is over."""
        self.finalists = finalists = self.that_fit_together(finalists)
        block_s = self._block_s(len(finalists))
        longest = 0.0
        for order in rounds(finalists):
            if len(finalists) < 2 or self.left_s < longest:
                return
            begun = time.perf_counter()
            for trial in order:
                if not bench.run(trial, block_s, self.left_s):
                    finalists = [t for t in finalists if t.usable]
            longest = time.perf_counter() - begun

    def that_fit_together(self, trials: list[Trial]) -> list[Trial]:
        """As many of the first as may be open at the same time."""
        if self.costs is None:
            return trials[:2]
        kept: list[Trial] = []
        for trial in trials:
            together = [*kept, trial]
            summed = self.present.changed(
                num_workers=sum(t.settings.num_workers for t in together),
                prefetch_factor=max(
                    t.settings.prefetch_factor or DEFAULT_PREFETCH_FACTOR for t in together
                ),
            )
            if kept and over_budget(summed, self.costs, self.machine, self.memory_fraction):
                break
            kept.append(trial)
        return kept

    def winner(self) -> Trial | None:
        """The least demanding of the settings within 2 % of the best; None where nothing ran."""
        tried = [t for t in self.finalists if t.usable and t.rates]
        tried = tried or [t for t in self.trials if t.usable and t.rates]
        if not tried:
            return None
        best = max(t.samples_per_s or 0.0 for t in tried)
        good = [t for t in tried if (t.samples_per_s or 0.0) * GOOD_ENOUGH >= best]
        return min(good, key=demand)


def spaced(most: int) -> list[int]:
    """Numbers of workers from 0 to `most`: all of the small ones, then steps of a quarter.

    Example:
        >>> spaced(12)
        [0, 1, 2, 3, 4, 5, 7, 9, 12]
    """
    numbers = [number for number in range(FEW_WORKERS + 1) if number <= most]
    while numbers[-1] < most:
        numbers.append(min(most, math.ceil(numbers[-1] * 1.25)))
    return numbers


def demand(trial: Trial) -> tuple[int, int]:
    """What a setting asks of the machine: of equally fast ones, the least demanding wins."""
    settings = trial.settings
    return settings.num_workers, settings.prefetch_factor or DEFAULT_PREFETCH_FACTOR


def _is_plain(settings: LoaderSettings) -> bool:
    return settings.prefetch_factor in (None, DEFAULT_PREFETCH_FACTOR)
