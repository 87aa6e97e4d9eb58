"""Recommended settings: how many workers, within which limits, and what is left alone."""

import json
from dataclasses import replace

import pytest
from evidence_made_up import COMPUTING, WAITING, loop
from torch.utils.data import DataLoader

from dataloading.accelerators import Accelerator
from dataloading.batch_costs import BatchCosts
from dataloading.budgets import over_budget, resource_needs
from dataloading.codes import finding
from dataloading.diagnosis import diagnose, failed_diagnosis
from dataloading.machine import Machine
from dataloading.model import step_bounds
from dataloading.recommendation import recommend_settings
from dataloading.settings import LoaderSettings
from dataloading.wording import predicted_gain
from dataloading.workers import best_workers, busy_worker_cap, worker_cap

MIB = 2**20


def machine(cpus=8, **more) -> Machine:
    return Machine(usable_cpus=cpus, start_method="fork", **more)


def recommend(evidence, where, **options):
    return recommend_settings(diagnose(evidence, where), **options)


def test_a_02_1_tiny_samples_are_loaded_without_workers():
    evidence = loop(
        workers=4,
        wait=0.001,
        step=0.0002,
        sample_wall_s=4e-6,
        cpu_s=0.0002,
        sample_wait_s=0.0,
        epoch_restart_s=0.1,
        steps_per_epoch=63,
    )
    result = recommend(evidence, machine())
    assert result.settings.num_workers == 0
    assert "handed over" in result.reasons["num_workers"]
    assert result.predicted_gain > 1


def test_a_02_4_small_and_large_batches_get_their_own_answers():
    small = BatchCosts(0.001, 0.0, 0.0005, batch_size=8, batch_bytes=1000, tensors=1)
    large = BatchCosts(0.200, 0.0, 0.0005, batch_size=8, batch_bytes=1000, tensors=1)
    assert best_workers(small, 0.020, machine(64)) in (0, 1)
    assert best_workers(large, 0.020, machine(64)) >= 10
    assert best_workers(large, 0.020, machine(4)) == 3  # capped by the CPUs


def test_a_02_5_the_present_workers_stay_where_nothing_waits():
    result = recommend(loop(wait=0.0004, **COMPUTING), machine(16))
    assert result.settings.num_workers == 0
    assert result.reasons["num_workers"].startswith("kept")


def test_a_01_1_four_workers_for_a_batch_of_four_steps():
    result = recommend(loop(wait=0.162, **WAITING), machine(2))
    assert result.settings.num_workers == 4
    assert result.predicted.samples_per_s == pytest.approx(200, rel=0.05)
    assert result.predicted_gain == pytest.approx(5, rel=0.1)


def test_a_05_1_need_of_shared_memory_is_computed_and_refused():
    costs = BatchCosts(0.1, 0, 0, batch_size=64, batch_bytes=64 * 3 * 224 * 224 * 4, tensors=1)
    small = machine(8, shared_memory_free_bytes=64 * MIB)
    wanted = LoaderSettings(num_workers=8, prefetch_factor=2)
    assert resource_needs(costs, wanted, small)["shared_memory_bytes"] == 616_562_688
    assert "588.0 MiB of shared memory" in over_budget(wanted, costs, small)


def test_a_05_2_a_setting_that_fits_is_proposed():
    evidence = loop(wait=0.162, batch_bytes=9_633_792, **WAITING)
    evidence = replace(evidence, batch_size=64)
    small = machine(8, shared_memory_free_bytes=64 * MIB)
    result = recommend(evidence, small, memory_fraction=0.8)
    assert (result.settings.num_workers, result.settings.prefetch_factor) == (2, 2)
    assert result.refused
    assert "docker" not in json.dumps(result.to_dict()).lower()


def test_a_05_3_a_batch_that_never_fits_gets_no_workers():
    evidence = loop(wait=0.162, batch_bytes=200_000_000, **WAITING)
    small = machine(8, shared_memory_free_bytes=64 * MIB)
    result = recommend(evidence, small)
    assert result.settings.num_workers == 0
    assert "no number of workers fits" in result.reasons["num_workers"]
    assert "1 workers, prefetch 1" in result.refused


def test_a_07_3_a_cpu_is_left_for_training():
    assert worker_cap(Machine(usable_cpus=23, logical_cpus=208), cpu_share=1.0) <= 22


