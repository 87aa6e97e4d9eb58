"""Samples shared out over ranks and workers: two processes under torchrun, and ranks played here."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torchrun_job
import workloads
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dataloading import cpus, distributed
from dataloading.audit import check_samples
from dataloading.borrowing import borrowed
from dataloading.distributed import (
    EpochSampler,
    epochs,
    padding,
    rank_and_world_size,
    set_epoch,
    steps_per_rank,
    workers_per_rank,
)
from dataloading.images import ImageFiles
from dataloading.sample_images import create_sample_images
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.sharded_streams import ShardedStream

IMAGES = 24
JOB_LIMIT_S = 100.0
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", *cpus.RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)


# ---- Under torchrun and alone --------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_sample_images(tmp_path_factory.mktemp("photos"), images=IMAGES, size=32)


def run_job(launcher: list[str], photos: Path, report: Path, *options: str) -> list[dict[str, Any]]:
    """What each rank was given; no process is left, whatever happens."""
    job = [sys.executable, *launcher, torchrun_job.__file__, str(photos), str(report), *options]
    process = subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=JOB_LIMIT_S)
    except BaseException:
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
        process.kill()
        process.wait()
        raise
    assert process.returncode == 0, said
    reports = [json.loads(path.read_text()) for path in sorted(report.glob("rank-*.json"))]
    assert not any(psutil.pid_exists(one["process"]) for one in reports)
    return reports


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun's store needs libuv there")
def test_two_processes_under_torchrun_share_every_epoch(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ranks = run_job(TORCHRUN, photos, tmp_path, "--cache", str(cache))
    # one for the machine, and for both loaders, which read the same files in the same way
    assert len(list(cache.glob("*.cache"))) == 1
    assert [one["cached"] for one in ranks] == [IMAGES, IMAGES]
    assert [(one["rank"], one["world_size"]) for one in ranks] == [(0, 2), (1, 2)]
    everything = sorted(
        number
        for image, _ in ImageFiles(photos, torchrun_job.TO_TENSOR)
        for number in torchrun_job.fingerprints(image[None])
    )
    assert len(set(everything)) == IMAGES
    for epoch in range(2):
        both = [number for one in ranks for number in one["delivered"][epoch]]
        assert sorted(both) == everything  # each once
    for one in ranks:
        assert one["delivered"][0] != one["delivered"][1]  # a new order, and other samples
        assert one["steps"] == [math.ceil(IMAGES / 2 / torchrun_job.BATCH_SIZE)] * 2
    assert sorted(ranks[0]["tested"] + ranks[1]["tested"]) == everything
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_the_same_script_runs_alone(photos: Path, tmp_path: Path) -> None:
    (alone,) = run_job([], photos, tmp_path)
    assert (alone["rank"], alone["world_size"]) == (0, 1)
    assert alone["steps"] == [IMAGES / torchrun_job.BATCH_SIZE] * 2
    first, second = alone["delivered"]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(alone["tested"])
    assert len(set(first)) == IMAGES


# ---- Which rank this is --------------------------------------------------------------------------


def test_alone_told_and_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_world_size() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size() == rank_and_world_size(True) == (2, 4)
    assert rank_and_world_size(False) == (0, 1)
    assert rank_and_world_size((1, 3)) == (1, 3)


def test_a_process_group_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert rank_and_world_size() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_required_ranks_that_are_missing_say_how_to_start() -> None:
    with pytest.raises(RuntimeError, match=r"torchrun .*init_process_group"):
        rank_and_world_size(True)


@pytest.mark.parametrize(
    ("told", "error", "text"),
    [
        ((2, 2), ValueError, "rank=2 must be below world_size=2"),
        ((-1, 2), ValueError, "rank=-1"),
        ((0, 0), ValueError, "world_size=0"),
        ((0.0, 2), TypeError, "rank=0.0"),
        ((0, 1, 2), ValueError, "pair"),
        (2, TypeError, "distributed=2"),
        ("auto", TypeError, "'auto'"),
    ],
)
def test_ranks_that_cannot_be(told: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rank_and_world_size(told)


@pytest.mark.parametrize("rank", ["two", "4", "-1"])
def test_an_environment_that_contradicts_itself(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=f"RANK='{rank}' and WORLD_SIZE='4'"):
        rank_and_world_size()


@pytest.mark.parametrize(
    ("wish", "ranks", "given", "note"),
    [
        (8, 1, 8, None),
        (8, 2, 4, "4 instead of 8 workers"),
        (3, 4, 2, "4 ranks on this machine have 8 usable CPUs"),
        (1, 16, 1, None),
        (4, 16, 1, "1 instead of 4"),
        (0, 16, 0, None),
    ],
)
def test_workers_share_the_cpus_of_their_machine(
    wish: int, ranks: int, given: int, note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "usable_cpu_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    workers, said = workers_per_rank(wish)
    assert workers == given
    assert said is None if note is None else said is not None and note in said
    assert workers_per_rank(wish, local_ranks=1)[0] == wish


def test_cpus_that_slurm_gave_to_each_rank_are_not_shared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpus, "usable_cpu_count", lambda: 8)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert workers_per_rank(8) == (8, None)


def joined(shares: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(shares))


# ---- Map-style samples ---------------------------------------------------------------------------


def per_rank(length: int, world_size: int, **options: Any) -> list[EpochSampler]:
    return [EpochSampler(range(length), world_size, rank, **options) for rank in range(world_size)]


def test_every_epoch_has_a_new_order_and_each_sample_once() -> None:
    samplers = per_rank(12, 3)
    seen = []
    for _ in range(3):
        shares = [list(sampler) for sampler in samplers]
        assert sorted(joined(shares)) == list(range(12))
        seen.append(shares)
    assert seen[0] != seen[1] != seen[2] != seen[0]


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"drop_last": True}, {"shuffle": False}])
def test_orders_are_those_of_distributed_sampler(options: dict[str, Any]) -> None:
    ours = EpochSampler(range(11), 2, 1, **options)
    theirs = DistributedSampler(range(11), 2, 1, **options)
    assert len(ours) == len(theirs)
    for epoch in (0, 1, 2):  # theirs must be told
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert ours.epoch == epoch
    for epoch in (5, 5, 0):  # told in any order, as often as one likes
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
    theirs.set_epoch(1)
    assert list(ours) == list(theirs)  # and on from there


def test_the_same_seed_gives_the_same_stream() -> None:
    one, two, other = (EpochSampler(range(20), 2, 0, seed=seed) for seed in (3, 3, 4))
    streams = [[list(sampler) for _ in range(3)] for sampler in (one, two, other)]
    assert streams[0] == streams[1] != streams[2]


def test_evaluation_keeps_its_order() -> None:
    sampler = EpochSampler(range(6), 2, 1, shuffle=False)
    assert list(sampler) == list(sampler) == [1, 3, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"batch_size": None},
        {"batch_size": 2, "num_workers": 1},
        {"batch_size": None, "num_workers": 1},
        {"batch_size": 2, "num_workers": 1, "persistent_workers": True},
    ],
)
def test_a_loader_goes_through_the_epochs_one_by_one(options: dict[str, Any]) -> None:
    loader = DataLoader(range(12), sampler=EpochSampler(range(12), 2, 0), **options)
    expected = EpochSampler(range(12), 2, 0)
    for _ in range(3):
        given = [number for batch in loader for number in torch.as_tensor(batch).flatten().tolist()]
        assert given == list(expected)
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()


def test_a_loader_that_is_built_again_goes_on_with_the_epochs() -> None:
    loader = DataLoader(range(12), batch_size=6, sampler=EpochSampler(range(12), 2, 0))
    expected = EpochSampler(range(12), 2, 0)
    assert torch.cat(list(loader)).tolist() == list(expected)
    again = rebuild_dataloader(loader, LoaderSettings(batch_size=3))
    assert torch.cat(list(again)).tolist() == list(expected)


def test_measuring_on_one_rank_leaves_its_epoch_alone() -> None:
    loaders = [DataLoader(range(12), batch_size=3, sampler=sampler) for sampler in per_rank(12, 2)]
    list(loaders[0]), list(loaders[1])
    with borrowed(loaders[0]) as lent:
        for _ in range(3):
            list(lent.loader)
    shares = [torch.cat(list(loader)).tolist() for loader in loaders]
    assert sorted(joined(shares)) == list(range(12))


@pytest.mark.parametrize("length", [12, 13])
def test_an_audit_finds_nothing_though_no_epoch_was_set(length: int) -> None:
    def make(rank: int, world_size: int) -> DataLoader:
        sampler = EpochSampler(range(length), world_size, rank)
        return DataLoader(range(length), batch_size=3, sampler=sampler)

    audit = check_samples(make, world_size=2, epochs=3)
    assert audit.ok, audit
    assert "epoch-not-set" not in {one.code for one in audit.findings}


def test_an_audit_finds_the_sampler_that_must_be_told() -> None:
    """The audit above can fail: with torch's own sampler it does."""

    def make(rank: int, world_size: int) -> DataLoader:
        sampler = DistributedSampler(range(12), world_size, rank)
        return DataLoader(range(12), batch_size=3, sampler=sampler)

    audit = check_samples(make, world_size=2)
    assert "epoch-not-set" in {one.code for one in audit.findings}


