"""The stages of a sample, timed inside the workers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import workloads
from torch.utils.data import DataLoader

import helper_functions as h
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.worker_stages import MOST_STAGES, StageNotes, StageWatch


@pytest.fixture(autouse=True)
def tidy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No process, thread or global state is left over, and no temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield from workloads.leaves_nothing()
    assert list(tmp_path.glob("dataloading-*")) == []


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[StageNotes]:
    made = StageNotes(tmp_path / "a.stages", workers=2)
    yield made
    made.remove()
    assert list(tmp_path.glob("a.*")) == []


def measured(data: Any, **options: Any) -> LoaderTiming:
    loader = DataLoader(data, batch_size=4, num_workers=2, **options)
    return h.measure_dataloader(loader, seconds=2.0, progress=False)


def check_stages(timing: LoaderTiming) -> None:
    """`nap` waits, `Burn` computes, and both are seen as what they are."""
    assert timing.workers is not None
    stages = timing.workers.stages
    assert stages is not None
    table = stages.set_index("stage")
    assert list(table.index) == ["nap", "Burn", "rest of __getitem__", "collate"]
    assert table.loc["nap", "wait_s"] > 0.5 * table.loc["nap", "wall_s"]
    assert table.loc["Burn", "cpu_s"] > 0.5 * 0.002
    assert table.loc["nap", "wall_s"] > table.loc["rest of __getitem__", "wall_s"]
    assert table["share"].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "data", [workloads.Staged(), workloads.StagedTogether(), workloads.StagedStream()]
)
def test_every_kind_of_data_set_shows_its_stages(data: Any) -> None:
    check_stages(measured(data))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_show_them_too(method: str) -> None:
    loader = DataLoader(
        workloads.Staged(400), batch_size=4, num_workers=1, multiprocessing_context=method
    )
    check_stages(h.measure_dataloader(loader, seconds=6.0, max_steps=80, progress=False))


def test_the_data_set_is_not_changed_and_delivers_the_same() -> None:
    data = workloads.Staged()
    before = data.transform.transforms[:]
    measured(data)
    assert data.transform.transforms == before


def test_a_data_set_that_bears_no_clocks_is_loaded_as_it_is() -> None:
    timing = measured(workloads.Unwrappable())
    assert timing.steps > 10
    assert timing.workers is not None
    assert timing.workers.stages is None


def test_an_error_of_the_data_set_keeps_its_text() -> None:
    failing = workloads.Failing(200)
    with pytest.raises(KeyError, match="broken sample 5"):
        measured(failing)


def test_without_workers_nothing_of_the_users_is_wrapped() -> None:
    loader = DataLoader(workloads.Staged(), batch_size=4)
    timing = h.measure_dataloader(loader, seconds=0.5, progress=False)
    assert timing.workers is None or timing.workers.stages is None


def test_sums_of_workers_are_put_together(notes: StageNotes) -> None:
    for worker, naps in ((0, 3), (1, 9)):
        watch = StageWatch(notes, worker)
        watch.fetch(lambda data, index: data[index], workloads.Staged(), 0)  # does not count
        for index in range(naps):
            watch.fetch(lambda data, index: data[index], workloads.Staged(), index)
    table = notes.table(0.001, 0.001)
    assert table is not None
    assert table["stage"].tolist() == ["nap", "Burn", "rest of __getitem__", "collate"]
    assert table["wall_s"].iloc[0] >= 0.004
    assert notes.open(0)[0, 0] == 3
    assert notes.open(1)[0, 0] == 9


def test_few_samples_give_no_table(notes: StageNotes) -> None:
    watch = StageWatch(notes, 0)
    for index in range(3):
        watch.fetch(lambda data, index: data[index], workloads.Staged(), index)
    assert notes.table(0.0, 0.0) is None


def test_more_names_than_places_count_as_the_rest(notes: StageNotes) -> None:
    data = workloads.Staged()
    data.transform = workloads.Chain(
        [type(f"Step{n}", (), {"__call__": lambda self, v: v})() for n in range(MOST_STAGES + 5)]
    )
    watch = StageWatch(notes, 0)
    for index in range(8):
        watch.fetch(lambda data, index: data[index], data, index)
    table = notes.table(0.0, 0.0)
    assert table is not None
    assert len(table) == MOST_STAGES + 2


def test_the_dearest_stage_inside_the_workers_is_the_evidence() -> None:
    evidence = Evidence().with_timing(measured(workloads.Staged()))
    assert evidence.top_stage == "nap"
    assert evidence.top_stage_share is not None
    assert evidence.top_stage_share > 0.4
