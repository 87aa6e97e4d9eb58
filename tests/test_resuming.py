"""The same stream for the same seed, and the rest of an epoch after an interruption."""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision.transforms import v2

import data_setup
from dataloading import resuming
from dataloading.distributed import EpochSampler
from dataloading.resuming import ResumableRandomness, resumable_dataloader
from dataloading.sample_images import create_sample_images
from dataloading.settings import LoaderSettings

SAMPLES, BATCH = 20, 3
RANDOM = v2.Compose(
    [v2.RandomHorizontalFlip(), v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32)]
)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


# ---- The same seed -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_sample_images(tmp_path_factory.mktemp("photos"), images=12, classes=2, size=24)


def stream_digest(photos: str, num_workers: int, seed: int) -> str:
    """Order and pixels of two epochs as one text."""
    loader, _, _ = data_setup.create_dataloaders(photos, photos, RANDOM, 4, num_workers, seed=seed)
    digest = hashlib.sha256()
    for _ in range(2):
        for images, labels in loader:
            digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return digest.hexdigest()


def test_a_11_6_the_same_seed_gives_the_same_stream_in_another_process(photos: Path) -> None:
    code = (
        "import sys; from test_resuming import stream_digest\n"
        "print(*(stream_digest(sys.argv[1], workers, 7) for workers in (0, 2)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(photos)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    there = ran.stdout.split()
    assert there == [stream_digest(str(photos), workers, 7) for workers in (0, 2)]
    assert stream_digest(str(photos), 0, 8) != there[0]


# ---- Resuming ------------------------------------------------------------------------------------


class Noisy(ResumableRandomness, Dataset):
    """A number, and another from each random state that transforms draw from."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        return index, drawn if self.draws else 0.0


def shuffled(num_workers: int, **options: Any) -> DataLoader:
    """Seeded as create_dataloaders does it."""
    return DataLoader(
        Noisy(draws=num_workers > 0),
        batch_size=BATCH,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(7),
        worker_init_fn=data_setup.seed_worker,
        **options,
    )


def of_a_rank(num_workers: int, **options: Any) -> DataLoader:
    data = Noisy(draws=num_workers > 0)
    return DataLoader(
        data,
        batch_size=BATCH,
        sampler=EpochSampler(data, 2, 1, seed=7),
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(7),
        worker_init_fn=data_setup.seed_worker,
        **options,
    )


def take(iterator: Iterator[Any], count: int | None = None) -> list[tuple[int, float]]:
    """The samples of so many batches, or of all that are left."""
    batches = list(iterator) if count is None else [next(iterator) for _ in range(count)]
    return [pair for batch in batches for pair in zip(*(t.tolist() for t in batch), strict=True)]


def saved(state: Any) -> Any:
    """A state that went through a checkpoint file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def ended(loader: Any) -> None:
    """End the workers of a loader that was left in the middle of an epoch."""
    if hasattr(loader._iterator, "_shutdown_workers"):
        loader._iterator._shutdown_workers()
    loader._iterator = None


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("make", [shuffled, of_a_rank])
@pytest.mark.parametrize(("epoch", "batches"), [(0, 2), (1, 1), (1, 0)])
def test_the_rest_is_as_without_the_interruption(
    make: Any, num_workers: int, persistent: bool, epoch: int, batches: int
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    options = {"persistent_workers": True} if persistent else {}
    whole = resumable_dataloader(make(num_workers, **options))
    for _ in range(epoch):
        list(whole)
    iterator = iter(whole)
    begun = take(iterator, batches)
    state = saved(whole.state_dict())
    expected = [take(iterator), take(iter(whole)), take(iter(whole))]
    assert len(begun) + len(expected[0]) == len(expected[1])
    assert sorted(i for i, _ in begun + expected[0]) != [i for i, _ in begun + expected[0]]
    assert expected[1] != expected[2]

    torch.rand(1 + int(torch.randint(9, ())))  # what else the program does must not matter
    resumed = resumable_dataloader(make(num_workers, **options))
    resumed.load_state_dict(state)
    assert [take(iter(resumed)) for _ in range(3)] == expected
    ended(whole)
    ended(resumed)


def test_it_resumes_after_the_end_of_an_epoch() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    whole = resumable_dataloader(of_a_rank(0))
    list(whole)
    state = saved(whole.state_dict())
    resumed = resumable_dataloader(of_a_rank(0))
    resumed.load_state_dict(state)
    assert take(iter(resumed)) == take(iter(whole))


def test_everything_else_is_as_in_the_loader_given() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    loader = of_a_rank(2, prefetch_factor=3, drop_last=True, timeout=50, collate_fn=list)
    resumable = resumable_dataloader(loader)
    assert LoaderSettings.of(resumable) == LoaderSettings.of(loader)
    for name in ("dataset", "sampler", "drop_last", "timeout", "collate_fn", "worker_init_fn"):
        assert getattr(resumable, name) is getattr(loader, name), name
    batches = BatchSampler(EpochSampler(range(9), 1, 0), 4, drop_last=True)
    resumable = resumable_dataloader(DataLoader(range(9), batch_sampler=batches))
    assert (resumable.batch_size, resumable.drop_last, len(resumable)) == (4, True, 2)


def test_the_loader_given_is_left_as_it_is() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    loader, same = shuffled(0), shuffled(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(resumable_dataloader(loader))
    assert take(iter(loader)) == take(iter(same))


@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        ([1, 2], TypeError, "got list"),
        (DataLoader(range(4), sampler=SubsetRandomSampler([1, 2])), TypeError, "SubsetRandom"),
        (
            DataLoader(range(4), sampler=WeightedRandomSampler([1, 2], 2)),
            TypeError,
            "no state_dict",
        ),
        (DataLoader(range(4), num_workers=1, in_order=False), ValueError, "in_order"),
    ],
)
def test_loaders_that_cannot_be_resumed(loader: Any, error: type[Exception], text: str) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    with pytest.raises(error, match=text):
        resumable_dataloader(loader)


def test_without_torchdata_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    resuming._resumable_kind.cache_clear()
    with pytest.raises(ImportError, match="pip install torchdata"):
        resumable_dataloader(DataLoader(range(4)))
