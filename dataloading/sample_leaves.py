"""Values as bytes: tensors, arrays, images, numbers and texts, each in a place of fixed length."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUMBERS = {bool: "?", int: "<i8", float: "<f8", complex: "<c16"}  # as each number is stored
TEXTS = (str, bytes, np.str_, np.bytes_)
LENGTH = np.dtype("<u4")  # in front of a text: its bytes


class Misfit(Exception):
    """A sample, or a part of it, that does not fit into its place; the text says why."""


@dataclass(frozen=True)
class Leaf:
    """One value without parts. `start` and `stop` are its place in the row, in bytes."""

    start: int
    stop: int

    def pack(self, value: Any, path: str) -> Any:
        """The bytes of a value (anything with a buffer); `Misfit` where they would not fit."""
        raise NotImplementedError

    def unpack(self, rows: np.ndarray, row: int) -> Any:
        """A copy of the value in one row of an array of shape (rows, bytes)."""
        raise NotImplementedError

    def unpack_many(self, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:
        """A copy of the value in each of the wanted rows."""
        return [self.unpack(rows, row) for row in wanted.tolist()]


@dataclass(frozen=True)
class NoneLeaf(Leaf):
    """None, which takes no bytes."""

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        if value is not None:
            raise Misfit(f"{path} is {named(value)}, in the first sample it is None")
        return b""

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        return None


@dataclass(frozen=True)
class TensorLeaf(Leaf):
    """A dense tensor in CPU memory, whose numbers keep the order in which they lie there.

    `order` has the dimensions from the outermost to the innermost. Decoders put the channels of a
    pixel side by side, (1, 2, 0) for an image (C, H, W), and cropping and resizing are quicker so.
    """

    kind: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        same_kind = isinstance(value, torch.Tensor) and type(value) is self.kind
        if not same_kind or value.dtype != self.dtype or value.shape != self.shape:
            expected = f"{self.kind.__name__} of {self.dtype} {self.shape}"
            raise Misfit(f"{path} is {named(value)}, in the first sample a {expected}")
        _check_tensor(value, path)
        flat = value.as_subclass(torch.Tensor).permute(self.order).contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else b""

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        data = torch.from_numpy(rows[row, self.start : self.stop].copy())
        return self._typed(self._numbers(data, 1)[0])

    def unpack_many(self, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:  # noqa: D102
        data = torch.from_numpy(rows[:, self.start : self.stop][wanted].reshape(-1))
        return [self._typed(tensor) for tensor in self._numbers(data, len(wanted)).unbind()]

    def _numbers(self, data: torch.Tensor, count: int) -> torch.Tensor:
        """So many tensors, one after the other."""
        if not len(data):
            return torch.empty((count, *self.shape), dtype=self.dtype)
        lying = data.view(self.dtype).view(count, *(self.shape[dim] for dim in self.order))
        return lying.permute(0, *(1 + self.order.index(dim) for dim in range(len(self.shape))))

    def _typed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.kind is torch.Tensor else tensor.as_subclass(self.kind)


@dataclass(frozen=True)
class ArrayLeaf(Leaf):
    """A NumPy array of numbers, or of texts of fixed length."""

    dtype: np.dtype
    shape: tuple[int, ...]

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        kind = type(value)
        if kind is not np.ndarray or value.dtype != self.dtype or value.shape != self.shape:
            expected = f"array of {self.dtype} {self.shape}"
            raise Misfit(f"{path} is {named(value)}, in the first sample an {expected}")
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        return rows[row, self.start : self.stop].copy().view(self.dtype).reshape(self.shape)

    def unpack_many(self, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:  # noqa: D102
        block = rows[:, self.start : self.stop][wanted].reshape(-1).view(self.dtype)
        return [part[...] for part in block.reshape(len(wanted), *self.shape)]


@dataclass(frozen=True)
class NumberLeaf(Leaf):
    """A number of Python or NumPy, given back as the same type."""

    kind: Any
    dtype: np.dtype

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        if type(value) is not self.kind:
            expected = self.kind.__name__
            raise Misfit(f"{path} is {named(value)}, in the first sample a number ({expected})")
        try:
            stored = np.array(value, self.dtype)
        except OverflowError:
            raise Misfit(f"{path} is a whole number beyond 64 bits") from None
        return stored.reshape(1).view(np.uint8)

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        return self._typed(rows[row, self.start : self.stop].view(self.dtype))[0]

    def unpack_many(self, rows: np.ndarray, wanted: np.ndarray) -> list[Any]:  # noqa: D102
        return self._typed(rows[:, self.start : self.stop][wanted].reshape(-1).view(self.dtype))

    def _typed(self, stored: np.ndarray) -> list[Any]:
        return stored.tolist() if self.kind in NUMBERS else list(stored)


@dataclass(frozen=True)
class TextLeaf(Leaf):
    """A string or bytes: the length, then as many bytes, within a room of fixed size."""

    kind: Any

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        if type(value) is not self.kind:
            expected = self.kind.__name__
            raise Misfit(f"{path} is {named(value)}, in the first sample a text ({expected})")
        content = text_bytes_of(value)
        room = self.stop - self.start - LENGTH.itemsize
        if len(content) > room:
            raise Misfit(f"{path} is a text of {len(content)} bytes, and there is room for {room}")
        return np.uint32(len(content)).astype(LENGTH).tobytes() + content

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        begin = self.start + LENGTH.itemsize
        length = int(rows[row, self.start : begin].view(LENGTH)[0])
        content = rows[row, begin : begin + length].tobytes()
        if issubclass(self.kind, bytes):
            return self.kind(content)
        return self.kind(content.decode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class ImageLeaf(Leaf):
    """A PIL image, kept as its pixels with their mode."""

    mode: str
    size: tuple[int, int]

    def pack(self, value: Any, path: str) -> Any:  # noqa: D102
        if not _is_image(value) or value.mode != self.mode or value.size != self.size:
            expected = f"PIL image ({self.mode}, {self.size[0]} x {self.size[1]})"
            raise Misfit(f"{path} is {named(value)}, in the first sample a {expected}")
        return value.tobytes()

    def unpack(self, rows: np.ndarray, row: int) -> Any:  # noqa: D102
        from PIL import Image

        return Image.frombytes(self.mode, self.size, rows[row, self.start : self.stop].data)


def leaf_for(value: Any, path: str, start: int, text_bytes: int) -> Leaf:
    """The leaf for values like this one.

    Args:
        value: A value without parts.
        path: What to call it in errors.
        start: Where its bytes begin.
        text_bytes: Room for a text.

    Raises:
        Misfit: Such a value cannot be kept.
    """
    kind = type(value)
    if value is None:
        return NoneLeaf(start, start)
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        stop = start + value.numel() * value.element_size()
        shape, order = tuple(value.shape), memory_order(value)
        return TensorLeaf(start, stop, kind, value.dtype, shape, order)
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
        return ArrayLeaf(start, start + value.nbytes, value.dtype, value.shape)
    if kind in TEXTS:
        return TextLeaf(start, start + LENGTH.itemsize + text_bytes, kind)
    if kind in NUMBERS or (isinstance(value, np.generic) and value.dtype.kind in "biufcmM"):
        dtype = np.dtype(NUMBERS[kind]) if kind in NUMBERS else value.dtype
        return NumberLeaf(start, start + dtype.itemsize, kind, dtype)
    if _is_image(value) and value.mode not in ("P", "PA"):  # a palette belongs to its image
        return ImageLeaf(start, start + len(value.tobytes()), value.mode, value.size)
    raise Misfit(
        f"{path} is {named(value)}, which cannot be kept: samples are made of tensors, NumPy "
        "arrays, PIL images (no palettes), numbers, texts, and tuples, lists, dicts and "
        "dataclasses of these"
    )


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions from the outermost to the innermost in memory; as counted if it has gaps.

    Example:
        >>> memory_order(torch.zeros(4, 5, 3).permute(2, 0, 1))
        (1, 2, 0)
    """
    dims = tuple(range(tensor.ndim))
    strides = tensor.stride()
    order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else dims


def _check_tensor(value: torch.Tensor, path: str) -> None:
    """Refuse a tensor that is more than its numbers, or whose numbers lie elsewhere."""
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.requires_grad or value.is_conj() or value.is_neg():
        raise Misfit(f"{path} is {named(value)}; only plain tensors in CPU memory can be kept")
    if getattr(value, "__dict__", None):
        raise Misfit(f"{path} is {named(value)} with attributes, which would be lost")


def text_bytes_of(text: Any) -> bytes:
    """The bytes that a text is kept as."""
    return bytes(text) if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")  # whoever has an image has loaded it
    return pil is not None and isinstance(value, pil.Image)


def named(value: Any) -> str:
    """What came, with its shape, short enough for a message."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {kind} of {value.dtype} {tuple(value.shape)}"
    if _is_image(value):
        return f"a PIL image ({value.mode}, {value.size[0]} x {value.size[1]})"
    return f"of type {kind}"
