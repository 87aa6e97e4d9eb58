"""What every result has in common: one line in a terminal, a table in a notebook, a dict for a file."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

MISSING = "not available"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Result:
    """Base of the frozen result dataclasses.

    A subclass gives `summary()` (one line), names its computed properties in `derived`, and, where
    the plain table of short values does not do, its own `rows()`.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def summary(self) -> str:
        """One line that says what was found, without line breaks."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, Any]]:
        """Name and value of each line in the notebook table; arrays and tables stay out of it."""
        return [(name, v) for name in self._names() if is_short(v := getattr(self, name))]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain lists, dicts, numbers and strings, ready for `json.dumps`."""
        return {name: to_plain(getattr(self, name)) for name in self._names()}

    def _names(self) -> list[str]:
        return [*(field.name for field in dataclasses.fields(self)), *self.derived]

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.summary()}"

    def _repr_html_(self) -> str:
        return html_table(self.rows(), caption=repr(self))


def is_short(value: Any) -> bool:
    """Whether a value fits in one cell of a table."""
    return value is None or isinstance(value, str | int | float | bool | tuple | list)


def to_plain(value: Any) -> Any:
    """Turn NumPy, pandas, dataclasses and paths into what `json.dumps` accepts; NaN becomes None."""
    if isinstance(value, Result):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return [to_plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if hasattr(value, "to_dict") and hasattr(
        value, "columns"
    ):  # a DataFrame, without importing pandas
        numbered = type(value.index).__name__ == "RangeIndex"  # row numbers say nothing
        frame = value if numbered else value.reset_index()
        return [to_plain(row) for row in frame.to_dict(orient="records")]
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Path):
        return value.as_posix()
    return str(value)


def format_value(name: str, value: Any) -> str:
    """Show one value with the unit that its name ends in.

    >>> format_value("startup_s", 0.0123), format_value("memory_bytes", 3 * 2**30)
    ('12.3 ms', '3.0 GiB')
    >>> format_value("wait_share", 0.8), format_value("gpu", None)
    ('80 %', 'not available')
    """
    if value is None:
        return MISSING
    if isinstance(value, tuple | list):
        return ", ".join(format_value(name, v) for v in value) or "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return MISSING
    if name.endswith("samples_per_s"):
        return f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2g} samples/s"
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_share"):
        return format_share(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_share(share: float, digits: int = 0) -> str:
    """A share in percent, with a space before the sign.

    Example:
        >>> format_share(0.8), format_share(0.032, 1)
        ('80 %', '3.2 %')
    """
    return f"{share * 100:.{digits}f} %"


def format_count(count: int, noun: str) -> str:
    """A number of things, in the plural where it is not one.

    Example:
        >>> format_count(1, "pair"), format_count(1200, "step")
        ('1 pair', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_ratio(ratio: float) -> str:
    """Two decimals, or two figures where that would say too little.

    Example:
        >>> format_ratio(2.1), format_ratio(0.0624)
        ('2.10', '0.062')
    """
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def format_seconds(seconds: float) -> str:
    """Seconds with three figures and the unit that reads best.

    >>> format_seconds(0.00004), format_seconds(0.16), format_seconds(75)
    ('40 µs', '160 ms', '75 s')
    """
    rounded = float(f"{seconds:.3g}")  # first, so that 0.9999 becomes 1 s and not 1e+03 ms
    if abs(rounded) >= 1000:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if abs(rounded) * factor >= 1:
            return f"{rounded * factor:.3g} {unit}"
    return f"{rounded * 1e6:.3g} µs"


def format_bytes(count: float) -> str:
    """Bytes in binary units.

    >>> format_bytes(512), format_bytes(64 * 2**20)
    ('512 B', '64.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def html_table(rows: list[tuple[str, Any]], caption: str = "") -> str:
    """A two-column HTML table; every text in it is escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(format_value(name, value))}</td></tr>"
        for name, value in rows
    )
    title = f"<caption style='text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{cells}</table>"