def test_a_07_5_one_cpu_gets_no_advice_for_workers():
    result = recommend(loop(wait=0.160, **COMPUTING), machine(1))
    assert result.settings.num_workers == 0
    found = diagnose(loop(wait=0.160, **COMPUTING), machine(1)).findings
    assert "too-few-workers" not in [f.code for f in found]


def test_a_07_8_sixteen_workers_on_one_cpu_become_one_at_most():
    result = recommend(loop(workers=16, wait=0.120, **COMPUTING), machine(1))
    assert result.settings.num_workers <= 1


def test_a_08_1_no_pinning_without_an_accelerator(recwarn):
    result = recommend(loop(wait=0.162, pin_memory=True, **WAITING), machine())
    assert result.settings.pin_memory is False
    assert not recwarn.list


def test_a_08_2_no_pinning_on_mps():
    mps = machine(accelerators=(Accelerator("mps", "Apple", None),))
    result = recommend(loop(wait=0.162, pin_memory=True, **WAITING), mps)
    assert result.settings.pin_memory is False
    assert result.reasons["pin_memory"] == "not supported on MPS"


def test_pinning_with_cuda():
    cuda = machine(accelerators=(Accelerator("cuda", "GPU", None),))
    assert recommend(loop(wait=0.162, **WAITING), cuda).settings.pin_memory is True


def test_a_12_7_the_cap_of_one_rank():
    assert busy_worker_cap(Machine(usable_cpus=16, local_ranks=4)) == 3


def test_waiting_work_may_use_more_workers_than_cpus():
    assert worker_cap(machine(2), cpu_share=0.05) > 2
    assert worker_cap(machine(2), cpu_share=1.0) == 2


def test_descriptors_and_memory_are_budgets_too():
    costs = BatchCosts(0.1, 0, 0, batch_size=8, batch_bytes=1000, tensors=50)
    few = machine(8, open_files_limit=128)
    assert "open files" in over_budget(LoaderSettings(num_workers=2), costs, few)
    poor = machine(8, available_memory_bytes=256 * MIB)
    assert "memory" in over_budget(LoaderSettings(num_workers=8), costs, poor)
    assert over_budget(LoaderSettings(num_workers=2), costs, poor) is None


@pytest.mark.filterwarnings("ignore:.*worker processes")
@pytest.mark.parametrize("seed", range(200))
def test_no_budget_of_a_made_up_machine_is_ever_overrun(seed):
    import random

    dice = random.Random(seed)
    where = machine(
        dice.choice([1, 2, 4, 8, 64]),
        available_memory_bytes=int(10 ** dice.uniform(8, 11)),
        shared_memory_free_bytes=int(10 ** dice.uniform(7, 10)),
        open_files_limit=dice.choice([64, 256, 1024, None]),
        local_ranks=dice.choice([1, 2, 8]),
    )
    evidence = loop(
        workers=dice.choice([0, 1, 4, 16]),
        wait=dice.uniform(0.0, 0.3),
        cpu_s=dice.uniform(0.001, 0.3),
        sample_wait_s=dice.uniform(0.0, 0.3),
        batch_bytes=int(10 ** dice.uniform(3, 9)),
        tensors_per_batch=dice.choice([1, 2, 50]),
    )
    fraction = dice.choice([0.5, 0.8])
    result = recommend(evidence, where, memory_fraction=fraction)
    needs = resource_needs(evidence.costs, result.settings, where)
    if result.settings.num_workers:
        assert needs["memory_bytes"] <= fraction * where.available_memory_bytes
        assert needs["shared_memory_bytes"] <= fraction * where.shared_memory_free_bytes
        if where.open_files_limit:
            assert needs["open_files"] <= fraction * where.open_files_limit
    DataLoader(range(8), **result.settings.kwargs())


def test_workers_are_kept_between_epochs_when_there_are_several():
    evidence = loop(wait=0.162, **WAITING)
    assert recommend(evidence, machine()).settings.persistent_workers is True
    assert recommend(evidence, machine(), epochs=1).settings.persistent_workers is False


def test_another_machine_gives_another_answer():
    diagnosis = diagnose(loop(wait=0.160, **COMPUTING), machine(2))
    here = recommend_settings(diagnosis)
    there = recommend_settings(diagnosis, machine=machine(32))
    assert here.settings.num_workers == 2
    assert there.settings.num_workers == 4


