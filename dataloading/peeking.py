"""A few samples of a loader, fetched in this process on a copy of its data set."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dataloading.batches import batch_bytes, count_tensors
from dataloading.held_things import Handle, handles_among, is_on_accelerator
from dataloading.object_graph import MOST_ITEMS, is_a, walk
from dataloading.pickling import SHARED_BY_SYSTEM
from dataloading.stages import StageClock, with_clocks
from dataloading.watchdog import ProbeTimeout, one_thread, time_limit

CALL_LIMIT_S = 0.5  # for copying the data set, asking for its length, collating
SAMPLE_LIMIT_S = 1.5  # fetching a few samples for their size and shape may take so long
WALK_S = 0.25  # for looking at the copy again
SAMPLES = 8  # fetched to see whether shapes differ
SHARED_WITH_COPY = (  # large, or not to be copied at all
    *(torch.Tensor, types.ModuleType, types.GeneratorType),
    *SHARED_BY_SYSTEM,
)


@dataclass(frozen=True)
class BatchSize:
    """What a batch would hold, from a few samples."""

    batch_bytes: int
    tensors: int


@dataclass(frozen=True)
class Peek:
    """What the length and a few samples of a data set showed; None where they showed nothing.

    Attributes:
        epoch_samples: Samples that the sampler chooses in an epoch.
        opened_by_len: Handles that only asking for the length has opened.
        batch: Size of a batch.
        uneven: Field whose shapes differ between samples, and the shapes.
        unpinnable: Name of a batch type that pinning passes by.
        on_accelerator: Paths of tensors in a sample that live on an accelerator.
    """

    epoch_samples: int | None = None
    opened_by_len: tuple[Handle, ...] = ()
    batch: BatchSize | None = None
    uneven: tuple[str, tuple[str, ...]] | None = None
    unpinnable: str | None = None
    on_accelerator: tuple[str, ...] = ()


def peek(dataloader: DataLoader, held: list[tuple[str, Any]]) -> Peek:
    """Ask a copy of the data set for its length and for a few samples.

    Args:
        dataloader: The loader.
        held: Paths and parts of its data set, from `walk`.

    Returns:
        A `Peek`; samples that fail or take too long are passed over, because running the loader
        will report them better.
    """
    with one_thread(), trial_copy(dataloader.dataset, held) as trial:
        before = {id(thing) for _, thing in _look(trial)}
        count = _guarded(lambda: len(trial))
        opened = [h for h in handles_among(_look(trial)) if id(h.thing) not in before]
        samples = [] if is_a(trial, IterableDataset) else _fetch(trial, count or 0)
        if callable(getattr(dataloader, "skipped", None)):  # it leaves those out
            samples = [sample for sample in samples if sample is not None]
        seen = _judge(dataloader, samples) if samples else Peek()
        return Peek(
            epoch_samples=_epoch_samples(dataloader, count),
            opened_by_len=tuple(opened),
            batch=seen.batch,
            uneven=seen.uneven,
            unpinnable=seen.unpinnable,
            on_accelerator=seen.on_accelerator,
        )


@contextlib.contextmanager
def trial_copy(dataset: Any, held: list[tuple[str, Any]]) -> Iterator[Any]:
    """A copy of a data set to try things on; what is opened on it is closed again.

    Tensors, arrays and long lists are shared with the original, everything else is copied. A data
    set that does not allow that is copied shallowly, or, as a last resort, used itself.
    """
    known = {id(thing) for _, thing in held}
    trial = _guarded(lambda: _deep_copy(dataset, held))
    if trial is None:
        trial = _guarded(lambda: with_clocks(dataset, StageClock()))
    if trial is None:
        trial = dataset
    try:
        yield trial
    finally:
        for handle in handles_among(_look(trial) if trial is not dataset else []):
            if id(handle.thing) not in known:
                _close(handle.thing)


def _deep_copy(dataset: Any, held: list[tuple[str, Any]]) -> Any:
    if hasattr(type(dataset), "__del__"):
        return None  # dropping the copy would put away what the original still needs
    shared = {id(h.thing): h.thing for h in handles_among(held)}
    for _, thing in held:
        large = is_a(thing, list | tuple | dict | set) and len(thing) > MOST_ITEMS
        array = hasattr(type(thing), "__array__")
        if (
            large
            or array
            or is_a(thing, SHARED_WITH_COPY)
            or hasattr(type(thing), "__del__")
            or type(thing).__module__ in ("_thread", "threading")
        ):
            shared[id(thing)] = thing
    if id(dataset) in shared:
        return None
    return copy.deepcopy(dataset, shared)


def _close(handle: Any) -> None:
    _guarded(lambda: handle.close())


def _look(trial: Any) -> list[tuple[str, Any]]:
    return list(walk(trial, "dataset", budget_s=WALK_S))


def _guarded(call: Callable[[], Any]) -> Any:
    """What a call into the data set's own code gives; None where it raises or takes too long."""
    try:
        with time_limit(CALL_LIMIT_S, "Looking at the data set"):
            return call()
    except Exception:  # the data set's own code; running the loader will report it
        return None


