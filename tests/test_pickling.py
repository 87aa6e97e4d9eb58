"""What workers would be sent: whether it can be pickled, how much it is, and what stands in the way."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_workloads as faulty
import numpy as np
import psutil
import pytest
import torch
import workloads

from dataloading import pickling
from dataloading.object_graph import MOST_ITEMS, walk
from dataloading.pickling import main_is_importable, probe_pickling


@pytest.fixture(autouse=True)
def tidy() -> Any:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def path_of(thing: Any) -> str | None:
    return probe_pickling(thing, "x").path


# ---- the path to the culprit --------------------------------------------------------------------


def local_class() -> Any:
    class Local:
        pass

    return Local()


CULPRITS: dict[str, tuple[Callable[[], Any], str]] = {
    "itself": (lambda: lambda: 1, "x"),
    "attribute": (lambda: faulty.Holding(lock=threading.Lock()), "x.lock"),
    "in a list": (lambda: [1, [2, lambda: 3]], "x[1][1]"),
    "far down a list": (lambda: [*range(500), lambda: 3], "x[500]"),
    "in a dict": (lambda: {"a": {"b": lambda: 3}}, "x['a']['b']"),
    "argument of a partial": (lambda: functools.partial(print, 1, lambda: 2), "x.args[1]"),
    "keyword of a partial": (lambda: functools.partial(print, key=lambda: 2), "x.keywords['key']"),
    "a chain": (
        lambda: faulty.Transformed(faulty.Chain([abs, lambda value: value])),
        "x.transform.transforms[1]",
    ),
    "not what is left out": (faulty.LeavesOut, "x.steps[1]"),
    "a refusal": (faulty.RefusesState, "x"),
    "local class": (lambda: faulty.Holding(part=local_class()), "x.part"),
    "a module": (lambda: faulty.Holding(sys=sys), "x.sys"),
    "hook of a model": (
        lambda: faulty.Holding(model=hooked()),
        "x.model._forward_hooks",
    ),
    "gradient graph": (
        lambda: faulty.Holding(table=torch.ones(2, requires_grad=True) * 2),
        "x.table",
    ),
}


def hooked() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("name", CULPRITS)
def test_the_innermost_part_that_cannot_be_pickled_is_named(name: str) -> None:
    make, expected = CULPRITS[name]
    found = path_of(make())
    assert found is not None
    assert found.startswith(expected)
    if name != "hook of a model":  # the key of a hook is a number that counts up
        assert found == expected


def test_cycles_end() -> None:
    ring: list[Any] = [lambda: 1]
    ring.append(ring)
    assert path_of(ring) == "x[0]"


def test_the_reason_has_no_address() -> None:
    error = probe_pickling([faulty.Holding(part=local_class())], "x").error
    assert error is not None
    assert "Local" in error
    assert "0x" not in error


# ---- what can be sent ---------------------------------------------------------------------------

SENDABLE: dict[str, Callable[[], Any]] = {
    "function": lambda: torch.utils.data.default_collate,
    "bound method": lambda: faulty.Blobs().__len__,
    "class": lambda: faulty.Blobs,
    "model": lambda: torch.nn.Linear(2, 2),
    "generator": lambda: np.random.default_rng(0),
    "parameter that is a leaf": lambda: torch.ones(2, requires_grad=True),
    "answers nothing": faulty.AnswersNothing,
    "slots": faulty.Slotted,
    "shared number": lambda: multiprocessing.Value("i", 0),
    "shared array": lambda: multiprocessing.Array("d", 3),
    "raw shared array": lambda: multiprocessing.RawArray("d", 3),
    "shared lock": multiprocessing.Lock,
    "storage": lambda: torch.zeros(3).untyped_storage(),
    "shared event": multiprocessing.Event,
    "shared condition": multiprocessing.Condition,
    "shared barrier": lambda: multiprocessing.Barrier(2),
}


@pytest.mark.parametrize("name", SENDABLE)
def test_what_a_worker_can_be_given_is_no_fault(name: str) -> None:
    probe = probe_pickling(faulty.Holding(part=SENDABLE[name]()), "x")
    assert (probe.error, probe.path, probe.finished) == (None, None, True)


def test_a_socket_is_handed_over_and_not_copied_while_we_look() -> None:
    with socket.socket() as open_socket:
        before = psutil.Process().num_fds() if hasattr(psutil.Process(), "num_fds") else None
        assert probe_pickling(faulty.Holding(part=open_socket), "x").error is None
        if before is not None:
            assert psutil.Process().num_fds() == before


def test_bytes_are_counted_as_pickle_would_write_them() -> None:
    rows = [(f"image {number}", number) for number in range(1000)]
    probe = probe_pickling(rows, "x")
    assert probe.size_bytes == len(pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL))
    array = np.zeros(10**6)
    assert array.nbytes <= probe_pickling(array, "x").size_bytes < array.nbytes + 1000


def test_an_array_takes_time_to_send_though_it_takes_none_to_pickle() -> None:
    small, large = (probe_pickling(np.zeros(n, "u1"), "x").seconds for n in (10, 10**8))
    assert large > 0.1 > small


def test_tensors_are_counted_and_neither_copied_nor_moved() -> None:
    tensors = [torch.zeros(1000) for _ in range(3)]
    probe = probe_pickling([tensors, tensors[0]], "x")
    assert probe.tensors == 3
    assert probe.size_bytes < 1000
    assert not any(tensor.is_shared() for tensor in tensors)


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [faulty.NeverPickled, lambda: [Path(f"a/{number}") for number in range(300_000)]]
)
def test_what_takes_too_long_is_cut_short(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickling, "LIMIT_S", 0.1)
    thing = make()
    started = time.monotonic()
    probe = probe_pickling(thing, "x")
    assert time.monotonic() - started < 10.0  # without the limit: a minute, or cut short by none
    assert not probe.finished
    assert probe.error is None
    assert probe.seconds >= 0.1


def test_the_search_for_the_culprit_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "CULPRIT_S", 0.1)
    monkeypatch.setattr(pickling, "LIMIT_S", 5.0)
    many = faulty.Holding(paths=[*[Path(f"a/{number}") for number in range(50_000)], lambda: 1])
    probe = probe_pickling(many, "x")
    assert probe.error is not None
    assert probe.path in ("x", "x.paths")  # as far as it came


# ---- what lives in __main__ ---------------------------------------------------------------------


def test_names_of_main_are_noted_once() -> None:
    mine = type("Mine", (), {"__module__": "__main__", "__qualname__": "Mine"})
    sys.modules["__main__"].Mine = mine  # type: ignore[attr-defined]
    try:
        probe = probe_pickling([mine(), mine(), mine], "x")
    finally:
        del sys.modules["__main__"].Mine  # type: ignore[attr-defined]
    assert probe.in_main == ("Mine",)
    assert probe_pickling([faulty.Blobs()], "x").in_main == ()


def test_main_of_a_script_can_be_imported_and_that_of_a_notebook_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "train.py", raising=False)
    assert main_is_importable()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not main_is_importable()
    monkeypatch.delattr(sys, "ps1")
    monkeypatch.delattr(main, "__file__")
    assert not main_is_importable()


# ---- walking ------------------------------------------------------------------------------------


def paths_in(root: Any) -> list[str]:
    return [path for path, _ in walk(root, "x")]


def test_walking_goes_through_attributes_slots_partials_and_closures() -> None:
    captured = [1]
    slotted = faulty.Slotted()
    root = {
        "partial": functools.partial(print, captured, end=2),
        "slots": slotted,
        "method": faulty.Chain([3]).__call__,
        "closure": lambda: captured,
    }
    assert paths_in(root)[1:] == [
        "x['partial']",
        "x['slots']",
        "x['method']",
        "x['closure']",
        "x['partial'].func",
        "x['partial'].args[0]",
        "x['partial'].keywords['end']",
        "x['slots'].names",  # and not the slot that was never set
        "x['method'].__self__",
        "x['partial'].args[0][0]",
        "x['slots'].names[0]",
        "x['method'].__self__.transforms",
        "x['method'].__self__.transforms[0]",
    ]


def test_walking_runs_no_code_of_what_it_walks_through() -> None:
    class Watchful(dict):
        calls = 0

        def __getitem__(self, key: Any) -> Any:
            type(self).calls += 1
            raise KeyError(key)

        def __getattr__(self, name: str) -> Any:
            type(self).calls += 1
            raise RuntimeError(name)

    root = Watchful(a=1)
    root.b = 2
    assert paths_in(root) == ["x", "x['a']", "x.b"]
    assert paths_in(faulty.BadProperties())[:3] == ["x", "x.count", "x.shape"]
    assert Watchful.calls == 0


def test_walking_passes_by_what_belongs_to_the_program() -> None:
    import logging

    held = faulty.Holding(module=sys, log=logging.getLogger(), kind=faulty.Blobs)
    assert paths_in(held) == ["x", "x.count", "x.shape", "x.module", "x.log", "x.kind", *SHAPE]


SHAPE = ["x.shape[0]"]


def test_of_a_long_list_only_the_beginning_is_walked_through() -> None:
    assert len(paths_in([0] * 10**6)) == 1 + MOST_ITEMS
    assert len(paths_in(dict.fromkeys(range(10**6)))) == 1 + MOST_ITEMS


def test_walking_ends_in_time() -> None:
    wide: Any = 1
    for _ in range(6):
        wide = [[wide] * MOST_ITEMS for _ in range(MOST_ITEMS)]
    started = time.monotonic()
    assert list(walk(wide, "x", budget_s=0.05))
    assert time.monotonic() - started < 1.0


def test_each_object_comes_once_and_nearest_first() -> None:
    shared = [5]
    ring: Any = {"deep": [[shared]], "near": shared}
    ring["ring"] = ring
    assert paths_in(ring) == [
        "x",
        "x['deep']",
        "x['near']",
        "x['deep'][0]",
        "x['near'][0]",
    ]
