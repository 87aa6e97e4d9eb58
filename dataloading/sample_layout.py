"""How a sample is laid out in a row of bytes of fixed length, and how it is read back from it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataloading.sample_leaves import TEXTS, Leaf, Misfit, leaf_for, named, text_bytes_of

MAPPINGS = (dict, OrderedDict)
SHORTEST_TEXT_BYTES = 64
TEXT_ROOM = 2  # times the longest text among the first samples


@dataclass(frozen=True)
class Group:
    """A tuple, list, dict, named tuple or dataclass, with what stands in it."""

    kind: Any
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]

    def made(self, values: Any) -> Any:
        """Put the values of the parts together again."""
        if self.kind in (tuple, list):
            return self.kind(values)
        if self.kind in MAPPINGS:
            return self.kind(zip(self.keys, values, strict=True))
        if issubclass(self.kind, tuple):
            return self.kind(*values)
        whole = object.__new__(self.kind)  # as it was, whatever __init__ would do
        for key, value in zip(self.keys, values, strict=True):
            object.__setattr__(whole, key, value)
        return whole


@dataclass(frozen=True)
class SampleLayout:
    """Where each value of a sample lies in a row of `row_bytes` bytes.

    Args:
        root: A `Leaf`, or a `Group` of leaves and groups.
        row_bytes: Length of a row.

    Example:
        >>> layout = sample_layout([(np.zeros(3, "uint8"), 7)])
        >>> layout.row_bytes
        11
        >>> rows = layout.pack((np.array([1, 2, 3], "uint8"), 8))[None]
        >>> layout.unpack(rows, 0)
        (array([1, 2, 3], dtype=uint8), 8)
    """

    root: Any
    row_bytes: int

    def pack(self, sample: Any) -> np.ndarray:
        """The row of a sample: uint8, shape (row_bytes,).

        Raises:
            Misfit: It has another structure, shape or type than the layout.
        """
        row = np.zeros(self.row_bytes, np.uint8)
        _pack(self.root, sample, "sample", row)
        return row

    def unpack(self, rows: np.ndarray, row: int) -> Any:
        """A new sample from one row of an array of shape (rows, row_bytes)."""
        return _unpack(self.root, rows, row)

    def unpack_many(self, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:
        """New samples from the wanted rows, of which there is at least one."""
        return _unpack_many(self.root, rows, wanted)


def sample_layout(samples: list[Any]) -> SampleLayout:
    """Make the layout of samples that look like the first; texts get room for the longest.

    Raises:
        Misfit: A part of the first sample can't be kept; the text says which.
    """
    root, stop = _placed(samples[0], "sample", 0, 0)
    longest = _longest_text(samples)
    if longest:
        root, stop = _placed(samples[0], "sample", 0, max(longest * TEXT_ROOM, SHORTEST_TEXT_BYTES))
    return SampleLayout(root, stop)


def _placed(value: Any, path: str, start: int, text_bytes: int) -> tuple[Any, int]:
    """The leaf or group for a value whose bytes begin at `start`, and where they stop."""
    entries = _entries(value)
    if entries is None:
        leaf = leaf_for(value, path, start, text_bytes)
        return leaf, leaf.stop
    parts = []
    for key, part in entries:
        node, start = _placed(part, f"{path}[{key!r}]", start, text_bytes)
        parts.append(node)
    return Group(type(value), tuple(key for key, _ in entries), tuple(parts)), start


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and parts of a tuple, list, dict, named tuple or dataclass; None for a leaf."""
    kind = type(value)
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return list(enumerate(value))
    if kind in MAPPINGS:
        return list(value.items())
    if dataclasses.is_dataclass(kind):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _longest_text(samples: list[Any]) -> int:
    """Bytes of the longest text in any of the samples."""
    lengths = [0]
    for sample in samples:
        entries = _entries(sample)
        if entries is not None:
            lengths.append(_longest_text([part for _, part in entries]))
        elif type(sample) in TEXTS:
            lengths.append(max(1, len(text_bytes_of(sample))))
    return max(lengths)


def _pack(node: Any, value: Any, path: str, row: np.ndarray) -> None:
    if isinstance(node, Leaf):
        content = node.pack(value, path)
        row[node.start : node.start + len(content)] = np.frombuffer(content, np.uint8)
        return
    entries = _entries(value) if type(value) is node.kind else None
    if entries is None:
        kind = node.kind.__name__
        raise Misfit(f"{path} is {named(value)}, in the first sample a {kind}")
    if tuple(key for key, _ in entries) != node.keys:
        raise Misfit(f"{path} has {len(entries)} parts, or other ones than in the first sample")
    for part, (key, inner) in zip(node.parts, entries, strict=True):
        _pack(part, inner, f"{path}[{key!r}]", row)


def _unpack(node: Any, rows: np.ndarray, row: int) -> Any:
    if isinstance(node, Leaf):
        return node.unpack(rows, row)
    return node.made([_unpack(part, rows, row) for part in node.parts])


def _unpack_many(node: Any, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:
    if isinstance(node, Leaf):
        return node.unpack_many(rows, wanted)
    columns = [_unpack_many(part, rows, wanted) for part in node.parts]
    if not columns:
        return [node.made([]) for _ in wanted]
    return [node.made(values) for values in zip(*columns, strict=True)]
