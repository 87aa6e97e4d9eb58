"""Bad input is refused with a sentence that says what, where and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import helper_functions as h
from dataloading.arguments import check_device, check_loader

LOADER = DataLoader(range(64), batch_size=4)
MODEL = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class Stream(IterableDataset):
    """Yields batches itself, as some libraries' loaders do."""

    def __iter__(self) -> Any:
        yield from [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (TensorDataset(torch.zeros(8, 2)), r"data set \(TensorDataset\).*DataLoader\(dataset"),
        (DataLoader, "class DataLoader"),
        ("photos", "str"),
        ({"a": 1}, "dict"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        h.measure_dataloader,
        h.diagnose_dataloader,
        h.watch_dataloader,
        lambda loader: h.compare_dataloaders(LOADER, loader),
        lambda loader: h.compare_dataloaders(loader, LOADER),
        lambda loader: h.measure_scaling(lambda size: loader, [10, 20], seconds=0.1),
    ],
)
def test_what_is_no_loader_is_refused(use: Any, loader: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        use(loader)


@pytest.mark.parametrize("loader", [LOADER, Stream(), [[1, 2]], iter([[1, 2]])])
def test_what_yields_batches_is_a_loader(loader: Any) -> None:
    check_loader(loader)


def test_a_generator_that_is_used_up_is_named() -> None:
    batches = iter([[1, 2]])
    next(batches)
    with pytest.raises(ValueError, match="only once"):
        h.measure_dataloader(batches, seconds=0.2, progress=False)


@pytest.mark.parametrize("step", [3, "step", torch.nn.Linear])
@pytest.mark.parametrize(
    "use",
    [
        lambda step: h.measure_dataloader(LOADER, step),
        lambda step: h.diagnose_dataloader(LOADER, step),
        lambda step: h.compare_dataloaders(LOADER, LOADER, step),
        lambda step: h.measure_scaling(lambda size: LOADER, [10, 20], train_step=step),
    ],
)
def test_a_train_step_must_be_a_function(use: Any, step: Any) -> None:
    with pytest.raises(TypeError, match=r"train_step\(batch\)"):
        use(step)


def test_a_model_is_no_train_step() -> None:
    with pytest.raises(TypeError, match="make_train_step"):
        h.measure_dataloader(LOADER, MODEL)


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        ("gpu0", ValueError, "gpu0"),
        (3.5, TypeError, "float"),
        ("cuda:99", ValueError, "not available"),
        (torch.device("cuda", 99), ValueError, "not available"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_device(device)
    with pytest.raises(error, match=says):
        h.measure_dataloader(LOADER, device=device)
    with pytest.raises(error, match=says):
        h.make_train_step(MODEL, torch.nn.CrossEntropyLoss(), SGD, device)


def test_devices_that_are_there_are_taken() -> None:
    assert check_device(None) is None
    assert check_device("cpu") == check_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: h.measure_scaling(LOADER, [10, 20]), TypeError, r"make_dataloader\(size\)"),
        (lambda: h.measure_scaling(lambda n: LOADER, None), TypeError, "sizes"),
        (lambda: h.measure_scaling(lambda n: LOADER, "1234"), TypeError, "sizes"),
        (lambda: h.measure_scaling(lambda n: LOADER, [1.5, 2]), TypeError, "size"),
        (lambda: h.measure_scaling(lambda n: LOADER, [0, 2]), ValueError, "at least 1"),
        (lambda: h.measure_scaling(lambda n: LOADER, [4, 4]), ValueError, "two different"),
        (lambda: h.measure_scaling(lambda n: None, [10, 20]), TypeError, r"make_dataloader\(10\)"),
        (lambda: h.monitor_resources(interval_s="a"), TypeError, "interval_s"),
        (lambda: h.check_dataloader(LOADER, epochs="3"), TypeError, "epochs"),
        (lambda: h.check_dataloader(LOADER, epochs=0), ValueError, "epochs"),
        (lambda: h.check_samples(LOADER, epochs="3"), TypeError, "epochs"),
        (lambda: h.check_samples(LOADER, world_size=0), ValueError, "world_size"),
        (lambda: h.check_samples(LOADER, start_epoch=1), TypeError, "start_epoch"),
        (lambda: h.recommend_settings(LOADER), TypeError, "Diagnosis"),
        (lambda: h.predict_dataloader(LOADER, h.LoaderSettings(), step_s=1), TypeError, "Profile"),
        (lambda: h.simulated_train_step("1"), TypeError, "seconds"),
        (lambda: h.make_train_step(torch.nn.Linear, print, SGD), TypeError, "model"),
        (lambda: h.make_train_step(MODEL, "loss", SGD), TypeError, "loss_fn"),
        (lambda: h.make_train_step(MODEL, print, torch.optim.SGD), TypeError, "optimizer"),
    ],
)
def test_other_bad_arguments_are_named(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    ("settings", "step_s", "says"),
    [("two", 0.1, "LoaderSettings"), (h.LoaderSettings(), "1", "step_s")],
)
def test_a_prediction_names_what_it_cannot_use(settings: Any, step_s: Any, says: str) -> None:
    profile = h.profile_samples(TensorDataset(torch.zeros(20, 2)), samples=8)
    with pytest.raises(TypeError, match=says):
        h.predict_dataloader(profile, settings, step_s=step_s)


def test_sizes_may_be_an_array() -> None:
    fit = h.measure_scaling(
        lambda n: [[0] * 10] * (n // 10), np.array([100, 200, 400]), seconds=0.2, progress=False
    )
    assert fit.sizes.tolist() == [100, 200, 400]


def test_two_loaders_of_which_one_is_empty_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="'after' delivers no"):
        h.compare_dataloaders([[1, 2]] * 40, [], seconds=0.5, progress=False)