def test_a_deeper_queue_outlasts_a_slow_batch() -> None:
    evidence = loop(
        workers=4, wait=0.02, worker_batch_s=0.16, slow_batch_factor=4.0, step=0.04, **WAITING
    )
    result = recommend(evidence, machine(8))
    workers, prefetch = result.settings.num_workers, result.settings.prefetch_factor
    assert prefetch > 2
    assert workers * prefetch * 0.04 >= 0.16 * 3 > workers * prefetch / 2 * 0.04
    assert "outlast" in result.reasons["prefetch_factor"]
    even = recommend(replace(evidence, slow_batch_factor=1.2), machine(8))
    assert even.settings.prefetch_factor == 2


def test_order_is_given_up_only_by_the_reader_and_with_a_warning() -> None:
    evidence = loop(
        workers=2, wait=0.02, worker_batch_s=0.16, slow_batch_factor=40.0, step=0.004, **WAITING
    )
    result = recommend(evidence, machine(2))
    assert result.settings.in_order is True
    assert any("in_order=False" in text and "repeatable" in text for text in result.advice)
    assert not any(
        "in_order" in text for text in recommend(loop(wait=0.162, **WAITING), machine()).advice
    )


def test_the_usual_advice_stands_beside_with_what_the_model_expects() -> None:
    result = recommend(loop(wait=0.162, **WAITING), machine(2, available_memory_bytes=2**33))
    beside = result.beside.set_index("rule")
    assert beside.loc["rule of thumb", "num_workers"] == 2
    assert beside.loc["preset 16-core + A100", "num_workers"] == 10
    half = result.predicted.samples_per_s / 2
    assert beside.loc["rule of thumb", "predicted_samples_per_s"] == pytest.approx(half, rel=0.05)
    assert any("rule of thumb" in name for name, _ in result.rows())
    tight = recommend(loop(wait=0.162, **WAITING), machine(2, shared_memory_free_bytes=MIB))
    assert "shared memory" in tight.beside.set_index("rule").loc["rule of thumb", "shortage"]


def test_advice_with_the_larger_gain_comes_first() -> None:
    diagnosis = diagnose(loop(wait=0.162, **WAITING), machine(2))
    small, large = (
        finding(code, "", {}, advice=code, expected_gain=gain)
        for code, gain in (("small-files", 1.1), ("straggler", 1.9))
    )
    result = recommend_settings(replace(diagnosis, findings=(small, large)))
    assert result.advice[:2] == ("straggler", "small-files")


def test_larger_batches_come_last_and_are_said_to_change_training() -> None:
    diagnosis = diagnose(loop(wait=0.162, **WAITING), machine(2))
    found = finding("transfer", "", {}, advice="send less")
    advice = recommend_settings(replace(diagnosis, findings=(found,))).advice
    assert advice[0] == "send less"
    assert "change training" in advice[-1]


def test_where_the_model_does_not_explain_the_present_rate_nothing_is_predicted() -> None:
    evidence = loop(workers=4, wait=0.162, blocked_share=0.2, **WAITING)  # 4 should take 40 ms
    result = recommend(evidence, machine(2))
    assert result.predicted is None
    assert result.predicted_gain is None
    assert result.beside is None
    fits = recommend(loop(workers=2, wait=0.041, **WAITING), machine(2))
    assert fits.predicted_gain is not None


def test_pinned_batches_count_in_the_budget() -> None:
    cuda = (Accelerator("cuda", "GPU", None),)
    evidence = loop(workers=4, wait=0.162, batch_bytes=100 * MIB, **WAITING)
    tight = machine(8, accelerators=cuda, available_memory_bytes=1200 * MIB)
    result = recommend(evidence, tight)
    needs = resource_needs(evidence.costs, result.settings, tight)
    assert result.settings.pin_memory is True
    assert needs["memory_bytes"] <= 0.8 * 1200 * MIB


def test_an_inconclusive_diagnosis_keeps_the_settings():
    result = recommend(loop(workers=3, wait=0.162, steps=2, **WAITING), machine())
    assert result.settings.num_workers == 3
    assert result.reasons["num_workers"].startswith("kept")


def test_unknown_costs_keep_the_workers():
    result = recommend(loop(workers=3, wait=0.162, cpu_s=None), machine())
    assert result.settings.num_workers == 3
    assert result.predicted is None
    assert result.predicted_gain is None
    with pytest.raises(ValueError, match="not measured"):
        result.plot()


