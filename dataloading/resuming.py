"""Resuming in the middle of an epoch, with torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from dataloading.settings import LoaderSettings
from dataloading.watchdog import loader_warnings_hidden

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

GENERATOR = "generator_state"  # beside torchdata's own entries in a state
STEADY_ORDER = (SequentialSampler, DistributedSampler, Sequence)  # resumed by skipping


def resumable_dataloader(dataloader: DataLoader) -> StatefulDataLoader:
    """Build a loader again so that training can go on in the middle of an epoch.

    Save `loader.state_dict()` with the checkpoint, and give it to `loader.load_state_dict()` of a
    loader that was made the same way. The next iteration then delivers the rest of the epoch, and
    those after it the epochs that would have followed.

    Random transforms go on with the same numbers where the data set is a `ResumableRandomness`;
    else the samples come in the same order, transformed with other random numbers. Under the same
    seed, a shuffled epoch has another order than with the loader that was given. An iterable data
    set goes through the samples again that were delivered already, so tell it the epoch first.

    Args:
        dataloader: A loader with shuffling, an `EpochSampler`, a fixed order or an iterable data
            set. It is left as it is.

    Returns:
        A `StatefulDataLoader` with the same data set, settings and seed.

    Raises:
        ImportError: torchdata is not installed.
        TypeError: This is no `DataLoader`, or its sampler has no state to save.
        ValueError: Its batches come in any order (`in_order=False`).

    Example:
        >>> loader = resumable_dataloader(DataLoader(range(8), shuffle=True))  # doctest: +SKIP
        >>> checkpoint["loader"] = loader.state_dict()  # doctest: +SKIP

    Explained in: notebook 08
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}: only a "
            "DataLoader can be built again as one that can be resumed."
        )
    kind = _resumable_kind()
    settings = LoaderSettings.of(dataloader)
    if not settings.in_order:
        raise ValueError(
            "With in_order=False nobody knows which batches were delivered, so the loader cannot be "
            "resumed. Build it with in_order=True."
        )
    options = settings.kwargs()
    options.pop("batch_size", None)
    options |= _order(dataloader)
    options |= {
        "collate_fn": dataloader.collate_fn,
        "worker_init_fn": dataloader.worker_init_fn,
        "generator": _copy(dataloader.generator),
        "timeout": dataloader.timeout,
    }
    with loader_warnings_hidden():
        # torchdata 0.11 calls what torch 2.14 calls deprecated
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return kind(dataloader.dataset, **options)


@functools.cache
def _resumable_kind() -> type:
    """A `StatefulDataLoader` that keeps the state of its generator, too.

    Overrides torch's private `_get_iterator` (torch 2.6 to 2.14, torchdata 0.11): the generator can
    be put back only when a new iterator has drawn the seed of its workers from it.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise ImportError(
            "Resuming in the middle of an epoch needs torchdata: pip install torchdata"
        ) from None

    class ResumableDataLoader(StatefulDataLoader):
        """Seeds the workers of the epochs to come as if nothing had happened."""

        _saved: torch.Tensor | None = None

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            if self.generator is not None:
                state[GENERATOR] = self.generator.get_state()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self._saved = state_dict.get(GENERATOR)

        def _get_iterator(self) -> Any:
            iterator = super()._get_iterator()
            if self._saved is not None and self.generator is not None:
                self.generator.set_state(self._saved)
            self._saved = None
            return iterator

    return ResumableDataLoader


def _order(dataloader: DataLoader) -> dict[str, Any]:
    """The arguments that say which samples come when, and which of them make a batch."""
    batches: Any = dataloader.batch_sampler
    if dataloader.batch_size is None and batches is not None:
        if type(batches) is not BatchSampler:
            _check_state(batches)
            return {"batch_sampler": batches}
        return {
            "batch_size": batches.batch_size,
            "drop_last": batches.drop_last,
            "sampler": _sampler(batches.sampler),
        }
    batching: dict[str, Any] = {"batch_size": dataloader.batch_size}
    if dataloader.batch_size is not None:
        batching["drop_last"] = dataloader.drop_last
    if isinstance(dataloader.dataset, IterableDataset):
        return batching
    return batching | {"sampler": _sampler(dataloader.sampler)}


def _sampler(sampler: Any) -> Any:
    """A sampler that gives the same order and can be resumed."""
    if type(sampler) is not RandomSampler:
        _check_state(sampler)
        return sampler
    from torchdata.stateful_dataloader.sampler import RandomSampler as Stateful

    return Stateful(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler.num_samples,
        # Its own: were it the loader's as well, a resumed loader would draw from it in another order.
        generator=_copy(sampler.generator),
    )


def _check_state(sampler: Any) -> None:
    """Refuse a sampler whose order could be another one after resuming.

    An `EpochSampler` is a `DistributedSampler`; the state is in its iterator.
    """
    if not isinstance(sampler, STEADY_ORDER) and not hasattr(sampler, "load_state_dict"):
        raise TypeError(
            f"The sampler {type(sampler).__name__} has no state_dict and load_state_dict, so its "
            "order cannot be resumed. Give it both, or use shuffle=True or an EpochSampler."
        )


def _copy(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator that draws the same numbers."""
    if generator is None:
        return None
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy


class ResumableRandomness:
    """Mix this into a map-style data set to resume its random transforms, too.

    `StatefulDataLoader` saves the state of a data set in each worker. This one is that of the
    random numbers that a transform may draw from there: torch's, NumPy's and Python's. In the
    training process (`num_workers=0`) they belong to the program, which saves them itself.

    Example:
        >>> from torch.utils.data import Dataset
        >>> class Photos(ResumableRandomness, Dataset): ...
        >>> Photos().state_dict()  # not in a worker
        {}
    """

    def state_dict(self) -> dict[str, Any]:
        """The random states of this worker."""
        if get_worker_info() is None:
            return {}
        name, keys, *rest = np.random.get_state()
        return {
            "torch": torch.get_rng_state(),
            "numpy": (name, tuple(np.asarray(keys).tolist()), *rest),
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the random states of this worker back."""
        if get_worker_info() is None or "torch" not in state:
            return
        torch.set_rng_state(state["torch"])
        np.random.set_state(tuple(state["numpy"]))
        random.setstate(state["python"])
