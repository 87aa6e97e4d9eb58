"""Looking at a loader before it starts: each rule from made-up sights, and each code on a small loader."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_workloads as faulty
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import workloads
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from workloads import linux_only

from dataloading import held_things, preflight
from dataloading.accelerators import Accelerator
from dataloading.codes import CODES, SEVERITIES
from dataloading.held_things import Handle, handles_among, most_objects
from dataloading.machine import Machine
from dataloading.object_graph import walk
from dataloading.peeking import BatchSize, Peek, uneven_field
from dataloading.pickling import PickleProbe
from dataloading.preflight import Preflight
from dataloading.preflight_rules import RULES, check_dataloader
from dataloading.settings import LoaderSettings
from helper_functions import diagnose_dataloader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MIB = 2**20
MACHINE = Machine(
    usable_cpus=8,
    available_memory_bytes=16 * 2**30,
    shared_memory_free_bytes=8 * 2**30,
    open_files_limit=1024,
    start_method="fork",
)
MOST_S = 5.0  # what looking may take, whatever the data set


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Pretend to be on another machine."""

    def pretend(**values: Any) -> Machine:
        machine = replace(MACHINE, **values)
        monkeypatch.setattr(preflight, "inspect_machine", lambda: machine)
        return machine

    return pretend


def codes(loader: DataLoader, **options: Any) -> list[str]:
    return [found.code for found in check_dataloader(loader, **options)]


def only(loader: DataLoader, code: str, **options: Any) -> Any:
    """The finding of a code, which must be the only one."""
    found = check_dataloader(loader, **options)
    assert [one.code for one in found] == [code]
    return found[0]


# ---- rules, from made-up sights -----------------------------------------------------------------


def sight(**values: Any) -> Preflight:
    """What was seen of a healthy loader with four forked workers, and what is different here."""
    healthy = {
        "loader": DataLoader(TensorDataset(torch.arange(64)), batch_size=8),
        "settings": LoaderSettings(num_workers=4, batch_size=8),
        "machine": MACHINE,
        "start_method": "fork",
        "probes": (PickleProbe("dataset", None, None, 1000, 0.001),),
        "peek": Peek(epoch_samples=64, batch=BatchSize(MIB, 2)),
    }
    return Preflight(**{**healthy, **values})


def probe(**values: Any) -> tuple[PickleProbe, ...]:
    """One probe of the data set."""
    usual = {"name": "dataset", "error": None, "path": None, "size_bytes": 1000, "seconds": 0.001}
    return (PickleProbe(**{**usual, **values}),)


def batch(size: int, tensors: int = 2) -> Peek:
    return Peek(epoch_samples=64, batch=BatchSize(size, tensors))


def dropping(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(4)), batch_size=8, drop_last=True, **options)


def told(**options: Any) -> DataLoader:
    return DataLoader(faulty.ToldTheEpoch(), **options)


LAMBDA = probe(error="PicklingError: no lambda", path="dataset.transform")
PERSISTENT = LoaderSettings(num_workers=4, batch_size=8, persistent_workers=True)
PINNING = LoaderSettings(num_workers=4, batch_size=8, pin_memory=True)
GPU = replace(MACHINE, accelerators=(Accelerator("cuda", "GPU 0", None),))
FILE = (Handle("dataset.file", "open file", None),)

