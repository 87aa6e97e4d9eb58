"""Random numbers that repeat: between workers, ranks and epochs, whatever library they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import audit_workloads as data
import numpy as np
import pytest
import torch
import workloads
from torch.utils.data import DataLoader

from dataloading import randomness
from dataloading.audit import SampleAudit, check_samples
from dataloading.randomness import DRAWS, RandomnessProbe, compare_draws
from dataloading.watchdog import ProbeTimeout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


def repeated(audit: SampleAudit) -> dict[str, Any] | None:
    """Evidence of repeated random numbers, if any; nothing else may be found."""
    if not audit.findings:
        return None
    (finding,) = audit.findings
    assert finding.code == "repeated-random-numbers"
    return dict(finding.evidence)


# ---- Cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_11_1_global_numpy_numbers_are_distinct(persistent: bool) -> None:
    """Current versions of torch seed NumPy in each worker: no finding, and no needless advice."""
    audit = check_samples(
        DataLoader(data.GlobalNumPy(40), batch_size=4, num_workers=4, persistent_workers=persistent)
    )
    assert audit.findings == ()
    assert audit.notes == ()


def test_a_11_1_the_probe_saw_distinct_numbers() -> None:
    probe = RandomnessProbe(DataLoader(data.GlobalNumPy(40), num_workers=4))
    probe.epoch(0)
    drawn = [value for worker in probe.seen[0].values() for value in worker]
    assert sorted(probe.seen[0]) == [0, 1, 2, 3]
    assert len(drawn) == 4 * DRAWS
    assert len(set(drawn)) > 4 * DRAWS - 3  # of a million numbers


def test_a_11_2_a_generator_made_in_the_constructor() -> None:
    """Seeded 0 in the constructor, 4 workers: all draw the same; with the recipe they do not."""
    audit = check_samples(DataLoader(data.OwnGenerator(40), batch_size=4, num_workers=4))
    assert not audit.ok
    assert repeated(audit) == {
        "equal_worker_pairs": 6,
        "equal_epochs": True,
        "equal_ranks": False,
        "draws": DRAWS,
    }
    finding = audit.findings[0]
    assert finding.severity == "warning"
    assert "workers 0 and 1" in finding.message
    assert "worker_init_fn" in finding.advice

    after = check_samples(
        DataLoader(
            data.OwnGenerator(40),
            batch_size=4,
            num_workers=4,
            worker_init_fn=data.reseed_own_generator,
        )
    )
    assert after.findings == ()
    assert after.notes == ()


def test_a_11_2_one_sample_of_each_worker_is_equal_before_and_distinct_after() -> None:
    """The values that the audit speaks of, seen in the loader itself."""

    def first_values(**options: Any) -> list[float]:
        loader = DataLoader(data.OwnGenerator(1), sampler=[0] * 4, num_workers=4, **options)
        return [float(value) for value in loader]

    assert len(set(first_values())) == 1
    assert len(set(first_values(worker_init_fn=data.reseed_own_generator))) == 4


@workloads.linux_only
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_11_3_a_second_random_library(workers: int) -> None:
    """Values are compared, not names of libraries: forked workers repeat what nobody seeds."""
    audit = check_samples(
        DataLoader(
            data.OwnLibrary(40),
            batch_size=4,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
    )
    evidence = repeated(audit)
    if workers == 0:
        assert evidence is None
    else:
        assert evidence is not None
        assert evidence["equal_worker_pairs"] == workers * (workers - 1) // 2
        assert evidence["equal_epochs"] is True
        assert "the first and the second epoch" in audit.findings[0].message


# ---- Other sources, other places -----------------------------------------------------------------


def test_workers_that_are_seeded_alike() -> None:
    evidence = repeated(
        check_samples(
            DataLoader(
                data.GlobalNumPy(40), batch_size=4, num_workers=2, worker_init_fn=data.seed_alike
            )
        )
    )
    assert evidence is not None
    assert evidence["equal_worker_pairs"] == 1
    assert evidence["equal_epochs"] is True


def test_persistent_workers_go_on_in_the_second_epoch() -> None:
    evidence = repeated(
        check_samples(
            DataLoader(data.OwnGenerator(40), batch_size=4, num_workers=2, persistent_workers=True)
        )
    )
    assert evidence is not None
    assert evidence["equal_worker_pairs"] == 1
    assert evidence["equal_epochs"] is False


def test_a_loop_that_seeds_at_each_epoch() -> None:
    def seed(loader: DataLoader, epoch: int) -> None:
        np.random.seed(0)

    audit = check_samples(DataLoader(data.GlobalNumPy(40), batch_size=4), start_epoch=seed)
    assert repeated(audit) == {
        "equal_worker_pairs": 0,
        "equal_epochs": True,
        "equal_ranks": False,
        "draws": DRAWS,
    }
    assert check_samples(DataLoader(data.GlobalNumPy(40), batch_size=4)).findings == ()


def test_one_epoch_compares_workers_only() -> None:
    evidence = repeated(
        check_samples(DataLoader(data.OwnGenerator(40), batch_size=4, num_workers=2), epochs=1)
    )
    assert evidence is not None
    assert (evidence["equal_worker_pairs"], evidence["equal_epochs"]) == (1, False)


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_are_seeded_alike_are_a_note(alike: bool) -> None:
    whole = data.Augmented(40)

    def make(rank: int, world_size: int) -> DataLoader:
        loader = data.distributed(rank, world_size, whole, shuffle=False)
        return DataLoader(
            whole,
            batch_size=4,
            sampler=loader.sampler,
            num_workers=1,
            generator=torch.Generator().manual_seed(0 if alike else rank),
        )

    audit = check_samples(make, world_size=2)
    assert audit.ok
    assert repeated(audit) == (
        {"equal_worker_pairs": 0, "equal_epochs": False, "equal_ranks": True, "draws": DRAWS}
        if alike
        else None
    )
    if alike:
        assert audit.findings[0].severity == "info"
        assert "rank" in audit.findings[0].advice


@pytest.mark.parametrize(
    "kind", [data.Numbers, data.TwiceFetched, data.Augmented, data.Flipped, data.WithEpoch]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_silence(kind: Any, workers: int) -> None:
    audit = check_samples(DataLoader(kind(40), batch_size=4, num_workers=workers))
    assert audit.findings == ()
    assert audit.notes == ()


def test_a_sample_is_chosen_that_the_sampler_gives() -> None:
    """The first index may not exist at all: keys, or a part of the data set."""
    loader = DataLoader(
        data.NoLength(), batch_size=1, sampler=data.Listed(["only this"]), num_workers=1
    )
    assert not any("not checked" in note for note in check_samples(loader).notes)


# ---- What goes wrong on the way ------------------------------------------------------------------


def test_workers_that_do_not_start_are_a_note() -> None:
    audit = check_samples(
        DataLoader(
            data.Augmented(8), batch_size=4, num_workers=1, worker_init_fn=data.fail_at_start
        )
    )
    assert audit.ok
    (note,) = audit.notes
    assert "RuntimeError: no licence for this worker" in note
    assert "\n" not in note


def test_a_sample_that_does_not_come_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "LIMIT_S", 0.5)
    audit = check_samples(DataLoader(workloads.Dozing(8), batch_size=4, num_workers=1))
    assert audit.findings == ()
    (note,) = audit.notes
    assert ProbeTimeout.__name__ in note
    assert "Fetching sample 0" in note


def test_slow_samples_are_compared_as_far_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "ENOUGH_S", 0.0)
    probe = RandomnessProbe(
        DataLoader(data.OwnGenerator(8), num_workers=2, persistent_workers=True)
    )
    try:
        probe.epoch(0)
        probe.epoch(0)
    finally:
        probe.close()
    assert [len(draws) for epoch in probe.seen for draws in epoch.values()] == [1, 1]
    assert compare_draws(probe.seen) is None


def test_iterable_data_sets_are_not_checked_and_say_so() -> None:
    audit = check_samples(DataLoader(data.NoisyShares(8), batch_size=4))
    assert any("iterable data set were not checked" in note for note in audit.notes)


def test_spawned_workers() -> None:
    """One worker stands for all; a generator in the constructor starts anew in each epoch."""
    audit = check_samples(
        DataLoader(
            data.OwnGenerator(8), batch_size=4, num_workers=1, multiprocessing_context="spawn"
        )
    )
    evidence = repeated(audit)
    assert evidence is not None
    assert evidence["equal_epochs"] is True


# ---- The comparison, with made-up draws ----------------------------------------------------------


def draws(seed: int, values: int, count: int = DRAWS) -> list[str]:
    return [str(v) for v in np.random.default_rng(seed).integers(values, size=count)]


def test_pairs_of_workers_are_named() -> None:
    one, two, three = (draws(seed, 10**6) for seed in range(3))
    result = compare_draws([{0: one, 1: two, 2: one, 3: three, 4: two}])
    assert result is not None
    assert result.workers == ((0, 2), (1, 4))
    assert (result.epochs, result.ranks, result.draws) == (False, False, DRAWS)


def test_epochs_repeat_only_where_all_workers_do() -> None:
    one, two, three = (draws(seed, 10**6) for seed in range(3))
    assert compare_draws([{0: one, 1: two}, {0: one, 1: three}]) is None
    result = compare_draws([{0: one, 1: two}, {0: one, 1: two}])
    assert result is not None
    assert (result.workers, result.epochs) == ((), True)


def test_ranks_are_compared_with_the_first_epoch() -> None:
    one, two = draws(0, 10**6), draws(1, 10**6)
    result = compare_draws([{0: one}, {0: two}], {0: one})
    assert result is not None
    assert (result.workers, result.epochs, result.ranks) == ((), False, True)
    assert compare_draws([{0: one}, {0: two}], {0: two}) is None


def test_nothing_seen_is_nothing_found() -> None:
    assert compare_draws([]) is None
    assert compare_draws([{}]) is None


def test_what_never_changes_is_not_random() -> None:
    same = ["a"] * DRAWS
    assert compare_draws([{0: same, 1: same}, {0: same, 1: same}], {0: same, 1: same}) is None


def test_a_cache_that_fills_is_not_random() -> None:
    filled = ["first", *["then"] * (DRAWS - 1)]
    assert compare_draws([{0: filled, 1: filled}]) is None


@pytest.mark.parametrize("chance", [0.5, 0.25, 0.1])
def test_coins_that_fall_alike_are_rarely_called_repeated(chance: float) -> None:
    """Four workers, 500 seeds: two of them may show the same flips by accident."""
    called = 0
    for seed in range(500):
        coin = np.random.default_rng(seed).random((2, 4, DRAWS)) < chance
        seen = [{w: [str(v) for v in coin[e, w]] for w in range(4)} for e in range(2)]
        called += compare_draws(seen) is not None
    assert called / 500 <= 0.01


def test_coins_that_do_repeat_are_found() -> None:
    found = 0
    for seed in range(200):
        coin = draws(seed, 2)
        found += compare_draws([{0: coin, 1: coin}]) is not None
    assert found / 200 >= 0.9
