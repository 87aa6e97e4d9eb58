"""A plain training loop over a fault, for tools that watch or patch one.

The simulated accelerator works inside the model, so that tools which look at the model see it as
the training that it stands for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from benchmarks.faults.cases import CASES, Built

SECONDS = 10.0


class Net(torch.nn.Module):
    """Does what the train step does, and has a parameter to train."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        """Work for one batch; returns a loss."""
        if self.step is not None:
            self.step(batch)
        return self.layer(torch.ones(1, 1)).sum()


def build(name: str, seed: int) -> Built:
    """The same fault as in the benchmark."""
    case = next(case for case in CASES if case.name == name)
    return case.build(Random(f"{case.name}-{seed}"))


def batches(loader: Any, seconds: float = SECONDS) -> Iterator[Any]:
    """Epoch after epoch, until the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        for batch in loader:
            yield batch
            if time.monotonic() > deadline:
                return


def train(
    built: Built, loader: Any = None, *, step_context: Any = None, after_step: Any = None
) -> None:
    """Train for some seconds, as a tutorial would.

    Args:
        built: The fault.
        loader: What to iterate; None takes the loader of the fault.
        step_context: Called with the model before each step; gives a context for it.
        after_step: Called after each step.
    """
    model = Net(built.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(built.loader if loader is None else loader):
        with step_context(model) if step_context is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
        if after_step is not None:
            after_step()
