"""Transforms for tensors and in two parts: the same pictures, the same chance, clear refusals."""

from __future__ import annotations

import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.transforms import functional, v2

from dataloading.batch_transforms import BatchTransform, split_transform, tensor_ready
from dataloading.transform_steps import ToUint8

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NORMALIZE = transforms.Normalize(MEAN, STD)


def picture(height: int = 90, width: int = 130, seed: int = 0) -> torch.Tensor:
    """Smooth and unlike its mirror image: red grows to the right, green downwards."""
    red = torch.linspace(0, 255, width).expand(height, width)
    green = torch.linspace(0, 255, height)[:, None].expand(height, width)
    blue = torch.full((height, width), 17.0 * (seed % 15))
    return torch.stack([red, green, blue]).round().to(torch.uint8)


def as_pil(image: torch.Tensor) -> Image.Image:
    return functional.to_pil_image(image)


def seeded(transform: Callable[[Any], Any], image: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return transform(image)


def own_step(image: Any) -> Any:
    """A step that takes PIL images and tensors."""
    return image


def pil_only(image: Any) -> Any:
    return image.convert("L").convert("RGB")


def flattening(image: Image.Image) -> np.ndarray:
    return np.asarray(image)[::2]


COURSE = {
    "chapter 04": [
        transforms.Resize((64, 64)),
        transforms.RandomHorizontalFlip(p=0.5),
        transforms.ToTensor(),
    ],
    "TrivialAugment": [
        transforms.Resize((64, 64)),
        transforms.TrivialAugmentWide(num_magnitude_bins=31),
        transforms.ToTensor(),
    ],
    "plain path": [
        transforms.RandomResizedCrop(48),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        NORMALIZE,
    ],
    "v2": [
        v2.ToImage(),
        v2.RandomResizedCrop(48),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ],
    "v2 with PIL": [
        v2.RandomCrop(48),
        v2.PILToTensor(),
        v2.ConvertImageDtype(torch.float32),
        v2.ToPureTensor(),
    ],
}


@pytest.mark.parametrize("name", COURSE)
def test_tensors_take_the_same_crops_and_flips_as_pil_images(name: str) -> None:
    whole = transforms.Compose(COURSE[name])
    ready = tensor_ready(whole)
    for seed in range(30):
        image = picture(seed=seed)
        expected = seeded(whole, as_pil(image), seed)
        got = seeded(ready, image, seed)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        # A level of 255 for rounding; another crop or flip is tens of levels off.
        allowed = 4 / 255 / min(STD) if name != "TrivialAugment" else 0.15
        assert (got - expected).abs().mean() < allowed, seed


@pytest.mark.parametrize("seed", range(20))
def test_crop_boxes_and_flips_are_those_of_the_pil_path(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[tuple[int, ...]] = []
    draw = transforms.RandomResizedCrop.get_params

    def spy(*arguments: Any) -> Any:
        boxes.append(tuple(draw(*arguments)))
        return boxes[-1]

    monkeypatch.setattr(transforms.RandomResizedCrop, "get_params", staticmethod(spy))
    whole = transforms.Compose(COURSE["plain path"][:3])
    first = seeded(whole, as_pil(picture()), seed)
    second = seeded(tensor_ready(whole), picture(), seed)
    assert len(boxes) == 2
    assert boxes[0] == boxes[1]
    is_flipped = [bool(image[0, 0, 0] > image[0, 0, -1]) for image in (first, second)]
    assert is_flipped[0] == is_flipped[1]


@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")
@pytest.mark.parametrize("size", [64, (40, 72), 200])
def test_resized_tensors_are_resized_pil_images(size: Any) -> None:
    noisy = picture(301, 257) ^ torch.randint(0, 64, (3, 301, 257), dtype=torch.uint8)
    step = transforms.Resize(size, antialias=False)  # on PIL images this changes nothing
    expected = functional.pil_to_tensor(step(as_pil(noisy))).int()
    difference = (tensor_ready(step)(noisy).int() - expected).abs()
    assert difference.float().mean() < 0.5
    assert difference.max() <= 2


def test_resizing_of_tensors_without_antialias_stays_so() -> None:
    whole = transforms.Compose([transforms.ToTensor(), transforms.Resize(20, antialias=False)])
    expected = whole(as_pil(picture(301, 257)))
    assert torch.equal(tensor_ready(whole)(picture(301, 257)), expected)


def test_the_transform_of_pretrained_weights_works_in_both_ways() -> None:
    from torchvision.models import ResNet18_Weights

    preset = ResNet18_Weights.DEFAULT.transforms()
    image = picture(300, 400)
    sample_transform, batch_transform = split_transform(tensor_ready(preset))
    sample = sample_transform(image)
    assert sample.dtype == torch.uint8
    torch.testing.assert_close(
        batch_transform(sample[None])[0], preset(as_pil(image)), atol=0.02, rtol=0
    )
    sample_transform, batch_transform = split_transform(preset)
    halves = batch_transform(sample_transform(as_pil(image)))
    torch.testing.assert_close(halves, preset(as_pil(image)), atol=1e-5, rtol=0)


def test_tensor_ready_changes_nothing_of_its_argument() -> None:
    whole = transforms.Compose([transforms.Resize(8, antialias=False), transforms.ToTensor()])
    before = repr(whole)
    tensor_ready(whole)
    split_transform(whole)
    assert repr(whole) == before
    assert tensor_ready(None) is None
    ready = tensor_ready(whole)
    assert tensor_ready(ready) is ready


def test_a_step_that_needs_a_pil_image_is_named() -> None:
    nested = transforms.Compose([transforms.Lambda(pil_only), transforms.ToTensor()])
    whole = transforms.Compose([transforms.CenterCrop(32), nested])
    with pytest.raises(TypeError, match=r"transform\.transforms\[1\]\.transforms\[0\] \(Lambda\)"):
        tensor_ready(whole)(picture())
    with pytest.raises(TypeError, match=r'transform \(pil_only\).*decoder="pillow"'):
        tensor_ready(pil_only)(picture())
    with pytest.raises(TypeError, match=r"transform\[0\] \(Lambda\)"):
        tensor_ready(nn.Sequential(v2.Lambda(pil_only)))(picture())


def test_errors_that_are_not_about_tensors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="larger than input image size"):
        tensor_ready(transforms.RandomCrop(500))(picture())


def test_steps_of_ones_own_stay_and_pil_in_the_middle_works() -> None:
    steps = [own_step, transforms.ToPILImage(), transforms.Lambda(pil_only), transforms.ToTensor()]
    image = picture()
    expected = transforms.ToTensor()(pil_only(as_pil(image)))
    assert torch.equal(tensor_ready(transforms.Compose(steps))(image), expected)


def test_a_sample_that_became_an_array_is_refused() -> None:
    steps = [transforms.Lambda(np.asarray), transforms.ToTensor()]
    with pytest.raises(TypeError, match="a step before it gave"):
        tensor_ready(transforms.Compose(steps))(picture())


@pytest.mark.parametrize("name", COURSE)
@pytest.mark.parametrize("kind", ["pil", "tensor"])
def test_both_parts_give_what_the_whole_gives(name: str, kind: str) -> None:
    whole = transforms.Compose(COURSE[name])
    if kind == "tensor":
        whole = tensor_ready(whole)
    images = [picture(seed=seed) for seed in range(4)]
    images = [as_pil(image) for image in images] if kind == "pil" else images
    sample_transform, batch_transform = split_transform(whole)
    expected = torch.stack([seeded(whole, image, 7) for image in images])
    batch = default_collate([(seeded(sample_transform, image, 7), 1) for image in images])
    assert batch[0].dtype == torch.uint8
    converted, labels = batch_transform(batch)
    assert converted.dtype == torch.float32
    torch.testing.assert_close(converted, expected, atol=1e-6, rtol=1e-6)
    assert labels.tolist() == [1, 1, 1, 1]


def test_several_normalisations_become_one() -> None:
    steps = [transforms.ToTensor(), NORMALIZE, transforms.Normalize([0.5], [2.0])]
    whole = transforms.Compose(steps)
    sample_transform, batch_transform = split_transform(whole)
    got = batch_transform(sample_transform(as_pil(picture()))[None])[0]
    torch.testing.assert_close(got, whole(as_pil(picture())), atol=1e-6, rtol=1e-6)
    assert "mean=" in repr(batch_transform)


@pytest.mark.parametrize("array", [np.arange(60, dtype=np.uint8).reshape(4, 5, 3), np.eye(4) > 0])
def test_arrays_are_converted_as_to_tensor_does(array: np.ndarray) -> None:
    array = array.astype(np.uint8)
    sample_transform, batch_transform = split_transform(transforms.ToTensor())
    got = batch_transform(sample_transform(array))
    torch.testing.assert_close(got, transforms.ToTensor()(array), atol=1e-7, rtol=0)


def test_images_of_more_than_eight_bits_are_refused_rather_than_changed() -> None:
    sample_transform, _ = split_transform(transforms.ToTensor())
    with pytest.raises(TypeError, match=r"8 bits a channel.*I;16"):
        sample_transform(Image.fromarray(np.zeros((4, 4), dtype=np.uint16)))
    with pytest.raises(TypeError, match=r"8 bits a channel.*float32"):
        sample_transform(torch.zeros(3, 4, 4))


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([transforms.ToTensor(), transforms.RandomErasing(), NORMALIZE], r"\[1\] \(RandomErasing"),
        ([transforms.ToTensor(), NORMALIZE, own_step], r"\[2\] \(own_step"),
        ([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize(4)], r"\[2\] \(Resize"),
    ],
)
def test_what_cannot_move_keeps_all_in_the_workers_and_is_named(steps: Any, named: str) -> None:
    whole = transforms.Compose(steps)
    with pytest.warns(UserWarning, match=r"transform\.transforms" + named):
        sample_transform, batch_transform = split_transform(whole)
    assert sample_transform is whole
    assert type(batch_transform) is nn.Identity


