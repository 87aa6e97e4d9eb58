"""Whether what was read came from storage or from the page cache: Linux only, unknown elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataloading.results import format_share

LEAST_BYTES = 256 * 1024  # less says nothing: a single page of a library could be most of it
FROM_STORAGE = 0.05  # more of the bytes come from storage: not all files were in the page cache
FROM_CACHE = 0.01  # fewer do: they all were
UNLIKE = FROM_STORAGE / FROM_CACHE  # times the other side's share: another state of the cache


@dataclass(frozen=True)
class Reads:
    """What processes have read.

    Attributes:
        read_bytes: Asked for by reading, from the page cache too.
        storage_bytes: Came from storage, also where mapped files were touched.
    """

    read_bytes: int
    storage_bytes: int

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.read_bytes + other.read_bytes, self.storage_bytes + other.storage_bytes)

    def since(self, earlier: Reads) -> Reads:
        """What was read in between."""
        return Reads(
            max(0, self.read_bytes - earlier.read_bytes),
            max(0, self.storage_bytes - earlier.storage_bytes),
        )

    @property
    def storage_share(self) -> float | None:
        """Share of the bytes that came from storage; None where hardly anything was read."""
        whole = max(self.read_bytes, self.storage_bytes)  # mapped files are read without a call
        return self.storage_bytes / whole if whole >= LEAST_BYTES else None


def reads_so_far(workers: Iterable[int] = ()) -> Reads | None:
    """What this process and some of its children have read so far; None where the system keeps mum.

    A child that has ended counts too: the system adds its bytes to those of its parent.

    Args:
        workers: Process numbers of the children.
    """
    own = _reads_of("self")
    if own is None:
        return None
    return sum((each for pid in workers if (each := _reads_of(pid))), own)


def reads_since(earlier: Reads | None, later: Reads | None) -> Reads | None:
    """What was read in between; None where it is not known."""
    return None if earlier is None or later is None else later.since(earlier)


def total(reads: Iterable[Reads | None]) -> Reads:
    """All of them together; what is unknown counts nothing."""
    return sum((each for each in reads if each is not None), Reads(0, 0))


def cache_states(reads: Sequence[Reads | None]) -> list[str]:
    """Where the data of each block or epoch came from.

    Returns:
        `from storage`, `partly from storage`, `from cache` or `unknown` for each.

    Example:
        >>> cache_states([Reads(10**10, 10**10), Reads(10**10, 0), None])
        ['from storage', 'from cache', 'unknown']
    """
    return [_state(each.storage_share if each is not None else None) for each in reads]


def unlike_caches(before: Reads, after: Reads) -> str | None:
    """Why two runs cannot be compared: the files of one were in the page cache, the other's were not.

    Args:
        before, after: What all compared blocks of each side have read.

    Returns:
        The reason and what to do; None where both found the page cache in a like state, or nothing
        is known.
    """
    first, second = before.storage_share, after.storage_share
    if first is None or second is None:
        return None
    most = max(first, second)
    if most <= FROM_STORAGE or most < UNLIKE * min(first, second):
        return None
    return (
        f"before read {format_share(first)} of its bytes from storage, after "
        f"{format_share(second)}: the one that reads files first pays for both, since the page "
        "cache keeps them for the other. Run both warm (allow more seconds, or go through all files "
        "once before) or both cold (each on files that were not read before)"
    )


def cache_notes(
    name: str, warm_up: Sequence[Reads | None], compared: Sequence[Reads | None]
) -> list[str]:
    """What the reader should know about the page cache on one side of a comparison.

    Args:
        name: `before` or `after`.
        warm_up: Reads of the blocks that were run first and not compared.
        compared: Reads of the compared blocks, in their order.
    """
    first, rest = total(warm_up[:1]).storage_share, total(compared).storage_share
    states = cache_states(compared)
    cached, stored = states.count("from cache"), len(states) - states.count("from cache")
    stored -= states.count("unknown")
    if cached and stored:
        return [
            f"{stored} of the {cached + stored} blocks of {name} read from storage, the others from "
            "the page cache; go through all files once before to compare like with like"
        ]
    if rest is not None and rest > FROM_STORAGE:
        return [f"{name} read {format_share(rest)} of its bytes from storage"]
    if first is not None and rest is not None and first > FROM_STORAGE:
        return [
            f"{name} found {format_share(1 - first)} of its bytes in the page cache at first, and "
            f"{format_share(1 - rest)} in the compared blocks: this is the rate of later epochs, a "
            "first one reads from storage"
        ]
    return []


def _state(share: float | None) -> str:
    if share is None:
        return "unknown"
    if share < FROM_CACHE:
        return "from cache"
    return "from storage" if share > 1 - FROM_CACHE else "partly from storage"


def _reads_of(pid: int | str) -> Reads | None:
    try:
        with open(f"/proc/{pid}/io") as file:
            io = {key: int(value) for key, _, value in (line.partition(": ") for line in file)}
        return Reads(io["rchar"], io["read_bytes"])
    except (OSError, ValueError, KeyError):  # not Linux, ended, or forbidden
        return None
