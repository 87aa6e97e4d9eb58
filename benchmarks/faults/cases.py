"""The faults and controls: how each is built from a seed, and which cause is right.

The seed draws the amounts and the mechanism (how a sample waits or computes, what is kept where), so
that a rule has to know the kind of fault and not one form of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from benchmarks.faults import mechanisms as m
from benchmarks.faults import surroundings as around
from benchmarks.faults import workloads as w
from helper_functions import simulated_train_step

Dice = random.Random


@dataclass
class Built:
    """One fault, ready to be diagnosed.

    Attributes:
        loader: The loader, or a function that makes one (for the audit and the scaling).
        step: The train step, or None.
        how: Which tool is asked: "diagnose", "check", "samples", "scaling", "compare" or "ranks".
        options: Arguments for it.
        around: A context to diagnose in.
        form: Which form of the fault the seed chose.
    """

    loader: Any
    step: Any = None
    how: str = "diagnose"
    options: dict[str, Any] = field(default_factory=dict)
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    form: str = ""


@dataclass(frozen=True)
class Case:
    """A fault or control.

    Attributes:
        name: As in the list of faults.
        what: In words.
        right: The codes that are right; of a control, those it may have.
        build: Builds it from dice.
        control: Nothing is wrong with its loader.
        launcher: Command in front of the process in which it runs.
    """

    name: str
    what: str
    right: tuple[str, ...]
    build: Callable[[Dice], Built]
    control: bool = False
    launcher: tuple[str, ...] = ()


def f01(dice: Dice) -> Built:
    how = dice.choice([*m.WAITS])
    data = w.Costly(2000, wait_s=dice.uniform(0.0015, 0.003), waits=how)
    step = simulated_train_step(dice.uniform(0.005, 0.008))
    return Built(DataLoader(data, batch_size=8), step, form=how)


def f02(dice: Dice) -> Built:
    how = dice.choice([*m.WAITS])
    data = w.Costly(4000, wait_s=dice.uniform(0.003, 0.005), waits=how)
    step = simulated_train_step(dice.uniform(0.004, 0.006))
    return Built(DataLoader(data, batch_size=8, num_workers=2), step, form=how)


def f03(dice: Dice) -> Built:
    how = dice.choice([*m.BURNS])
    data = w.Costly(4000, burn_s=dice.uniform(0.002, 0.004), burns=how)
    step = simulated_train_step(dice.uniform(0.003, 0.005))
    return Built(DataLoader(data, batch_size=8, num_workers=2), step, form=how)


def f04(dice: Dice) -> Built:
    how = dice.choice([*m.BURNS])
    data = w.Costly(4000, burn_s=dice.uniform(0.0015, 0.003), burns=how)
    return Built(
        DataLoader(data, batch_size=8, num_workers=2),
        simulated_train_step(dice.uniform(0.004, 0.006)),
        around=around.on_one_cpu(),
        form=how,
    )


def f05(dice: Dice) -> Built:
    how = dice.choice(["torch", "pool"])
    rounds = dice.choice([3, 4, 5]) if how == "torch" else dice.choice([10, 15, 20])
    data = w.ManyThreads(4000, how, side=dice.choice([256, 320, 384]), rounds=rounds)
    init = w.eight_threads if how == "torch" else None
    loader = DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=init)
    return Built(loader, simulated_train_step(0.005), form=how)


def f06(dice: Dice) -> Built:
    how = dice.choice([*m.WAITS])
    every = dice.choice([12, 16, 20])
    data = w.Costly(6000, wait_s=0.001, waits=how, every=every, factor=dice.uniform(10, 16))
    step = simulated_train_step(dice.uniform(0.004, 0.005))
    return Built(DataLoader(data, batch_size=8, num_workers=4), step, form=how)


def f07(dice: Dice) -> Built:
    how = dice.choice(["tensor", "array", "number"])
    data = w.Tiny(20_000, how, dice.choice([10, 20, 40]))
    loader = DataLoader(data, batch_size=dice.choice([32, 64]), num_workers=2)
    return Built(loader, simulated_train_step(0.0002), form=how)


def f08(dice: Dice) -> Built:
    how = dice.choice(["dict", "list", "nested"])
    data = w.ManyTensors(8000, dice.choice([40, 50, 60]), how)
    loader = DataLoader(data, batch_size=4, num_workers=2)
    return Built(loader, simulated_train_step(0.002), form=how)


def f09(dice: Dice) -> Built:
    side = dice.choice([640, 720, 800])
    how, shape = dice.choice([("image", (3, side, side)), ("audio", (3 * side * side,))])
    data = w.Costly(2000, shape=shape)
    loader = DataLoader(data, batch_size=6, num_workers=1)
    return Built(loader, simulated_train_step(0.004), form=how)


def f10(dice: Dice) -> Built:
    how = dice.choice(["dict", "tuple"])
    data = w.Records(2000, dice.choice([400_000, 600_000]), how)
    loader = DataLoader(data, batch_size=10, num_workers=2)
    return Built(loader, simulated_train_step(0.02), form=how)


def f11(dice: Dice) -> Built:
    how = dice.choice(["list", "dict", "global"])
    data = w.Keeping(100_000, int(dice.uniform(100_000, 200_000)), how)
    loader = DataLoader(data, batch_size=8, num_workers=2)
    return Built(loader, simulated_train_step(0.01), form=how)


def f12(dice: Dice) -> Built:
    how = dice.choice(["list", "deque", "chain"])
    kept = int(dice.uniform(500_000, 1_500_000))
    step = w.KeepingStep(simulated_train_step(0.01), kept, how)
    return Built(DataLoader(w.Costly(100_000), batch_size=8, num_workers=2), step, form=how)


def f13(dice: Dice) -> Built:
    data = w.Costly(4000, shape=(3, 1024, dice.choice([1024, 1280])))
    loader = DataLoader(data, batch_size=32, num_workers=4, prefetch_factor=16)
    return Built(loader, how="check")


def f14(dice: Dice) -> Built:
    around.require_small_shared_memory()
    batch = int(dice.uniform(0.1, 0.3) * around.SMALL_SHARED_MEMORY)
    workers, prefetch = dice.choice([(4, 4), (6, 2), (3, 8)])
    data = w.Costly(4000, shape=(batch // 4 // 8,))
    loader = DataLoader(data, batch_size=8, num_workers=workers, prefetch_factor=prefetch)
    return Built(loader, how="check", form=f"{workers} x {prefetch}")


def f15(dice: Dice) -> Built:
    data = w.ManyTensors(8000, dice.choice([40, 50, 60]), dice.choice(["dict", "nested"]))
    limit = dice.choice([160, 200, 240])
    how = dice.choice(["check", "diagnose"])
    return Built(
        DataLoader(data, batch_size=4, num_workers=2),
        w.KeepingBatches(simulated_train_step(0.005)),
        how=how,
        around=around.few_open_files(limit),
        form=f"{how}, {limit} files",
    )


def f16(dice: Dice) -> Built:
    how = dice.choice(["wait", "burn"])
    start = w.StartSlowly(dice.uniform(0.2, 0.4), how)
    data = w.Costly(64, wait_s=0.0005)
    loader = DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=start)
    return Built(loader, simulated_train_step(0.005), form=how)


def f17(dice: Dice) -> Built:
    how = dice.choice(["dict", "tuple"])
    method = dice.choice(["spawn", "forkserver"])
    data = w.Records(3000, dice.choice([300_000, 500_000]), how)
    loader = DataLoader(data, batch_size=10, num_workers=2, multiprocessing_context=method)
    return Built(loader, how="check", form=f"{how}, {method}")


def f18(dice: Dice) -> Built:
    """Cold files in the first epoch only, which is about a third of the run's batches."""
    how = dice.choice(["blocks", "mapped"])
    paths = around.make_files(dice.choice([1600, 1760, 1920]), 2**17)
    around.make_cold(paths)
    loader = DataLoader(w.Files(paths, kind=how), batch_size=8, num_workers=2)
    return Built(loader, simulated_train_step(0.004), form=how)


