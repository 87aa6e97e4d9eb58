"""Scanning image files, and reading what is odd about them."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import odd_images as odd
import pytest
import workloads
from PIL import Image, ImageOps

from dataloading import image_scan
from dataloading.image_headers import open_header
from dataloading.image_modes import read_orientation
from dataloading.image_scan import scan_images
from dataloading.images import image_dataset, load_image


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread, filter or switch of Pillow's is left over."""
    before = odd.pillow_globals()
    yield from workloads.leaves_nothing()
    assert odd.pillow_globals() == before


def scanned(path: Path, **options: object) -> image_scan.ImageScan:
    return scan_images(path, progress=False, **options)  # type: ignore[arg-type]


def problem(path: Path, **options: object) -> str:
    return scanned(path, **options).table["problem"][0]


# ------------------------------------------------------------------------------------- single files


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("a.png", "RGB", ""),
        ("a.png", "L", "grey"),
        ("a.png", "1", "grey"),
        ("a.png", "P", "palette"),
        ("a.png", "RGBA", "transparency"),
        ("a.png", "LA", "transparency"),
        ("a.jpg", "CMYK", "CMYK"),
        ("a.tif", "F", "32 bit"),
        ("a.tif", "LAB", "other mode"),
    ],
)
def test_modes(tmp_path: Path, name: str, mode: str, expected: str) -> None:
    scan = scanned(odd.save(tmp_path / name, mode=mode))
    row = scan.table.iloc[0]
    assert (row["problem"], row["mode"], row["width"], row["height"]) == (expected, mode, 60, 40)
    assert bool(row["handling"]) == bool(expected)
    assert scan.counts == {mode: 1}
    assert scan.bad == ()


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path, name: str) -> None:
    path = odd.sixteen_bit(tmp_path / name)
    assert problem(path) == "16 bit"
    ramp = np.asarray(load_image(path))[0, :, 0]
    assert np.abs(ramp.astype(int) - np.arange(256)).max() <= 1
    with Image.open(path) as image:  # what Pillow would have made of it
        assert np.asarray(image.convert("RGB")).mean() > 250


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.tif", "a.ppm"])
def test_a_cut_file_of_any_format_is_truncated(tmp_path: Path, name: str) -> None:
    scan = scanned(odd.cut(odd.save(tmp_path / name)))
    assert scan.problems == {"truncated": 1}
    assert np.isnan(scan.table["decode_s"][0])


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "a.bmp"])
def test_a_file_that_ends_in_its_header_is_bad(tmp_path: Path, name: str) -> None:
    path = odd.save(tmp_path / name)
    path.write_bytes(path.read_bytes()[:20])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of a cut TIFF
        scan = scanned(path)
    assert set(scan.problems) <= {"truncated", "damaged"}
    assert len(scan.bad) == 1


def test_a_wrong_extension_is_fine_and_said(tmp_path: Path) -> None:
    path = odd.save(tmp_path / "a.jpg", format="PNG")
    scan = scanned(path)
    assert (problem(path), scan.bad) == ("wrong extension", ())
    assert load_image(path).size == (60, 40)


def test_several_problems_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    odd.see_through(tmp_path / "a.png").rename(path)
    row = scanned(path).table.iloc[0]
    assert row["problem"] == "palette with transparency, wrong extension"
    assert "RGBA" in row["handling"]
    assert "fine" in row["handling"]


