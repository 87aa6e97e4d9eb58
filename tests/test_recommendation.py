"""Recommended settings: how many workers, within which limits, and what is left alone."""

import json
from dataclasses import replace

import pytest
from evidence_made_up import COMPUTING, WAITING, loop
from torch.utils.data import DataLoader

from dataloading.accelerators import Accelerator
from dataloading.batch_costs import BatchCosts
from dataloading.budgets import over_budget, resource_needs
from dataloading.diagnosis import diagnose
from dataloading.machine import Machine
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
