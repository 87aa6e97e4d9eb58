"""Every sample once over all ranks, a new order in every epoch, and equally many steps on each rank.

The same script runs alone and under `torchrun`: `rank_and_world_size()` finds out which it is.

One machine with two processes, and two machines with four each (the same line on both; HOST is
the name of one of them):

    torchrun --standalone --nproc_per_node=2 train.py
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py

The script calls `torch.distributed.init_process_group("nccl")` (`"gloo"` without GPUs) before it
makes its loaders. `tests/torchrun_job.py` is a whole one.

Counted over all nodes: `rank` and `world_size`, so the samples, the seed and the epoch are shared
out once. Per node: CPU cores, memory and disk. Each node needs the data on a path of its own or on
a shared file system; `workers_per_rank` divides the cores of this node between its own ranks
(`LOCAL_WORLD_SIZE`, which torchrun sets); a cache belongs in a local folder that all ranks of the
node name alike, so that each node fills one, not each rank. Nodes with different cores still need
the same number of workers per rank where an iterable data set is to give equally many steps.

Frameworks: Lightning leaves an `EpochSampler` in place. Accelerate's `prepare` shares each loader
out itself, whatever its sampler, so give it loaders made with `distributed=False` (otherwise each
rank sees only a part of its part: accelerate issue 4075).
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from dataloading import cpus
from dataloading.arguments import check_int

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"  # what torchrun tells each process
HOW_TO_START = (
    "Start the script with `torchrun --standalone --nproc_per_node=2 train.py` and call "
    "torch.distributed.init_process_group('gloo') (with GPUs 'nccl') before the loaders are made."
)

Distributed = bool | tuple[int, int] | None


# ------------------------------------------------------------------------------------------- ranks


def rank_and_world_size(distributed: Distributed = None) -> tuple[int, int]:
    """Number of this process among those that train together, and how many they are.

    Args:
        distributed: None finds out: the process group of `torch.distributed`, else what torchrun
            told this process, else it runs alone. True does the same and refuses to run alone.
            False: alone, whatever was started. A pair `(rank, world_size)` is checked and taken.

    Returns:
        `(rank, world_size)`, with 0 <= rank < world_size.

    Raises:
        RuntimeError: `distributed=True` and there is neither a process group nor torchrun.
        TypeError: `distributed` is none of these.
        ValueError: The numbers contradict each other.

    Example:
        >>> rank_and_world_size(False), rank_and_world_size((1, 4))
        ((0, 1), (1, 4))

    Explained in: notebook 08
    """
    if distributed is False:
        return 0, 1
    if isinstance(distributed, tuple | list):
        if len(distributed) != 2:
            raise ValueError(f"distributed={distributed!r} must be a pair (rank, world_size).")
        return _checked(*distributed)
    if distributed is not None and distributed is not True:
        raise TypeError(
            f"distributed={distributed!r} must be None, True, False or a pair (rank, world_size)."
        )
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if RANK in os.environ and WORLD_SIZE in os.environ:
        return _told_by_torchrun()
    if distributed:
        raise RuntimeError(f"distributed=True, but this process runs alone. {HOW_TO_START}")
    return 0, 1


def _told_by_torchrun() -> tuple[int, int]:
    rank, world_size = os.environ[RANK], os.environ[WORLD_SIZE]
    try:
        return _checked(int(rank), int(world_size))
    except ValueError:
        raise ValueError(
            f"The environment says {RANK}={rank!r} and {WORLD_SIZE}={world_size!r}; expected whole "
            f"numbers with 0 <= {RANK} < {WORLD_SIZE}, as torchrun sets them. Unset both to run "
            "alone."
        ) from None


def _checked(rank: Any, world_size: Any) -> tuple[int, int]:
    check_int("world_size", world_size, least=1)
    check_int("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank={rank} must be below world_size={world_size}; ranks begin at 0.")
    return rank, world_size


def workers_per_rank(num_workers: int, *, local_ranks: int | None = None) -> tuple[int, str | None]:
    """Worker processes for each rank, so that those of all ranks on this machine have a CPU each.

    Args:
        num_workers: Workers wished for each rank.
        local_ranks: Ranks on this machine; None reads what the launcher says.

    Returns:
        The wish, or fewer (at least 1 where it was at least 1); and a sentence that says so, or
        None.

    Raises:
        TypeError: A number is no whole number.
        ValueError: `num_workers` is negative, or `local_ranks` below 1.

    Example:
        >>> workers_per_rank(1, local_ranks=4)
        (1, None)

    Explained in: notebook 08
    """
    check_int("num_workers", num_workers, least=0)
    check_int("local_ranks", local_ranks, least=1, optional=True)
    ranks = cpus.local_ranks(os.environ)[0] if local_ranks is None else local_ranks
    usable = cpus.usable_cpu_count()
    alone = cpus.ranks_are_slurm_tasks(ranks, os.environ)  # the CPUs are this rank's share already
    workers = min(num_workers, max(1, usable if alone else usable // ranks))
    if workers == num_workers:
        return workers, None
    return workers, (
        f"{workers} instead of {num_workers} workers for each rank: {cpus.count_of(ranks, 'rank')} "
        f"on this machine have {cpus.count_of(usable, 'usable CPU')}"
        f"{' each' if alone and ranks > 1 else ''}."
    )


# ------------------------------------------------------------------------------------- equal steps


def padding(length: int, world_size: int) -> int:
    """How many samples come twice in an epoch so that every rank gets as many as the others.

    Args:
        length: Samples of the data set.
        world_size: Number of ranks.

    Returns:
        At most `world_size - 1`.

    Example:
        >>> padding(10, 4), padding(12, 4)
        (2, 0)
    """
    check_int("length", length, least=0)
    check_int("world_size", world_size, least=1)
    return -length % world_size


def steps_per_rank(
    length: int, world_size: int, batch_size: int, *, drop_last: bool = False
) -> int:
    """Batches that each rank gets in an epoch with an `EpochSampler`: on all ranks the same.

    Args:
        length: Samples of the data set.
        world_size: Number of ranks.
        batch_size: Samples in a batch of one rank.
        drop_last: Whether the loader leaves out a last batch that is not full.

    Returns:
        At least 1.

    Raises:
        ValueError: No rank would get a batch, or a number is out of range.

    Example:
        >>> steps_per_rank(10, world_size=2, batch_size=2)
        3

    Explained in: notebook 08
    """
    check_int("batch_size", batch_size, least=1)
    samples = (length + padding(length, world_size)) // world_size
    steps = samples // batch_size if drop_last else math.ceil(samples / batch_size)
    if steps == 0:
        raise ValueError(
            f"No rank gets a batch: {length} samples over {world_size} ranks are {samples} for each, "
            f"and a batch takes {batch_size}. Use a smaller batch, fewer ranks or drop_last=False."
        )
    return steps


# -------------------------------------------------------------------------------- map-style samples


class EpochSampler(DistributedSampler[int]):
    """A `DistributedSampler` whose epoch nobody can forget to set.

    Each iteration that no `set_epoch` came before goes on to the next epoch by itself. A
    `set_epoch` counts for the next iteration, and the count goes on from there; so loops and
    frameworks that call it get the very orders of `DistributedSampler`.

    The epoch is taken when the first index is drawn. All ranks must begin equally many iterations:
    where only one of them looks at a batch, call `set_epoch` on all before the next epoch.

    Args:
        dataset: A data set with a length.
        num_replicas: Number of ranks; None finds out as `rank_and_world_size()`.
        rank: Number of this rank; None finds out.
        shuffle: A new order in every epoch; False for evaluation.
        seed: The same on all ranks.
        drop_last: Leave out up to `world_size - 1` samples instead of repeating as many.

    Attributes:
        epoch: The epoch last begun or set.

    Raises:
        ValueError: There are fewer samples than a rank needs to get one, or a number is out of
            range.

    Example:
        >>> sampler = EpochSampler(range(6), num_replicas=2, rank=0)
        >>> first, second = list(sampler), list(sampler)
        >>> first == second, sampler.epoch
        (False, 1)

    Explained in: notebook 08
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            found_rank, found_size = rank_and_world_size()
            rank = found_rank if rank is None else rank
            num_replicas = found_size if num_replicas is None else num_replicas
        _checked(rank, num_replicas)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if self.num_samples < 1:
            raise ValueError(
                f"{len(dataset)} samples over {num_replicas} ranks leave a rank without any. Use "
                "fewer ranks or more data, or, with at least one sample, drop_last=False."
            )
        # Its seed is the number of the next epoch: what puts the generators of a borrowed loader
        # back (measuring does, on one rank perhaps) puts the epoch back with them.
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[int]:
        return EpochIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Args:
            epoch: Its number, from 0.
        """
        epoch = operator.index(epoch)  # a NumPy number, perhaps
        check_int("epoch", epoch, least=0)
        super().set_epoch(epoch)
        self.generator.manual_seed(epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.generator.initial_seed()

    def begin(self, epoch: int) -> Iterator[int]:
        """The indices of this rank in an epoch; the next iteration will be of the one after it."""
        super().set_epoch(epoch)
        self.generator.manual_seed(epoch + 1)
        return super().__iter__()


class EpochIterator(Iterator[int]):
    """One iteration of an `EpochSampler`, which torchdata's `StatefulDataLoader` can resume."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler
        self.epoch: int | None = None  # not begun: loaders make iterators that they never use
        self.yielded = 0
        self.indices: Iterator[int] = iter(())

    def __next__(self) -> int:
        if self.epoch is None:
            self._begin(self.sampler.next_epoch)
        index = next(self.indices)
        self.yielded += 1
        return index

    def _begin(self, epoch: int, yielded: int = 0) -> None:
        self.epoch = epoch
        self.yielded = yielded
        self.indices = islice(self.sampler.begin(epoch), yielded, None)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its indices were given."""
        epoch = self.sampler.next_epoch if self.epoch is None else self.epoch
        return {"epoch": epoch, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken."""
        self._begin(state["epoch"], state["yielded"])


