"""What moving a batch costs, rung by rung: pageable, pinned, non-blocking, beside the training."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.plan import CLASSES, SEED, Plan, Work, course_step, queued_step
from dataloading.batches import batch_bytes, move_to
from dataloading.comparison import Comparison, compare_dataloaders
from dataloading.pinning import pinned_buffer

PAGEABLE = "pageable"
PINNED = "pinned"
NON_BLOCKING = "pinned, non-blocking"
SIDE_STREAM = "side stream"
ON_DEVICE = "no copy"  # the batches are on the device already: what could be gained at most
RUNGS = (PINNED, NON_BLOCKING, SIDE_STREAM, ON_DEVICE)
DTYPES = (torch.float32, torch.uint8)

HOST_BATCHES = 4  # different ones, so that a copy never finds its source in the caches
EPOCH = 64  # batches
COPIES_SHARE = 0.1  # of the time, for copies without training
READS = 50  # back to the host, to see how often they come too early
NUMBERS = 1000
BUSY_S = 0.005  # of work that is queued before such a copy

Batch = list[torch.Tensor]


class Sent:
    """Batches of the host, copied to the device in one of the ways; can be iterated again."""

    def __init__(self, batches: list[Batch], device: torch.device, way: str) -> None:
        self.batches = batches
        self.device = device
        self.way = way

    def __iter__(self) -> Iterator[Batch]:
        return self._ahead() if self.way == SIDE_STREAM else self._in_turn()

    def _in_turn(self) -> Iterator[Batch]:
        for number in range(EPOCH):
            batch = self.batches[number % len(self.batches)]
            yield batch if self.way == ON_DEVICE else self._send(batch)

    def _ahead(self) -> Iterator[Batch]:
        """Copy the next batch on a stream of its own while training uses this one."""
        copier = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        coming = self._send_on(copier, 0)
        for number in range(1, EPOCH + 1):
            batch = coming
            if copier is not None:
                training = torch.cuda.current_stream(self.device)
                training.wait_stream(copier)
                for tensor in batch:  # its memory may be used again only after training with it
                    tensor.record_stream(training)
            if number < EPOCH:
                coming = self._send_on(copier, number)
            yield batch

    def _send_on(self, copier: torch.cuda.Stream | None, number: int) -> Batch:
        with torch.cuda.stream(copier) if copier is not None else contextlib.nullcontext():
            return self._send(self.batches[number % len(self.batches)])

    def _send(self, batch: Batch) -> Batch:
        non_blocking = self.way in (NON_BLOCKING, SIDE_STREAM)
        return [t.to(self.device, non_blocking=non_blocking, copy=True) for t in batch]


def measure(plan: Plan, figures: dict[str, Any]) -> None:
    """Measure copies alone, whether they are right, and the effect of each rung on a step.

    Args:
        plan: Where, and how long.
        figures: Filled as the measuring goes on.
    """
    host = {dtype: make_batches(plan, dtype) for dtype in DTYPES}
    figures["batch_bytes"] = {name_of(d): batch_bytes(host[d][PAGEABLE][0]) for d in DTYPES}
    figures["wrong_reads"] = {way: wrong_reads(plan, read) for way, read in READ_BACK.items()}
    figures["same_data"] = {
        f"{name_of(dtype)}, {way}": same_data(sources(host[dtype], plan, way), host[dtype], plan)
        for dtype in DTYPES
        for way in (PINNED, NON_BLOCKING, SIDE_STREAM)
    }
    figures["copies"] = copies(plan, host, plan.seconds * COPIES_SHARE)
    figures["steps"] = []
    compare_steps(plan, host, plan.seconds * (1 - COPIES_SHARE), figures["steps"])


def make_batches(plan: Plan, dtype: torch.dtype) -> dict[str, list[Batch]]:
    """The same random images and labels in pageable and in pinned memory."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (plan.images, 3, plan.size, plan.size)
    pageable, pinned = [], []
    for _ in range(HOST_BATCHES):
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(CLASSES, (plan.images,), generator=generator)
        batch = [images if dtype == torch.uint8 else images.float() / 255, labels]
        pageable.append(batch)
        pinned.append(
            [pinned_buffer(t.shape, dtype=t.dtype, device=plan.device).copy_(t) for t in batch]
        )
    return {PAGEABLE: pageable, PINNED: pinned}


def sources(host: dict[str, list[Batch]], plan: Plan, way: str) -> Sent:
    """The batches, sent in one of the ways."""
    if way == ON_DEVICE:
        there = [move_to(batch, plan.device, non_blocking=False) for batch in host[PAGEABLE]]
        return Sent(there, plan.device, way)
    return Sent(host[PAGEABLE if way == PAGEABLE else PINNED], plan.device, way)


