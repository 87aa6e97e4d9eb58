"""Machines that are short of something: contexts in which a fault is diagnosed.

Where the system does not allow one, `CannotRunHere` says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.workloads import evict, read_file

SMALL_SHARED_MEMORY = 64 * 2**20
WITH_SMALL_SHARED_MEMORY = (  # a /dev/shm of the process's own, which ends with it
    *("unshare", "--mount", "--map-root-user", "sh", "-c"),
    f'mount -t tmpfs -o size={SMALL_SHARED_MEMORY} tmpfs /dev/shm && exec "$@"',
    "sh",
)


class CannotRunHere(Exception):
    """The system lacks what a fault needs; the text says what."""


BUSY = {
    "Python": "while True: pass",
    "hashlib": "import hashlib\nwhile True: hashlib.sha256(bytes(10**6))",
}


class Neighbour:
    """Another process that keeps one CPU busy while the block runs, in Python or in C."""

    def __init__(self, kind: str = "Python") -> None:
        self.kind = kind

    def __enter__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", BUSY[self.kind]])

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Let this process, and its workers, run on a single CPU of several."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise CannotRunHere("it takes two CPUs to be denied one")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def few_open_files(limit: int) -> Iterator[None]:
    """Lower the limit of open files of this process and its workers."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def require_small_shared_memory() -> None:
    """Refuse to go on with the machine's own /dev/shm: it may be as large as the memory."""
    seen = os.statvfs("/dev/shm")
    if seen.f_frsize * seen.f_blocks > 2 * SMALL_SHARED_MEMORY:
        raise CannotRunHere("/dev/shm could not be made small for one process (unshare)")


def make_files(count: int, size: int) -> list[Path]:
    """Files of random bytes on storage, in the folder for temporary files.

    Whoever runs a case removes that folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="files-"))
    paths = [folder / f"{number:06}.bin" for number in range(count)]
    for path in paths:
        path.write_bytes(os.urandom(size))
    os.sync()  # only what is on storage can leave the page cache
    return paths


def make_cold(paths: list[Path]) -> None:
    """Push files out of the page cache.

    Raises:
        CannotRunHere: They can be read again without storage.
    """
    for path in paths:
        evict(path)
    before = _storage_bytes()
    size = read_file(paths[0], "open")
    if _storage_bytes() - before < size // 2:
        raise CannotRunHere("files do not leave the page cache (a file system in memory?)")
    evict(paths[0])


def _storage_bytes() -> int:
    try:
        with open("/proc/self/io") as file:
            return int(dict(line.strip().split(": ") for line in file)["read_bytes"])
    except (OSError, KeyError, ValueError) as error:
        raise CannotRunHere("/proc/self/io does not tell what came from storage") from error


def run_ranks(work: Callable[[int, Any], list[Any]], options: Any, ranks: int = 2) -> list[Any]:
    """Run `work(rank, options)` in as many processes of one group; returns what rank 0 found."""
    import torch.multiprocessing as mp

    folder = tempfile.mkdtemp(prefix="ranks-")
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    mp.spawn(_rank, args=(work, options, ranks, folder, answers), nprocs=ranks)
    return answers.get()


def _rank(rank: int, work: Any, options: Any, ranks: int, folder: str, answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=ranks
    )
    try:
        found = work(rank, options)
        if rank == 0:
            answers.put(found)
        dist.barrier()
    finally:
        dist.destroy_process_group()