# ------------------------------------------------------------------------------------------- epochs


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Tell the epoch to whatever in a loader has a `set_epoch`: samplers and the data set.

    Args:
        dataloader: A loader; one with nothing to tell is left alone.
        epoch: Number of the epoch that begins next.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(4), sampler=EpochSampler(range(4)))
        >>> set_epoch(loader, 3)
        >>> loader.sampler.next_epoch
        3

    Explained in: notebook 08
    """
    check_int("epoch", epoch, least=0)
    batches = getattr(dataloader, "batch_sampler", None)
    parts: list[Any] = [getattr(dataloader, "sampler", None), batches]
    parts += [getattr(batches, "sampler", None), getattr(dataloader, "dataset", None)]
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def epochs(dataloader: Any, count: int, *, start: int = 0) -> Iterator[int]:
    """Count epochs, and tell the loader each of them before it begins.

    Args:
        dataloader: The loader that the loop goes through in each epoch.
        count: Number of the epoch to stop before.
        start: The first epoch, when training goes on from a checkpoint.

    Yields:
        The number of the epoch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(4), batch_size=4, sampler=EpochSampler(range(4)))
        >>> [batch.shape[0] for epoch in epochs(loader, 2) for batch in loader]
        [4, 4]

    Explained in: notebook 08
    """
    check_int("count", count, least=0)
    check_int("start", start, least=0)
    for epoch in range(start, count):
        set_epoch(dataloader, epoch)
        yield epoch
