"""Cases of slow storage, costly samples and stragglers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import case_workloads as cases
import faulty_workloads as faulty
import numpy as np
import pytest
import workloads
from evidence_made_up import WAITING, loop
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from workloads import linux_only

from dataloading import storage
from dataloading.diagnosis import diagnose
from dataloading.images import image_dataset
from dataloading.machine import Machine
from dataloading.preflight import Preflight
from dataloading.preflight_rules import check_dataloader, network_rule
from dataloading.profiling import profile_samples
from dataloading.recommendation import recommend_settings
from dataloading.settings import LoaderSettings
from dataloading.storage import Storage, find_network_storage, network_mount

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MACHINE = Machine(usable_cpus=8, start_method="fork")
DRIVE = "drive {} fuse.drive rw,nosuid 0 0\n"
USUAL_MOUNTS = "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of mounts as on a hosted notebook, with a drive; returns the place of the drive."""
    drive = tmp_path / "my drive"
    table = tmp_path / "mounts"
    escaped = str(drive).replace(" ", "\\040")
    table.write_text(USUAL_MOUNTS + DRIVE.format(escaped), encoding="utf-8")
    monkeypatch.setattr(storage, "MOUNTS", table)
    return drive


def write_files(folder: Path, count: int, size: int) -> list[str]:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(b"x" * size)
    return [str(folder / f"{number}.bin") for number in range(count)]


def judged(storage: Storage | None) -> Any:
    """What the rule says of files on a network mount."""
    seen = Preflight(DataLoader(faulty.Blobs()), LoaderSettings(), MACHINE, "fork", storage=storage)
    return network_rule(seen)


# ---- network mounts -----------------------------------------------------------------------------


def test_a_13_1_a_drive_mount_is_recognised_with_commands_to_copy(mounts: Path) -> None:
    files = write_files(mounts / "photos", 4, 200)
    data = faulty.Holding(samples=[(path, 0) for path in files * 2000])
    (found,) = check_dataloader(DataLoader(data))
    assert found.evidence["storage_class"] == "network mount"
    assert found.evidence["files"] == 8000
    assert found.evidence["file_system"] == "fuse.drive"
    assert found.evidence["mount"] == str(mounts)
    assert "8,000 files" in found.message
    folder = mounts / "photos"
    assert f"tar -cf {folder}.tar -C {folder} ." in found.advice
    assert "local disk" in found.advice


def test_files_on_a_local_disk_are_no_finding(mounts: Path, tmp_path: Path) -> None:
    files = write_files(tmp_path / "photos", 4, 200)
    data = faulty.Holding(samples=[(path, 0) for path in files * 2000])
    assert check_dataloader(DataLoader(data)) == []


@pytest.mark.parametrize(
    "held", [[], ["a sentence", "another"], [("no such file", 1)], [(1, 2)], [None], [()]]
)
def test_what_is_no_list_of_files_is_passed_by(held: list[Any], mounts: Path) -> None:
    (file,) = write_files(mounts / "photos", 1, 200)
    assert find_network_storage([("dataset.held", held), ("dataset.item", (file, 3))]) is None
    found = find_network_storage([("dataset.held", held), ("dataset.files", [file])])
    assert found is not None
    assert (found.files, found.file_bytes) == (1, 200)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("server:/x /data nfs4 rw 0 0", ("/data", "nfs4")),
        ("C: /data 9p rw 0 0", ("/data", "9p")),
        ("x /data fuse.sshfs rw 0 0", ("/data", "fuse.sshfs")),
        ("x /data fuse.overlayfs rw 0 0", None),
        ("/dev/sda /data ext4 rw 0 0", None),
        ("x /other nfs rw 0 0", None),
        ("x / 9p rw 0 0", None),  # the root of a container
        ("x / nfs rw 0 0\n/dev/sda /data ext4 rw 0 0", None),  # a local disk below it
    ],
)
def test_mounts_are_told_apart(
    line: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"{line}\n", encoding="utf-8")
    monkeypatch.setattr(storage, "MOUNTS", table)
    assert network_mount("/data/photos/1.jpg") == expected
    monkeypatch.setattr(storage, "MOUNTS", tmp_path / "none")
    assert network_mount("/data/photos/1.jpg") is None


def test_a_13_2_reading_one_by_one_and_copying_at_once_are_both_estimated() -> None:
    found = judged(Storage("/drive", "fuse.drive", "/drive/photos", 5000, 20_000, file_s=0.4))
    assert found.evidence["one_by_one_s"] == pytest.approx(2000)
    assert found.evidence["at_once_s"] == pytest.approx(10)
    assert found.severity == "warning"
    assert "400 ms each" in found.message
    assert "as one archive about 10" in found.message
    unread = judged(Storage("/drive", "fuse.drive", "/drive/photos", 5000, 20_000))
    assert unread.severity == "info"
    assert "One by one" not in unread.message
    quick = judged(Storage("/drive", "fuse.drive", "/drive/photos", 5000, 20_000, file_s=1e-4))
    assert quick.severity == "info"


