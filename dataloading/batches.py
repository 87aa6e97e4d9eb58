"""What is in a batch, whatever its shape: tensors, tuples, dicts, dataclasses, objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

MAX_DEPTH = 8  # a batch nested deeper than this is not a batch


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors of a batch, in the order in which they stand there.

    Example:
        >>> [t.numel() for t in tensors_in({"x": torch.zeros(2, 3), "y": [torch.zeros(2)]})]
        [6, 2]
    """
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < MAX_DEPTH:
        for part in parts_of(batch):
            yield from tensors_in(part, depth + 1)


def parts_of(batch: Any) -> list[Any]:
    """The direct parts of a container; nothing for numbers, strings and the like."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if hasattr(batch, "__dict__") and not callable(batch):
        return list(vars(batch).values())
    return []


def batch_bytes(batch: Any) -> int:
    """Bytes that the tensors of a batch hold."""
    return sum(t.numel() * t.element_size() for t in tensors_in(batch))


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
        The leading dimension of the first tensor, else the length of the first list; at least 1.

    Example:
        >>> count_samples({"pixels": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4)})
        4
    """
    leading = [t.shape[0] for t in tensors_in(batch) if t.dim() > 0]
    if not batched:
        return leading[0] if len(leading) > 1 and len(set(leading)) == 1 else 1
    if leading:
        return max(1, leading[0])
    lists = [part for part in [batch, *parts_of(batch)] if isinstance(part, list)]
    return max(1, len(lists[0])) if lists else 1


def move_to(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Copy the tensors of a batch to a device; tuples, lists and mappings keep their type.

    An object with a `to` method (a batch class of one's own, a `BatchEncoding`) moves itself;
    anything else stays as it is.
    """
    if hasattr(batch, "to") and callable(batch.to):
        if isinstance(batch, torch.Tensor):
            return batch.to(device, non_blocking=non_blocking)
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {k: move_to(v, device, non_blocking=non_blocking) for k, v in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(v, device, non_blocking=non_blocking) for v in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move_to(v, device, non_blocking=non_blocking) for v in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {
            f.name: move_to(getattr(batch, f.name), device, non_blocking=non_blocking)
            for f in dataclasses.fields(batch)
            if f.init
        }
        return dataclasses.replace(batch, **changes)
    return batch


def clone_batch(batch: Any) -> Any:
    """A copy of a batch whose tensors own their memory."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {k: clone_batch(v) for k, v in batch.items()}
    if isinstance(batch, tuple | list):
        return [clone_batch(v) for v in batch]
    return batch
