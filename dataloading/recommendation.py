"""Which settings to use here, why, what they should bring, and what was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dataloading.arguments import check_int, check_share
from dataloading.batch_costs import BatchCosts
from dataloading.budgets import over_budget
from dataloading.choices import (
    choose_persistence,
    choose_pinning,
    choose_prefetch,
    choose_workers,
    epoch_s,
    explain_start_method,
    fit,
    keep_handles_unshared,
    keep_samples_single,
    slack_s,
    tail_s,
)
from dataloading.codes import Finding
from dataloading.cpus import UNKNOWN
from dataloading.diagnosis import Diagnosis
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.model import (
    Prediction,
    predict_dataloader,
    step_seconds,
)
from dataloading.results import Result, format_value
from dataloading.rules_of_thumb import usual_advice
from dataloading.settings import LoaderSettings

if TYPE_CHECKING:
    import pandas as pd

MODEL_FITS = 1.5  # times the predicted step: a slower run is slow for a reason it does not know
COPIES = "each worker would deliver all samples"
PER_BATCH = ("transfer", "per-sample-overhead")  # paid for each batch, whatever its size
ELSEWHERE = (
    *("cpu-bound", "collate", "transfer", "per-sample-overhead", "serialised-workers"),
    *("slow-sampler", "storage-bound", "small-files", "thread-oversubscription", "straggler"),
)  # what no setting mends


@dataclass(frozen=True, repr=False, eq=False)
class Recommendation(Result):
    """Settings for a loader, with reasons.

    Attributes:
        settings: What to set; the batch size stays as it is.
        reasons: Setting -> why.
        predicted: What the model expects of these settings; None where costs were not measured, or
            the present run is far slower than it explains.
        predicted_gain: Predicted rate over the predicted rate of the present settings; 1 when
            nothing changes, None where it cannot be computed.
        refused: What was considered and refused -> why.
        advice: What is not a setting but would help, largest predicted gain first.
        beside: DataFrame of what is often advised without measuring (`rule_of_thumb_workers` and
            the presets): `rule`, `num_workers`, `prefetch_factor`, `predicted_samples_per_s`, and
            `shortage`: which budget it would overrun. None where costs were not measured.
    """

    settings: LoaderSettings
    reasons: Mapping[str, str]
    predicted: Prediction | None
    predicted_gain: float | None
    refused: Mapping[str, str]
    advice: tuple[str, ...]
    beside: pd.DataFrame | None = None

    def summary(self) -> str:
        """The settings and the predicted gain."""
        gain = self.predicted_gain
        expects = "gain not predicted" if gain is None else f"predicted {gain:.2f}x"
        return f"{self.settings.summary()} ({expects})"

    def rows(self) -> list[tuple[str, Any]]:
        """Each setting with its reason, then what was refused, then further advice."""
        chosen = self.settings.kwargs()
        gain = "not predicted" if self.predicted_gain is None else f"{self.predicted_gain:.2f}x"
        default_start = {"start method": self.reasons.get("multiprocessing_context")}
        if "multiprocessing_context" in chosen:  # stands among the settings
            default_start = {}
        return [
            *((f"{name} = {value}", self.reasons.get(name, "")) for name, value in chosen.items()),
            *((name, why) for name, why in default_start.items() if why),
            ("predicted gain", gain),
            *((f"refused: {what}", why) for what, why in self.refused.items()),
            *(("advice", text) for text in self.advice),
            *((f"beside: {rule}", text) for rule, text in self.rules_in_words()),
        ]

    def rules_in_words(self) -> list[tuple[str, str]]:
        """What is often advised without measuring, and what the model expects of it."""
        if self.beside is None:
            return []
        return [
            (
                str(row["rule"]),
                f"{row['num_workers']} workers, prefetch {row['prefetch_factor']}: "
                + (
                    f"does not fit, {row['shortage']}"
                    if row["shortage"]
                    else f"{format_value('samples_per_s', row['predicted_samples_per_s'])} predicted"
                ),
            )
            for _, row in self.beside.iterrows()
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the predicted run; returns the Axes."""
        if self.predicted is None:
            raise ValueError("Nothing to plot: the costs of a batch were not measured.")
        return self.predicted.plot(ax=ax)


