"""Clocks that travel into the workers, and loaders that are lent for measuring."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from workloads import linux_only

from dataloading import worker_records
from dataloading.borrowing import borrowed
from dataloading.settings import LoaderSettings
from dataloading.worker_clock import BatchClock, instrument
from dataloading.worker_costs import RECORD, WorkerCosts
from dataloading.worker_records import WorkerRecords


@pytest.fixture(autouse=True)
def tidy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No process, thread or global state is left over, and no temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield from workloads.leaves_nothing()
    assert list(tmp_path.glob("*.records")) == []


@pytest.fixture
def records() -> Iterator[WorkerRecords]:
    made = WorkerRecords(workers=1)
    yield made
    made.remove()


def batch(ended_ns: int, **known: int) -> tuple[int, ...]:
    """A record whose other fields are nought."""
    values = {**dict.fromkeys(RECORD.names or (), 0), "ended_ns": ended_ns, **known}
    return tuple(values.values())


# ---- records ---------------------------------------------------------------------------------


def test_records_come_back_oldest_first(records: WorkerRecords) -> None:
    for ended_ns in (300, 100, 200):
        records.write(batch(ended_ns))
    assert records.read()["ended_ns"].tolist() == [100, 200, 300]


def test_a_worker_of_the_next_epoch_writes_behind_the_last_one(records: WorkerRecords) -> None:
    records.write(batch(1))
    records.write(batch(2))
    next_worker = pickle.loads(pickle.dumps(records))
    next_worker.write(batch(3))
    assert records.read()["ended_ns"].tolist() == [1, 2, 3]
    assert next_worker.summary().batches == 3


def test_full_slots_are_overwritten(
    records: WorkerRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_records, "SLOTS", 2)
    small = WorkerRecords(workers=1)
    try:
        for ended_ns in (1, 2, 3):
            small.write(batch(ended_ns))
        assert small.read()["ended_ns"].tolist() == [2, 3]
    finally:
        small.remove()


def test_no_batch_no_costs(records: WorkerRecords) -> None:
    assert records.summary() is None


def test_removing_deletes_the_file(records: WorkerRecords) -> None:
    records.write(batch(1))
    assert records.path.exists()
    records.remove()
    records.remove()
    assert not records.path.exists()


def test_a_batch_is_summed_up_over_its_samples(records: WorkerRecords) -> None:
    clock = BatchClock(records)
    for _ in range(3):
        clock.add(wall_ns=100, cpu_ns=40, samples=1)
    clock.close(collate_wall_ns=30, collate_cpu_ns=20)
    clock.close(0, 0)
    first, second = records.read()
    assert [int(first[name]) for name in RECORD.names or ()][:5] == [300, 120, 30, 20, 3]
    assert int(second["fetch_wall_ns"]) == 0


def test_costs_are_medians_over_batches() -> None:
    ms = 10**6
    collate = {"collate_wall_ns": 2 * ms, "collate_cpu_ns": 2 * ms, "samples": 8}
    rows = [
        batch(1, fetch_wall_ns=wall * ms, fetch_cpu_ns=wall * ms // 4, **collate)
        for wall in (30, 32, 2000)
    ]
    costs = WorkerCosts.from_records(np.array(rows, dtype=RECORD))
    assert costs is not None
    assert (costs.batches, costs.samples) == (3, 8)
    assert costs.fetch_s == pytest.approx(0.032)  # the 2 s of the first batch do not count
    assert costs.batch_s == pytest.approx(0.034)
    assert costs.cpu_share == pytest.approx((8 + 2) / 34)
    assert "32 ms to fetch and 2 ms to collate a batch of 8" in repr(costs)
    assert WorkerCosts.from_records(np.array([], dtype=RECORD)) is None


def test_pages_of_mapped_files_count_as_read(records: WorkerRecords) -> None:
    for number in range(1, 9):  # each batch faults 1000 bytes in, and reads 10 by calls
        totals = {"storage_bytes": 1000 * number, "read_calls_bytes": 10 * number}
        records.write(batch(number, samples=1, **totals))
    costs = records.summary()
    assert costs.storage_share == costs.first_storage_share == 1.0


# ---- instrumented loaders ----------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Batches as lists, so that they compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


LOADERS = {
    "map": lambda: DataLoader(workloads.Slow(10), batch_size=4),
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(10)), batch_size=4, drop_last=True),
    "list": lambda: DataLoader(list(range(10)), batch_size=4),  # type: ignore[arg-type]
    "dicts": lambda: DataLoader(workloads.Dicts(10), batch_size=4),
    "dataclass": lambda: DataLoader(
        workloads.Slow(10), batch_size=4, collate_fn=workloads.collate_pair
    ),
    "fetched at once": lambda: DataLoader(workloads.Batched(10), batch_size=4),
    "iterable": lambda: DataLoader(workloads.Counting(10), batch_size=4),
    "iterable with len": lambda: DataLoader(workloads.CountingWithLen(10), batch_size=4),
    "not batched": lambda: DataLoader(workloads.Slow(10), batch_size=None),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_instrumented_loader_delivers_the_same(kind: str) -> None:
    loader = LOADERS[kind]()
    timed, records, _ = instrument(loader, LoaderSettings.of(loader))
    expected = plain(list(loader))
    assert plain(list(timed)) == expected
    costs = records.summary()
    records.remove()
    assert costs is not None
    assert costs.batches == len(expected)
    assert costs.samples == (1 if kind == "not batched" else 4)
    assert hasattr(timed.dataset, "__len__") == hasattr(loader.dataset, "__len__")
    assert isinstance(timed.dataset, IterableDataset) == isinstance(loader.dataset, IterableDataset)


@linux_only
def test_costs_are_noted_inside_workers_and_over_epochs() -> None:
    data = workloads.Slow(8, seconds=0.01)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    timed, records, _ = instrument(loader, LoaderSettings.of(loader))
    assert len(list(timed)) + len(list(timed)) == 8
    costs = records.summary()
    records.remove()
    assert costs is not None
    assert (costs.batches, costs.samples) == (8, 2)
    assert 0.02 <= costs.fetch_s < 0.2  # two samples of 10 ms
    assert costs.cpu_share < 0.5  # sleeping is waiting


@linux_only
def test_a_worker_init_fn_reaches_the_dataset() -> None:
    loader = DataLoader(
        workloads.Sharded(8),
        batch_size=2,
        num_workers=2,
        worker_init_fn=workloads.give_part,
        multiprocessing_context="fork",
    )
    timed, records, _ = instrument(loader, LoaderSettings.of(loader))
    numbers = sorted(number for batch in timed for number in batch.tolist())
    records.remove()
    assert numbers == list(range(8))  # each once: no worker went through all of them


def test_the_wrapper_answers_for_the_dataset() -> None:
    data = workloads.Slow(6)
    loader = DataLoader(data)
    timed, records, _ = instrument(loader, LoaderSettings.of(loader))
    wrapper: Any = pickle.loads(pickle.dumps(timed.dataset))
    assert (len(wrapper), wrapper.count, wrapper[2][1]) == (6, 6, 2)
    wrapper.count = 5
    assert (wrapper.inner.count, data.count) == (5, 6)
    with pytest.raises(AttributeError, match="missing"):
        _ = wrapper.missing
    records.remove()


def test_a_loader_that_cannot_be_built_again_leaves_no_file(tidy: Path) -> None:
    with pytest.raises(TypeError, match="OwnConstructor"):
        instrument(workloads.OwnConstructor(8), LoaderSettings())


# ---- lent loaders ------------------------------------------------------------------------------


def test_a_copy_is_lent_and_put_away() -> None:
    loader = DataLoader(workloads.Slow(8), num_workers=1, persistent_workers=True)
    with borrowed(loader, clocks=True) as lent:
        assert lent.loader is not loader
        assert lent.queued_batches == 2
        next(iter(lent.loader))
        assert lent.loader._iterator is not None
    assert lent.loader._iterator is None
    assert loader._iterator is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(workloads.Slow(8), num_workers=1, persistent_workers=True),
        lambda: workloads.OwnConstructor(8, num_workers=1, persistent_workers=True),
    ],
)
def test_live_workers_of_the_user_stay_alive(make: Any) -> None:
    loader = make()
    next(iter(loader))
    mine = loader._iterator
    with borrowed(loader) as lent:
        next(iter(lent.loader))
    assert loader._iterator is mine
    assert all(worker.is_alive() for worker in mine._workers)
    assert len(list(loader)) == len(loader)  # still usable
    loader._iterator = None
    mine._shutdown_workers()


def test_a_loader_that_is_lent_itself_gets_its_workers_ended() -> None:
    loader = workloads.OwnConstructor(8, num_workers=1, persistent_workers=True)
    with pytest.raises(KeyError), borrowed(loader, clocks=True) as lent:  # noqa: PT012
        assert lent.loader is loader
        assert lent.records is None
        next(iter(lent.loader))
        raise KeyError("the probe failed")
    assert loader._iterator is None


def test_anything_else_is_lent_as_it_is() -> None:
    batches = [1, 2]
    with borrowed(batches, clocks=True) as lent:
        assert lent.loader is batches
        assert (lent.settings, lent.queued_batches, lent.batched) == (None, 0, True)
