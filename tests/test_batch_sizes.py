"""The search for a batch size: on steps that pretend a limit, and on real models without one."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas  # noqa: F401  (its first import adds warning filters for good)
import pytest
import torch
import workloads
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
)

from dataloading import batch_sizes
from dataloading.batch_costs import BatchCosts
from dataloading.batch_sizes import BatchSizeSearch, find_batch_sizes
from dataloading.batches import count_samples
from dataloading.budgets import over_budget
from dataloading.machine import Machine
from dataloading.peak_memory import PeakMemory
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.size_search import next_size, with_margin
from dataloading.train_steps import make_train_step, simulated_train_step
from dataloading.watchdog import ProbeTimeout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MEGABYTE = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """The search collects garbage after each trial: here it need not look at all other modules."""
    a_training()  # the first optimizer imports much of torch
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


class Limited:
    """A train step that runs out of memory above a number of units; a sample is one unit."""

    def __init__(self, limit: float, error: Callable[[], Exception] = MemoryError) -> None:
        self.limit = limit
        self.error = error
        self.seen: list[int] = []

    def __call__(self, batch: Any) -> None:
        count = count_samples(batch)
        self.seen.append(count)
        if count > self.limit:
            raise self.error()

    @property
    def tried(self) -> list[int]:
        """Sizes in the order of their trials."""
        return list(dict.fromkeys(self.seen))


class Large(Dataset):
    """Samples that say they hold so many bytes, and hold four."""

    def __init__(self, sample_bytes: int, count: int = 100_000) -> None:
        self.sample_bytes, self.count = sample_bytes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1).expand(self.sample_bytes // 4)


def stretched(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collate without taking the memory."""
    return [samples[0].expand(len(samples), len(samples[0]))]


