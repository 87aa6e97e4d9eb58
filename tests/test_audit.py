"""Which samples the epochs deliver: exact counts, right findings, and silence where nothing is wrong."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import audit_workloads as data
import numpy as np
import pytest
import torch
import workloads
from audit_workloads import Augmented, Copies, Listed, Numbers, Shares, distributed, tell_epoch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dataloading import streams
from dataloading.audit import SampleAudit, check_samples, count_deliveries
from dataloading.deliveries import Delivery, Played
from dataloading.fingerprints import fingerprint
from dataloading.watchdog import ProbeTimeout, close_iterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield from workloads.leaves_nothing()


def found(audit: SampleAudit) -> dict[str, str]:
    """Code -> severity."""
    assert len({f.code for f in audit.findings}) == len(audit.findings)
    return {f.code: f.severity for f in audit.findings}


def column(audit: SampleAudit, name: str, epoch: int = 0) -> list[Any]:
    """A column of the counts in one epoch, by rank."""
    counts = audit.counts
    return counts[counts["epoch"] == epoch].sort_values("rank")[name].tolist()


def one(audit: SampleAudit, code: str) -> Any:
    return next(f for f in audit.findings if f.code == code)


def assert_counts(audit: SampleAudit, epoch: int = 0, **expected: list[Any]) -> None:
    assert {name: column(audit, name, epoch) for name in expected} == expected


# ---- Nothing is wrong ----------------------------------------------------------------------------

WHOLE = Numbers(24)
NESTED = Subset(ConcatDataset([Numbers(5), Numbers(7)]), [0, 5, 11, 3])
SILENT: dict[str, tuple[Callable[[], DataLoader], int, int, int]] = {
    # name: loader, population, delivered, batches
    "in order": (lambda: DataLoader(WHOLE, batch_size=5), 24, 24, 5),
    "shuffled": (lambda: DataLoader(WHOLE, batch_size=5, shuffle=True), 24, 24, 5),
    "drop_last that drops nothing": (
        lambda: DataLoader(WHOLE, batch_size=6, shuffle=True, drop_last=True),
        24,
        24,
        4,
    ),
    "batch sampler": (
        lambda: DataLoader(WHOLE, batch_sampler=BatchSampler(RandomSampler(WHOLE), 5, False)),
        24,
        24,
        5,
    ),
    "batches as a list": (
        lambda: DataLoader(WHOLE, batch_sampler=[list(range(12)), list(range(12, 24))]),
        24,
        24,
        2,
    ),
    "no batching": (lambda: DataLoader(WHOLE, batch_size=None), 24, 24, 24),
    "bulk indices": (
        lambda: DataLoader(
            TensorDataset(torch.arange(24)),
            batch_size=None,
            sampler=BatchSampler(RandomSampler(WHOLE), 5, False),
        ),
        24,
        24,
        5,
    ),
    "indices as tensors": (
        lambda: DataLoader(WHOLE, batch_size=5, sampler=torch.randperm(24)),  # type: ignore[arg-type]
        24,
        24,
        5,
    ),
    "indices as NumPy numbers": (
        lambda: DataLoader(WHOLE, batch_size=5, sampler=Listed(np.arange(24)[::-1])),
        24,
        24,
        5,
    ),
    "a fixed order that is not sorted": (
        lambda: DataLoader(WHOLE, batch_size=5, sampler=Listed(sorted(range(24), key=str))),
        24,
        24,
        5,
    ),
    "Subset of ConcatDataset": (lambda: DataLoader(NESTED, batch_size=3, shuffle=True), 4, 4, 2),
    "the same set twice": (
        lambda: DataLoader(ConcatDataset([WHOLE, WHOLE]), batch_size=6, shuffle=True),
        48,
        48,
        8,
    ),
    "Subset that holds samples twice": (
        lambda: DataLoader(Subset(WHOLE, [0, 0, 1]), batch_size=3, shuffle=True),
        3,
        3,
        1,
    ),
    "SubsetRandomSampler": (
        lambda: DataLoader(WHOLE, batch_size=5, sampler=SubsetRandomSampler(range(3, 15))),
        12,
        12,
        3,
    ),
    "SubsetRandomSampler in a batch sampler": (
        lambda: DataLoader(
            WHOLE, batch_sampler=BatchSampler(SubsetRandomSampler([1, 3, 5]), 2, False)
        ),
        3,
        3,
        2,
    ),
    "a data set that knows the epoch": (
        lambda: DataLoader(data.WithEpoch(24), batch_size=5),
        24,
        24,
        5,
    ),
    "samples that change once, in a cache": (
        lambda: DataLoader(data.TwiceFetched(24), batch_size=5, num_workers=2),
        24,
        24,
        5,
    ),
    "an empty data set": (lambda: DataLoader([], batch_size=5), 0, 0, 0),
    "a stream": (lambda: DataLoader(Copies(10), batch_size=4), 10, 10, 3),
    "a stream with one worker": (
        lambda: DataLoader(Copies(10), batch_size=4, num_workers=1),
        10,
        10,
        3,
    ),
    "a stream in shares": (
        lambda: DataLoader(Shares(10), batch_size=2, num_workers=4),
        10,
        10,
        6,
    ),
    "a stream without batching": (
        lambda: DataLoader(Shares(10), batch_size=None, num_workers=2),
        10,
        10,
        10,
    ),
    "a stream in shares by worker_init_fn": (
        lambda: DataLoader(
            workloads.Sharded(12),
            batch_size=3,
            num_workers=2,
            worker_init_fn=workloads.give_part,
        ),
        12,
        12,
        4,
    ),
    "a stream that needs workers": (
        lambda: DataLoader(data.SharesInWorkersOnly(10), batch_size=2, num_workers=2),
        10,
        10,
        6,
    ),
    "an augmented stream in shares": (
        lambda: DataLoader(data.NoisyShares(10), batch_size=2, num_workers=2),
        10,
        10,
        6,
    ),
    "a stream of samples that are alike": (
        lambda: DataLoader(data.BlankShares(10), batch_size=2, num_workers=2),
        10,
        10,
        6,
    ),
    "a stream in its file order": (
        lambda: DataLoader(data.ShuffledByEpoch(10, shuffled=False), batch_size=2),
        10,
        10,
        5,
    ),
    "a subclass of DataLoader over a stream": (lambda: data.Moving(Shares(10), 2), 10, 10, 6),
}


@pytest.mark.parametrize("name", SILENT)
def test_silence_where_nothing_is_wrong(name: str) -> None:
    make, population, delivered, batches = SILENT[name]
    audit = check_samples(make())
    assert audit.findings == ()
    assert audit.ok
    assert audit.population == population
    for epoch in (0, 1):
        assert_counts(
            audit,
            epoch,
            delivered=[delivered],
            batches=[batches],
            repeated=[0],
            shared=[0],
            missing=[0],
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_map_style_data_set_are_told_without_fetching(workers: int) -> None:
    audit = check_samples(DataLoader(data.Forbidden(24), batch_size=5, num_workers=workers))
    assert audit.findings == ()
    assert_counts(audit, delivered=[24], unique=[24], missing=[0])
    assert len(audit.notes) == 1
    assert "OSError" in audit.notes[0]
    assert "0.jpg" in audit.notes[0]
    assert "\n" not in audit.notes[0]


# ---- What samplers do on purpose -----------------------------------------------------------------


def weighted(draws: int, *, seed: int = 0, items: int = 100) -> WeightedRandomSampler:
    return WeightedRandomSampler(
        torch.linspace(1, 2, items), draws, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("inside", [False, True], ids=["sampler", "in a batch sampler"])
def test_drawing_with_replacement_is_a_note(inside: bool) -> None:
    sampler = weighted(100)
    how: Any = (
        {"batch_sampler": BatchSampler(sampler, 10, False)}
        if inside
        else {"sampler": sampler, "batch_size": 10}
    )
    audit = check_samples(DataLoader(Numbers(100), **how))
    assert found(audit) == {"duplicate-samples": "info", "dropped-samples": "info"}
    assert audit.ok
    (unique,), (repeated,), (missing,) = (
        column(audit, name) for name in ("unique", "repeated", "missing")
    )
    assert unique + repeated == 100
    assert unique + missing == 100
    assert one(audit, "duplicate-samples").evidence["repeated"] in audit.counts["repeated"].tolist()
    assert "WeightedRandomSampler draws with replacement" in one(audit, "duplicate-samples").message


@pytest.mark.parametrize(
    ("draws", "code", "counts"),
    [
        (40, "dropped-samples", {"delivered": [40], "missing": [60], "repeated": [0]}),
        (150, "duplicate-samples", {"delivered": [150], "missing": [0], "repeated": [50]}),
    ],
)
def test_a_number_of_draws_that_was_asked_for_is_a_note(
    draws: int, code: str, counts: dict[str, Any]
) -> None:
    whole = Numbers(100)
    audit = check_samples(
        DataLoader(whole, batch_size=10, sampler=RandomSampler(whole, num_samples=draws))
    )
    assert found(audit) == {code: "info"}
    assert_counts(audit, **counts)


@pytest.mark.parametrize("inside", [False, True], ids=["loader", "batch sampler"])
def test_what_drop_last_drops_is_a_note(inside: bool) -> None:
    whole = Numbers(10)
    loader = (
        DataLoader(whole, batch_sampler=BatchSampler(SequentialSampler(whole), 4, True))
        if inside
        else DataLoader(whole, batch_size=4, drop_last=True)
    )
    audit = check_samples(loader)
    assert found(audit) == {"dropped-samples": "info"}
    assert audit.ok
    assert_counts(audit, delivered=[8], batches=[2], missing=[2])
    evidence = one(audit, "dropped-samples").evidence
    assert (evidence["missing"], evidence["samples"], evidence["drop_last"]) == (2, 10, True)


def test_a_set_smaller_than_a_batch_with_drop_last_gives_nothing() -> None:
    audit = check_samples(DataLoader(Numbers(3), batch_size=4, drop_last=True))
    assert found(audit) == {"dropped-samples": "critical"}
    assert_counts(audit, delivered=[0], unique=[0], batches=[0], missing=[3])


# ---- Faults of one loader ------------------------------------------------------------------------


def test_a_sampler_that_repeats_and_forgets_is_found() -> None:
    indices = [*range(8), 0, 1, 1]  # of ten: 8 and 9 never come, 0 comes twice and 1 thrice
    audit = check_samples(DataLoader(Numbers(10), batch_size=4, sampler=Listed(indices)))
    assert found(audit) == {"duplicate-samples": "warning", "dropped-samples": "warning"}
    assert not audit.ok
    assert_counts(audit, delivered=[11], unique=[8], repeated=[3], missing=[2], batches=[3])
    assert "Listed" in one(audit, "duplicate-samples").advice


def test_a_sampler_that_forgets_one_sample_is_not_excused_by_drop_last() -> None:
    audit = check_samples(DataLoader(Numbers(100), batch_size=8, sampler=Listed(range(80))))
    assert found(audit) == {"dropped-samples": "warning"}
    assert_counts(audit, delivered=[80], missing=[20])


class HalfOfThem(Listed):
    """A faulty sampler of one's own: its `num_samples` is no wish of the user."""

    def __init__(self, data_source: Any) -> None:
        self.data_source, self.num_samples = data_source, len(data_source) // 2
        super().__init__(range(self.num_samples))