def _fetch(dataset: Any, count: int) -> list[Any]:
    """Samples spread over the data set, as many as come in time."""
    picked = sorted({number * (count - 1) // (SAMPLES - 1) for number in range(SAMPLES)})
    samples: list[Any] = []
    try:
        with time_limit(SAMPLE_LIMIT_S, "Looking at a few samples"):
            for index in picked if count else ():
                samples.append(dataset[index])
    except ProbeTimeout:
        return samples
    except Exception:  # the data set's own code; running the loader will report it with its index
        return samples
    return samples


def _judge(dataloader: DataLoader, samples: list[Any]) -> Peek:
    """What a few samples tell about their batches."""
    batched = dataloader.batch_sampler is not None
    uneven = None
    wrapped = getattr(dataloader.collate_fn, "collate_fn", None)  # of one that leaves samples out
    if batched and default_collate in (dataloader.collate_fn, wrapped):
        uneven = uneven_field(samples)
    per_batch = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None) or 1
    taken = samples[:per_batch]
    made = None
    if uneven is None:
        made = _guarded(lambda: dataloader.collate_fn(taken if batched else taken[0]))
    size = batch_bytes(taken if made is None else made) * per_batch / len(taken)
    tensors = count_tensors(samples[0] if made is None else made)
    unpinnable = None
    if dataloader.pin_memory and made is not None and tensors and not _can_be_pinned(made):
        unpinnable = type(made).__name__
    return Peek(
        batch=BatchSize(round(size), max(1, tensors)),
        uneven=uneven,
        unpinnable=unpinnable,
        on_accelerator=tuple(
            path for path, thing in walk(samples[0], "sample") if is_on_accelerator(thing)
        ),
    )


def uneven_field(samples: list[Any]) -> tuple[str, tuple[str, ...]] | None:
    """The field whose shapes differ between samples, and the shapes.

    Example:
        >>> uneven_field([(torch.zeros(3), 1), (torch.zeros(4), 1)])
        ('sample[0]', ('(3,)', '(4,)'))
    """
    shapes: dict[str, list[str]] = {}
    for sample in samples:
        for path, thing in walk(sample, "sample"):
            shape: Any = (
                getattr(thing, "shape", None) if hasattr(type(thing), "__array__") else None
            )
            if is_a(shape, tuple):
                shapes.setdefault(path, []).append(str(tuple(shape)))
    for path, seen in shapes.items():
        if len(set(seen)) > 1:
            return path, tuple(dict.fromkeys(seen))
    return None


def _can_be_pinned(batch: Any) -> bool:
    """Whether torch looks into a batch for tensors to pin, or the batch does so itself."""
    known = (torch.Tensor, str, bytes, dict, list, tuple)
    return is_a(batch, known) or any(hasattr(batch, name) for name in ("pin_memory", "keys"))


def _epoch_samples(dataloader: DataLoader, count: int | None) -> int | None:
    """Samples of an epoch; the length of the data set is not asked for again."""
    if isinstance(dataloader.dataset, IterableDataset):
        return None
    sampler: Any = dataloader.sampler
    usual = type(sampler) in (SequentialSampler, RandomSampler)
    if usual and getattr(sampler, "_num_samples", None) is None:
        return count
    return _guarded(lambda: len(sampler))