def f19(dice: Dice) -> Built:
    how = dice.choice(["blocks", "mapped"])
    paths = around.make_files(600, dice.choice([2**17, 2**18]))
    around.make_cold(paths)
    data = w.Files(paths, kind=how, evict_after=True)
    loader = DataLoader(data, batch_size=8, num_workers=2)
    return Built(loader, simulated_train_step(dice.uniform(0.002, 0.004)), form=how)


def f20(dice: Dice) -> Built:
    how = dice.choice(["open", "Path", "descriptor"])
    per_sample = dice.choice([20, 30, 40])
    paths = around.make_files(200 * per_sample, dice.choice([500, 2000, 4000]))
    data = w.Files(paths, per_sample, kind=how)
    again_and_again = RandomSampler(data, replacement=True, num_samples=40_000)
    loader = DataLoader(data, batch_size=16, sampler=again_and_again, num_workers=2)
    return Built(loader, simulated_train_step(0.002), form=f"{how}, {per_sample} files")


def f21(dice: Dice) -> Built:
    how = dice.choice(["index", "filter", "sort"])
    first = dice.choice([250, 300, 400])
    sizes = [first * 2**n for n in range(5)]
    return Built(
        lambda size: DataLoader(w.Searching(size, how), batch_size=32),
        how="scaling",
        options={"sizes": sizes, "seconds": 10},
        form=how,
    )