def test_a_sampler_of_ones_own_is_not_excused_by_a_number_of_samples() -> None:
    audit = check_samples(DataLoader(WHOLE, batch_size=4, sampler=HalfOfThem(WHOLE)))
    assert found(audit) == {"dropped-samples": "warning"}
    assert_counts(audit, delivered=[12], missing=[12])


def test_the_worst_epoch_is_judged() -> None:
    class Forgetful(Listed):
        """Forgets more in each epoch."""

        def __iter__(self) -> Iterator[int]:
            self.indices = self.indices[:-1]
            return iter(self.indices)

    audit = check_samples(
        DataLoader(Numbers(10), batch_size=2, sampler=Forgetful(list(range(11)))), epochs=3
    )
    assert audit.counts["missing"].tolist() == [0, 1, 2]
    assert one(audit, "dropped-samples").evidence["missing"] == 2


def test_keys_instead_of_indices_are_compared_as_they_are() -> None:
    keys = ["a", "b", "c", "a"]
    audit = check_samples(DataLoader(data.NoLength(), batch_size=2, sampler=Listed(keys)))
    assert found(audit) == {"duplicate-samples": "warning"}
    assert_counts(audit, delivered=[4], unique=[3], repeated=[1], missing=[None])
    assert "no length" in audit.notes[0]


