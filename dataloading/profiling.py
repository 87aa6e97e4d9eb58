"""What one sample costs, stage by stage: read, decode, each transform, collate, transfer.

The stages are timed in this process with one thread, as a worker would run them, on a shallow copy
of the dataset whose transforms and file reader carry clocks. The dataset itself is not changed.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
)

from dataloading.arguments import check_int
from dataloading.batches import batch_bytes, clone_batch, count_tensors
from dataloading.results import Result, format_bytes, format_seconds, format_share
from dataloading.thread_counters import read_counters
from dataloading.watchdog import (
    ProbeTimeout,
    close_iterator,
    generators_of,
    loader_warnings_hidden,
    one_thread,
    open_iterator,
    random_state_kept,
    time_limit,
)

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_BATCH_SIZE = 32  # for a bare dataset: the course's batch size
WARM_UP_SAMPLES = 2  # the first calls pay for lazy imports and opened files
SLOW_FACTOR = 5.0  # a sample of more than 5 medians is an outlier worth a look
BUDGET_S = 10.0  # a probe ends after this many seconds, with the samples it has by then
LIMIT_S = 11.0  # a single sample may not hold the probe longer than this
TRANSFER_BATCHES = 12  # batches sent from one worker to learn what sending costs
SENDING_ERRORS = (  # what a batch that cannot be pickled, or a worker that cannot start, raises
    *(RuntimeError, OSError, AttributeError, TypeError, ValueError, ImportError, EOFError),
    pickle.PicklingError,
)
COLLATE_REPEATS = 5
READ_CHUNK_BYTES = 2**20
TRANSFORM_ATTRIBUTES = ("transform", "transforms", "target_transform")
READ, DECODE, REST, COLLATE = "read", "decode", "rest of __getitem__", "collate"


@dataclass(frozen=True, repr=False, eq=False)
class SampleProfile(Result):
    """What one sample costs where it is prepared.

    Attributes:
        stages: DataFrame with a row per stage: `stage`, `wall_s`, `cpu_s`, `wait_s` (seconds per
            sample) and `share` of the sample's wall time, collate included.
        sample_wall_s, sample_cpu_s: Mean seconds to get one sample, without collating.
        collate_s: Seconds to collate one batch.
        batch_size: Samples in the batch that was collated.
        batch_bytes: Bytes of its tensors.
        tensors_per_batch: How many tensors travel with a batch.
        transfer_s: Seconds to send one such batch from a worker to this process; None where it
            was not measured.
        slow_samples: DataFrame of outliers: `index`, `wall_s`, `times_median`.
        samples: How many samples were timed.
        wall_s: Array of the seconds of each sample, in the order they were fetched.
        run_delay_s: Mean seconds that a sample waited for a CPU which others were using; None
            where the system does not tell.
        notes: What the reader should know about these figures.
    """

    stages: pd.DataFrame
    sample_wall_s: float
    sample_cpu_s: float
    collate_s: float
    batch_size: int
    batch_bytes: int
    tensors_per_batch: int
    transfer_s: float | None
    slow_samples: pd.DataFrame
    samples: int
    wall_s: np.ndarray
    run_delay_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch_s(self) -> float:
        """Seconds to fetch and collate one batch."""
        return self.sample_wall_s * self.batch_size + self.collate_s

    @property
    def sample_wait_s(self) -> float:
        """Mean seconds that a sample waits for something else than a CPU, such as a disk."""
        waiting = self.sample_wall_s - self.sample_cpu_s - (self.run_delay_s or 0.0)
        return max(0.0, waiting)

    @property
    def cpu_share(self) -> float:
        """Share of a batch's time in which the CPU works."""
        cpu = self.sample_cpu_s * self.batch_size + self.collate_s
        return min(1.0, cpu / self.batch_s) if self.batch_s > 0 else 1.0

    @property
    def top_stage(self) -> tuple[str, float]:
        """Name and share of the dearest stage."""
        row = int(self.stages["wall_s"].to_numpy().argmax())
        return str(self.stages["stage"].iloc[row]), float(self.stages["share"].iloc[row])

    def rows(self) -> list[tuple[str, Any]]:
        """Each stage, then the batch."""
        stages = [
            (stage, f"{format_seconds(wall_s)} ({format_share(share)})")
            for stage, wall_s, share in self.stages[["stage", "wall_s", "share"]]
            .to_numpy()
            .tolist()
        ]
        return [
            *stages,
            ("batch", f"{format_bytes(self.batch_bytes)} in {self.tensors_per_batch} tensors"),
            ("transfer_s", self.transfer_s),
            ("slow samples", len(self.slow_samples)),
            ("notes", self.notes),
        ]

    def summary(self) -> str:
        """Cost of a sample and its largest stage."""
        stage, share = self.top_stage
        return (
            f"{format_seconds(self.sample_wall_s)} a sample "
            f"(CPU busy {format_share(self.sample_cpu_s / max(self.sample_wall_s, 1e-12))}), "
            f"most of it {stage} ({format_share(share)}), over {self.samples} samples"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the stages of one sample as a waterfall; returns the Axes."""
        from dataloading.plots import plot_sample_stages

        return plot_sample_stages(self, ax=ax)


def profile_samples(
    dataset_or_dataloader: Dataset | DataLoader, *, samples: int = 64
) -> SampleProfile:
    """Find out what one sample costs, stage by stage, in this process.

    Args:
        dataset_or_dataloader: A dataset, or a loader whose dataset, batch size and collate
            function are taken. Samples are drawn evenly over a map-style dataset.
        samples: How many samples to time; fewer when ten seconds are over.

    Returns:
        A `SampleProfile`.

    Raises:
        TypeError: Neither a dataset nor a loader, or `samples` is not a whole number.
        ValueError: `samples` is below 1, or the dataset is empty.
        ProbeTimeout: The first sample took longer than the probe's time limit.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> profile = profile_samples(TensorDataset(torch.zeros(100, 3)))
        >>> profile.samples, profile.tensors_per_batch, profile.batch_bytes
        (64, 1, 384)

    Explained in: notebook 01
    """
    check_int("samples", samples, least=1)
    loader = dataset_or_dataloader if isinstance(dataset_or_dataloader, DataLoader) else None
    dataset = loader.dataset if loader is not None else dataset_or_dataloader
    if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise TypeError(f"Expected a dataset or a DataLoader, got {type(dataset).__name__}.")
    clock = StageClock()
    timed = with_clocks(dataset, clock)
    with (
        random_state_kept(*generators_of(loader)),
        one_thread(),
        time_limit(LIMIT_S, lambda: f"Fetching sample {clock.current.index}"),
    ):
        before = read_counters()
        fetched = _fetch(timed, dataset, clock, samples)
        delay_ns = read_counters().since(before).run_delay_ns
        if not fetched:
            raise ValueError(
                f"{type(dataset).__name__} has no samples to profile; expected at least one."
            )
        unbatched = (
            loader is not None and loader.batch_sampler is None and loader.batch_size is None
        )
        size = 1 if unbatched else min(_batch_size(loader), len(fetched))
        collate = loader.collate_fn if loader is not None else default_collate
        batch, collate_s = _time_collate(collate, fetched[0] if unbatched else fetched[:size])
    transfer_s, notes = _time_transfer(batch)
    run_delay_s = None if delay_ns is None else delay_ns / 1e9 / len(fetched)
    return _summarise(clock, batch, size, collate_s, transfer_s, run_delay_s, notes)


@dataclass
class SampleTimes:
    """Nanoseconds of one sample, and of each stage of it: wall and CPU."""

    index: Any
    wall_ns: int = 0
    cpu_ns: int = 0
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)


class StageClock:
    """The times of each sample that was fetched whole."""

    def __init__(self) -> None:
        self.samples: list[SampleTimes] = []
        self.current = SampleTimes(None)

    def timed(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and count its time for a stage."""
        begun_wall, begun_cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = function(*args, **kwargs)
        wall, cpu = time.perf_counter_ns() - begun_wall, time.thread_time_ns() - begun_cpu
        wall_before, cpu_before = self.current.stages.get(stage, (0, 0))
        self.current.stages[stage] = (wall_before + wall, cpu_before + cpu)
        return result

    def sample(self, index: Any, function: Callable[[], Any]) -> Any:
        """Fetch one sample and count its time."""
        self.current = SampleTimes(index)
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        item = function()
        self.current.wall_ns = time.perf_counter_ns() - wall
        self.current.cpu_ns = time.thread_time_ns() - cpu
        self.samples.append(self.current)
        return item

    def stage_means_s(self) -> dict[str, tuple[float, float]]:
        """Mean wall and CPU seconds of each stage, over all samples."""
        sums: dict[str, np.ndarray] = {}
        for sample in self.samples:
            for stage, times in sample.stages.items():
                sums[stage] = sums.get(stage, 0) + np.array(times, dtype=float)
        return {stage: tuple(total / len(self.samples) / 1e9) for stage, total in sums.items()}


class Timed:
    """A transform or reader that counts its time for a stage, and answers for what it wraps."""

    def __init__(self, inner: Any, stage: str, clock: StageClock) -> None:
        self.inner = inner
        self.stage = stage
        self.clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        return self.clock.timed(self.stage, self.inner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "stage", "clock") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class TimedReader(Timed):
    """A file reader such as `ImageFolder.loader`: reading the bytes apart from decoding them."""

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the file once for the page cache, then decode it."""
        self.clock.timed(READ, _read_bytes, path)
        return self.clock.timed(DECODE, self.inner, path, *args, **kwargs)


def _read_bytes(path: Any) -> None:
    if not isinstance(path, str | os.PathLike) or not os.path.isfile(path):
        return  # a number, say, would be taken for an open file, and that file be closed
    try:
        with open(path, "rb") as file:
            while file.read(READ_CHUNK_BYTES):
                pass
    except ProbeTimeout:  # an OSError as well
        raise
    except OSError:
        return  # the reader itself will say what is wrong


def with_clocks(dataset: Any, clock: StageClock) -> Any:
    """A shallow copy of a dataset whose transforms and file reader carry clocks.

    A dataset that cannot be copied is given back as it is: all of it is one stage then.
    """
    try:
        timed: Any = copy.copy(dataset)  # what a sample opens lazily is opened on the copy only
        kind = type(dataset)
        if hasattr(kind, "__del__"):  # dropping the copy must not close the files of the dataset
            no_del = {"__del__": lambda self: None, "__slots__": ()}
            timed.__class__ = type(kind.__name__, (kind,), no_del)
    except (TypeError, AttributeError, RecursionError, copy.Error, pickle.PicklingError):
        return dataset
    if isinstance(dataset, Subset):
        timed.dataset = with_clocks(dataset.dataset, clock)
    if isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        if isinstance(parts, dict):
            timed.datasets = {name: with_clocks(part, clock) for name, part in parts.items()}
        else:
            timed.datasets = type(parts)(with_clocks(part, clock) for part in parts)
    attributes = getattr(dataset, "__dict__", {})
    for name in TRANSFORM_ATTRIBUTES:
        if callable(attributes.get(name)):
            setattr(timed, name, _timed_transform(attributes[name], clock))
    if callable(attributes.get("loader")):
        timed.loader = TimedReader(attributes["loader"], DECODE, clock)
    return timed


def _timed_transform(transform: Any, clock: StageClock) -> Any:
    """A transform with a clock around it, or, for a chain, around each of its links."""
    # its own attributes, not the submodules of an nn.Module: a copy shares those with the original
    own = getattr(transform, "__dict__", {})
    steps = own.get("transforms")
    if isinstance(steps, list | tuple) and all(callable(step) for step in steps):
        chain = copy.copy(transform)
        chain.transforms = [_timed_transform(step, clock) for step in steps]
        return chain
    # torchvision's StandardTransform holds both
    parts = {name: own.get(name) for name in ("transform", "target_transform")}
    if any(callable(part) for part in parts.values()):
        both = copy.copy(transform)
        for name, part in parts.items():
            if callable(part):
                setattr(both, name, _timed_transform(part, clock))
        return both
    if type(transform) is torch.nn.Sequential:  # a subclass may pass on more than one value
        return _Chain([_timed_transform(step, clock) for step in transform])
    return Timed(transform, stage_name(transform), clock)


class _Chain:
    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


def stage_name(function: Any) -> str:
    """A transform's name: its class, or the function's own name.

    Example:
        >>> stage_name(len), stage_name(torch.nn.Identity())
        ('len', 'Identity')
    """
    name = getattr(function, "__name__", None)
    return name if name else type(function).__name__


def _fetch(timed: Any, dataset: Any, clock: StageClock, samples: int) -> list[Any]:
    """Fetch samples until there are enough or the budget is over."""
    deadline = time.perf_counter() + BUDGET_S
    fetched: list[Any] = []
    iterable = isinstance(dataset, IterableDataset)
    source = _iterate(timed, clock) if iterable else _pick(timed, clock, samples)
    try:
        for item in islice(source, samples + WARM_UP_SAMPLES):
            fetched.append(item)
            if time.perf_counter() > deadline:
                break
    except ProbeTimeout:
        if not fetched:
            raise
    if len(fetched) > WARM_UP_SAMPLES:
        del clock.samples[:WARM_UP_SAMPLES]
        if not iterable:  # it was the first sample again
            del fetched[:WARM_UP_SAMPLES]
    return fetched


def _pick(dataset: Any, clock: StageClock, samples: int) -> Iterator[Any]:
    """Samples spread evenly over a map-style dataset, the first of them again for warming up."""
    count = len(dataset)
    if count == 0:
        return
    spread = np.linspace(0, count - 1, num=min(samples, count)).astype(int).tolist()
    for index in [*(spread[:1] * WARM_UP_SAMPLES), *spread]:
        yield clock.sample(index, partial(dataset.__getitem__, index))


def _iterate(dataset: Any, clock: StageClock) -> Iterator[Any]:
    source = iter(dataset)
    number = 0
    while True:
        try:
            item = clock.sample(number, lambda: next(source))
        except StopIteration:
            return
        number += 1
        yield item


def _batch_size(loader: DataLoader | None) -> int:
    if loader is None:
        return DEFAULT_BATCH_SIZE
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) or DEFAULT_BATCH_SIZE


def _time_collate(collate: Callable[[Any], Any], samples: Any) -> tuple[Any, float]:
    """Collate the same samples a few times; returns a batch and the median seconds."""
    times = []
    for _ in range(COLLATE_REPEATS):
        fresh = _fresh(samples)
        started = time.perf_counter()
        batch = collate(fresh)
        times.append(time.perf_counter() - started)
    return batch, float(np.median(times))


def _fresh(samples: Any) -> Any:
    """The same samples in new lists and dicts: some collate functions take things out of them."""
    if isinstance(samples, list):
        return [
            copy.copy(sample) if isinstance(sample, dict | list) else sample for sample in samples
        ]
    return copy.copy(samples) if isinstance(samples, dict) else samples


class BatchSource(Dataset):
    """Gives copies of one batch: what is left of a loader when preparing costs nothing."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return TRANSFER_BATCHES

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return clone_batch(self.batch)


def _time_transfer(batch: Any) -> tuple[float | None, tuple[str, ...]]:
    """Send copies of a batch from one worker, and take off what copying itself costs."""
    source = BatchSource(clone_batch(batch))
    clone_times = []
    with one_thread():
        for index in range(COLLATE_REPEATS):
            started = time.perf_counter()
            source[index]
            clone_times.append(time.perf_counter() - started)
    iterator = None
    try:
        _Structure(io.BytesIO()).dump(batch)
        with loader_warnings_hidden(), random_state_kept(), time_limit(LIMIT_S, "Sending batches"):
            loader = DataLoader(source, batch_size=None, num_workers=1, collate_fn=_as_it_is)
            iterator = open_iterator(loader)
            next(iterator)
            arrivals = [time.perf_counter() for _ in iterator]
    except ProbeTimeout:
        return None, ("Sending a batch from a worker took too long to be measured.",)
    except SENDING_ERRORS as error:
        return None, (f"Sending a batch from a worker failed: {type(error).__name__}: {error}",)
    finally:
        close_iterator(iterator)
    return max(0.0, quickest_pace(arrivals) - float(np.median(clone_times))), ()


def quickest_pace(arrivals: list[float], stretch: int = TRANSFER_BATCHES // 3) -> float:
    """Seconds per arrival in the quickest stretch: what disturbs a run only makes others slower.

    Example:
        >>> quickest_pace([0.0, 1.0, 2.0, 9.0, 10.0], stretch=2)
        1.0
    """
    spans = [arrivals[n + stretch] - arrivals[n] for n in range(max(1, len(arrivals) - stretch))]
    return min(spans) / stretch


class _Structure(pickle.Pickler):
    """Pickles all but tensors and arrays: a worker that cannot pickle would only fall silent."""

    def persistent_id(self, value: Any) -> str | None:
        return "array" if isinstance(value, torch.Tensor | np.ndarray) else None


def _as_it_is(batch: Any) -> Any:
    return batch


def _summarise(
    clock: StageClock,
    batch: Any,
    batch_size: int,
    collate_s: float,
    transfer_s: float | None,
    run_delay_s: float | None,
    notes: Iterable[str],
) -> SampleProfile:
    import pandas as pd

    wall = np.array([sample.wall_ns for sample in clock.samples]) / 1e9
    wall_mean = float(wall.mean())
    cpu_mean = float(np.mean([sample.cpu_ns for sample in clock.samples])) / 1e9
    rows = [(stage, *means) for stage, means in clock.stage_means_s().items()]
    rest = max(0.0, wall_mean - sum(row[1] for row in rows))
    rest_cpu = max(0.0, cpu_mean - sum(row[2] for row in rows))
    rows.append((REST, rest, rest_cpu))
    rows.append((COLLATE, collate_s / batch_size, collate_s / batch_size))
    stages = pd.DataFrame(rows, columns=["stage", "wall_s", "cpu_s"])
    stages["wait_s"] = (stages["wall_s"] - stages["cpu_s"]).clip(lower=0.0)
    stages["share"] = stages["wall_s"] / stages["wall_s"].sum()
    median = float(np.median(wall))
    slow = [
        (sample.index, seconds, seconds / median)
        for sample, seconds in zip(clock.samples, wall.tolist(), strict=True)
        if median > 0 and seconds > SLOW_FACTOR * median
    ]
    return SampleProfile(
        stages=stages,
        sample_wall_s=wall_mean,
        sample_cpu_s=min(cpu_mean, wall_mean),
        collate_s=collate_s,
        batch_size=batch_size,
        batch_bytes=batch_bytes(batch),
        tensors_per_batch=count_tensors(batch),
        transfer_s=transfer_s,
        slow_samples=pd.DataFrame(slow, columns=["index", "wall_s", "times_median"]),
        samples=len(wall),
        wall_s=wall,
        run_delay_s=run_delay_s,
        notes=tuple(notes),
    )
