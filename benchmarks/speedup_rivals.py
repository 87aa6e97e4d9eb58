"""Other loaders on the same photos, with the same decoder and crop, in an environment of their own.

    python -m benchmarks.speedup --rivals [DIR]

Each package runs in a process of its own, as its page of introduction says, with as many workers (or
threads) as CPUs may be used. What does not install or does not run is told of and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environments import make_environment
from benchmarks.speedup_arms import BATCH_SIZE, Rate, augmentation, counted
from dataloading.batch_transforms import split_transform, tensor_ready
from dataloading.images import ImageFiles
from dataloading.machine import usable_cpu_count
from dataloading.watchdog import close_iterator

RIVALS = {"litdata": "litdata==0.2.76", "webdataset": "webdataset==1.0.2", "spdl": "spdl==0.8.0"}
ROOT = Path(__file__).resolve().parents[1]
SHARDS = 16  # enough for each worker to have some
SHUFFLED = 1000  # samples from which webdataset draws the next one, as in its introduction
START_S = 300.0  # to rewrite the photos, at most
LATE_S = 60.0  # more than the measurement itself may take
ANSWER = "answer: "  # before what a rival's process says to us; packages print too


# ------------------------------------------------------------------------- in the process of the project


@contextlib.contextmanager
def rival_arms(root: Path, environment: Path) -> Iterator[dict[str, Rate]]:
    """A rate for each rival that can be installed and started."""
    python = make_environment(environment)
    arms: dict[str, Rate] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for tool, package in RIVALS.items():
            try:
                install(python, package)
                rival = stack.enter_context(Rival(python, tool, root, scratch / tool))
            except RuntimeError as error:
                print(f"{package}: not measured: {error}", flush=True)
                continue
            arms[package] = rival.rate
        yield arms


def install(python: Path, package: str) -> None:
    """Install one pinned package.

    Raises:
        RuntimeError: That failed.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"does not install: {_last_line(done.stderr)}")


