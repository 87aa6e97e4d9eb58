"""Rules from made-up evidence: each fires on its own fault, and its neighbours stay silent."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence_made_up import COMPUTING, WAITING, loop

import dataloading
from dataloading.accelerators import Accelerator
from dataloading.codes import CODES, finding
from dataloading.diagnosis import RULES, ceilings, diagnose, explain
from dataloading.evidence import FEWEST_STEPS, Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.verdict import judge

EIGHT = Machine(usable_cpus=8, start_method="fork")
TWO = Machine(usable_cpus=2, start_method="fork")


FAULTS = {
    "compute": (loop(wait=0.0004), EIGHT),
    "host-work": (loop(wait=0.002, step=0.030, other=0.030), EIGHT),
    "too-few-workers": (loop(wait=0.162, **WAITING), EIGHT),
    "cpu-bound": (loop(workers=2, wait=0.045, **COMPUTING, alone_period_s=0.081), TWO),
    "per-sample-overhead": (
        loop(
            workers=2,
            wait=0.001,
            step=0.0002,
            sample_wall_s=5e-6,
            cpu_s=0.00016,
            sample_wait_s=0.0,
            alone_period_s=0.001,
        ),
        EIGHT,
    ),
    "collate": (
        loop(workers=8, wait=0.02, step=0.001, cpu_s=0.150, collate_s=0.140, sample_wait_s=0.0),
        TWO,
    ),
    "transfer": (
        loop(
            workers=2,
            wait=0.03,
            step=0.001,
            cpu_s=0.005,
            send_s=0.030,
            sample_wait_s=0.0,
            tensors_per_batch=50,
        ),
        TWO,
    ),
    "epoch-startup": (
        loop(
            workers=2,
            wait=0.0,
            epoch_restart_s=0.9,
            steps_per_epoch=8,
            worker_batch_s=0.05,
            cpu_s=0.05,
        ),
        TWO,
    ),
    "interference": (
        loop(
            workers=2,
            wait=0.06,
            step=0.06,
            replay_step_s=0.04,
            alone_period_s=0.04,
            cpu_s=0.04,
            handover_s=0.001,
        ),
        TWO,
    ),
    "invalid-settings": (
        loop(dropped_settings={"worker_init_fn": "needs workers", "in_order": "needs workers"}),
        EIGHT,
    ),
    "pin-without-accelerator": (loop(pin_memory=True), EIGHT),
    "fork-unsafe-handle": (
        loop(
            workers=2,
            start_method="fork",
            open_handle="dataset.file",
            open_handle_kind="open file",
            open_handles=1,
        ),
        EIGHT,
    ),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_rule_fires_on_its_fault_with_evidence_and_advice(code):
    evidence, machine = FAULTS[code]
    found = {f.code: f for rule in RULES if (f := rule(evidence, machine)) is not None}
    assert code in found
    assert found[code].group == CODES[code].group
    assert found[code].advice
    assert found[code].evidence
    assert "\n" not in repr(found[code])
    json.dumps(found[code].to_dict())


@pytest.mark.parametrize("code", [c for c in FAULTS if CODES[c].group == "time"])
def test_the_right_cause_comes_first(code):
    evidence, machine = FAULTS[code]
    result = diagnose(evidence, machine)
    if code == "interference":  # it explains less than a cause does, so it only accompanies one
        assert code in [f.code for f in result.findings]
        return
    assert result.cause == code
    assert result.top("time").code == code


NEIGHBOURS = {
    "too-few-workers": ("cpu-bound", "collate", "transfer", "per-sample-overhead", "compute"),
    "cpu-bound": ("too-few-workers", "collate", "transfer", "per-sample-overhead", "compute"),
    "per-sample-overhead": ("too-few-workers", "cpu-bound", "collate", "transfer"),
    "collate": ("too-few-workers", "cpu-bound", "transfer", "per-sample-overhead"),
    "transfer": ("cpu-bound", "collate", "per-sample-overhead"),
    "epoch-startup": ("too-few-workers", "cpu-bound", "host-work"),
    "host-work": ("too-few-workers", "cpu-bound", "compute", "interference"),
    "compute": ("too-few-workers", "cpu-bound", "host-work", "collate", "transfer"),
}


@pytest.mark.parametrize("code", NEIGHBOURS)
def test_neighbours_stay_silent(code):
    evidence, machine = FAULTS[code]
    found = {f.code for rule in RULES if (f := rule(evidence, machine)) is not None}
    assert not found & set(NEIGHBOURS[code])


def test_every_code_of_the_registry_is_found_somewhere():
    parts = (Path(dataloading.__file__).parent).glob("*.py")
    source = "".join(p.read_text(encoding="utf-8") for p in parts if p.name != "codes.py")
    found = set(re.findall(r'finding\(\s*"([a-z-]+)"', source))
    assert found == set(CODES)
    assert all(explain(code).startswith(code) for code in CODES)


def test_a_01_1_says_data_bound_and_estimates_four_workers():
    result = diagnose(loop(wait=0.162, **WAITING), TWO)
    assert result.verdict == "data-bound"
    assert result.findings[0].evidence["wanted_workers"] == 4
    assert result.findings[0].expected_gain == pytest.approx(5.0, rel=0.05)


def test_a_01_3_full_utilisation_with_little_waiting_is_not_data_bound():
    result = diagnose(loop(wait=0.0008, utilization_percent=100.0), EIGHT)
    assert result.verdict == "compute-bound"
    assert "share of time a kernel was running" in result.findings[0].message
    assert not [f for f in result.findings if f.code in ("too-few-workers", "cpu-bound")]


def test_a_01_4_blames_other_host_work_not_the_loader():
    timing = LoaderTiming(
        wait_s=np.full(10, 0.002),
        transfer_s=np.zeros(10),
        step_s=np.full(10, 0.030),
        other_s=np.array([0.0] * 9 + [0.300]),
        samples=np.full(10, 8),
    )
    result = diagnose(Evidence().with_timing(timing), EIGHT)
    assert result.verdict == "host-bound"
    assert result.cause == "host-work"
    assert result.evidence.wait_share == pytest.approx(0.032, abs=0.001)
    assert result.evidence.step_share == pytest.approx(0.484, abs=0.001)
    assert result.evidence.other_share == pytest.approx(0.484, abs=0.001)


def test_host_work_hidden_in_the_train_step_shows_as_spikes():
    steps = np.full(40, 0.010)
    steps[::10] = 0.300
    timing = LoaderTiming(
        wait_s=np.full(40, 0.0002),
        transfer_s=np.zeros(40),
        step_s=steps,
        other_s=np.zeros(40),
        samples=np.full(40, 8),
    )
    assert diagnose(Evidence().with_timing(timing), EIGHT).cause == "host-work"


def test_a_02_5_one_percent_of_waiting_gives_no_advice_about_workers():
    result = diagnose(loop(wait=0.0004, **COMPUTING), Machine(usable_cpus=16))
    assert result.verdict == "compute-bound"
    assert "num_workers" not in " ".join(f.advice for f in result.findings)


def test_waiting_work_wants_more_workers_than_cpus():
    evidence = loop(workers=2, wait=0.04, **WAITING)
    assert diagnose(evidence, TWO).findings[0].evidence["wanted_workers"] == 4


def test_cpu_bound_names_the_dearest_stage():
    evidence, machine = FAULTS["cpu-bound"]
    evidence = replace(evidence, top_stage="decode", top_stage_share=0.75)
    first = diagnose(evidence, machine).findings[0]
    assert "decode (75 %)" in first.message
    assert "reduced size" in first.advice
    assert first.evidence["rate_if_that_were_free"] == pytest.approx(4.0)


def test_few_steps_prove_nothing():
    result = diagnose(loop(wait=0.162, steps=FEWEST_STEPS - 1, **WAITING), EIGHT)
    assert result.verdict == "inconclusive"
    assert result.cause is None


def test_nothing_wrong_is_balanced_or_compute_bound_without_warnings():
    for wait in (0.0, 0.001, 0.003):
        result = diagnose(loop(workers=4, wait=wait, **COMPUTING), EIGHT)
        assert result.verdict in ("balanced", "compute-bound")
        assert all(f.severity == "info" for f in result.findings)


LIGHT = {"cpu_s": 0.010, "sample_wait_s": 0.0, "worker_batch_s": 0.012}


def test_getting_batches_that_stand_ready_is_no_fault_of_the_workers():
    ready = loop(workers=4, step=0.015, wait=0.002, handover_s=0.0018, **LIGHT)
    result = diagnose(ready, EIGHT)
    assert (result.verdict, result.cause) == ("balanced", "compute")
    assert "stand ready" in result.findings[0].message
    late = diagnose(loop(workers=4, step=0.015, wait=0.005, handover_s=0.0018, **LIGHT), EIGHT)
    assert late.verdict == "data-bound"


def test_a_slow_hand_over_of_ready_batches_is_a_matter_of_transfer():
    slow = loop(workers=4, step=0.010, wait=0.006, handover_s=0.0055, **LIGHT)
    result = diagnose(slow, EIGHT)
    assert (result.verdict, result.cause) == ("data-bound", "transfer")
    assert result.findings[0].expected_gain == pytest.approx(0.016 / 0.0105, rel=0.01)


def test_workers_that_set_the_pace_are_not_excused_by_a_hand_over():
    busy = loop(
        workers=2, step=0.002, wait=0.0026, handover_s=0.0012, worker_batch_s=0.0087, **WAITING
    )
    assert diagnose(busy, EIGHT).cause == "too-few-workers"
    computing = loop(
        workers=2, step=0.002, wait=0.008, handover_s=0.006, cpu_s=0.019, sample_wait_s=0.0
    )
    assert diagnose(computing, TWO).cause == "cpu-bound"


def test_a_costly_collate_is_no_matter_of_tiny_samples():
    evidence = loop(
        workers=2,
        wait=0.01,
        step=0.001,
        sample_wall_s=3e-6,
        collate_s=0.019,
        cpu_s=0.02,
        sample_wait_s=0.0,
        batch_bytes=20_000,
    )
    assert diagnose(evidence, TWO).cause == "collate"


def test_handing_over_and_training_together_are_no_interference():
    arms = {"replay_step_s": 0.010, "alone_period_s": 0.004}
    explained = loop(workers=4, step=0.010, wait=0.004, handover_s=0.004, **arms)
    assert "interference" not in [f.code for f in diagnose(explained, EIGHT).findings]
    not_explained = loop(workers=4, step=0.010, wait=0.004, handover_s=0.0005, **arms)
    assert "interference" in [f.code for f in diagnose(not_explained, EIGHT).findings]


def test_epochs_that_are_mostly_their_start_are_data_bound():
    evidence = loop(
        workers=2, step=0.1, wait=0.001, epoch_restart_s=1.0, steps_per_epoch=8, worker_batch_s=0.0
    )
    result = diagnose(evidence, EIGHT)
    assert (result.verdict, result.cause) == ("data-bound", "epoch-startup")


def test_a_light_batch_is_no_matter_of_transfer():
    evidence, machine = FAULTS["transfer"]
    light = replace(evidence, tensors_per_batch=1, batch_bytes=40)
    assert "transfer" not in [f.code for f in diagnose(light, machine).findings]


def test_a_fat_batch_counts_as_moved_and_a_costly_collate_does_not():
    fat = loop(
        workers=1,
        wait=0.02,
        step=0.001,
        cpu_s=0.018,
        collate_s=0.015,
        sample_wait_s=0.0,
        send_s=0.004,
        batch_bytes=32_000_000,
    )
    assert diagnose(fat, TWO).cause == "transfer"
    costly = replace(fat, batch_bytes=320_000)
    assert diagnose(costly, TWO).cause == "collate"


def test_what_a_deeper_cause_explains_is_dropped():
    evidence = loop(workers=2, wait=0.05, sampler_s=0.045, **WAITING)
    assert [f.code for f in diagnose(evidence, TWO).findings if f.group == "time"] == [
        "slow-sampler"
    ]


def test_an_epoch_that_starts_with_its_first_batch_only_is_no_fault():
    evidence = loop(workers=2, epoch_restart_s=0.17, steps_per_epoch=8, worker_batch_s=0.16)
    assert diagnose(evidence, TWO).cause != "epoch-startup"


def test_a_03_1_the_share_of_the_start_is_reported():
    evidence = loop(
        workers=4, step=0.1, epoch_restart_s=10.0, steps_per_epoch=315, worker_batch_s=0.0
    )
    found = diagnose(evidence, EIGHT).top("time")
    assert found.code == "epoch-startup"
    assert found.evidence["avoidable_share"] == pytest.approx(10 / 41.5, rel=0.01)


def test_pinning_is_right_with_cuda_and_wrong_on_mps():
    cuda = Machine(usable_cpus=8, accelerators=(Accelerator("cuda", "GPU 0", None),))
    mps = Machine(usable_cpus=8, accelerators=(Accelerator("mps", "Apple", None),))
    assert diagnose(loop(pin_memory=True), cuda).top("setup") is None
    assert diagnose(loop(pin_memory=True), mps).top("setup").code == "pin-without-accelerator"


def test_ceilings_are_rates_and_what_was_not_measured_is_none():
    found = ceilings(loop(workers=2, wait=0.04, alone_period_s=0.08, **COMPUTING), TWO)
    assert found["compute"] == pytest.approx(8 / 0.040)
    assert found["workers"] == pytest.approx(8 / 0.080)
    assert found["cpu"] == pytest.approx(8 / (0.161 / 2))
    assert found["transfer"] == pytest.approx(8 / 0.001)
    assert found["storage"] is None
    assert set(found) == {
        "compute",
        "workers",
        "cpu",
        "transfer",
        "storage",
        "sampler",
        "startup",
    }


def test_evidence_can_be_saved_and_replayed():
    evidence, machine = FAULTS["too-few-workers"]
    saved = json.loads(json.dumps(evidence.to_dict()))
    again = diagnose(Evidence.from_dict({**saved, "from a newer version": 1}), machine)
    assert repr(again) == repr(diagnose(evidence, machine))


def test_judge_needs_a_wait_share():
    assert judge(Evidence(steps=100)) == "inconclusive"


def test_a_diagnosis_shows_as_one_line_and_as_an_escaped_table():
    odd = {"in_order": "<script>alert(1)</script>"}
    result = diagnose(loop(wait=0.162, dropped_settings=odd, **WAITING), EIGHT)
    assert repr(result).count("\n") == 0
    assert repr(result).startswith("Diagnosis: data-bound, cause too-few-workers")
    assert "<script>" not in result._repr_html_()
    json.dumps(result.to_dict())


def test_a_finding_needs_a_registered_code_and_a_known_severity():
    with pytest.raises(KeyError):
        finding("no-such-code", "", {})
    with pytest.raises(ValueError, match="severity"):
        finding("compute", "", {}, severity="fatal")


def test_open_files_across_a_fork_are_told_and_do_not_hide_the_cause_of_the_waiting() -> None:
    held = {"open_handle": "dataset.file", "open_handle_kind": "open file", "open_handles": 1}
    waiting = loop(workers=1, wait=0.122, **WAITING, start_method="fork", **held)
    found = diagnose(waiting, EIGHT)
    assert found.cause == "too-few-workers"
    assert found.top("setup").code == "fork-unsafe-handle"
    assert "dataset.file is an open file" in found.top("setup").message
    for harmless in ({"start_method": "spawn"}, {"num_workers": 0}, {"open_handles": 0}):
        assert diagnose(replace(waiting, **harmless), EIGHT).top("setup") is None
