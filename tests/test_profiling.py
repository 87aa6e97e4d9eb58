"""What one sample costs, stage by stage."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)
from workloads import FOREVER_S, linux_only

from dataloading import profiling, sending, stages
from dataloading.cached_dataset import CachedDataset
from dataloading.profiling import SampleProfile, profile_samples
from dataloading.stages import stage_name
from dataloading.watchdog import ProbeTimeout

PAUSE_S = 0.005


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


@pytest.fixture
def no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the worker, where a test is about the samples only."""
    monkeypatch.setattr(profiling, "time_sending", lambda batch: (None, ()))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six tiny photos in two classes."""
    from PIL import Image

    for number in range(6):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 24), (number * 20, 0, 0)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def pause(value: Any) -> Any:
    """A transform that costs something."""
    time.sleep(PAUSE_S)
    return value


class Transformed(Dataset):
    """Ten tensors with a transform."""

    def __init__(self, transform: Any = None, count: int = 10) -> None:
        self.transform = transform
        self.count = count
        self.opened = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.opened = self.opened or object()
        value = torch.full((3,), float(index))
        return value if self.transform is None else self.transform(value)


def stages_of(profile: SampleProfile) -> dict[str, float]:
    return dict(zip(profile.stages["stage"], profile.stages["wall_s"], strict=True))


def assert_adds_up(profile: SampleProfile) -> None:
    """The stages of a sample are the sample, and all shares are one."""
    stages = stages_of(profile)
    collate = stages.pop("collate")
    assert sum(stages.values()) == pytest.approx(profile.sample_wall_s, rel=1e-6)
    assert collate * profile.batch_size == pytest.approx(profile.collate_s)
    assert profile.stages["share"].sum() == pytest.approx(1.0)
    assert (profile.stages["cpu_s"] + profile.stages["wait_s"]).tolist() == pytest.approx(
        np.maximum(profile.stages["wall_s"], profile.stages["cpu_s"]).tolist()
    )


# ---- stages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_an_image_folder(photos: Path, version: int) -> None:
    from torchvision import datasets, transforms
    from torchvision.transforms import v2

    kit = transforms if version == 1 else v2
    chain = kit.Compose(
        [
            kit.Resize(16),
            kit.Compose([kit.RandomHorizontalFlip(), kit.CenterCrop(12)]),
            transforms.ToTensor(),
            pause,
        ]
    )
    data = datasets.ImageFolder(str(photos), transform=chain, target_transform=int)
    before, links = dict(vars(data)), list(chain.transforms)
    profile = profile_samples(data)
    assert set(stages_of(profile)) == {
        "read",
        "decode",
        "Resize",
        "RandomHorizontalFlip",
        "CenterCrop",
        "ToTensor",
        "pause",
        "int",
        "rest of __getitem__",
        "collate",
    }
    assert profile.top_stage[0] == "pause"
    assert profile.samples == 6
    assert (profile.batch_size, profile.tensors_per_batch) == (6, 2)
    assert profile.batch_bytes == 6 * (3 * 12 * 12 * 4 + 8)
    assert_adds_up(profile)
    assert all(vars(data)[name] is value for name, value in before.items())
    assert all(a is b for a, b in zip(chain.transforms, links, strict=True))
    assert vars(data).keys() == before.keys()


def test_without_a_transform(no_transfer: None) -> None:
    profile = profile_samples(Transformed())
    assert list(stages_of(profile)) == ["rest of __getitem__", "collate"]
    assert_adds_up(profile)


def test_parts_and_subsets_are_looked_into(no_transfer: None) -> None:
    data = Subset(ConcatDataset([Transformed(pause), Transformed(abs)]), list(range(5, 15)))
    before = data.dataset
    profile = profile_samples(data)
    assert {"pause", "abs"} <= set(stages_of(profile))
    assert profile.samples == 10
    assert data.dataset is before
    assert_adds_up(profile)


class Keeps(Dataset):
    """A wrapper as many a project has one, with a transform of its own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.transform = abs

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.dataset[index])


