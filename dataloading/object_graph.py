"""Walking through what a data set holds, with the path to each thing, within a time budget.

No code of the data set runs: its `__getattr__`, properties and `__getitem__` are passed by.
"""

from __future__ import annotations

import functools
import logging
import reprlib
import time
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

BUDGET_S = 0.75  # a walk that takes longer has seen enough
MOST_ITEMS = 64  # of a long list or dict, this many are looked into
MAX_DEPTH = 8
PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor)
# What belongs to the program rather than to the data set, and is not looked into.
SHUT = (*PLAIN, type, types.ModuleType, logging.Logger, logging.Handler)
BOUND = (types.MethodType, types.BuiltinMethodType)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def walk(root: Any, name: str, *, budget_s: float = BUDGET_S) -> Iterator[tuple[str, Any]]:
    """Yield `(path, object)` for everything below `root`, nearest first, each object once.

    Plain values (numbers, strings, arrays) are yielded wherever they stand.

    Args:
        root: Where to begin.
        name: The path of the root itself, such as "dataset".
        budget_s: Stop after so many seconds.

    Example:
        >>> [path for path, _ in walk({"a": [1, 2]}, "x")]
        ['x', "x['a']", "x['a'][0]", "x['a'][1]"]
    """
    deadline = time.perf_counter() + budget_s
    seen = {id(root)}
    level = [(name, root)]
    for _ in range(MAX_DEPTH):
        following = []
        for path, thing in level:
            if time.perf_counter() > deadline:
                return
            yield path, thing
            for part_path, part in parts(thing, path):
                if is_a(part, PLAIN) or id(part) not in seen:
                    seen.add(id(part))
                    following.append((part_path, part))
        if not following:
            return
        level = following


def is_a(thing: Any, kinds: Any) -> bool:
    """`isinstance` that does not ask the object for its `__class__`, which some answer badly."""
    return issubclass(type(thing), kinds)


def parts(thing: Any, path: str, *, most: int | None = MOST_ITEMS) -> Iterator[tuple[str, Any]]:
    """The direct parts of an object, each with its path.

    Args:
        thing: The object.
        path: Its path.
        most: Of a list or dict, look at so many items; None looks at all.
    """
    if is_a(thing, SHUT):
        return
    if is_a(thing, dict):
        for key, value in list(islice(dict.items(thing), most)):
            yield f"{path}[{_short.repr(key)}]", value
    elif is_a(thing, list):
        yield from _items(list.__iter__(thing), path, most)
    elif is_a(thing, tuple):
        yield from _items(tuple.__iter__(thing), path, most)
    elif is_a(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield from parts(thing.args, f"{path}.args", most=most)
        yield from parts(thing.keywords, f"{path}.keywords", most=most)
    elif is_a(thing, BOUND) and not is_a(thing.__self__, types.ModuleType):
        # a bound method brings its object along
        yield f"{path}.__self__", thing.__self__
    yield from _attributes(thing, path)


def _items(items: Iterator[Any], path: str, most: int | None) -> Iterator[tuple[str, Any]]:
    for number, part in enumerate(islice(items, most)):
        yield f"{path}[{number}]", part


def _attributes(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What hangs on an object, in its `__dict__`, its slots or (a function's) its closure."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    if is_a(own, dict):
        for key, value in list(own.items()):
            yield f"{path}.{key}", value
    for kind in type(thing).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for key, member in vars(kind).items():
            if is_a(member, types.MemberDescriptorType):
                try:
                    yield f"{path}.{key}", member.__get__(thing)
                except AttributeError:  # a slot that was never set
                    continue
    if is_a(thing, types.FunctionType):
        for number, cell in enumerate(thing.__closure__ or ()):
            try:
                yield f"{path}.__closure__[{number}].cell_contents", cell.cell_contents
            except ValueError:  # a variable that was never set
                continue
