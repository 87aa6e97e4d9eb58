"""The cache of samples: what it gives back, who shares it, when it is made anew, what bounds it."""

from __future__ import annotations

import copy
import errno
import functools
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchvision import tv_tensors
from workloads import linux_only

from dataloading import cache_bounds, cache_files
from dataloading.cache_identity import data_fingerprint, data_name
from dataloading.cached_dataset import CachedDataset
from dataloading.fingerprints import fingerprint
from dataloading.images import image_dataset
from dataloading.peeking import peek

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Labelled:
    image: np.ndarray
    name: str


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


class Fetched(Dataset):
    """`(pixels, index)`; counts in shared memory how often each sample was fetched."""

    def __init__(self, count: int = 40, side: int = 8) -> None:
        self.count, self.side = count, side
        self._fetched = torch.zeros(count, dtype=torch.int64).share_memory_()
        self.classes = ["even", "odd"]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self._fetched[index] += 1
        return torch.full((3, self.side, self.side), index % 251, dtype=torch.uint8), index

    def fetches(self) -> list[int]:
        """How often each sample was fetched since the last call."""
        counted = self._fetched.tolist()
        self._fetched.zero_()
        return counted


class Samples(Dataset):
    """The given samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples_given = samples

    def __len__(self) -> int:
        return len(self.samples_given)

    def __getitem__(self, index: int) -> Any:
        return self.samples_given[index]


def cached(dataset: Any, **options: Any) -> CachedDataset:
    """A cache in little memory, and the fetches made at its construction forgotten."""
    made = CachedDataset(dataset, **{"max_bytes": 2**24} | options)
    if isinstance(dataset, Fetched):
        dataset.fetches()
    return made


def photos(folder: Path, count: int = 3, side: int = 20) -> Path:
    """A folder of small images of two classes."""
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((side, side, 3), 40 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def shrunk(image: Image.Image, side: int = 8) -> Image.Image:
    return image.resize((side, side))


def turned(image: Image.Image) -> Image.Image:
    return image.rotate(90)


def in_another_process(code: str, *arguments: Any) -> subprocess.Popen:
    """Python code that runs beside this process and prints a line of JSON."""
    path = os.pathsep.join([str(PROJECT), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "random"},
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen) -> Any:
    out, _ = process.communicate(timeout=workloads.FOREVER_S)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


# ---- what comes back ----------------------------------------------------------------------------

IMAGE = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
SAMPLES = {
    "tensor": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "bfloat": torch.arange(6).view(2, 3).bfloat16(),
    "bool tensor": torch.tensor([True, False]),
    "no dimension": torch.tensor(3.5),
    "empty tensor": torch.zeros(0, 4, dtype=torch.int32),
    "strided tensor": torch.arange(12.0).view(3, 4).t(),
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "array of dates": np.array(["2024-01-01", "2024-02-01"], dtype="M8[D]"),
    "strided array": np.arange(12.0).reshape(3, 4)[:, ::2],
    "array without dimension": np.array(2.5),
    "tensor of torchvision": tv_tensors.Image(torch.ones(3, 2, 2)),
    "image": IMAGE,
    "grey image": IMAGE.convert("L"),
    "bits": IMAGE.convert("1"),
    "16 bit": Image.fromarray(np.arange(20, dtype=np.uint16).reshape(4, 5)),
    "int": -5,
    "float": 0.1,
    "nothing": None,
    "complex": 1 + 2j,
    "number of NumPy": np.float32(0.1),
    "truth value of NumPy": np.bool_(True),
    "text": "naïve \ud800",
    "empty text": "",
    "bytes": b"a\0b",
    "tuple": (torch.ones(2), 3),
    "empty tuple": (),
    "named tuple": Pair(torch.ones(2), 3),
    "list": [1, [2.5, "x"]],
    "dict": {"image": torch.ones(2), 5: (1, True)},
    "ordered dict": OrderedDict(a=1, b="b"),
    "dataclass": Labelled(np.ones(3), "cat"),
}


def types_in(sample: Any) -> Any:
    """The types of a sample and its parts."""
    kind = type(sample)
    if isinstance(sample, torch.Tensor | np.ndarray):
        return kind, sample.dtype, tuple(sample.shape)
    if isinstance(sample, Image.Image):
        return Image.Image, sample.mode, sample.size
    if isinstance(sample, Labelled):
        return kind, types_in(vars(sample))
    if isinstance(sample, dict):
        return kind, [(key, types_in(part)) for key, part in sample.items()]
    return (kind, [types_in(part) for part in sample]) if isinstance(sample, tuple | list) else kind


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_hit_has_the_same_content_and_types(kind: str) -> None:
    sample = SAMPLES[kind]
    data = cached(Samples(sample, sample, sample))
    for index in range(3):
        data[index]
    hits = [data[2], *data.__getitems__([0, 2, 0])]
    assert data.counts().hits == 4
    for hit in hits:
        assert types_in(hit) == types_in(sample)
        if isinstance(sample, Image.Image):
            assert hit.tobytes() == sample.tobytes()
        else:
            assert fingerprint(hit) == fingerprint(sample)


def test_a_hit_may_be_changed_without_changing_the_cache() -> None:
    sample = {"a": torch.ones(3), "b": np.ones(3), "c": Image.new("L", (2, 2), 7), "d": [1]}
    data = cached(Samples(sample, sample))
    data[0]
    for hit in (data[0], *data.__getitems__([0, 0])):
        assert float(hit["a"].sum() + hit["b"].sum()) == 6
        assert hit["c"].getpixel((0, 0)) == 7
        hit["a"].zero_()
        hit["b"][:] = 0
        hit["c"].putpixel((0, 0), 1)
        hit["d"].append(2)
    assert data.counts().hits == 3


@pytest.mark.parametrize(
    ("usual", "other", "why"),
    [
        (torch.ones(3), torch.ones(4), r"\(4,\)"),
        (torch.ones(3), torch.ones(3).int(), "int32"),
        (np.ones(3), np.ones((3, 1)), r"\(3, 1\)"),
        ((1, 2), (1, 2, 3), "3 parts"),
        ({"a": 1}, {"b": 1}, "other ones"),
        (1, 1.5, "float"),
        (1, 2**70, "64 bits"),
        (None, 1, "int"),
        ("x", "y" * 10_000, None),
        (IMAGE, IMAGE.resize((3, 3)), "3 x 3"),
        (torch.ones(3), torch.ones(3).to_sparse(), "plain tensors"),
        (torch.ones(3), torch.ones(3, requires_grad=True), "plain tensors"),
        (torch.ones(3), {1, 2}, "set"),
    ],
)
def test_a_sample_of_another_shape_is_handed_through_and_counted(
    usual: Any, other: Any, why: str | None
) -> None:
    if why is None:  # the last sample is looked at: texts as long as it get room
        data = cached(Samples(usual, other, usual))
    else:
        with pytest.warns(UserWarning, match=why):
            data = cached(Samples(usual, other, other))
    for _ in range(2):
        assert data[1] is other
        assert data.__getitems__([1])[0] is other
    counts = data.counts()
    assert (counts.hits, counts.misses, counts.uncached) == (0, 0, 4)
    assert counts.misfit_example == 1
    assert "another shape or type than the first sample: 4 (such as sample 1)" in repr(data)


def test_texts_get_room_for_somewhat_longer_ones() -> None:
    data = cached(Samples("short", "x" * 50, "x" * 100, "y" * 150))
    for _ in range(2):
        assert [len(text) for text in data] == [5, 50, 100, 150]
    assert data.hit_rate == 0.5


def test_indices_are_those_of_the_data_set() -> None:
    data = cached(Fetched(5))
    assert [label for _, label in data] == [0, 1, 2, 3, 4]
    assert data[-1][1] == data[np.int64(4)][1] == data[torch.tensor(4)][1] == 4
    assert data.counts().hits == 3
    for index in (5, -6):
        with pytest.raises(IndexError, match="5 samples"):
            data[index]
    with pytest.raises(TypeError):
        data["x"]


# ---- transform, batches, attributes -------------------------------------------------------------


def test_the_transform_is_applied_after_the_cache_to_the_first_part() -> None:
    drawn = iter(range(1000))
    draw = lambda image: next(drawn)  # noqa: E731
    data = cached(Fetched(4), transform=draw)
    assert [data[1], data[1]] == [(0, 1), (1, 1)]
    assert data.__getitems__([1, 2]) == [(2, 1), (3, 2)]
    pair = cached(Samples(Pair(torch.ones(1), 3)), transform=draw)[0]
    assert (type(pair), pair) == (Pair, Pair(4, 3))
    assert cached(Samples([torch.ones(1), 3]), transform=len)[0] == 2
    assert cached(Samples(torch.ones(7)), transform=len)[0] == 7


def test_misses_of_a_batch_are_fetched_together_where_the_data_set_can() -> None:
    asked = []

    class Batched(Fetched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self[index] for index in indices]

    data = cached(Batched(10))
    data[3]
    assert [label for _, label in data.__getitems__([5, 3, 7, 5])] == [5, 3, 7, 5]
    assert asked == [[5, 7, 5]]
    images = [image for image, _ in data.__getitems__([7, 5, 3])]
    assert [int(image[0, 0, 0]) for image in images] == [7, 5, 3]
    assert len(asked) == 1
    assert data.__getitems__([]) == []


def test_public_attributes_are_those_of_the_wrapped_data_set(tmp_path: Path) -> None:
    data = cached(image_dataset(photos(tmp_path / "photos")), transform=shrunk)
    assert data.classes == ["cat", "dog"]
    assert data.class_to_idx == {"cat": 0, "dog": 1}
    assert data.targets == [0, 0, 0, 1, 1, 1]
    assert len(data.samples) == len(data) == 6
    assert data.transform is shrunk
    assert not hasattr(data, "_random_state")
    with pytest.raises(AttributeError, match="no_such_thing"):
        data.no_such_thing  # noqa: B018
    with pytest.raises(AttributeError):
        CachedDataset.__new__(CachedDataset).classes  # noqa: B018


@pytest.mark.parametrize("in_file", [False, True])
def test_copies_share_the_cache_unless_they_are_pickled(in_file: bool, tmp_path: Path) -> None:
    data = cached(Fetched(4), path=tmp_path if in_file else None)
    again = copy.deepcopy(data)
    again[2]
    assert data.counts().cached == 1
    unpickled = pickle.loads(pickle.dumps(data))
    assert unpickled[2][1] == 2
    assert unpickled.counts().hits == 1
    assert unpickled.classes == ["even", "odd"]
    assert peek(DataLoader(data, batch_size=2), []).epoch_samples == 4


def test_subsets_and_concatenations_of_caches_work() -> None:
    data = Fetched(6)
    inner = cached(data)
    both = ConcatDataset([Subset(inner, [0, 1]), Subset(inner, [1, 2])])
    for _ in range(2):
        assert [label for _, label in (both[i] for i in range(4))] == [0, 1, 1, 2]
    assert data.fetches() == [1, 1, 1, 0, 0, 0]


# ---- workers and processes ----------------------------------------------------------------------


def epoch(loader: DataLoader) -> list[int]:
    """The labels of an epoch; each image is checked against its label."""
    seen = []
    for images, labels in loader:
        assert images[:, 0, 0, 0].tolist() == (labels % 251).tolist()
        seen += labels.tolist()
    return sorted(seen)


@linux_only
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("in_file", [False, True])
def test_workers_share_the_cache_and_keep_it_between_epochs(
    method: str, in_file: bool, tmp_path: Path
) -> None:
    source = Fetched(40)
    data = cached(source, path=tmp_path if in_file else None)
    workers = 4 if method == "fork" else 1  # the others take seconds to start
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers, multiprocessing_context=method)
    again = loader if method == "fork" else DataLoader(data, 4)
    assert epoch(loader) == list(range(40))
    first = data.counts()
    assert (first.cached, first.hits, first.misses) == (40, 0, 40)
    assert source.fetches() == [1] * 40
    data.reset_counts()
    assert epoch(again) == list(range(40))
    assert data[3][1] == 3
    assert (data.counts().hits, data.counts().misses, data.hit_rate) == (41, 0, 1.0)
    assert source.fetches() == [0] * 40
    assert multiprocessing.active_children() == []


class Dies(Fetched):
    """The process that fetches sample 21 is killed."""

    def __getitem__(self, index: int) -> Any:
        if index == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def read_all(data: CachedDataset) -> None:
    for index in range(len(data)):
        data[index]


@linux_only
@pytest.mark.parametrize("in_file", [False, True])
def test_a_killed_process_costs_no_sample_that_was_kept(in_file: bool, tmp_path: Path) -> None:
    """Not in a loader: torch raises its error about a killed worker at any place it likes."""
    source = Dies()
    data = cached(source, path=tmp_path if in_file else None)
    process = multiprocessing.get_context("fork").Process(target=read_all, args=(data,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (data.counts().cached, data.counts().misses) == (21, 21)
    assert source.fetches() == [1] * 21 + [0] * 19
    source.__class__ = Fetched
    loader = DataLoader(data, 4, num_workers=2, multiprocessing_context="fork")
    assert epoch(loader) == list(range(40))
    assert source.fetches() == [0] * 21 + [1] * 19
    assert epoch(loader) == list(range(40))
    counts = data.counts()
    assert (counts.cached, counts.hits, counts.misses) == (40, 61, 40)


FILL = """
import json, sys
from torch.utils.data import DataLoader
from test_cached_dataset import Fetched, cached, epoch
data = cached(Fetched(200, side=16), path=sys.argv[1])
print("made", flush=True)
labels = epoch(DataLoader(data, 4, shuffle=True))
counts = data.counts()
print(json.dumps([labels == list(range(200)), str(data.file), counts.hits, counts.misses]))
"""


def test_two_processes_fill_one_file_at_once_and_a_third_only_reads(tmp_path: Path) -> None:
    pair = [in_another_process(FILL, tmp_path) for _ in range(2)]
    (right, file, _, _), (right_too, file_too, _, _) = (told(process) for process in pair)
    assert right
    assert right_too
    assert file == file_too
    assert [str(found) for found in tmp_path.glob("*.cache*")] == [file]
    assert told(in_another_process(FILL, tmp_path)) == [True, file, 200, 0]
    here = cached(Fetched(200, side=16), path=tmp_path)
    assert str(here.file) == file
    assert here.counts().cached == 200


def test_counts_of_two_objects_over_one_file_are_added(tmp_path: Path) -> None:
    one, two = (cached(Fetched(10), path=tmp_path) for _ in range(2))
    for data in (one, two, two):
        for index in range(10):
            data[index]
    for counts in (one.counts(), two.counts()):
        assert (counts.hits, counts.misses) == (20, 10)
    two.reset_counts()
    assert (two.counts().hits, one.counts().hits) == (0, 20)
    assert two.hit_rate is None
    assert "not read yet" in repr(two)


# ---- crashes and damage -------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [False, True])
def test_a_half_written_sample_is_a_miss_and_filled_again(in_file: bool, tmp_path: Path) -> None:
    source = Fetched(6)
    data = cached(source, path=tmp_path if in_file else None)
    assert epoch(DataLoader(data, 2)) == list(range(6))
    data._rows.data[4, 100] += 1  # as a crash of the machine leaves it: marked, and not whole
    assert epoch(DataLoader(data, 2)) == list(range(6))
    assert source.fetches() == [1, 1, 1, 1, 2, 1]
    assert data[4][1] == 4
    assert source.fetches() == [0] * 6


@pytest.mark.parametrize("damage", ["empty", "header", "short"])
def test_a_damaged_file_is_made_anew(damage: str, tmp_path: Path) -> None:
    data = cached(Fetched(6), path=tmp_path)
    epoch(DataLoader(data, 2))
    file = data.file
    assert file is not None
    del data
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "header": b"x" + whole[1:], "short": whole[:-1]}[damage])
    again = cached(Fetched(6), path=tmp_path)
    assert again.file == file
    assert again.counts().cached == 0
    assert epoch(DataLoader(again, 2)) == list(range(6))


def test_a_file_that_is_gone_when_a_worker_starts_is_done_without(tmp_path: Path) -> None:
    data = cached(Fetched(6), path=tmp_path)
    sent = pickle.dumps(data)
    assert data.file is not None
    data.file.unlink()
    with pytest.warns(UserWarning, match="not used"):
        received = pickle.loads(sent)
    assert received[5][1] == 5
    assert received.counts().uncached == 1


@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="files are not sparse here")
def test_a_full_disk_is_said_once_and_samples_go_on_uncached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = cached(Fetched(6), path=tmp_path)
    data[0]

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(UserWarning, match="disk is full") as seen:
        labels = [label for _ in range(2) for _, label in data]
    assert labels == [*range(6), *range(6)]
    assert len(seen) == 1
    counts = data.counts()
    assert (counts.hits, counts.uncached) == (2, 10)
    assert "could not be written: 10" in repr(data)
    monkeypatch.undo()
    later = cached(Fetched(6), path=tmp_path)
    assert [label for _, label in later] == list(range(6))
    assert later.counts().cached == 6


def test_a_file_that_may_only_be_read_gives_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Fetched(6)
    data = cached(source, path=tmp_path)
    for index in range(4):
        data[index]
    del data
    source.fetches()
    really_open = os.open

    def forbidding(path: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY) and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, flags, *more)

    monkeypatch.setattr(os, "open", forbidding)  # the administrator may write to any file
    data = cached(source, path=tmp_path)
    for _ in range(2):
        assert epoch(DataLoader(data, 3)) == list(range(6))
    counts = data.counts()
    assert (counts.hits, counts.misses, counts.uncached, counts.cached) == (8, 0, 4, 4)
    data[0][0].zero_()
    with pytest.raises(PermissionError, match="may only be read"):
        data.clear()


def test_clear_forgets_the_samples() -> None:
    source = Fetched(4)
    data = cached(source)
    epoch(DataLoader(data, 2))
    data.clear()
    assert data.counts().cached == 0
    assert epoch(DataLoader(data, 2)) == list(range(4))
    assert source.fetches() == [2] * 4


# ---- when it is made anew -----------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cache*"))


def changed_file(images: Path) -> Any:
    name = images / "cat" / "1.png"
    Image.new("RGB", (20, 20), "red").save(name)
    return image_dataset(images, shrunk)


def touched_file(images: Path) -> Any:
    os.utime(images / "dog" / "2.png", ns=(1, 1))
    return image_dataset(images, shrunk)


def another_file(images: Path) -> Any:
    Image.new("RGB", (20, 20)).save(images / "cat" / "9.png")
    return image_dataset(images, shrunk)


CHANGES = {
    "content": changed_file,
    "time": touched_file,
    "one more": another_file,
    "size": lambda images: image_dataset(images, functools.partial(shrunk, side=9)),
    "other setting, same shape": lambda images: image_dataset(images, lambda i: turned(shrunk(i))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("subset", [False, True])
def test_changed_files_sizes_and_transforms_make_a_new_cache(
    change: str, subset: bool, tmp_path: Path
) -> None:
    def made(data: Any) -> CachedDataset:
        wrapped = Subset(data, list(range(4))) if subset else data
        return cached(wrapped, path=tmp_path / "cache")

    images = photos(tmp_path / "photos")
    data = made(image_dataset(images, shrunk))
    for index in range(len(data)):
        data[index]
    first = data.file
    assert first is not None
    del data
    again = made(image_dataset(images, shrunk))
    assert (again.file, again.counts().cached) == (first, len(again))
    del again
    after = made(CHANGES[change](images))
    assert after.counts().cached == 0
    assert files_in(tmp_path / "cache") == [after.file]  # the older one is gone
    assert first.name.split("-")[0] == after.file.name.split("-")[0]  # type: ignore[union-attr]
    assert first.name.startswith("photos.")
    assert np.asarray(after[1][0]).sum() == np.asarray(after.dataset[1][0]).sum()


def test_a_file_that_a_living_process_uses_is_not_removed(tmp_path: Path) -> None:
    images = image_dataset(photos(tmp_path / "photos"), shrunk)
    train, test = (
        cached(Subset(images, part), path=tmp_path / "cache") for part in ([0, 1, 2], [3, 4, 5])
    )
    assert train.file != test.file
    assert files_in(tmp_path / "cache") == sorted([train.file, test.file])  # type: ignore[type-var]


def test_another_folder_is_other_data(tmp_path: Path) -> None:
    one = image_dataset(photos(tmp_path / "a" / "train"), shrunk)
    two = image_dataset(photos(tmp_path / "b" / "train"), shrunk)
    assert data_name(one) != data_name(two)
    assert data_name(one).startswith("train.")
    assert data_name(one) == data_name(image_dataset(tmp_path / "a" / "train", turned))


def adding(number: int) -> Any:
    return lambda image: image + number


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (adding(1), adding(2)),
        (functools.partial(shrunk, side=8), functools.partial(shrunk, side=9)),
        (lambda image: image, lambda image: -image),
        (shrunk, turned),
        (workloads.Chain([shrunk]), workloads.Chain([shrunk, turned])),
        (lambda image: (lambda: image + 1)(), lambda image: (lambda: image + 2)()),
    ],
)
def test_transforms_are_told_apart_and_recognised(one: Any, two: Any) -> None:
    def seen(transform: Any) -> str:
        data = Samples(1)
        data.transform = transform  # type: ignore[attr-defined]
        return data_fingerprint(data)

    assert seen(one) != seen(two)
    assert seen(one) == seen(copy.deepcopy(one))
    assert seen(adding(1)) == seen(adding(1))


def test_what_differs_from_run_to_run_does_not_count() -> None:
    def seen(seed: int) -> str:
        data = Fetched(4)
        data.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
        data.state = torch.Generator().manual_seed(seed).get_state()  # type: ignore[attr-defined]
        data.lock = multiprocessing.Lock()  # type: ignore[attr-defined]
        data.value = multiprocessing.Value("i", seed)  # type: ignore[attr-defined]
        data.thing = object()  # type: ignore[attr-defined]
        return data_fingerprint(data)

    assert seen(1) == seen(2)


def test_content_without_files_counts(tmp_path: Path) -> None:
    many = torch.zeros(1000, 3)
    changed = many.clone()
    changed[500, 1] = 1
    one, two = (cached(TensorDataset(data), path=tmp_path) for data in (many, changed))
    assert one.file != two.file
    one[500]
    assert two[500][0].tolist() == [0, 1, 0]


# ---- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [False, True])
def test_no_more_than_max_bytes_and_the_first_samples_are_kept(
    in_file: bool, tmp_path: Path
) -> None:
    source = Fetched(100, side=64)
    limit = 2**20
    data = cached(source, path=tmp_path if in_file else None, max_bytes=limit)
    for _ in range(2):
        assert epoch(DataLoader(data, 10, shuffle=True)) == list(range(100))
    counts = data.counts()
    assert 70 < counts.slots < 100
    assert counts.cached == counts.hits == counts.slots
    assert counts.uncached == 2 * (100 - counts.slots)
    assert source.fetches() == [1] * counts.slots + [2] * (100 - counts.slots)
    assert f"room for the first {counts.slots} only (max_bytes)" in repr(data)
    if data.file is not None:
        assert 0.9 * limit < data.file.stat().st_size <= limit


@pytest.mark.parametrize("in_file", [False, True])
def test_no_more_than_a_share_of_what_is_free(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_bounds, "shared_memory", lambda: (2**30, 2**20))
    monkeypatch.setattr(cache_bounds, "free_disk_bytes", lambda folder: 2**20)
    path = tmp_path if in_file else None
    data = CachedDataset(Fetched(100, side=64), path=path)
    assert 40 < data.counts().slots < 70
    what = "free disk" if in_file else "free shared memory"
    assert f"only (80 % of {what})" in repr(data)
    monkeypatch.setattr(cache_bounds, "shared_memory", lambda: (2**30, 2**10))
    monkeypatch.setattr(cache_bounds, "free_disk_bytes", lambda folder: 2**10)
    with pytest.warns(UserWarning, match="Nothing is cached"):
        data = CachedDataset(Fetched(99, side=64), path=path)
    assert data[5][1] == 5
    assert data.counts().uncached == 1


def test_a_file_grows_when_more_is_allowed_and_shrinks_when_less_is(tmp_path: Path) -> None:
    slots = []
    for limit in (2**20, 2**21, 2**19):
        data = cached(Fetched(100, side=64), path=tmp_path, max_bytes=limit)
        assert epoch(DataLoader(data, 10)) == list(range(100))
        slots.append(data.counts().slots)
        del data
    assert 70 < slots[0] < slots[1] == 100
    assert slots[2] < 45
    (file,) = files_in(tmp_path)
    assert file.stat().st_size <= 2**19


@linux_only
def test_the_estimate_is_what_is_used(tmp_path: Path) -> None:
    def shared() -> int:
        status = os.statvfs("/dev/shm")
        return (status.f_bfree) * status.f_frsize

    in_file = CachedDataset(Fetched(200, side=128), path=tmp_path)
    assert in_file.file is not None
    empty = in_file.file.stat().st_blocks * 512
    assert empty < in_file.needed_bytes / 20  # nothing is taken before it is filled
    assert epoch(DataLoader(in_file, 10)) == list(range(200))
    used = in_file.file.stat().st_blocks * 512
    assert used == pytest.approx(in_file.needed_bytes, rel=0.05)
    assert in_file.counts().cached_bytes == pytest.approx(used, rel=0.05)
    before = shared()
    data = CachedDataset(Fetched(400, side=128))
    assert before - shared() == pytest.approx(data.needed_bytes, rel=0.05)
    assert data.needed_bytes == pytest.approx(400 * 3 * 128 * 128, rel=0.05)


class Tiny(Dataset):
    """A million of small samples."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index / 2, index


