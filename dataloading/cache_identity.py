"""A fingerprint of a data set: what its files, settings and transforms are, the same in every run."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import random
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dataloading.fingerprints import ADDRESS

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)
# Differ from run to run, or say nothing about samples: only their class counts.
PASSING = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PASSING_MODULES = {
    *("_ctypes", "_io", "_queue", "_random", "_thread", "asyncio", "ctypes", "io", "logging"),
    *("multiprocessing", "queue", "socket", "sqlite3", "tempfile", "threading", "weakref"),
}
LIBRARIES = {"builtins", "collections", "torch", "typing", "abc", "functools", "numpy"}
HASHED_BYTES = 64 * 2**20  # of larger arrays every n-th row
MOST_DEPTH = 12
RANDOM_STATE_BYTES = torch.get_rng_state().numel()  # a kept state of a generator is as long


def data_fingerprint(dataset: Any) -> str:
    """What a data set gives, as far as can be told without fetching samples.

    Counts: class and code of the data set and of what wraps it, its plain attributes, arrays, its
    transforms with their settings (functions with their code), and of each file in its lists the
    path, size and time of change. Nothing counts that differs from run to run: memory addresses,
    generators, locks, open files.

    Returns:
        A hexadecimal text.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> one, two = TensorDataset(torch.zeros(3)), TensorDataset(torch.ones(3))
        >>> data_fingerprint(one) == data_fingerprint(TensorDataset(torch.zeros(3)))
        True
        >>> data_fingerprint(one) == data_fingerprint(two)
        False
    """
    description = _Description()
    description.add(dataset)
    return description.digest.hexdigest()


class _Description:
    """Goes through an object and feeds what it finds to a hash, each object once."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=12)
        self._seen: dict[int, Any] = {}  # kept alive, so that no number comes twice

    def _say(self, *texts: Any) -> None:
        for text in texts:
            self.digest.update(str(text).encode("utf-8", "surrogatepass") + b"\0")

    def add(self, value: Any, depth: int = 0) -> None:
        """Add an object with all that belongs to it."""
        if isinstance(value, PLAIN):
            self._say(type(value).__name__, repr(value))
            if isinstance(value, str) and depth <= 2:  # such as an archive that samples come from
                self._add_file(value)
            return
        if id(value) in self._seen or depth > MOST_DEPTH:
            self._say("again")
            return
        self._seen[id(value)] = value
        kind = type(value)
        self._say(_full_name(kind))
        if kind.__module__.split(".")[0] in PASSING_MODULES or isinstance(value, PASSING):
            return
        for kinds, describe in self._ways():
            if isinstance(value, kinds):
                describe(value, depth + 1)
                return
        if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a DataFrame
            self._mapping(value.to_dict("list"), depth + 1)
        elif hasattr(value, "__dict__") and (callable(value) or hasattr(kind, "__getitem__")):
            self._object(value, depth + 1)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                self.add(getattr(value, field.name), depth + 1)
        else:
            self._say(ADDRESS.sub("", repr(value)))

    def _ways(self) -> tuple[tuple[Any, Callable[[Any, int], None]], ...]:
        return (
            (enum.Enum, lambda value, _: self._say(value.name)),
            (os.PathLike, self._path),
            ((torch.Tensor, np.ndarray), self._array),
            ((list, tuple), self._sequence),
            ((set, frozenset), lambda value, _: self._say(*sorted(map(repr, value)))),
            (Mapping, self._mapping),
            (type, lambda value, _: self._say(_full_name(value))),
            (types.ModuleType, lambda value, _: self._say(value.__name__)),
            (types.CodeType, self._code),
            (types.FunctionType, self._function),
            (types.MethodType, self._method),
            (types.BuiltinFunctionType, lambda value, _: self._say(value.__qualname__)),
            (functools.partial, self._partial),
        )

    def _path(self, value: Any, depth: int) -> None:
        self._say(os.fspath(value))
        self._add_file(os.fspath(value))

    def _add_file(self, name: Any) -> bool:
        """Size and time of change of a file; False where it is none."""
        try:
            status = os.stat(name)
        except (OSError, ValueError):
            return False
        if not os.path.isfile(name):
            return False
        self._say(status.st_size, status.st_mtime_ns)
        return True

    def _array(self, value: Any, depth: int) -> None:
        self._say(value.dtype, tuple(value.shape))
        if isinstance(value, torch.Tensor):
            if value.dtype is torch.uint8 and value.numel() == RANDOM_STATE_BYTES:
                return
            if value.layout is not torch.strided or value.device.type == "meta":
                return
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if value.dtype.hasobject:
            self._sequence(value.reshape(-1).tolist(), depth)
        elif value.nbytes:
            rows = value.reshape(1) if value.ndim == 0 else value
            part = rows[:: -(-value.nbytes // HASHED_BYTES)]
            self.digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)

    def _sequence(self, value: Any, depth: int) -> None:
        self._say(len(value))
        has_files = len(value) > 0 and self._is_file(value[0])
        for item in value:
            if isinstance(item, PLAIN):
                self.digest.update(repr(item).encode("utf-8", "surrogatepass"))
                if has_files:
                    self._add_file(item)
            elif isinstance(item, tuple) and all(isinstance(part, PLAIN) for part in item):
                self.digest.update(repr(item).encode("utf-8", "surrogatepass"))
                if has_files:
                    self._add_file(item[0])
            else:
                self.add(item, depth)

    @staticmethod
    def _is_file(item: Any) -> bool:
        first = item[0] if isinstance(item, tuple) and item else item
        return isinstance(first, str) and os.path.isfile(first)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> None:
        self._say(len(value))
        for key, part in value.items():
            self.add(key, depth)
            self.add(part, depth)

    def _code(self, value: types.CodeType, depth: int) -> None:
        self._say(value.co_code.hex(), value.co_names, value.co_varnames)
        for constant in value.co_consts:
            self.add(constant, depth)

    def _function(self, value: types.FunctionType, depth: int) -> None:
        self._say(value.__module__, value.__qualname__)
        self._code(value.__code__, depth)
        self.add(value.__defaults__, depth)
        self.add(value.__kwdefaults__, depth)
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents, depth)
            except ValueError:  # a variable that was never set
                continue

    def _method(self, value: types.MethodType, depth: int) -> None:
        self.add(value.__func__, depth)
        self.add(value.__self__, depth)

    def _partial(self, value: functools.partial, depth: int) -> None:
        for part in (value.func, value.args, value.keywords):
            self.add(part, depth)

    def _object(self, value: Any, depth: int) -> None:
        """An object that computes samples: its settings, and the code of its class."""
        for kind in type(value).__mro__:
            if kind.__module__.split(".")[0] in LIBRARIES:
                continue
            for name, member in sorted(vars(kind).items()):
                if isinstance(member, types.FunctionType):
                    self._say(name)
                    self._code(member.__code__, depth)
        for name, part in sorted(vars(value).items()):
            self._say(name)
            self.add(part, depth)


