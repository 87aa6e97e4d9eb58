"""The course's data sets: from disk, from mirrors, and generated."""

from __future__ import annotations

import pickle
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from data_servers import DataServer, serving
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from dataloading import course_archives, downloads
from dataloading.course_archives import COURSE_DATA
from dataloading.course_datasets import load_course_dataset
from dataloading.downloads import download_files

NAMES = ["food101", "cifar10", "fashion_mnist"]
ITEM = {
    "food101": ("RGB", (96, 64)),
    "cifar10": ("RGB", (32, 32)),
    "fashion_mnist": ("L", (28, 28)),
}
COUNTS = {"food101": (4, 2), "cifar10": (10, 2), "fashion_mnist": (6, 4)}  # in the tiny copies
ARCHIVE = "cifar-10-python.tar.gz"
HIDDEN = {".cifar10.lock", ".cifar10.failed"}


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def server(tidy: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    yield from serving(monkeypatch)


def load(name: str, root: Path, *mirrors: str, **options: Any) -> Any:
    """The real data set, or an error."""
    return load_course_dataset(name, root, generated=False, mirrors=mirrors, **options)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - HIDDEN


def negative(label: int) -> int:
    return -label


# ---- The real data -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_parts_come_with_one_download(server: DataServer, tmp_path: Path, name: str) -> None:
    train = load(name, tmp_path, server.mirror("good"))
    requests = len(server.requests)
    test = load(name, tmp_path, server.mirror("missing"), train=False)
    assert requests == len(server.requests) == len(COURSE_DATA[name].files)
    assert (train.source, test.source) == (server.mirror("good"), "disk")
    assert (train.is_generated, test.is_generated) == (False, False)
    assert (len(train), len(test)) == COUNTS[name]
    image, label = train[0]
    assert (image.mode, image.size) == ITEM[name]
    assert isinstance(label, int)
    kinds = {
        "food101": datasets.Food101,
        "cifar10": datasets.CIFAR10,
        "fashion_mnist": datasets.FashionMNIST,
    }
    assert isinstance(train, kinds[name])
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".gz", ".part")]


@pytest.mark.parametrize("name", NAMES)
def test_data_on_disk_need_no_network_and_no_writing(
    server: DataServer, tmp_path: Path, name: str
) -> None:
    load(name, tmp_path, server.mirror("good"))
    before = sorted(tmp_path.rglob("*"))
    server.requests.clear()
    for path in tmp_path.glob(".*"):
        path.unlink()
    dataset = load_course_dataset(
        name, tmp_path, download=False, transform=transforms.ToTensor(), target_transform=negative
    )
    assert dataset.source == "disk"
    assert server.requests == []
    assert sorted(tmp_path.rglob("*")) == [p for p in before if not p.name.startswith(".")]
    batch, labels = next(iter(DataLoader(dataset, batch_size=2)))
    assert batch.dtype == torch.float32
    assert (labels <= 0).all()


