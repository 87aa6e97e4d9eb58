"""Settings of a loader, and building the same loader with others."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from dataloading import settings as settings_module
from dataloading.settings import (
    LoaderSettings,
    check_int,
    ineffective_options,
    rebuild_dataloader,
)

DATA = workloads.Slow(40)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


# ---- the cases -------------------------------------------------------------------------------


def test_a_09_1_no_prefetch_key_without_workers() -> None:
    kwargs = LoaderSettings(num_workers=0, prefetch_factor=4).kwargs()
    assert "prefetch_factor" not in kwargs
    assert len(DataLoader(DATA, **kwargs)) == 40


def test_a_09_2_persistent_without_workers_is_off_with_a_note() -> None:
    settings, dropped = LoaderSettings.cleaned(num_workers=0, persistent_workers=True)
    assert settings.persistent_workers is False
    assert "num_workers is 0" in dropped["persistent_workers"]
    assert len(DataLoader(DATA, **settings.kwargs())) == 40


def test_a_09_3_a_users_dict_is_cleaned() -> None:
    wishes = {"num_workers": 0, "prefetch_factor": 4, "persistent_workers": True}
    settings, dropped = LoaderSettings.cleaned(**wishes)
    assert set(dropped) == {"prefetch_factor", "persistent_workers"}
    assert settings == LoaderSettings()
    assert len(DataLoader(DATA, **settings.kwargs())) == 40


@pytest.mark.parametrize("prefetch", [0, -1])
@pytest.mark.parametrize("make", [LoaderSettings, LoaderSettings.cleaned])
def test_a_09_4_prefetch_below_one_is_refused_by_name(make: Any, prefetch: int) -> None:
    with pytest.raises(ValueError, match=f"prefetch_factor={prefetch} must be at least 1"):
        make(num_workers=2, prefetch_factor=prefetch)


def test_a_09_5_queued_batches_and_samples() -> None:
    settings = LoaderSettings(num_workers=4, prefetch_factor=2, batch_size=32)
    assert settings.batch_size is not None
    assert settings.queued_batches == 8
    assert settings.queued_batches * settings.batch_size == 256
    assert LoaderSettings(num_workers=4).queued_batches == 8  # PyTorch's default is 2 as well
    assert LoaderSettings(prefetch_factor=4).queued_batches == 0


# ---- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "error", "text"),
    [
        ({"num_workers": -1}, ValueError, "num_workers=-1 must be at least 0"),
        ({"num_workers": True}, TypeError, "num_workers=True must be a whole number, not bool"),
        ({"num_workers": 2.0}, TypeError, "num_workers=2.0 must be a whole number, not float"),
        ({"num_workers": None}, TypeError, "num_workers=None must be a whole number"),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ({"batch_size": "32"}, TypeError, "batch_size='32' must be a whole number, not str"),
        ({"multiprocessing_context": "thread"}, ValueError, "'thread' is not a start method"),
    ],
)
def test_what_no_loader_takes_is_refused_by_name(
    wishes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        LoaderSettings(**wishes)


def test_unknown_wishes_are_refused() -> None:
    with pytest.raises(TypeError, match="'workers' is not a loader setting; the settings are"):
        LoaderSettings.cleaned(workers=2)


def test_an_optional_number_may_be_none() -> None:
    check_int("max_steps", None, least=1, optional=True)
    with pytest.raises(TypeError, match="max_steps=None"):
        check_int("max_steps", None, least=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_combination_builds(workers: int, pin_memory: bool, in_order: bool) -> None:
    settings = LoaderSettings(
        num_workers=workers,
        batch_size=8,
        pin_memory=pin_memory,
        prefetch_factor=3,
        persistent_workers=True,
        in_order=in_order,
        multiprocessing_context="spawn",
    )
    loader = DataLoader(DATA, **settings.kwargs())
    assert LoaderSettings.of(loader) == settings.changed()


def test_only_keys_that_this_version_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    older_options = {
        name: option
        for name, option in settings_module.accepted_options().items()
        if name != "in_order"
    }
    monkeypatch.setattr(settings_module, "accepted_options", lambda: older_options)
    settings, dropped = LoaderSettings.cleaned(num_workers=2, in_order=False)
    assert dropped == {"in_order": "this version of torch has no such option"}
    assert "in_order" not in settings.kwargs()
    assert "in_order" not in LoaderSettings(num_workers=2, in_order=False).kwargs()
    assert settings.kwargs()["num_workers"] == 2


def test_changing_drops_what_has_no_effect_then() -> None:
    settings = LoaderSettings(num_workers=2, prefetch_factor=4, persistent_workers=True)
    assert settings.changed(num_workers=0) == LoaderSettings()
    assert settings.changed(num_workers=4).prefetch_factor == 4


def test_reading_a_loader_with_numpy_numbers() -> None:
    loader = DataLoader(DATA, num_workers=np.int64(2), prefetch_factor=np.int64(3))
    assert LoaderSettings.of(loader) == LoaderSettings(2, batch_size=1, prefetch_factor=3)


def test_reading_the_start_method() -> None:
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(DATA, num_workers=1, multiprocessing_context=context)
    assert LoaderSettings.of(loader).multiprocessing_context == "spawn"
    assert LoaderSettings.of(DataLoader(DATA)).multiprocessing_context is None


# ---- rebuilding ------------------------------------------------------------------------------


def collate_first(samples: list[Any]) -> Any:
    return default_collate(samples)[0]


def test_everything_else_is_the_same() -> None:
    generator = torch.Generator()
    sampler = SubsetRandomSampler(range(10), generator=generator)
    before = DataLoader(
        DATA,
        batch_size=4,
        sampler=sampler,
        drop_last=True,
        collate_fn=collate_first,
        worker_init_fn=print,
        generator=generator,
        num_workers=2,
        timeout=7,
        pin_memory=True,
        pin_memory_device="cuda",
    )
    after = rebuild_dataloader(before, LoaderSettings(num_workers=1, pin_memory=True))
    assert after is not before
    assert (after.num_workers, after.pin_memory) == (1, True)
    for name in ("dataset", "sampler", "collate_fn", "worker_init_fn", "generator"):
        assert getattr(after, name) is getattr(before, name), name
    for name in ("batch_size", "drop_last", "timeout", "pin_memory_device"):
        assert getattr(after, name) == getattr(before, name), name
    assert len(after) == len(before) == 2
    assert LoaderSettings.of(before).num_workers == 2  # left as it is


def test_without_workers_there_is_no_timeout() -> None:
    before = DataLoader(DATA, num_workers=1, timeout=7)
    assert rebuild_dataloader(before, LoaderSettings()).timeout == 0


def test_same_batches_in_the_same_order() -> None:
    def batches(loader: DataLoader) -> list[list[float]]:
        return [targets.tolist() for _, targets in loader]

    before = DataLoader(
        DATA, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    after = rebuild_dataloader(before, LoaderSettings.of(before))
    assert before.generator is not None
    expected = batches(before)
    before.generator.manual_seed(3)
    assert batches(after) == expected


def test_a_new_batch_size() -> None:
    before = DataLoader(DATA, batch_size=4, shuffle=True)
    after = rebuild_dataloader(before, LoaderSettings(batch_size=8))
    assert (len(before), len(after)) == (10, 5)
    assert isinstance(after.sampler, RandomSampler)


def test_a_batch_sampler_stays() -> None:
    sampler = BatchSampler(SequentialSampler(DATA), batch_size=5, drop_last=False)
    before = DataLoader(DATA, batch_sampler=sampler)
    after = rebuild_dataloader(before, LoaderSettings(num_workers=1))
    assert after.batch_sampler is sampler
    with pytest.raises(ValueError, match="batch_size=3 cannot be set: its batch sampler decides"):
        rebuild_dataloader(before, LoaderSettings(batch_size=3))


def test_a_dataset_that_batches_by_itself() -> None:
    sampler = SequentialSampler(DATA)
    before = DataLoader(DATA, batch_size=None, sampler=sampler)
    after = rebuild_dataloader(before, LoaderSettings(num_workers=1))
    assert after.batch_size is None
    assert after.sampler is sampler
    with pytest.raises(ValueError, match="its dataset decides"):
        rebuild_dataloader(before, LoaderSettings(batch_size=3))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_an_iterable_dataset(batch_size: int | None) -> None:
    before = DataLoader(workloads.Counting(10), batch_size=batch_size, drop_last=bool(batch_size))
    after = rebuild_dataloader(before, LoaderSettings.of(before))
    assert len(list(after)) == len(list(before)) == (10 if batch_size is None else 2)


def test_stand_ins_for_measuring() -> None:
    other = TensorDataset(torch.zeros(40, 2))
    before = DataLoader(DATA, batch_size=4)
    after = rebuild_dataloader(before, LoaderSettings(), dataset=other, collate_fn=collate_first)
    assert next(iter(after)).shape == (4, 2)


def test_subclasses() -> None:
    before = workloads.SameConstructor(DATA, batch_size=4)
    assert type(rebuild_dataloader(before, LoaderSettings())) is workloads.SameConstructor
    with pytest.raises(TypeError, match="OwnConstructor has a constructor of its own"):
        rebuild_dataloader(workloads.OwnConstructor(8), LoaderSettings())


def test_only_a_dataloader_can_be_rebuilt() -> None:
    with pytest.raises(TypeError, match=r"Expected a torch\.utils\.data\.DataLoader, got list"):
        rebuild_dataloader([1, 2], LoaderSettings())  # type: ignore[arg-type]


def test_a_batch_sampler_put_in_place_later_is_refused() -> None:
    class Other(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_size=4)
    other = Other(SequentialSampler(DATA), 4, False)
    object.__setattr__(loader, "batch_sampler", other)
    with pytest.raises(TypeError, match="The batch sampler Other was put in place after"):
        rebuild_dataloader(loader, LoaderSettings())


# ---- options without effect --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, set()),
        ({"worker_init_fn": print, "timeout": 3}, {"worker_init_fn", "timeout"}),
        ({"worker_init_fn": print, "timeout": 3, "num_workers": 1}, set()),
        ({"in_order": False}, {"in_order"}),
        ({"in_order": False, "num_workers": 1}, {"in_order"}),
        ({"in_order": False, "num_workers": 2}, set()),
        ({"pin_memory_device": "cuda"}, {"pin_memory_device"}),
        ({"pin_memory_device": "cuda", "pin_memory": True}, set()),
    ],
)
def test_options_without_effect(options: dict[str, Any], found: set[str]) -> None:
    assert set(ineffective_options(DataLoader(DATA, **options))) == found


def test_something_else_has_no_options() -> None:
    assert ineffective_options([1, 2]) == {}
