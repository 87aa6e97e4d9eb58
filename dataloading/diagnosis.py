"""From evidence to a diagnosis: verdict, ranked findings, ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataloading.codes import CODES, SEVERITIES, Finding
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.main_process_rules import MAIN_PROCESS_RULES
from dataloading.memory_rules import MEMORY_RULES
from dataloading.profiling import SampleProfile
from dataloading.results import Result, format_count, format_value
from dataloading.settings import LoaderSettings
from dataloading.setup_rules import SETUP_RULES
from dataloading.time_rules import TIME_RULES
from dataloading.verdict import judge
from dataloading.worker_rules import WORKER_RULES

if TYPE_CHECKING:
    from dataloading.monitoring import ResourceTrace

# A finding that another one explains is dropped: name of the deeper cause -> what follows from it.
EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "dropped-samples": ("epoch-startup",),
    "slow-sampler": ("too-few-workers", "cpu-bound", "collate", "transfer", "per-sample-overhead"),
    "thread-oversubscription": ("cpu-bound", "too-few-workers", "cpu-quota", "serialised-workers"),
    "straggler": ("too-few-workers", "serialised-workers"),
    "serialised-workers": ("too-few-workers", "cpu-bound"),
    "cpu-quota": ("cpu-bound",),
    "small-files": ("storage-bound", "too-few-workers", "cpu-bound"),
    "storage-bound": ("too-few-workers", "cold-storage", "cpu-bound"),
    "cold-storage": ("straggler",),
    "per-sample-overhead": ("epoch-startup",),
    "dataset-pickling": ("epoch-startup",),
    "collate": ("too-few-workers",),
    "transfer": ("too-few-workers",),
}
PARTS = {  # what a ceiling belongs to, in words
    "compute": "train step alone",
    "workers": "loader alone",
    "cpu": "all usable CPUs",
    "transfer": "sending batches",
    "storage": "reading files",
    "sampler": "drawing indices",
    "startup": "starting epochs",
}
GROUPS = ("time", "memory", "samples", "setup")  # of equally severe findings, time comes first

RULES = (*MAIN_PROCESS_RULES, *TIME_RULES, *WORKER_RULES, *MEMORY_RULES, *SETUP_RULES)


@dataclass(frozen=True, repr=False, eq=False)
class Diagnosis(Result):
    """Why a training loop is as fast as it is.

    Attributes:
        verdict: `data-bound`, `compute-bound`, `host-bound`, `balanced` or `inconclusive`.
        cause: Code of the first finding, or None.
        findings: What was found, most important first.
        ceilings: Samples per second that each part could reach alone: `compute`, `workers`, `cpu`,
            `transfer`, `storage`, `sampler`, `startup`; None where it was not measured.
        evidence: The numbers behind all of it.
        timing: The real run.
        profile: What a sample costs, where it was measured.
        trace: Resources during the run, where they were watched.
        machine: Where it ran.
    """

    verdict: str
    cause: str | None
    findings: tuple[Finding, ...]
    ceilings: Mapping[str, float | None]
    evidence: Evidence
    timing: LoaderTiming | None
    profile: SampleProfile | None
    trace: ResourceTrace | None
    machine: Machine

    def top(self, group: str) -> Finding | None:
        """The first finding of a group (`time`, `memory`, `samples` or `setup`), or None."""
        return next((found for found in self.findings if found.group == group), None)

    def summary(self) -> str:
        """Verdict, cause and the share of waiting."""
        share = format_value("wait_share", self.evidence.wait_share)
        cause = f", cause {self.cause}" if self.cause else ""
        if self.verdict == "data-bound" and self.cause is None:
            cause = ", cause not known"
        if self.evidence.wait_share is None:
            return f"{self.verdict}{cause} ({format_count(self.evidence.steps, 'steady step')})"
        return f"{self.verdict}{cause} (waiting {share} of the time, {format_count(self.evidence.steps, 'steady step')})"

    def rows(self) -> list[tuple[str, Any]]:
        """Verdict, findings and ceilings."""
        ceilings = [
            (f"ceiling: {PARTS[part]}", format_value("samples_per_s", rate))
            for part, rate in self.ceilings.items()
            if rate is not None
        ]
        found = [
            row
            for item in self.findings
            for row in ((f"{item.code} ({item.severity})", item.message), ("  advice", item.advice))
        ]
        return [
            ("verdict", self.verdict),
            ("wait_share", self.evidence.wait_share),
            ("steps", self.evidence.steps),
            *found,
            *ceilings,
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the ceilings with the measured rate; returns the Axes."""
        from dataloading.plots import plot_ceilings

        return plot_ceilings(self, ax=ax)