@pytest.mark.parametrize("odd", [[(0, 224), (1, 192)], [0, 24]], ids=["pairs", "out of range"])
def test_what_is_no_index_leaves_missing_samples_unknown(odd: list[Any]) -> None:
    audit = check_samples(DataLoader(Numbers(24), batch_size=None, sampler=Listed(odd)))
    outside = {"worker-error": "critical"} if 24 in odd else {}
    assert found(audit) == outside
    assert_counts(audit, delivered=[2], unique=[2], missing=[None])
    assert "numbers below 24" in audit.notes[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_without_an_end_is_cut_after_an_epoch(ranks: int) -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(
            WHOLE, batch_size=4, sampler=data.EndlessPermutations(24, rank, world_size)
        ),
        world_size=ranks,
        epochs=1,
    )
    assert audit.findings == ()
    assert_counts(
        audit, delivered=[24 // ranks] * ranks, missing=[0] * ranks, batches=[6 // ranks] * ranks
    )
    assert "does not end" in audit.notes[0]


# ---- The length that a loader says ---------------------------------------------------------------


class Says(Listed):
    """Says another length than it has."""

    def __init__(self, indices: Any, length: int) -> None:
        super().__init__(indices)
        self.length = length

    def __len__(self) -> int:
        return self.length


class SaysBatches(BatchSampler):
    """The same of batches."""

    def __len__(self) -> int:
        return 5


class SaysLoader(DataLoader):
    """The same of a loader."""

    def __len__(self) -> int:
        return 5


class SaysShares(Shares):
    """A stream that says a length."""

    def __init__(self, count: int, length: int) -> None:
        super().__init__(count)
        self.length = length

    def __len__(self) -> int:
        return self.length


HUNDRED = Numbers(100)
WRONG_LENGTH: dict[str, Callable[[], DataLoader]] = {
    "sampler": lambda: DataLoader(HUNDRED, batch_size=10, sampler=Says(range(100), 50)),
    "batch sampler": lambda: DataLoader(
        HUNDRED, batch_sampler=SaysBatches(SequentialSampler(HUNDRED), 10, False)
    ),
    "loader": lambda: SaysLoader(HUNDRED, batch_size=10),
    "stream": lambda: DataLoader(SaysShares(100, 50), batch_size=10),
    "stream in workers": lambda: DataLoader(SaysShares(100, 50), batch_size=10, num_workers=2),
}


@pytest.mark.parametrize("name", WRONG_LENGTH)
def test_a_18_9_a_length_of_5_and_10_batches(name: str) -> None:
    loader = WRONG_LENGTH[name]()
    assert len(loader) == 5
    audit = check_samples(loader)
    assert found(audit) == {"dropped-samples": "warning"}
    assert not audit.ok
    assert_counts(audit, delivered=[100], missing=[0], batches=[10])
    finding = one(audit, "dropped-samples")
    assert finding.message == "len(dataloader) says 5 batches an epoch, and 10 come."
    assert (finding.evidence["length"], finding.evidence["batches"]) == (5, 10)
    assert "__len__" in finding.advice


def test_a_length_that_is_never_reached_is_found() -> None:
    audit = check_samples(DataLoader(SaysShares(40, 60), batch_size=10))
    assert one(audit, "dropped-samples").evidence["length"] == 6


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch_size", "workers"), [(2, 0), (2, 4), (3, 2), (None, 2)])
def test_a_right_length_of_a_stream_is_silent(
    batch_size: int | None, workers: int, drop_last: bool
) -> None:
    """Each worker ends with a part of a batch, or drops it, which `len` cannot know."""
    loader = DataLoader(
        SaysShares(20, 20),
        batch_size=batch_size,
        num_workers=workers,
        drop_last=drop_last and batch_size is not None,
    )
    audit = check_samples(loader, epochs=1)
    assert not any("len(dataloader)" in finding.message for finding in audit.findings)
    assert loader._IterableDataset_len_called is None  # torch would warn the user by it


def test_what_was_not_played_to_its_end_says_nothing_of_the_length() -> None:
    class Repeats(data.EndlessPermutations):
        def __len__(self) -> int:
            return 7

    class InItsOwnWay(SaysLoader):
        def __iter__(self) -> Any:
            return iter([1, 2, 3, 4, 5])

    for loader in (
        DataLoader(WHOLE, batch_size=1, sampler=Repeats(24)),
        InItsOwnWay(WHOLE, batch_size=4),
    ):
        assert check_samples(loader, epochs=1).findings == ()


# ---- Ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True], ids=["without set_epoch", "with set_epoch"])
def test_a_12_1_f23c_one_replica_and_three_epochs(told: bool) -> None:
    """22 items, a shuffling sampler, with and without the call."""
    whole = Numbers(22)
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, whole),
        epochs=3,
        start_epoch=tell_epoch if told else None,
    )
    assert found(audit) == ({} if told else {"epoch-not-set": "warning"})
    assert audit.ok is told
    for epoch in range(3):
        assert_counts(audit, epoch, delivered=[22], unique=[22], missing=[0], batches=[11])
    if not told:
        finding = one(audit, "epoch-not-set")
        assert finding.evidence["equal_epochs"] == 3
        assert "DistributedSampler" in finding.message
        assert "set_epoch" in finding.advice