# name: what was seen -> code and severity of the one finding
FIRES: dict[str, tuple[Preflight, str, str]] = {
    "lambda, forked": (sight(probes=LAMBDA), "unpicklable", "info"),
    "lambda, spawned": (sight(probes=LAMBDA, start_method="spawn"), "unpicklable", "critical"),
    "lambda, no workers": (
        sight(probes=LAMBDA, start_method="spawn", settings=LoaderSettings(batch_size=8)),
        "unpicklable",
        "info",
    ),
    "notebook class, spawned": (
        sight(probes=probe(in_main=("Mine",)), main_importable=False, start_method="spawn"),
        "unpicklable",
        "critical",
    ),
    "large data set, spawned": (
        sight(probes=probe(seconds=0.2, size_bytes=50 * MIB), start_method="spawn"),
        "dataset-pickling",
        "warning",
    ),
    "open file, forked": (sight(handles=FILE), "fork-unsafe-handle", "critical"),
    "accelerator, forked": (
        sight(on_accelerator=("dataset.x",)),
        "accelerator-in-worker",
        "critical",
    ),
    "accelerator, spawned": (
        sight(on_accelerator=("dataset.x",), start_method="spawn"),
        "accelerator-in-worker",
        "warning",
    ),
    "uneven": (
        sight(peek=Peek(uneven=("sample[0]", ("(3,)", "(4,)")))),
        "uneven-shapes",
        "critical",
    ),
    "bad images": (
        sight(bad_images=(("a.jpg", "a.jpg is empty"), ("b.jpg", "b.jpg is cut off"))),
        "bad-images",
        "critical",
    ),
    "nothing but dropped": (
        sight(loader=dropping(), peek=Peek(epoch_samples=4)),
        "dropped-samples",
        "critical",
    ),
    "shared memory": (
        sight(machine=replace(MACHINE, shared_memory_free_bytes=4 * MIB)),
        "shared-memory-short",
        "critical",
    ),
    "shared memory, nearly": (
        sight(machine=replace(MACHINE, shared_memory_free_bytes=9 * MIB)),
        "shared-memory-short",
        "warning",
    ),
    "shared memory, with other loaders": (
        sight(machine=replace(MACHINE, shared_memory_free_bytes=12 * MIB), live_queued_batches=8),
        "shared-memory-short",
        "critical",
    ),
    "descriptors of batches": (
        sight(peek=batch(MIB, tensors=100)),
        "file-descriptors-short",
        "critical",
    ),
    "descriptors of a cache": (
        sight(probes=probe(tensors=5000), start_method="spawn"),
        "file-descriptors-short",
        "critical",
    ),
    "large queue": (sight(peek=batch(300 * MIB)), "prefetch-memory", "warning"),
    "too large a queue": (
        sight(machine=replace(MACHINE, available_memory_bytes=9 * MIB), peek=batch(MIB)),
        "prefetch-memory",
        "critical",
    ),
    "many objects": (sight(objects=("dataset.names", 10**6)), "copy-on-write-growth", "info"),
    "very many objects": (
        sight(objects=("dataset.names", 10**7)),
        "copy-on-write-growth",
        "critical",
    ),
    "stale epoch": (sight(loader=told(), settings=PERSISTENT), "epoch-not-set", "warning"),
    "option without effect": (
        sight(ineffective={"in_order": "orders worker processes, and num_workers is 0"}),
        "invalid-settings",
        "warning",
    ),
    "unpinnable batch": (
        sight(settings=PINNING, machine=GPU, peek=Peek(unpinnable="Pair")),
        "invalid-settings",
        "warning",
    ),
    "pinned for nothing": (sight(settings=PINNING), "pin-without-accelerator", "info"),
}


def found_in(seen: Preflight) -> list[Any]:
    return [found for rule in RULES if (found := rule(seen)) is not None]


def check_sight(seen: Preflight) -> list[Any]:
    """What `check_dataloader` would give, most severe first."""
    return sorted(found_in(seen), key=lambda one: -SEVERITIES.index(one.severity))


@pytest.fixture
def file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's way of sharing tensors, wherever the test runs."""
    monkeypatch.setattr("dataloading.budget_rules._sharing_strategy", lambda: "file_descriptor")


@pytest.mark.usefixtures("file_descriptors")
@pytest.mark.parametrize("name", FIRES)
def test_a_rule_fires_on_its_fault_and_its_neighbours_do_not(name: str) -> None:
    seen, code, severity = FIRES[name]
    if name == "too large a queue":  # workers alone would weigh more than that
        found = [one for one in found_in(seen) if "workers_bytes" not in one.evidence]
    else:
        found = found_in(seen)
    assert [(one.code, one.severity) for one in found] == [(code, severity)]
    assert found[0].group == CODES[code].group
    assert found[0].advice
    assert found[0].evidence
    assert "\n" not in repr(found[0])
    json.dumps(found[0].to_dict())


NOT_A_FAULT: dict[str, Preflight] = {
    "healthy": sight(),
    "large data set, forked": sight(probes=probe(seconds=5.0)),
    "large data set, no workers": sight(
        probes=probe(seconds=5.0), start_method="spawn", settings=LoaderSettings(batch_size=8)
    ),
    "small data set, spawned": sight(probes=probe(seconds=0.03), start_method="spawn"),
    "script class, spawned": sight(probes=probe(in_main=("Mine",)), start_method="spawn"),
    "open file, spawned": sight(handles=FILE, start_method="spawn"),
    "open file, no workers": sight(handles=FILE, settings=LoaderSettings(batch_size=8)),
    "accelerator, no workers": sight(
        on_accelerator=("dataset.x",), settings=LoaderSettings(batch_size=8)
    ),
    "few samples, kept": sight(peek=Peek(epoch_samples=4)),
    "some dropped": sight(loader=dropping(), peek=Peek(epoch_samples=9)),
    "length unknown": sight(loader=dropping(), peek=Peek()),
    "no workers, so no queue": sight(
        settings=LoaderSettings(batch_size=8), peek=batch(2**40, tensors=10**6)
    ),
    "a machine that tells nothing": sight(
        machine=Machine(usable_cpus=1), peek=batch(2**40, tensors=10**6)
    ),
    "tensors of a forked cache": sight(probes=probe(tensors=5000)),
    "many objects, spawned": sight(objects=("dataset.names", 10**7), start_method="spawn"),
    "told the epoch, workers anew": sight(loader=told()),
    "told the epoch, shared": sight(loader=told(), settings=PERSISTENT, shares_state=True),
    "told the epoch, only one": sight(loader=told(), settings=PERSISTENT, epochs=1),
    "pinned for a GPU": sight(settings=PINNING, machine=GPU),
}