@pytest.mark.parametrize(("length", "ranks"), [(12, 4), (13, 4), (15, 4), (1, 3), (7, 1)])
def test_padding_repeats_fewer_samples_than_there_are_ranks(length: int, ranks: int) -> None:
    shares = [list(sampler) for sampler in per_rank(length, ranks)]
    given = joined(shares)
    assert len({len(share) for share in shares}) == 1
    assert set(given) == set(range(length))
    assert len(given) - length == padding(length, ranks) < ranks


@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_those_of_the_loaders(drop_last: bool) -> None:
    for length in range(8, 14):
        loaders = [
            DataLoader(range(length), batch_size=3, sampler=sampler, drop_last=drop_last)
            for sampler in per_rank(length, 2)
        ]
        expected = steps_per_rank(length, 2, 3, drop_last=drop_last)
        assert [len(list(loader)) for loader in loaders] == [expected] * 2


def test_ranks_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="10 samples over 4 ranks are 3 for each"):
        steps_per_rank(10, 4, 8, drop_last=True)
    with pytest.raises(ValueError, match="0 samples over 2 ranks"):
        steps_per_rank(0, 2, 8)
    with pytest.raises(ValueError, match="leave a rank without any"):
        EpochSampler(range(3), 4, 0, drop_last=True)
    with pytest.raises(ValueError, match="leave a rank without any"):
        EpochSampler([], 2, 0)
    with pytest.raises(ValueError, match="rank=2 must be below"):
        EpochSampler(range(8), 2, 2)


