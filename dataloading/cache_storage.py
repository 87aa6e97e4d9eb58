"""Rows of bytes that several processes share, and their place in shared memory.

A row is written in three steps: its bytes, their checksum, the byte that says it is there. Two
processes that write a row write the same bytes. The checksum is compared before a row is read for
the first time, so that what a crash left half written counts as missing.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataloading.cache_counts import COLUMNS, EXAMPLE, ROWS, TABLE_BYTES, SharedCounts
from dataloading.results import format_bytes

HEADER_BYTES = 4096
STATE_BYTES, CHECKSUM_BYTES = 1, 4  # of each row


@dataclass(frozen=True)
class RowPlan:
    """Where everything lies in the memory or file of a cache, in bytes from its beginning.

    Example:
        >>> plan = RowPlan(rows=1000, row_bytes=150_528)
        >>> plan.total_bytes / (1000 * 150_528) < 1.01
        True
    """

    rows: int
    row_bytes: int

    @property
    def state_at(self) -> int:
        """A byte a row: 1 when the row is there."""
        return HEADER_BYTES + TABLE_BYTES

    @property
    def checksums_at(self) -> int:
        """A CRC32 a row, at a multiple of its size."""
        return _rounded_up(self.state_at + self.rows * STATE_BYTES, CHECKSUM_BYTES)

    @property
    def data_at(self) -> int:
        """The rows themselves."""
        return _rounded_up(self.checksums_at + self.rows * CHECKSUM_BYTES, HEADER_BYTES)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.data_at + self.rows * self.row_bytes

    def bytes_with(self, rows: int) -> int:
        """What is in use once so many rows are filled."""
        return self.data_at + rows * self.row_bytes


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def least_bytes(row_bytes: int) -> int:
    """What `rows_within` needs for one row."""
    return (
        RowPlan(0, row_bytes).total_bytes + HEADER_BYTES + row_bytes + STATE_BYTES + CHECKSUM_BYTES
    )


def rows_within(limit_bytes: int, row_bytes: int) -> int:
    """How many rows fit into so many bytes, with all that belongs to them."""
    free = limit_bytes - RowPlan(0, row_bytes).total_bytes - HEADER_BYTES  # rounding takes a page
    return max(0, free // (row_bytes + STATE_BYTES + CHECKSUM_BYTES))


class RowStorage:
    """Rows in memory that this process and others see.

    Args:
        plan: Where things lie.
        memory: uint8, shape (plan.total_bytes,).
        verified: uint8, shape (rows,): rows that were compared with their checksum, by this process
            or one that shares this array.
    """

    is_writable = True

    def __init__(self, plan: RowPlan, memory: np.ndarray, verified: torch.Tensor) -> None:
        self.plan = plan
        table = memory[HEADER_BYTES : plan.state_at].view(np.int64).reshape(ROWS + 1, COLUMNS)
        self.counts = SharedCounts(table)
        self.data = memory[plan.data_at :].reshape(plan.rows, plan.row_bytes)
        self._state = memory[plan.state_at : plan.state_at + plan.rows]
        checksums = memory[plan.checksums_at : plan.checksums_at + plan.rows * CHECKSUM_BYTES]
        self._checksums = checksums.view(np.uint32)
        self._shared_verified = verified
        self._verified = verified.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowStorage:
        return self  # a copy of a data set reads from the same rows

    def has(self, row: int) -> bool:
        """Whether a row is there and whole."""
        if row >= self.plan.rows or not self._state[row]:
            return False
        return bool(self._verified[row]) or self._verify(row)

    def has_many(self, rows: np.ndarray) -> np.ndarray:
        """The same for many rows at once: bool, shape (rows,)."""
        found = rows < self.plan.rows
        inside = rows[found]
        found[found] = self._state[inside] == 1
        unsure = np.flatnonzero(found)[self._verified[rows[found]] == 0]
        for place in unsure.tolist():
            found[place] = self._verify(int(rows[place]))
        return found

    def _verify(self, row: int) -> bool:
        whole = zlib.crc32(self.data[row].data) == int(self._checksums[row])
        if whole:
            self._verified[row] = 1
        return whole

    def write(self, row: int, content: np.ndarray) -> bool:
        """Keep a row; False where it could not be written."""
        self.data[row] = content
        self._checksums[row] = zlib.crc32(content.data)
        self._state[row] = 1
        return True

    def clear(self) -> None:
        """Forget all rows."""
        self._state[:] = 0
        self._verified[:] = 0
        self.counts.table[0] = 0

    @property
    def filled(self) -> int:
        """How many rows are there."""
        return int(np.count_nonzero(self._state))

    def note_example(self, number: int) -> None:
        """Remember a sample that did not fit, for the reader."""
        self.counts.table[0, EXAMPLE] = number + 1

    @property
    def example(self) -> int | None:
        """A sample that did not fit, or None."""
        return int(self.counts.table[0, EXAMPLE]) - 1 if self.counts.table[0, EXAMPLE] else None


class MemoryRows(RowStorage):
    """Rows in shared memory, which worker processes are given under every start method.

    It is taken at once, so that it cannot run out later, and is free again when the last process
    that has it ends, however it ends.

    Raises:
        MemoryError: There is not so much shared memory.
    """

    def __init__(self, plan: RowPlan) -> None:
        self._set_up(plan, shared_bytes(plan.total_bytes), shared_bytes(plan.rows))
        self.counts.claim_row()

    def _set_up(self, plan: RowPlan, memory: torch.Tensor, verified: torch.Tensor) -> None:
        self._memory = memory
        super().__init__(plan, memory.numpy(), verified)

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "memory": self._memory, "verified": self._shared_verified}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(**state)


def shared_bytes(count: int) -> torch.Tensor:
    """Zeroed bytes in shared memory: uint8, shape (count,).

    Uses `UntypedStorage._new_shared`, private to torch (2.6 to 2.14), as its collating does; without
    it the bytes are first made in private memory.

    Raises:
        MemoryError: There is not so much shared memory.
    """
    new_shared = getattr(torch.UntypedStorage, "_new_shared", None)
    try:
        if new_shared is None or not count:
            return torch.zeros(count, dtype=torch.uint8).share_memory_()
        return torch.empty(0, dtype=torch.uint8).set_(new_shared(count))
    except RuntimeError as error:
        raise MemoryError(
            f"There are no {format_bytes(count)} of shared memory for the cache ({error}). Give a "
            "lower max_bytes=, or path= a folder on a disk."
        ) from error