@pytest.mark.usefixtures("file_descriptors")
@pytest.mark.parametrize("name", NOT_A_FAULT)
def test_silence_is_right_where_nothing_is_wrong(name: str) -> None:
    assert found_in(NOT_A_FAULT[name]) == []


def test_a_queue_that_exceeds_all_memory_is_named_before_shared_memory() -> None:
    small = replace(MACHINE, available_memory_bytes=2**30, shared_memory_free_bytes=2**29)
    found = check_sight(sight(machine=small, peek=batch(300 * MIB)))
    assert [one.code for one in found] == ["prefetch-memory", "shared-memory-short"]


def test_workers_alone_may_weigh_too_much() -> None:
    seen = sight(machine=replace(MACHINE, available_memory_bytes=50 * MIB), peek=Peek())
    (found,) = found_in(seen)
    assert (found.code, found.severity) == ("prefetch-memory", "critical")
    assert found.evidence["workers_bytes"] > 0.8 * 50 * MIB
    assert found.advice == "Use fewer workers."


def test_tensors_shared_by_name_need_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloading.budget_rules._sharing_strategy", lambda: "file_system")
    assert found_in(sight(peek=batch(MIB, tensors=1000))) == []


def test_starting_is_said_to_last_at_least_so_long_where_pickling_was_cut_short() -> None:
    seen = sight(probes=probe(seconds=1.5, finished=False), start_method="spawn")
    (found,) = found_in(seen)
    assert "at least 21 s every time" in found.message  # 4 workers x 1.5 s, and reading it back
    assert found.evidence["start_s"] == pytest.approx(21.0)


@pytest.mark.parametrize(("ranks", "expected"), [(1, []), (4, ["missing-distributed-sampler"])])
def test_ranks_need_a_sampler_that_knows_of_them(
    ranks: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    data = TensorDataset(torch.arange(64))
    assert codes(DataLoader(data, shuffle=True)) == expected
    sampler = DistributedSampler(data, num_replicas=4, rank=0)
    assert codes(DataLoader(data, sampler=sampler)) == []
    assert codes(DataLoader(workloads.Counting())) == []  # shards itself, or not: check_samples


# ---- healthy loaders ----------------------------------------------------------------------------


def image_folder(root: Path, broken: int = 0) -> Any:
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    for number in range(12):
        folder = root / "photos" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}.png"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
        if number < broken:
            path.write_bytes(path.read_bytes()[:40])
    return ImageFolder(str(root / "photos"), transform=ToTensor())


HEALTHY: dict[str, Callable[[Path], DataLoader]] = {
    "tensors": lambda _: DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=8, num_workers=2),
    "images": lambda path: DataLoader(image_folder(path), batch_size=4, num_workers=2),
    "subset": lambda path: DataLoader(
        Subset(image_folder(path), [0, 3, 5]), batch_size=2, num_workers=2
    ),
    "joined": lambda _: DataLoader(
        ConcatDataset([faulty.Blobs(), faulty.Blobs()]), batch_size=4, shuffle=True, num_workers=1
    ),
    "stream": lambda _: DataLoader(workloads.Counting(), batch_size=4, num_workers=2),
    "stream with a length": lambda _: DataLoader(workloads.CountingWithLen(), batch_size=4),
    "dicts": lambda _: DataLoader(workloads.Dicts(), batch_size=4, num_workers=2),
    "batches at once": lambda _: DataLoader(workloads.Batched(), batch_size=4, num_workers=2),
    "not batched": lambda _: DataLoader(faulty.Uneven(), batch_size=None, num_workers=2),
    "ranks": lambda _: DataLoader(
        faulty.Blobs(), sampler=DistributedSampler(faulty.Blobs(), num_replicas=2, rank=1)
    ),
    "weighted": lambda _: DataLoader(
        faulty.Blobs(), sampler=WeightedRandomSampler([1.0] * 16, 16), num_workers=2
    ),
    "padding": lambda _: DataLoader(
        faulty.Uneven(), batch_size=4, collate_fn=faulty.Padded(), num_workers=2
    ),
    "a list": lambda _: DataLoader(list(range(64)), batch_size=8, num_workers=2),  # type: ignore[arg-type]
    "a data frame of numbers": lambda _: DataLoader(
        faulty.Holding(frame=pd.DataFrame({"x": np.arange(500_000)})), num_workers=2
    ),
    "lazy file": lambda path: DataLoader(faulty.LazyFile(numbers_in(path)), num_workers=2),
    "a logger": lambda _: DataLoader(faulty.Holding(log=logger_to_screen()), num_workers=2),
    "persistent, spawned": lambda _: DataLoader(
        faulty.Blobs(), num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
    ),
    "shared epoch": lambda _: DataLoader(
        faulty.SharesTheEpoch(), num_workers=1, persistent_workers=True
    ),
    "optional options": lambda _: DataLoader(
        faulty.Blobs(), num_workers=2, prefetch_factor=4, timeout=60, drop_last=True, batch_size=8
    ),
}