def test_f23c_an_epoch_that_never_changes_is_found_on_two_ranks() -> None:
    whole = Numbers(100)
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, whole),
        world_size=2,
        start_epoch=lambda loader, epoch: loader.sampler.set_epoch(0),
    )
    assert found(audit) == {"epoch-not-set": "warning"}
    assert_counts(audit, delivered=[50, 50], shared=[0, 0], missing=[0, 0])


def test_a_sampler_that_does_not_shuffle_needs_no_epoch() -> None:
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, WHOLE, shuffle=False), world_size=2
    )
    assert audit.findings == ()


def test_one_epoch_shows_no_order() -> None:
    audit = check_samples(lambda r, w: distributed(r, w, WHOLE), world_size=2, epochs=1)
    assert audit.findings == ()
    assert audit.counts["epoch"].tolist() == [0, 0]


def test_looking_for_the_epoch_leaves_the_sampler_as_it_was() -> None:
    loader = distributed(0, 1, WHOLE)
    loader.sampler.set_epoch(5)
    assert found(check_samples(loader)) == {"epoch-not-set": "warning"}
    assert loader.sampler.epoch == 5


def test_a_batch_sampler_that_shuffles_by_epoch_must_be_told_too() -> None:
    loader = DataLoader(WHOLE, batch_sampler=data.EpochBatches(24, 4))
    assert found(check_samples(loader)) == {"epoch-not-set": "warning"}
    assert "EpochBatches" in check_samples(loader).findings[0].message

    def tell(loader: DataLoader, epoch: int) -> None:
        loader.batch_sampler.set_epoch(epoch)

    assert check_samples(loader, start_epoch=tell).findings == ()


@pytest.mark.parametrize(
    ("epochs_of_ranks", "ok"), [((0, 1), False), ((0, 0), True)], ids=["different", "equal"]
)
def test_a_12_2_ranks_in_different_epochs_share_and_miss(
    epochs_of_ranks: tuple[int, int], ok: bool
) -> None:
    """8 items, 2 ranks, epoch 0 on one and 1 on the other: the union is smaller than 8."""
    whole = Numbers(8)
    first, second = (
        list(_sampler(whole, rank, epoch)) for rank, epoch in enumerate(epochs_of_ranks)
    )
    shared, union = len(set(first) & set(second)), len(set(first) | set(second))
    assert (union == 8) is ok

    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, whole),
        world_size=2,
        start_epoch=lambda loader, epoch: loader.sampler.set_epoch(
            10 * epoch + epochs_of_ranks[loader.sampler.rank]
        ),
    )
    assert_counts(audit, delivered=[4, 4], shared=[shared] * 2, missing=[8 - union] * 2)
    assert audit.ok is ok
    assert found(audit) == (
        {} if ok else {"sample-overlap": "critical", "dropped-samples": "warning"}
    )
    if not ok:
        assert "epoch" in one(audit, "sample-overlap").advice


def _sampler(whole: Any, rank: int, epoch: int) -> Any:
    sampler = DistributedSampler(whole, num_replicas=2, rank=rank)
    sampler.set_epoch(epoch)
    return sampler


def test_a_rank_that_forgets_the_epoch_is_found_though_the_first_epoch_is_right() -> None:
    def tell_first_rank(loader: DataLoader, epoch: int) -> None:
        if loader.sampler.rank == 0:
            loader.sampler.set_epoch(epoch)

    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, Numbers(100)),
        world_size=2,
        start_epoch=tell_first_rank,
    )
    assert_counts(audit, 0, shared=[0, 0], missing=[0, 0])
    assert found(audit)["sample-overlap"] == "critical"
    assert one(audit, "sample-overlap").evidence["epoch"] == 1


def test_two_samplers_of_the_same_rank_are_found() -> None:
    audit = check_samples(
        lambda rank, world_size: distributed(0, world_size, WHOLE),
        world_size=2,
        start_epoch=tell_epoch,
    )
    assert found(audit) == {"sample-overlap": "critical", "dropped-samples": "warning"}
    assert_counts(audit, shared=[12, 12], missing=[12, 12])
    assert "rank=" in one(audit, "sample-overlap").advice


@pytest.mark.parametrize("shuffle", [False, True])
def test_f23b_ranks_without_a_distributed_sampler(shuffle: bool) -> None:
    whole = Numbers(40)
    audit = check_samples(
        lambda rank, world_size: DataLoader(whole, batch_size=4, shuffle=shuffle), world_size=2
    )
    assert found(audit) == {"missing-distributed-sampler": "critical"}
    assert_counts(audit, delivered=[40, 40], shared=[40, 40], missing=[0, 0], batches=[10, 10])
    finding = one(audit, "missing-distributed-sampler")
    assert finding.evidence["shared_share"] == 1.0
    assert finding.expected_gain == 2.0
    assert "DistributedSampler" in finding.advice


@pytest.mark.parametrize(("items", "ranks", "extra"), [(101, 4, 3), (99, 2, 1), (1, 2, 1)])
def test_padding_is_only_a_note(items: int, ranks: int, extra: int) -> None:
    whole = Numbers(items)
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, whole),
        world_size=ranks,
        start_epoch=tell_epoch,
    )
    assert found(audit) == {"duplicate-samples": "info"}
    assert audit.ok
    finding = one(audit, "duplicate-samples")
    assert finding.evidence["repeated"] == extra
    assert "without padding" in finding.advice
    each = (items + extra) // ranks
    assert_counts(audit, delivered=[each] * ranks, repeated=[0] * ranks, missing=[0] * ranks)


