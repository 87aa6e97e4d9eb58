"""How long each rank of a distributed job waits for its data.

Ranks leave their figures in the key-value store with which their process group was made. That is no
collective call: a rank that never asks holds up nobody, and training stays in step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

ANSWER_LIMIT_S = 10.0  # ranks that measure for the same time end within a few seconds
ASK_EVERY_S = 0.1


def tell_wait(kind: str, wait_s: float) -> int:
    """Leave this rank's mean wait of a step for the others.

    Args:
        kind: Where the figure comes from; only figures of one kind are compared.
        wait_s: Seconds.

    Returns:
        How many figures of this kind this rank has left so far; 0 where there are no other ranks.
    """
    store = _store()
    if store is None:
        return 0
    rank = dist.get_rank()
    try:
        told = _read(store, kind, rank)
        number = 1 if told is None else told[0] + 1
        store.set(_key(kind, rank), json.dumps([number, wait_s]))
    except RuntimeError:  # the rank that serves the store has ended
        return 0
    return number


def waits_told(
    kind: str, *, number: int = 1, limit_s: float = 0.0
) -> tuple[tuple[float, ...] | None, str | None]:
    """Read the latest figure of every rank.

    Args:
        kind: Where the figures come from.
        number: How many figures of this kind a rank must have left.
        limit_s: How long to wait for ranks that have left fewer.

    Returns:
        The waits in order of ranks, and None; or None, and the reason. Both are None where there
        are no other ranks.
    """
    store = _store()
    if store is None:
        return None, None
    ranks = range(dist.get_world_size())
    deadline = time.monotonic() + limit_s
    try:
        while True:
            told = [_read(store, kind, rank) for rank in ranks]
            silent = [r for r in ranks if (one := told[r]) is None or one[0] < number]
            if not silent:
                return tuple(one[1] for one in told if one is not None), None
            if time.monotonic() >= deadline:
                return None, f"no figure came from rank {silent[0]}"
            time.sleep(ASK_EVERY_S)
    except RuntimeError as error:
        return None, f"the ranks could not be asked ({type(error).__name__})"


def share_wait(kind: str, wait_s: float) -> tuple[tuple[float, ...] | None, str | None]:
    """Leave this rank's wait, and read those of the others once they have left theirs.

    Returns:
        As `waits_told`.
    """
    return waits_told(kind, number=tell_wait(kind, wait_s), limit_s=ANSWER_LIMIT_S)


def _store() -> Any:
    """The store of the default process group; None with a single rank.

    `_get_default_store` is private to torch (2.6 to 2.14); without it the waits stay unknown.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    return get_store() if get_store is not None else None


def _key(kind: str, rank: int) -> str:
    return f"dataloading/{kind}/wait_s/{rank}"


def _read(store: Any, kind: str, rank: int) -> tuple[int, float] | None:
    key = _key(kind, rank)
    if not store.check([key]):  # get would wait for it
        return None
    number, wait_s = json.loads(store.get(key))
    return number, wait_s
