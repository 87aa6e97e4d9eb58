"""Results in plain words: the sentences and lines that both reports share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataloading.codes import CODES
from dataloading.evidence import FEWEST_STEPS
from dataloading.recommendation import Recommendation
from dataloading.results import (
    MISSING,
    format_count,
    format_ratio,
    format_seconds,
    format_share,
    format_value,
)
from dataloading.settings import DEFAULT_PREFETCH_FACTOR, LoaderSettings
from dataloading.verdict import RESTART_SHARE, restart_share
from dataloading.workers import GOOD_ENOUGH

if TYPE_CHECKING:
    from dataloading.comparison import Comparison
    from dataloading.diagnosis import Diagnosis
    from dataloading.loader_timing import LoaderTiming

UNITS = ("_samples_per_s", "_bytes", "_percent", "_s")  # endings that the value itself shows
LIMITS = {
    "compute": "the train step",
    "transfer": "handing batches over",
    "workers": "the workers",
    "cpu": "the CPUs",
}
SLOW_START_S = 1.0  # spawned workers, which import torch first
FELT = 0.97  # of the steady rate: starts of epochs that cost less are not worth a line
PARTS = (
    ("wait", "waiting for data"),
    ("transfer", "moving the batch"),
    ("step", "train step"),
    ("other", "other work"),
)


def words(name: str) -> str:
    """A field name as words, without the unit that its value carries.

    >>> words("epoch_restart_s"), words("threshold_wait_share"), words("num_workers")
    ('epoch restart', 'threshold of wait share', 'num_workers')
    """
    if name in LoaderSettings.__dataclass_fields__:
        return name
    if name.startswith("threshold_"):
        return f"threshold of {words(name.removeprefix('threshold_'))}"
    for unit in UNITS:
        if name.endswith(unit):
            name = name.removesuffix(unit) + (" rate" if unit == "_samples_per_s" else "")
            break
    return name.replace("_", " ").replace("cpu", "CPU")


def figure_text(name: str, value: Any) -> str:
    """A value with its unit; percents too.

    >>> figure_text("utilization_percent", 41.2), figure_text("wait_s", 0.0123)
    ('41 %', '12.3 ms')
    """
    if name.endswith("_percent") and isinstance(value, int | float):
        return f"{value:.0f} %"
    return format_value(name, value)


def nothing_to_set(recommendation: Recommendation) -> str:
    """What to say where all settings stay."""
    if recommendation.advice:
        return "No setting needs to change: what helps here is not a setting, see below."
    return "No setting needs to change."


def verdict_sentence(diagnosis: Diagnosis) -> str:
    """The diagnosis in one sentence.

    >>> from dataloading.diagnosis import diagnose
    >>> from dataloading.evidence import Evidence
    >>> from dataloading.machine import Machine
    >>> verdict_sentence(diagnose(Evidence(), Machine(usable_cpus=2)))
    'No verdict: from 0 steady steps nothing can be concluded; measure longer.'
    """
    evidence = diagnosis.evidence
    wait = format_value("wait_share", evidence.wait_share)
    if diagnosis.verdict == "inconclusive":
        if failure := evidence.reasons.get("steps"):
            return f"No verdict, because the loader failed. {failure}"
        if evidence.steps >= FEWEST_STEPS:
            return "No verdict: the share of waiting is not known."
        steps = format_count(evidence.steps, "steady step")
        start = evidence.startup_s or 0.0
        slow = f" (the first batch took {format_seconds(start)})" if start > SLOW_START_S else ""
        return f"No verdict: from {steps} nothing can be concluded; measure longer{slow}."
    if diagnosis.verdict == "data-bound":
        cause = diagnosis.top("time")
        why = evidence.reasons.get("cpu_s") or "what a sample costs is not known"
        because = f"; its cause was not measured: {why}"
        if evidence.costs is not None:
            because = "; no single cause stands out"
        if cause is not None:
            because = f"; the main cause is {cause.code}"
        if (starts := restart_share(evidence)) >= RESTART_SHARE:
            return (
                f"Starting takes {format_share(starts)} of an epoch, and training waits for data "
                f"{wait} of the rest{because}."
            )
        return f"Training waits for data {wait} of the time{because}."
    return {
        "compute-bound": f"The loader keeps up: training waits for data only {wait} of the time.",
        "host-bound": "Other work of the training process takes the time, not the loader: "
        f"waiting for data takes {wait}.",
        "balanced": f"Little is lost to the loader: training waits for data {wait} of the time.",
    }[diagnosis.verdict]


def cause_sentence(diagnosis: Diagnosis) -> str:
    """What the first finding means; empty without one."""
    return CODES[diagnosis.cause].meaning if diagnosis.cause is not None else ""


def comparison_sentence(comparison: Comparison) -> str:
    """The comparison in one sentence, with its interval."""
    notes = "; ".join(comparison.notes)
    if comparison.ratio is None:
        return f"Before and after are {comparison.verdict}: {notes or 'no pair was measured'}."
    shown = f"{format_ratio(comparison.ratio)} times the rate ({comparison.interval_text()})"
    if comparison.verdict in ("faster", "slower"):
        text = f"With the new settings training is {comparison.verdict}: {shown}."
    else:
        text = f"No difference could be shown: {shown}."
    return f"{text} Note: {notes}." if notes else text


def baseline_lines(timing: LoaderTiming) -> list[tuple[str, str]]:
    """What a run showed: name and text of each line."""
    if timing.steps == 0:
        return [("steady steps", "none: the run was too short")]
    lines = [("loader", timing.settings.summary())] if timing.settings is not None else []
    lines += [
        (
            "rate",
            f"{format_value('samples_per_s', timing.samples_per_s)}, starts of epochs left out",
        ),
        *_whole_epochs(timing),
        (
            "one step",
            f"{format_seconds(timing.period_s)} (mean of {format_count(timing.steps, 'steady step')})",
        ),
    ]
    for part, meaning in PARTS:
        mean = format_seconds(float(getattr(timing, f"{part}_s").mean()))
        lines.append(
            (meaning, f"{mean}, {format_value('x_share', getattr(timing, f'{part}_share'))}")
        )
    lines.append(
        (
            "wait of a step",
            f"median {format_seconds(timing.median_wait_s)}, "
            f"95 % below {format_seconds(timing.p95_wait_s)}",
        )
    )
    lines.append(("first batch", _after(timing.startup_s, "after")))
    lines.append(("epoch restart", _after(timing.epoch_restart_s, "")))
    return lines


def _whole_epochs(timing: LoaderTiming) -> list[tuple[str, str]]:
    """The rate with the starts of epochs, where these are felt."""
    if timing.epoch_restart_s is None or not timing.steps_per_epoch or not timing.epoch_s:
        return []
    rate = timing.steps_per_epoch * float(timing.samples.mean()) / timing.epoch_s
    if rate > FELT * timing.samples_per_s:
        return []
    return [("rate of whole epochs", format_value("samples_per_s", rate))]


def stage_lines(diagnosis: Diagnosis) -> tuple[str, list[tuple[str, str]]]:
    """What each stage of a sample costs: where that was measured, and a line per stage.

    The figures come from inside the workers where there are some, else from this process; without
    any, the list is empty.
    """
    timing, profile = diagnosis.timing, diagnosis.profile
    where, stages = "inside the workers", None
    if timing is not None and timing.workers is not None:
        stages = timing.workers.stages
    if stages is None and profile is not None:
        where, stages = "in the training process", profile.stages
    if stages is None:
        return where, []
    return where, [
        (str(row["stage"]), _stage_text(row)) for row in stages.to_dict(orient="records")
    ]


def _stage_text(row: dict[Any, Any]) -> str:
    wall_s, cpu_s = float(row["wall_s"]), float(row["cpu_s"])
    text = f"{format_seconds(wall_s)}, {format_value('x_share', float(row['share']))}"
    return f"{text}, mostly waiting (also for a CPU)" if cpu_s < wall_s / 2 else text


def _after(seconds: float | None, before: str) -> str:
    if seconds is None:
        return f"{MISSING}: the run ended before" if not before else MISSING
    return f"{before} {format_seconds(seconds)}".strip()


def outcome_sentence(recommendation: Recommendation, comparison: Comparison | None) -> str:
    """What the settings bring: as measured, else as predicted."""
    if comparison is None:
        gain = predicted_gain(recommendation.predicted_gain)
        return f"Recommended settings: {gain}; not measured yet."
    if comparison.ratio is None or comparison.verdict not in ("faster", "slower"):
        return f"Measured with the recommended settings: {comparison.verdict}."
    return (
        f"Measured with the recommended settings: {format_ratio(comparison.ratio)} times the rate."
    )


def predicted_gain(gain: float | None) -> str:
    """A predicted gain in words.

    >>> predicted_gain(3.777), predicted_gain(1.001), predicted_gain(None)
    ('predicted gain 3.78 times the rate', 'no gain predicted', 'gain not predicted')
    """
    if gain is None:
        return "gain not predicted"
    if abs(gain - 1) < GOOD_ENOUGH - 1:
        return "no gain predicted"
    return f"predicted gain {gain:.2f} times the rate"


def prediction_sentence(diagnosis: Diagnosis, recommendation: Recommendation) -> str:
    """Gain that the model expects of the recommended settings, from the rate that was measured."""
    gain, predicted = recommendation.predicted_gain, recommendation.predicted
    text = predicted_gain(gain)
    evidence = diagnosis.evidence
    if gain is not None and predicted is not None and evidence.period_s and evidence.batch_size:
        rate = evidence.batch_size / evidence.period_s
        text += (
            f": from {format_value('samples_per_s', rate)} as measured to about "
            f"{format_value('samples_per_s', rate * gain)}, limited by {LIMITS.get(predicted.limit, predicted.limit)}"
        )
    return f"{text[0].upper()}{text[1:]}."


def changed_settings(
    recommendation: Recommendation, present: LoaderSettings
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments that a recommendation changes, and those that must be left out.

    Args:
        recommendation: What was recommended.
        present: How the loader is set now.

    Returns:
        `(changed, removed)`: name -> new value, and names that the new combination doesn't take.
    """
    now, wanted = present.kwargs(), recommendation.settings.kwargs()
    if present.num_workers > 0:
        now.setdefault("prefetch_factor", DEFAULT_PREFETCH_FACTOR)
    changed = {name: value for name, value in wanted.items() if now.get(name) != value}
    removed = [
        name for name in now if name not in wanted and name not in ("batch_size", "in_order")
    ]
    if present.prefetch_factor is None and "prefetch_factor" in removed:
        removed.remove("prefetch_factor")
    if not present.persistent_workers and "persistent_workers" in removed:
        removed.remove("persistent_workers")
    return changed, removed