def recommend_settings(
    diagnosis: Diagnosis,
    *,
    machine: Machine | None = None,
    epochs: int = 10,
    memory_fraction: float = 0.8,
) -> Recommendation:
    """Choose settings from a diagnosis, within the limits of the machine.

    Args:
        diagnosis: What `diagnose_dataloader` found.
        machine: Where training will run; None means where it was measured.
        epochs: How many epochs will be trained; workers that live longer pay for their start.
        memory_fraction: Share of the free memory, shared memory and open files that may be used.

    Returns:
        A `Recommendation`. Where the loader is not the problem, it keeps the present settings.

    Raises:
        ValueError: `epochs` or `memory_fraction` is out of range.

    Explained in: notebook 00
    """
    if not isinstance(diagnosis, Diagnosis):
        raise TypeError(
            f"Expected a Diagnosis from diagnose_dataloader, got {type(diagnosis).__name__}."
        )
    check_int("epochs", epochs, least=1)
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"Expected a Machine from inspect_machine, got {type(machine).__name__}.")
    check_share("memory_fraction", memory_fraction)
    machine = machine or diagnosis.machine
    if machine.start_method == UNKNOWN:  # a made-up machine: started as it was measured
        machine = replace(machine, start_method=diagnosis.machine.start_method)
    evidence = diagnosis.evidence
    present = evidence.settings
    costs = evidence.costs
    step_s = evidence.replay_step_s if evidence.replay_step_s is not None else evidence.step_s
    refused: dict[str, str] = {}
    reasons: dict[str, str] = {}
    if costs is None or step_s is None:
        reasons["num_workers"] = "kept: what a batch costs was not measured"
        chosen = choose_pinning(present, machine, reasons)
    else:
        chosen = choose_workers(diagnosis, present, costs, step_s, machine, reasons, epochs)
        chosen = keep_samples_single(chosen, evidence, reasons, refused)
        chosen = keep_handles_unshared(chosen, evidence, reasons, refused)
        chosen = choose_prefetch(chosen, evidence, reasons)
        chosen = choose_pinning(chosen, machine, reasons)  # pinned batches count twice
        chosen = fit(chosen, costs, machine, memory_fraction, reasons, refused)
    if evidence.steps:  # nothing is changed for a loader that failed
        chosen = choose_persistence(chosen, epochs, reasons)
        explain_start_method(chosen, evidence, machine, reasons)
    predicted = gain = beside = None
    if (
        costs is not None
        and step_s is not None
        and diagnosis.verdict != "inconclusive"
        and (chosen.num_workers == 0 or _model_fits(evidence, costs, step_s, diagnosis.machine))
    ):
        beside = _rules_beside(costs, step_s, machine, memory_fraction, evidence.shares_out)
        predicted = predict_dataloader(costs, chosen, step_s=step_s, machine=machine)
        gain = epoch_s(present, diagnosis, costs, step_s, machine, epochs) / max(
            epoch_s(chosen, diagnosis, costs, step_s, machine, epochs), 1e-12
        )
    return Recommendation(
        settings=chosen,
        reasons=reasons,
        predicted=predicted,
        predicted_gain=gain,
        refused=refused,
        advice=_advice(diagnosis.findings, evidence, chosen),
        beside=beside,
    )


def _model_fits(evidence: Evidence, costs: BatchCosts, step_s: float, machine: Machine) -> bool:
    """Whether the model explains the present rate; else it cannot tell what workers would give."""
    if not evidence.period_s:
        return True
    expected_s = step_seconds(costs, evidence.settings, step_s, machine)
    return evidence.period_s <= MODEL_FITS * expected_s


def _advice(
    findings: tuple[Finding, ...], evidence: Evidence, chosen: LoaderSettings
) -> tuple[str, ...]:
    """What no setting mends, largest predicted gain first; what changes training comes last."""
    if not evidence.steps:  # the loader failed, and no setting mends that
        return tuple(f"First mend this: {f.message} {f.advice}" for f in findings)
    beyond = [f for f in findings if f.code in ELSEWHERE]
    beyond.sort(key=lambda f: -(f.expected_gain or 0.0))
    advice = [f.advice for f in beyond]
    if tail_s(evidence) > slack_s(chosen, evidence) > 0:
        advice.append(
            "Where the order of batches need not be the same in every run, in_order=False lets "
            "batches that are ready overtake a slow one; runs are then no longer repeatable."
        )
    if any(f.code in PER_BATCH for f in findings):
        advice.append(
            "Larger batches share the cost of handing over among more samples, but change training "
            "(steps an epoch, learning rate): find_batch_sizes tells which fit."
        )
    return tuple(advice)


def _rules_beside(
    costs: BatchCosts, step_s: float, machine: Machine, fraction: float, shares_out: bool | None
) -> pd.DataFrame:
    """What the usual advice would give here, by the same model."""
    import pandas as pd

    rows = [
        {
            "rule": rule,
            "num_workers": settings.num_workers,
            "prefetch_factor": settings.prefetch_factor,
            "predicted_samples_per_s": costs.batch_size
            / step_seconds(costs, settings, step_s, machine),
            "shortage": COPIES
            if shares_out is False and settings.num_workers > 1
            else over_budget(settings, costs, machine, fraction),
        }
        for rule, settings in usual_advice(costs, machine).items()
    ]
    return pd.DataFrame(rows)
