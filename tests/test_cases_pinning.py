"""Cases of pinned memory and asynchronous copies (A-08-1 and -2: recommendation, -3: preflight)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import workloads
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.transfer import READ_BACK, READS, wrong_reads
from dataloading.accelerators import Accelerator
from dataloading.batches import move_to
from dataloading.budget_rules import PINNED_SHARE, prefetch_rule
from dataloading.machine import Machine
from dataloading.peeking import BatchSize, Peek
from dataloading.pinning import old_pinning_bug, pinned_buffer, pins_on_the_way_to
from dataloading.preflight import Preflight
from dataloading.settings import LoaderSettings

GIB = 2**30
CPU = torch.device("cpu")
GPU_MACHINE = Machine(
    usable_cpus=8,
    memory_bytes=16 * GIB,
    available_memory_bytes=16 * GIB,
    accelerators=(Accelerator("cuda", "GPU 0", None),),
)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


# ---- an old bug ---------------------------------------------------------------------------------


def test_a_08_4_the_old_bug_is_mentioned_for_the_old_version_only() -> None:
    advice = old_pinning_bug("1.2.0", cpu_share=0.9)
    assert advice is not None
    assert "1.2.0" in advice
    assert "pin_memory=False" in advice
    assert old_pinning_bug("2.6.0", cpu_share=0.9) is None


@pytest.mark.parametrize(
    ("version", "cpu_share", "mentioned"),
    [
        ("1.1.0", 0.6, True),
        ("1.2.0+cu92", 1.0, True),
        ("1.2.0", 0.2, False),  # the CPUs are not busy
        ("1.0.1", 1.0, False),  # before the bug
        ("1.3.0", 1.0, False),  # mended
        ("1.10.0", 1.0, False),  # not 1.1
        ("2.11.0+cu130", 1.0, False),
        ("not available", 1.0, False),
        ("", 1.0, False),
    ],
)
def test_the_old_bug_has_a_first_and_a_last_version(
    version: str, cpu_share: float, mentioned: bool
) -> None:
    assert (old_pinning_bug(version, cpu_share) is not None) is mentioned


# ---- memory of a pinned queue -------------------------------------------------------------------


def sight(batch_bytes: int, machine: Machine = GPU_MACHINE, **settings: Any) -> Preflight:
    """A loader of 4 workers with 2 batches each ahead, before it starts."""
    usual = {"num_workers": 4, "prefetch_factor": 2, "pin_memory": True}
    return Preflight(
        loader=DataLoader(TensorDataset(torch.arange(64)), batch_size=8),
        settings=LoaderSettings(**{**usual, **settings}),
        machine=machine,
        start_method="fork",
        peek=Peek(epoch_samples=64, batch=BatchSize(batch_bytes, 2)),
    )


QUEUE_OF_12_GIB = 12 * GIB // (8 * 2)  # bytes of a batch: 8 wait, each with its pinned copy


def test_a_08_5_a_pinned_queue_of_12_in_16_gib() -> None:
    found = prefetch_rule(sight(QUEUE_OF_12_GIB))
    assert found is not None
    assert (found.code, found.severity) == ("prefetch-memory", "warning")
    assert found.evidence["queue_bytes"] == 12 * GIB
    assert found.evidence["memory_limit_bytes"] == 16 * GIB
    assert found.evidence["pinned_share"] == 0.75 > PINNED_SHARE == 0.5
    assert "75 %" in found.message
    assert "pin_memory=False" in found.advice
    assert "at most 5 batch(es)" in found.advice  # 5 x 2 x 0.75 GiB stay below 8 GiB


def test_the_advice_for_a_pinned_queue_holds() -> None:
    smaller = prefetch_rule(sight(QUEUE_OF_12_GIB, num_workers=2))  # 4 batches, as advised
    unpinned = prefetch_rule(sight(QUEUE_OF_12_GIB, pin_memory=False))
    for found in (smaller, unpinned):  # still much, but no longer too much of it pinned
        assert found is not None
        assert "pinned_share" not in found.evidence


def test_a_pinned_queue_is_judged_by_the_limit_of_the_container() -> None:
    in_use = replace(GPU_MACHINE, available_memory_bytes=13 * GIB)
    found = prefetch_rule(sight(QUEUE_OF_12_GIB, in_use))
    assert found is not None
    assert found.severity == "critical"  # 12 of the 13 that are free
    large = replace(GPU_MACHINE, memory_bytes=256 * GIB, available_memory_bytes=250 * GIB)
    assert prefetch_rule(sight(QUEUE_OF_12_GIB, large)) is None
    unknown = replace(GPU_MACHINE, available_memory_bytes=None)
    assert prefetch_rule(sight(QUEUE_OF_12_GIB, unknown)) is not None
    nothing_known = replace(unknown, memory_bytes=None)
    assert prefetch_rule(sight(QUEUE_OF_12_GIB, nothing_known)) is None


def test_nothing_is_pinned_without_an_accelerator_or_workers() -> None:
    no_gpu = replace(GPU_MACHINE, accelerators=())
    found = prefetch_rule(sight(QUEUE_OF_12_GIB, no_gpu))
    assert found is not None
    assert found.evidence["queue_bytes"] == 6 * GIB  # no pinned copies
    assert prefetch_rule(sight(QUEUE_OF_12_GIB, num_workers=0, prefetch_factor=None)) is None


def test_a_batch_that_is_too_large_to_pin_at_all() -> None:
    found = prefetch_rule(sight(9 * GIB))
    assert found is not None
    assert found.severity == "critical"
    assert "not even one fits" in found.advice


# ---- copies that are read before they are done --------------------------------------------------

BATCHES: dict[str, Any] = {
    "tensor": torch.arange(1000.0),
    "tuple": (torch.arange(1000.0), torch.arange(1000)),
    "dict": {"numbers": torch.arange(1000.0), "name": "a", "more": [torch.ones(3)]},
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies are asynchronous on a GPU only")
def test_a_08_6_a_copy_to_the_cpu_is_right_when_it_is_read_at_once() -> None:
    plan = Plan(torch.device("cuda:0"), 1.0)
    wrong = {way: wrong_reads(plan, read) for way, read in READ_BACK.items()}
    assert wrong["move_to"] == 0
    assert wrong["blocking"] == wrong["non-blocking, then synchronised"] == 0
    assert wrong["non-blocking, read at once"] > READS / 2  # the hazard


@pytest.mark.parametrize("name", BATCHES)
def test_a_08_6_what_the_helper_copies_equals_a_blocking_copy(name: str) -> None:
    batch = BATCHES[name]
    moved = move_to(batch, CPU)
    right = move_to(batch, CPU, non_blocking=False)
    assert repr(moved) == repr(right) == repr(batch)  # keys, order, types and values
    plan = Plan(CPU, 1.0, dry_run=True)
    assert {wrong_reads(plan, read) for read in READ_BACK.values()} == {0}


class Recorded(torch.Tensor):
    """A tensor that notes how it is asked to be copied."""

    asked: list[tuple[str, bool]]

    def to(self, device: torch.device, non_blocking: bool = False) -> Recorded:  # type: ignore[override]
        self.asked.append((device.type, non_blocking))
        return self


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_08_6_the_helper_waits_where_nothing_else_would(kind: str) -> None:
    # to the CPU: nobody orders the read after the copy. To mps: pytorch issues 139550 and 189690.
    tensor = torch.zeros(3).as_subclass(Recorded)
    tensor.asked = []
    move_to(tensor, torch.device(kind))
    assert tensor.asked == [(kind, False)]


def test_copies_to_cuda_do_not_wait() -> None:
    tensor = torch.zeros(3).as_subclass(Recorded)
    tensor.asked = []
    move_to(tensor, torch.device("cuda:0"))
    move_to(tensor, torch.device("cuda:0"), non_blocking=False)
    assert tensor.asked == [("cuda", True), ("cuda", False)]


# ---- buffers ------------------------------------------------------------------------------------


def test_a_08_7_a_mac_gets_an_ordinary_cpu_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "mps")
    asked = watch_empty(monkeypatch)
    buffer = pinned_buffer((2, 3))
    assert buffer.device.type == "cpu"
    assert not buffer.is_pinned()
    assert buffer.shape == (2, 3)
    assert asked == [("cpu", False)]
    assert pinned_buffer((1,), device="mps", dtype=torch.uint8).dtype == torch.uint8
    assert asked[1] == ("cpu", False)


@pytest.mark.parametrize(
    ("kind", "device", "pins"),
    [
        ("cuda", None, True),
        ("cuda", "cuda:1", True),
        ("cuda", "cpu", False),
        ("xpu", torch.device("xpu"), True),
        ("mps", None, False),
        (None, None, False),
        (None, "cuda", False),
    ],
)
def test_buffers_are_pinned_where_an_accelerator_copies_from_them(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, device: Any, pins: bool
) -> None:
    on(monkeypatch, kind)
    asked = watch_empty(monkeypatch)
    assert pins_on_the_way_to(device) is pins
    pinned_buffer((4,), device=device)
    assert asked == [("cpu", pins)]


def on(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Pretend to be on a machine with this accelerator."""
    found = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)


def watch_empty(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Note the device and the pinning that tensors are made with; makes ordinary ones."""
    asked: list[tuple[str, bool]] = []
    empty = torch.empty

    def noted(*shape: Any, device: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append((str(device), pin_memory))
        return empty(*shape, device=device, **options)

    monkeypatch.setattr(torch, "empty", noted)
    return asked
