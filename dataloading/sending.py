"""What sending a batch from a worker to the training process costs."""

from __future__ import annotations

import io
import pickle
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dataloading.batches import clone_batch
from dataloading.watchdog import (
    ProbeTimeout,
    close_iterator,
    loader_warnings_hidden,
    one_thread,
    open_iterator,
    random_state_kept,
    time_limit,
)

LIMIT_S = 11.0  # sending may not hold a probe longer than this
BATCHES = 12  # sent from one worker
CLONES = 5
ERRORS = (  # what a batch that cannot be pickled, or a worker that cannot start, raises
    *(RuntimeError, OSError, AttributeError, TypeError, ValueError, ImportError, EOFError),
    pickle.PicklingError,
)


class BatchSource(Dataset):
    """Gives copies of one batch: what is left of a loader when preparing costs nothing."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return clone_batch(self.batch)


def time_sending(batch: Any) -> tuple[float | None, tuple[str, ...]]:
    """Send copies of a batch from one worker, and take off what copying itself costs.

    Returns:
        Seconds per batch, or None, and notes that say why.
    """
    source = BatchSource(clone_batch(batch))
    clone_times = []
    with one_thread():
        for index in range(CLONES):
            started = time.perf_counter()
            source[index]
            clone_times.append(time.perf_counter() - started)
    iterator = None
    try:
        _Structure(io.BytesIO()).dump(batch)
        with loader_warnings_hidden(), random_state_kept(), time_limit(LIMIT_S, "Sending batches"):
            loader = DataLoader(source, batch_size=None, num_workers=1, collate_fn=_as_it_is)
            iterator = open_iterator(loader)
            next(iterator)
            arrivals = [time.perf_counter() for _ in iterator]
    except ProbeTimeout:
        return None, ("Sending a batch from a worker took too long to be measured.",)
    except ERRORS as error:
        return None, (f"Sending a batch from a worker failed: {type(error).__name__}: {error}",)
    finally:
        close_iterator(iterator)
    return max(0.0, quickest_pace(arrivals) - float(np.median(clone_times))), ()


def quickest_pace(arrivals: list[float], stretch: int = BATCHES // 3) -> float:
    """Seconds per arrival in the quickest stretch: what disturbs a run only makes others slower.

    Example:
        >>> quickest_pace([0.0, 1.0, 2.0, 9.0, 10.0], stretch=2)
        1.0
    """
    spans = [arrivals[n + stretch] - arrivals[n] for n in range(max(1, len(arrivals) - stretch))]
    return min(spans) / stretch


class _Structure(pickle.Pickler):
    """Pickles all but tensors and arrays: a worker that cannot pickle would only fall silent."""

    def persistent_id(self, value: Any) -> str | None:
        return "array" if isinstance(value, torch.Tensor | np.ndarray) else None


def _as_it_is(batch: Any) -> Any:
    return batch