def test_a_sample_that_is_there_twice_may_go_to_two_ranks() -> None:
    twice = ConcatDataset([Numbers(9)] * 2)
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, twice, shuffle=False), world_size=2
    )
    assert audit.findings == ()
    assert audit.population == 18
    assert_counts(audit, delivered=[9, 9], unique=[9, 9], shared=[0, 0], missing=[0, 0])


def test_a_sampler_that_drops_instead_of_padding_is_a_note() -> None:
    whole = Numbers(101)
    audit = check_samples(
        lambda rank, world_size: DataLoader(
            whole,
            batch_size=2,
            sampler=DistributedSampler(whole, world_size, rank, drop_last=True),
        ),
        world_size=4,
        start_epoch=tell_epoch,
    )
    assert found(audit) == {"dropped-samples": "info"}
    assert_counts(audit, delivered=[25] * 4, shared=[0] * 4, missing=[1] * 4)


@pytest.mark.parametrize("seeds", [(0, 1), (0, 0)], ids=["different seeds", "one seed"])
def test_a_12_5_a_weighted_sampler_on_each_rank(seeds: tuple[int, int]) -> None:
    """100 draws, 2 ranks: the overlap is reported, and nobody speaks of shares."""
    whole = Numbers(100)
    draws = [set(weighted(100, seed=seed)) for seed in seeds]
    shared = len(draws[0] & draws[1])
    assert shared > 0
    audit = check_samples(
        lambda rank, world_size: DataLoader(
            whole, batch_size=10, sampler=weighted(100, seed=seeds[rank])
        ),
        world_size=2,
        epochs=1,
    )
    assert not audit.ok
    assert_counts(audit, shared=[shared, shared], missing=[100 - len(draws[0] | draws[1])] * 2)
    code, severity = (
        ("sample-overlap", "warning")
        if seeds[0] != seeds[1]
        else ("missing-distributed-sampler", "critical")
    )
    assert found(audit) == {
        code: severity,
        "duplicate-samples": "info",
        "dropped-samples": "info",
    }
    assert one(audit, code).evidence["shared"] == shared


@pytest.mark.parametrize(
    ("batch_size", "ranks", "drop_last", "codes"),
    [
        (2, 4, True, {"dropped-samples": "critical"}),
        (1, 4, True, {"duplicate-samples": "info"}),
        (2, 4, False, {"duplicate-samples": "info"}),
        (2, 2, False, {"duplicate-samples": "info"}),
    ],
    ids=["as it is", "batch 1", "no drop_last", "fewer ranks"],
)
def test_a_12_6_no_batch_is_left_for_a_rank(
    batch_size: int, ranks: int, drop_last: bool, codes: dict[str, str]
) -> None:
    """3 items, 4 ranks with padding, batch 2, drop_last: and each of the three ways out."""
    whole = Numbers(3)

    def make(rank: int, world_size: int) -> DataLoader:
        return distributed(rank, world_size, whole, batch_size=batch_size, drop_last=drop_last)

    audit = check_samples(make, world_size=ranks, start_epoch=tell_epoch)
    assert found(audit) == codes
    if "dropped-samples" in codes:
        assert_counts(audit, delivered=[0] * 4, batches=[0] * 4, missing=[3] * 4)
        advice = one(audit, "dropped-samples").advice
        assert all(way in advice for way in ("smaller batch", "fewer ranks", "drop_last=False"))


@pytest.mark.parametrize("own", [False, True], ids=["Subset", "data sets of their own"])
def test_a_12_8_samples_that_are_shared_out_twice(own: bool) -> None:
    """1,000 items, 2 ranks, divided by the data set and by the sampler: 250 each."""
    whole = Numbers(1000)

    def make(rank: int, world_size: int) -> DataLoader:
        part: Any = Numbers(500, 500 * rank) if own else Subset(whole, range(rank, 1000, 2))
        return distributed(rank, world_size, part, batch_size=10)

    audit = check_samples(make, world_size=2, start_epoch=tell_epoch)
    assert found(audit) == {"dropped-samples": "warning"}
    assert audit.population == 1000
    assert_counts(audit, delivered=[250, 250], shared=[0, 0], missing=[500, 500])
    assert "divided twice" in one(audit, "dropped-samples").advice

    right = check_samples(
        lambda rank, world_size: DataLoader(
            Numbers(500, 500 * rank) if own else Subset(whole, range(rank, 1000, 2)),
            batch_size=10,
            shuffle=True,
        ),
        world_size=2,
    )
    assert right.findings == ()
    assert_counts(right, delivered=[500, 500], shared=[0, 0], missing=[0, 0])


# ---- Ranks with data sets of their own -----------------------------------------------------------

SETS: dict[str, Callable[[], Any]] = {
    "steady": lambda: Numbers(30),
    "augmented": lambda: Augmented(30),
    "own generator": lambda: data.OwnGenerator(30, seed=None),
    "not to be fetched": lambda: data.Forbidden(30),
    "Subset of ConcatDataset": lambda: Subset(
        ConcatDataset([Augmented(10), Augmented(40, 10)]), range(30)
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_ranks_that_make_the_same_set_each_and_share_it_out(name: str) -> None:
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, SETS[name]()),
        world_size=2,
        start_epoch=tell_epoch,
    )
    assert audit.findings == ()
    assert audit.population == 30
    assert_counts(audit, delivered=[15, 15], shared=[0, 0], missing=[0, 0])
    assumed = [note for note in audit.notes if "taken for the same" in note]
    assert len(assumed) == (name in ("own generator", "not to be fetched"))


@pytest.mark.parametrize("name", SETS)
def test_ranks_that_make_the_same_set_each_and_do_not(name: str) -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(SETS[name](), batch_size=5, shuffle=True), world_size=2
    )
    if name in ("own generator", "not to be fetched"):  # it cannot be told, so nothing is claimed
        assert audit.findings == ()
        assert any("taken for different" in note for note in audit.notes)
    else:
        assert found(audit) == {"missing-distributed-sampler": "critical"}
        assert_counts(audit, shared=[30, 30], missing=[0, 0])