class Rival:
    """The process of one rival; it measures when it is asked to, and waits in between."""

    def __init__(self, python: Path, tool: str, root: Path, scratch: Path) -> None:
        scratch.mkdir()
        command = [str(python), "-W", "ignore", "-m", "benchmarks.speedup_rivals", "--tool", tool]
        command += ["--images", str(root.absolute()), "--scratch", str(scratch)]
        with open(scratch / "errors.txt", "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        self.errors = scratch / "errors.txt"
        self.said: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> Rival:
        try:
            self._answer(START_S)
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)  # its workers too
            else:
                self.process.kill()
        self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def rate(self, seconds: float) -> float:
        """Samples per second, measured for so many seconds.

        Raises:
            RuntimeError: It failed, or does not answer.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
        except OSError:
            raise RuntimeError(self._why()) from None
        return self._answer(LATE_S + 4 * seconds)["rate"]

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            said = self.said.get(timeout=limit_s)
        except queue.Empty:
            raise RuntimeError(f"no answer within {limit_s:.0f} s") from None
        if said is None:
            raise RuntimeError(self._why())
        return json.loads(said)

    def _why(self) -> str:
        return f"does not run: {_last_line(self.errors.read_text(encoding='utf-8'))}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self.said.put(line.removeprefix(ANSWER))
        self.said.put(None)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


# ----------------------------------------------------------------------------- in the process of a rival


class Decode:
    """Bytes of a photo as a tensor, decoded, cropped and flipped as in the other arms."""

    def __init__(self) -> None:
        self.transform, _ = split_transform(tensor_ready(augmentation()))

    def __call__(self, data: bytes) -> torch.Tensor:
        """Decode one photo."""
        from torchvision.io import ImageReadMode, decode_image

        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.transform(decode_image(encoded, mode=ImageReadMode.RGB))


def stored(pair: tuple[str, int]) -> dict[str, Any]:
    """A photo as litdata keeps it: the bytes of its file."""
    path, label = pair
    return {"image": Path(path).read_bytes(), "label": label}


def as_pair(decode: Decode, kept: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """A sample from what `stored` gave."""
    return decode(kept["image"]), kept["label"]


def litdata_batches(samples: list[tuple[str, int]], scratch: Path) -> Callable[[], Any]:
    """A `StreamingDataset` over chunks on the local disk."""
    import litdata

    folder, workers = str(scratch / "chunks"), usable_cpu_count()
    litdata.optimize(
        fn=stored,
        inputs=samples,
        output_dir=folder,
        chunk_bytes="16MB",
        num_workers=workers,
        start_method=multiprocessing.get_start_method(),  # else it sets another one for all
    )
    photos = litdata.StreamingDataset(folder, shuffle=True, transform=partial(as_pair, Decode()))
    return lambda: litdata.StreamingDataLoader(photos, batch_size=BATCH_SIZE, num_workers=workers)


def decoded_pair(decode: Decode, pair: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
    """What webdataset hands on: photo and label of one sample."""
    return decode(pair[0]), int(pair[1])


def webdataset_batches(samples: list[tuple[str, int]], scratch: Path) -> Callable[[], Any]:
    """Shards as tar files, resampled, with a shuffle buffer."""
    import webdataset

    order = np.random.default_rng(0).permutation(len(samples))
    shards = []
    for number, part in enumerate(np.array_split(order, min(SHARDS, len(samples)))):
        shards.append(str(scratch / f"{number:03d}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for one in part:
                path, label = samples[one]
                text = scratch / "label.txt"
                text.write_text(str(label), encoding="utf-8")
                tar.add(path, f"{one:06d}.jpg")
                tar.add(text, f"{one:06d}.cls")
    data = (
        webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
        .shuffle(SHUFFLED)
        .to_tuple("jpg", "cls")
        .map(partial(decoded_pair, Decode()))
        .batched(BATCH_SIZE)
    )
    return lambda: webdataset.WebLoader(data, batch_size=None, num_workers=usable_cpu_count())


def spdl_batches(samples: list[tuple[str, int]], scratch: Path) -> Callable[[], Any]:
    """A pipeline of threads that read, decode and crop."""
    from spdl.pipeline import PipelineBuilder

    decode, workers = Decode(), usable_cpu_count()
    torch.set_num_threads(1)  # as in the workers of a DataLoader

    def load(pair: tuple[str, int]) -> tuple[torch.Tensor, int]:
        return decode(Path(pair[0]).read_bytes()), pair[1]

    def shuffled() -> Iterator[tuple[str, int]]:
        chance = np.random.default_rng(0)
        while True:
            yield from (samples[one] for one in chance.permutation(len(samples)))

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(shuffled())
            .pipe(load, concurrency=workers)
            .aggregate(BATCH_SIZE)
            .pipe(torch.utils.data.default_collate)
            .add_sink(2 * workers)
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


TOOLS = {"litdata": litdata_batches, "webdataset": webdataset_batches, "spdl": spdl_batches}


def rival_rate(epoch: Callable[[], Any], seconds: float) -> float:
    """Samples per second over as many epochs as it takes, each without its start."""
    samples, elapsed_s = 0, 0.0
    while elapsed_s < seconds:
        iterator = iter(epoch())
        try:
            more, took_s = counted(
                iterator, usable_cpu_count(), seconds - elapsed_s, lambda batch: batch
            )
        finally:
            close_iterator(iterator)
            if hasattr(iterator, "close"):
                iterator.close()
        samples, elapsed_s = samples + more, elapsed_s + took_s
    return samples / elapsed_s


def main() -> None:
    """Prepare one rival, then measure whenever a line with seconds comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    epoch = TOOLS[options.tool](ImageFiles(options.images).samples, options.scratch)
    print(ANSWER + "{}", flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps({"rate": rival_rate(epoch, float(line))}), flush=True)


if __name__ == "__main__":
    main()