def logger_to_screen() -> Any:
    import logging
    import sys

    logger = logging.getLogger("a data set")
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    return logger


def numbers_in(folder: Path, count: int = 64) -> Path:
    path = folder / "numbers.bin"
    path.write_bytes(np.arange(count, dtype="i8").tobytes())
    return path


def test_a_loader_without_a_sample_is_told() -> None:
    (found,) = check_dataloader(DataLoader(faulty.Blobs(0), num_workers=2))
    assert (found.code, found.severity) == ("invalid-settings", "critical")
    assert "0 batches" in found.message


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loaders_get_no_finding(name: str, tmp_path: Path) -> None:
    assert check_dataloader(HEALTHY[name](tmp_path)) == []


# ---- each code on a small loader ----------------------------------------------------------------


def lambda_loader(**options: Any) -> DataLoader:
    return DataLoader(faulty.Blobs(), collate_fn=lambda samples: samples, **options)


def test_a_10_1_a_class_of_the_notebook_is_named_with_a_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = type("Mine", (faulty.Blobs,), {"__module__": "__main__", "__qualname__": "Mine"})
    monkeypatch.setattr("__main__.Mine", mine, raising=False)
    loader = DataLoader(mine(), num_workers=2, multiprocessing_context="spawn")
    assert codes(loader) == []  # a script: its children can import it
    monkeypatch.setattr(preflight, "main_is_importable", lambda: False)
    found = only(loader, "unpicklable")
    assert found.severity == "critical"
    assert "Mine is defined in the notebook" in found.message
    assert "%%writefile" in found.advice
    assert "Mine" in found.advice
    assert only(DataLoader(mine(), num_workers=2), "unpicklable").severity == "info"  # forked here


def test_a_10_3_the_path_to_what_cannot_be_pickled_is_named() -> None:
    chain = faulty.Chain([abs, round, lambda value: value])
    loader = DataLoader(faulty.Transformed(chain), num_workers=2, multiprocessing_context="spawn")
    found = only(loader, "unpicklable")
    assert found.evidence["path"] == "dataset.transform.transforms[2]"
    assert "dataset.transform.transforms[2]" in found.message
    assert found.severity == "critical"


@linux_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_10_4_the_start_method_in_use_is_named(method: str) -> None:
    found = only(lambda_loader(num_workers=2, multiprocessing_context=method), "unpicklable")
    assert found.severity == "critical"
    assert f"workers started by {method} need that" in found.message
    assert found.evidence["start_method"] == method


def test_a_10_4_the_default_start_method_counts_too(on: Callable[..., Machine]) -> None:
    on(start_method="forkserver")
    found = only(lambda_loader(num_workers=2), "unpicklable")
    assert (found.severity, found.evidence["start_method"]) == ("critical", "forkserver")
    on(start_method="fork")
    found = only(lambda_loader(num_workers=2), "unpicklable")
    assert found.severity == "info"
    assert "forked here, so it works for now" in found.message
    assert codes(lambda_loader(num_workers=2), spawn_check=False) == []


def test_a_10_8_the_collate_function_of_a_loader_subclass_is_named() -> None:
    loader = faulty.LambdaLoader(faulty.Blobs(), num_workers=2, multiprocessing_context="spawn")
    assert only(loader, "unpicklable").evidence["path"] == "collate_fn"


def test_the_worker_init_function_is_named() -> None:
    loader = DataLoader(
        faulty.Blobs(), num_workers=1, worker_init_fn=lambda number: None,
        multiprocessing_context="spawn",
    )  # fmt: skip
    assert only(loader, "unpicklable").evidence["path"] == "worker_init_fn"


def test_sending_a_large_data_set_is_seen_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, on: Callable[..., Machine]
) -> None:
    on(start_method="spawn")
    monkeypatch.setattr("dataloading.start_rules.SLOW_START_S", 0.01)
    rows = [(f"image {number}", number) for number in range(50_000)]
    found = only(DataLoader(faulty.Holding(rows=rows), num_workers=4), "dataset-pickling")
    assert found.evidence["pickled_bytes"] > 50_000 * 8
    assert found.evidence["start_s"] == pytest.approx(14 * found.evidence["pickling_s"])
    array = np.zeros((50_000, 20))
    found = only(DataLoader(faulty.Holding(rows=array), num_workers=4), "dataset-pickling")
    assert found.evidence["pickled_bytes"] >= array.nbytes
    shared = torch.zeros(50_000, 20)
    assert codes(DataLoader(faulty.Holding(rows=shared), num_workers=4)) == []
    assert not shared.is_shared()


