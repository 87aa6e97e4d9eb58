"""The diagnosis on loaders as people write them: rows, texts, archives, servers, nested data sets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import other_loaders as others
import pytest
import workloads
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading.diagnosis import Diagnosis
from dataloading.preflight_rules import check_dataloader
from dataloading.profiling import profile_samples
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.timing import TrainStep
from dataloading.train_steps import simulated_train_step
from helper_functions import diagnose_dataloader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def diagnosed(loader: DataLoader, train_step: TrainStep | None = None) -> Diagnosis:
    """A short diagnosis; a step of 5 ms unless another is given."""
    step = train_step or simulated_train_step(0.005)
    return diagnose_dataloader(loader, step, seconds=3, progress=False)


def test_rows_of_a_mapped_file_cost_their_handling(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((50_000, 8), dtype=np.float32))
    loader = DataLoader(others.Rows(tmp_path / "rows.npy"), batch_size=512, shuffle=True)
    assert diagnosed(loader, simulated_train_step(0.001)).cause == "per-sample-overhead"


def test_padding_number_by_number_is_collating() -> None:
    loader = DataLoader(others.Texts(500), batch_size=16, collate_fn=others.pad_in_python)
    diagnosis = diagnosed(loader)
    assert (diagnosis.verdict, diagnosis.cause) == ("data-bound", "collate")
    assert diagnosis.profile is not None
    assert diagnosis.profile.top_stage[0] == "collate"


@linux_only
def test_an_archive_opened_before_the_fork_is_named_and_a_lazy_one_is_not(tmp_path: Path) -> None:
    path = others.write_zip(tmp_path / "images.zip", images=64)
    for eager in (True, False):
        images = others.ZippedImages(path, eager=eager)
        loader = DataLoader(images, batch_size=8, num_workers=2, multiprocessing_context="fork")
        codes = {found.code for found in check_dataloader(loader)}
        assert ("fork-unsafe-handle" in codes) == eager
        if images.archive is not None:
            images.archive.close()


def test_downloads_one_by_one_want_workers() -> None:
    with others.slow_server() as port:
        diagnosis = diagnosed(DataLoader(others.Remote(port, 400), batch_size=4))
    assert (diagnosis.verdict, diagnosis.cause) == ("data-bound", "too-few-workers")
    assert diagnosis.profile is not None
    assert diagnosis.profile.cpu_share < 0.5


def test_stages_of_nested_data_sets_are_named_by_their_transforms() -> None:
    profile = profile_samples(DataLoader(others.half_of_two(), batch_size=8))
    named = {"CenterCrop", "ToTensor", "GaussianBlur", "PILToTensor"}
    assert named < set(profile.stages["stage"])
    assert profile.top_stage[0] == "GaussianBlur"


def test_a_loader_of_another_class_trains_on_its_own_batches() -> None:
    loader = others.NamedLoader("house", size=800)
    fields: set[tuple[str, ...]] = set()

    def train(batch: Any) -> None:
        fields.add(tuple(batch))
        time.sleep(0.02)

    diagnosis = diagnosed(loader, train)
    assert fields == {("images", "labels")}
    assert diagnosis.cause == "compute"
    with pytest.raises(TypeError, match="NamedLoader has a constructor of its own"):
        rebuild_dataloader(loader, LoaderSettings(num_workers=1))