def data_name(dataset: Any) -> str:
    """A short name of a data set for a file, which stays the same while its content changes.

    It tells data sets apart by their class and by the texts and truth values among their attributes
    (the folder, `split="train"`, `train=False`), also within a `Subset` or `ConcatDataset`.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data_name(TensorDataset(torch.zeros(3)))[:14]
        'TensorDataset.'
    """
    digest = hashlib.blake2b(digest_size=4)
    innermost = dataset
    level = [dataset]
    while level:
        one = level.pop()
        innermost = one
        digest.update(_full_name(type(one)).encode())
        own = getattr(one, "__dict__", {})
        for name, value in sorted(own.items()):
            if isinstance(value, Dataset):
                level.append(value)
            elif isinstance(value, list) and value and isinstance(value[0], Dataset):
                level.extend(value)
            elif isinstance(value, bool):
                digest.update(f"{name}={value}".encode())
            elif isinstance(value, str | os.PathLike):
                text = os.path.abspath(value) if os.path.exists(value) else os.fspath(value)
                digest.update(f"{name}={text!r}".encode())
    root = getattr(innermost, "root", None)
    label = Path(root).name if isinstance(root, str | os.PathLike) else ""
    label = re.sub(r"[^\w]+", "_", label or type(innermost).__name__)[:40]
    return f"{label}.{digest.hexdigest()}"


def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