def test_a_million_tiny_samples_take_little_memory_and_no_objects(tmp_path: Path) -> None:
    for path in (None, tmp_path):
        tracemalloc.start()
        data = CachedDataset(Tiny(), path=path)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert data.needed_bytes < 22 * 1_000_000
        assert peak_bytes < 10 * 1_000_000  # the part in front of the rows is written from memory
        assert data[999_999] == data[-1] == (499_999.5, 999_999)
        some = list(range(0, 1_000_000, 20_000))
        assert data.__getitems__(some) == data.__getitems__(some) == [(i / 2, i) for i in some]
        assert data.counts().cached == 51
        assert data.counts().hits == 51


# ---- random items -------------------------------------------------------------------------------


class Drawing(Fetched):
    """Samples that draw: `mode` says how."""

    def __init__(self, mode: str) -> None:
        super().__init__(10)
        self.mode = mode
        self.own = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        if self.mode == "torch":
            image = image + torch.randint(100, (1,)).to(torch.uint8)
        elif self.mode == "numpy":
            label += np.random.randint(1000)
        elif self.mode == "flip":
            torch.rand(1)  # a flip that shows no difference, as with half of all flips
        elif self.mode == "own generator":
            image = image + torch.randint(100, (1,), generator=self.own).to(torch.uint8)
        elif self.mode == "seeded by index":
            np.random.seed(index)
            label += np.random.randint(1000)
        return image, label


