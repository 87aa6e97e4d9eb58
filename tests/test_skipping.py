"""Skipping samples that cannot be read."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import struct
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import odd_images as odd
import pytest
import skipping_workloads as bad
import torch
import workloads
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset
from torchvision import io, transforms
from torchvision.datasets import ImageFolder
from workloads import linux_only

from dataloading.batches import count_samples
from dataloading.borrowing import borrowed
from dataloading.images import image_dataset
from dataloading.observing import finished_batches, queue_is_full
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.skipping import SkippingCollate, SkippingDataLoader, SkippingDataset, make_skipping
from dataloading.unreadable import is_unreadable
from dataloading.watchdog import close_iterator
from dataloading.watching import watch_dataloader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Skipped"),
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
]
GOOD = [number for number in range(12) if number not in (1, 6)]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def numbers(loader: Any) -> list[list[int]]:
    """The samples of each batch."""
    return [labels.tolist() for _, labels in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


# ------------------------------------------------------------------------------------------ loaders


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
@pytest.mark.parametrize("kind", [bad.Bad, bad.BadTogether])
def test_the_rest_of_a_batch_comes_in_order(kind: Any, options: dict[str, Any]) -> None:
    loader = make_skipping(kind(), batch_size=4, **options)
    batches = numbers(loader)
    assert sorted(batches) == [[0, 2, 3], [4, 5, 7], [8, 9, 10, 11]]
    assert loader.skipped().count == 2


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=linux_only)])
def test_marks_come_back_from_workers_of_any_start_method(method: str) -> None:
    loader = make_skipping(
        bad.Bad(bad=(0, 1, 2, 3)), batch_size=4, num_workers=1, multiprocessing_context=method
    )
    assert numbers(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert loader.skipped().count == 4


def test_persistent_workers_stay_and_end_with_the_loader() -> None:
    loader = make_skipping(bad.Bad(), batch_size=4, num_workers=2, persistent_workers=True)
    seen, pids = [], []
    for _ in range(3):
        iterator = iter(loader)
        pids.append([worker.pid for worker in iterator._workers])
        seen.append(numbers(iterator))
    assert seen == [[[0, 2, 3], [4, 5, 7], [8, 9, 10, 11]]] * 3
    assert pids[0] == pids[1] == pids[2]
    assert iter(loader) is loader._iterator  # as in torch: tools tell by this who ends the workers
    del iterator, loader
    deadline = time.monotonic() + workloads.SETTLED_S
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()  # without a run of the garbage collector


def test_no_cycle_keeps_a_loader_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        loader = make_skipping(bad.Bad(), batch_size=4)
        numbers(loader)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_empty_last_batch_is_not_delivered(drop_last: bool) -> None:
    loader = make_skipping(bad.Bad(10, bad=(8, 9)), batch_size=4, drop_last=drop_last)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.skipped().count == (0 if drop_last else 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffled_epochs(num_workers: int) -> None:
    loader = make_skipping(
        bad.Bad(),
        batch_size=5,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(1),
    )
    first, second = flat(numbers(loader)), flat(numbers(loader))
    assert sorted(first) == sorted(second) == GOOD
    assert first != second
    plain = DataLoader(
        range(12), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    order = flat([batch.tolist() for batch in plain])
    assert first == [number for number in order if number in GOOD]


def test_asking_for_pinned_memory_is_harmless() -> None:
    loader = make_skipping(bad.Bad(bad=(0, 1, 2, 3)), batch_size=4, pin_memory=True, num_workers=1)
    assert numbers(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_without_batching_and_with_a_batch_sampler() -> None:
    assert [number for _, number in make_skipping(bad.Bad(), batch_size=None)] == GOOD
    sampler = BatchSampler(SequentialSampler(range(12)), 6, False)
    assert numbers(make_skipping(bad.Bad(), batch_sampler=sampler)) == [
        [0, 2, 3, 4, 5],
        [7, 8, 9, 10, 11],
    ]


def test_a_collate_function_of_ones_own_never_gets_an_empty_list() -> None:
    loader = make_skipping(
        bad.Bad(bad=(0, 1)), batch_size=2, collate_fn=bad.collate_pair, num_workers=1
    )
    batches = list(loader)
    assert len(batches) == 5
    assert all(type(batch) is bad.Pair for batch in batches)


def test_all_samples_bad_is_an_error_and_not_an_empty_epoch() -> None:
    for num_workers in (0, 1):
        loader = make_skipping(bad.Bad(bad=tuple(range(12))), batch_size=4, num_workers=num_workers)
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match="No sample could be read") as caught:
            numbers(iterator)
        close_iterator(iterator)
        assert "sample 0: image file is truncated" in str(caught.value)


def test_a_sampler_without_end_over_bad_samples_ends() -> None:
    class Endless(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from super().__iter__()

    data = bad.Bad(4, bad=(0, 1, 2, 3))
    with pytest.raises(RuntimeError, match="Skipped 4 of 4"):
        numbers(make_skipping(data, batch_size=2, sampler=Endless(data)))
    some = iter(make_skipping(bad.Bad(4, bad=(0, 1)), batch_size=1, sampler=Endless(data)))
    assert {int(next(some)[1]) for _ in range(50)} == {2, 3}


def test_a_sampler_that_only_takes_bad_samples() -> None:
    with pytest.raises(RuntimeError, match="Skipped 2 of 12"):
        numbers(make_skipping(bad.Bad(), batch_size=1, sampler=[1, 6]))


# ------------------------------------------------------------------------------ what may be skipped


@pytest.mark.parametrize("kind", bad.ERRORS)
def test_only_files_that_cannot_be_read_are_skipped(kind: str) -> None:
    loader = make_skipping(bad.Bad(kind=kind), batch_size=4)
    if kind in bad.SKIPPED:
        assert flat(numbers(loader)) == GOOD
    else:
        with pytest.raises(type(bad.ERRORS[kind]())):
            numbers(loader)
        assert loader.skipped().count == 0


def test_further_errors_may_be_named() -> None:
    loader = make_skipping(bad.Bad(kind="value"), batch_size=4, errors=(ValueError,))
    assert flat(numbers(loader)) == GOOD
    assert loader.skipped().files[0] == (1, "crop size must be positive")


def caught(function: Any, *args: Any, **kwargs: Any) -> BaseException:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def load(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def test_what_pillow_raises_for_bad_files(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "bad.ppm").write_bytes(b"P6\n3 3 99999999\n" + bytes(20))
    broken = odd.save(tmp_path / "broken.png")
    content = bytearray(broken.read_bytes())
    content[40:44] = struct.pack(">L", 2**31)
    broken.write_bytes(content)
    odd.png_header(tmp_path / "huge.png", 20_000, 10_000)
    odd.cut(odd.save(tmp_path / "cut.webp"))
    for path in sorted(tmp_path.iterdir()):
        assert is_unreadable(caught(load, path)), path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torchvision_raises_for_bad_files(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    odd.cut(odd.save(tmp_path / "cut.png"))
    for path in (*sorted(tmp_path.iterdir()), tmp_path / "gone.jpg"):
        assert is_unreadable(caught(io.read_image, str(path))), path


def test_what_a_wrong_program_raises_is_none_of_that(tmp_path: Path) -> None:
    image = odd.photo()
    wrong = [
        caught(image.resize, (0, 0)),
        caught(image.save, tmp_path / "a.jpg", "nonsense"),
        caught(image.convert("RGBA").save, tmp_path / "a.jpg"),
        caught(image.convert, "nonsense"),
        caught(transforms.ToTensor(), "a.jpg"),
        caught(transforms.CenterCrop(8), None),
        caught(Image.open, None),
        caught(torch.zeros(2).view, 3),
    ]
    assert [error for error in wrong if is_unreadable(error)] == []


# -------------------------------------------------------------------------------- files and reports


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of five files each, one of them text, one cut."""
    for name in ("a", "b"):
        for number in range(5):
            odd.save(tmp_path / name / f"{number}.jpg", seed=number)
    (tmp_path / "a" / "1.jpg").write_text("no image")
    odd.cut(tmp_path / "b" / "2.jpg")
    return tmp_path