def test_wrappers_are_looked_into(no_transfer: None) -> None:
    inside = Transformed(pause)
    data = Keeps(inside)
    profile = profile_samples(data)
    assert {"pause", "abs"} <= set(stages_of(profile))
    assert data.dataset is inside
    assert_adds_up(profile)
    cached = profile_samples(CachedDataset(inside), samples=8)  # a fresh cache has nothing yet
    assert "pause" in stages_of(cached)


def test_a_sequence_of_modules(no_transfer: None) -> None:
    chain = torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.ReLU())
    profile = profile_samples(Transformed(chain))
    assert {"Flatten", "ReLU"} <= set(stages_of(profile))
    assert_adds_up(profile)


class TwoValues(torch.nn.Sequential):
    """A sequence that passes two values on, as some augmentation libraries do."""

    def forward(self, value: Any) -> Any:
        first, second = value, value
        for module in self:
            first, second = module(first), module(second)
        return first + second


class Module(torch.nn.Module):
    """A transform that holds another as a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = torch.nn.ReLU()

    def forward(self, value: Any) -> Any:
        return self.transform(value)


@pytest.mark.parametrize("kind", [TwoValues, Module])
def test_modules_of_ones_own_are_one_stage(no_transfer: None, kind: Any) -> None:
    transform = kind(torch.nn.ReLU()) if kind is TwoValues else kind()
    children = list(transform.children())
    profile = profile_samples(Transformed(transform))
    assert kind.__name__ in stages_of(profile)
    assert all(a is b for a, b in zip(transform.children(), children, strict=True))


def test_a_stage_that_waits_is_not_computing(no_transfer: None) -> None:
    profile = profile_samples(Transformed(pause))
    row = profile.stages.set_index("stage").loc["pause"]
    assert row["wall_s"] >= PAUSE_S
    assert row["wait_s"] > row["cpu_s"]
    assert row["share"] > 0.5
    assert profile.cpu_share < 0.5
    assert profile.batch_s == pytest.approx(
        profile.sample_wall_s * profile.batch_size + profile.collate_s
    )


def test_names_of_stages() -> None:
    assert stage_name(pause) == "pause"
    assert stage_name(Module()) == "Module"
    assert stage_name(lambda value: value) == "<lambda>"


def test_a_profile_as_table_and_json(no_transfer: None) -> None:
    profile = profile_samples(Transformed(pause))
    plain = json.loads(json.dumps(profile.to_dict()))
    assert plain["stages"][0]["stage"] == "pause"
    assert plain["transfer_s"] is None
    assert plain["slow_samples"] == []
    assert "most of it pause" in repr(profile)
    assert "not available" in profile._repr_html_()
    assert dict(profile.rows())["batch"] == "120 B in 1 tensors"


# ---- which samples -----------------------------------------------------------------------------


class Noting(Transformed):
    """Notes which samples were asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(count=count)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return super().__getitem__(index)


def test_samples_are_spread_over_the_dataset(no_transfer: None) -> None:
    data = Noting(1001)
    profile = profile_samples(data, samples=5)
    assert data.asked == [0, 0, 0, 250, 500, 750, 1000]  # the first one twice for warming up
    assert profile.samples == len(profile.wall_s) == 5


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_few_samples(no_transfer: None, count: int) -> None:
    profile = profile_samples(Transformed(count=count))
    assert profile.samples == count
    assert profile.batch_size == count
    assert np.isfinite(profile.sample_wall_s)


@pytest.mark.parametrize(("count", "timed"), [(1, 1), (2, 2), (3, 1), (100, 64)])
def test_an_iterable_dataset(no_transfer: None, count: int, timed: int) -> None:
    profile = profile_samples(workloads.Counting(count))
    assert profile.samples == timed  # two of them warm up, where there are enough
    assert profile.sample_wall_s > 0
    assert_adds_up(profile)