@pytest.mark.parametrize("kind", [Numbers, Augmented])
@pytest.mark.parametrize("counts", [(10, 10), (10, 13)], ids=["equal", "unequal"])
def test_shards_of_their_own_are_in_order(kind: Any, counts: tuple[int, int]) -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(
            kind(counts[rank], 100 * rank), batch_size=5, shuffle=True
        ),
        world_size=2,
    )
    assert audit.findings == ()
    assert audit.population == sum(counts)
    assert_counts(audit, delivered=list(counts), shared=[0, 0], missing=[0, 0])
    assert "told by their content" in audit.notes[0]


@pytest.mark.parametrize("kind", [Numbers, Augmented])
def test_shards_that_overlap_are_found_by_content(kind: Any) -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(kind(10, 5 * rank), batch_size=5, shuffle=True),
        world_size=2,
    )
    assert found(audit) == {"sample-overlap": "critical"}
    assert audit.population == 15
    assert_counts(audit, delivered=[10, 10], unique=[10, 10], shared=[5, 5], missing=[0, 0])


def test_ranks_that_list_the_same_files_in_different_orders_are_found() -> None:
    """A sampler deals out places; if the ranks' lists differ, samples are lost and repeated."""
    listed = [list(range(40)), list(range(40))[::-1]]
    audit = check_samples(
        lambda rank, world_size: distributed(rank, world_size, listed[rank], shuffle=False),
        world_size=2,
    )
    assert found(audit) == {"sample-overlap": "critical", "dropped-samples": "warning"}
    assert audit.population == 40
    assert_counts(audit, delivered=[20, 20], shared=[20, 20], missing=[20, 20])


def test_shards_of_samples_that_are_alike_claim_nothing() -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader([0] * (10 + rank), batch_size=5), world_size=2
    )
    assert audit.findings == ()
    assert audit.population == 21
    assert "not found out" in audit.notes[0].replace("\n", " ")


def test_contents_that_take_too_long_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloading.sample_numbers.CONTENT_LIMIT_S", 0.0)
    audit = check_samples(lambda rank, world_size: DataLoader(Numbers(10, 5 * rank)), world_size=2)
    assert audit.findings == ()
    assert "could not be compared" in audit.notes[0]


# ---- Iterable data sets --------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_12_3_f24_every_worker_yields_every_sample(persistent: bool) -> None:
    """10 ids, batch 2, 4 workers: 20 batches of 40 ids, and 6 batches of 10 when shared out."""
    options: Any = {"batch_size": 2, "num_workers": 4, "persistent_workers": persistent}
    before = check_samples(DataLoader(Copies(10), **options))
    assert found(before) == {"duplicate-samples": "critical"}
    assert not before.ok
    assert before.population == 10
    for epoch in (0, 1):
        assert_counts(
            before,
            epoch,
            batches=[20],
            delivered=[40],
            unique=[10],
            repeated=[30],
            missing=[0],
        )
    finding = one(before, "duplicate-samples")
    assert finding.evidence["factor"] == 4.0
    assert "each of the 4 workers goes through all of them" in finding.message
    assert "get_worker_info" in finding.advice

    after = check_samples(DataLoader(Shares(10), **options))
    assert after.findings == ()
    assert_counts(after, batches=[6], delivered=[10], unique=[10], repeated=[0], missing=[0])


@pytest.mark.parametrize(
    ("batch_size", "batches", "lost", "severity"), [(2, 4, 2, "warning"), (4, 0, 10, "critical")]
)
def test_a_12_4_drop_last_in_every_worker(
    batch_size: int, batches: int, lost: int, severity: str
) -> None:
    """10 ids in shares of 3, 3, 2 and 2."""
    audit = check_samples(
        DataLoader(Shares(10), batch_size=batch_size, num_workers=4, drop_last=True), epochs=1
    )
    assert found(audit) == {"dropped-samples": severity}
    assert_counts(audit, batches=[batches], delivered=[10 - lost], missing=[lost], repeated=[0])
    assert f"{lost} of 10 samples" in one(audit, "dropped-samples").message


def test_a_little_loss_in_every_worker_is_a_note() -> None:
    audit = check_samples(
        DataLoader(Shares(100), batch_size=8, num_workers=2, drop_last=True), epochs=1
    )
    assert found(audit) == {"dropped-samples": "info"}
    assert_counts(audit, batches=[12], delivered=[96], missing=[4])


def test_shares_that_overlap_are_found() -> None:
    audit = check_samples(DataLoader(data.HalfShares(12), batch_size=2, num_workers=3), epochs=1)
    assert found(audit) == {"duplicate-samples": "critical"}
    assert_counts(audit, delivered=[24], unique=[12], repeated=[12])
    assert "overlap" in one(audit, "duplicate-samples").message


def test_copies_of_augmented_samples_are_counted() -> None:
    audit = check_samples(DataLoader(data.NoisyCopies(10), batch_size=2, num_workers=3), epochs=1)
    assert found(audit) == {"duplicate-samples": "critical"}
    assert audit.population == 10
    assert_counts(audit, delivered=[30], repeated=[20], missing=[0])
    assert "counted" in audit.notes[0]


def test_streams_that_share_out_over_ranks_are_in_order() -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(
            Shares(21, rank, world_size), batch_size=2, num_workers=2
        ),
        world_size=2,
    )
    assert audit.findings == ()
    assert audit.population == 21
    assert sum(column(audit, "delivered")) == 21
    assert_counts(audit, shared=[0, 0], missing=[0, 0])


def test_streams_that_do_not_are_found() -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(Shares(20), batch_size=2, num_workers=2), world_size=2
    )
    assert found(audit) == {"missing-distributed-sampler": "critical"}
    assert audit.population == 20
    assert_counts(audit, delivered=[20, 20], shared=[20, 20], missing=[0, 0])


