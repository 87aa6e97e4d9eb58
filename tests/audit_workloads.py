"""Data sets whose samples are known, for the audit: in a module of their own so that workers find them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data import get_worker_info as worker_info

OWN_LIBRARY = random.Random(0)  # stands for a random library that torch has never heard of


class Numbers(Dataset):
    """The numbers from `begin` on, the same at each fetch."""

    def __init__(self, count: int, begin: int = 0) -> None:
        self.count = count
        self.begin = begin

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.begin + index)


class Forbidden(Numbers):
    """Its samples cannot be fetched."""

    def __getitem__(self, index: int) -> Any:
        raise OSError(f"no such file: {index}.jpg")


class Augmented(Numbers):
    """Each number with noise from torch's, NumPy's and Python's global random numbers."""

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) + float(np.random.rand()) + random.random()
        return noise + 10 * (self.begin + index), torch.tensor(self.begin + index)


class GlobalNumPy(Numbers):
    """A random integer of NumPy's global generator."""

    def __getitem__(self, index: int) -> Any:
        return np.random.randint(1_000_000)


class OwnGenerator(Numbers):
    """Random numbers from a generator made in the constructor; without a seed, each its own."""

    def __init__(self, count: int, seed: int | None = 0) -> None:
        super().__init__(count)
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> Any:
        return index + self.rng.random()


class OwnLibrary(Numbers):
    """Random numbers from a library that nobody seeds in the workers."""

    def __getitem__(self, index: int) -> Any:
        return OWN_LIBRARY.random()


class Flipped(Numbers):
    """A coin decides, as in a random flip."""

    def __getitem__(self, index: int) -> Any:
        return index, bool(torch.rand(()) < 0.5)


class TwiceFetched(Numbers):
    """The first fetch of a sample fills a cache, and nothing changes from then on."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.cache.setdefault(index, torch.tensor(index))


class WithEpoch(Numbers):
    """A map-style data set that knows the epoch, as for a curriculum; it has no order to shuffle."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class NoLength(Dataset):
    """Samples by key; nobody knows how many."""

    def __getitem__(self, key: str) -> str:
        return key.upper()


def reseed_own_generator(worker_id: int) -> None:
    """The recipe that gives each worker random numbers of its own."""
    info = worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(torch.initial_seed() % 2**32)


def seed_alike(worker_id: int) -> None:
    """The mistake: all workers get one seed."""
    np.random.seed(7)


def fail_at_start(worker_id: int) -> None:
    raise RuntimeError("no licence for this worker")


class Copies(IterableDataset):
    """Ids that every worker yields in full."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (self.sample(number) for number in range(self.count))

    def sample(self, number: int) -> Any:
        return {"id": torch.tensor(number), "text": f"sample {number}"}


class Shares(Copies):
    """Ids of which every worker yields its share; for `ranks` processes, as each of them asks."""

    def __init__(self, count: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(count)
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        info = worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        first, step = self.rank * workers + worker, self.ranks * workers
        return (self.sample(number) for number in range(first, self.count, step))


class SharesInWorkersOnly(Copies):
    """The same, written by someone who never ran it without workers."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = worker_info()
        return (self.sample(n) for n in range(info.id, self.count, info.num_workers))


class HalfShares(Copies):
    """Each worker yields its share and that of the next one."""

    def __iter__(self) -> Iterator[Any]:
        info = worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shares = {worker, (worker + 1) % workers}
        return (self.sample(n) for n in range(self.count) if n % workers in shares)


class NoisyShares(Shares):
    """Shares of augmented samples: none is ever the same twice."""

    def sample(self, number: int) -> Any:
        return torch.rand(3), number


class NoisyCopies(Copies):
    """Copies of augmented samples."""

    def sample(self, number: int) -> Any:
        return torch.rand(3), number


class BlankShares(Shares):
    """Samples that all look alike."""

    def sample(self, number: int) -> Any:
        return torch.zeros(3)


class ShuffledByEpoch(Copies):
    """A stream in an order that depends on the epoch it was told."""

    def __init__(self, count: int, shuffled: bool = True) -> None:
        super().__init__(count)
        self.epoch = 0
        self.shuffled = shuffled

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        if self.shuffled:
            random.Random(self.epoch).shuffle(order)
        return map(self.sample, order)


class Endless(IterableDataset):
    """A stream that does not end."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


class Listed(Sampler):
    """A sampler of one's own: these indices, always."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class EndlessPermutations(Sampler):
    """Permutation after permutation, every `ranks`-th index of them: training without epochs."""

    def __init__(self, count: int, rank: int = 0, ranks: int = 1) -> None:
        self.count, self.rank, self.ranks = count, rank, ranks

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        place = 0
        while True:
            for index in rng.permutation(self.count).tolist():
                if place % self.ranks == self.rank:
                    yield index
                place += 1


class EpochBatches(Sampler):
    """A batch sampler that shuffles whole batches by epoch."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.seed = count, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.seed = epoch

    def __iter__(self) -> Iterator[list[int]]:
        begins = list(range(0, self.count, self.size))
        random.Random(self.seed).shuffle(begins)
        return (list(range(b, min(b + self.size, self.count))) for b in begins)

    def __len__(self) -> int:
        return -(-self.count // self.size)


class Moving(DataLoader):
    """A subclass with a constructor of its own, whose batches come changed."""

    def __init__(self, dataset: Any, workers: int) -> None:
        super().__init__(dataset, batch_size=2, num_workers=workers)

    def __iter__(self) -> Any:
        return (batch["id"].float() for batch in super().__iter__())


def distributed(
    rank: int,
    ranks: int,
    dataset: Any,
    *,
    batch_size: int = 2,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader:
    """A rank's loader with a `DistributedSampler`; `options` go to the sampler."""
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, **options)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last)


def tell_epoch(dataloader: DataLoader, epoch: int) -> None:
    """What a training loop does before an epoch."""
    dataloader.sampler.set_epoch(epoch)


class Searched(Dataset):
    """Each fetch searches a list of keys from the front: `list.index`, quadratic over an epoch."""

    def __init__(self, count: int) -> None:
        self.keys = [("number", number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        return self.keys.index(("number", index))


class Looked(Searched):
    """The same with an index made once; each fetch does a little work of fixed size."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.places = {key: place for place, key in enumerate(self.keys)}

    def __getitem__(self, index: int) -> int:
        sum(range(200))
        return self.places["number", index]


class OwnLoader(DataLoader):
    """A subclass with a constructor of its own, that cannot be built again."""

    def __init__(self, count: int, workers: int) -> None:
        super().__init__(Looked(count), batch_size=8, num_workers=workers)
