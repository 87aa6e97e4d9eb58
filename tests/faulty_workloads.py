"""Data sets that are wrong in one way each, in a module of their own so that any worker finds them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.error
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from workloads import FOREVER_S, Slow, doze

from dataloading import memory
from dataloading.evidence import Evidence
from dataloading.timing import measure_dataloader


class Blobs(Dataset):
    """Float samples of one shape."""

    def __init__(self, count: int = 16, shape: tuple[int, ...] = (4,)) -> None:
        self.count = count
        self.shape = shape

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(self.shape, float(index))


# ---- what cannot be sent ------------------------------------------------------------------------


class Transformed(Blobs):
    """Samples that go through a transform."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform


class Chain:
    """A chain of transforms, as torchvision composes them."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class LeavesOut(Blobs):
    """Holds a lock that is not pickled along, and a lambda that is."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.steps = [abs, lambda value: value]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class LambdaLoader(DataLoader):
    """A loader with a constructor and a collate function of its own."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, collate_fn=lambda samples: samples, **options)


class RefusesState(Blobs):
    """Pickling it raises an exception of its own."""

    def __getstate__(self) -> Any:
        raise KeyError("no state")


class NeverPickled(Blobs):
    """Pickling it never ends."""

    def __getstate__(self) -> Any:
        time.sleep(FOREVER_S)


@dataclass
class Record:
    """A Python object of several parts, which pickles slowly."""

    name: str
    label: int


# ---- what is open, what is large ----------------------------------------------------------------


class EagerFile(Dataset):
    """Numbers from a file that the constructor opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = open(path, "rb")  # noqa: SIM115
        self.count = path.stat().st_size // 8

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(8 * index)
        return torch.from_numpy(np.frombuffer(self.file.read(8), dtype="i8").copy())

    def close(self) -> None:
        """Close the file of this process."""
        if self.file is not None:
            self.file.close()


class LazyFile(EagerFile):
    """The same, opened on first use."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file.close()
        self.file = None


class LazyInside(Dataset):
    """A reader inside the data set opens the file on first use."""

    def __init__(self, path: Path) -> None:
        self.reader = LazyFile(path)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.reader[index]


class ZippedLazily(Dataset):
    """Texts in an archive, opened on first use in each process."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.count = count
        self.archive: zipfile.ZipFile | None = None

    def opened(self) -> zipfile.ZipFile:
        """The archive, open."""
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return self.archive

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return len(self.opened().read(f"{index}.txt"))


class ZippedByLength(ZippedLazily):
    """The same, but asking for the length opens the archive too, in the training process."""

    def __len__(self) -> int:
        return len(self.opened().namelist())


class Holding(Blobs):
    """Holds whatever it is given."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.__dict__.update(held)


class OwnRandomness(Blobs):
    """Draws from generators of its own, and from all global ones."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.python = random.Random(0)
        self.torch = torch.Generator()

    def draws(self) -> list[float]:
        """One number of each."""
        return [
            float(self.numpy.random()),
            float(self.legacy.rand()),
            self.python.random(),
            float(torch.rand(1, generator=self.torch)),
        ]

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        return torch.tensor([*self.draws(), *noise])


class Leaking(Blobs):
    """Keeps something of every sample."""

    def __init__(self, count: int = 64, kept_bytes: int = 0) -> None:
        super().__init__(count)
        self.kept: list[bytes] = []
        self.kept_bytes = kept_bytes

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(os.urandom(self.kept_bytes) if self.kept_bytes else b"")
        return super().__getitem__(index)