@pytest.mark.parametrize("kind", [data.NoisyShares, data.BlankShares])
def test_streams_that_cannot_be_told_apart_claim_no_overlap(kind: Any) -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(kind(20), batch_size=2, num_workers=2), world_size=2
    )
    assert audit.findings == ()
    assert_counts(audit, delivered=[20, 20], shared=[0, 0], missing=[0, 0])
    assert "not compared" in audit.notes[0]


def test_a_stream_that_shuffles_by_epoch_must_be_told() -> None:
    loader = DataLoader(data.ShuffledByEpoch(30), batch_size=3)
    audit = check_samples(loader)
    assert found(audit) == {"epoch-not-set": "warning"}
    assert "ShuffledByEpoch" in one(audit, "epoch-not-set").message
    assert loader.dataset.epoch == 0

    def tell(loader: DataLoader, epoch: int) -> None:
        loader.dataset.set_epoch(epoch)

    assert check_samples(loader, start_epoch=tell).findings == ()


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_do_not_hear_of_the_epoch(persistent: bool) -> None:
    """The loop tells the data set, but workers that stay have a copy of it."""
    loader = DataLoader(
        data.ShuffledByEpoch(30), batch_size=3, num_workers=1, persistent_workers=persistent
    )
    audit = check_samples(loader, start_epoch=lambda loader, epoch: loader.dataset.set_epoch(epoch))
    assert found(audit) == ({"epoch-not-set": "warning"} if persistent else {})
    if persistent:
        assert "persistent_workers=False" in one(audit, "epoch-not-set").advice


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMED", 100)
    audit = check_samples(DataLoader(data.Endless(), batch_size=10, num_workers=workers))
    assert_counts(audit, delivered=[100], missing=[None])
    assert any("goes on for longer" in note for note in audit.notes)
    assert found(audit) == ({"duplicate-samples": "critical"} if workers else {})
    if workers:
        assert_counts(audit, unique=[50], repeated=[50])
        assert one(audit, "duplicate-samples").evidence["factor"] == 2.0


def test_a_stream_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloading.audit.LIMIT_S", 1.0)
    with pytest.raises(ProbeTimeout, match="Auditing the samples"):
        check_samples(DataLoader(Stuck(3), batch_size=1, num_workers=1))


class Stuck(Copies):
    def sample(self, number: int) -> Any:
        time.sleep(workloads.FOREVER_S)


def test_an_error_of_the_stream_comes_through_and_nothing_is_left() -> None:
    with pytest.raises(ZeroDivisionError):
        check_samples(DataLoader(Broken(3), batch_size=1, num_workers=2))


class Broken(Copies):
    def sample(self, number: int) -> Any:
        return 1 // 0


# ---- How it is called ----------------------------------------------------------------------------


def test_several_ranks_need_a_function() -> None:
    with pytest.raises(ValueError, match="make_dataloader"):
        check_samples(DataLoader(WHOLE), world_size=2)


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"epochs": 0}])
def test_numbers_below_one_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        check_samples(DataLoader(WHOLE), **wrong)