def test_a_04_2_the_column_of_python_objects_is_named(on: Callable[..., Machine]) -> None:
    on()
    names = np.array([f"image {number}.jpg" for number in range(150_000)], dtype=object)
    frame = pd.DataFrame({"label": np.arange(150_000), "name": pd.Series(names, dtype=object)})
    found = only(DataLoader(faulty.Holding(frame=frame), num_workers=4), "copy-on-write-growth")
    assert found.evidence["path"] == "dataset.frame['name']"
    assert found.evidence["objects"] == 150_000
    assert "NumPy arrays" in found.advice
    # the advice taken: arrays instead of objects
    frame = frame.assign(name=frame["name"].str.len())
    packed = np.array(names.tolist(), dtype="S")
    healed = faulty.Holding(frame=frame, packed=packed)
    assert codes(DataLoader(healed, num_workers=4)) == []


def test_the_part_with_the_most_objects_is_named() -> None:
    held = {
        "few": ["a"] * 10,
        "flat": ["a"] * 150_000,
        "pairs": [("a", 1)] * 120_000,
        "array": np.zeros(10**6),
    }
    assert most_objects(list(walk(held, "dataset"))) == ("dataset['pairs']", 360_000)
    del held["pairs"]
    assert most_objects(list(walk(held, "dataset"))) == ("dataset['flat']", 150_000)
    del held["flat"]
    assert most_objects(list(walk(held, "dataset"))) is None


def test_several_columns_of_objects_are_named_together() -> None:
    column = pd.Series(["a"] * 60_000, dtype=object)
    frame = pd.DataFrame({"a": column, "b": column})
    assert most_objects([("dataset.frame", frame)]) == ("dataset.frame[['a', 'b']]", 120_000)
    assert most_objects([("dataset.column", column)]) is None
    assert most_objects([("dataset.column", pd.concat([column] * 2))]) == (
        "dataset.column",
        120_000,
    )


# ---- what is open -------------------------------------------------------------------------------


def with_forked_workers(dataset: Any, workers: int = 4, **options: Any) -> DataLoader:
    return DataLoader(dataset, num_workers=workers, multiprocessing_context="fork", **options)


@linux_only
def test_a_06_3_a_file_opened_in_the_constructor_is_seen_before_the_start(tmp_path: Path) -> None:
    path = numbers_in(tmp_path)
    eager = faulty.EagerFile(path)
    found = check_dataloader(with_forked_workers(eager), spawn_check=False)
    assert [one.code for one in found] == ["fork-unsafe-handle"]  # whether the values match or not
    assert found[0].evidence["path"] == "dataset.file"
    assert "dataset.file is an open file" in found[0].message
    assert not eager.file.closed
    assert codes(DataLoader(eager), spawn_check=False) == []  # no workers, nothing shared
    lazy = faulty.LazyFile(path)
    loader = with_forked_workers(lazy, batch_size=4)
    assert codes(loader) == []
    assert lazy.file is None
    values = [value for batch in loader for value in batch.flatten().tolist()]
    assert values == [int(lazy[index]) for index in range(len(lazy))] == list(range(64))
    eager.close()
    lazy.close()


@linux_only
def test_a_06_3_a_diagnosis_tells_of_the_open_file_too(tmp_path: Path) -> None:
    loader = with_forked_workers(faulty.EagerFile(numbers_in(tmp_path)), 1, batch_size=4)
    diagnosis = diagnose_dataloader(loader, seconds=3.0, progress=False)
    assert diagnosis.evidence.open_handle == "dataset.file"
    assert "fork-unsafe-handle" in [found.code for found in diagnosis.findings]


@linux_only
def test_a_06_4_an_archive_opened_by_asking_for_the_length_is_a_shared_handle(
    tmp_path: Path,
) -> None:
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(64):
            archive.writestr(f"{number}.txt", "x" * (1000 + number))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # the archive itself is clean
    by_length = faulty.ZippedByLength(path, 64)
    before = open_descriptors()
    found = check_dataloader(with_forked_workers(by_length), spawn_check=False)
    assert [one.code for one in found] == ["fork-unsafe-handle"]
    assert found[0].evidence["path"] == "dataset.archive"
    assert "open archive" in found[0].message
    assert by_length.archive is None  # looking has not opened it where it matters
    assert open_descriptors() == before
    healed = with_forked_workers(faulty.ZippedLazily(path, 64), batch_size=4, shuffle=True)
    assert codes(healed) == []
    sizes = sorted(size for batch in healed for size in batch.tolist())
    assert sizes == [1000 + number for number in range(64)]


def open_descriptors() -> int | None:
    process = psutil.Process()
    return process.num_fds() if hasattr(process, "num_fds") else None


def test_what_the_data_set_opens_while_we_look_is_closed_again(tmp_path: Path) -> None:
    inside = faulty.LazyInside(numbers_in(tmp_path))
    before = open_descriptors()
    assert codes(DataLoader(inside, num_workers=2)) == []
    assert inside.reader.file is None
    assert open_descriptors() == before


