"""What is in a batch, whatever its shape: tensors, tuples, dicts, dataclasses, objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from dataloading.pinning import PINNING_KINDS

MAX_DEPTH = 8  # a batch nested deeper than this is not a batch
PLAIN = (str, bytes, int, float)  # a list that begins with one of these holds no tensors
ARRAYS = (torch.Tensor, np.ndarray)
LISTS = (list, tuple)


def leaves_in(batch: Any, depth: int = 0) -> Iterator[Any]:
    """Tensors, arrays, lists of numbers or strings and single objects, in the order of the batch."""
    plain = isinstance(batch, LISTS) and len(batch) > 0 and isinstance(batch[0], PLAIN)
    parts = parts_of(batch) if depth < MAX_DEPTH and not plain else []
    if not parts:
        yield batch
    for part in parts:
        if isinstance(part, ARRAYS):
            yield part
        else:
            yield from leaves_in(part, depth + 1)


def arrays_in(batch: Any) -> Iterator[torch.Tensor | np.ndarray]:
    """All tensors and NumPy arrays of a batch, in the order in which they stand there."""
    return (leaf for leaf in leaves_in(batch) if isinstance(leaf, ARRAYS))


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch, in the order in which they stand there.

    Example:
        >>> [t.numel() for t in tensors_in({"x": torch.zeros(2, 3), "y": [torch.zeros(2)]})]
        [6, 2]
    """
    return (leaf for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor))


def parts_of(batch: Any) -> list[Any]:
    """The direct parts of a container; nothing for arrays, numbers, strings and the like."""
    if isinstance(batch, LISTS):
        return list(batch)
    if isinstance(batch, ARRAYS):
        return []
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if hasattr(batch, "__dict__") and not callable(batch):
        return list(vars(batch).values())
    return []


def batch_bytes(batch: Any) -> int:
    """Bytes that the tensors and arrays of a batch hold."""
    return sum(array.nbytes for array in arrays_in(batch))


def count_tensors(batch: Any) -> int:
    """How many tensors travel with a batch."""
    return sum(1 for _ in tensors_in(batch))


def count_samples(batch: Any, *, batched: bool = True) -> int:
    """How many samples a batch holds.

    Args:
        batch: What the loader delivered.
        batched: False when the loader does not batch at all (`batch_size=None`): then a common
            leading dimension counts as samples, and anything else as one sample.

    Returns:
        The leading dimension that the tensors, arrays and lists share, else that of the first
        tensor. In a batch left unstacked (a list of samples, or `zip(*samples)` as for object
        detection) the number of samples in it. At least 1.

    Example:
        >>> count_samples({"pixels": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4)})
        4
        >>> image, target = torch.zeros(3, 8, 8), {"boxes": torch.zeros(5, 4)}
        >>> count_samples(((image, image), (target, target)))
        2
    """
    leaves = list(leaves_in(batch))
    arrays = [leaf.shape[0] for leaf in leaves if isinstance(leaf, ARRAYS) and leaf.ndim > 0]
    if not batched:
        return arrays[0] if len(arrays) > 1 and len(set(arrays)) == 1 else 1
    sizes = [_size(leaf) for leaf in leaves]
    if (first := sizes[0]) is not None and all(size == first for size in sizes):
        return max(1, first)
    if unstacked := _count_unstacked(batch):
        return unstacked
    known = arrays or [size for size in sizes if size is not None]
    return max(1, known[0]) if known else 1


class SampleCounter:
    """Counts the samples of one batch after another; quickly, where they are built alike.

    In a loop that waits for an accelerator, looking through a whole batch costs some 70 µs a step.
    """

    def __init__(self, *, batched: bool = True) -> None:
        self._batched = batched
        self._look: Callable[[Any], int] | None = None

    def __call__(self, batch: Any) -> int:
        """How many samples the batch holds, as `count_samples` says."""
        if self._look is not None:
            try:
                return self._look(batch)
            except (AttributeError, IndexError, KeyError, TypeError):
                pass  # built in another way than the one before
        count = count_samples(batch, batched=self._batched)
        self._look = _where_to_look(batch, count) if self._batched else None
        return count


def _where_to_look(batch: Any, count: int) -> Callable[[Any], int] | None:
    """A function that reads the number of samples off the first array; None where none tells it."""
    if not all(_size(leaf) == count for leaf in leaves_in(batch)):
        return None
    if isinstance(batch, ARRAYS):
        return lambda one: one.shape[0]
    key = next(iter(batch)) if isinstance(batch, Mapping) else 0
    if isinstance(batch, Mapping | list | tuple) and isinstance(batch[key], ARRAYS):
        return lambda one: one[key].shape[0]
    return None


def _size(value: Any) -> int | None:
    """Leading dimension of an array, length of a list; None for anything else."""
    if isinstance(value, ARRAYS):
        return value.shape[0] if value.ndim > 0 else None
    return len(value) if isinstance(value, LISTS) else None


def _count_unstacked(batch: Any) -> int | None:
    """Samples in a list of samples or in `zip(*samples)`; None for any other batch."""
    if not isinstance(batch, LISTS) or hasattr(batch, "_fields") or len(batch) == 0:
        return None
    nested = [part for part in batch if isinstance(part, LISTS)]
    if not nested:  # a list of dicts or of other objects with parts
        return len(batch) if all(parts_of(part) for part in batch) else None
    lengths = {_size(part) for part in batch}
    if len(nested) < len(batch):  # some fields are stacked, others are lists
        return lengths.pop() if len(lengths) == 1 else None
    by_field = len(lengths) == 1 and all(_alike(part) for part in batch)
    by_sample = len(lengths) == 1 and all(_alike(part) for part in zip(*batch, strict=True))
    if by_field and not (by_sample and isinstance(batch, list) and isinstance(batch[0], tuple)):
        return len(batch[0])
    return len(batch)


def _alike(parts: Any) -> bool:
    """Whether all are of one type and number of dimensions, as the samples of one field are."""
    return len({(type(part), getattr(part, "ndim", None)) for part in parts}) <= 1


def move_to(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Copy the tensors of a batch to a device; every container keeps its type.

    An object with a `to` method (a batch class of one's own, a `BatchEncoding`) moves itself;
    anything else stays as it is. Only copies to accelerators that run in the order of a stream are
    not waited for: elsewhere a tensor could be read before it is there (pytorch issues 139550 and
    189690 for MPS).
    """
    ordered = non_blocking and device.type in PINNING_KINDS

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=ordered)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return _rebuilt(batch, move, whole=lambda part: callable(getattr(part, "to", None)))


def clone_batch(batch: Any) -> Any:
    """A copy of a batch whose tensors own their memory; every container keeps its type."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return _rebuilt(batch, clone, whole=lambda part: isinstance(part, torch.Tensor))


def _rebuilt(batch: Any, change: Callable[[Any], Any], whole: Callable[[Any], bool]) -> Any:
    """A batch with everything in it changed; `whole` says what is not to be taken apart."""
    if whole(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        items = {key: _rebuilt(part, change, whole) for key, part in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        mapping = copy.copy(batch)  # a defaultdict, a UserDict: as torch's own collate does it
        mapping.update(items)
        return mapping
    if isinstance(batch, LISTS):
        parts = [_rebuilt(part, change, whole) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        filled = copy.copy(batch)
        for field in dataclasses.fields(batch):  # past `frozen`, and without running __init__ again
            part = _rebuilt(getattr(batch, field.name), change, whole)
            object.__setattr__(filled, field.name, part)
        return filled
    return change(batch)