def test_a_13_4_many_small_files_on_a_network_belong_into_archives() -> None:
    found = judged(Storage("/drive", "nfs4", "/drive/photos", 100_000, 12_000, file_s=0.01))
    assert found.code == "small-files"
    for words in ("archives or shards", "shuffling is then limited"):
        assert words in found.advice
    large = judged(Storage("/drive", "nfs4", "/drive/films", 100, 1e9, file_s=0.01))
    assert large.code == "storage-bound"
    assert "shards" not in large.advice


def test_a_13_4_slow_opens_are_found_in_a_run_too() -> None:
    """A file of 12 kB for each sample; opening it takes 85 % of the 20 ms."""
    evidence = loop(
        workers=4,
        wait=0.040,
        step=0.005,
        worker_batch_s=0.160,
        opens_per_sample=1.0,
        open_share=0.85,
        read_bytes_per_sample=12_000.0,
        **WAITING,
    )
    diagnosis = diagnose(evidence, MACHINE)
    assert diagnosis.cause == "small-files"
    assert "shards" in diagnosis.findings[0].advice
    assert "shuffling" in diagnosis.findings[0].advice
    quick = replace(evidence, worker_batch_s=0.0008)  # 0.1 ms: opened on a local disk
    assert diagnose(quick, MACHINE).cause != "small-files"


# ---- costly samples -----------------------------------------------------------------------------


def reduced(path: str) -> Image.Image:
    """Decode a JPEG at a half or a quarter of its size, but not below what is asked for."""
    with Image.open(path) as image:
        image.draft("RGB", (2 * 224, 2 * 224))
        return image.convert("RGB")


def test_a_13_7_a_large_photo_is_mostly_decoding_and_resizing(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    coarse = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize((4000, 3000))
    for number in range(2):
        photo.save(tmp_path / "photos" / f"{number}.jpg", quality=90)
    resize = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    data = image_dataset(tmp_path, transform=resize)
    profile = profile_samples(data, samples=2)
    shares = profile.stages.set_index("stage")["share"]
    assert shares["decode"] + shares["Resize"] > 0.8
    assert profile.top_stage[0] in ("decode", "Resize")
    stage_advice = diagnose(
        loop(workers=8, wait=0.1, cpu_s=0.8, top_stage="decode", top_stage_share=0.8), MACHINE
    ).findings[0]
    assert (stage_advice.code, "decode at reduced size" in stage_advice.advice) == (
        "cpu-bound",
        True,
    )

    begun = time.perf_counter()
    whole = data[0][0]
    whole_s = time.perf_counter() - begun
    data.loader = reduced
    begun = time.perf_counter()
    smaller = data[0][0]
    assert time.perf_counter() - begun < whole_s / 1.5
    assert smaller.shape == whole.shape == (3, 224, 224)


# ---- stragglers ---------------------------------------------------------------------------------


@linux_only
def test_a_13_5_the_slow_sample_is_named_and_blocks_only_in_order() -> None:
    data = cases.OneSlow(40, slow_index=0, slow_s=0.6, usual_s=0.01)
    slow = profile_samples(data, samples=40).slow_samples
    assert slow["index"].tolist() == [0]
    assert slow["wall_s"].item() == pytest.approx(0.6, rel=0.2)
    first_s, delivered = {}, {}
    for in_order in (True, False):
        loader = DataLoader(data, num_workers=4, in_order=in_order, multiprocessing_context="fork")
        begun = time.perf_counter()
        iterator = iter(loader)
        batches = [next(iterator)]
        first_s[in_order] = time.perf_counter() - begun
        batches += iterator
        delivered[in_order] = sorted(int(batch[0, 0]) for batch in batches)
    assert first_s[True] >= 0.6
    assert first_s[False] < 0.4
    assert delivered[True] == delivered[False] == list(range(40))


def test_a_13_8_where_a_run_resumes_the_order_is_kept() -> None:
    evidence = loop(workers=4, wait=0.040, slow_batch_factor=10.0, blocked_share=0.8, **WAITING)
    diagnosis = diagnose(evidence, MACHINE)
    assert diagnosis.cause == "straggler"
    recommended = recommend_settings(diagnosis)
    assert recommended.settings.in_order is True
    (advice,) = [one for one in recommended.advice if "in_order=False" in one]
    assert advice.startswith("Make the slow samples cheaper")
    assert "a run that resumes in mid-epoch" in advice
