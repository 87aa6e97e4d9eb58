"""The rows of a cache in a file, which stays and which several processes map into their memory."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataloading.cache_counts import COLUMNS, FULL, ROWS, TABLE_BYTES, SharedCounts
from dataloading.cache_storage import HEADER_BYTES, RowPlan, RowStorage, shared_bytes
from dataloading.json_lines import locked

FORMAT = 1
LOCK_NAME = ".dataset-caches.lock"  # one for the folder; it stays
CAN_GROW = 1.1  # a file with less room than this times less is made anew when there is more
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class FileRows(RowStorage):
    """Rows in a file, mapped into memory for reading; it is made if need be.

    Args:
        path: The file; its name says what is in it.
        rows_wanted: For how many rows.
        row_bytes: Length of a row.
        most_rows: A file with room for more is not taken.

    Raises:
        OSError: The file cannot be made; the text names the folder and says why.
    """

    _file = -1

    def __init__(self, path: Path, rows_wanted: int, row_bytes: int, most_rows: int) -> None:
        self.path = path
        with folder_lock(path.parent):
            plan = self._found_or_made(RowPlan(rows_wanted, row_bytes), most_rows)
            self._open(plan, shared_bytes(plan.rows))
            self.counts.claim_row()  # within the lock: from here on the file is in use
        if self.is_writable:
            self.counts.table[0, FULL] = 0  # there may be room by now

    def _found_or_made(self, wanted: RowPlan, most_rows: int) -> RowPlan:
        """The plan of the file that is there, if it does, or of a new one."""
        found = read_plan(self.path)
        if found is not None and (
            found.row_bytes != wanted.row_bytes or found.rows > max(most_rows, wanted.rows)
        ):
            found = None
        if found is not None and found.rows * CAN_GROW >= wanted.rows:
            return found
        try:
            make_file(self.path, wanted)
        except OSError:
            if found is None:
                raise
            return found
        remove_older(self.path)
        return wanted

    def _open(self, plan: RowPlan, verified: torch.Tensor) -> None:
        self._file, self.is_writable = _opened(self.path)
        access = mmap.ACCESS_WRITE if self.is_writable else mmap.ACCESS_READ
        memory = np.frombuffer(mmap.mmap(self._file, plan.total_bytes, access=access), np.uint8)
        super().__init__(plan, memory, verified)
        if not self.is_writable:
            self.counts = SharedCounts(np.zeros((ROWS + 1, COLUMNS), np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "plan": self.plan, "verified": self._shared_verified}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        try:
            if read_plan(self.path) != state["plan"]:
                raise FileNotFoundError("it was removed or replaced")
            self._open(state["plan"], state["verified"])
        except OSError as error:
            warnings.warn(f"The cache {self.path} is not used: {error}.", stacklevel=2)
            empty = RowPlan(0, state["plan"].row_bytes)
            super().__init__(empty, np.zeros(empty.total_bytes, np.uint8), shared_bytes(0))

    def __del__(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: half made
                self.counts.release_row()
            with contextlib.suppress(OSError):
                os.close(self._file)

    def write(self, row: int, content: np.ndarray) -> bool:
        """Keep a row; False where it could not be written, with one warning when the disk is full.

        Written as to a file, not to mapped memory: there a full disk would be the end of the process.
        """
        if not self.is_writable or self.counts.table[0, FULL]:
            return False
        if not hasattr(os, "pwrite"):  # Windows, where files are not sparse
            return super().write(row, content)
        try:
            self._write_at(self.plan.data_at + row * self.plan.row_bytes, content)
        except OSError as error:
            if not self.counts.table[0, FULL]:
                self.counts.table[0, FULL] = 1
                reason = "the disk is full" if error.errno in FULL_ERRORS else str(error)
                warnings.warn(
                    f"The cache {self.path} takes no more samples: {reason}. Samples that it lacks "
                    "come from the data set.",
                    stacklevel=2,
                )
            return False
        self._checksums[row] = zlib.crc32(content.data)
        self._state[row] = 1
        return True

    def _write_at(self, place: int, content: np.ndarray) -> None:
        left = content.data
        while left:
            written = os.pwrite(self._file, left, place)
            left, place = left[written:], place + written

    def clear(self) -> None:
        """Forget all rows; the file keeps its size.

        Raises:
            PermissionError: The file may only be read.
        """
        if not self.is_writable:
            raise PermissionError(f"The cache {self.path} may only be read; it was not cleared.")
        super().clear()


def _opened(path: Path) -> tuple[int, bool]:
    """The open file, and whether it may be written."""
    binary = getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, os.O_RDWR | binary), True
    except OSError as error:
        if error.errno not in READ_ONLY_ERRORS:
            raise
        return os.open(path, os.O_RDONLY | binary), False


def read_plan(path: Path) -> RowPlan | None:
    """What the header of a file says; None without a file, or where it is damaged."""
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(HEADER_BYTES))
            plan = RowPlan(told["rows"], told["row_bytes"])
            whole = os.fstat(file.fileno()).st_size == plan.total_bytes
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None
    return plan if whole and told["format"] == FORMAT and told["name"] == path.name else None


def make_file(path: Path, plan: RowPlan) -> None:
    """Make a file without rows, under another name until it is whole.

    Only what lies in front of the rows is written; the rows take no room on disk until they are
    filled (where the file system can do that).

    Raises:
        OSError: It cannot be made.
    """
    half_made = path.with_name(f"{path.name}.{os.getpid()}.half-made")
    told = {"format": FORMAT, "name": path.name, "rows": plan.rows, "row_bytes": plan.row_bytes}
    try:
        with open(half_made, "wb") as file:
            file.write(json.dumps(told).encode("ascii").ljust(HEADER_BYTES))
            file.write(bytes(plan.data_at - HEADER_BYTES))
            file.truncate(plan.total_bytes)
        os.replace(half_made, path)
    except OSError as error:
        half_made.unlink(missing_ok=True)
        raise folder_error(path.parent, error) from error


def folder_error(folder: Path, error: OSError) -> OSError:
    """The same error, saying which folder of a cache it is about and what to do."""
    return type(error)(
        error.errno,
        f"No cache can be made in the folder ({error.strerror or error}); give path= a folder that "
        "can be written and has room",
        str(folder),
    )


def remove_older(path: Path) -> None:
    """Remove files of the same name and another fingerprint that no living process uses."""
    name, _, _ = path.stem.rpartition("-")
    for older in path.parent.glob(f"{name}-*.cache*"):
        of_another_name = older.name.split(".cache")[0].rpartition("-")[0] != name
        if older == path or of_another_name or is_in_use(older):
            continue
        with contextlib.suppress(OSError):  # Windows keeps what is open
            older.unlink()


def is_in_use(path: Path) -> bool:
    """Whether a living process on this machine has the file open as a cache."""
    try:
        with open(path, "rb") as file:
            file.seek(HEADER_BYTES)
            table = np.frombuffer(file.read(TABLE_BYTES), np.int64)
        return SharedCounts(table.reshape(ROWS + 1, COLUMNS)).is_in_use
    except (OSError, ValueError):  # damaged
        return False


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and keep other processes from making files in it.

    Raises:
        OSError: The folder cannot be made, or is none; the text names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(folder, error) from error
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in READ_ONLY_ERRORS:
            raise folder_error(folder, error) from error
        yield  # a file that is there can still be read
        return
    try:
        with locked(file):
            yield
    finally:
        os.close(file)
