"""Whether the workers of an iterable data set share its samples out, or each deliver all of them."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloading.fingerprints import fingerprint
from dataloading.held_things import handles_among
from dataloading.object_graph import is_a, walk
from dataloading.peeking import trial_copy
from dataloading.watchdog import one_thread, random_state_kept, time_limit

SAMPLES = 8  # of two workers, compared by content
MOST_COUNTED = 100_000  # samples, where contents do not tell
LIMIT_S = 1.5  # for the samples of one worker


def gives_shares(dataloader: Any) -> bool | None:
    """Whether each worker gets a share of its own, told by the first samples of two of them.

    The workers are played in this process, on copies of the data set.

    Args:
        dataloader: The loader.

    Returns:
        True for a map-style data set, which torch shares out itself; for an iterable one False where
        two workers begin with the same samples. None where it cannot be told: a `worker_init_fn` that
        may do it, a data set that holds open files or generators, that cannot be copied, fails or
        takes long, or samples that are all the same and without end.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    if not isinstance(dataloader.dataset, IterableDataset):
        return True
    if dataloader.worker_init_fn is not None:
        return None
    held = list(walk(dataloader.dataset, "dataset"))
    if any(handles_among(held)) or any(is_a(thing, types.GeneratorType) for _, thing in held):
        return None  # a copy would share them, and reading would take the samples away
    first, second = (_tried(_contents, worker, dataloader.dataset, held) for worker in range(2))
    if first is None or second is None:
        return None
    if len({*first, *second}) > 1:
        return first != second
    # all alike: do two workers deliver twice as much as one?
    part = _tried(_count, 0, dataloader.dataset, held)
    whole = _tried(_count, None, dataloader.dataset, held)
    if not part or not whole or whole == MOST_COUNTED:
        return None
    return part < whole


def _contents(trial: Any) -> list[str]:
    """Fingerprints of the first samples."""
    return [fingerprint(sample) for sample in islice(iter(trial), SAMPLES)]


def _count(trial: Any) -> int:
    """Number of samples, as far as it is counted."""
    return sum(1 for _ in islice(iter(trial), MOST_COUNTED))


def _tried(
    look: Callable[[Any], Any], worker: int | None, dataset: Any, held: list[tuple[str, Any]]
) -> Any:
    """What a look at a copy shows in one of two workers (None: without workers); None if it fails."""
    try:
        with (
            random_state_kept(),
            one_thread(),
            trial_copy(dataset, held) as trial,
            _played(worker, trial),
            time_limit(LIMIT_S, "Looking at the samples of a worker"),
        ):
            if trial is dataset:
                return None
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            return look(trial)
    except Exception:  # the data set's own code; running the loader will report it
        return None


@contextlib.contextmanager
def _played(worker: int | None, dataset: Any) -> Iterator[None]:
    """Let `get_worker_info()` say that this is one of two workers, or (None) no worker.

    Sets the private `_worker_info` of torch's worker module (torch 2.6 to 2.14).
    """
    from torch.utils.data._utils import worker as module

    before = module._worker_info
    if worker is not None:
        module._worker_info = module.WorkerInfo(id=worker, num_workers=2, seed=0, dataset=dataset)
    try:
        yield
    finally:
        module._worker_info = before
