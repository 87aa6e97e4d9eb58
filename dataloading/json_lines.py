"""A file of JSON lines: several processes may append to it, and a crash costs one line at most."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK_LIMIT_S = 10.0  # a writer that was stopped in its line must not stop everybody else
ASK_EVERY_S = 0.005
LOCKED_BYTE = 2**31 - 2  # Windows locks bytes; this one lies behind every line
MOST_NAMED = 5  # unreadable lines that a note names

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: int) -> None:
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    def _unlock(file: int) -> None:
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _try_lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


def checked_path(path: Any) -> Path:
    """The path of a file that exists or can be made.

    Raises:
        TypeError: It is no path.
        IsADirectoryError: It is a folder.
        FileNotFoundError: The folder that it should lie in does not exist.
        ValueError: It is a device or a pipe.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise TypeError(f"Expected path to be the name of a file, got {path!r}.")
    file = Path(path).expanduser()
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; name a file in it: {file / 'runs.jsonl'}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"The folder of {file} does not exist; make {file.parent} first.")
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no ordinary file; a history is kept in one.")
    return file


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one line in a single write, behind a line break if the last line was cut off.

    Writers wait for one another as far as the file system has locks. Where it has none, or a writer
    was stopped while it held the lock, the single write in append mode still keeps lines whole.

    Args:
        path: The file; it is made if it does not exist.
        record: What `json.dumps` accepts, without NaN.

    Raises:
        OSError: The line could not be written, or not all of it.
        ValueError: NaN or infinity, which are no JSON.
    """
    line = json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags, 0o666)
    try:
        with locked(file):
            if _ends_within_a_line(file):
                line = b"\n" + line
            written = os.write(file, line)
    finally:
        os.close(file)
    if written < len(line):
        raise OSError(errno.ENOSPC, "Only a part of the line was written; is the disk full", path)


def _ends_within_a_line(file: int) -> bool:
    if os.lseek(file, 0, os.SEEK_END) == 0:
        return False
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) != b"\n"


@contextlib.contextmanager
def locked(file: int) -> Iterator[None]:
    """Hold the lock of an open file (its descriptor) while the block runs."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    held = False
    while not held and time.monotonic() < deadline:
        try:
            _try_lock(file)
            held = True
        except (BlockingIOError, PermissionError):  # the latter is how Windows says it
            time.sleep(ASK_EVERY_S)
        except OSError:  # a file system without locks
            break
    try:
        yield
    finally:
        if held:
            _unlock(file)


def read_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Read all lines that hold a JSON object.

    Returns:
        The number (from 1) and the content of each, and notes about those that were skipped.

    Raises:
        OSError: The file cannot be read.
    """
    records: list[tuple[int, dict[str, Any]]] = []
    unreadable: list[int] = []
    notes = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parsed(line)
        if record is not None:
            records.append((number, record))
        elif number == len(lines):
            notes.append(f"line {number} is cut off, its writer was interrupted: skipped")
        else:
            unreadable.append(number)
    if unreadable:
        notes.insert(0, f"{named_lines(unreadable)} cannot be read as JSON: skipped")
    return records, notes


def named_lines(numbers: list[int]) -> str:
    """Which lines, in words.

    Example:
        >>> named_lines([3]), named_lines([3, 8])
        ('line 3', '2 lines (3, 8)')
    """
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    more = ", ..." if len(numbers) > MOST_NAMED else ""
    return f"{len(numbers)} lines ({', '.join(map(str, numbers[:MOST_NAMED]))}{more})"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8-sig"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
