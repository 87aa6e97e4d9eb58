"""Rules about what happens inside workers: each fires on its own fault, and its neighbours stay silent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from evidence_made_up import COMPUTING, WAITING, loop

from dataloading.accelerators import Accelerator
from dataloading.codes import CODES, finding
from dataloading.diagnosis import EXPLAINS, RULES, diagnose, rank
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.worker_rules import WORKER_RULES

EIGHT = Machine(usable_cpus=8, logical_cpus=8, start_method="fork")
TWO = Machine(usable_cpus=2, logical_cpus=2, start_method="fork")
TWO_OF_EIGHT = Machine(usable_cpus=2, logical_cpus=8, cpu_source="affinity", start_method="fork")
GPU = replace(EIGHT, accelerators=(Accelerator("cuda", "GPU 0", None),))

FAULTS: dict[str, tuple[Evidence, Machine]] = {
    "slow-sampler": (loop(workers=2, wait=0.05, sampler_s=0.045, **WAITING), TWO),
    "straggler": (
        loop(workers=4, wait=0.06, slow_batch_factor=9.0, blocked_share=0.6, **WAITING),
        EIGHT,
    ),
    "serialised-workers": (
        loop(
            workers=4,
            wait=0.06,
            worker_batch_s=0.080,
            one_worker_batch_s=0.020,
            run_delay_share=0.02,
            cpu_s=0.002,
            sample_wait_s=0.018,
        ),
        EIGHT,
    ),
    "thread-oversubscription": (
        loop(
            workers=2,
            wait=0.06,
            worker_threads=9,
            extra_cpu_share=0.8,
            run_delay_share=0.5,
            **COMPUTING,
        ),
        TWO,
    ),
    "cpu-quota": (loop(workers=2, wait=0.045, **COMPUTING), TWO_OF_EIGHT),
    "storage-bound": (
        loop(
            workers=2,
            wait=0.05,
            cpu_s=0.010,
            sample_wait_s=0.170,
            storage_share=0.95,
            first_storage_share=0.95,
            first_wait_factor=1.0,
            read_bytes_per_sample=10**6,
        ),
        TWO,
    ),
    "cold-storage": (
        loop(
            workers=2,
            wait=0.001,
            storage_share=0.01,
            first_storage_share=0.95,
            first_wait_factor=8.0,
        ),
        TWO,
    ),
    "small-files": (
        loop(
            workers=2,
            wait=0.05,
            opens_per_sample=3.0,
            open_share=0.7,
            read_bytes_per_sample=60_000,
            storage_share=0.0,
            **WAITING,
        ),
        TWO,
    ),
    "host-to-device": (loop(wait=0.001, transfer_share=0.4, step_share=0.55), GPU),
    "dataset-pickling": (
        loop(
            workers=2,
            wait=0.001,
            start_method="spawn",
            startup_s=10.0,
            pickling_s=1.5,
            pickled_bytes=10**8,
        ),
        TWO,
    ),
    "slow-rank": (loop(wait=0.02, rank_waits_s=(0.001, 0.020, 0.002, 0.001)), EIGHT),
}


def found_in(evidence: Evidence, machine: Machine, rules: Any = RULES) -> dict[str, Any]:
    return {found.code: found for rule in rules if (found := rule(evidence, machine)) is not None}


def test_every_rule_of_the_workers_has_a_fault() -> None:
    fired = {
        rule
        for evidence, machine in FAULTS.values()
        for rule in WORKER_RULES
        if rule(evidence, machine) is not None
    }
    assert fired == set(WORKER_RULES)


@pytest.mark.parametrize("code", FAULTS)
def test_a_rule_fires_on_its_fault_with_evidence_and_advice(code: str) -> None:
    found = found_in(*FAULTS[code])[code]
    assert found.group == CODES[code].group == "time"
    assert found.advice
    assert found.evidence
    assert any(name.startswith("threshold") for name in found.evidence) or code in (
        "cpu-quota",
        "dataset-pickling",
    )
    assert "\n" not in repr(found)
    json.dumps(found.to_dict())


@pytest.mark.parametrize("code", FAULTS)
def test_its_neighbours_stay_silent_or_follow_from_it(code: str) -> None:
    evidence, machine = FAULTS[code]
    others = {
        name: found
        for name, found in found_in(evidence, machine).items()
        if name != code and found.severity != "info"
    }
    assert set(others) <= set(EXPLAINS.get(code, ()))
    assert not [name for name in found_in(evidence, machine, WORKER_RULES) if name != code]


@pytest.mark.parametrize("code", FAULTS)
def test_the_right_cause_comes_first(code: str) -> None:
    result = diagnose(*FAULTS[code])
    assert result.cause == code
    assert not {found.code for found in result.findings} & set(EXPLAINS.get(code, ()))


# code, and one piece of evidence (or the machine) that rules it out
RULED_OUT: list[tuple[str, dict[str, Any]]] = [
    ("slow-sampler", {"sampler_s": 0.01}),
    ("slow-sampler", {"sampler_s": None}),
    ("slow-sampler", {"wait_share": 0.01}),
    ("straggler", {"num_workers": 1}),
    ("straggler", {"slow_batch_factor": 2.0}),
    ("straggler", {"slow_batch_factor": None}),
    ("straggler", {"blocked_share": 0.1}),
    ("straggler", {"blocked_share": None}),
    ("straggler", {"wait_share": 0.05}),
    ("serialised-workers", {"num_workers": 1}),
    ("serialised-workers", {"worker_batch_s": 0.025}),
    ("serialised-workers", {"worker_batch_s": None}),
    ("serialised-workers", {"one_worker_batch_s": None}),
    ("serialised-workers", {"run_delay_share": 0.6}),
    ("serialised-workers", {"wait_share": 0.05}),
    ("serialised-workers", {"sample_wall_s": 5e-6}),
    ("thread-oversubscription", {"num_workers": 0}),
    ("thread-oversubscription", {"worker_threads": 3}),
    ("thread-oversubscription", {"worker_threads": None}),
    ("thread-oversubscription", {"extra_cpu_share": 0.1}),
    ("thread-oversubscription", {"extra_cpu_share": None}),
    ("thread-oversubscription", {"wait_share": 0.05}),
    ("thread-oversubscription", {"machine": Machine(usable_cpus=64)}),
    ("cpu-quota", {"machine": TWO}),
    ("cpu-quota", {"num_workers": 1}),
    ("cpu-quota", {"wait_share": 0.05}),
    ("cpu-quota", {"cpu_s": None}),
    ("cpu-quota", {"cpu_s": 0.002, "sample_wait_s": 0.160}),
    ("cpu-quota", {"cpu_s": 0.020}),
    ("storage-bound", {"storage_share": 0.1}),
    ("storage-bound", {"storage_share": None}),
    ("storage-bound", {"wait_share": 0.05}),
    ("storage-bound", {"cpu_s": 0.170, "sample_wait_s": 0.010}),
    ("storage-bound", {"cpu_s": None}),
    ("cold-storage", {"first_storage_share": 0.1}),
    ("cold-storage", {"first_storage_share": None}),
    ("cold-storage", {"storage_share": 0.5}),
    ("cold-storage", {"first_wait_factor": 1.2}),
    ("cold-storage", {"first_wait_factor": None}),
    ("small-files", {"opens_per_sample": 1.0}),
    ("small-files", {"opens_per_sample": None}),
    ("small-files", {"open_share": 0.2}),
    ("small-files", {"open_share": None}),
    ("small-files", {"read_bytes_per_sample": 10**7}),
    ("small-files", {"wait_share": 0.05}),
    ("host-to-device", {"transfer_share": 0.1}),
    ("host-to-device", {"transfer_share": None}),
    ("host-to-device", {"machine": EIGHT}),
    ("dataset-pickling", {"start_method": "fork"}),
    ("dataset-pickling", {"start_method": None}),
    ("dataset-pickling", {"num_workers": 0}),
    ("dataset-pickling", {"pickling_s": 0.05}),
    ("dataset-pickling", {"pickling_s": 0.5}),
    ("dataset-pickling", {"pickling_s": None}),
    ("dataset-pickling", {"startup_s": None}),
    ("slow-rank", {"rank_waits_s": None}),
    ("slow-rank", {"rank_waits_s": (0.02,)}),
    ("slow-rank", {"rank_waits_s": (0.020, 0.019, 0.021, 0.020)}),
    ("slow-rank", {"rank_waits_s": (0.0001, 0.002, 0.0001)}),
]


@pytest.mark.parametrize(("code", "change"), RULED_OUT)
def test_one_piece_of_evidence_rules_it_out(code: str, change: dict[str, Any]) -> None:
    evidence, machine = FAULTS[code]
    assert code in found_in(evidence, machine)
    change = dict(change)
    machine = change.pop("machine", machine)
    assert code not in found_in(replace(evidence, **change), machine)


@pytest.mark.parametrize("rule", WORKER_RULES)
def test_no_evidence_no_finding(rule: Any) -> None:
    assert rule(Evidence(), TWO) is None
    assert rule(Evidence(num_workers=4, steps=100, wait_share=0.9), TWO) is None


# ---- expected gains -----------------------------------------------------------------------------


def test_gains_are_what_the_evidence_allows() -> None:
    gains = {code: found_in(*FAULTS[code])[code].expected_gain for code in FAULTS}
    assert gains["slow-sampler"] == pytest.approx(0.09 / 0.045)
    assert gains["straggler"] == pytest.approx(1 / (1 - 0.6 * 0.6))
    assert gains["serialised-workers"] == pytest.approx(4.0)
    assert gains["small-files"] == pytest.approx(1 / 0.3)
    assert gains["host-to-device"] == pytest.approx(1 / 0.6)
    assert gains["slow-rank"] == pytest.approx(0.060 / (0.060 - 0.019))
    assert gains["cold-storage"] is None


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("straggler", {"wait_share": 1.0, "blocked_share": 1.0}),
        ("slow-sampler", {"sampler_s": 0.090}),
        ("slow-sampler", {"period_s": None}),
        ("small-files", {"open_share": 1.0}),
        ("host-to-device", {"transfer_share": 1.0}),
        ("slow-rank", {"rank_waits_s": (0.0, 0.060)}),
    ],
)
def test_no_gain_is_predicted_from_nothing(code: str, change: dict[str, Any]) -> None:
    evidence, machine = FAULTS[code]
    found = found_in(replace(evidence, **change), machine)[code]
    assert found.expected_gain is None
    json.dumps(found.to_dict())


def test_the_gain_of_serialised_workers_is_at_most_their_number() -> None:
    evidence, machine = FAULTS["serialised-workers"]
    alone = evidence.one_worker_batch_s
    found = found_in(replace(evidence, worker_batch_s=5.5 * alone), machine)["serialised-workers"]
    assert found.expected_gain == 4.0


def test_workers_cannot_be_slower_than_one_after_the_other() -> None:
    evidence, machine = FAULTS["serialised-workers"]
    cold = replace(evidence, worker_batch_s=200 * evidence.one_worker_batch_s)
    assert "serialised-workers" not in found_in(cold, machine)


# ---- what follows from what ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "effect"), [(cause, effect) for cause in EXPLAINS for effect in EXPLAINS[cause]]
)
def test_what_a_deeper_cause_explains_is_dropped(cause: str, effect: str) -> None:
    both = [finding(effect, "", {}, severity="critical"), finding(cause, "", {}, severity="info")]
    assert [found.code for found in rank(both)] == [cause]
    assert [found.code for found in rank(both[:1])] == [effect]


def test_explanations_do_not_go_in_circles() -> None:
    assert {code for cause in EXPLAINS for code in (cause, *EXPLAINS[cause])} <= set(CODES)

    def below(code: str, path: tuple[str, ...] = ()) -> None:
        assert code not in path
        for effect in EXPLAINS.get(code, ()):
            below(effect, (*path, code))

    for code in EXPLAINS:
        below(code)


# ---- cases --------------------------------------------------------------------------------------


def test_a_13_3_a_slow_first_pass_is_no_reason_to_tune() -> None:
    evidence, machine = FAULTS["cold-storage"]
    result = diagnose(evidence, machine)
    assert result.verdict == "compute-bound"
    assert result.cause == "cold-storage"
    assert "num_workers" not in " ".join(found.advice for found in result.findings)
    assert "Judge by a later epoch" in result.findings[0].advice


def test_workers_that_wait_for_a_cpu_do_not_wait_for_one_another() -> None:
    """Sharing two CPUs among four workers makes each batch slower, without any lock."""
    evidence, _ = FAULTS["serialised-workers"]
    busy = replace(evidence, cpu_s=0.040, sample_wait_s=0.0, run_delay_share=None)
    assert "serialised-workers" not in found_in(busy, TWO)
    assert "serialised-workers" in found_in(busy, EIGHT)  # CPUs enough: so it is a lock


def test_a_quota_that_throttles_counts_though_all_cpus_are_allowed() -> None:
    evidence, _ = FAULTS["cpu-quota"]
    assert "cpu-quota" not in found_in(evidence, TWO)
    assert "cpu-quota" not in found_in(replace(evidence, throttled_share=0.02), TWO)
    found = found_in(replace(evidence, throttled_share=0.4), TWO)["cpu-quota"]
    assert found.evidence["throttled_share"] == 0.4


def test_the_quota_says_where_it_comes_from() -> None:
    found = found_in(*FAULTS["cpu-quota"])["cpu-quota"]
    assert "Only 2 of 8 CPUs may be used (affinity)" in found.message


def test_the_slow_rank_is_named() -> None:
    found = found_in(*FAULTS["slow-rank"])["slow-rank"]
    assert (found.evidence["rank"], found.evidence["ranks"]) == (1, 4)
    assert found.message.startswith("Rank 1 waits 20 ms a step for its data")


def test_a_shuffle_buffer_of_large_files_is_not_small_files() -> None:
    evidence, machine = FAULTS["small-files"]
    assert "small-files" in found_in(replace(evidence, read_bytes_per_sample=None), machine)
    large = replace(evidence, opens_per_sample=3.0, read_bytes_per_sample=3 * 300 * 1024)
    assert "small-files" not in found_in(large, machine)