@pytest.mark.parametrize("mode", ["torch", "numpy", "flip", "own generator"])
def test_random_items_are_warned_of_and_no_random_state_is_changed(mode: str) -> None:
    source = Drawing(mode)
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    own = source.own.get_state().tolist()
    with pytest.warns(UserWarning, match="frozen; pass the random part as transform="):
        CachedDataset(source, max_bytes=2**24)
    after = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    assert before == after
    assert source.own.get_state().tolist() == own
    assert sum(source.fetches()) <= 3


@pytest.mark.parametrize("mode", ["none", "seeded by index"])
def test_items_that_repeat_are_not_warned_of(mode: str) -> None:
    source = Drawing(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CachedDataset(source, max_bytes=2**24)
    assert sum(source.fetches()) <= 3


# ---- what is refused ----------------------------------------------------------------------------


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        (workloads.CountingWithLen(), {}, TypeError, "IterableDataset"),
        (NoLength(), {}, TypeError, "no length"),
        (Fetched, {}, TypeError, "dataset\\[index\\]"),
        (5, {}, TypeError, "dataset\\[index\\]"),
        (Samples(), {}, ValueError, "empty"),
        (Samples((1, {"a": {2}})), {}, TypeError, r"sample\[1\]\['a'\] is of type set"),
        (Samples(torch.ones(2, requires_grad=True)), {}, TypeError, "plain tensors"),
        (Samples(IMAGE.convert("P")), {}, TypeError, "palettes"),
        (Samples(np.array([{}])), {}, TypeError, "of object"),
        (Samples(1), {"transform": 5}, TypeError, "transform=5"),
        (Samples(1), {"transform": dict}, TypeError, "function"),
        (Samples(1), {"path": 5}, TypeError, "path=5"),
        (Samples(1), {"max_bytes": 0}, ValueError, "max_bytes=0"),
        (Samples(1), {"max_bytes": 1e9}, TypeError, "max_bytes"),
        (Samples(1, 2), {"max_bytes": 100}, ValueError, "no room for a single sample"),
    ],
)
def test_what_cannot_be_cached_is_refused_with_the_reason(
    data: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        CachedDataset(data, **options)


def test_the_least_max_bytes_that_is_named_is_enough() -> None:
    source = Samples(*[torch.ones(1000)] * 1000)
    with pytest.raises(ValueError, match="give at least") as refused:
        CachedDataset(source, max_bytes=100)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert CachedDataset(source, max_bytes=least).counts().slots == 1
    with pytest.raises(ValueError, match="give at least"):
        CachedDataset(source, max_bytes=least - 1)


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(OSError, match="No cache can be made") as refused:
            CachedDataset(Samples(1), path=folder)
        assert str(folder) in str(refused.value)

    def forbid(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cache_files.os, "replace", forbid)
    with pytest.raises(PermissionError, match="No cache can be made") as forbidden:
        CachedDataset(Samples(1), path=tmp_path / "new")
    assert str(tmp_path / "new") in str(forbidden.value)
    assert files_in(tmp_path / "new") == []


def test_the_summary_is_one_line() -> None:
    data = CachedDataset(Fetched(1000, side=64), max_bytes=2**30)
    for index in range(800):
        data[index]
    for index in range(800):
        data[index]
    assert repr(data) == (
        "CachedDataset: 800 of 1,000 samples cached, 9.4 MiB of 11.8 MiB, hit rate 50 %"
    )
    assert repr(data.counts()) == repr(data)
    assert "hit_share" in data.counts().to_dict()
    assert "<table>" in data._repr_html_()
