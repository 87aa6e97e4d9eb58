"""Whether persistent workers persist: a loader that is made anew for each epoch starts them anew."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader


@dataclass
class _Past:
    """Loaders that were watched over one data set."""

    loaders: list[weakref.ref[DataLoader]] = field(default_factory=list)
    replaced: int = 0


_PASTS: weakref.WeakKeyDictionary[Any, _Past] = weakref.WeakKeyDictionary()


def worker_ids(loader: Any) -> frozenset[int]:
    """Process ids of a loader's living persistent workers; empty where there are none."""
    workers = getattr(getattr(loader, "_iterator", None), "_workers", ())
    return frozenset(worker.pid for worker in workers)


def count_replaced(loader: Any) -> int:
    """How often a loader with persistent workers took the place of one that is gone.

    Call it once an epoch. Loaders that are in use side by side, as for training and testing, do not
    count.

    Args:
        loader: The loader of this epoch.

    Returns:
        The number so far, over the same data set; 0 for anything but a `DataLoader` with persistent
        workers.
    """
    if not isinstance(loader, DataLoader) or not worker_ids(loader):
        return 0
    with contextlib.suppress(TypeError):  # a data set that cannot be remembered
        past = _PASTS.setdefault(loader.dataset, _Past())
        known = [ref() for ref in past.loaders]
        if not any(one is loader for one in known):
            past.replaced += sum(one is None for one in known)
            past.loaders = [ref for ref in past.loaders if ref() is not None]
            past.loaders.append(weakref.ref(loader))
        return past.replaced
    return 0
