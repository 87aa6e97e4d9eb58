"""Clocks on the stages of a sample: reading, decoding, and each transform by its name.

They sit on a shallow copy of the data set, whose transforms and file reader are wrapped. The data
set itself is not changed.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset

from dataloading.watchdog import ProbeTimeout

if TYPE_CHECKING:
    import pandas as pd

READ_CHUNK_BYTES = 2**20
TRANSFORM_ATTRIBUTES = ("transform", "transforms", "target_transform")
READ, DECODE, REST, COLLATE = "read", "decode", "rest of __getitem__", "collate"


@dataclass
class SampleTimes:
    """Nanoseconds of one sample, and of each stage of it: wall and CPU."""

    index: Any
    wall_ns: int = 0
    cpu_ns: int = 0
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)


class StageClock:
    """The times of each sample that was fetched whole, while it is running."""

    def __init__(self) -> None:
        self.running = True
        self.samples: list[SampleTimes] = []
        self.current = SampleTimes(None)

    def timed(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and count its time for a stage."""
        if not self.running:
            return function(*args, **kwargs)
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

    def share_out(self, indices: list[Any]) -> None:
        """Count the latest sample, which was a batch in truth, as so many samples of equal cost."""
        whole, count = self.samples.pop(), len(indices)
        stages = {name: (wall // count, cpu // count) for name, (wall, cpu) in whole.stages.items()}
        for index in indices:
            self.samples.append(
                SampleTimes(index, whole.wall_ns // count, whole.cpu_ns // count, stages)
            )

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
        if self.clock.running:
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
    attributes = getattr(dataset, "__dict__", {})
    if isinstance(attributes.get("dataset"), Dataset):  # a subset, a cache, a wrapper of your own
        timed.__dict__["dataset"] = with_clocks(attributes["dataset"], clock)
    if isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        if isinstance(parts, dict):
            timed.datasets = {name: with_clocks(part, clock) for name, part in parts.items()}
        else:
            timed.datasets = type(parts)(with_clocks(part, clock) for part in parts)
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


def stage_table(
    means: dict[str, tuple[float, float]],
    sample: tuple[float, float],
    collate: tuple[float, float],
) -> pd.DataFrame:
    """The stages of a sample as a table, with what they leave over, and collating.

    Args:
        means: Wall and CPU seconds per sample of each stage.
        sample: The same of the whole sample.
        collate: The same of putting samples together.

    Returns:
        DataFrame with a row per stage: `stage`, `wall_s`, `cpu_s`, `wait_s` and `share`.
    """
    import pandas as pd

    rest_wall = max(0.0, sample[0] - sum(wall for wall, _ in means.values()))
    rest_cpu = max(0.0, sample[1] - sum(cpu for _, cpu in means.values()))
    rows = [(stage, *seconds) for stage, seconds in means.items()]
    rows += [(REST, rest_wall, rest_cpu), (COLLATE, *collate)]
    table = pd.DataFrame(rows, columns=["stage", "wall_s", "cpu_s"])
    table["wait_s"] = (table["wall_s"] - table["cpu_s"]).clip(lower=0.0)
    table["share"] = table["wall_s"] / max(table["wall_s"].sum(), 1e-12)
    return table


def dearest(stages: pd.DataFrame) -> tuple[str, float]:
    """Name and share of the stage that takes longest."""
    row = int(stages["wall_s"].to_numpy().argmax())
    return str(stages["stage"].iloc[row]), float(stages["share"].iloc[row])