def test_handles_are_recognised_by_what_they_are(tmp_path: Path) -> None:
    import io
    import socket
    import tarfile

    path = numbers_in(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", "a")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(path)
    database = sqlite3.connect(":memory:")
    server = socket.socket()
    opened = {
        "file": open(path, "rb"),  # noqa: SIM115
        "zip": zipfile.ZipFile(tmp_path / "a.zip"),
        "tar": tarfile.open(tmp_path / "a.tar"),  # noqa: SIM115
        "arrays": np.load(save_arrays(tmp_path / "a.npz")),
        "database": database,
        "server": server,
    }
    found = {one.path: one.kind for one in handles_among(list(walk(opened, "x")))}
    assert found["x['file']"] == "open file"
    assert found["x['zip']"] == found["x['tar']"] == found["x['arrays'].zip"] == "open archive"
    assert found["x['database']"] == "SQLite connection"
    assert found["x['server']"] == "socket"
    for thing in opened.values():
        thing.close()
    closed = [opened[name] for name in ("file", "zip", "tar", "arrays", "server")]
    assert list(handles_among(list(walk(closed, "x")))) == []
    harmless = [io.BytesIO(b"a"), np.memmap(path, mode="r"), zipfile.ZipInfo("a"), socket, sqlite3]
    assert list(handles_among(list(walk(harmless, "x")))) == []


def save_arrays(path: Path) -> Path:
    np.savez(path, a=np.zeros(3))
    return path


def test_handles_in_closures_partials_and_bound_methods_are_found(tmp_path: Path) -> None:
    from functools import partial

    with open(numbers_in(tmp_path), "rb") as file:
        read = file.read
        held = {"closure": lambda: file, "method": read, "partial": partial(print, file=file)}
        for name in held:
            (found,) = handles_among(list(walk({name: held[name]}, "x")))
            assert found.path.startswith(f"x['{name}']")


def test_tensors_on_an_accelerator_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_things, "ACCELERATORS", ("meta",))  # the one device that is everywhere
    held = faulty.Holding(model=torch.nn.Linear(2, 2, device="meta"))
    found = only(DataLoader(held, num_workers=1), "accelerator-in-worker")
    assert found.evidence["path"] == "dataset.model._parameters['weight']"
    assert found.evidence["tensors"] == 2
    assert codes(DataLoader(held)) == []


def test_samples_that_are_made_on_an_accelerator_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_things, "ACCELERATORS", ("cpu",))
    found = only(DataLoader(faulty.Blobs(), num_workers=1), "accelerator-in-worker")
    assert found.evidence["path"] == "sample"


# ---- shared memory and descriptors --------------------------------------------------------------


def test_a_05_1_a_queue_too_large_for_shared_memory_is_refused_before_the_run(
    on: Callable[..., Machine],
) -> None:
    on(shared_memory_free_bytes=64 * MIB)
    images = faulty.Blobs(256, (3, 224, 224))
    loader = DataLoader(images, batch_size=64, num_workers=8, prefetch_factor=2)
    found = only(loader, "shared-memory-short")
    assert found.severity == "critical"
    assert found.evidence["shared_memory_need_bytes"] == 616_562_688
    assert found.evidence["shared_memory_free_bytes"] == 67_108_864
    assert "num_workers x prefetch_factor" in found.advice
    assert "/dev/shm" in found.advice
    assert "sharing" not in found.advice
    assert "file_system" not in found.advice
    assert codes(DataLoader(images, batch_size=64)) == []


def test_a_05_3_a_batch_larger_than_shared_memory_fits_no_number_of_workers(
    on: Callable[..., Machine],
) -> None:
    on(shared_memory_free_bytes=64 * MIB)
    images = faulty.Blobs(64, (3125, 250))
    loader = DataLoader(images, batch_size=64, num_workers=1, prefetch_factor=1)
    found = only(loader, "shared-memory-short")
    assert found.evidence["batch_bytes"] == 200_000_000
    assert "num_workers=0" in found.advice
    assert "/dev/shm" in found.advice
    assert "fewer workers" not in found.advice
    assert "lower num_workers" not in found.advice


@linux_only
def test_a_05_5_the_queues_of_all_living_loaders_are_summed(on: Callable[..., Machine]) -> None:
    on(shared_memory_free_bytes=64 * MIB)
    images = faulty.Blobs(8, (1310720,))  # 5 MiB each

    def persistent() -> DataLoader:
        return DataLoader(
            images, batch_size=4, num_workers=1, prefetch_factor=2, persistent_workers=True
        )

    training, validation = persistent(), persistent()
    assert codes(training) == codes(validation) == []  # 40 MiB each: alone they fit
    assert len(list(training)) == 2
    found = only(validation, "shared-memory-short")
    assert found.evidence["shared_memory_need_bytes"] == 80 * MIB
    assert found.evidence["queued_by_other_loaders"] == 2
    assert codes(training) == []  # it does not count itself twice
    training._iterator._shutdown_workers()
    training._iterator = None
    assert codes(validation) == []