def settings_snippet(recommendation: Recommendation, present: LoaderSettings) -> str:
    """Python to copy: only the arguments that change; empty where nothing does.

    Args:
        recommendation: What was recommended.
        present: How the loader is set now.
    """
    changed, removed = changed_settings(recommendation, present)
    if not changed and not removed:
        return ""
    arguments = [f"    {name}={value!r}," for name, value in changed.items()]
    if removed:
        arguments.append(f"    # without {', '.join(removed)}")
    return "\n".join(
        ["DataLoader(", "    dataset,  # and your other arguments, as they are", *arguments, ")"]
    )


def measured_lines(diagnosis: Diagnosis, baseline: LoaderTiming | None) -> list[tuple[str, str]]:
    """How the figures were measured: steps, seconds, clock and versions."""
    machine = diagnosis.machine
    lines = [("steady steps", f"{diagnosis.evidence.steps}")]
    if baseline is not None and baseline.steps:
        seconds = format_seconds(float(baseline.total_s.sum()))
        left_out = f"{baseline.discarded_steps} steps of start-up and prefetch burst left out"
        lines = [
            ("steady steps", f"{baseline.steps} in {seconds}; {left_out}"),
            ("clock", baseline.clock),
        ]
    lines.append(("machine", machine.summary()))
    lines.append(("system", f"{machine.platform}, {machine.environment}"))
    return lines


def all_notes(diagnosis: Diagnosis, baseline: LoaderTiming | None) -> list[str]:
    """Everything the reader should know besides, each once."""
    notes = [
        f"{words(name)} not measured: {why}" for name, why in diagnosis.evidence.reasons.items()
    ]
    for result in (baseline, diagnosis.timing, diagnosis.profile):
        notes += getattr(result, "notes", ())
    if diagnosis.trace is not None:
        notes += [f"{topic}: {why}" for topic, why in diagnosis.trace.notes.items()]
    return list(dict.fromkeys(notes))
