"""Walking through what a data set holds, with the path to each thing, within a time budget."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

BUDGET_S = 1.5  # a walk that takes longer has seen enough
MOST_ITEMS = 64  # of a long list or dict, this many are looked into
MAX_DEPTH = 8
PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor)


def walk(root: Any, name: str, *, budget_s: float = BUDGET_S) -> Iterator[tuple[str, Any]]:
    """Yield `(path, object)` for everything below `root`, nearest first, each object once.

    Args:
        root: Where to begin.
        name: The path of the root itself, such as "dataset".
        budget_s: Stop after so many seconds.

    Example:
        >>> [path for path, _ in walk({"a": [1, 2]}, "x")]
        ['x', "x['a']", "x['a'][0]", "x['a'][1]"]
    """
    deadline = time.perf_counter() + budget_s
    seen: set[int] = set()
    level = [(name, root)]
    for _ in range(MAX_DEPTH):
        following = []
        for path, thing in level:
            if time.perf_counter() > deadline:
                return
            yield path, thing
            for part_path, part in parts(thing, path):
                if isinstance(part, PLAIN) or id(part) not in seen:
                    seen.add(id(part))
                    following.append((part_path, part))
        if not following:
            return
        level = following


def parts(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The direct parts of an object, each with its path."""
    if isinstance(thing, (*PLAIN, type)):
        return
    if isinstance(thing, Mapping):
        for number, key in enumerate(thing):
            if number == MOST_ITEMS:
                return
            yield f"{path}[{key!r}]", thing[key]
    elif isinstance(thing, list | tuple):
        for number in range(min(len(thing), MOST_ITEMS)):
            yield f"{path}[{number}]", thing[number]
    elif isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield from parts(list(thing.args), f"{path}.args")
        yield from parts(thing.keywords, f"{path}.keywords")
    else:
        owner = getattr(thing, "__self__", None)  # a bound method brings its object along
        if hasattr(owner, "__dict__") and not isinstance(owner, type):
            yield f"{path}.__self__", owner
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            yield f"{path}.{key}", value
        for key in getattr(type(thing), "__slots__", ()):
            if (
                isinstance(key, str)
                and hasattr(thing, key)
                and key not in ("__dict__", "__weakref__")
            ):
                yield f"{path}.{key}", getattr(thing, key)
