"""The faults and controls: how each is built from a seed, and which cause is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.faults import workloads as w
from helper_functions import simulated_train_step

Dice = random.Random


@dataclass
class Built:
    """One fault, ready to be diagnosed.

    Attributes:
        loader: The loader, or a function that makes one (for the audit and the scaling).
        step: The train step, or None.
        how: Which tool is asked: "diagnose", "check", "samples" or "scaling".
        options: Arguments for it.
        around: A context to diagnose in.
    """

    loader: Any
    step: Any = None
    how: str = "diagnose"
    options: dict[str, Any] = field(default_factory=dict)
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)


@dataclass(frozen=True)
class Case:
    """A fault or control: name, the codes that are right, and how to build it."""

    name: str
    what: str
    right: tuple[str, ...]
    build: Callable[[Dice], Built]
    control: bool = False


def f01(dice: Dice) -> Built:
    data = w.Costly(2000, wait_s=dice.uniform(0.0015, 0.003))
    return Built(DataLoader(data, batch_size=8), simulated_train_step(dice.uniform(0.005, 0.008)))


def f02(dice: Dice) -> Built:
    data = w.Costly(4000, wait_s=dice.uniform(0.003, 0.005))
    return Built(
        DataLoader(data, batch_size=8, num_workers=2),
        simulated_train_step(dice.uniform(0.004, 0.006)),
    )


def f03(dice: Dice) -> Built:
    data = w.Costly(4000, burn_s=dice.uniform(0.002, 0.004))
    return Built(
        DataLoader(data, batch_size=8, num_workers=2),
        simulated_train_step(dice.uniform(0.003, 0.005)),
    )


def f05(dice: Dice) -> Built:
    data = w.ManyThreads(4000, side=dice.choice([256, 320, 384]), products=dice.choice([3, 4, 5]))
    return Built(
        DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=w.eight_threads),
        simulated_train_step(0.005),
    )


def f06(dice: Dice) -> Built:
    every = dice.choice([12, 16, 20])
    data = w.Costly(6000, wait_s=0.001, every=every, factor=dice.uniform(10, 16))
    return Built(
        DataLoader(data, batch_size=8, num_workers=4),
        simulated_train_step(dice.uniform(0.004, 0.005)),
    )


def f07(dice: Dice) -> Built:
    data = TensorDataset(torch.zeros(20_000, dice.choice([10, 20, 40])))
    return Built(
        DataLoader(data, batch_size=dice.choice([32, 64]), num_workers=2),
        simulated_train_step(0.0002),
    )


def f08(dice: Dice) -> Built:
    data = w.ManyTensors(8000, dice.choice([40, 50, 60]))
    return Built(DataLoader(data, batch_size=4, num_workers=2), simulated_train_step(0.002))


def f09(dice: Dice) -> Built:
    side = dice.choice([640, 720, 800])
    data = w.Costly(2000, shape=(3, side, side))
    return Built(DataLoader(data, batch_size=6, num_workers=1), simulated_train_step(0.004))


def f10(dice: Dice) -> Built:
    data = w.Records(2000, dice.choice([400_000, 600_000]))
    return Built(DataLoader(data, batch_size=10, num_workers=2), simulated_train_step(0.02))


def f11(dice: Dice) -> Built:
    data = w.Keeping(100_000, int(dice.uniform(100_000, 200_000)))
    return Built(DataLoader(data, batch_size=8, num_workers=2), simulated_train_step(0.01))


def f12(dice: Dice) -> Built:
    data = w.Costly(100_000)
    step = w.KeepingStep(simulated_train_step(0.01), int(dice.uniform(500_000, 1_500_000)))
    return Built(DataLoader(data, batch_size=8, num_workers=2), step)


def f13(dice: Dice) -> Built:
    data = w.Costly(4000, shape=(3, 1024, dice.choice([1024, 1280])))
    loader = DataLoader(data, batch_size=32, num_workers=4, prefetch_factor=16)
    return Built(loader, how="check")


def f16(dice: Dice) -> Built:
    data = w.Costly(64, wait_s=0.0005)
    start = w.StartSlowly(dice.uniform(0.2, 0.4))
    return Built(
        DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=start),
        simulated_train_step(0.005),
    )


def f17(dice: Dice) -> Built:
    data = w.Records(3000, dice.choice([300_000, 500_000]))
    loader = DataLoader(data, batch_size=10, num_workers=2, multiprocessing_context="spawn")
    return Built(loader, how="check")


def f21(dice: Dice) -> Built:
    first = dice.choice([250, 300, 400])
    sizes = [first * 2**n for n in range(5)]
    return Built(
        lambda size: DataLoader(w.Searching(size), batch_size=32),
        how="scaling",
        options={"sizes": sizes, "seconds": 10},
    )


def f22(dice: Dice) -> Built:
    sampler = w.SlowDraw(dice.choice([10_000, 20_000]), 4000)
    data = w.Costly(4000)
    return Built(
        DataLoader(data, batch_size=32, sampler=sampler, num_workers=2), simulated_train_step(0.003)
    )


def f23b(dice: Dice) -> Built:
    data = TensorDataset(torch.arange(dice.randint(50, 200)))
    return Built(
        lambda rank, world: DataLoader(data, batch_size=8, shuffle=True),
        how="samples",
        options={"world_size": 2},
    )


def f23c(dice: Dice) -> Built:
    data = TensorDataset(torch.arange(dice.randint(50, 200)))
    return Built(
        lambda rank, world: DataLoader(data, 8, sampler=DistributedSampler(data, world, rank)),
        how="samples",
        options={"world_size": 2},
    )


def f24(dice: Dice) -> Built:
    data = w.Copies(dice.randint(30, 90))
    return Built(DataLoader(data, batch_size=8, num_workers=4), how="samples")


def k01(dice: Dice) -> Built:
    data = w.Costly(4000, wait_s=0.0005)
    return Built(
        DataLoader(data, batch_size=8, num_workers=2),
        simulated_train_step(dice.uniform(0.03, 0.05)),
    )


def k02(dice: Dice) -> Built:
    data = w.Costly(8000, burn_s=0.0002)
    return Built(
        DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True),
        simulated_train_step(dice.uniform(0.01, 0.02)),
    )


def k03(dice: Dice) -> Built:
    data = w.Costly(4000)
    step = w.Logging(simulated_train_step(0.01), dice.uniform(0.1, 0.2), dice.choice([8, 10]))
    return Built(DataLoader(data, batch_size=8, num_workers=2), step)


def k04(dice: Dice) -> Built:
    data = w.Costly(8000, burn_s=0.0005)
    return Built(
        DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True),
        simulated_train_step(0.02),
        around=w.Neighbour(),
    )


def k06(dice: Dice) -> Built:
    return Built(DataLoader(w.Shares(90), batch_size=8, num_workers=4), how="samples")


CASES = (
    Case("F01", "no workers", ("too-few-workers",), f01),
    Case("F02", "slow storage, too few workers", ("too-few-workers",), f02),
    Case("F03", "CPU-bound", ("cpu-bound",), f03),
    Case("F05", "too many threads", ("thread-oversubscription",), f05),
    Case("F06", "stragglers", ("straggler",), f06),
    Case("F07", "tiny samples", ("per-sample-overhead",), f07),
    Case("F08", "many tensors", ("transfer",), f08),
    Case("F09", "fat batches", ("transfer",), f09),
    Case("F10", "copy on write", ("copy-on-write-growth",), f10),
    Case("F11", "worker leak", ("worker-memory-leak",), f11),
    Case("F12", "main leak", ("main-memory-leak",), f12),
    Case("F13", "deep prefetch", ("prefetch-memory",), f13),
    Case("F16", "epoch restart", ("epoch-startup",), f16),
    Case("F17", "pickled data set", ("dataset-pickling",), f17),
    Case("F21", "superlinear", ("superlinear-dataset",), f21),
    Case("F22", "slow sampler", ("slow-sampler",), f22),
    Case("F23b", "no distributed sampler", ("missing-distributed-sampler",), f23b),
    Case("F23c", "epoch not set", ("epoch-not-set",), f23c),
    Case("F24", "iterable copies", ("duplicate-samples",), f24),
    Case("K1", "compute-bound", ("compute",), k01, control=True),
    Case("K2", "fast loader", ("compute",), k02, control=True),
    Case("K3", "slow logging", ("host-work",), k03, control=True),
    Case("K4", "noisy neighbour", ("compute", "interference"), k04, control=True),
    Case("K6", "sharded iterable", (), k06, control=True),
)
