"""Cases of bad and odd images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import odd_images as odd
import pytest
import torch
import workloads
from PIL import Image, ImageFile, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from dataloading.image_scan import is_outlier, scan_images
from dataloading.images import image_dataset, load_image
from dataloading.skipping import make_skipping


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread, filter or switch of Pillow's is left over."""
    before = odd.pillow_globals()
    yield from workloads.leaves_nothing()
    assert odd.pillow_globals() == before


def fill(folder: Path, count: int) -> None:
    for number in range(count):
        odd.save(folder / f"{number}.jpg", seed=number)


def names(files: Any) -> list[str]:
    return [Path(path).name for path, _ in files]


def test_a_14_1_exactly_the_cut_file_is_reported(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    odd.cut(tmp_path / "3.jpg")
    scan = scan_images(tmp_path, progress=False)
    assert names(scan.bad) == ["3.jpg"]
    assert "truncated" in scan.bad[0][1]
    assert "10 files: 9 good, 1 bad (1 truncated)" in repr(scan)


def test_a_14_2_text_and_an_empty_file_have_two_reasons(tmp_path: Path) -> None:
    fill(tmp_path, 8)
    (tmp_path / "text.jpg").write_text("<html>404 Not Found</html>")
    (tmp_path / "void.jpg").touch()
    scan = scan_images(tmp_path, progress=False)
    assert {problem: scan.problems[problem] for problem in ("not an image", "empty")} == {
        "not an image": 1,
        "empty": 1,
    }
    reasons = {Path(path).name: reason for path, reason in scan.bad}
    assert reasons["text.jpg"] == (
        "not an image: text that begins with '<html>404 Not Found</html>'"
    )
    assert "empty" in reasons["void.jpg"]
    assert "8 good, 2 bad" in scan.summary()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_14_3_cut_files_are_loaded_in_part_and_counted(tmp_path: Path, num_workers: int) -> None:
    fill(tmp_path, 6)
    cut = [str(odd.cut(tmp_path / f"{number}.jpg")) for number in (0, 2, 5)]
    assert [path for path, _ in scan_images(tmp_path, progress=False).bad] == cut
    strict = image_dataset(tmp_path, transforms.ToTensor())
    with pytest.raises(OSError, match=r"0\.jpg: image file is truncated"):
        strict[0]
    assert strict.truncated_files == []

    dataset = image_dataset(tmp_path, transforms.ToTensor(), load_truncated=True)
    for _ in range(2):  # a file counts once, however often it is loaded
        images = [
            images for images, _ in DataLoader(dataset, batch_size=3, num_workers=num_workers)
        ]
    assert torch.cat(images).shape == (6, 3, 40, 60)
    assert dataset.truncated_files == cut


def test_a_14_4_modes_are_tallied_and_converted(tmp_path: Path) -> None:
    for number, mode in enumerate([*["RGB"] * 6, "L", "RGBA", "CMYK", "P"]):
        odd.save(tmp_path / f"{number}.tif", mode=mode)
    scan = scan_images(tmp_path, progress=False)
    assert scan.counts == {"RGB": 6, "L": 1, "RGBA": 1, "CMYK": 1, "P": 1}
    assert scan.bad == ()
    images, _ = next(iter(DataLoader(image_dataset(tmp_path, transforms.ToTensor()), 10)))
    assert images.shape == (10, 3, 40, 60)


def test_a_14_6_a_tagged_photo_is_counted_and_turned_upright(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = odd.tagged(tmp_path / "turned.jpg", 6, size=(40, 20))
    scan = scan_images(tmp_path, progress=False)
    assert scan.problems == {"orientation tag": 1}
    assert scan.table.set_index("path").loc[str(path), "orientation"] == 6
    assert load_image(path).size == (40, 20)  # as ImageFolder has it
    upright = load_image(path, upright=True)
    assert upright.size == (20, 40)
    assert np.array_equal(upright, ImageOps.exif_transpose(Image.open(path)))


def test_a_14_7_huge_images_are_told_from_their_headers(tmp_path: Path) -> None:
    odd.png_header(tmp_path / "a.png", 102_638_475, 1)
    odd.png_header(tmp_path / "b.png", 20_000, 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan = scan_images(tmp_path, progress=False)
    problems = dict(zip(map(Path, scan.table["path"]), scan.table["problem"], strict=True))
    assert problems == {tmp_path / "a.png": "very large", tmp_path / "b.png": "far too large"}
    assert names(scan.bad) == ["b.png"]
    assert scan.table["width"].tolist() == [102_638_475, 20_000]
    # Pillow agrees
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(tmp_path / "a.png").close()
    with pytest.raises(Image.DecompressionBombError):
        Image.open(tmp_path / "b.png")


class SomeNone(Dataset):
    """Samples that are None up to a number."""

    def __init__(self, count: int = 12, none: int = 4) -> None:
        self.count, self.none = count, none

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return None if index < self.none else torch.tensor([float(index)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_14_8_an_empty_batch_never_reaches_the_model(num_workers: int) -> None:
    loader = make_skipping(SomeNone(), batch_size=4, num_workers=num_workers)
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match=r"Skipped 4 of 12 samples \(33 %\): sample 0") as caught:
        batches = [batch for batch in loader if len(model(batch)) == 4]
    assert torch.cat(batches).flatten().tolist() == list(range(4, 12))
    assert len(batches) == 2
    assert sum("Skipped" in str(one.message) for one in caught) == 1
    skipped = loader.skipped()
    assert (skipped.count, skipped.samples) == (4, 12)
    assert skipped.share == pytest.approx(1 / 3)
    assert [number for number, _ in skipped.files] == [0, 1, 2, 3]


def test_a_14_9_palettes_with_transparency_need_one_line(tmp_path: Path) -> None:
    for number in range(5):
        odd.see_through(tmp_path / f"{number}.png", seed=number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan = scan_images(tmp_path, progress=False)
        images, _ = next(iter(DataLoader(image_dataset(tmp_path, transforms.ToTensor()), 5)))
    assert images.shape == (5, 3, 40, 60)
    assert scan.bad == ()
    assert "5 palette with transparency" in scan.summary()
    assert "\n" not in scan.summary()


def test_a_14_10_the_file_that_is_slow_to_decode_is_listed(tmp_path: Path) -> None:
    assert is_outlier(20e-3, 1e-3)
    assert not is_outlier(9e-3, 1e-3)
    fill(tmp_path, 9)
    odd.photo(1200, 900).save(tmp_path / "slow.jpg")
    scan = scan_images(tmp_path, progress=False)
    assert names(scan.outliers) == ["slow.jpg"]
    assert scan.outliers[0][1] >= 10
    assert "1 slow to decode" in scan.summary()


def test_pillow_agrees_on_what_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("a.jpg", "progressive.jpg", "a.png", "a.bmp", "a.tif")]
    for path in paths:
        odd.cut(odd.save(path, **({"progressive": True} if "prog" in path.name else {})))
    ours = [np.asarray(load_image(path, load_truncated=True)) for path in paths]
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        for path, pixels in zip(paths, ours, strict=True):
            assert np.array_equal(pixels, np.asarray(Image.open(path).convert("RGB"))), path
