"""Loaders as people write them, in a module of their own for any worker."""

from __future__ import annotations

import http.client
import io
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchvision import transforms

LATENCY_S = 0.02
CROP = transforms.Compose([transforms.RandomResizedCrop(160), transforms.ToTensor()])


class Rows(Dataset):
    """Rows of a NumPy file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.array(self.rows[index])), index % 2


class Texts(Dataset):
    """Texts of different lengths, turned into word numbers."""

    def __init__(self, size: int) -> None:
        self.texts = [" ".join(["word"] * (800 + number % 200)) for number in range(size)]
        self.vocabulary = {"word": 1}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        words = re.findall(r"\w+", self.texts[index].lower())
        return [self.vocabulary.get(word, 0) for word in words]


def pad_in_python(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    """Padded words with their positions and a mask, number by number."""
    longest = max(map(len, batch))
    words = [words + [0] * (longest - len(words)) for words in batch]
    mask = [[1 if word else 0 for word in row] for row in words]
    places = [[place * seen for place, seen in enumerate(row)] for row in mask]
    parts = [[place // 64 if place else 0 for place in row] for row in places]
    return {
        "words": torch.tensor(words),
        "mask": torch.tensor(mask),
        "places": torch.tensor(places),
        "parts": torch.tensor(parts),
    }


def write_zip(path: Path, images: int) -> Path:
    """Photos of noise in an archive."""
    pixels = np.random.default_rng(0).integers(0, 255, (240, 240, 3), dtype=np.uint8)
    photo = io.BytesIO()
    Image.fromarray(pixels).save(photo, "JPEG")
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(images):
            archive.writestr(f"{number}.jpg", photo.getvalue())
    return path


class ZippedImages(Dataset):
    """Images of an archive, which is opened on first use or, when `eager`, at once."""

    def __init__(self, path: Path, *, eager: bool = False) -> None:
        self.path, self.transform = path, CROP
        with zipfile.ZipFile(path) as archive:
            self.names = archive.namelist()
        self.archive = zipfile.ZipFile(path) if eager else None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        with self.archive.open(self.names[index]) as file:
            return self.transform(Image.open(file).convert("RGB"))


class SlowAnswers(BaseHTTPRequestHandler):
    """Answers each request after a while."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        self.send_response(200)
        self.send_header("Content-Length", "1024")
        self.end_headers()
        self.wfile.write(bytes(1024))

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def slow_server() -> Iterator[int]:
    """A server on this machine; yields its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowAnswers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class Remote(Dataset):
    """Samples that are downloaded one by one."""

    def __init__(self, port: int, size: int) -> None:
        self.port, self.size = port, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("GET", f"/{index}")
            content = connection.getresponse().read()
        finally:
            connection.close()
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Pictures(Dataset):
    """A picture under a transform."""

    def __init__(self, size: int, transform: Callable[[Any], Any]) -> None:
        self.size, self.transform = size, transform
        self.picture = Image.fromarray(np.zeros((160, 160, 3), dtype=np.uint8))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.picture)


def half_of_two() -> Subset:
    """Every second sample of two data sets with transforms of their own."""
    light = transforms.Compose([transforms.CenterCrop(128), transforms.ToTensor()])
    heavy = transforms.Compose([transforms.GaussianBlur(21), transforms.PILToTensor()])
    both: ConcatDataset = ConcatDataset([Pictures(100, light), Pictures(100, heavy)])
    return Subset(both, range(0, 200, 2))


class NamedLoader(DataLoader):
    """A loader with a constructor of its own, whose batches have names."""

    def __init__(self, name: str, *, size: int) -> None:
        self.name = name
        images = TensorDataset(torch.zeros(size, 3), torch.arange(size))
        super().__init__(images, batch_size=8, shuffle=True)

    def __iter__(self) -> Any:
        for images, labels in super().__iter__():
            yield {"images": images, "labels": labels}
