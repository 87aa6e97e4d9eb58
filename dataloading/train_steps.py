"""Train steps to measure with: a real one, and one that only waits."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dataloading.arguments import check_amount, check_device
from dataloading.batches import move_to, parts_of


class BusyMeter:
    """Counts the seconds in which a train step of ours kept the (real or simulated) accelerator busy.

    It tells compute apart from other work that somebody does in the same callable, such as logging,
    where there is no GPU to ask.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._since_s: float | None = None

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self.busy_s += time.perf_counter() - since_s

    def read_s(self) -> float:
        """Busy seconds so far, those of a step under way included; for another thread to ask."""
        since_s = self._since_s
        return self.busy_s + (time.perf_counter() - since_s if since_s is not None else 0.0)


METER = BusyMeter()


class SimulatedStep:
    """A stand-in accelerator: each batch keeps it busy for a fixed time, without using the CPU."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Any) -> None:
        """Keep the simulated accelerator busy."""
        with METER:
            time.sleep(self.seconds)

    def __repr__(self) -> str:
        return f"simulated_train_step({self.seconds})"


def simulated_train_step(seconds: float) -> SimulatedStep:
    """A train step that only waits, as MLPerf Storage simulates an accelerator.

    Args:
        seconds: How long each batch keeps the simulated accelerator busy.

    Returns:
        A callable `train_step(batch)`.

    Raises:
        ValueError: `seconds` is negative or not a finite number.

    Example:
        >>> simulated_train_step(0.02)
        simulated_train_step(0.02)

    Explained in: notebook 00
    """
    check_amount("seconds", seconds)
    return SimulatedStep(float(seconds))


class TrainStep:
    """One training step of a model on a batch of `(inputs, targets)`; see `make_train_step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.batch_transform = batch_transform

    def __call__(self, batch: Any) -> float:
        """Train on one batch; returns the loss."""
        inputs, targets = split_batch(move_to(batch, self.device))
        with METER:
            if self.batch_transform is not None:
                inputs = self.batch_transform(inputs)
            self.model.train()
            loss = self.loss_fn(self._predict(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.item()

    def _predict(self, inputs: Any) -> Any:
        try:
            return self.model(inputs)
        except RuntimeError as error:
            if self.batch_transform is None and getattr(inputs, "dtype", None) == torch.uint8:
                error.add_note(
                    "The batch is of uint8: if it holds images, convert them first, with "
                    "make_train_step(..., batch_transform=batch_transform) of split_transform."
                )
            raise

    @contextlib.contextmanager
    def state_kept(self) -> Iterator[None]:
        """Put model, optimizer, gradients and mode back as they were when the block ends."""
        model_state = copy.deepcopy(self.model.state_dict())
        optimizer_state = copy.deepcopy(self.optimizer.state_dict())
        modes = [(module, module.training) for module in self.model.modules()]
        gradients = [
            (p, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()
        ]
        try:
            yield
        finally:
            self.model.load_state_dict(model_state)
            self.optimizer.load_state_dict(optimizer_state)
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient


def make_train_step(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    device: str | torch.device | None = None,
    *,
    batch_transform: Callable[[Any], Any] | None = None,
) -> TrainStep:
    """Build the train step of the Learn PyTorch course: move, forward, loss, backward, update.

    The measuring functions put the model and the optimizer back as they were afterwards.

    Args:
        model: The model; it stays on its device unless `device` is given.
        loss_fn: `loss_fn(predictions, targets)` giving a scalar tensor.
        optimizer: An optimizer over the model's parameters.
        device: Where to train; None takes the device of the model's first parameter.
        batch_transform: Applied to the inputs on the device, such as the conversion of uint8 images
            to normalised floats that `split_transform` moves out of the workers.

    Returns:
        A callable `train_step(batch)` that returns the loss as a float. A batch is
        `(inputs, targets)`, or a mapping whose first two values are these.

    Raises:
        TypeError: An argument is of another kind, such as a class in place of an object.
        ValueError: The device does not exist here.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> train_step = make_train_step(model, torch.nn.CrossEntropyLoss(), sgd)
        >>> train_step((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))) > 0
        True

    Explained in: notebook 01
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Expected model to be a torch.nn.Module object, got {model!r}.")
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise TypeError(f"Expected a function loss_fn(predictions, targets), got {loss_fn!r}.")
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise TypeError(
            f"Expected an optimizer such as torch.optim.SGD(model.parameters()), got {optimizer!r}."
        )
    device = check_device(device)
    if device is None:
        first = next(model.parameters(), None)
        device = first.device if first is not None else torch.device("cpu")
    else:
        model.to(device)
    if batch_transform is not None and (
        isinstance(batch_transform, type) or not callable(batch_transform)
    ):
        raise TypeError(f"Expected a function batch_transform(inputs), got {batch_transform!r}.")
    return TrainStep(model, loss_fn, optimizer, device, batch_transform)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch.

    Raises:
        TypeError: The batch has fewer than two parts.
    """
    parts = parts_of(batch)
    if len(parts) < 2:
        raise TypeError(
            f"Expected a batch of (inputs, targets), got {type(batch).__name__} with "
            f"{len(parts)} part(s); write your own train_step(batch) for batches like this."
        )
    return parts[0], parts[1]


@contextlib.contextmanager
def state_kept(train_step: Callable[[Any], Any] | None) -> Iterator[None]:
    """Keep what a train step changes, where it knows how to (`TrainStep`)."""
    if isinstance(train_step, TrainStep):
        with train_step.state_kept():
            yield
    else:
        yield