def test_an_animated_image(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    odd.photo().save(path, save_all=True, append_images=[odd.photo(seed=1)])
    assert "animated" in problem(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation(tmp_path: Path, orientation: int) -> None:
    for name in ("a.jpg", "a.png", "a.webp"):
        path = odd.tagged(tmp_path / name, orientation)
        assert ("orientation tag" in problem(path)) == (orientation != 1)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
        assert np.array_equal(load_image(path, upright=True), expected)


BROKEN = {
    "cut": (b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03\0\0\0\x01\0\x06\0\0", 6),
    "points beyond its end": (
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x0f\0\x02\0\0\0\x40\0\0\x40\0\0\0\0\0",
        None,
    ),
    "no Exif at all": (b"Exif\0\0garbage", None),
    "begins nowhere": (b"Exif\0\0II*\0\xff\xff\xff\xff", None),
}


@pytest.mark.filterwarnings(
    "ignore::UserWarning:PIL"
)  # Pillow's own, when it looks for a resolution
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_metadata_kills_nothing(tmp_path: Path, kind: str) -> None:
    data, orientation = BROKEN[kind]
    odd.photo(40, 20).save(tmp_path / "a.jpg", exif=data)
    scan = scanned(tmp_path / "a.jpg")
    assert scan.problems["broken metadata"] == 1
    assert scan.bad == ()
    size = (20, 40) if orientation == 6 else (40, 20)
    assert load_image(tmp_path / "a.jpg", upright=True).size == size


def test_whole_metadata_is_not_called_broken(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "a maker with a long name"
    exif[0x9286] = b"a comment"
    odd.photo().save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        assert read_orientation(image) == (None, False)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    scan = scanned([tmp_path / "gone.jpg", tmp_path / "folder.jpg"])  # type: ignore[arg-type]
    assert scan.problems == {"cannot be opened": 2}
    assert "gone.jpg" in scan.bad[0][1]


def test_nothing_can_be_read_of_a_file_cut_at_its_first_pixels(tmp_path: Path) -> None:
    path = odd.save(tmp_path / "a.png")
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"IDAT") + 6])
    with pytest.raises(OSError, match=r"a\.png: truncated before its first pixels"):
        load_image(path, load_truncated=True)


def test_text_is_no_image_even_with_load_truncated(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("truncated")
    with pytest.raises(OSError, match="not an image"):
        load_image(tmp_path / "a.jpg", load_truncated=True)


def test_a_part_is_turned_upright_too(tmp_path: Path) -> None:
    path = odd.cut(odd.tagged(tmp_path / "a.jpg", 6), 0.8)
    assert load_image(path, upright=True, load_truncated=True).size == (20, 40)
    dataset = image_dataset(tmp_path, upright=True, load_truncated=True)
    assert dataset[0][0].size == (20, 40)
    assert dataset.truncated_files == [str(path)]


# ---------------------------------------------------------------------------------- limits and sets


def test_limits_of_pixels(tmp_path: Path) -> None:
    path = odd.save(tmp_path / "a.png")  # 2400 pixels
    assert problem(path, max_pixels=2400) == ""
    assert problem(path, max_pixels=2399) == "very large"
    assert problem(path, max_pixels=1200) == "very large"
    assert problem(path, max_pixels=1199) == "far too large"


def test_pillows_own_limit_is_read_and_may_be_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = odd.save(tmp_path / "a.png")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert problem(path) == "far too large"
        patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        assert problem(path) == ""


def test_headers_only(tmp_path: Path) -> None:
    odd.cut(odd.save(tmp_path / "a.jpg"))
    odd.save(tmp_path / "b.jpg", mode="L")
    scan = scanned(tmp_path, decode=False)
    assert scan.problems == {"grey": 1}
    assert scan.table["decode_s"].isna().all()


def test_a_limit_spreads_over_all_files(tmp_path: Path) -> None:
    for number in range(10):
        odd.save(tmp_path / f"{number}.jpg")
    paths = scanned(tmp_path, limit=3).table["path"]
    assert [Path(path).stem for path in paths] == ["0", "3", "6"]


def test_what_may_be_scanned(tmp_path: Path) -> None:
    path = odd.save(tmp_path / "a" / "1.jpg")
    for given in (
        tmp_path,
        str(tmp_path),
        path,
        [path],
        iter([str(path)]),
        image_dataset(tmp_path),
    ):
        assert scanned(given).table["path"].tolist() == [str(path)]  # type: ignore[arg-type]
    odd.save(tmp_path / "__MACOSX" / "1.jpg")
    odd.save(tmp_path / "a" / ".hidden.jpg")
    assert len(scanned(tmp_path).table) == 1
    empty = scanned([])  # type: ignore[arg-type]
    assert (len(empty.table), empty.summary()) == (0, "0 files: 0 good, 0 bad")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        scan_images(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="No images"):
        scan_images(tmp_path)
    with pytest.raises(TypeError, match="got int"):
        scan_images(3)
    with pytest.raises(TypeError, match="got int"):
        scan_images([3])
    odd.save(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="limit"):
        scan_images(tmp_path, limit=0)
    with pytest.raises(ValueError, match="max_pixels"):
        scan_images(tmp_path, max_pixels=0)


def test_a_slow_file_that_was_only_unlucky_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        odd.save(tmp_path / f"{number}.jpg")
    look_at = image_scan.look_at

    def unlucky(path: str, *args: object) -> object:
        seen = look_at(path, *args)  # type: ignore[arg-type]
        if path.endswith("3.jpg"):
            seen.decode_s = 5.0  # somebody else had the processor
        return seen

    monkeypatch.setattr(image_scan, "look_at", unlucky)
    scan = scanned(tmp_path)
    assert scan.outliers == ()
    assert scan.table["decode_s"].max() < 5.0


def test_the_result_as_text_table_and_dict(tmp_path: Path) -> None:
    odd.cut(odd.save(tmp_path / "<cut>.jpg"))
    odd.save(tmp_path / "grey.png", mode="L")
    scan = scanned(tmp_path)
    assert scan.summary() == "2 files: 1 good, 1 bad (1 truncated); to know: 1 grey"
    page = scan._repr_html_()
    assert "&lt;cut&gt;.jpg" in page
    assert "load_truncated=True" in page
    plain = json.loads(json.dumps(scan.to_dict()))
    assert [row["problem"] for row in plain["table"]] == ["truncated", "grey"]
    assert plain["table"][0]["decode_s"] is None


def test_scans_in_several_threads(tmp_path: Path) -> None:
    for number in range(4):
        odd.save(tmp_path / f"{number}.jpg", seed=number)
    odd.cut(tmp_path / "0.jpg")
    odd.png_header(tmp_path / "big.png", 20_000, 10_000)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(scanned(tmp_path).problems)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"truncated": 1, "far too large": 1}] * 4


def test_opening_gives_what_pillow_gives(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "a.gif", "a.bmp", "a.tif", "a.webp", "a.ppm", "a.tga"):
        path = odd.save(tmp_path / name)
        with path.open("rb") as file, open_header(file, str(path)) as ours, Image.open(path) as own:
            assert (ours.format, ours.mode, ours.size) == (own.format, own.mode, own.size)
            assert np.array_equal(ours, own)
