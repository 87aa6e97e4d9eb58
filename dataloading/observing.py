"""What can be seen from the training process while a loop runs: the queue, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from dataloading.memory import Growth, MemoryLog

LEAST_WAIT_S = 1e-3  # shorter waits are hand-overs, not stalls
FEWEST_HANDOVERS = 5  # fewer say nothing


@dataclass(frozen=True)
class Observed:
    """What was seen beside the clocks.

    Attributes:
        blocked_share: Share of the waiting during which a later batch arrived and had to wait for
            its turn; None where the queue cannot be seen, or nothing waited.
        handover_s: Median seconds to get a batch that stood ready when it was asked for; None where
            too few did.
        sampler_s: Seconds for choosing the samples of one batch.
        worker_growth, main_growth: Growth of memory; None with too few readings.
        worker_bytes: Private memory of one worker at the end; None where it was not read.
    """

    blocked_share: float | None = None
    handover_s: float | None = None
    sampler_s: float | None = None
    worker_growth: Growth | None = None
    main_growth: Growth | None = None
    worker_bytes: int | None = None


class Observer:
    """Looks at the queue and at memory after each batch."""

    def __init__(self) -> None:
        self.memory = MemoryLog()
        self._waited_s = 0.0
        self._blocked_s = 0.0
        self._queue_seen = False
        self._batches = 0
        self._is_ready = False
        self._handovers_s: list[float] = []

    def asks(self, iterator: Any) -> None:
        """The loop is about to ask for a batch."""
        self._is_ready = has_arrived(iterator)

    def got(self, iterator: Any, wait_s: float) -> None:
        """A batch has just been delivered, after waiting for so long."""
        self._batches += 1
        if self._is_ready:
            self._handovers_s.append(wait_s)
        ready = finished_batches(iterator)
        if ready is not None and wait_s > LEAST_WAIT_S:
            self._queue_seen = True
            self._waited_s += wait_s
            if ready > 0:
                self._blocked_s += wait_s
        self.memory.read(self._batches, iterator)

    def observed(self, sampler_s: float | None) -> Observed:
        """Summarise."""
        blocked = self._blocked_s / self._waited_s if self._queue_seen else None
        handovers = self._handovers_s
        return Observed(
            blocked_share=blocked,
            handover_s=median(handovers) if len(handovers) >= FEWEST_HANDOVERS else None,
            sampler_s=sampler_s,
            worker_growth=self.memory.workers.growth(),
            main_growth=self.memory.main.growth(),
            worker_bytes=self.memory.worker_bytes,
        )


def finished_batches(iterator: Any) -> int | None:
    """Batches that have arrived and wait for their turn.

    Reads the private `_task_info` of torch's multiprocessing iterator (torch 2.6 to 2.14): an entry
    of two parts holds a batch that came early. None where there is no such thing.
    """
    tasks = getattr(iterator, "_task_info", None)
    if not isinstance(tasks, dict):
        return None
    return sum(1 for task in tasks.values() if isinstance(task, tuple) and len(task) == 2)


def has_arrived(iterator: Any) -> bool:
    """Whether a batch of a worker stands in the queue to the training process.

    Reads the private `_data_queue` of torch's multiprocessing iterator (torch 2.6 to 2.14); False
    where there is no such thing.
    """
    queue = getattr(iterator, "_data_queue", None)
    try:
        return queue is not None and not queue.empty()
    except (OSError, AttributeError):  # closed, or of another kind
        return False


def queue_is_full(iterator: Any) -> bool | None:
    """Whether the workers have finished all batches that they were asked for, and rest.

    Reads the private `_worker_result_queue`, `_data_queue` and `_task_info` of torch's
    multiprocessing iterator (torch 2.6 to 2.14). None where there is no such thing, or the system
    does not count what is in a queue (macOS).
    """
    tasks = getattr(iterator, "_task_info", None)
    queues = {
        id(q): q
        for n in ("_worker_result_queue", "_data_queue")
        if (q := getattr(iterator, n, None))
    }
    if not isinstance(tasks, dict) or not queues:
        return None
    try:
        waiting = sum(queue.qsize() for queue in queues.values())
    except (OSError, NotImplementedError, AttributeError, ValueError):
        return None
    return waiting + (finished_batches(iterator) or 0) >= len(tasks)