def loader_of(count: int = 100_000, batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(workloads.Slow(count), batch_size=batch_size, **options)


def search(loader: DataLoader, step: Any, **options: Any) -> BatchSizeSearch:
    return find_batch_sizes(loader, step, **{"progress": False, **options})


def status_of(found: BatchSizeSearch) -> dict[int, str]:
    return dict(zip(found.sizes["batch_size"], found.sizes["status"], strict=True))


def a_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, make_train_step(model, failing_at(0, None), optimizer)


# ---- Cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"margin": 0.0}, {"largest": 8}])
def test_a_18_1_only_a_size_that_was_tried_is_returned(options: dict[str, Any]) -> None:
    step = Limited(8)
    found = search(loader_of(batch_size=2), step, **options)
    assert step.tried[:3] == [2, 4, 8]
    assert found.batch_size == found.largest_passed == 8
    assert {size for size, status in status_of(found).items() if status == "passed"} == {2, 4, 8}


def test_a_18_2_the_margin_is_kept_and_verified() -> None:
    step = Limited(1000)
    found = search(loader_of(batch_size=64), step)
    assert found.batch_size is not None
    assert found.batch_size * 1.1 <= 1000  # what training needs
    assert 850 <= found.batch_size <= 909  # and no more than that is given away
    assert step.seen[-1] == found.batch_size  # verified last, by whole steps
    assert status_of(found)[found.batch_size] == "passed"
    assert found.largest_passed is not None
    assert found.batch_size < found.largest_passed <= 1000


def test_a_18_3_the_rebuilt_loader_has_the_size() -> None:
    loader = loader_of(batch_size=32, shuffle=True)
    found = search(loader, Limited(64), margin=0.0)
    assert status_of(found)[128] == "out of memory"
    settings = LoaderSettings.of(loader).changed(batch_size=found.batch_size)
    inputs, targets = next(iter(rebuild_dataloader(loader, settings)))
    assert len(inputs) == len(targets) == 64
    assert loader.batch_size == 32


def test_a_function_builds_the_loader() -> None:
    def make_dataloader(settings: LoaderSettings) -> DataLoader:
        return DataLoader(range(100), **{"batch_size": 4, **settings.kwargs()})

    found = search(make_dataloader, Limited(16))  # type: ignore[arg-type]
    assert found.present_batch_size == 4
    assert found.largest_passed == 16


def test_a_18_4_the_queue_of_the_workers_fits_the_host() -> None:
    machine = Machine(usable_cpus=8, available_memory_bytes=4000 * MEGABYTE, start_method="fork")
    loader = DataLoader(
        Large(MEGABYTE), batch_size=16, num_workers=4, prefetch_factor=2, collate_fn=stretched
    )
    step = Limited(10**9)
    found = search(loader, step, machine=machine, memory_fraction=0.5)
    assert found.batch_size is not None
    assert 64 <= found.batch_size <= 250
    assert max(step.seen) == found.batch_size  # nothing larger was even tried
    refused = max(status_of(found))
    assert refused > found.batch_size
    assert status_of(found)[refused].startswith("not tried: ")
    assert "of memory" in status_of(found)[refused]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_18_5_a_small_data_set_is_tried_as_a_whole(drop_last: bool) -> None:
    step = Limited(1000)
    found = search(loader_of(50, batch_size=64, drop_last=drop_last), step)
    assert step.tried == [50]
    assert found.batch_size == 50
    assert "not tried: an epoch has 50 samples" in status_of(found).values()


class Hoarder(Limited):
    """Allocates in every trial something that refers to itself, and fails above the limit."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.alive: list[weakref.ref[Any]] = []
        self.left_over: list[int] = []

    def __call__(self, batch: Any) -> None:
        units = Units(100)
        if not self.seen or self.seen[-1] != count_samples(batch):  # a new trial begins
            self.left_over.append(sum(ref() is not None for ref in self.alive))
        self.alive += [weakref.ref(units), weakref.ref(batch[0])]
        super().__call__(batch)


class Units:
    def __init__(self, count: int) -> None:
        self.values = np.zeros(count)
        self.myself = self


def test_a_18_6_nothing_of_a_trial_stays_alive() -> None:
    step = Hoarder(64)
    gc.disable()  # so that only the search can have cleaned up
    try:
        found = search(loader_of(batch_size=4), step)
        still = sum(ref() is not None for ref in step.alive)
    finally:
        gc.enable()
    assert len(step.left_over) >= 5
    assert "out of memory" in status_of(found).values()
    assert step.left_over == [0] * len(step.left_over)
    assert still == 0


def test_a_18_7_the_table_marks_the_chosen_size() -> None:
    _, _, step = a_training()
    found = search(loader_of(60, batch_size=8), step)
    assert list(found.sizes.columns) == [
        *("batch_size", "status", "samples_per_s", "peak_memory_bytes", "chosen"),
    ]
    chosen = found.sizes[found.sizes["chosen"]]
    assert chosen["batch_size"].tolist() == [found.batch_size]
    assert chosen["status"].tolist() == ["passed"]
    passed = found.sizes[found.sizes["status"] == "passed"]
    assert passed["batch_size"].tolist() == [8, 16, 32, 60]
    assert (passed["samples_per_s"] > 0).all()
    assert (passed["peak_memory_bytes"] >= 0).all()


@pytest.mark.parametrize(("drop_last", "steps"), [(False, (32, 8)), (True, (31, 7))])
def test_a_18_8_what_changes_in_training_is_told(drop_last: bool, steps: tuple[int, int]) -> None:
    loader = loader_of(1000, batch_size=32, drop_last=drop_last)
    found = search(loader, Limited(10**9), largest=128)
    assert found.batch_size == 128
    assert found.steps_per_epoch == steps
    note = next(note for note in found.notes if "changes training" in note)
    assert f"{steps[0]} -> {steps[1]} steps per epoch" in note
    assert "learning rate" in note
    assert "4 times for SGD and 2 times for Adam" in note


def test_a_18_10_only_values_that_fit_the_budget_are_tried() -> None:
    machine = Machine(usable_cpus=8, available_memory_bytes=2000 * MEGABYTE, start_method="fork")
    costs = BatchCosts(0, 0, 0, batch_size=100, batch_bytes=100 * MEGABYTE, tensors=1)
    fitting = [
        prefetch
        for prefetch in range(1, 17)
        if over_budget(LoaderSettings(4, prefetch_factor=prefetch), costs, machine, 1.0) is None
    ]
    assert fitting
    assert fitting == list(range(1, len(fitting) + 1))
    assert max(fitting) <= 5
    loader = DataLoader(
        Large(MEGABYTE), batch_size=100, num_workers=4, prefetch_factor=8, collate_fn=stretched
    )
    step = Limited(10**9)
    found = search(loader, step, machine=machine, memory_fraction=1.0)
    assert found.batch_size is not None
    assert max(step.seen) <= found.batch_size < 100  # 32 batches of 100 MB never fit
    assert 4 * 8 * found.batch_size * MEGABYTE <= 2000 * MEGABYTE


# ---- The way through the sizes -------------------------------------------------------------------


def test_the_way_ends_close_below_the_limit() -> None:
    for start, limit in product([1, 2, 32, 48], [1, 2, 3, 7, 33, 100, 1023, 1024, 5000]):
        passed, failed, size, trials = 0, None, start, 0
        while size is not None:
            trials += 1
            passed, failed = (size, failed) if size <= limit else (passed, size)
            size = next_size(passed, failed)
        assert trials <= 24
        assert passed <= limit <= passed * (1 + 1 / 32) + 1e-9
        assert failed is not None
        assert failed > limit


def test_the_margin_is_kept_and_not_exceeded() -> None:
    for margin, size in product([0.0, 0.05, 0.1, 0.5, 2.0], [1, 2, 9, 10, 11, 110, 1000]):
        below = with_margin(size, margin)
        assert 1 <= below <= size
        assert below == 1 or below * (1 + margin) <= size + 1e-6
        assert (below + 1) * (1 + margin) > size


def test_a_present_size_that_is_too_large_is_lowered() -> None:
    found = search(loader_of(batch_size=64), Limited(10), margin=0.0)
    assert found.batch_size == 10
    assert any("64 -> 10 changes training" in note for note in found.notes)
    assert found.summary().startswith("batch size 64 -> 10 (")


def test_nothing_fits() -> None:
    found = search(loader_of(batch_size=4), Limited(0))
    assert found.batch_size is None
    assert found.largest_passed is None
    assert found.steps_per_epoch is None
    assert not found.sizes["chosen"].any()
    assert set(found.sizes["status"]) == {"out of memory"}
    assert "no size passed" in repr(found)
    assert any("No size fits" in note for note in found.notes)
    assert json.loads(json.dumps(found.to_dict()))["batch_size"] is None
    assert found.plot().get_title(loc="left")


def test_a_memory_that_fluctuates_lowers_the_choice() -> None:
    class Shrinking(Limited):
        def __call__(self, batch: Any) -> None:
            if len(self.tried) > 1 and len(batch[0]) < max(self.seen) / 2:
                self.limit = 40  # what passed before does not pass again
            super().__call__(batch)

    step = Shrinking(100)
    found = search(loader_of(batch_size=100), step, margin=1.5)
    assert found.largest_passed is not None
    assert found.batch_size is not None
    assert found.batch_size <= 40
    assert status_of(found)[found.batch_size] == "passed"


def test_the_present_size_stays_where_nothing_larger_may_be_tried() -> None:
    found = search(loader_of(batch_size=16), Limited(100), largest=16)
    assert found.batch_size == 16
    assert not any("changes training" in note for note in found.notes)


def test_a_smaller_batch_that_is_as_fast_is_named() -> None:
    def per_sample(batch: Any) -> None:
        time.sleep(0.0005 * len(batch[0]))  # twice the batch takes twice the time

    found = search(loader_of(batch_size=8), per_sample, largest=64)
    assert found.batch_size == 64
    assert any(note.startswith("Batches of") and "best rate" in note for note in found.notes)


# ---- Errors --------------------------------------------------------------------------------------


def test_the_error_of_an_accelerator_counts_as_out_of_memory() -> None:
    def error() -> Exception:
        return RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")

    assert search(loader_of(batch_size=2), Limited(4, error), margin=0.0).batch_size == 4


def test_other_errors_are_raised_as_they_are() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)")
    with pytest.raises(RuntimeError) as caught:
        search(loader_of(batch_size=2), Limited(4, lambda: error))
    assert caught.value is error
    assert caught.value.__notes__ == ["This came while trying a batch of 8 samples."]


def test_a_step_that_needs_more_than_one_sample_fails_with_its_own_error() -> None:
    _, _, step = a_training()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        search(loader_of(batch_size=1), step)


def test_an_error_of_the_data_set_is_raised() -> None:
    with pytest.raises(KeyError, match="broken sample 5"):
        search(DataLoader(workloads.Failing(100), batch_size=4), Limited(100))


# ---- Everything stays as it was ------------------------------------------------------------------


def weights_of(model: torch.nn.Module) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, ZeroDivisionError])
def test_model_optimizer_random_state_and_loader_are_put_back(ending: Any) -> None:
    model, optimizer, step = a_training()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(workloads.Random(500), batch_size=8, shuffle=True, generator=generator)
    step.loss_fn = failing_at(64, ending)
    before = weights_of(model), generator.get_state().tolist(), workloads.random_state()
    if ending is None:
        found = search(rebuild_with_pairs(loader), step, largest=32)
        assert found.batch_size == 32
    else:
        with pytest.raises(ending):
            search(rebuild_with_pairs(loader), step)
    assert (weights_of(model), generator.get_state().tolist(), workloads.random_state()) == before
    assert optimizer.state_dict()["state"] == {}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert loader.batch_size == 8


def failing_at(size: int, error: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if error is not None and len(predictions) >= size:
            raise error
        return torch.nn.functional.cross_entropy(predictions, targets % 4)

    return loss


def rebuild_with_pairs(loader: DataLoader) -> DataLoader:
    """The same loader, whose inputs have the three features of the model."""
    return rebuild_dataloader(loader, LoaderSettings(), collate_fn=three_features)


def three_features(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.stack([torch.cat([values, values[:1]]) for values, _ in samples])
    return inputs, torch.tensor([index for _, index in samples])


def test_memory_that_ran_out_in_the_middle_of_a_step_leaves_the_model_whole() -> None:
    model, optimizer, step = a_training()
    step.loss_fn = failing_at(30, MemoryError)
    before = weights_of(model)
    found = search(DataLoader(workloads.Slow(500), batch_size=8), step, margin=0.0)
    assert found.batch_size == 29
    assert weights_of(model) == before
    assert optimizer.state_dict()["state"] == {}


def test_a_step_of_ones_own_is_not_put_back_and_that_is_told() -> None:
    _, _, ours = a_training()
    own = search(loader_of(200, batch_size=8), lambda batch: ours(batch), largest=16)
    assert any("your own" in note for note in own.notes)
    assert not any("your own" in note for note in search(loader_of(8), ours).notes)


def test_a_step_may_take_things_out_of_its_batch() -> None:
    def step(batch: dict[str, Any]) -> None:
        batch.pop("text")

    found = search(DataLoader(workloads.Dicts(100), batch_size=8), step, largest=16)
    assert found.batch_size == 16


class OpensOnRead(workloads.Slow):
    """Opens something on first use, which forked workers must not share."""

    handle: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.handle is None:
            self.handle = object()
        return super().__getitem__(index)


def test_the_data_set_itself_is_not_touched() -> None:
    dataset = OpensOnRead(100)
    search(DataLoader(dataset, batch_size=8), Limited(100), largest=16)
    assert dataset.handle is None


# ---- Data sets and loaders -----------------------------------------------------------------------


def test_a_stream_is_read_as_far_as_it_goes() -> None:
    step = Limited(1000)
    found = search(DataLoader(workloads.Counting(40), batch_size=16), step)
    assert found.batch_size == max(step.seen) == 40
    assert found.steps_per_epoch == (3, 1)
    assert "not tried: an epoch has 40 samples" in status_of(found).values()


def test_a_data_set_that_fetches_batches_gets_all_indices_at_once() -> None:
    loader = DataLoader(workloads.Together(300, 0.0), batch_size=64)
    assert search(loader, Limited(256), margin=0.0).batch_size == 256


def test_slow_samples_are_repeated_and_that_is_told() -> None:
    loader = DataLoader(workloads.Slow(10_000, 0.01), batch_size=32)
    step = Limited(10**9)
    found = search(loader, step, seconds=2.0, largest=256)
    assert found.batch_size == 256
    assert max(step.seen) == 256
    assert any("filled up with the same samples" in note for note in found.notes)


def test_an_empty_data_set() -> None:
    with pytest.raises(ValueError, match=r"\(Slow\) gives no sample; expected at least one"):
        search(loader_of(0), Limited(1))


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        (
            DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, False)),
            ValueError,
            "its batch sampler decides what comes together",
        ),
        (DataLoader(Endless(), batch_size=None), ValueError, "its dataset decides"),
        (workloads.OwnConstructor(8), TypeError, "has a constructor of its own"),
        ([[1, 2]], TypeError, "is a list, which cannot be built again"),
    ],
)
def test_loaders_that_take_no_other_size(loader: Any, error: Any, text: str) -> None:
    step = Limited(100)
    with pytest.raises(error, match=text):
        search(loader, step)
    assert not step.seen


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"train_step": None}, TypeError, "train_step is None"),
        ({"train_step": torch.nn.Linear(1, 1)}, TypeError, "train_step is the model"),
        ({"largest": 0}, ValueError, "largest=0 must be at least 1"),
        ({"largest": 2.5}, TypeError, "largest=2.5 must be a whole number"),
        ({"seconds": 0}, ValueError, "seconds=0 must be a finite number above 0"),
        ({"margin": -0.1}, ValueError, "margin=-0.1 must be a finite number of at least 0"),
        ({"memory_fraction": 1.5}, ValueError, "memory_fraction=1.5 must be above 0"),
        ({"memory_fraction": 0}, ValueError, "memory_fraction=0 must be above 0"),
        ({"machine": "mine"}, TypeError, "Expected a Machine from inspect_machine, got str"),
        ({"device": "moon"}, ValueError, "device='moon' is not a device"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        find_batch_sizes(loader_of(), **{"train_step": Limited(1), "progress": False, **options})


# ---- Memory of this process ----------------------------------------------------------------------


class Growing:
    """A step that holds so many bytes a sample while it runs, where the tests can see it."""

    def __init__(self, sample_bytes: int, power: int = 1) -> None:
        self.sample_bytes, self.power = sample_bytes, power
        self.most = 0

    def __call__(self, batch: Any) -> None:
        size = self.sample_bytes * len(batch[0]) ** self.power
        self.most = max(self.most, size)
        held = np.ones(size, dtype=np.uint8)
        time.sleep(0.015)  # long enough to be seen
        del held


@pytest.mark.parametrize(("sample_bytes", "power"), [(2 * MEGABYTE, 1), (100_000, 2)])
def test_memory_of_the_host_is_foreseen_and_not_tried(sample_bytes: int, power: int) -> None:
    """The kernel would end the process; growth with the square of the size is foreseen as well."""
    machine = Machine(usable_cpus=2, available_memory_bytes=150 * MEGABYTE, start_method="fork")
    step = Growing(sample_bytes, power)
    found = search(loader_of(batch_size=8), step, machine=machine, memory_fraction=0.8)
    assert found.batch_size is not None
    assert found.batch_size >= 16
    assert step.most <= 0.9 * 150 * MEGABYTE
    last = max(status_of(found))
    assert "not tried: loader and training need" in status_of(found)[last]


def test_a_size_that_took_more_than_foreseen_is_not_chosen() -> None:
    class Jumping(Growing):
        def __call__(self, batch: Any) -> None:
            self.sample_bytes = 200_000 if count_samples(batch) <= 32 else 2 * MEGABYTE
            super().__call__(batch)

    machine = Machine(usable_cpus=2, available_memory_bytes=100 * MEGABYTE)
    found = search(loader_of(batch_size=8), Jumping(0), machine=machine)
    assert status_of(found)[64].startswith("over the budget: loader and training need")
    assert found.batch_size is not None
    assert found.largest_passed is not None
    assert found.batch_size < found.largest_passed <= 40


def test_peak_memory_grows_with_the_size() -> None:
    found = search(loader_of(batch_size=8), Growing(MEGABYTE), largest=64)
    peaks = found.sizes["peak_memory_bytes"].tolist()
    assert peaks[-1] >= 50 * MEGABYTE
    assert peaks[-1] > 3 * peaks[0]


def test_memory_that_cannot_be_read_is_not_zero() -> None:
    memory = PeakMemory(torch.device("mps"))  # whose memory torch does not count
    with memory.watched():
        pass
    assert memory.peak_bytes is None


def test_the_first_size_may_be_too_large_for_the_machine() -> None:
    machine = Machine(usable_cpus=2, available_memory_bytes=MEGABYTE)
    loader = DataLoader(Large(MEGABYTE), batch_size=4, collate_fn=stretched)
    step = Limited(100)
    found = search(loader, step, machine=machine)
    assert found.batch_size is None
    assert not step.seen
    assert status_of(found)[4].startswith("not tried: ")


# ---- Time ----------------------------------------------------------------------------------------


def test_the_budget_ends_the_search() -> None:
    def per_sample(batch: Any) -> None:
        time.sleep(0.002 * len(batch[0]))

    begun = time.perf_counter()
    found = search(loader_of(batch_size=16), per_sample, seconds=1.0)
    assert time.perf_counter() - begun < 8.0
    assert found.batch_size is not None
    assert "not tried: the time is over" in status_of(found).values()


def test_a_step_that_hangs_ends_with_what_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes, "OVERRUN_S", 0.5)

    def step(batch: Any) -> None:
        if len(batch[0]) > 4:
            workloads.doze(workloads.FOREVER_S)

    found = search(loader_of(batch_size=2), step, seconds=0.5)
    assert found.batch_size == 4
    assert status_of(found)[8] == "failed"
    assert any("stopped by the watchdog" in note for note in found.notes)


def test_a_first_step_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes, "OVERRUN_S", 0.5)
    with pytest.raises(ProbeTimeout, match="Training on a batch of 2 samples"):
        search(loader_of(), lambda batch: workloads.doze(workloads.FOREVER_S), seconds=0.5)


# ---- The result ----------------------------------------------------------------------------------


def test_the_result_shows_itself() -> None:
    found = search(loader_of(400, batch_size=8), Limited(50))
    assert found.batch_size == 45
    rows = dict(found.rows())
    assert rows["64 samples"] == "out of memory"
    assert rows["45 samples"].endswith(", chosen")
    assert "largest that passed 50" in repr(found)
    plain = json.loads(json.dumps(found.to_dict()))
    assert {row["batch_size"] for row in plain["sizes"] if row["chosen"]} == {45}
    assert "45 samples" in found._repr_html_()
    ax = found.plot()
    assert ax.get_xlabel() == "batch size"
    assert "chosen: 45" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_it_works_in_another_thread_and_with_a_bar() -> None:
    loader = loader_of(64, batch_size=8)
    found = workloads.in_thread(lambda: find_batch_sizes(loader, simulated_train_step(0.0)))
    assert found.batch_size == 64