class Touching(Blobs):
    """Reads some of a long list of objects for every sample."""

    def __init__(self, names: list[str], each: int) -> None:
        super().__init__(len(names) // each)
        self.names, self.each = names, each

    def __getitem__(self, index: int) -> torch.Tensor:
        held = self.names[index * self.each : (index + 1) * self.each]
        return torch.tensor(float(sum(len(name) for name in held)))


class Mapped(Dataset):
    """Parts of a large array in a file, mapped into memory and read in turn."""

    def __init__(self, path: Path, parts: int, part_bytes: int) -> None:
        self.path, self.parts, self.part_bytes = path, parts, part_bytes
        self.array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.array is None:
            self.array = np.memmap(self.path, dtype="u1", mode="r")
        part = self.array[index * self.part_bytes : (index + 1) * self.part_bytes]
        return torch.tensor(int(part[::4096].sum()))


# ---- what does not fit together -----------------------------------------------------------------


class Masks(Dataset):
    """Images of three channels; masks of one or of three."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        channels = 1 if index % 2 else 3
        return {"image": torch.zeros(3, 4, 4), "mask": torch.zeros(channels, 4, 4)}


class Padded:
    """A collate function that pads."""

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Uneven(Blobs):
    """Sequences of different lengths."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 + index)


def tensor_and_list(samples: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A batch as a tuple of a tensor and a list of tensors."""
    return default_collate(samples), list(samples)


class ToldTheEpoch(Dataset):
    """Samples that tell their epoch, which the loop sets."""

    def __init__(self) -> None:
        self.epoch: Any = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.epoch)


class SharesTheEpoch(ToldTheEpoch):
    """The same, with the epoch in shared memory."""

    def __init__(self) -> None:
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the workers too."""
        self.epoch.fill_(epoch)


# ---- data sets that defend themselves -----------------------------------------------------------


class AnswersNothing(Blobs):
    """Asking it for any attribute that it lacks raises something unusual."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"do not ask for {name}")


class BadProperties(Blobs):
    """Properties that raise."""

    @property
    def columns(self) -> Any:
        """Raise."""
        raise ValueError("not loaded")

    dtypes = samples = handle = columns


class BadLength(Blobs):
    """Its length raises something unusual."""

    def __len__(self) -> int:
        raise RuntimeError("not counted yet")


class NeverCounted(Blobs):
    """Its length never comes."""

    def __len__(self) -> int:
        time.sleep(FOREVER_S)
        return 1


class Slotted(Dataset):
    """Has slots, one of them never set."""

    __slots__ = ("names", "never")

    def __init__(self) -> None:
        self.names = ["a"]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Hanging(Blobs):
    """A sample never comes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(FOREVER_S)
        return super().__getitem__(index)


class Raising(Blobs):
    """A sample raises."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError("unreadable")


class Uncopyable(Blobs):
    """Refuses to be copied."""

    def __copy__(self) -> Any:
        raise RuntimeError("there is only one")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is only one")


class PutsAway(Blobs):
    """Its end takes something along that the program still needs."""

    ended = 0

    def __del__(self) -> None:
        type(self).ended += 1


# ---- errors, deaths and hangs in workers --------------------------------------------------------


class TwoArguments(Exception):
    """An exception that cannot be built from its text alone."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} is broken at line {line}")


class NeedsKeyword(Exception):
    """An exception whose constructor needs a keyword."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"refused: {reason}")


class Unprintable(Exception):
    """An exception that does not even print."""

    def __str__(self) -> str:
        raise ValueError("no text")


def failure(kind: str) -> Exception:
    """An exception of a kind that is hard to bring from a worker to the training process."""
    if kind == "two arguments":
        return TwoArguments("a.txt", 7)
    if kind == "http":
        return urllib.error.HTTPError("http://localhost/3", 404, "Not Found", None, None)  # type: ignore[arg-type]
    if kind == "keyword":
        return NeedsKeyword(reason="the licence ran out")
    return Unprintable()


class FailsAt(Slow):
    """One sample raises."""

    def __init__(self, kind: str, index: int = 3) -> None:
        super().__init__(16)
        self.kind, self.fails_at = kind, index

    def __getitem__(self, index: int) -> Any:
        if int(index) == self.fails_at:
            raise failure(self.kind)
        return super().__getitem__(int(index))


class FailsInStream(IterableDataset):
    """The fourth sample of a stream raises."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(16):
            if number == 3:
                raise failure("two arguments")
            yield torch.tensor(number)


class FailsAtOnce(Slow):
    """A data set that fetches whole batches; the one with sample 3 raises."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 3 in indices:
            raise failure("two arguments")
        return [self[index] for index in indices]


class EndsAt(Slow):
    """The worker that comes to one sample ends: by a signal, or (0) with exit code 1."""

    def __init__(self, signal_number: int, index: int = 5) -> None:
        super().__init__(64)
        self.signal_number, self.ends_at = signal_number, index

    def __getitem__(self, index: int) -> Any:
        if index == self.ends_at:
            if not self.signal_number:
                os._exit(1)
            os.kill(os.getpid(), self.signal_number)
            signal.pause()
        return super().__getitem__(index)


class SleepsAt(Slow):
    """One sample never comes."""

    def __init__(self, count: int, index: int) -> None:
        super().__init__(count)
        self.sleeps_at = index

    def __getitem__(self, index: int) -> Any:
        if index == self.sleeps_at:
            time.sleep(FOREVER_S)
        return super().__getitem__(index)


class Opens(Dataset):
    """Opens some files for each sample, and a file for writing that does not count; and works."""

    def __init__(self, path: Path, times: int) -> None:
        self.path, self.times = path, times

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        for _ in range(self.times):
            with open(self.path, "rb") as file:
                file.read()
        with open(os.devnull, "w") as file:
            file.write("x")
        time.sleep(0.001)
        return index


def doze_a_moment(batch: Any) -> None:
    """A train step during which a worker has the time to end."""
    doze(0.2)


def report_deaths() -> None:
    """Let a worker end in each way, and print what is found, one JSON line each.

    For a process of its own: torch tells of a dead worker by an exception out of a signal handler,
    at any place in the main thread.
    """
    kinds = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, 0)
    for signal_number, step in [*((kind, None) for kind in kinds), (signal.SIGKILL, doze_a_moment)]:
        loader = DataLoader(
            EndsAt(signal_number), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        try:
            measure_dataloader(loader, step, seconds=5.0, progress=False)
        except (RuntimeError, OSError, EOFError) as error:
            found = error.finding.to_dict()  # type: ignore[attr-defined]
            told = {"notes": error.__notes__, "children": len(multiprocessing.active_children())}
            print(json.dumps({**found, **told}))


BATCHES = 120  # of 4 samples each
NAMES_AT_ONCE = 2000


def report_memory(folder: str) -> None:
    """Run loaders that keep, map or touch memory, and print what was seen, one JSON line each.

    For a process of its own, which has not yet used memory that it could use again.
    """
    memory.READ_EVERY_S = memory.MAIN_EVERY_S = 0.0  # after every batch
    memory.MOST_OF_THE_TIME = 1e9
    mapped = Path(folder) / "array.bin"
    with open(mapped, "wb") as file:
        file.truncate(4 * BATCHES * 2**20)
    kept: list[torch.Tensor] = []
    count = 4 * BATCHES
    names = [f"image {number} of a long list.jpg" for number in range(count * NAMES_AT_ONCE)]
    runs: dict[str, tuple[Any, int, Any]] = {
        "leak": (Leaking(count, kept_bytes=128 * 1024), 2, None),
        "mapped": (Mapped(mapped, count, 2**20), 2, None),
        "touched": (Touching(names, NAMES_AT_ONCE), 2, None),
        "kept by nobody": (Blobs(count), 0, None),
        "kept by the loop": (Blobs(count), 0, lambda batch: kept.append(torch.ones(64 * 1024))),
    }
    for name, (dataset, workers, step) in runs.items():
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, **options)  # type: ignore[arg-type]
        timing = measure_dataloader(loader, step, seconds=60.0, max_steps=BATCHES, progress=False)
        print(json.dumps([name, Evidence().with_timing(timing).to_dict()]))


class ReturnsNoneAt(Slow):
    """One sample is None, which no batch can be made of."""

    def __init__(self, index: int) -> None:
        super().__init__(16)
        self.none_at = index

    def __getitem__(self, index: int) -> Any:
        return None if index == self.none_at else super().__getitem__(index)


class LongerAt(Slow):
    """One sample is longer than the others, so that no batch can be stacked with it."""

    def __init__(self, index: int) -> None:
        super().__init__(16)
        self.longer_at = index

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(5 if index == self.longer_at else 3)