def test_a_05_6_a_cache_of_many_tensors_needs_as_many_descriptors(
    on: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataloading.budget_rules._sharing_strategy", lambda: "file_descriptor")
    on(open_files_limit=1024, start_method="spawn")
    cache = [torch.zeros(2) for _ in range(5000)]
    found = only(DataLoader(faulty.Holding(cache=cache), num_workers=2), "file-descriptors-short")
    assert (found.evidence["descriptors_needed"], found.severity) == (5000, "critical")
    assert "Pack" in found.advice
    packed = torch.stack(cache)
    assert codes(DataLoader(faulty.Holding(cache=packed), num_workers=2)) == []
    assert not cache[0].is_shared()


def test_the_tensors_of_a_batch_are_counted_as_they_are_collated(
    on: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataloading.budget_rules._sharing_strategy", lambda: "file_descriptor")
    on(open_files_limit=16)
    found = only(
        DataLoader(workloads.Slow(), batch_size=4, num_workers=2), "file-descriptors-short"
    )
    assert found.evidence["tensors_per_batch"] == 2  # the number beside the tensor becomes one
    on(shared_memory_free_bytes=100)
    found = only(DataLoader(workloads.Slow(), batch_size=4, num_workers=1), "shared-memory-short")
    assert found.evidence["batch_bytes"] == 4 * (3 * 4 + 8)


# ---- options, shapes, epochs --------------------------------------------------------------------


def test_a_08_3_a_tuple_of_tensors_can_be_pinned(on: Callable[..., Machine]) -> None:
    on(accelerators=GPU.accelerators)
    loader = DataLoader(
        faulty.Blobs(), batch_size=4, pin_memory=True, collate_fn=faulty.tensor_and_list
    )
    assert check_dataloader(loader) == []


def test_a_batch_class_that_pinning_passes_by_is_named(on: Callable[..., Machine]) -> None:
    on(accelerators=GPU.accelerators)
    loader = DataLoader(
        workloads.Slow(), batch_size=4, pin_memory=True, collate_fn=workloads.collate_pair
    )
    found = only(loader, "invalid-settings")
    assert found.evidence == {"batch_type": "Pair"}
    assert "def" not in found.message
    assert "pin_memory(self)" in found.advice
    on()
    assert codes(loader) == ["invalid-settings", "pin-without-accelerator"]


def test_a_09_6_a_data_set_that_is_told_the_epoch_and_workers_that_never_hear_of_it() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "persistent_workers": True}
    before = DataLoader(faulty.ToldTheEpoch(), **options)
    found = only(before, "epoch-not-set", epochs=3)
    assert found.severity == "warning"
    assert "share_memory_" in found.advice
    assert epochs_seen(before) == [0, 0, 0]
    after = DataLoader(faulty.SharesTheEpoch(), **options)
    assert codes(after, epochs=3) == []
    assert epochs_seen(after) == [0, 1, 2]
    assert codes(DataLoader(faulty.ToldTheEpoch(), num_workers=2), epochs=3) == []


def epochs_seen(loader: Any) -> list[int]:
    seen = []
    for epoch in range(3):
        loader.dataset.set_epoch(epoch)
        seen += [int(told[0]) for _, told in loader]
    loader._iterator._shutdown_workers()
    loader._iterator = None
    return seen


def test_a_14_5_the_field_with_uneven_shapes_is_named() -> None:
    found = only(DataLoader(faulty.Masks(), batch_size=4, num_workers=2), "uneven-shapes")
    assert found.evidence["field"] == "sample['mask']"
    assert sorted(found.evidence["shapes"]) == ["(1, 4, 4)", "(3, 4, 4)"]
    assert "image" not in found.message
    pairs = [(torch.zeros(3), torch.zeros(1 + number % 2)) for number in range(8)]
    assert uneven_field(pairs) == ("sample[1]", ("(1,)", "(2,)"))
    assert uneven_field([{"x": torch.zeros(3), "n": 1}, {"x": torch.ones(3), "n": 2}]) is None


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    loader = DataLoader(image_folder(tmp_path, broken=2), batch_size=4, num_workers=2)
    found = only(loader, "bad-images")
    assert [Path(path).name for path in found.evidence["files"]] == ["0.png", "1.png"]


def test_a_batch_that_never_fills_is_seen() -> None:
    loader = DataLoader(faulty.Blobs(4), batch_size=8, drop_last=True)
    assert only(loader, "dropped-samples").evidence["samples"] == 4
    sampler = DistributedSampler(faulty.Blobs(8), num_replicas=4, rank=0)
    loader = DataLoader(faulty.Blobs(8), batch_size=8, drop_last=True, sampler=sampler)
    assert "fewer ranks" in only(loader, "dropped-samples").advice


def test_options_without_effect_are_named() -> None:
    found = only(DataLoader(faulty.Blobs(), worker_init_fn=print), "invalid-settings")
    assert "worker_init_fn" in found.evidence


# ---- nothing happens while we look --------------------------------------------------------------


def state_of(loader: DataLoader) -> Any:
    """Every attribute of a loader, of its samplers and its data set, by identity."""
    owners = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    return [
        {name: id(value) for name, value in getattr(owner, "__dict__", {}).items()}
        for owner in owners
    ]


def test_looking_starts_no_process_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a process was started")

    data = faulty.OwnRandomness()
    data.leak = faulty.Leaking()  # type: ignore[attr-defined]
    generator = torch.Generator()
    loader = DataLoader(
        data, batch_size=4, shuffle=True, generator=generator, num_workers=2, worker_init_fn=print
    )
    expected = faulty.OwnRandomness().draws()
    children = psutil.Process().children()
    globally, locally = workloads.random_state(), generator.get_state().tolist()
    before = state_of(loader)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    if hasattr(os, "fork"):
        monkeypatch.setattr(os, "fork", refuse)
    assert codes(loader) == []
    assert psutil.Process().children() == children
    assert workloads.random_state() == globally
    assert generator.get_state().tolist() == locally
    assert state_of(loader) == before
    assert data.draws() == expected


def test_a_cache_of_the_data_set_stays_as_it_was() -> None:
    data = faulty.Leaking()
    assert codes(DataLoader(data, num_workers=2)) == []
    assert data.kept == []


def test_no_tensor_is_moved_to_shared_memory() -> None:
    data = TensorDataset(torch.zeros(16, 3), torch.zeros(16))
    assert codes(DataLoader(data, num_workers=2, multiprocessing_context="spawn")) == []
    assert [tensor.is_shared() for tensor in data.tensors] == [False, False]


def test_something_else_than_a_loader_is_refused() -> None:
    with pytest.raises(TypeError, match="only a DataLoader can be checked"):
        check_dataloader([1, 2])  # type: ignore[arg-type]


def million(kind: str) -> list[Any]:
    if kind == "strings":
        return [f"image {number}.jpg" for number in range(10**6)]
    return [faulty.Record(f"image {number}.jpg", number) for number in range(10**6)]


def batch_of_strings(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("kind", ["strings", "objects"])
def test_a_list_of_a_million_items_takes_a_few_seconds(kind: str) -> None:
    loader = DataLoader(
        million(kind),  # type: ignore[arg-type]
        num_workers=2,
        collate_fn=batch_of_strings,
        multiprocessing_context="spawn",
    )
    started = time.process_time()  # not disturbed by what else runs on the machine
    found = {one.code for one in check_dataloader(loader)}
    assert time.process_time() - started < MOST_S
    assert found <= {"dataset-pickling"}


# ---- data sets that defend themselves -----------------------------------------------------------


def cyclic() -> Any:
    data = faulty.Holding()
    data.myself = [data]  # type: ignore[attr-defined]
    return data


def deep() -> Any:
    tree: Any = {"leaf": 1}
    for level in range(100):
        tree = {"down": tree, "wide": {number: [level] for number in range(100)}}
    return faulty.Holding(tree=tree)


HOSTILE: dict[str, Callable[[], Any]] = {
    "answers nothing": faulty.AnswersNothing,
    "bad properties": faulty.BadProperties,
    "bad length": faulty.BadLength,
    "never counted": faulty.NeverCounted,
    "cyclic": cyclic,
    "slots": faulty.Slotted,
    "deep": deep,
    "hangs": faulty.Hanging,
    "raises": faulty.Raising,
    "uncopyable": faulty.Uncopyable,
    "ends badly": faulty.PutsAway,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_data_sets_that_defend_themselves_are_looked_at_all_the_same(name: str) -> None:
    data = HOSTILE[name]()
    loader = DataLoader(
        data, sampler=range(8), batch_size=4, drop_last=True, num_workers=2, worker_init_fn=None
    )
    started = time.monotonic()
    assert codes(loader) == []
    assert time.monotonic() - started < 2 * MOST_S
    assert faulty.PutsAway.ended == 0


@pytest.mark.parametrize(
    ("data", "expected"), [(faulty.RefusesState, "unpicklable"), (faulty.NeverPickled, None)]
)
def test_a_data_set_that_cannot_be_pickled_in_a_way_of_its_own(data: Any, expected: Any) -> None:
    found = check_dataloader(DataLoader(data(), num_workers=2))
    assert [one.code for one in found] == ([expected] if expected else [])
    if found:
        assert "KeyError: 'no state'" in found[0].message


def test_looking_works_in_another_thread() -> None:
    loader = DataLoader(workloads.Dozing(), num_workers=2)
    assert workloads.in_thread(lambda: codes(loader)) == []
