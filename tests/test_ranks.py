"""Waits told from rank to rank: two real processes, and the silence of a single one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
import workloads
from torch.utils.data import DataLoader

from dataloading import ranks
from dataloading.watching import watch_dataloader
from helper_functions import diagnose_dataloader, simulated_train_step

SLOW_RANK = 1


def run_two(work: Any, folder: Path) -> list[Any]:
    """Run `work(rank)` in two processes that form a group; returns what each of them found."""
    mp.spawn(_rank, args=(work, str(folder)), nprocs=2)
    return [(folder / f"found-{rank}").read_text() for rank in range(2)]


def _rank(rank: int, work: Any, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2
    )
    try:
        Path(folder, f"found-{rank}").write_text(repr(work(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def loader_of(rank: int) -> DataLoader:
    return DataLoader(workloads.Slow(60, seconds=0.01 if rank == SLOW_RANK else 0.0))


def watch(rank: int) -> Any:
    watched = watch_dataloader(loader_of(rank), report=False)
    for _ in watched:
        time.sleep(0.002)
    dist.barrier()
    found = watched.diagnosis().top("time")
    return found and (found.code, found.evidence["rank"], found.evidence["ranks"])


def diagnose_on_both(rank: int) -> Any:
    step = simulated_train_step(0.002)
    diagnosis = diagnose_dataloader(loader_of(rank), step, seconds=2, progress=False)
    return "slow-rank" in [found.code for found in diagnosis.findings]


def ask_alone(rank: int) -> Any:
    if rank == 0:
        started = time.monotonic()
        said = ranks.waits_told("measured", number=ranks.tell_wait("measured", 0.1), limit_s=0.3)
        return said, time.monotonic() - started < 5
    return None


def tell_twice(rank: int) -> Any:
    numbers = [ranks.tell_wait("measured", 0.5 + rank) for _ in range(2)]
    dist.barrier()
    return numbers, ranks.waits_told("measured", number=2), ranks.waits_told("watched")


def test_a_watched_slow_rank_is_named_by_every_rank(tmp_path: Path) -> None:
    assert run_two(watch, tmp_path) == ["('slow-rank', 1, 2)"] * 2


def test_a_measured_slow_rank_is_named_by_every_rank(tmp_path: Path) -> None:
    assert run_two(diagnose_on_both, tmp_path) == ["True", "True"]


def test_a_rank_that_asks_alone_gets_the_reason_in_time(tmp_path: Path) -> None:
    said, _ = run_two(ask_alone, tmp_path)
    assert said == "((None, 'no figure came from rank 1'), True)"


def test_the_latest_figure_of_each_rank_counts(tmp_path: Path) -> None:
    told = "([1, 2], ((0.5, 1.5), None), (None, 'no figure came from rank 0'))"
    assert run_two(tell_twice, tmp_path) == [told, told]


def test_without_other_ranks_nothing_is_told() -> None:
    assert ranks.tell_wait("measured", 0.1) == 0
    assert ranks.share_wait("measured", 0.1) == (None, None)


class Gone:
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_store", Gone)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert ranks.tell_wait("measured", 0.1) == 0
    assert ranks.waits_told("measured") == (
        None,
        "the ranks could not be asked (RuntimeError)",
    )
