"""Cases of measuring: clocks on a GPU, and files that come from storage or from the page cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import scipy.stats  # noqa: F401  # its import changes the warnings filters; not ours to test
import torch
import workloads
from torch.utils.data import DataLoader, Dataset
from workloads import linux_only

from dataloading.comparison import compare_dataloaders, judge_pairs
from dataloading.interleaving import Block, interleave, warm_up
from dataloading.plots import plot_comparison
from dataloading.storage_reads import (
    LEAST_BYTES,
    Reads,
    cache_notes,
    cache_states,
    reads_so_far,
    total,
    unlike_caches,
)
from dataloading.timing import measure_dataloader

FILES, FILE_BYTES = 16, 2**20
GB = 10**9
COLD, WARM, NOTHING = Reads(GB, GB), Reads(GB, 0), Reads(1000, 1000)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()
    plt.close("all")


class FileBytes(Dataset):
    """Reads a file for each sample; a cold one always finds it on storage."""

    def __init__(self, folder: Path, *, cold: bool) -> None:
        folder.mkdir()
        self.paths = [folder / f"{number}.bin" for number in range(FILES)]
        self.cold = cold
        for path in self.paths:
            with open(path, "wb") as file:
                file.write(os.urandom(FILE_BYTES))
                file.flush()
                os.fsync(file.fileno())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        size = len(self.paths[index].read_bytes())
        if self.cold:
            forget(self.paths[index])
        return size

    def read_all(self) -> None:
        """An epoch, as a training function would go through it."""
        for _ in DataLoader(self, batch_size=4):
            pass


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where files can be taken out of the page cache and reads are counted; skips elsewhere."""
    if not hasattr(os, "posix_fadvise") or reads_so_far() is None:
        pytest.skip("reads from storage are counted on Linux only")
    probe = FileBytes(tmp_path / "probe", cold=True)
    probe.read_all()
    before = reads_so_far()
    probe.read_all()
    after = reads_so_far()
    assert before is not None
    assert after is not None
    if (after.since(before).storage_share or 0.0) < 0.9:
        pytest.skip("this file system lies in memory, or does not forget its files")
    return tmp_path


# ---- A clock that sees the GPU ------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device test: needs a CUDA GPU")
def test_a_20_1_work_that_the_gpu_has_still_to_do_is_not_waiting_for_data() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")

    def heavy_step(batch: torch.Tensor) -> None:
        for _ in range(20):  # queued on the GPU; the calls return at once
            torch.mm(matrix, matrix)

    loader = DataLoader(torch.zeros(20_000, 4), batch_size=8)
    timing = measure_dataloader(loader, heavy_step, seconds=3.0, device="cuda", progress=False)
    assert timing.clock == "cuda events"  # the host's clock would take the queue for a fast step
    assert timing.wait_share is not None
    assert timing.wait_share < 0.05


# ---- Where bytes came from ----------------------------------------------------------------------