def test_an_archive_fetched_by_hand_is_used_and_kept(server: DataServer, tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(server.archives[ARCHIVE])
    load("cifar10", tmp_path, server.mirror("missing"))
    assert server.requests == []
    assert left_in(tmp_path) == {ARCHIVE, "cifar-10-batches-py"}


def test_mirrors_may_be_folders_on_disk(server: DataServer, tmp_path: Path) -> None:
    shared = tmp_path / "shared files"
    shared.mkdir()
    (shared / ARCHIVE).write_bytes(server.archives[ARCHIVE])
    address = shared.as_uri()
    assert load("cifar10", tmp_path / "data", address).source == address + "/"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("food101", lambda root: (root / "food-101/images/ramen/5.jpg").unlink()),
        ("food101", lambda root: (root / "food-101/meta/train.json").unlink()),
        ("food101", lambda root: shutil.rmtree(root / "food-101/images/pho")),
        ("cifar10", lambda root: (root / "cifar-10-batches-py/data_batch_2").write_bytes(b"cut")),
        (
            "fashion_mnist",
            lambda root: (root / "FashionMNIST/raw/train-images-idx3-ubyte").write_bytes(b"cut"),
        ),
    ],
)
def test_data_unpacked_in_part_are_made_whole(
    server: DataServer, tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    load(name, tmp_path, server.mirror("good"))
    damage(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name} is not on disk, or not complete"):
        load_course_dataset(name, tmp_path, download=False, generated=False)
    dataset = load(name, tmp_path, server.mirror("good"))
    assert dataset.source == server.mirror("good")
    assert len(list(dataset)) == COUNTS[name][0]


def test_what_a_killed_process_left_does_not_matter(server: DataServer, tmp_path: Path) -> None:
    half = tmp_path / ".cifar10-unpacking" / "cifar-10-batches-py"
    half.mkdir(parents=True)
    (half / "data_batch_9").write_bytes(b"half")
    load("cifar10", tmp_path, server.mirror("good"))
    assert left_in(tmp_path) == {"cifar-10-batches-py"}
    assert not (tmp_path / "cifar-10-batches-py" / "data_batch_9").exists()


def test_checksums_and_first_mirrors_are_those_of_torchvision() -> None:
    food, cifar, fashion = (COURSE_DATA[name] for name in NAMES)
    assert food.mirrors[0] + food.files[0][0] == datasets.Food101._URL
    assert food.files[0][1] == datasets.Food101._MD5
    assert cifar.mirrors[0] + cifar.files[0][0] == datasets.CIFAR10.url
    assert cifar.files == ((datasets.CIFAR10.filename, datasets.CIFAR10.tgz_md5),)
    assert list(fashion.mirrors[:1]) == datasets.FashionMNIST.mirrors
    assert list(fashion.files) == datasets.FashionMNIST.resources


# ---- Interrupted, wrong and slow downloads -------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut", "stalling"])
def test_the_next_mirror_goes_on_where_one_stopped(
    server: DataServer, tmp_path: Path, kind: str
) -> None:
    mirrors = [server.mirror(kind), server.mirror("good")]
    dataset = load("cifar10", tmp_path, *mirrors, timeout_s=1.0)
    half = (len(server.archives[ARCHIVE]) + 1) // 2
    assert [(kind, span) for kind, _, span in server.requests] == [
        (kind, None),
        ("good", f"bytes={half}-"),
    ]
    assert dataset.source == server.mirror("good")


def test_the_next_call_goes_on_where_one_stopped(server: DataServer, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"stopped after [\d,]+ of [\d,]+ bytes"):
        load("cifar10", tmp_path, server.mirror("cut_always"))
    assert left_in(tmp_path) == {f"{ARCHIVE}.part"}
    load("cifar10", tmp_path, server.mirror("good"))
    assert server.requests[-1][2].startswith("bytes=")
    assert left_in(tmp_path) == {"cifar-10-batches-py"}


def test_a_server_without_ranges_begins_again(server: DataServer, tmp_path: Path) -> None:
    (tmp_path / f"{ARCHIVE}.part").write_bytes(server.archives[ARCHIVE][:100])
    load("cifar10", tmp_path, server.mirror("no_range"))
    assert [span for _, _, span in server.requests] == ["bytes=100-"]


@pytest.mark.parametrize("left", ["wrong", "whole", "too long"])
def test_a_part_is_never_taken_on_trust(server: DataServer, tmp_path: Path, left: str) -> None:
    whole = server.archives[ARCHIVE]
    contents = {"wrong": bytes(100), "whole": whole, "too long": whole + b"more"}
    (tmp_path / f"{ARCHIVE}.part").write_bytes(contents[left])
    load("cifar10", tmp_path, server.mirror("good"))
    assert len(server.requests) == (1 if left == "whole" else 2)
    assert left_in(tmp_path) == {"cifar-10-batches-py"}


@pytest.mark.parametrize("kind", ["wrong", "unknown_length"])
def test_a_wrong_file_is_refused(server: DataServer, tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConnectionError, match=rf"{kind}/: {ARCHIVE} is not the expected file"):
        load("cifar10", tmp_path, server.mirror(kind))
    assert left_in(tmp_path) == set()
    assert load("cifar10", tmp_path, server.mirror(kind), server.mirror("good")).source


def test_a_slow_mirror_is_left_for_a_faster_one(
    server: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LEAST_BYTES_PER_S", 1e9)
    dataset = load("cifar10", tmp_path, server.mirror("slow"), server.mirror("good"), timeout_s=1.0)
    assert dataset.source == server.mirror("good")
    assert server.requests[-1][2] is not None  # it went on with what the slow one had sent


def test_a_slow_mirror_is_better_than_none(
    server: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LEAST_BYTES_PER_S", 1e9)
    mirrors = [server.mirror("slow"), server.mirror("missing")]
    dataset = load("cifar10", tmp_path, *mirrors, timeout_s=2.0)
    assert dataset.source == server.mirror("slow")
    assert server.kinds() == ["slow", "missing", "slow"]


def test_an_address_that_nobody_listens_at_is_a_reason_too(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"- http://127\.0\.0\.1:9/: .*refused"):
        load("cifar10", tmp_path, "http://127.0.0.1:9")


def test_large_files_have_a_progress_bar(
    server: DataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(downloads, "LARGE_BYTES", 1)
    files = course_archives.COURSE_DATA["cifar10"].files
    download_files(files, [server.mirror("good")], tmp_path, timeout_s=5.0)
    out, err = capfd.readouterr()
    assert out == f"[INFO] Downloading {server.mirror('good')}{ARCHIVE}...\n"
    assert f"{ARCHIVE}:   0%" in err
    assert (tmp_path / ARCHIVE).read_bytes() == server.archives[ARCHIVE]


# ---- Several processes at once -------------------------------------------------------------------


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """What each of several threads returned; the lock takes them for processes."""
    barrier, results = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        try:
            results.append(work())
        except ConnectionError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_download_once(server: DataServer, tmp_path: Path) -> None:
    found = at_once(3, lambda: load("cifar10", tmp_path, server.mirror("slow"), timeout_s=60.0))
    assert sorted(dataset.source for dataset in found) == [
        "disk",
        "disk",
        server.mirror("slow"),
    ]
    assert server.kinds() == ["slow"]


def test_ranks_share_a_failure(server: DataServer, tmp_path: Path) -> None:
    errors = at_once(3, lambda: load("cifar10", tmp_path, server.mirror("silent"), timeout_s=1.0))
    assert all("time-out" in str(error) for error in errors)
    assert server.kinds() == ["silent"]
    assert load("cifar10", tmp_path, server.mirror("good")).source == server.mirror("good")


# ---- Generated data ------------------------------------------------------------------------------


def features(dataset: Any, side: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Small images as rows of numbers, and their labels."""
    rows = [np.asarray(image.resize((side, side)), float).ravel() for image, _ in dataset]
    return np.stack(rows), np.array([label for _, label in dataset])


def nearest_neighbour_accuracy(train: Any, test: Any) -> float:
    """Share of test images whose nearest training image is of the same class."""
    (known, labels), (asked, answers) = features(train), features(test)
    distances = ((asked[:, None] - known[None]) ** 2).sum(axis=2)
    return float((labels[distances.argmin(axis=1)] == answers).mean())


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_generated_arrays_are_like_the_real_ones(
    server: DataServer, tmp_path: Path, name: str
) -> None:
    real = load(name, tmp_path, server.mirror("good"))
    made: Any = load_course_dataset(name, tmp_path / "none", generated=True)
    assert len(made) == len(made.targets) == 1000
    assert type(made.data) is type(real.data)
    assert type(made.targets) is type(real.targets)
    assert made.data.dtype == real.data.dtype
    assert made.data.shape[1:] == real.data.shape[1:]
    assert len(made.classes) == len(real.classes) == 10
    assert made.class_to_idx == {label: number for number, label in enumerate(made.classes)}
    assert (made[0][0].mode, made[0][0].size) == (real[0][0].mode, real[0][0].size)
    assert type(made[0][1]) is type(real[0][1]) is int
    assert np.bincount(np.asarray(made.targets)).tolist() == [100] * 10
    assert "not the real data" in repr(made)
    assert not (tmp_path / "none").exists()
    if name == "fashion_mnist":
        assert made.classes == real.classes


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_generated_arrays_can_be_learned(tmp_path: Path, name: str) -> None:
    parts = [
        load_course_dataset(name, generated=True, train=train, images=200)
        for train in (True, False)
    ]
    train, test = parts
    assert not np.array_equal(np.asarray(train.data), np.asarray(test.data))
    assert nearest_neighbour_accuracy(train, test) > 0.5
    again = load_course_dataset(name, generated=True, images=200)
    other = load_course_dataset(name, generated=True, images=200, seed=1)
    assert np.array_equal(np.asarray(train.data), np.asarray(again.data))
    assert not np.array_equal(np.asarray(train.data), np.asarray(other.data))
    assert nearest_neighbour_accuracy(other, test) > 0.5  # the classes look the same


def test_generated_food_is_like_the_real_one(tmp_path: Path) -> None:
    train: Any = load_course_dataset("food101", tmp_path, generated=True, images=40)
    test: Any = load_course_dataset("food101", tmp_path, generated=True, images=40, train=False)
    assert isinstance(train, datasets.Food101)
    assert (train.is_generated, train.source) == (True, "generated")
    assert len(train.classes) == len(train.class_to_idx) == 101
    assert train.classes == sorted(train.classes)
    assert len(train) == len(test) == 40
    image, label = train[0]
    assert (image.mode, image.size, label) == ("RGB", (512, 512), 0)
    files = sorted((tmp_path / "food101-generated").rglob("*.jpg"))
    assert len(files) == 80
    assert 40_000 < np.mean([file.stat().st_size for file in files]) < 60_000
    assert nearest_neighbour_accuracy(train, test) > 0.2  # by chance: 0.025

    written = [file.stat().st_mtime_ns for file in files]
    load_course_dataset("food101", tmp_path, generated=True, images=40)
    assert [file.stat().st_mtime_ns for file in files] == written


@pytest.mark.parametrize("name", NAMES)
def test_generated_items_go_through_the_transforms_and_to_workers(
    tmp_path: Path, name: str
) -> None:
    dataset: Any = load_course_dataset(
        name,
        tmp_path,
        generated=True,
        images=4,
        transform=transforms.ToTensor(),
        target_transform=negative,
    )
    batch, labels = next(iter(DataLoader(dataset, batch_size=4)))
    shape = {"food101": (3, 512, 512), "cifar10": (3, 32, 32), "fashion_mnist": (1, 28, 28)}
    assert batch.shape == (4, *shape[name])
    assert sorted(labels.tolist()) == [-3, -2, -1, 0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[1][0], dataset[1][0])
    assert copy.is_generated


def test_without_download_the_network_is_left_alone(server: DataServer, tmp_path: Path) -> None:
    mirrors = [server.mirror("good")]
    with pytest.warns(UserWarning, match=r"GENERATED.*not on disk.*download=False") as noted:
        dataset: Any = load_course_dataset(
            "cifar10", tmp_path, download=False, mirrors=mirrors, images=10
        )
    assert dataset.is_generated
    assert noted[0].filename == __file__
    with pytest.raises(FileNotFoundError, match="download=False"):
        load_course_dataset("cifar10", tmp_path, download=False, generated=False)
    assert server.requests == []
    assert left_in(tmp_path) == set()


def test_generated_data_wanted_come_silently_and_change_no_random_state(tmp_path: Path) -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in NAMES:
            load_course_dataset(name, tmp_path, generated=True, images=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": "mnist"}, ValueError, "'mnist'; choose one of 'food101', 'cifar10', 'fashion_m"),
        ({"name": ["cifar10"]}, ValueError, "no course data set"),
        ({"images": 0}, ValueError, "images=0 must be at least 1"),
        ({"images": 2.5}, TypeError, "images=2.5 must be a whole number"),
        ({"seed": -1}, ValueError, "seed=-1 must be at least 0"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be a finite number above 0"),
        ({"mirrors": "https://a.example/"}, TypeError, "must be a list of addresses"),
        ({"mirrors": [3]}, TypeError, "must be a list of addresses"),
        ({"mirrors": []}, ValueError, "mirrors is empty"),
        ({"mirrors": ["a.example"]}, ValueError, "'a.example' must begin with https://"),
        ({"root": __file__}, ValueError, "is a file; give a folder"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type, text: str) -> None:
    arguments = {"name": "cifar10", "generated": True} | options
    with pytest.raises(error, match=text):
        load_course_dataset(**arguments)
