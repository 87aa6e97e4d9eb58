"""Random crops of photos that are decoded no larger than the crop needs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import cut
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from data_setup import create_dataloaders
from dataloading.decoders import decoder_for
from dataloading.draft_crops import DraftCrop, draft_ready, open_undecoded
from dataloading.images import load_image


def smooth_photo(width: int, height: int) -> Image.Image:
    """Waves: what a reduced decode may not lose."""
    across, down = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 7, height))
    waves = [np.sin(across), np.cos(down), np.sin(across + down)]
    return Image.fromarray((127 + 120 * np.stack(waves, -1)).astype(np.uint8))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "large.jpg"
    path.parent.mkdir()
    smooth_photo(1600, 1200).save(path, quality=92)
    return path


CROPS = [
    transforms.RandomResizedCrop(64),
    v2.RandomResizedCrop((48, 96), scale=(0.3, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
]


@pytest.mark.parametrize("crop", CROPS)
def test_the_same_boxes_give_the_same_pictures_from_fewer_pixels(
    crop: Any, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = pickle.loads(pickle.dumps(draft_ready(transforms.Compose([crop]))))
    load = decoder_for("pillow-draft", ready)
    drafted = []
    draft = Image.Image.draft
    for seed in range(12):
        torch.manual_seed(seed)
        usual = crop(load_image(photo))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        undecoded = load(photo)
        quick = ready(undecoded)
        assert torch.equal(torch.get_rng_state(), state)  # the same draws
        drafted.append(undecoded.size)
        assert (quick.mode, quick.size) == (usual.mode, usual.size)
        difference = np.abs(np.asarray(quick, float) - np.asarray(usual, float))
        assert difference.mean() < 2
    assert min(drafted) < (1600, 1200)  # some, at least, were decoded at a reduced size
    assert Image.Image.draft is draft


def test_what_is_small_or_no_jpeg_comes_out_as_ever(tmp_path: Path) -> None:
    crop = transforms.RandomResizedCrop(64)
    ready = draft_ready(crop)
    for name in ("small.jpg", "large.png"):
        smooth_photo(100, 90).save(tmp_path / name)
        torch.manual_seed(3)
        usual = crop(load_image(tmp_path / name))
        torch.manual_seed(3)
        assert np.array_equal(ready(open_undecoded(tmp_path / name)), usual)


def test_a_damaged_photo_is_named(photo: Path, tmp_path: Path) -> None:
    cut(photo)
    with pytest.raises(OSError, match=r"Cannot read the image .*large\.jpg.*truncated"):
        draft_ready(transforms.RandomResizedCrop(64))(open_undecoded(photo))
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(OSError, match=r"text\.jpg: not an image"):
        open_undecoded(tmp_path / "text.jpg")
    with pytest.raises(FileNotFoundError):
        open_undecoded(tmp_path / "none.jpg")


def test_other_transforms_stay_as_they_are() -> None:
    for other in (None, transforms.Resize(8), transforms.Compose([transforms.Resize(8)])):
        assert draft_ready(other) is other
    steps = draft_ready(
        transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])
    )
    assert [type(step) for step in steps.transforms] == [DraftCrop, transforms.ToTensor]


def test_create_dataloaders_crops_before_it_decodes(photo: Path) -> None:
    steps = [transforms.RandomResizedCrop(64), transforms.ToTensor()]
    folder = photo.parent.parent
    loaders = [
        create_dataloaders(folder, folder, transforms.Compose(steps), 1, 0, seed=2, decoder=decoder)
        for decoder in ("pillow", "pillow-draft")
    ]
    usual, quick = (next(iter(train))[0] for train, _, _ in loaders)
    assert (usual - quick).abs().mean() < 2 / 255