def test_start_method_and_order_stay_as_they_are():
    own = {"multiprocessing_context": "spawn", "in_order": False, "pickled_bytes": 2**20}
    result = recommend(loop(workers=1, wait=0.122, **WAITING, **own), machine())
    assert result.settings.num_workers > 1
    assert result.settings.multiprocessing_context == "spawn"
    assert not result.settings.in_order
    assert "1.0 MiB" in result.reasons["multiprocessing_context"]
    default = recommend(loop(workers=1, wait=0.122, **WAITING), machine())
    assert default.settings.multiprocessing_context is None
    assert ("start method", default.reasons["multiprocessing_context"]) in default.rows()


def test_no_workers_for_a_data_set_that_holds_a_file_open():
    held = {"open_handle": "dataset.file", "open_handle_kind": "HDF5 file", "open_handles": 1}
    result = recommend(loop(wait=0.162, **WAITING, **held), machine())
    assert result.settings.num_workers == 0
    (why,) = result.refused.values()
    assert "dataset.file (HDF5 file) is open" in why
    # workers that are there already stay; the finding tells of the harm
    workers = recommend(
        loop(workers=1, wait=0.122, start_method="fork", **WAITING, **held), machine()
    )
    assert workers.settings.num_workers >= 1
    assert "would share dataset.file" in workers.reasons["multiprocessing_context"]


def test_advice_that_is_no_setting_is_passed_on():
    evidence = loop(
        workers=2,
        wait=0.045,
        alone_period_s=0.081,
        top_stage="decode",
        top_stage_share=0.7,
        **COMPUTING,
    )
    assert "reduced size" in recommend(evidence, machine(2)).advice[0]


@pytest.mark.parametrize("options", [{"epochs": 0}, {"memory_fraction": 0}, {"memory_fraction": 2}])
def test_bad_arguments_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recommend(loop(), machine(), **options)


def test_it_shows_as_one_line_and_as_a_table():
    result = recommend(loop(wait=0.162, **WAITING), machine(2))
    assert "num_workers=4" in repr(result)
    assert "\n" not in repr(result)
    assert "num_workers = 4" in result._repr_html_()
    json.dumps(result.to_dict())


def test_gains_in_words():
    assert predicted_gain(1.0) == "no gain predicted"


def test_a_made_up_machine_starts_workers_as_the_measured_one_did():
    waiting = loop(wait=0.162, **WAITING, steps_per_epoch=12, startup_s=0.2)
    diagnosis = diagnose(waiting, machine(2))
    made_up = recommend_settings(diagnosis, machine=Machine(usable_cpus=16))
    assert made_up.settings == recommend_settings(diagnosis, machine=machine(16)).settings
    assert made_up.settings.num_workers > 1


def test_often_advised_workers_that_would_deliver_copies_are_marked():
    stream = loop(wait=0.162, **WAITING, is_stream=True, shares_out=False)
    beside = recommend(stream, machine(8)).beside
    several = beside[beside["num_workers"] > 1]
    assert len(several)
    assert set(several["shortage"]) == {"each worker would deliver all samples"}


def test_a_loader_that_failed_gets_the_advice_to_mend_it_first():
    failed = failed_diagnosis(finding("worker-error", "Sample 37 raised KeyError.", {}), machine())
    (advice,) = recommend_settings(failed).advice
    assert advice.startswith("First mend this: Sample 37 raised KeyError.")


def test_ranks_share_cpus_and_memory():
    costs = BatchCosts(0.020, 0.0, 0.0, batch_size=8, batch_bytes=1000, tensors=1)
    one = LoaderSettings(num_workers=1)
    alone, crowded = (
        max(step_bounds(costs, one, 0.0, machine(2, local_ranks=ranks)).values())
        for ranks in (1, 8)
    )
    assert crowded == pytest.approx(4 * alone)  # a quarter of a CPU for each
    heavy = BatchCosts(0.02, 0, 0, 8, 1000, 1, worker_bytes=100 * MIB, start_method="fork")
    six = LoaderSettings(num_workers=6)
    free = {"available_memory_bytes": 1000 * MIB}
    assert over_budget(six, heavy, machine(8, **free)) is None
    assert "for each of 4 ranks" in over_budget(six, heavy, machine(8, local_ranks=4, **free))


@pytest.mark.parametrize(
    "wrong", [{"usable_cpus": 0}, {"usable_cpus": "8"}, {"usable_cpus": 8, "local_ranks": 0}]
)
def test_a_machine_that_cannot_be_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=r"usable_cpus|local_ranks"):
        Machine(**wrong)
