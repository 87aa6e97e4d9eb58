"""What is often advised without measuring: the rule of thumb, and presets for two machines.

They stand beside what was measured, for comparison; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dataloading.batch_costs import BatchCosts
from dataloading.budgets import WORKER_BYTES
from dataloading.machine import Machine
from dataloading.settings import DEFAULT_PREFETCH_FACTOR, LoaderSettings


@dataclass(frozen=True)
class HardwarePreset:
    """Settings often advised for a kind of machine, as ranges (low, high), to start from.

    Args:
        cpu_cores: CPU cores of the machine.
        accelerator: Its GPU.
        num_workers: Worker processes.
        batch_size: Samples per batch.
        pin_memory: Whether to pin batches.
        prefetch_factor: Batches each worker prepares ahead.
    """

    cpu_cores: int
    accelerator: str
    num_workers: tuple[int, int]
    batch_size: tuple[int, int]
    pin_memory: bool
    prefetch_factor: int


HARDWARE_PRESETS: Mapping[str, HardwarePreset] = MappingProxyType(
    {
        "16-core + A100": HardwarePreset(16, "A100", (8, 12), (64, 128), True, 3),
        "8-core + RTX 4080": HardwarePreset(8, "RTX 4080", (4, 6), (32, 64), True, 2),
    }
)


def rule_of_thumb_workers(
    cpu_cores: float, batch_size: int, available_memory: float, memory_per_worker: float
) -> int:
    """The usual first guess: the least of cores, batch size and the workers that memory holds.

    Args:
        cpu_cores: CPU cores that may be used.
        batch_size: Samples per batch.
        available_memory: Free memory, in any unit.
        memory_per_worker: Memory that one worker needs, in the same unit.

    Returns:
        Number of workers, at least 1.

    Raises:
        ValueError: An argument is zero, negative or not a number.

    Example:
        >>> rule_of_thumb_workers(16, 64, available_memory=24, memory_per_worker=4)
        6

    Explained in: notebook 00
    """
    for name, value in [
        ("cpu_cores", cpu_cores),
        ("batch_size", batch_size),
        ("available_memory", available_memory),
        ("memory_per_worker", memory_per_worker),
    ]:
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
    return max(1, int(min(cpu_cores, batch_size, available_memory / memory_per_worker)))


def usual_advice(costs: BatchCosts, machine: Machine) -> dict[str, LoaderSettings]:
    """The settings that each rule gives for a loader on a machine, by the name of the rule.

    Args:
        costs: Batch size, and what a worker weighs where that is known.
        machine: CPUs and free memory.

    Returns:
        Settings with kept workers; the presets with the middle of their range.

    Example:
        >>> costs = BatchCosts(0, 0, 0, batch_size=64, batch_bytes=10**6, tensors=1)
        >>> advice = usual_advice(costs, Machine(usable_cpus=8))
        >>> {rule: settings.num_workers for rule, settings in advice.items()}
        {'rule of thumb': 8, 'preset 16-core + A100': 10, 'preset 8-core + RTX 4080': 5}
    """
    per_worker = costs.worker_bytes or WORKER_BYTES.get(machine.start_method, 2**28)
    memory = machine.available_memory_bytes or machine.memory_bytes or 2**40
    workers = rule_of_thumb_workers(
        machine.cpus_per_rank, costs.batch_size, max(1, memory), per_worker
    )
    numbers = {"rule of thumb": (workers, DEFAULT_PREFETCH_FACTOR)}
    for name, preset in HARDWARE_PRESETS.items():
        numbers[f"preset {name}"] = sum(preset.num_workers) // 2, preset.prefetch_factor
    return {
        name: LoaderSettings(num_workers=number, prefetch_factor=prefetch, persistent_workers=True)
        for name, (number, prefetch) in numbers.items()
    }