class TransformedStream(IterableDataset):
    """An iterable dataset with a transform."""

    transform = staticmethod(pause)

    def __init__(self) -> None:
        self.transform = pause  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[Any]:
        return (self.transform(torch.zeros(2)) for _ in range(8))


def test_stages_of_an_iterable_dataset(no_transfer: None) -> None:
    profile = profile_samples(TransformedStream())
    assert profile.top_stage[0] == "pause"
    assert_adds_up(profile)


def test_slow_samples_are_named(no_transfer: None) -> None:
    data = workloads.SlowAt(20, 7, 0.1)
    profile = profile_samples(Subset(data, list(range(20))))
    assert profile.slow_samples["index"].tolist().count(7) == 1
    row = profile.slow_samples.set_index("index").loc[7]
    assert row["wall_s"] >= 0.1
    assert row["times_median"] > 5


def test_the_budget_ends_the_probe(no_transfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "BUDGET_S", 0.1)
    profile = profile_samples(workloads.Slow(1000, seconds=0.02), samples=500)
    assert 1 <= profile.samples < 20


# ---- loaders -----------------------------------------------------------------------------------


def collate_lengths(samples: list[Any]) -> Any:
    return {"count": torch.tensor([len(samples)])}


def test_batch_size_and_collate_function_of_a_loader() -> None:
    loader = DataLoader(workloads.Slow(40), batch_size=7, collate_fn=collate_lengths)
    profile = profile_samples(loader)
    assert (profile.batch_size, profile.tensors_per_batch, profile.batch_bytes) == (7, 1, 8)
    assert profile.transfer_s is not None
    assert 0 <= profile.transfer_s < 1
    assert profile.notes == ()


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"batch_size": None}, 1),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(40)), 5, drop_last=False)}, 5),
        ({"batch_sampler": [[0, 1], [2, 3]]}, 32),  # says nothing: the course's batch size
        ({"batch_size": 1000}, 40),
    ],
)
def test_batch_sizes(no_transfer: None, options: dict[str, Any], size: int) -> None:
    loader: DataLoader = DataLoader(workloads.Slow(40), **options)
    assert profile_samples(loader).batch_size == size


def collate_popping(samples: list[dict[str, Any]]) -> Any:
    """Takes things out of the samples, as some collate functions do."""
    texts = [sample.pop("text") for sample in samples]
    return torch.stack([sample["pixels"] for sample in samples]), texts


def test_a_collate_function_may_change_its_samples(no_transfer: None) -> None:
    loader = DataLoader(workloads.Dicts(10), batch_size=4, collate_fn=collate_popping)
    assert profile_samples(loader).tensors_per_batch == 1


def with_lambda(samples: list[Any]) -> Any:
    return {"x": torch.zeros(2), "later": lambda: None}


def test_a_batch_that_cannot_be_sent_is_noted() -> None:
    begun = time.monotonic()
    profile = profile_samples(DataLoader(workloads.Slow(4), batch_size=2, collate_fn=with_lambda))
    assert profile.transfer_s is None
    assert "Sending a batch from a worker failed" in profile.notes[0]
    assert time.monotonic() - begun < 5  # without waiting for a worker that cannot answer


@linux_only
def test_a_worker_that_does_not_answer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "LIMIT_S", 0.5)
    monkeypatch.setattr(sending.BatchSource, "__getitem__", hang_in_worker)
    profile = profile_samples(workloads.Slow(4))
    assert profile.transfer_s is None
    assert "took too long to be measured" in profile.notes[0]


def hang_in_worker(source: Any, index: int) -> Any:
    if torch.utils.data.get_worker_info() is not None:
        time.sleep(FOREVER_S)
    return source.batch


# ---- nothing is changed ------------------------------------------------------------------------


def test_random_states_stay() -> None:
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(workloads.Random(10), shuffle=True, generator=own)
    before = workloads.random_state(), own.get_state().tolist()
    profile_samples(loader)
    assert (workloads.random_state(), own.get_state().tolist()) == before


