"""How many workers: the smallest number that is as good as any, within what the CPUs allow."""

from __future__ import annotations

import math

from dataloading.batch_costs import BatchCosts
from dataloading.machine import Machine
from dataloading.model import step_bounds
from dataloading.settings import LoaderSettings

GOOD_ENOUGH = 1.02  # the smallest number of workers within 2 % of the best
WAITING_WORKERS_PER_CPU = 8  # waiting work may use more workers than CPUs, up to here


def busy_worker_cap(machine: Machine) -> int:
    """Workers that keep a CPU busy each: all usable CPUs of this rank but one for training.

    Two CPUs take two workers (training mostly waits for the accelerator), one CPU takes none.
    """
    cpus = machine.cpus_per_rank
    return cpus - 1 if cpus > 2 else (cpus if cpus == 2 else 0)


def worker_cap(machine: Machine, cpu_share: float) -> int:
    """Workers that the CPUs can carry, given the share of time in which each needs one.

    Args:
        machine: Usable CPUs and ranks.
        cpu_share: 1 for pure computing, near 0 for pure waiting.

    Returns:
        A number of workers; 0 on a single CPU whose samples only compute.

    Example:
        >>> worker_cap(Machine(usable_cpus=16, local_ranks=4), cpu_share=1.0)
        3
        >>> worker_cap(Machine(usable_cpus=2), cpu_share=0.1)
        16
    """
    busy = busy_worker_cap(machine)
    waiting = math.floor(machine.cpus_per_rank / max(cpu_share, 1e-3))
    most = machine.cpus_per_rank * WAITING_WORKERS_PER_CPU
    return busy if cpu_share > 0.8 else max(busy, min(waiting, most))


def best_workers(costs: BatchCosts, step_s: float, machine: Machine) -> int:
    """Smallest number of workers whose predicted step is within 2 % of the best.

    Args:
        costs: What a batch costs.
        step_s: Seconds of the train step when data is free.
        machine: Usable CPUs and ranks.

    Returns:
        A number of workers, 0 included.
    """
    options = range(worker_cap(machine, costs.cpu_share) + 1)
    steps = [
        max(step_bounds(costs, LoaderSettings(num_workers=n), step_s, machine).values())
        for n in options
    ]
    best = min(steps)
    return next(
        n for n, seconds in zip(options, steps, strict=True) if seconds <= GOOD_ENOUGH * best
    )