@pytest.mark.parametrize(
    "transform",
    [
        None,
        own_step,
        transforms.CenterCrop(4),
        v2.ToDtype(torch.float16, scale=True),
        v2.ToDtype(torch.float32),  # without scaling: 0 to 255
        transforms.Compose([transforms.PILToTensor()]),
    ],
)
def test_without_a_conversion_at_the_end_nothing_moves(transform: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample_transform, batch_transform = split_transform(transform)
    assert sample_transform is transform
    assert type(batch_transform) is nn.Identity


def test_a_standard_deviation_of_0_is_refused() -> None:
    steps = [transforms.ToTensor(), transforms.Normalize([0.5], [0.0])]
    with pytest.raises(ValueError, match=r"transforms\[1\] \(Normalize\)"):
        split_transform(transforms.Compose(steps))


Pair = namedtuple("Pair", ["images", "labels"])


@pytest.mark.parametrize(
    "make",
    [
        lambda images, labels: (images, labels),
        lambda images, labels: [images, labels],
        lambda images, labels: Pair(images, labels),
        lambda images, labels: {"pixels": images, "labels": labels},
    ],
)
def test_batches_keep_their_kind_and_labels(make: Callable[[Any, Any], Any]) -> None:
    images = torch.full((2, 3, 4, 5), 255, dtype=torch.uint8)
    labels = torch.tensor([3, 200], dtype=torch.uint8)
    batch = make(images, labels)
    changed = BatchTransform()(batch)
    assert type(changed) is type(batch)
    values = list(changed.values()) if isinstance(changed, dict) else list(changed)
    assert torch.equal(values[0], torch.ones(2, 3, 4, 5))
    assert values[1] is labels
    assert images.dtype == torch.uint8  # the batch that came is not changed
    assert images.min() == 255


def test_a_batch_is_converted_once() -> None:
    once = BatchTransform()(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        BatchTransform()(once)
    with pytest.raises(TypeError, match="uint8"):
        BatchTransform()({})


def test_it_moves_to_the_device_of_the_batch() -> None:
    batch_transform = BatchTransform(MEAN, STD)
    changed = batch_transform(torch.zeros(2, 3, 4, 4, dtype=torch.uint8, device="meta"))
    assert changed.device.type == "meta"
    assert batch_transform.scale.device.type == "meta"


def test_it_can_be_the_first_module_of_a_model() -> None:
    model = nn.Sequential(BatchTransform(MEAN, STD), nn.Conv2d(3, 2, 1))
    assert not any(name.startswith("0.") for name in model.state_dict())
    model(torch.zeros(1, 3, 4, 4, dtype=torch.uint8)).sum().backward()
    assert repr(model[0]).startswith("BatchTransform(uint8 to float32 in [0, 1], mean=(0.485")


@pytest.mark.parametrize("name", COURSE)
def test_both_parts_can_be_sent_to_workers(name: str) -> None:
    parts = split_transform(tensor_ready(transforms.Compose(COURSE[name])))
    again = pickle.loads(pickle.dumps(parts))
    sample = seeded(parts[0], picture(), 3)
    assert torch.equal(sample, seeded(again[0], picture(), 3))
    assert torch.equal(parts[1](sample), again[1](sample))
    assert repr(again[1]) == repr(parts[1])
    assert repr(ToUint8()) in repr(again[0])


def test_a_normalisation_that_stays_behind_is_told() -> None:
    steps = [v2.PILToTensor(), v2.ToDtype(torch.float32), v2.Normalize([0.5] * 3, [0.5] * 3)]
    whole = v2.Compose(steps)
    with pytest.warns(UserWarning, match=r"transform\.transforms\[2\].*no step before it converts"):
        sample_transform, batch_transform = split_transform(whole)
    assert sample_transform is whole
    assert isinstance(batch_transform, nn.Identity)


@pytest.mark.parametrize("wrong", ["x", [transforms.ToTensor()], transforms.ToTensor])
def test_what_is_no_transform_cannot_be_split(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be a transform of one image"):
        split_transform(wrong)