# ---- Streams -------------------------------------------------------------------------------------


class Shuffled(IterableDataset):
    """Numbers in an order of their own for each epoch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(shuffled_numbers(self.epoch, self.count))


def shuffled_numbers(epoch: int, count: int = 20) -> list[int]:
    return random.Random(epoch).sample(range(count), count)


def stream_loaders(source: Any, world_size: int, *, even: bool = False, **options: Any) -> Any:
    return [
        DataLoader(ShardedStream(source, distributed=(rank, world_size), even=even), **options)
        for rank in range(world_size)
    ]


def numbers_of(loader: DataLoader) -> list[int]:
    return [int(number) for batch in loader for number in torch.as_tensor(batch).flatten()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "source", [workloads.Sharded(21), range(21), lambda epoch: iter(range(21))]
)
def test_a_stream_gives_each_sample_once(source: Any, num_workers: int) -> None:
    loaders = stream_loaders(source, 2, batch_size=4, num_workers=num_workers)
    shares = [numbers_of(loader) for loader in loaders]
    assert sorted(joined(shares)) == list(range(21))
    assert [len(share) for share in shares] == [11, 10]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_even_stream_makes_equal_steps(drop_last: bool) -> None:
    for length, workers in [(21, 0), (21, 2), (22, 2), (23, 2)]:
        loaders = stream_loaders(
            range(length), 3, even=True, batch_size=2, num_workers=workers, drop_last=drop_last
        )
        batches = [list(loader) for loader in loaders]
        assert len({len(own) for own in batches}) == 1
        given = torch.cat(joined(batches)).tolist()
        assert len(given) == len(set(given))
        if not drop_last:
            assert sorted(given) == list(range(length - length % 3))


def test_an_even_stream_too_short_for_all_ranks_gives_none_anything() -> None:
    assert [numbers_of(loader) for loader in stream_loaders(range(2), 3, even=True)] == [[], [], []]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
    ],
)
@pytest.mark.parametrize("source", [Shuffled(20), shuffled_numbers])
def test_the_source_hears_of_the_epoch(source: Any, options: dict[str, Any]) -> None:
    stream = ShardedStream(source, distributed=False)
    loader = DataLoader(stream, batch_size=None, **options)
    for epoch in epochs(loader, 4, start=1):
        given = numbers_of(loader)
        assert sorted(given) == list(range(20))
        assert given == shuffled_numbers(epoch)
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()


def test_an_audit_of_a_stream_finds_nothing() -> None:
    def make(rank: int, world_size: int) -> DataLoader:
        stream = ShardedStream(Shuffled(20), distributed=(rank, world_size))
        return DataLoader(stream, batch_size=4, num_workers=2)

    audit = check_samples(make, world_size=2, start_epoch=set_epoch)
    assert audit.ok, audit


def failing_source(epoch: int) -> Iterator[int]:
    raise OSError("no connection")


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (workloads.Counting(20), ValueError, "Counting shares its samples out"),
        (iter([1, 2]), TypeError, "is an iterator"),
        (workloads.Slow(4), TypeError, "EpochSampler"),
        (workloads.Sharded, TypeError, "the class Sharded"),
        (5, TypeError, "source is int"),
    ],
)
def test_sources_that_cannot_be_shared_out(source: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ShardedStream(source, distributed=(0, 2))


def test_a_source_that_fails_says_so_when_it_is_read() -> None:
    stream = ShardedStream(failing_source, distributed=(0, 2))
    with pytest.raises(OSError, match="no connection"):
        list(stream)


# ---- Epochs --------------------------------------------------------------------------------------


def in_batches(sampler: Any) -> DataLoader:
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    return DataLoader(range(8), batch_sampler=batches)


@pytest.mark.parametrize(
    "make", [lambda sampler: DataLoader(range(8), batch_size=2, sampler=sampler), in_batches]
)
def test_epochs_tells_each_of_them(make: Callable[[Any], DataLoader]) -> None:
    loader = make(DistributedSampler(range(8), 2, 0))
    expected = EpochSampler(range(8), 2, 0)
    expected.set_epoch(2)
    counted = []
    for epoch in epochs(loader, 5, start=2):
        counted.append(epoch)
        assert numbers_of(loader) == list(expected)
    assert counted == [2, 3, 4]


def test_loaders_with_nothing_to_tell_are_left_alone() -> None:
    assert list(epochs(DataLoader(range(4)), 2)) == [0, 1]
    assert list(epochs([torch.zeros(1)], 1)) == [0]
    with pytest.raises(ValueError, match="epoch=-1"):
        distributed.set_epoch(DataLoader(range(4)), -1)