def diagnose(
    evidence: Evidence,
    machine: Machine,
    *,
    timing: LoaderTiming | None = None,
    profile: SampleProfile | None = None,
    trace: ResourceTrace | None = None,
) -> Diagnosis:
    """Judge evidence: verdict, ranked findings and ceilings.

    Args:
        evidence: What was measured.
        machine: Where it was measured.
        timing, profile, trace: The measurements themselves, kept in the result.

    Returns:
        A `Diagnosis`.
    """
    verdict = judge(evidence)
    found = rank([f for rule in RULES if (f := rule(evidence, machine)) is not None])
    return Diagnosis(
        verdict=verdict,
        cause=found[0].code if found else None,
        findings=tuple(found),
        ceilings=ceilings(evidence, machine),
        evidence=evidence,
        timing=timing,
        profile=profile,
        trace=trace,
        machine=machine,
    )


def failed_diagnosis(
    found: Finding,
    machine: Machine,
    timing: LoaderTiming | None = None,
    settings: LoaderSettings | None = None,
) -> Diagnosis:
    """The diagnosis of a loader that failed, with its settings and what was timed before that."""
    return Diagnosis(
        verdict="inconclusive",
        cause=found.code,
        findings=(found,),
        ceilings=ceilings(Evidence(), machine),
        evidence=Evidence(reasons={"steps": found.message}).with_settings(settings),
        timing=timing,
        profile=None,
        trace=None,
        machine=machine,
    )


def rank(found: list[Finding]) -> list[Finding]:
    """Drop what a deeper cause explains, and put the most important finding first.

    Severity comes first, then the group, then the predicted gain; of one code the first is kept.
    """
    codes = {f.code for f in found}
    explained = {code for cause in codes for code in EXPLAINS.get(cause, ())}
    ranked = sorted(
        (f for f in found if f.code not in explained),
        key=lambda f: (
            -SEVERITIES.index(f.severity),
            GROUPS.index(f.group),
            -(f.expected_gain or 1.0),
        ),
    )
    return list({f.code: f for f in reversed(ranked)}.values())[::-1]


def ceilings(evidence: Evidence, machine: Machine) -> dict[str, float | None]:
    """Samples per second that each part could reach if all others were free."""
    size = evidence.batch_size

    def rate(seconds: float | None) -> float | None:
        return size / seconds if size and seconds and seconds > 0 else None

    costs = evidence.costs
    cpu_s = (costs.cpu_s + costs.send_s) / machine.cpu_time_per_rank if costs is not None else None
    epoch_start = evidence.epoch_restart_s
    per_step = (
        epoch_start / evidence.steps_per_epoch if epoch_start and evidence.steps_per_epoch else None
    )
    return {
        "compute": rate(evidence.replay_step_s),
        "workers": rate(evidence.alone_period_s),
        "cpu": rate(cpu_s),
        "transfer": rate(evidence.send_s) if evidence.num_workers else None,
        "storage": None,
        "sampler": rate(evidence.sampler_s),
        "startup": rate(per_step),
    }


def explain(code: str) -> str:
    """What a code means, proves and advises, as plain text.

    Raises:
        KeyError: The code is not registered.
    """
    entry = CODES[code]
    return (
        f"{code} ({entry.group}): {entry.meaning}\n  shown by: {entry.proof}\n"
        f"  ruled out by: {entry.ruled_out_by}\n  advice: {entry.advice}"
    )