def test_a_20_3_epochs_from_the_page_cache_are_marked() -> None:
    epochs = [Reads(10 * GB, 10 * GB), *[Reads(10 * GB, 0)] * 4]
    assert cache_states(epochs) == ["from storage", *["from cache"] * 4]
    (note,) = cache_notes("before", [], epochs)
    assert note.startswith("1 of the 5 blocks of before read from storage")
    assert cache_notes("before", [], epochs[1:]) == []
    assert cache_states([Reads(GB, GB // 2), NOTHING, None]) == [
        "partly from storage",
        "unknown",  # too little to say anything
        "unknown",
    ]


def test_mapped_files_are_read_without_a_call() -> None:
    assert Reads(1000, 2 * LEAST_BYTES).storage_share == 1.0


@pytest.mark.parametrize("before", [COLD, WARM])
def test_like_caches_can_be_compared(before: Reads) -> None:
    assert unlike_caches(before, before) is None
    assert unlike_caches(before, NOTHING) is None  # after keeps its samples in memory, say
    assert unlike_caches(Reads(GB, GB // 2), Reads(GB, GB // 3)) is None
    assert unlike_caches(WARM, Reads(GB, GB // 50)) is None  # a few files more
    assert unlike_caches(total([None]), before) is None


def test_unlike_caches_cannot_be_compared() -> None:
    for before, after in [(COLD, WARM), (WARM, COLD), (COLD, Reads(GB, GB // 8))]:
        reason = unlike_caches(before, after)
        assert reason is not None
        assert "both warm" in reason
        assert "both cold" in reason


# ---- Files in the page cache, for real ----------------------------------------------------------


@linux_only
def test_a_20_4_the_second_run_of_an_arm_finds_its_files_in_the_page_cache(folder: Path) -> None:
    data = FileBytes(folder / "files", cold=False)
    for path in data.paths:
        forget(path)
    first = compare_dataloaders(data.read_all, data.read_all, seconds=1.5, progress=False)
    (note,) = [note for note in first.notes if "page cache" in note]
    assert re.match(r"before found [0-5] % of its bytes in the page cache at first", note)
    assert "100 % in the compared blocks" in note
    assert first.verdict != "not comparable"
    again = compare_dataloaders(data.read_all, data.read_all, seconds=1.5, progress=False)
    assert not [note for note in again.notes if "page cache" in note]
    for result in (first, again):
        assert result.pairs["before_storage_share"].max() < 0.01
        assert result.pairs["after_storage_share"].max() < 0.01


@linux_only
@pytest.mark.parametrize("workers", [0, 1])
def test_a_cold_and_a_warm_loader_are_not_comparable(folder: Path, workers: int) -> None:
    before, after = (
        DataLoader(
            FileBytes(folder / str(cold), cold=cold),
            batch_size=4,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        for cold in (True, False)
    )
    result = compare_dataloaders(before, after, seconds=2.0, progress=False)
    assert result.verdict == "not comparable"
    assert (result.ratio, result.interval) == (None, None)
    assert re.match(
        r"before read (9\d|100) % of its bytes from storage, after [0-5] %", result.notes[0]
    )
    assert result.pairs["before_storage_share"].mean() > 0.9  # what was seen can be looked at
    assert result.pairs["after_storage_share"].mean() < 0.05
    assert "page cache" in repr(result)


@linux_only
def test_two_cold_loaders_are_compared_with_a_note(folder: Path) -> None:
    before, after = (
        DataLoader(FileBytes(folder / name, cold=True), batch_size=4) for name in ("a", "b")
    )
    result = compare_dataloaders(before, after, seconds=1.5, progress=False)
    assert result.ratio is not None
    assert len([note for note in result.notes if "from storage" in note]) == 2


# ---- Warming up ---------------------------------------------------------------------------------


class MadeUpSide:
    """Reads from storage in its first blocks."""

    def __init__(self, clock: list[float], cold_blocks: float) -> None:
        self.clock = clock
        self.cold_blocks = cold_blocks
        self.ran = 0

    def block(self, seconds: float) -> Block:
        self.ran += 1
        self.clock[0] += max(seconds, 0.1)
        return Block(100, 1.0, 10, COLD if self.ran <= self.cold_blocks else WARM)


def sides(*cold_blocks: float) -> tuple[dict[str, MadeUpSide], Callable[[], float]]:
    clock = [0.0]
    made = [MadeUpSide(clock, count) for count in cold_blocks]
    return dict(zip(("before", "after"), made, strict=True)), lambda: clock[0]


def test_warming_up_goes_on_until_both_read_from_the_page_cache() -> None:
    for cold, blocks in [((0, 0), 1), ((3, 1), 4), ((1, 5), 6)]:
        both, clock = sides(*cold)
        warmed, _ = warm_up(both, 100.0, 1.0, clock)
        assert [len(own) for own in warmed.values()] == [blocks, blocks]


def test_warming_up_ends_when_its_time_is_over() -> None:
    both, clock = sides(float("inf"), 0)
    _, spent_s = warm_up(both, 10.0, 1.0, clock)
    assert 10.0 <= spent_s <= 12.0


def test_pairs_that_read_from_storage_are_marked_in_the_picture() -> None:
    both, clock = sides(1, 0)
    seen = interleave(both, 10.0, clock=clock)
    result = judge_pairs(pd.DataFrame(seen.rows))
    labels = [label.get_text() for label in plot_comparison(result).get_yticklabels()]
    assert labels[0] == "pair 1 (storage)"
    assert not [label for label in labels[1:] if "storage" in label]
