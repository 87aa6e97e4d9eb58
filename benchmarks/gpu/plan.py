"""Where a part runs and how long, and the work that all parts give the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dataloading.command import small_cnn
from dataloading.train_steps import METER, TrainStep, make_train_step, split_batch

SEED = 42
CLASSES = 10
WORK_S = 0.002  # of one unit of work: short, so that a busy phase ends when it should
CALIBRATIONS = 6


class NotAvailable(Exception):
    """A part cannot say anything here; the text says why."""


@dataclass(frozen=True)
class Plan:
    """Where a part runs, for how long, and whether it only shows that it runs.

    Attributes:
        device: `cuda:0`, or the CPU in a dry run.
        seconds: Time budget of the part.
        dry_run: Tiny sizes; the figures mean nothing.
    """

    device: torch.device
    seconds: float
    dry_run: bool = False

    @property
    def images(self) -> int:
        """Images in a batch."""
        return 4 if self.dry_run else 128

    @property
    def size(self) -> int:
        """Width and height of an image in pixels."""
        return 32 if self.dry_run else 224

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ToFloat(torch.nn.Module):
    """Turns uint8 images into floats from 0 to 1, on whatever device they are."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255 if images.dtype == torch.uint8 else images


def course_step(plan: Plan) -> TrainStep:
    """The train step of the course on its small CNN, for images of any size; reads the loss."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        *blocks, _, _ = small_cnn(CLASSES)
        side = 4
        channels = next(m for m in reversed(blocks) if isinstance(m, torch.nn.Conv2d)).out_channels
        model = torch.nn.Sequential(
            ToFloat(),
            *blocks,
            torch.nn.AdaptiveAvgPool2d(side),
            torch.nn.Flatten(),
            torch.nn.Linear(channels * side**2, CLASSES),
        ).to(plan.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return make_train_step(model, torch.nn.CrossEntropyLoss(), optimizer, plan.device)


def queued_step(plan: Plan) -> Any:
    """The same work without reading the loss: the host never waits for the device."""
    step = course_step(plan)

    def train(batch: Any) -> None:
        inputs, targets = split_batch(batch)
        step.optimizer.zero_grad()
        step.loss_fn(step.model(inputs), targets).backward()
        step.optimizer.step()

    return train


class Work:
    """So many matrix products as take about `seconds` on the device; `wait` also awaits them."""

    def __init__(self, plan: Plan, seconds: float = WORK_S) -> None:
        self.plan = plan
        side = 64 if plan.dry_run else 1024
        self.matrix = torch.rand(side, side, device=plan.device)
        self.products = 1
        for _ in range(CALIBRATIONS):  # settle on a number while the clocks rise
            plan.synchronize()
            started = time.perf_counter()
            self.wait()
            took = time.perf_counter() - started
            self.products = max(1, round(self.products * seconds / max(took, 1e-7)))

    def __call__(self, batch: Any = None) -> None:
        """Queue the products."""
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)

    def wait(self, batch: Any = None) -> None:
        """Queue the products and wait until they are done."""
        with METER:
            self()
            self.plan.synchronize()


class Waiting:
    """An endless source of one small batch, each after a wait: a loader that is too slow."""

    def __init__(self, wait_s: float, batch: Any) -> None:
        self.wait_s = wait_s
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self.wait_s:
                time.sleep(self.wait_s)
            yield self.batch
