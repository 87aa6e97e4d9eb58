"""Telling samples apart by what is in them."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of objects: another one at each fetch


def fingerprint(sample: Any) -> str:
    """A short text that is equal for samples of equal content.

    Example:
        >>> fingerprint((torch.ones(2), 1)) == fingerprint((torch.ones(2), 1))
        True
        >>> fingerprint({"x": 1}) == fingerprint({"x": 2})
        False
    """
    digest = hashlib.blake2b(digest_size=12)
    _feed(digest, sample)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        array = dense.cpu().reshape(-1)  # one dimension at least, so that it has bytes
        digest.update(f"{array.dtype}{tuple(value.shape)}".encode())
        digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, np.ndarray):  # of objects
        _feed(digest, value.tolist())
    elif isinstance(value, set | frozenset):  # whose order is another one in each process
        _feed(digest, sorted(map(repr, value)))
    elif isinstance(value, tuple | list):
        for part in value:
            _feed(digest, part)
    elif hasattr(value, "tobytes") and callable(value.tobytes):  # a PIL image
        digest.update(value.tobytes())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(digest, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif isinstance(value, str | bytes | int | float | bool | complex | type(None)):
        digest.update(repr(value).encode())
    else:
        digest.update(_dumped(value))


def _dumped(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return ADDRESS.sub("", repr(value)).encode()
