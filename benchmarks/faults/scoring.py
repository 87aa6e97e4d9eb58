"""What outcomes add up to: right causes, false alarms, advice that helped, confusion."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from dataloading.codes import CODES

COSTS_NOTHING = 0.98  # of the rate before: an interval that ends below shows a loss of over 2 %
NOTHING, FAILED = "nothing", "failed"

Named = tuple[str, str]  # code and severity of a finding


@dataclass(frozen=True)
class Advice:
    """What the recommended settings brought: rate after over rate before, with its interval."""

    settings: str
    ratio: float | None
    interval: tuple[float, float] | None

    @property
    def is_faster(self) -> bool:
        """Whether a gain was shown."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def costs(self) -> bool:
        """Whether a loss of more than 2 % was shown."""
        return self.interval is not None and self.interval[1] < COSTS_NOTHING


@dataclass(frozen=True)
class Outcome:
    """One run of one case.

    Attributes:
        case: Its name.
        seed: Its seed.
        right: The codes that are right.
        control: Whether nothing is wrong with its loader.
        named: What was named, first one first.
        seconds: How long naming it took.
        advice: What the recommended settings brought; None where they change nothing, or where it
            was not tried.
        form: The form of the fault that the seed chose.
        cannot_run: Why it cannot run here; then it does not count.
        error: How the run failed.
    """

    case: str
    seed: int
    right: tuple[str, ...]
    control: bool = False
    named: tuple[Named, ...] = ()
    seconds: float = 0.0
    advice: Advice | None = None
    form: str = ""
    cannot_run: str | None = None
    error: str | None = None

    def changed(self, **changes: Any) -> Outcome:
        """The same with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """Read what `to_dict` gave, also after it went through JSON."""
        advice = values["advice"]
        if advice is not None:
            interval = advice["interval"]
            advice = Advice(
                advice["settings"], advice["ratio"], tuple(interval) if interval else None
            )
        named = tuple((code, severity) for code, severity in values["named"])
        return cls(**{**values, "right": tuple(values["right"]), "named": named, "advice": advice})

    @property
    def counts(self) -> bool:
        """Whether it counts for the score."""
        return self.cannot_run is None

    @property
    def alarms(self) -> tuple[str, ...]:
        """Codes of a control that are worse than a remark, and not right."""
        if not self.control:
            return ()
        return tuple(
            code for code, severity in self.named if severity != "info" and code not in self.right
        )

    @property
    def first(self) -> str:
        """The code named first: within the group of the right one, where there is one."""
        if self.error is not None:
            return FAILED
        group = group_of(self.right)
        codes = [code for code, _ in self.named if group is None or group_of((code,)) == group]
        return codes[0] if codes else NOTHING

    @property
    def is_right(self) -> bool:
        """Whether the right cause comes first in its group; a control must raise no alarm either."""
        if self.error is not None or self.alarms:
            return False
        return not self.right or self.first in self.right


def group_of(codes: tuple[str, ...]) -> str | None:
    """Group of the first code; None without one, or where it is no finding code."""
    return CODES[codes[0]].group if codes and codes[0] in CODES else None


def confusion(outcomes: Iterable[Outcome]) -> pd.DataFrame:
    """How often each code was named first (columns) where another was right (rows)."""
    counts = Counter(
        (one.right[0] if one.right else NOTHING, _named_instead(one))
        for one in outcomes
        if one.counts
    )
    rows = list(dict.fromkeys(right for right, _ in counts))
    named = {name for _, name in counts}
    columns = [name for name in rows if name in named] + sorted(named - set(rows))
    table = [[counts[right, name] for name in columns] for right in rows]
    return pd.DataFrame(table, index=rows, columns=columns)


def _named_instead(one: Outcome) -> str:
    """The label of a run in the confusion table: the right one, however it is spelled."""
    if one.is_right:
        return one.right[0] if one.right else NOTHING
    return one.alarms[0] if one.alarms else one.first


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The figures that are published; shares are None where nothing was counted."""
    ran = [one for one in outcomes if one.counts]
    faults = [one for one in ran if not one.control]
    controls = [one for one in ran if one.control]
    tried = [one.advice for one in ran if one.advice is not None]
    by_group: dict[str, list[bool]] = {}
    for one in faults:
        by_group.setdefault(group_of(one.right) or "other", []).append(one.is_right)
    seconds = [one.seconds for one in ran if one.error is None]
    return {
        "faults": _counted([one.is_right for one in faults]),
        "by_group": {group: _counted(right) for group, right in by_group.items()},
        "controls": _counted([one.is_right for one in controls]),
        "false_alarms": _counted([bool(one.alarms) for one in controls]),
        "advice": {
            "tried": len(tried),
            "faster": sum(advice.is_faster for advice in tried),
            "costs_over_2_percent": sum(advice.costs for advice in tried),
            "not_costing_share": _counted([not advice.costs for advice in tried])["share"],
        },
        "median_s": statistics.median(seconds) if seconds else None,
        "failed": [f"{one.case} seed {one.seed}: {one.error}" for one in ran if one.error],
    }


def _counted(values: list[bool]) -> dict[str, Any]:
    return {
        "yes": sum(values),
        "of": len(values),
        "share": sum(values) / len(values) if values else None,
    }


def in_words(figures: Mapping[str, Any]) -> list[str]:
    """The figures as lines of text."""
    lines = [f"right cause first: {_share(figures['faults'])} of the faults"]
    lines += [f"  {group}: {_share(part)}" for group, part in figures["by_group"].items()]
    lines.append(f"controls judged right: {_share(figures['controls'])}")
    lines.append(f"false alarms: {_share(figures['false_alarms'])} of the controls")
    advice = figures["advice"]
    if advice["tried"]:
        same = advice["tried"] - advice["faster"] - advice["costs_over_2_percent"]
        lines.append(
            f"recommended settings, tried {advice['tried']} times: faster {advice['faster']}, no "
            f"loss over 2 % shown {same}, loss over 2 % {advice['costs_over_2_percent']}"
        )
    if figures["median_s"] is not None:
        lines.append(f"median of {figures['median_s']:.1f} s a diagnosis")
    return lines + [f"failed: {text}" for text in figures["failed"]]


def _share(counted: Mapping[str, Any]) -> str:
    if not counted["of"]:
        return "none ran"
    return f"{counted['yes']} of {counted['of']} ({counted['share']:.0%})"