def f22(dice: Dice) -> Built:
    how = dice.choice(["torch", "NumPy", "Python"])
    sampler = w.SlowDraw(dice.choice([10_000, 20_000]), 4000, how)
    loader = DataLoader(w.Costly(4000), batch_size=32, sampler=sampler, num_workers=2)
    return Built(loader, simulated_train_step(0.003), form=how)


def f23a(dice: Dice) -> Built:
    options = {
        "slow_rank": dice.choice([0, 1]),
        "wait_s": dice.uniform(0.002, 0.004),
        "waits": dice.choice([*m.WAITS]),
        "step_s": dice.uniform(0.004, 0.008),
        "watched": dice.choice([True, False]),
    }
    tool = "watch" if options["watched"] else "diagnose"
    form = f"rank {options['slow_rank']} slow, {tool}"
    return Built(None, how="ranks", options=options, form=form)


def f23b(dice: Dice) -> Built:
    how = dice.choice(["shuffled", "in order"])
    data = w.Tiny(dice.randint(50, 200), "number", 1)
    return Built(
        lambda rank, world: DataLoader(data, batch_size=8, shuffle=how == "shuffled"),
        how="samples",
        options={"world_size": 2},
        form=how,
    )


def f23c(dice: Dice) -> Built:
    data = w.Tiny(dice.randint(50, 200), "number", 1)

    def loader(rank: int, world: int) -> DataLoader:
        return DataLoader(data, 8, sampler=DistributedSampler(data, world, rank))

    return Built(loader, how="samples", options={"world_size": 2})


def f24(dice: Dice) -> Built:
    workers = dice.choice([2, 3, 4])
    loader = DataLoader(w.Copies(dice.randint(30, 90)), batch_size=8, num_workers=workers)
    return Built(loader, how="samples", form=f"{workers} workers")


def x01(dice: Dice) -> Built:
    lock, how = dice.choice([*m.LOCKS]), dice.choice([*m.WAITS])
    data = w.Locked(4000, dice.uniform(0.001, 0.002), m.LOCKS[lock](), how)
    loader = DataLoader(data, batch_size=8, num_workers=dice.choice([3, 4]))
    return Built(loader, simulated_train_step(0.004), form=f"{lock}, {how}")


def k01(dice: Dice) -> Built:
    how = dice.choice([*m.WAITS])
    data = w.Costly(4000, wait_s=0.0005, waits=how)
    step = simulated_train_step(dice.uniform(0.03, 0.05))
    return Built(DataLoader(data, batch_size=8, num_workers=2), step, form=how)


def k02(dice: Dice) -> Built:
    how = dice.choice([*m.BURNS])
    data = w.Costly(8000, burn_s=0.0002, burns=how)
    loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
    return Built(loader, simulated_train_step(dice.uniform(0.01, 0.02)), form=how)


def k03(dice: Dice) -> Built:
    how, every = dice.choice(["burn", "wait"]), dice.choice([8, 10])
    step = w.Logging(simulated_train_step(0.01), dice.uniform(0.1, 0.2), every, how)
    return Built(DataLoader(w.Costly(4000), batch_size=8, num_workers=2), step, form=how)


def k04(dice: Dice) -> Built:
    how, neighbour = dice.choice([*m.BURNS]), dice.choice([*around.BUSY])
    data = w.Costly(8000, burn_s=0.0005, burns=how)
    return Built(
        DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True),
        simulated_train_step(0.02),
        around=around.Neighbour(neighbour),
        form=f"{how}, neighbour {neighbour}",
    )


