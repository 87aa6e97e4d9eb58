"""Image folders, DataLoaders, sample photos and what to start from."""

import dataclasses
import doctest
import inspect
import json
import pickle
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchvision import datasets, transforms

import data_setup
from data_setup import (
    HARDWARE_PRESETS,
    IMAGE_RECIPES,
    NUM_WORKERS,
    SlowDataset,
    burn_cpu,
    can_pin_memory,
    check_images,
    create_dataloaders,
    create_sample_images,
    image_dataset,
    load_image,
    recipe_settings,
    rule_of_thumb_workers,
    seed_worker,
)
from dataloading import faults, sample_images
from dataloading.machine import usable_cpu_count
from dataloading.settings import LoaderSettings

TO_TENSOR = transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])
RANDOM = transforms.Compose(
    [
        transforms.RandomResizedCrop(8, antialias=True),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
)


def save_image(path, number=0, mode="RGB", size=(24, 20)):
    """A small image, different for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def fill(root, classes=("a", "b"), images=3):
    """`images` files in each class folder."""
    for position, name in enumerate(classes):
        for number in range(images):
            save_image(root / name / f"{number}.jpg", number=position * images + number)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve images for training and six for testing, in a folder with an awkward name."""
    root = tmp_path_factory.mktemp("photos") / "my photos für köln"
    fill(root / "train", classes=("pizza", "steak", "sushi"), images=4)
    fill(root / "test", classes=("pizza", "steak", "sushi"), images=2)
    return root


def stream(dataloader, epochs=1):
    """All batches of some epochs as one pair of tensors."""
    batches = [batch for _ in range(epochs) for batch in dataloader]
    return torch.cat([images for images, _ in batches]), torch.cat([y for _, y in batches])


def names(dataset):
    return [Path(path).relative_to(dataset.root).as_posix() for path, _ in dataset.samples]


# ------------------------------------------------------------------------------- create_dataloaders


def test_drop_in_for_the_course(photos):
    parameters = inspect.signature(create_dataloaders).parameters.values()
    first_five = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in first_five] == [
        "train_dir",
        "test_dir",
        "transform",
        "batch_size",
        "num_workers",
    ]
    assert first_five[-1].default == NUM_WORKERS == usable_cpu_count()

    train, test, class_names = create_dataloaders(
        str(photos / "train"), str(photos / "test"), TO_TENSOR, 5, 0
    )
    assert class_names == ["pizza", "steak", "sushi"]
    assert isinstance(train.dataset, datasets.ImageFolder)
    assert isinstance(train.sampler, RandomSampler)
    assert isinstance(test.sampler, SequentialSampler)
    assert (len(train), len(test), train.batch_size) == (3, 2, 5)
    images, labels = stream(test)
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert sorted(stream(train)[1].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_same_samples_as_image_folder(photos):
    reference = datasets.ImageFolder(photos / "train", transform=TO_TENSOR)
    ours = image_dataset(photos / "train", TO_TENSOR)
    assert ours.samples == ours.imgs == reference.samples
    assert ours.targets == reference.targets
    assert ours.class_to_idx == reference.class_to_idx
    assert all(torch.equal(ours[i][0], reference[i][0]) for i in range(len(reference)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_warnings_on_a_machine_without_accelerator(photos, monkeypatch, num_workers):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    asked = LoaderSettings(num_workers=num_workers, pin_memory=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for settings in (None, asked):
            train, test, _ = create_dataloaders(
                photos / "train", photos / "test", TO_TENSOR, 4, num_workers, settings=settings
            )
            assert not train.pin_memory
            stream(train)
            stream(test)
    texts = [str(w.message) for w in caught if "multi-threaded" not in str(w.message)]
    assert texts == []  # (Python 3.12 warns about every fork of a process with threads)


@pytest.mark.parametrize(
    ("accelerator", "device", "pinned"),
    [
        (None, None, False),
        ("cuda", None, True),
        ("cuda", "cuda:1", True),
        ("cuda", "cpu", False),
        ("xpu", torch.device("xpu"), True),
        ("mps", None, False),
        ("mps", "mps", False),
    ],
)
def test_pinned_only_where_it_helps(photos, monkeypatch, accelerator, device, pinned):
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert can_pin_memory(device) is pinned
    train, test, _ = create_dataloaders(
        photos / "train", photos / "test", TO_TENSOR, 4, 0, device=device
    )
    assert train.pin_memory is test.pin_memory is pinned
    off = LoaderSettings(pin_memory=False)
    train, _, _ = create_dataloaders(
        photos / "train", photos / "test", TO_TENSOR, 4, 0, settings=off, device=device
    )
    assert train.pin_memory is False


def test_settings_take_the_place_of_the_arguments(photos):
    settings = LoaderSettings(
        num_workers=1, batch_size=3, prefetch_factor=4, persistent_workers=True, in_order=False
    )
    train, test, _ = create_dataloaders(
        photos / "train", photos / "test", TO_TENSOR, 8, 0, settings=settings
    )
    for loader in (train, test):
        assert LoaderSettings.of(loader) == settings
    train, _, _ = create_dataloaders(
        photos / "train", photos / "test", TO_TENSOR, 8, settings=LoaderSettings()
    )
    assert (train.num_workers, train.batch_size) == (0, 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_11_6_same_seed_same_stream(photos, num_workers):
    def run(seed):
        torch.manual_seed(random.randrange(10**6))  # what else the program did must not matter
        train, test, _ = create_dataloaders(
            photos / "train", photos / "test", RANDOM, 4, num_workers, seed=seed
        )
        return stream(train, epochs=2), stream(test)

    (first, labels), (first_test, _) = run(seed=7)
    (second, again), (second_test, _) = run(seed=7)
    assert torch.equal(first, second)
    assert torch.equal(labels, again)
    assert torch.equal(first_test, second_test)
    assert not torch.equal(first, run(seed=8)[0][0])
    assert not torch.equal(first[:12], first[12:])  # the second epoch is another one


def test_seed_leaves_the_random_numbers_of_the_program_alone(photos):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    dataset = data_setup.ImageFiles(photos / "train", RANDOM, seed=3)
    first = dataset[0][0]
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(dataset[0][0], first)  # but samples go on drawing new ones


def test_seed_worker_seeds_numpy_and_random():
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        drawn = []
        for seed in (2**40 + 5, 2**40 + 5, 6):
            torch.manual_seed(seed)
            seed_worker(0)
            drawn.append((np.random.rand(), random.random()))
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_10_7_loaders_work_under_every_start_method(photos, method):
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this platform")
    settings = LoaderSettings(num_workers=1, multiprocessing_context=method)
    train, test, _ = create_dataloaders(
        photos / "train", photos / "test", TO_TENSOR, 4, settings=settings, seed=1
    )
    for loader in (train, test):
        for part in (loader.dataset, loader.collate_fn, loader.worker_init_fn):
            pickle.loads(pickle.dumps(part))
    images, labels = stream(train)
    assert images.shape == (12, 3, 16, 16)
    assert sorted(labels.tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_labels_are_those_of_training(tmp_path):
    fill(tmp_path / "train", classes=("a", "b", "c"), images=1)
    fill(tmp_path / "test", classes=("c", "a"), images=1)
    _, test, class_names = create_dataloaders(
        tmp_path / "train", tmp_path / "test", TO_TENSOR, 4, 0
    )
    assert class_names == test.dataset.classes == ["a", "b", "c"]
    assert stream(test)[1].tolist() == [0, 2]


def test_class_that_training_lacks_is_named(tmp_path):
    fill(tmp_path / "train", classes=("a", "b"), images=1)
    fill(tmp_path / "test", classes=("a", "B"), images=1)
    with pytest.raises(ValueError, match=r"test has classes .* lacks: B\. Known are: a, b"):
        create_dataloaders(tmp_path / "train", tmp_path / "test", TO_TENSOR, 4, 0)


def test_two_flat_folders_are_one_class(tmp_path):
    for part in ("train", "test"):
        save_image(tmp_path / part / "1.jpg")
    train, test, class_names = create_dataloaders(
        tmp_path / "train", tmp_path / "test", TO_TENSOR, 4, 0
    )
    assert class_names == ["train"]
    assert stream(train)[1].tolist() == stream(test)[1].tolist() == [0]


def test_single_image_and_a_batch_larger_than_the_set(tmp_path):
    save_image(tmp_path / "1.jpg")
    train, _, _ = create_dataloaders(tmp_path, tmp_path, TO_TENSOR, 32, 0)
    assert [images.shape[0] for images, _ in train] == [1]


# ------------------------------------------------------------------------------------ image folders


def test_a_19_3_checkpoint_folders_are_no_classes(tmp_path):
    fill(tmp_path, classes=("b", "a", ".ipynb_checkpoints"))
    fill(tmp_path / "a", classes=(".ipynb_checkpoints",))
    dataset = image_dataset(tmp_path)
    assert dataset.classes == ["a", "b"]
    assert dataset.class_to_idx == {"a": 0, "b": 1}
    assert len(dataset) == 6


def test_a_19_4_what_systems_leave_behind_is_no_data(tmp_path):
    fill(tmp_path)
    before = names(image_dataset(tmp_path))
    for clutter in [".DS_Store", "a/.DS_Store", "__MACOSX/a/._0.jpg", "a/._0.jpg", "b/Thumbs.db"]:
        path = tmp_path / clutter
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"clutter")
    save_image(tmp_path / "__MACOSX" / "a" / "whole.jpg")
    assert names(image_dataset(tmp_path)) == before
    assert len(before) == 6


@pytest.mark.parametrize("clutter", [None, ".DS_Store", "notes.txt", "__MACOSX/a.jpg", "sub/x.txt"])
def test_a_19_5_empty_folder_is_named_in_full(tmp_path, monkeypatch, clutter):
    root = tmp_path / "no images ü"
    root.mkdir()
    if clutter:
        (root / clutter).parent.mkdir(exist_ok=True)
        (root / clutter).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        create_dataloaders("no images ü", "no images ü", None, 4)
    assert f"No images found in {root}" in str(caught.value)
    for expected in ("folder/class/image.jpg", "directly in the folder", ".jpg, .jpeg, .png"):
        assert expected in str(caught.value)


def test_missing_folder_and_file_are_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_image(tmp_path / "photo.jpg")
    with pytest.raises(FileNotFoundError) as caught:
        image_dataset("nowhere")
    assert f"no folder {tmp_path / 'nowhere'}." in str(caught.value)
    with pytest.raises(ValueError, match="is a file, not a folder") as caught_too:
        image_dataset("photo.jpg")
    assert str(tmp_path / "photo.jpg") in str(caught_too.value)


def test_class_without_images_is_named(tmp_path):
    fill(tmp_path)
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError, match="No images found for the class c in"):
        image_dataset(tmp_path)


def test_flat_folder_is_one_class_with_its_name(tmp_path):
    root = tmp_path / "holiday 2024 ü"
    save_image(root / "b.PNG")
    save_image(root / "a.JPG")
    save_image(root / "ü ß.webp")
    (root / "notes").mkdir()
    (root / "readme.txt").touch()
    dataset = image_dataset(root, TO_TENSOR)
    assert dataset.classes == ["holiday 2024 ü"]
    assert names(dataset) == ["a.JPG", "b.PNG", "ü ß.webp"]
    assert all(image.shape == (3, 16, 16) and label == 0 for image, label in dataset)


def test_hidden_parent_folders_and_the_home_folder_are_fine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    fill(tmp_path / ".cache" / "photos")
    assert len(image_dataset("~/.cache/photos")) == 6


def test_deeper_folders_belong_to_their_class(tmp_path):
    save_image(tmp_path / "a" / "2020" / "1.jpg")
    save_image(tmp_path / "a" / "1.jpg")
    save_image(tmp_path / "1.jpg")  # beside the class folders: ignored, as ImageFolder does
    assert names(image_dataset(tmp_path)) == ["a/1.jpg", "a/2020/1.jpg"]
    assert image_dataset(tmp_path).samples == datasets.ImageFolder(tmp_path).samples


@pytest.mark.skipif(sys.platform == "win32", reason="links need special rights on Windows")
def test_linked_folders_are_followed_once(tmp_path):
    fill(tmp_path / "real", classes=("a", "b"), images=1)
    root = tmp_path / "links"
    root.mkdir()
    (root / "a").symlink_to(tmp_path / "real" / "a")
    (root / "b").symlink_to(tmp_path / "real" / "b")
    (tmp_path / "real" / "a" / "up").symlink_to(tmp_path / "real" / "b")
    (tmp_path / "real" / "b" / "down").symlink_to(tmp_path / "real" / "a")  # a circle
    assert names(image_dataset(root)) == ["a/0.jpg", "a/up/0.jpg", "b/0.jpg", "b/down/0.jpg"]


# ---------------------------------------------------------------------------------- reading images


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode):
    path = save_image(tmp_path / "image.tif", mode=mode)
    assert load_image(path).mode == "RGB"
    assert image_dataset(tmp_path, TO_TENSOR)[0][0].shape == (3, 16, 16)


def test_palette_with_transparency_gives_the_same_colours_without_a_warning(tmp_path):
    path = save_image(tmp_path / "image.png", mode="P")
    Image.open(path).save(path, transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.asarray(Image.open(path).convert("RGB"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(np.asarray(load_image(path)), expected)


def test_no_turning_by_orientation_as_in_the_course(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert load_image(tmp_path / "turned.jpg").size == (40, 20)


@pytest.fixture
def bad_images(tmp_path):
    """Path and expected reason of four files that are no good."""
    whole = save_image(tmp_path / "whole.jpg", size=(200, 200)).read_bytes()
    broken_header = b"P6\n3 3 99999999\n" + bytes(20)
    contents = {
        "cut ü.jpg": (whole[: len(whole) * 6 // 10], "truncated"),
        "text.jpg": (b"I am no image", "not an image"),
        "empty.jpg": (b"", "empty"),
        "odd.ppm": (broken_header, "maxval"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    return {str(tmp_path / name): reason for name, (_, reason) in contents.items()}


def test_bad_image_is_named_with_the_reason(bad_images):
    for path, reason in bad_images.items():
        with pytest.raises(OSError, match=reason) as caught:
            load_image(path)
        assert path in str(caught.value)
        assert type(caught.value) is OSError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_image_is_named_by_the_loader(tmp_path, num_workers):
    (tmp_path / "text.jpg").write_text("I am no image")
    batches = iter(DataLoader(image_dataset(tmp_path, TO_TENSOR), num_workers=num_workers))
    with pytest.raises(OSError, match="not an image") as caught:
        next(batches)
    getattr(batches, "_shutdown_workers", int)()  # left to the collector, this takes 5 s
    assert str(tmp_path / "text.jpg") in str(caught.value)


def test_missing_image_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        load_image(tmp_path / "gone.jpg")


def test_check_images_finds_the_bad_ones_and_changes_nothing(tmp_path, bad_images):
    good = fill(tmp_path / "good", images=4)
    before = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    paths = [*bad_images, *(path for path, _ in image_dataset(good).samples), tmp_path / "gone.jpg"]
    failed = dict(check_images(paths))
    assert list(failed) == [*bad_images, str(tmp_path / "gone.jpg")]
    for path, reason in bad_images.items():
        assert reason in failed[path]
    assert before == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)


def test_check_images_spreads_its_limit(tmp_path):
    paths = [tmp_path / f"{number}.jpg" for number in range(10)]
    assert [Path(path).stem for path, _ in check_images(paths, limit=3)] == ["0", "3", "6"]
    assert len(check_images(paths, limit=99)) == 10
    with pytest.raises(ValueError, match="limit must be at least 1"):
        check_images(paths, limit=0)


# ------------------------------------------------------------------------------------ sample photos


def make(root, **changes):
    return create_sample_images(root, **{"images": 7, "classes": 3, "size": 64} | changes)


def contents(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.jpg")}


def test_sample_images_have_the_shape_of_an_image_folder(tmp_path):
    root = make(tmp_path / "new folder" / "photos ü")
    assert root == tmp_path / "new folder" / "photos ü"
    dataset = image_dataset(root)
    assert dataset.classes == ["class_0", "class_1", "class_2"]
    assert [dataset.targets.count(label) for label in range(3)] == [3, 2, 2]
    assert {dataset[i][0].size for i in range(7)} == {(64, 64)}
    assert datasets.ImageFolder(root).samples == dataset.samples


def test_sample_images_cost_what_food101_photos_cost(tmp_path):
    root = create_sample_images(tmp_path / "photos", images=12)
    sizes = [len(content) for content in contents(root).values()]
    assert 40_000 < np.mean(sizes) < 60_000
    assert load_image(root / "class_0" / "00000.jpg").size == (512, 512)


def test_sample_images_follow_the_seed(tmp_path):
    first, same = contents(make(tmp_path / "a")), contents(make(tmp_path / "b"))
    other = contents(make(tmp_path / "c", seed=1))
    assert first == same
    assert len(set(first.values())) == 7
    assert not set(first.values()) & set(other.values())


def test_complete_sample_images_are_used_again(tmp_path):
    root = make(tmp_path / "photos")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    make(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    (root / "class_1" / "00001.jpg").unlink()
    make(root)
    assert len(contents(root)) == 7


def test_interrupted_sample_images_are_made_anew(tmp_path, monkeypatch):
    reference = contents(make(tmp_path / "reference"))
    vary_photo, calls = sample_images._vary_photo, []

    def interrupt(*args):
        calls.append(args)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return vary_photo(*args)

    monkeypatch.setattr(sample_images, "_vary_photo", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "photos", progress=True)
    assert len(contents(tmp_path / "photos")) == 4
    monkeypatch.undo()
    assert contents(make(tmp_path / "photos")) == reference


def test_other_sample_images_take_the_place_of_ours(tmp_path):
    root = make(tmp_path / "photos", images=9, classes=4)
    assert contents(make(root, images=5, classes=2)) == contents(
        make(tmp_path / "reference", images=5, classes=2)
    )
    (root / sample_images.SAMPLE_MARKER).write_text('{"half a mark')
    assert len(contents(make(root))) == 7
    assert json.loads((root / sample_images.SAMPLE_MARKER).read_text())["complete"] is True


def test_sample_images_do_not_touch_a_folder_of_others(tmp_path):
    fill(tmp_path / "mine", classes=("class_0",))
    before = contents(tmp_path / "mine")
    with pytest.raises(FileExistsError, match=r"mine holds other files \(class_0\)"):
        make(tmp_path / "mine")
    assert contents(tmp_path / "mine") == before
    file = save_image(tmp_path / "file.jpg")
    with pytest.raises(FileExistsError, match=r"file\.jpg is a file"):
        make(file)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"images": 0}, "images must be from 1"),
        ({"classes": 8}, "classes must be from 1 to 7, got 8"),
        ({"size": 0}, "size must"),
        ({"quality": 101}, "quality must"),
    ],
)
def test_sample_images_refuse_numbers_out_of_range(tmp_path, wrong, text):
    with pytest.raises(ValueError, match=text):
        make(tmp_path / "photos", **wrong)
    assert not (tmp_path / "photos").exists()


# ---------------------------------------------------------------------------------- where to start


@pytest.mark.parametrize(
    ("numbers", "workers"),
    [
        ((16, 64, 24e9, 4e9), 6),  # memory holds six
        ((4, 64, 24e9, 4e9), 4),  # cores
        ((16, 2, 24e9, 4e9), 2),  # no more workers than samples in a batch
        ((16, 64, 7.9, 2), 3),  # a part of a worker is none
        ((16, 64, 1e9, 4e9), 1),  # but one there must be
        ((0.5, 64, 24e9, 4e9), 1),
        ((8, 64, float("inf"), 4e9), 8),
    ],
)
def test_rule_of_thumb(numbers, workers):
    assert rule_of_thumb_workers(*numbers) == workers
    assert isinstance(rule_of_thumb_workers(*numbers), int)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
@pytest.mark.parametrize(
    "name", ["cpu_cores", "batch_size", "available_memory", "memory_per_worker"]
)
def test_rule_of_thumb_names_the_wrong_argument(name, value):
    arguments = dict.fromkeys(inspect.signature(rule_of_thumb_workers).parameters, 8)
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        rule_of_thumb_workers(**arguments | {name: value})


def test_hardware_presets_are_those_of_the_article():
    big, small = HARDWARE_PRESETS["16-core + A100"], HARDWARE_PRESETS["8-core + RTX 4080"]
    assert len(HARDWARE_PRESETS) == 2
    assert (big.cpu_cores, big.num_workers, big.batch_size) == (16, (8, 12), (64, 128))
    assert (small.cpu_cores, small.num_workers, small.batch_size) == (8, (4, 6), (32, 64))
    assert (big.prefetch_factor, small.prefetch_factor) == (3, 2)
    assert big.pin_memory
    assert small.pin_memory


@pytest.mark.parametrize("cores", [2, 3, 4, 8, 16, 64, 96])
@pytest.mark.parametrize("name", ["food101", "cifar10", "fashion_mnist"])
def test_recipe_settings_lie_within_the_recipe(name, cores):
    settings = recipe_settings(name, cpu_cores=cores)
    assert 0.5 <= settings.num_workers / cores <= 0.75
    assert 32 <= settings.batch_size <= 128
    assert settings.prefetch_factor == IMAGE_RECIPES[name].prefetch_factor == 2
    assert settings.pin_memory is can_pin_memory()


def test_recipe_settings_on_one_core_and_on_other_devices(monkeypatch):
    assert recipe_settings("food101", cpu_cores=1).num_workers == 1
    assert recipe_settings("food101") == recipe_settings("food101", cpu_cores=NUM_WORKERS)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert recipe_settings("cifar10").pin_memory
    assert not recipe_settings("cifar10", device="cpu").pin_memory
    with pytest.raises(ValueError, match="choose one of food101, cifar10, fashion_mnist"):
        recipe_settings("imagenet")
    with pytest.raises(ValueError, match="cpu_cores=0 must be at least 1"):
        recipe_settings("food101", cpu_cores=0)


def test_presets_and_recipes_cannot_be_changed():
    with pytest.raises(TypeError):
        HARDWARE_PRESETS["mine"] = None
    with pytest.raises(TypeError):
        del IMAGE_RECIPES["food101"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        IMAGE_RECIPES["food101"].prefetch_factor = 9


# ------------------------------------------------------------------------------------------ faults


def test_slow_dataset_waits_and_burns_what_it_is_told(monkeypatch):
    waited, burnt = [], []
    monkeypatch.setattr(faults.time, "sleep", waited.append)
    monkeypatch.setattr(faults, "burn_cpu", burnt.append)
    dataset = SlowDataset(6, read_s=0.002, cpu_s=0.001, slow_every=3, slow_factor=10)
    assert len([dataset[i] for i in range(6)]) == 6
    assert waited == pytest.approx([0.002, 0.002, 0.02] * 2)
    assert burnt == pytest.approx([0.001, 0.001, 0.01] * 2)
    list(SlowDataset(3))  # no dials: neither waits nor burns
    assert len(waited) == len(burnt) == 6


def test_slow_dataset_values():
    dataset = SlowDataset(25, shape=(1, 4, 4))
    images = torch.stack([image for image, _ in dataset])  # iterating ends by itself
    assert images.shape == (25, 1, 4, 4)
    assert images.dtype == torch.float32
    assert [label for _, label in dataset] == [i % 10 for i in range(25)]
    assert len({tuple(image.flatten().tolist()) for image in images}) == 25
    assert torch.equal(dataset[3][0], SlowDataset(25, shape=(1, 4, 4))[3][0])
    assert not torch.equal(dataset[3][0], SlowDataset(25, shape=(1, 4, 4), seed=1)[3][0])


def test_slow_dataset_seed_moves_the_stragglers():
    slow = [
        [i for i in range(8) if SlowDataset(8, slow_every=4, seed=seed).is_slow(i)]
        for seed in range(3)
    ]
    assert slow == [[3, 7], [2, 6], [1, 5]]
    assert not any(SlowDataset(8).is_slow(i) for i in range(8))


def test_slow_dataset_can_be_sent_to_any_worker():
    dataset = SlowDataset(4, read_s=0.001, slow_every=2)
    assert pickle.dumps(dataset).count(b"dataloading.faults")
    assert vars(pickle.loads(pickle.dumps(dataset))) == vars(dataset)


def test_slow_dataset_refuses_wrong_dials():
    for wrong in ({"size": -1}, {"read_s": -0.1}, {"cpu_s": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must not be negative"):
            SlowDataset(**{"size": 4} | wrong)
    with pytest.raises(ValueError, match="slow_every must be at least 1"):
        SlowDataset(4, slow_every=0)
    with pytest.raises(IndexError, match="Sample 4 of a data set with 4 samples"):
        SlowDataset(4)[4]


def test_burn_cpu_counts_cpu_time():
    before = time.thread_time()
    burn_cpu(0.03)
    assert time.thread_time() - before >= 0.03


def test_docstring_examples():
    assert doctest.testmod(data_setup).failed == doctest.testmod(faults).failed == 0


def test_public_functions_say_where_they_are_explained():
    functions = [getattr(data_setup, name) for name in data_setup.__all__]
    functions = [function for function in functions if inspect.isfunction(function)]
    assert create_dataloaders in functions
    for function in functions:
        assert "Explained in: notebook" in function.__doc__, function.__name__