def test_what_a_sample_opens_is_opened_on_the_copy(no_transfer: None) -> None:
    data = Transformed()
    profile_samples(data)
    assert data.opened is None


class Closing(Transformed):
    """Closes its file when it is dropped."""

    def __init__(self, path: Path) -> None:
        super().__init__(pause)
        self.file = path.open("rb")

    def __del__(self) -> None:
        self.file.close()


def test_dropping_the_copy_does_not_close_the_files(no_transfer: None, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    data = Closing(path)
    profile = profile_samples(data)
    assert not data.file.closed
    assert profile.top_stage[0] == "pause"


class NotCopyable(Transformed):
    def __copy__(self) -> Any:
        raise TypeError("cannot be copied")


class Delegating(Dataset):
    """Answers for another dataset in a way that makes copying recurse for ever."""

    def __init__(self) -> None:
        self.inner = Transformed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pytest.mark.parametrize("make", [lambda: NotCopyable(pause), Delegating])
def test_a_dataset_that_cannot_be_copied_is_one_stage(no_transfer: None, make: Any) -> None:
    assert list(stages_of(profile_samples(make()))) == ["rest of __getitem__", "collate"]


class ByNumber(Transformed):
    """Its `loader` takes a number, not a path."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.loader = float

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.loader(self.number))


def test_a_number_is_not_read_as_an_open_file(no_transfer: None, tmp_path: Path) -> None:
    (tmp_path / "open").write_bytes(b"x")
    with (tmp_path / "open").open("rb") as file:
        profile_samples(ByNumber(file.fileno()))
        assert os.fstat(file.fileno()).st_size == 1  # still open


@linux_only
def test_reading_that_hangs_is_stopped(
    no_transfer: None, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    from torchvision import datasets

    monkeypatch.setattr(profiling, "LIMIT_S", 0.3)
    monkeypatch.setattr(stages, "open", lambda *_: time.sleep(FOREVER_S), raising=False)
    with pytest.raises(ProbeTimeout, match="Fetching sample 0"):
        profile_samples(datasets.ImageFolder(str(photos)))


# ---- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "samples", "error", "text"),
    [
        (Transformed(), 0, ValueError, "samples=0 must be at least 1"),
        (Transformed(), 2.5, TypeError, r"samples=2\.5 must be a whole number"),
        (Transformed(count=0), 8, ValueError, "Transformed has no samples to profile"),
        (workloads.Counting(0), 8, ValueError, "Counting has no samples to profile"),
        (5, 8, TypeError, "Expected a dataset or a DataLoader, got int"),
    ],
)
def test_bad_arguments(data: Any, samples: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        profile_samples(data, samples=samples)


def test_an_error_in_a_sample_is_the_users_own() -> None:
    with pytest.raises(KeyError, match="broken sample 5"):
        profile_samples(workloads.Failing(10))


@linux_only
def test_a_sample_that_hangs(no_transfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LIMIT_S", 0.3)
    with pytest.raises(ProbeTimeout, match="Fetching sample 0: stopped by the watchdog"):
        profile_samples(workloads.SlowAt(10, 0, FOREVER_S))
    profile = profile_samples(workloads.SlowAt(10, 4, FOREVER_S))
    assert profile.samples == 4  # those before it
    assert profile.sample_wall_s < 0.1
    assert_adds_up(profile)


class AtOnce(Dataset):
    """Gets a batch in one round trip, whatever its size."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one is not how this data set is read")

    def __getitems__(self, indices: list[int]) -> list[int]:
        time.sleep(0.02)
        return indices


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(100))])
def test_a_data_set_that_gets_batches_is_profiled_by_batches(no_transfer: None, wrap: Any) -> None:
    profile = profile_samples(DataLoader(wrap(AtOnce()), batch_size=16), samples=48)
    assert profile.samples == 48
    assert profile.sample_wall_s * 16 == pytest.approx(0.02, rel=0.6)
    assert profile.collate_s < 0.02
