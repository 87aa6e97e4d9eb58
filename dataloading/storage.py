"""Whether a data set's files lie on a network mount, and what reading them one by one costs there."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.object_graph import is_a
from dataloading.watchdog import ProbeTimeout, time_limit

MOUNTS = Path("/proc/self/mounts")  # Linux; elsewhere nothing is said about mounts
NETWORK_TYPES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"),
    *("glusterfs", "9p", "drvfs", "fuse"),
)
LOCAL_FUSE = ("fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.portal")
FILES = 8  # that are read for their time
LIMIT_S = 1.0  # for reading them
SMALL_FILE_BYTES = 256 * 1024  # opening a smaller one over a network costs more than its content
BULK_BYTES_PER_S = 10e6  # one large file comes this fast from a slow network mount


@dataclass(frozen=True)
class Storage:
    """Files of a data set on a network mount.

    Attributes:
        mount, kind: The mount point and its type of file system.
        folder: The folder that holds those of the files that were looked at.
        files: How many files there are.
        file_bytes: Mean size of a file.
        file_s: Median seconds to open one and read its beginning; None where none came in time.
    """

    mount: str
    kind: str
    folder: str
    files: int
    file_bytes: float
    file_s: float | None = None

    @property
    def one_by_one_s(self) -> float | None:
        """Seconds to read all files, one after another; None for large ones."""
        if self.file_s is None or not self.are_small:
            return None
        return self.files * self.file_s

    @property
    def are_small(self) -> bool:
        """Whether opening a file costs more than its content."""
        return self.file_bytes < SMALL_FILE_BYTES

    @property
    def at_once_s(self) -> float:
        """Seconds to copy them as one large file."""
        return self.files * self.file_bytes / BULK_BYTES_PER_S


def find_network_storage(held: list[tuple[str, Any]]) -> Storage | None:
    """Look for files on a network mount among what a data set holds.

    Args:
        held: Paths and parts of the data set, from `walk`.

    Returns:
        A `Storage`; None where the files lie on a local disk, or no list of files was found.
    """
    files = next((thing for _, thing in held if _lists_files(thing)), None)
    if files is None:
        return None
    places = np.linspace(0, len(files) - 1, num=min(FILES, len(files))).astype(int)
    some = [os.path.abspath(path) for place in places if (path := _path_in(files[place]))]
    mount = network_mount(os.path.realpath(some[0]))
    if mount is None:
        return None
    sizes, seconds = _read(some)
    return Storage(
        mount=mount[0],
        kind=mount[1],
        folder=os.path.commonpath([os.path.dirname(path) for path in some]),
        files=len(files),
        file_bytes=float(np.mean(sizes)) if sizes else 0.0,
        file_s=float(np.median(seconds)) if seconds else None,
    )


def network_mount(path: str) -> tuple[str, str] | None:
    """Mount point and type of the network file system that a path lies on, or None.

    The root of a container may be a network file system too: that one is left out, since there is
    no other place to copy to.
    """
    try:
        lines = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    mounts = [(_unescaped(words[1]), words[2]) for words in lines if len(words) > 2]
    above = [(at, kind) for at, kind in mounts if _is_below(path, at)]
    at, kind = max(above, key=lambda one: len(one[0]), default=("/", ""))
    known = kind.split(".")[0] in NETWORK_TYPES and kind not in LOCAL_FUSE
    return (at, kind) if known and at != "/" else None


def _unescaped(mount: str) -> str:
    return mount.replace("\\040", " ")


def _is_below(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount.rstrip("/") + "/")


def _lists_files(thing: Any) -> bool:
    if not is_a(thing, list | tuple) or not len(thing):
        return False
    first, last = _path_in(thing[0]), _path_in(thing[-1])
    return first is not None and last is not None and os.path.isfile(first)


def _path_in(item: Any) -> str | None:
    """The path of a file in an entry: by itself, or first in a tuple, as in `ImageFolder`."""
    if is_a(item, tuple) and len(item):
        item = item[0]
    return os.fspath(item) if is_a(item, str | Path) else None


def _read(paths: Sequence[str]) -> tuple[list[int], list[float]]:
    """Sizes of some files, and the seconds to open each and read its beginning."""
    sizes: list[int] = []
    seconds: list[float] = []
    try:
        with time_limit(LIMIT_S, "Reading some files"):
            for path in paths:
                begun = time.perf_counter()
                with open(path, "rb") as file:
                    file.read(SMALL_FILE_BYTES)
                    sizes.append(os.fstat(file.fileno()).st_size)
                seconds.append(time.perf_counter() - begun)
    except (ProbeTimeout, OSError):
        pass  # what came in time is enough; a file that cannot be read is named elsewhere
    return sizes, seconds