def same_data(sent: Sent, host: dict[str, list[Batch]], plan: Plan) -> bool:
    """Whether what arrives equals a blocking copy, read on the device without waiting."""
    alike = []
    for number, batch in enumerate(sent):
        right = host[PAGEABLE][number % HOST_BATCHES]
        for one, other in zip(batch, right, strict=True):
            alike.append((one == other.to(plan.device)).all())
        if number == 2 * HOST_BATCHES:
            break
    return bool(torch.stack(alike).all())


READ_BACK: dict[str, Callable[[torch.Tensor, Plan], torch.Tensor]] = {
    "blocking": lambda numbers, plan: numbers.to("cpu"),
    "non-blocking, read at once": lambda numbers, plan: numbers.to("cpu", non_blocking=True),
    "non-blocking, then synchronised": lambda numbers, plan: _synchronised(numbers, plan),
    "move_to": lambda numbers, plan: move_to(numbers, torch.device("cpu")),
}


def _synchronised(numbers: torch.Tensor, plan: Plan) -> torch.Tensor:
    copied = numbers.to("cpu", non_blocking=True)
    plan.synchronize()
    return copied


def wrong_reads(plan: Plan, read: Callable[[torch.Tensor, Plan], torch.Tensor]) -> int:
    """How many of `READS` copies to the host are wrong when they are read at once."""
    busy = Work(plan, BUSY_S)
    wrong = 0
    for number in range(READS):
        numbers = torch.full((NUMBERS,), -1.0, device=plan.device)
        busy()  # queued, so that the copy comes late
        numbers.fill_(float(number))
        wrong += not bool((read(numbers, plan) == number).all())
        plan.synchronize()
    return wrong


def copies(
    plan: Plan, host: dict[torch.dtype, dict[str, list[Batch]]], seconds: float
) -> list[dict[str, Any]]:
    """Median seconds of a copy: until the call returns, and until the batch is there."""
    ways = (PAGEABLE, PINNED, NON_BLOCKING)
    return [
        {"dtype": name_of(dtype), "way": way}
        | time_copies(plan, host[dtype], way, seconds / len(DTYPES) / len(ways))
        for dtype in DTYPES
        for way in ways
    ]


def time_copies(
    plan: Plan, host: dict[str, list[Batch]], way: str, seconds: float
) -> dict[str, Any]:
    """Copy one batch after another, each with the device at rest."""
    calls: list[float] = []
    arrivals: list[float] = []
    deadline = time.perf_counter() + seconds
    sent = iter(sources(host, plan, way))
    next(sent)  # the first copy also makes room on the device
    while len(calls) < 3 or (time.perf_counter() < deadline and len(calls) < EPOCH - 1):
        plan.synchronize()
        started = time.perf_counter()
        batch = next(sent)
        calls.append(time.perf_counter() - started)
        plan.synchronize()
        arrivals.append(time.perf_counter() - started)
    arrived_s = statistics.median(arrivals)
    return {
        "call_s": statistics.median(calls),
        "arrived_s": arrived_s,
        "bytes_per_s": batch_bytes(batch) / arrived_s,
        "copies": len(calls),
    }


def compare_steps(
    plan: Plan,
    host: dict[torch.dtype, dict[str, list[Batch]]],
    seconds: float,
    rows: list[dict[str, Any]],
) -> None:
    """Compare each rung with pageable blocking copies, in alternating blocks."""
    steps = {"reads the loss": course_step(plan), "never waits": queued_step(plan)}
    course, queued = steps
    float32, uint8 = DTYPES
    start = (float32, PAGEABLE)
    turns = [(course, start, (float32, way)) for way in (PAGEABLE, *RUNGS)]  # first, the control
    turns += [(queued, start, (float32, way)) for way in RUNGS]
    turns += [(course, (uint8, PAGEABLE), (uint8, way)) for way in RUNGS]
    turns += [(course, start, (uint8, PAGEABLE))]
    for step, *both in turns:
        before, after = (sources(host[dtype], plan, way) for dtype, way in both)
        result = compare_dataloaders(
            before, after, steps[step], seconds=seconds / len(turns), progress=False
        )
        named = [f"{name_of(dtype)}, {way}" for dtype, way in both]
        row = {"step": step, "before": named[0], "after": named[1]}
        rows.append(row | figures_of(result))


def figures_of(result: Comparison) -> dict[str, Any]:
    """What a table needs of a comparison."""
    return {
        "ratio": result.ratio,
        "interval": result.interval,
        "verdict": result.verdict,
        "pairs": len(result.pairs),
    }


def name_of(dtype: torch.dtype) -> str:
    """Such as "uint8"."""
    return str(dtype).removeprefix("torch.")
