"""Decoders: the pictures that Pillow gives, its error texts, and reduced sizes only where allowed."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import functional, v2

from dataloading import decoders
from dataloading.batch_transforms import tensor_ready
from dataloading.decoders import DECODERS, DraftLoader, decoder_for, load_tensor
from dataloading.images import ImageFiles, load_image
from dataloading.sample_images import create_sample_images

# torchvision hands its decoders over to another package; they work as long as they are there.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def photo(width: int = 90, height: int = 61) -> Image.Image:
    """Smooth colours, so that a reduced size still looks alike; unlike its mirror image."""
    across = np.linspace(0, 255, width)[None].repeat(height, axis=0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, axis=1)
    waves = 127 + 120 * np.sin(across / 9) * np.cos(down / 17)
    return Image.fromarray(np.stack([across, down, waves], axis=2).astype(np.uint8))


def with_alpha() -> Image.Image:
    image = photo().convert("RGBA")
    image.putalpha(image.getchannel("R"))
    return image


def grey16() -> Image.Image:
    return Image.fromarray(np.arange(60 * 50, dtype=np.uint16).reshape(60, 50) * 20)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS: dict[str, tuple[Callable[[], Image.Image], dict[str, object]]] = {
    "rgb.jpg": (photo, {"quality": 90}),
    "chroma.jpg": (photo, {"quality": 75, "subsampling": 2}),
    "progressive.jpg": (photo, {"progressive": True}),
    "grey.jpg": (lambda: photo().convert("L"), {}),
    "cmyk.jpg": (lambda: photo().convert("CMYK"), {}),
    "turned.jpg": (photo, {"exif": turned()}),
    "comment.jpg": (photo, {"comment": b"\xff\xc0" * 300}),
    "rgb.png": (photo, {}),
    "alpha.png": (with_alpha, {}),
    "grey.png": (lambda: photo().convert("L"), {}),
    "grey-alpha.png": (lambda: with_alpha().convert("LA"), {}),
    "black-white.png": (lambda: photo().convert("1"), {}),
    "palette.png": (lambda: photo().quantize(40), {}),
    "palette-4-bit.png": (lambda: photo().quantize(9), {}),
    "palette-clear.png": (lambda: photo().quantize(40), {"transparency": 3}),
    "16-bit.png": (grey16, {}),
    "16-bit.tif": (grey16, {}),
    "rgb.tif": (photo, {}),
    "rgb.bmp": (photo, {}),
    "rgb.webp": (photo, {"quality": 80}),
}


@pytest.mark.parametrize("name", KINDS)
def test_tensors_are_what_pillow_decodes(name: str, tmp_path: Path) -> None:
    make, options = KINDS[name]
    make().save(tmp_path / name, **options)
    expected = functional.pil_to_tensor(load_image(tmp_path / name))
    got = load_tensor(tmp_path / name)
    assert got.dtype == torch.uint8
    assert got.shape == expected.shape
    difference = (got.int() - expected.int()).abs().float().mean().item()
    assert difference < (1.0 if name.endswith(("jpg", "webp")) else 1e-9)


def test_a_png_with_a_damaged_byte_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    photo().save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(OSError, match=r"Cannot read the image .*a\.png"):
        load_tensor(tmp_path / "a.png")


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_to_be_deprecated(tmp_path: Path) -> None:
    photo().save(tmp_path / "a.jpg")
    assert decoder_for("torchvision")(tmp_path / "a.jpg").dtype == torch.uint8


def test_only_jpegs_that_torchvision_reads_alike_do_not_go_through_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through: list[str] = []

    def spy(path: Path) -> Image.Image:
        through.append(Path(path).name)
        return load_image(path)

    monkeypatch.setattr(decoders, "load_image", spy)
    for name, (make, options) in KINDS.items():
        make().save(tmp_path / name, **options)
        load_tensor(str(tmp_path / name))
    assert through == [name for name in KINDS if not name.endswith(".jpg") or name == "cmyk.jpg"]


def test_a_wrong_extension_does_not_matter(tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.jpg")
    photo().save(tmp_path / "b.gif")
    (tmp_path / "b.gif").rename(tmp_path / "b.png")
    for name in ("a.jpg", "b.png"):
        expected = functional.pil_to_tensor(load_image(tmp_path / name))
        assert torch.equal(load_tensor(tmp_path / name), expected)


def jpeg_bytes() -> bytes:
    file = io.BytesIO()
    photo(300, 200).save(file, "JPEG")
    return file.getvalue()


BAD = {
    "cut.jpg": lambda: jpeg_bytes()[: len(jpeg_bytes()) * 6 // 10],
    "header-only.jpg": lambda: jpeg_bytes()[:200],
    "start.jpg": lambda: b"\xff\xd8\xff",
    "text.jpg": lambda: b"no image at all",
    "empty.jpg": lambda: b"",
    "start.png": lambda: b"\x89PNG\r\n\x1a\n",
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("decoder", DECODERS)
def test_errors_name_the_file_as_those_of_load_image_do(
    name: str, decoder: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(BAD[name]())
    with pytest.raises(OSError, match="Cannot read the image") as expected:
        load_image(path)
    with pytest.raises(OSError, match="Cannot read the image") as got:
        decoder_for(decoder, transforms.Resize(8))(path)
    assert str(got.value) == str(expected.value)
    assert name in str(got.value)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_missing_file_is_named(decoder: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        decoder_for(decoder, transforms.Resize(8))(tmp_path / "gone.jpg")


def test_pillows_limit_of_pixels_holds_for_tensors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("big.jpg", "big.png"):
        photo().save(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
            with pytest.raises(OSError, match="decompression bomb"):
                load_tensor(tmp_path / name)
            patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
            assert load_tensor(tmp_path / name).shape == (3, 61, 90)


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="pillow, pillow-draft, torchvision"):
        decoder_for("turbo")


def test_a_torchvision_without_decoders_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Couldn't load the image extension.")

    monkeypatch.setattr(decoders, "_decode_jpeg", broken)
    with pytest.raises(RuntimeError, match=r'image extension.*decoder="pillow"'):
        decoder_for("torchvision")


# --------------------------------------------------------------------------------- reduced decoding


@pytest.mark.parametrize("size", [(4000, 3000), (1801, 2201), (1301, 999)])
@pytest.mark.parametrize("target", [224, (200, 300)])
def test_a_13_7_a_reduced_decode_gives_the_shape_and_the_picture_of_a_full_one(
    size: tuple[int, int], target: int | tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "large.jpg"
    photo(*size).save(path, quality=90)
    resize = transforms.Resize(target)
    loader = decoder_for("pillow-draft", transforms.Compose([resize, transforms.ToTensor()]))
    reduced = loader(path)
    assert reduced.width < size[0]
    shorter = target if isinstance(target, int) else min(target)
    assert min(reduced.size) >= 2 * shorter
    full, small = resize(load_image(path)), resize(reduced)
    assert small.size == full.size
    difference = np.asarray(full, dtype=float) - np.asarray(small, dtype=float)
    assert np.abs(difference).mean() < 2.0


def test_photos_that_are_small_enough_and_other_files_are_read_in_full(tmp_path: Path) -> None:
    loader = DraftLoader(64)
    photo(200, 180).save(tmp_path / "small.jpg")
    photo(600, 500).save(tmp_path / "large.png")
    assert loader(tmp_path / "small.jpg").size == (200, 180)
    assert loader(tmp_path / "large.png").size == (600, 500)


@pytest.mark.parametrize(
    "transform",
    [
        transforms.Resize(32),
        v2.Resize([32]),
        transforms.Compose([v2.Compose([v2.ToImage(), v2.Resize(32)]), v2.RandomCrop(32)]),
        torch.nn.Sequential(transforms.Resize(32)),
    ],
)
def test_a_resize_at_the_start_allows_reduced_sizes(transform: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(decoder_for("pillow-draft", transform)) == "DraftLoader(32)"


def test_the_transform_of_pretrained_weights_allows_reduced_sizes() -> None:
    from torchvision.models import ResNet18_Weights

    assert repr(decoder_for("pillow-draft", ResNet18_Weights.DEFAULT.transforms())) == (
        "DraftLoader(256)"
    )


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (None, "no transform"),
        (
            transforms.Compose([transforms.RandomResizedCrop(8)]),
            r"transform\.transforms\[0\] is RandomResizedCrop",
        ),
        (transforms.Compose([transforms.CenterCrop(8), transforms.Resize(4)]), "is CenterCrop"),
        (transforms.Resize(8, max_size=12), "transform is Resize"),
        (functional.to_tensor, "transform is to_tensor"),
    ],
)
def test_where_the_transform_does_not_allow_it_a_warning_says_why(
    transform: object, reason: str
) -> None:
    with pytest.warns(UserWarning, match=reason) as caught:
        loader = decoder_for("pillow-draft", transform)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert loader is load_image


# -------------------------------------------------------------------------------------- in a loader


@pytest.mark.parametrize("decoder", DECODERS)
def test_loaders_can_be_sent_to_spawned_workers(decoder: str, tmp_path: Path) -> None:
    root = create_sample_images(tmp_path / "photos", images=4, size=64)
    transform = transforms.Compose([transforms.Resize(16), transforms.ToTensor()])
    dataset = ImageFiles(root, tensor_ready(transform) if decoder == "torchvision" else transform)
    expected = torch.stack([ImageFiles(root, transform)[i][0] for i in range(4)])
    dataset.loader = pickle.loads(pickle.dumps(decoder_for(decoder, transform)))
    workers = 1 if decoder == "torchvision" else 0  # once is enough: spawned workers start slowly
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    images, _ = next(iter(loader))
    assert (images - expected).abs().mean() < 2 / 255