def k05(dice: Dice) -> Built:
    how = dice.choice([*m.WAITS])
    workers = dice.choice([0, 1, 2])
    data = w.Costly(4000, wait_s=dice.uniform(0.0003, 0.0006), waits=how)
    return Built(
        DataLoader(data, batch_size=8, num_workers=workers),
        simulated_train_step(dice.uniform(0.005, 0.01)),
        how="compare",
        options={"after": DataLoader(data, batch_size=8, num_workers=workers), "seconds": 12},
        form=f"{how}, {workers} workers",
    )


def k06(dice: Dice) -> Built:
    loader = DataLoader(w.Shares(dice.randint(60, 120)), batch_size=8, num_workers=4)
    return Built(loader, how="samples")


def on_a_rank(rank: int, options: dict[str, Any]) -> list[Any]:
    """What a rank finds, in a job in which one rank loads slowly.

    The steps of a watched loop wait for one another, as those of a distributed training do; a
    diagnosis takes as many steps as fit into its time, so its steps must not.
    """
    from helper_functions import diagnose_dataloader, watch_dataloader

    wait_s = options["wait_s"] if rank == options["slow_rank"] else 0.0
    data = w.Costly(2400, wait_s=wait_s, waits=options["waits"])
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    step = simulated_train_step(options["step_s"])
    if not options["watched"]:
        return list(diagnose_dataloader(loader, step, seconds=10, progress=False).findings)
    watched = watch_dataloader(loader, report=False)
    for batch in watched:
        step(batch)
        torch.distributed.all_reduce(torch.zeros(1))
    torch.distributed.barrier()
    return list(watched.diagnosis().findings)


CASES = (
    Case("F01", "no workers", ("too-few-workers",), f01),
    Case("F02", "slow storage, too few workers", ("too-few-workers",), f02),
    Case("F03", "CPU-bound", ("cpu-bound",), f03),
    Case("F04", "one CPU of two", ("cpu-quota",), f04),
    Case("F05", "too many threads", ("thread-oversubscription",), f05),
    Case("F06", "stragglers", ("straggler",), f06),
    Case("F07", "tiny samples", ("per-sample-overhead",), f07),
    Case("F08", "many tensors", ("transfer",), f08),
    Case("F09", "fat batches", ("transfer",), f09),
    Case("F10", "copy on write", ("copy-on-write-growth",), f10),
    Case("F11", "worker leak", ("worker-memory-leak",), f11),
    Case("F12", "main leak", ("main-memory-leak",), f12),
    Case("F13", "deep prefetch", ("prefetch-memory",), f13),
    Case(
        "F14",
        "little shared memory",
        ("shared-memory-short",),
        f14,
        launcher=around.WITH_SMALL_SHARED_MEMORY,
    ),
    Case("F15", "few open files", ("file-descriptors-short",), f15),
    Case("F16", "epoch restart", ("epoch-startup",), f16),
    Case("F17", "pickled data set", ("dataset-pickling",), f17),
    Case("F18", "cold cache", ("cold-storage",), f18),
    Case("F19", "cache thrashing", ("storage-bound",), f19),
    Case("F20", "small files", ("small-files",), f20),
    Case("F21", "superlinear", ("superlinear-dataset",), f21),
    Case("F22", "slow sampler", ("slow-sampler",), f22),
    Case("F23a", "a slow rank", ("slow-rank",), f23a),
    Case("F23b", "no distributed sampler", ("missing-distributed-sampler",), f23b),
    Case("F23c", "epoch not set", ("epoch-not-set",), f23c),
    Case("F24", "iterable copies", ("duplicate-samples",), f24),
    Case("X01", "a lock for all workers", ("serialised-workers",), x01),
    Case("K1", "compute-bound", ("compute",), k01, control=True),
    Case("K2", "fast loader", (), k02, control=True),
    Case("K3", "slow logging", ("host-work",), k03, control=True),
    Case("K4", "noisy neighbour", ("compute", "interference"), k04, control=True),
    Case("K5", "compared with itself", (), k05, control=True),
    Case("K6", "sharded iterable", (), k06, control=True),
)