def test_what_is_no_loader_is_named() -> None:
    with pytest.raises(TypeError, match="got list"):
        check_samples([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"make_dataloader\(rank=0, world_size=1\) gave a list"):
        check_samples(lambda rank, world_size: [1, 2])  # type: ignore[arg-type,return-value]


def test_the_epoch_is_told_once_per_epoch_and_rank_in_order() -> None:
    made, told = [], []

    def make(rank: int, world_size: int) -> DataLoader:
        made.append((rank, world_size))
        loader = distributed(rank, world_size, WHOLE)
        loader.rank = rank  # type: ignore[attr-defined]
        return loader

    def start(loader: Any, epoch: int) -> None:
        told.append((epoch, loader.rank))
        tell_epoch(loader, epoch)

    check_samples(make, world_size=3, epochs=2, start_epoch=start)
    assert made == [(0, 3), (1, 3), (2, 3)]
    assert told == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_random_states_stay_as_they_were() -> None:
    generator = torch.Generator().manual_seed(3)
    inner = torch.Generator().manual_seed(4)
    whole = Augmented(24)
    loaders = [
        DataLoader(whole, batch_size=4, shuffle=True),
        DataLoader(whole, batch_size=4, shuffle=True, num_workers=1, generator=generator),
        DataLoader(
            whole, batch_sampler=BatchSampler(RandomSampler(whole, generator=inner), 4, True)
        ),
        DataLoader(data.NoisyShares(8), batch_size=4, num_workers=1, generator=generator),
    ]
    before = [workloads.random_state(), generator.get_state().tolist(), inner.get_state().tolist()]
    for loader in loaders:
        check_samples(loader)
    check_samples(lambda rank, w: DataLoader(Augmented(9, rank), shuffle=True), world_size=2)
    after = [workloads.random_state(), generator.get_state().tolist(), inner.get_state().tolist()]
    assert after == before


def test_the_users_persistent_workers_are_left_alone() -> None:
    loader = DataLoader(
        WHOLE, batch_size=4, num_workers=1, persistent_workers=True, generator=torch.Generator()
    )
    iterator = iter(loader)
    try:
        assert next(iterator).tolist() == [0, 1, 2, 3]
        worker = iterator._workers[0].pid
        assert check_samples(loader).ok
        assert loader._iterator is iterator
        assert iterator._workers[0].pid == worker
        assert next(iterator).tolist() == [4, 5, 6, 7]
    finally:
        close_iterator(iterator)
        loader._iterator = None


def test_spawned_workers_deliver_the_same() -> None:
    audit = check_samples(
        DataLoader(Copies(6), batch_size=2, num_workers=2, multiprocessing_context="spawn"),
        epochs=1,
    )
    assert found(audit) == {"duplicate-samples": "critical"}
    assert_counts(audit, batches=[6], delivered=[12], unique=[6], repeated=[6], missing=[0])


def test_it_works_in_a_thread() -> None:
    audit = workloads.in_thread(
        lambda: check_samples(DataLoader(Shares(10), batch_size=2, num_workers=2), epochs=1)
    )
    assert audit.findings == ()
    assert_counts(audit, delivered=[10])


def test_a_million_samples_take_little_longer_than_drawing_them() -> None:
    """Nothing is done per sample in Python that NumPy can do."""
    loader: Any = DataLoader(range(1_000_000), batch_size=64, shuffle=True)  # type: ignore[arg-type]
    begun = time.perf_counter()
    for _ in range(2):
        drawn = [list(batch) for batch in loader.batch_sampler]
    drawing_s = time.perf_counter() - begun
    begun = time.perf_counter()
    audit = check_samples(loader)
    assert time.perf_counter() - begun < 12 * drawing_s  # about 2 times; with Counters, 20
    assert audit.population == 1_000_000
    assert_counts(
        audit, delivered=[1_000_000], unique=[1_000_000], missing=[0], batches=[len(drawn)]
    )


# ---- How it shows --------------------------------------------------------------------------------


def test_it_shows_as_one_line_a_table_and_a_dict() -> None:
    audit = check_samples(
        lambda rank, world_size: DataLoader(WHOLE, batch_size=4), world_size=2, epochs=1
    )
    assert repr(audit).startswith("SampleAudit: 1 finding(s), first [critical] missing-distrib")
    assert "\n" not in repr(audit)
    shown = audit._repr_html_()
    assert "24 delivered, 24 different, 0 repeated, 24 shared with other ranks, 0 missing" in shown
    saved = json.loads(json.dumps(audit.to_dict()))
    assert saved["counts"][1] == {
        "epoch": 0,
        "rank": 1,
        "batches": 6,
        "delivered": 24,
        "unique": 24,
        "repeated": 0,
        "shared": 24,
        "missing": 0,
    }
    assert (saved["ok"], saved["population"]) == (False, 24)
    assert saved["findings"][0]["code"] == "missing-distributed-sampler"


def test_it_shows_what_is_right_and_what_is_unknown() -> None:
    good = check_samples(DataLoader(WHOLE, batch_size=4))
    assert repr(good) == "SampleAudit: ok: [24, 24] of 24 samples delivered per epoch"
    unknown = check_samples(DataLoader(data.NoLength(), batch_size=2, sampler=Listed(["a", "b"])))
    assert "unknown missing" in unknown._repr_html_()
    assert json.loads(json.dumps(unknown.to_dict()))["counts"][0]["missing"] is None


# ---- Counting, and telling samples apart ---------------------------------------------------------


def test_counts_of_made_up_deliveries() -> None:
    played = Played(
        deliveries=[
            Delivery(0, 0, np.array([0, 1, 1, 2]), 2),
            Delivery(0, 1, np.array([2, 3, 7]), 1),
            Delivery(1, 0, np.array([], dtype=int), 0),
            Delivery(1, 1, np.array([4, 4, 4]), 3),
        ],
        expected=np.array([1, 1, 1, 1, 2]),  # sample 4 is there twice, 7 is none of them
    )
    counts = count_deliveries(played)
    columns = ["epoch", "rank", "batches", "delivered", "unique", "repeated", "shared", "missing"]
    assert counts.columns.tolist() == columns
    assert counts.to_numpy().tolist() == [
        [0, 0, 2, 4, 3, 1, 1, 2],
        [0, 1, 1, 3, 3, 0, 1, 2],
        [1, 0, 0, 0, 0, 0, 0, 4],
        [1, 1, 3, 3, 1, 1, 0, 4],
    ]


class Thing:
    """Neither to be pickled nor shown in words."""

    def __init__(self) -> None:
        self.call = lambda: None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([1])),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
        (np.array([1, 2]), np.array([2, 1])),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (np.float32(1), np.float32(2)),
        ([[1], [2]], [[1, 2]]),
        (("ab", "c"), ("a", "bc")),
        ({"x": 1}, {"y": 1}),
        ({"a", "b"}, {"a", "c"}),
        (
            workloads.Pair(torch.ones(1), torch.ones(1)),
            workloads.Pair(torch.ones(1), torch.zeros(1)),
        ),
        (None, 0),
        (b"a", "a"),
    ],
)
def test_fingerprints_tell_contents_apart(one: Any, two: Any) -> None:
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))
    assert fingerprint(one) != fingerprint(two)


def test_fingerprints_know_images_and_do_not_know_addresses() -> None:
    from PIL import Image

    red, green = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "green")
    assert fingerprint(red) == fingerprint(red.copy())
    assert fingerprint(red) != fingerprint(green)
    assert fingerprint(Thing()) == fingerprint(Thing())


def test_fingerprints_do_not_know_the_order_of_a_set() -> None:
    one, two = {0, 8}, {8, 0}
    assert list(one) != list(two)  # which depends on what came first
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize(
    "chosen", [{"sampler": [0, 1, 5000]}, {"batch_sampler": [[0, 1], [2, 5000]]}, {"sampler": [-9]}]
)
def test_an_index_beyond_the_data_set_is_a_finding(chosen: dict[str, Any]) -> None:
    audit = check_samples(DataLoader(range(8), **chosen))
    assert not audit.ok
    found = audit.findings[0]
    assert found.code == "worker-error"
    assert found.evidence["index"] in (5000, -9)
    assert found.evidence["samples"] == 8


def test_every_index_inside_is_silent() -> None:
    audit = check_samples(DataLoader(range(8), sampler=[0, 7, -8, 3, 2, 1, 4, 5, 6]))
    assert "worker-error" not in [found.code for found in audit.findings]


def test_a_batch_sampler_that_repeats_is_the_one_that_is_named() -> None:
    audit = check_samples(DataLoader(range(3), batch_sampler=[[0, 1], [2, 2]]))
    (found,) = [one for one in audit.findings if one.code == "duplicate-samples"]
    assert "SequentialSampler" not in found.advice
    assert found.evidence["sampler"] == "list"