@pytest.mark.parametrize("kind", [image_dataset, ImageFolder])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_named_once_with_their_reasons(photos: Path, kind: Any, num_workers: int) -> None:
    dataset = kind(photos, transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()]))
    loader = make_skipping(dataset, batch_size=3, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"Skipped 2 of 10 samples \(20 %\): 1\.jpg: ") as caught:
        counts = [len(labels) for _, labels in loader]
    assert counts == [2, 3, 2, 1]
    line = next(str(one.message) for one in caught if "Skipped" in str(one.message))
    assert "2.jpg: image file is truncated" in line
    assert "\n" not in line
    files = loader.skipped().files
    assert [path for path, _ in files] == [str(photos / "a/1.jpg"), str(photos / "b/2.jpg")]
    assert ("not an image" if kind is image_dataset else "cannot identify") in files[0][1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second epoch brings nothing new
        assert len(list(loader)) == 4


def test_paths_are_found_through_a_subset(photos: Path) -> None:
    part = Subset(image_dataset(photos, transforms.ToTensor()), [9, 7, 0, 1])
    loader = make_skipping(part, batch_size=2)
    list(loader)
    assert {Path(path).name for path, _ in loader.skipped().files} == {"1.jpg", "2.jpg"}


def test_a_part_of_a_skipping_data_set_can_be_loaded() -> None:
    part = Subset(SkippingDataset(bad.Bad()), [0, 1, 2])
    loader = SkippingDataLoader(
        part, batch_size=1, collate_fn=SkippingCollate(torch.utils.data.default_collate)
    )
    assert numbers(loader) == [[0], [2]]
    assert loader.skipped().count == 1


def test_a_warning_names_three_files_at_most() -> None:
    loader = make_skipping(bad.Bad(bad=(1, 2, 3, 4, 5)), batch_size=4)
    with pytest.warns(UserWarning, match=r"sample 3: .*; and 2 more"):
        numbers(loader)
    assert len(loader.skipped().files) == 5
    assert loader.skipped(limit=1).files[1][1] == "not looked up"


def test_a_loop_that_breaks_off_does_not_warn_and_still_counts() -> None:
    loader = make_skipping(bad.Bad(), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in loader:
            break
    assert loader.skipped().count == 1


def test_a_file_that_was_mended_comes_back(photos: Path) -> None:
    loader = make_skipping(image_dataset(photos, transforms.ToTensor()), batch_size=5)
    assert sum(len(labels) for _, labels in loader) == 8
    odd.save(photos / "a" / "1.jpg")
    assert sum(len(labels) for _, labels in loader) == 9
    assert loader.skipped().files[0][1] == "could be read when tried again"


def test_looking_up_reasons_draws_no_random_numbers(photos: Path) -> None:
    data = image_dataset(photos, transforms.Compose([transforms.RandomCrop(8), torch.sum]))
    loader = make_skipping(data, batch_size=2)
    loader.dataset.marks[:4] = 1  # type: ignore[attr-defined]
    before = workloads.random_state()
    assert "TypeError" in loader.skipped().files[0][1]  # a fault of the program: torch.sum(image)
    assert workloads.random_state() == before


def test_the_report_as_text_table_and_dict(photos: Path) -> None:
    loader = make_skipping(image_dataset(photos, transforms.ToTensor()), batch_size=5)
    assert repr(loader.skipped()) == "Skipped: none of 10 samples"
    list(loader)
    skipped = loader.skipped()
    assert "1.jpg" in skipped._repr_html_()
    assert skipped.to_dict()["share"] == pytest.approx(0.2)
    assert skipped.to_dict()["files"][0][1] == "not an image"


# -------------------------------------------------------------------------- together with the tools


def test_it_answers_for_the_data_set_inside(photos: Path) -> None:
    loader = make_skipping(image_dataset(photos), batch_size=5)
    data: Any = loader.dataset
    assert data.classes == ["a", "b"]
    data.transform = transforms.ToTensor()
    assert data.dataset.transform is data.transform
    assert data[1] is None
    with pytest.raises(AttributeError):
        _ = data.nonsense
    again = pickle.loads(pickle.dumps(data))
    assert len(again) == 10
    assert again.skipped_count == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_built_again_skips_too_and_counts_together(num_workers: int) -> None:
    loader = make_skipping(bad.Bad(), batch_size=4, shuffle=True)
    again = rebuild_dataloader(loader, LoaderSettings(num_workers=num_workers, batch_size=3))
    assert type(again) is SkippingDataLoader
    assert sorted(flat(numbers(again))) == GOOD
    assert loader.skipped().count == 2


def test_clocks_in_its_workers() -> None:
    loader = make_skipping(bad.Bad(bad=(0, 1, 2, 3)), batch_size=4, num_workers=1)
    with borrowed(loader, clocks=True) as lent:
        assert type(lent.loader) is SkippingDataLoader
        assert numbers(lent.loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert lent.records is not None
    assert loader.skipped().count == 4


def test_persistent_workers_of_a_borrowed_loader_are_ended() -> None:
    loader = make_skipping(bad.Bad(), batch_size=4, num_workers=2, persistent_workers=True)
    for clocks in (False, True):
        with borrowed(loader, clocks=clocks) as lent:
            numbers(lent.loader)
            numbers(lent.loader)
    assert loader._iterator is None


@linux_only
def test_the_queue_can_be_seen() -> None:
    iterator = iter(make_skipping(bad.Bad(), batch_size=2, num_workers=2))
    next(iterator)
    assert finished_batches(iterator) is not None
    assert queue_is_full(iterator) in (True, False)
    assert len(iterator) == 6
    iterator._shutdown_workers()


def test_a_watched_loop_counts_what_is_left() -> None:
    loader = watch_dataloader(make_skipping(bad.Bad(), batch_size=4), report=False)
    samples = [count_samples(batch) for batch in loader]
    assert samples == [3, 3, 4]
    assert loader.timing.steps_per_epoch == 3


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="map-style"):
        make_skipping(workloads.Counting(), batch_size=4)
    with pytest.raises(TypeError, match="make_skipping"):
        iter(SkippingDataLoader(bad.Bad(), batch_size=4))

    class NoLength:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="__len__"):
        SkippingDataset(NoLength())
