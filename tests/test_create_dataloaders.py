"""The options of `create_dataloaders`: decoder, cache, ranks and bad images, alone and together."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import cut
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

import dataloading.distributed as ranks
from data_setup import (
    CachedDataset,
    SkippingDataLoader,
    check_images,
    create_dataloaders,
    create_sample_images,
    split_transform,
)
from dataloading.preflight_rules import check_dataloader
from dataloading.settings import LoaderSettings, rebuild_dataloader
from helper_functions import make_train_step

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

IMAGES = 12
PLAIN = transforms.Compose([transforms.Resize((24, 24)), transforms.ToTensor()])
RANDOM = transforms.Compose(
    [
        transforms.Resize((40, 40)),
        transforms.RandomCrop(24),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.2]),
    ]
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_sample_images(tmp_path_factory.mktemp("photos"), images=IMAGES, size=64)


@pytest.fixture
def own_photos(tmp_path: Path) -> Path:
    """Photos that a test may damage."""
    return create_sample_images(tmp_path / "photos", images=IMAGES, size=64)


def make(folder: Path, transform: Any = PLAIN, workers: int = 0, **options: Any) -> Any:
    """The training loader, in batches of four."""
    return create_dataloaders(folder, folder, transform, 4, workers, **options)[0]


def images_of(loader: Any) -> torch.Tensor:
    return torch.cat([images for images, _ in loader])


# ---- decoders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["pillow-draft", "torchvision"])
def test_the_same_crops_and_flips_come_whatever_decodes(photos: Path, decoder: str) -> None:
    usual = images_of(make(photos, RANDOM, seed=1))
    other = images_of(make(photos, RANDOM, seed=1, decoder=decoder))
    assert other.shape == usual.shape
    assert other.dtype == torch.float32
    assert (other - usual).abs().mean() < 0.1  # of values that spread over about 5
    shifted = images_of(make(photos, RANDOM, seed=2, decoder=decoder))
    assert (shifted - usual).abs().mean() > 0.3


def test_uint8_batches_are_converted_in_the_train_step(photos: Path) -> None:
    sample_transform, batch_transform = split_transform(RANDOM)
    loader = make(photos, sample_transform, seed=1, decoder="torchvision")
    batches = list(loader)
    assert {images.dtype for images, _ in batches} == {torch.uint8}
    whole = images_of(make(photos, RANDOM, seed=1, decoder="torchvision"))
    split = torch.cat([batch_transform(images) for images, _ in batches])
    assert torch.allclose(split, whole, atol=1e-5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    step = make_train_step(model, loss_fn, optimizer, batch_transform=batch_transform)
    assert step(batches[0]) > 0
    with pytest.raises(TypeError, match="batch_transform"):
        make_train_step(model, loss_fn, optimizer, batch_transform=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_decoded_channels_stay_side_by_side_until_they_are_floats(
    photos: Path, workers: int
) -> None:
    sample_transform, batch_transform = split_transform(PLAIN)
    loader = make(photos, sample_transform, workers, decoder="torchvision", device="cuda")
    images, _ = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert batch_transform(images).is_contiguous()
    on_cpu = make(photos, sample_transform, workers, decoder="torchvision", device="cpu")
    assert next(iter(on_cpu))[
        0
    ].is_contiguous()  # sorting channels takes a CPU longer than it saves


def test_an_unknown_decoder_is_refused_with_the_known_ones(photos: Path) -> None:
    with pytest.raises(ValueError, match="pillow, pillow-draft, torchvision"):
        make(photos, decoder="opencv")


def test_uint8_batches_without_the_conversion_get_a_hint(photos: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 3))
    step = make_train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    loader = make(photos, split_transform(PLAIN)[0])
    with pytest.raises(RuntimeError) as raised:
        step(next(iter(loader)))
    assert "batch_transform" in raised.value.__notes__[0]


# ---- cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["pillow", "torchvision"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_epoch_comes_from_the_cache_with_new_crops(
    photos: Path, decoder: str, workers: int
) -> None:
    loader = make(photos, RANDOM, workers, cache="memory", decoder=decoder)
    data = loader.dataset
    assert isinstance(data, CachedDataset)
    first = images_of(loader)
    assert data.counts().misses == IMAGES
    data.reset_counts()
    second = images_of(loader)
    assert data.hit_rate == 1
    assert not torch.equal(first.sort(0).values, second.sort(0).values)
    assert data.classes == loader.dataset.dataset.classes


def test_a_cache_changes_no_pixel_and_serves_the_next_run_from_its_folder(
    photos: Path, tmp_path: Path
) -> None:
    train, test, _ = create_dataloaders(photos, photos, PLAIN, 4, 0, cache=tmp_path / "cache")
    cached = images_of(test)
    assert torch.equal(cached, images_of(create_dataloaders(photos, photos, PLAIN, 4, 0)[1]))
    list(train)
    _, again, _ = create_dataloaders(photos, photos, PLAIN, 4, 0, cache=str(tmp_path / "cache"))
    assert torch.equal(images_of(again), cached)
    assert again.dataset.hit_rate == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([transforms.RandomResizedCrop(24), transforms.ToTensor()], "RandomResizedCrop"),
        ([transforms.Resize(24), transforms.ToTensor()], "ToTensor"),
        ([], "the end of the transform"),
    ],
)
def test_what_has_no_common_size_is_not_cached(photos: Path, steps: list[Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"no common size.*Resize\(\(256, 256\)\)") as raised:
        make(photos, transforms.Compose(steps), cache="memory")
    assert named in str(raised.value)
    with pytest.raises(TypeError, match="memory"):
        make(photos, cache=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_repeats_the_random_part_after_the_cache(photos: Path, workers: int) -> None:
    runs = []
    for _ in range(2):
        torch.rand(3)  # whatever the program drew before
        loader = make(photos, RANDOM, workers, cache="memory", seed=5)
        runs.append([images_of(loader), images_of(loader)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])


DRAWS_ELSEWHERE = transforms.Compose(
    [
        transforms.Resize((24, 24)),
        transforms.RandomChoice(
            [transforms.RandomHorizontalFlip(1.0), transforms.RandomVerticalFlip(1.0)]
        ),  # by Python's random
        transforms.ToTensor(),
        transforms.Lambda(lambda image: image + float(np.random.rand())),
    ]
)


@pytest.mark.parametrize("cache", [None, "memory"])
def test_a_seed_repeats_what_python_and_numpy_draw(photos: Path, cache: str | None) -> None:
    runs = []
    for _ in range(2):
        random.random()
        runs.append(images_of(make(photos, DRAWS_ELSEWHERE, seed=4, cache=cache)))
    assert torch.equal(*runs)
    state, drawn = random.getstate(), np.random.get_state()[2]
    images_of(make(photos, DRAWS_ELSEWHERE, seed=4, cache=cache))
    assert (random.getstate(), np.random.get_state()[2]) == (state, drawn)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"settings": {"num_workers": 2}}, TypeError, "settings"),
        ({"seed": "x"}, TypeError, "seed"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"seed": 2**70}, ValueError, "seed"),
        ({"train_dir": None}, TypeError, "train_dir"),
        ({"transform": "x"}, TypeError, "transform"),
        ({"transform": transforms.ToTensor}, TypeError, "transform"),
        ({"batch_size": "32"}, TypeError, "batch_size='32'"),
        ({"batch_size": None}, TypeError, "batch_size"),
        ({"device": "gpu"}, ValueError, "device"),
        ({"device": 5.5}, TypeError, "device"),
    ],
)
def test_wrong_arguments_are_named(
    photos: Path, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    usual = {"train_dir": photos, "test_dir": photos, "transform": PLAIN, "batch_size": 4}
    with pytest.raises(error, match=named):
        create_dataloaders(**{**usual, **options})


def test_a_flat_test_folder_is_told_how_to_become_one_of_classes(
    photos: Path, tmp_path: Path
) -> None:
    create_sample_images(tmp_path / "photos", images=2, classes=1, size=32)
    flat = tmp_path / "flat"
    (tmp_path / "photos" / "class_0").rename(flat)
    with pytest.raises(ValueError, match=r"images directly in it.*sub-folders called class_0"):
        create_dataloaders(photos, flat, PLAIN, 4)


# ---- ranks ---------------------------------------------------------------------------------------


def test_ranks_share_the_images_out_with_new_orders_and_crops_of_their_own(photos: Path) -> None:
    pair = [make(photos, RANDOM, distributed=(rank, 2), seed=3) for rank in range(2)]
    first = [list(loader.sampler) for loader in pair]
    assert sorted(first[0] + first[1]) == list(range(IMAGES))
    assert [len(loader) for loader in pair] == [2, 2]
    assert list(pair[0].sampler) != first[0]  # the next epoch, though nobody has set it
    torch.manual_seed(0)
    drawn = [[loader.dataset[0][0] for loader in pair] for _ in range(3)]
    assert any(not torch.equal(*images) for images in drawn)


def test_workers_are_shared_out_among_the_ranks_of_a_machine(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.cpus, "usable_cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="2 instead of 8 workers for each rank"):
        loader = make(photos, workers=8, distributed=(0, 2))
    assert loader.num_workers == 2
    own = LoaderSettings(num_workers=1)
    assert make(photos, distributed=(0, 2), settings=own).num_workers == 1


def test_a_rank_without_a_batch_is_refused(photos: Path) -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        make(photos, distributed=True)
    with pytest.raises(ValueError, match="rank"):
        make(photos, distributed=(2, 2))


# ---- bad images ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_left_out_and_told(
    own_photos: Path, workers: int, cache: str | None
) -> None:
    files = sorted(own_photos.rglob("*.jpg"))
    cut(files[0])
    files[-1].write_bytes(b"")
    loader = make(own_photos, RANDOM, workers, skip_bad_images=True, cache=cache)
    assert isinstance(loader, SkippingDataLoader)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert len(images_of(loader)) == IMAGES - 2
    skipped = loader.skipped()
    assert skipped.count == 2
    assert {Path(str(name)).name for name, _ in skipped.files} == {files[0].name, files[-1].name}
    assert not told  # the second epoch has nothing new to tell
    (found,) = [f for f in check_dataloader(loader, spawn_check=False) if f.code == "bad-images"]
    assert found.severity == "info"


def test_a_folder_that_begins_with_many_bad_files_is_cached(tmp_path: Path) -> None:
    create_sample_images(tmp_path, images=IMAGES, classes=1, size=64)
    (tmp_path / "a").mkdir()
    for number in range(40):
        (tmp_path / "a" / f"{number}.jpg").write_text("no image")
    loader = make(tmp_path, PLAIN, cache="memory", skip_bad_images=True)
    with pytest.warns(UserWarning, match="Skipped 40 of 52"):
        assert len(images_of(loader)) == IMAGES
    for file in (tmp_path / "class_0").iterdir():
        file.write_text("no image")
    with pytest.raises(OSError, match="Nothing to cache: none of"):
        make(tmp_path, PLAIN, cache="memory", skip_bad_images=True)


def test_ranks_that_skip_are_warned_of(photos: Path) -> None:
    with pytest.warns(UserWarning, match="unlike numbers of batches.*scan_images"):
        make(photos, distributed=(0, 2), skip_bad_images=True)


def test_without_the_option_the_file_is_named(own_photos: Path) -> None:
    file = sorted(own_photos.rglob("*.jpg"))[3]
    cut(file)
    with pytest.raises(OSError, match=file.name):
        images_of(make(own_photos))


# ---- all together --------------------------------------------------------------------------------


def test_all_options_together_work_in_spawned_workers(own_photos: Path, tmp_path: Path) -> None:
    cut(sorted(own_photos.rglob("*.jpg"))[5])
    sample_transform, batch_transform = split_transform(RANDOM)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.warns(UserWarning, match="unlike numbers of batches"):
        loader = make(
            own_photos,
            sample_transform,
            settings=LoaderSettings(num_workers=2, multiprocessing_context="spawn"),
            decoder="torchvision",
            cache=tmp_path / "cache",
            distributed=(0, 2),
            seed=1,
            skip_bad_images=True,
        )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert after[:2] == states[:2]
    assert torch.equal(after[2], states[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(loader)
    assert all(batch_transform(images).dtype == torch.float32 for images, _ in batches)
    assert sum(len(labels) for _, labels in batches) in (5, 6)
    rebuilt = rebuild_dataloader(loader, LoaderSettings(num_workers=0))
    assert isinstance(rebuilt, SkippingDataLoader)
    assert isinstance(rebuilt, DataLoader)
    assert len(rebuilt.dataset) == IMAGES


def test_one_file_can_be_checked_by_itself(own_photos: Path) -> None:
    file = cut(sorted(own_photos.rglob("*.jpg"))[0])
    assert [path for path, _ in check_images(str(file))] == [str(file)]
