"""What ten loaders of other projects taught: the figures that they gave, and what they must be called."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evidence_made_up import loop
from torch.utils.data import DataLoader, IterableDataset
from workloads import Slow

from dataloading.arms import Arms, gather_evidence, measure_arms, with_handover
from dataloading.codes import finding
from dataloading.diagnosis import diagnose, failed_diagnosis
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.preflight_rules import check_dataloader
from dataloading.profiling import profile_samples
from dataloading.recommendation import recommend_settings
from dataloading.settings import LoaderSettings
from dataloading.wording import nothing_to_set, verdict_sentence
from dataloading.worker_costs import RECORD, WorkerCosts

TWO = Machine(usable_cpus=2, start_method="fork")


def named(evidence: Evidence) -> list[str]:
    return [found.code for found in diagnose(evidence, TWO).findings]


# four workers share a database that only one may use, and who waits asks again now and then
DATABASE = loop(
    workers=4,
    wait=0.030,
    step=0.008,
    cpu_s=0.003,
    sample_wait_s=0.0325,
    worker_batch_s=0.0358,
    one_worker_batch_s=0.0354,
    worker_mean_batch_s=0.110,
    one_worker_mean_batch_s=0.036,
    slow_batch_factor=13.0,
    slow_sample_factor=1.2,
    blocked_share=0.99,
    run_delay_share=0.001,
    alone_period_s=0.0377,
)


def test_workers_that_take_unfair_turns_are_serialised_and_no_stragglers() -> None:
    assert named(DATABASE)[0] == "serialised-workers"
    assert "straggler" not in named(DATABASE)


def test_workers_that_are_faster_together_have_a_slow_sample_among_theirs() -> None:
    faster = replace(DATABASE, alone_period_s=0.0308)  # one worker: 36 ms
    assert named(faster)[0] == "straggler"
    assert "serialised-workers" not in named(faster)


def test_where_a_sample_is_slow_by_itself_the_others_wait_for_it() -> None:
    assert named(replace(DATABASE, slow_sample_factor=9.0))[0] == "straggler"
    assert named(replace(DATABASE, slow_sample_factor=None))[0] == "straggler"


def test_a_mean_that_one_worker_shows_as_well_is_no_waiting_for_one_another() -> None:
    assert "serialised-workers" not in named(replace(DATABASE, one_worker_mean_batch_s=0.140))


def test_the_mean_is_that_of_the_later_batches_of_each_worker() -> None:
    records = np.zeros(8, dtype=RECORD)
    records["worker"] = [0, 0, 0, 0, 1, 1, 1, 1]
    records["fetch_wall_ns"] = [9e9, 9e9, 1e9, 3e9, 9e9, 9e9, 1e9, 3e9]
    records["samples"] = 4
    assert WorkerCosts.from_records(records).mean_batch_s == pytest.approx(2.0)


# a stream with two files, four workers: two of them have nothing to do
FEW_FILES = loop(
    workers=4,
    wait=0.1,
    step=0.020,
    cpu_s=0.010,
    sample_wait_s=0.240,
    worker_batch_s=0.250,
    one_worker_batch_s=0.251,
    alone_period_s=0.107,
    is_stream=True,
    shares_out=None,
)


def test_a_stream_whose_workers_have_no_work_is_not_given_more_of_them() -> None:
    assert "too-few-workers" not in named(FEW_FILES)
    working = replace(FEW_FILES, alone_period_s=0.0625)
    assert "too-few-workers" in named(working)


def test_a_number_that_the_recommendation_refuses_is_no_promise_of_the_finding() -> None:
    found = diagnose(replace(FEW_FILES, alone_period_s=0.0625), TWO).top("time")
    assert found.expected_gain is None
    assert "check_samples" in found.advice
    shared = replace(FEW_FILES, alone_period_s=0.0625, shares_out=True)
    assert diagnose(shared, TWO).top("time").expected_gain > 1


class Batches(IterableDataset):
    """A stream that gives batches of 16, as a pipeline of another library does."""

    def __iter__(self):
        return iter(torch.zeros(16, 3) for _ in range(40))


def test_what_a_data_set_gives_is_a_batch_where_the_loader_makes_none() -> None:
    loader = DataLoader(Batches(), batch_size=None)
    steps = np.full(20, 0.001)
    timing = LoaderTiming(steps, 0 * steps, steps, 0 * steps, np.full(20, 16))
    profile = profile_samples(loader)
    evidence = gather_evidence(loader, Arms(timing, None, None, None, None), profile, machine=TWO)
    assert evidence.batch_size == 16
    assert evidence.batch_bytes == 16 * 3 * 4


# a subclass that works on each batch in its own __iter__
OWN = loop(
    workers=2,
    wait=0.0087,
    step=0.0061,
    cpu_s=0.0019,
    sample_wait_s=0.0,
    send_s=0.00232,
    worker_batch_s=0.00228,
    one_worker_batch_s=0.00187,
    alone_period_s=0.00743,
    batch_bytes=1_500_000,
    own_iteration=True,
)


def test_work_in_the_loaders_own_iteration_is_named_and_not_taken_for_sending() -> None:
    found = diagnose(OWN, TWO).findings
    assert found[0].code == "host-work"
    assert "__iter__" in found[0].message
    assert "transfer" not in [one.code for one in found]
    assert "host-work" not in named(replace(OWN, own_iteration=False))
    assert "host-work" not in named(replace(OWN, alone_period_s=0.0026))


# padding text in a Python loop, with one worker: it holds the interpreter, so handing over waits
TEXT = loop(
    workers=1,
    wait=0.0207,
    step=0.0063,
    cpu_s=0.0227,
    collate_s=0.0207,
    sample_wait_s=0.0,
    send_s=0.00186,
    worker_batch_s=0.0227,
    handover_s=0.0193,
    alone_period_s=0.0254,
    blocked_share=0.0,
    batch_bytes=389_000,
    tensors_per_batch=3,
)


def test_a_handover_that_waits_for_the_workers_own_work_is_not_the_cause() -> None:
    assert named(TEXT)[0] == "collate"


def test_a_sampler_that_works_at_the_start_of_epochs_is_told_in_true_words() -> None:
    evidence = loop(workers=2, wait=0.00159, step=0.004, sampler_s=0.0151, cpu_s=0.001)
    found = diagnose(evidence, TWO).top("time")
    assert found.code == "slow-sampler"
    assert "start of each epoch" in found.message
    assert "of the 1.59 ms" not in found.message


def test_a_loader_that_could_not_be_profiled_is_told_why() -> None:
    evidence = loop(workers=None, wait=0.1, cpu_s=None, reasons={"cpu_s": "Web is no DataLoader"})
    assert "Web is no DataLoader" in verdict_sentence(diagnose(evidence, TWO))


def test_where_no_setting_helps_the_reader_is_sent_on() -> None:
    helped = recommend_settings(diagnose(DATABASE, TWO))
    assert helped.advice
    assert "see below" in nothing_to_set(helped)
    assert nothing_to_set(replace(helped, advice=())) == "No setting needs to change."


# ---- what a newcomer met -----------------------------------------------------------------------


def test_an_epoch_that_ends_early_is_the_finding_and_not_its_start() -> None:
    short = loop(
        workers=2,
        wait=0.01,
        epoch_restart_s=0.3,
        steps_per_epoch=16,
        promised_steps=50,
        cpu_s=0.001,
    )
    found = diagnose(short, TWO).findings
    assert found[0].code == "dropped-samples"
    assert "16 of the 50 batches" in found[0].message
    assert "StopIteration" in found[0].advice
    assert "epoch-startup" not in [one.code for one in found]
    assert "dropped-samples" not in named(replace(short, promised_steps=16))
    assert "dropped-samples" not in named(replace(short, promised_steps=None))


class StopsAt(Slow):
    """A sample whose own code lets a StopIteration out."""

    def __getitem__(self, index: int):
        return super().__getitem__(index if index != 13 else next(iter(())))


def test_a_stop_iteration_in_a_sample_is_seen_in_a_real_loader() -> None:
    loader = DataLoader(StopsAt(40, 0.002), batch_size=4)
    arms = measure_arms(loader, seconds=1.0, progress=False)
    evidence = gather_evidence(loader, arms, None, machine=TWO)
    assert (evidence.steps_per_epoch, evidence.promised_steps) == (3, 10)
    assert "dropped-samples" in named(evidence)


def test_a_cause_that_is_known_is_not_said_to_be_unknown() -> None:
    stream = loop(workers=2, wait=0.1, is_stream=True, shares_out=False, cpu_s=None)
    assert repr(diagnose(stream, TWO)).count("cause") == 1


def test_a_small_batch_is_not_advised_smaller_tensors() -> None:
    small = loop(
        workers=2,
        wait=0.010,
        step=0.002,
        handover_s=0.009,
        cpu_s=0.0005,
        worker_batch_s=0.001,
        batch_bytes=160,
        tensors_per_batch=2,
    )
    found = diagnose(small, TWO).top("time")
    assert found.code == "transfer"
    assert "larger batches" in found.advice
    assert "uint8" in diagnose(replace(small, batch_bytes=10**7), TWO).top("time").advice


def test_a_slow_start_is_told_where_nothing_can_be_concluded() -> None:
    sentence = verdict_sentence(diagnose(loop(steps=1, wait=0.1, startup_s=2.7), TWO))
    assert "2.7 s" in sentence


def test_an_open_file_under_spawn_gets_advice_that_helps(tmp_path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    with open(path, "rb") as file:
        dataset = Slow(8)
        dataset.file = file
        loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn")
        found = next(one for one in check_dataloader(loader) if one.code == "unpicklable")
    assert "first use" in found.advice


# pages of a mapped file that is larger than the page cache: half waiting, half faults on the CPU
MAPPED = loop(
    workers=2,
    wait=0.0047,
    step=0.0026,
    cpu_s=0.0056,
    send_s=0.0008,
    sample_wait_s=0.0056,
    storage_share=1.0,
    first_storage_share=1.0,
    worker_batch_s=0.0142,
    alone_period_s=0.0073,
)


def test_storage_is_named_where_reading_keeps_half_a_cpu_busy() -> None:
    assert named(MAPPED)[0] == "storage-bound"
    assert "cpu-bound" not in named(MAPPED)


def test_storage_is_not_named_where_the_cpus_are_short() -> None:
    assert "storage-bound" not in named(replace(MAPPED, cpu_s=0.0120, sample_wait_s=0.0020))
    assert "storage-bound" not in named(replace(MAPPED, cpu_s=0.0100, sample_wait_s=0.0005))


def test_control_characters_of_an_exception_do_not_reach_the_terminal() -> None:
    found = finding("worker-error", "\x1b[31mred\x1b[0m\nnext line", {})
    assert found.message == "?[31mred?[0m\nnext line"


def test_a_failed_diagnosis_recommends_no_change() -> None:
    failed = failed_diagnosis(
        finding("worker-error", "it broke", {}), TWO, settings=LoaderSettings(num_workers=2)
    )
    kept = recommend_settings(failed).settings
    assert (kept.num_workers, kept.persistent_workers) == (2, False)


def test_handing_over_a_small_batch_is_reckoned_with_before_there_are_workers() -> None:
    # as measured: samples of 0.2 ms, four a batch, step 0.4 ms; workers gain next to nothing
    cycle = LoaderTiming(
        wait_s=np.full(40, 0.0022),
        transfer_s=np.zeros(40),
        step_s=np.zeros(40),
        other_s=np.zeros(40),
        samples=np.full(40, 4),
        startup_s=0.1,
        workers=SimpleNamespace(mean_batch_s=0.0011),
    )
    without = loop(
        wait=0.0010, step=0.0004, cpu_s=0.0008, sample_wait_s=0.0, batch_size=4, send_s=0.00005
    )
    small = replace(without, batch_bytes=1024)
    arms = Arms(cycle, None, None, cycle, None)
    seen = with_handover(small, arms)
    assert seen.handover_s == pytest.approx(0.0011)
    few = "too-few-workers"
    assert few in named(small)
    assert few not in named(seen)
    for unchanged in (replace(small, num_workers=1), replace(small, batch_bytes=2**24)):
        assert with_handover(unchanged, arms) is unchanged
