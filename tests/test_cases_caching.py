"""Cases of caching: which copies of a cache are shared, what it freezes, and what gets lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads
from test_cached_dataset import Fetched, cached
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from workloads import linux_only

from dataloading.cached_dataset import CachedDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


class DictCache(Dataset):
    """Keeps samples in a plain dict, and says with each whether it had it."""

    def __init__(self, count: int) -> None:
        self.count, self.kept = count, {}  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, bool]:
        hit = index in self.kept
        self.kept[index] = index
        return index, hit


def shuffled(data: Any, workers: int, persistent: bool) -> DataLoader:
    return DataLoader(
        data,
        batch_size=5,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(0),
    )


@linux_only
@pytest.mark.parametrize(
    ("workers", "persistent", "least", "most"),
    [(0, False, 1.0, 1.0), (4, False, 0.0, 0.0), (4, True, 0.1, 0.5)],
)
def test_a_22_1_a_dict_is_not_shared_by_workers_and_the_cache_is(
    workers: int, persistent: bool, least: float, most: float
) -> None:
    plain = shuffled(DictCache(100), workers, persistent)
    for _ in range(2):
        hits = sum(int(hit.sum()) for _, hit in plain)
    assert least <= hits / 100 <= most
    source = Fetched(100)
    data = cached(source)
    loader = shuffled(data, workers, persistent)
    for _ in range(2):
        data.reset_counts()
        assert sorted(int(label) for _, labels in loader for label in labels) == list(range(100))
    assert data.hit_rate == 1.0
    assert source.fetches() == [1] * 100
    del plain, loader


def jittered(image: torch.Tensor) -> torch.Tensor:
    """A random augmentation."""
    return image.float() + torch.rand(1)


class Augmented(Fetched):
    """Decodes, and augments in the same breath."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return jittered(image), label


def two_epochs(data: Any) -> list[torch.Tensor]:
    return [torch.cat([images for images, _ in DataLoader(data, 5)]) for _ in range(2)]


def test_a_22_2_frozen_random_results_are_flagged_and_thaw_outside_the_cache() -> None:
    with pytest.warns(UserWarning, match="random results would be frozen"):
        frozen = CachedDataset(Augmented(20))
    one, two = two_epochs(frozen)
    assert torch.equal(one, two)
    source = Fetched(20)
    one, two = two_epochs(cached(source, transform=jittered))
    assert not torch.equal(one, two)
    assert torch.equal(one.floor(), two.floor())
    assert source.fetches() == [1] * 20


class ByOwnNumber(Dataset):
    """A shard whose worker keeps its samples under their numbers in the shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        torch.save(index, self.folder / f"{index // info.num_workers}.pt")
        return index


@linux_only
def test_a_22_3_shards_with_equal_keys_lose_no_record(tmp_path: Path) -> None:
    clashing = tmp_path / "clashing"
    clashing.mkdir()
    options: dict[str, Any] = {"num_workers": 4, "multiprocessing_context": "fork"}
    assert len(list(DataLoader(ByOwnNumber(clashing), batch_size=1, **options))) == 40
    assert len(list(clashing.iterdir())) == 10  # of 40: the shards wrote over one another

    source = Fetched(40)
    shards = [Subset(source, range(first, 40, 4)) for first in range(4)]
    caches = [cached(shard, path=tmp_path / "caches") for shard in shards]
    assert len({data.file for data in caches}) == 4
    source.fetches()
    loader = DataLoader(ConcatDataset(caches), batch_size=1, shuffle=True, **options)
    for _ in range(2):
        assert sorted(int(label) for _, label in loader) == list(range(40))
    assert source.fetches() == [1] * 40
    assert sum(data.counts().cached for data in caches) == 40
    kept = [int(label) for data in caches for _, label in data]
    assert sorted(kept) == list(range(40))
    assert source.fetches() == [0] * 40
    assert len(list((tmp_path / "caches").glob("*.cache"))) == 4

    whole = cached(source)
    list(DataLoader(whole, batch_size=1, shuffle=True, **options))
    assert whole.counts().cached == 40
