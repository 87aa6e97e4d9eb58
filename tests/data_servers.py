"""Tiny copies of the course's data sets, and a local server that delivers them well or badly."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import pickle
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from dataloading import course_archives

HELD_S = 60.0  # a silent server would hold on for so long
PIECES, PAUSE_S = 15, 0.1  # a slow one takes the product of both


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def tar_of(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def cifar10_files() -> dict[str, bytes]:
    """The files of CIFAR-10, with two images in each of its six parts."""
    parts = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {part: pickle.dumps({"data": noise(2, 3072), "labels": [3, 7]}) for part in parts}
    files["batches.meta"] = pickle.dumps({"label_names": [f"class {k}" for k in range(10)]})
    return files


def idx(array: np.ndarray) -> bytes:
    """An array in the format of MNIST."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def fashion_mnist_archives() -> dict[str, bytes]:
    return {
        f"{part}-{kind}-ubyte.gz": gzip.compress(idx(content))
        for part, count in (("train", 6), ("t10k", 4))
        for kind, content in (
            ("images-idx3", noise(count, 28, 28)),
            ("labels-idx1", np.arange(count, dtype=np.uint8)),
        )
    }


def food101_archive() -> bytes:
    """Food-101 with two classes, of two photos for training and one for testing."""
    photo = io.BytesIO()
    Image.fromarray(noise(64, 96, 3)).save(photo, "JPEG")
    names = {"pho": ["pho/1", "pho/2", "pho/3"], "ramen": ["ramen/4", "ramen/5", "ramen/6"]}
    files = {
        f"food-101/images/{n}.jpg": photo.getvalue() for group in names.values() for n in group
    }
    for part, chosen in (("train", slice(0, 2)), ("test", slice(2, 3))):
        listed = {label: group[chosen] for label, group in names.items()}
        files[f"food-101/meta/{part}.json"] = json.dumps(listed).encode()
    return tar_of(files)


def use_tiny_archives(patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Let the three data sets be tiny; returns the archives that hold them."""
    cifar = cifar10_files()
    meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(cifar["batches.meta"])}
    sums = [[part, md5(content)] for part, content in cifar.items() if part != "batches.meta"]
    patch.setattr(CIFAR10, "train_list", sums[:5])
    patch.setattr(CIFAR10, "test_list", sums[5:])
    patch.setattr(CIFAR10, "meta", meta)
    archives = {
        "food101": {"food-101.tar.gz": food101_archive()},
        "cifar10": {
            "cifar-10-python.tar.gz": tar_of(
                {f"cifar-10-batches-py/{part}": content for part, content in cifar.items()}
            )
        },
        "fashion_mnist": fashion_mnist_archives(),
    }
    tiny = {
        name: replace(known, files=tuple((f, md5(c)) for f, c in archives[name].items()))
        for name, known in course_archives.COURSE_DATA.items()
    }
    patch.setattr(course_archives, "COURSE_DATA", tiny)
    return {file: content for files in archives.values() for file, content in files.items()}


class Answers(http.server.BaseHTTPRequestHandler):
    """The first part of the path says how the file behind it is delivered."""

    def do_GET(self) -> None:
        _, kind, file = self.path.split("/")
        self.server.requests.append((kind, file, self.headers.get("Range")))
        if kind in ("refused", "missing"):
            self.send_error(403 if kind == "refused" else 404)
            return
        if kind == "silent":
            self.server.released.wait(HELD_S)
            return
        if kind == "trickling":
            self.wfile.write(b"HTTP/1.0 200 OK\r\n")
            while not self.server.released.wait(0.05):
                self.wfile.write(b"X")
            return
        content = self.server.archives[file]
        start = self.wanted_start() if kind not in ("no_range", "cut_always") else 0
        if start >= len(content):
            self.send_error(416)
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if kind != "unknown_length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.send_body(kind, body)

    def wanted_start(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        return int(match[1]) if match else 0

    def send_body(self, kind: str, body: bytes) -> None:
        half = (len(body) + 1) // 2
        if kind in ("cut", "cut_always", "unknown_length"):
            self.wfile.write(body[:half])
        elif kind == "stalling":
            self.wfile.write(body[:half])
            self.server.released.wait(HELD_S)
        elif kind == "empty_then_silent":
            self.server.released.wait(HELD_S)
        elif kind == "wrong":
            self.wfile.write(bytes(len(body)))
        elif kind == "slow":
            for piece in np.array_split(np.frombuffer(body, np.uint8), PIECES):
                self.wfile.write(piece.tobytes())
                time.sleep(PAUSE_S)
        else:
            self.wfile.write(body)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client may leave
            super().handle()

    def log_message(self, *args: object) -> None:
        pass


class DataServer(http.server.ThreadingHTTPServer):
    """`mirror(kind)` is the address of a folder whose files are delivered in that way."""

    def __init__(self, archives: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.archives = archives
        self.requests: list[tuple[str, str, str | None]] = []
        self.released = threading.Event()

    def mirror(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{kind}/"

    def kinds(self) -> list[str]:
        """How each request was answered, in order."""
        return [kind for kind, _, _ in self.requests]


def serving(patch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    """Body of a fixture: a server with tiny archives, which the data sets are now made of."""
    server = DataServer(use_tiny_archives(patch))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()
