"""Results as words and as a table for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dataloading.results import (
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    format_share,
)

COMMAND = "`python -m benchmarks.gpu`"
Row = tuple[str, str]  # what, and what was printed


def in_words(name: str, outcome: dict[str, Any]) -> str:
    """How a part went, in one line."""
    said = outcome.get("error") or outcome.get("not_available") or "done"
    kind = "failed: " if "error" in outcome else "not available: " if said != "done" else ""
    return f"{name}: {kind}{said} ({format_seconds(outcome['seconds'])})"


def table(results: dict[str, Any]) -> str:
    """The figures as a Markdown table with the columns of the README.

    Args:
        results: What `python -m benchmarks.gpu --json PATH` wrote.

    Returns:
        A line that says on what it was measured, then the table. A part that failed, or of which
        nothing could be measured, has a row with the reason.
    """
    lines = [on_what(results), "", "| what | printed | command |", "|---|---|---|"]
    command = COMMAND
    for name, outcome in results["parts"].items():
        for what, printed in rows_of(name, outcome):
            lines.append(f"| {cell(what)} | {cell(printed)} | {command} |")
            command = "the same"
    return "\n".join(lines)


def on_what(results: dict[str, Any]) -> str:
    """The device and the versions, in one line."""
    if results["dry_run"]:
        return "Dry run on the CPU with tiny sizes: the figures mean nothing."
    return (
        f"On {results['device_name']} with {format_count(results['usable_cpus'], 'CPU')}, PyTorch "
        f"{results['torch']}; in brackets the 95 % interval."
    )


def rows_of(name: str, outcome: dict[str, Any]) -> Iterator[Row]:
    """The rows of a part, with the reason where it did not end well."""
    if outcome["figures"]:
        yield from ROWS[name](outcome["figures"])
    if "error" in outcome:
        yield name, f"failed: {outcome['error']}"
    if "not_available" in outcome:
        yield name, f"not available: {outcome['not_available']}"


def transfer_rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Copies alone, then the effect on a step."""
    for one in figures.get("copies", []):
        size = format_bytes(figures["batch_bytes"][one["dtype"]])
        yield (
            f"copying a {one['dtype']} batch ({size}), {one['way']}",
            f"{format_bytes(one['bytes_per_s'])}/s; the call returns after "
            f"{format_seconds(one['call_s'])} of {format_seconds(one['arrived_s'])}",
        )
    for one in figures.get("steps", []):
        same = one["after"] == one["before"]
        ways = f"{one['after']} against {'itself (control)' if same else one['before']}"
        yield f"small CNN, step {one['step']}: {ways}", compared(one)
    if "same_data" in figures:
        wrong = [way for way, same in figures["same_data"].items() if not same]
        yield (
            "copies that arrive as a blocking copy does",
            f"not: {', '.join(wrong)}" if wrong else "all",
        )
    for way, count in figures.get("wrong_reads", {}).items():
        yield f"copies to the host that were wrong when read: {way}", str(count)


def idle_rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Idle share by events and by the profiler."""
    for one in figures.get("loops", []):
        yield (
            f"idle GPU, {one['step']} of {format_seconds(one['step_s'])}, batches after "
            f"{format_seconds(one['wait_s'])}",
            f"events {share(one['events_idle_share'])}, profiler "
            f"{share(one['profiler_idle_share'])}, expected {share(one['expected_idle_share'])} "
            f"({format_count(one['steps'], 'step')})",
        )


def utilisation_rows(figures: dict[str, Any]) -> Iterator[Row]:
    """What was read of each known load."""
    for one in figures.get("loads", []):
        yield (
            f"utilisation of a GPU busy {share(one['busy_share'])} of each "
            f"{format_seconds(one['period_s'])}",
            f"{share(one['read_share'])} ({one['source']}, "
            f"{format_count(one['readings'], 'reading')}); polled {share(one['polled_share'])}",
        )


def pattern_rows(figures: dict[str, Any]) -> Iterator[Row]:
    """What the pattern of each load is called."""
    for one in figures.get("loads", []):
        mark = "right" if one["right"] else f"expected {one['expected']}"
        yield f"pattern of a GPU that is {one['load']}", f"{one['found']}: {mark} ({one['reason']})"


def tuner_rows(figures: dict[str, Any]) -> Iterator[Row]:
    """The tuner's choice beside the best of the grid."""
    if "proof" not in figures:
        return
    proof, best = figures["proof"], figures["best"]
    points = format_count(len(figures["grid"]), "point")
    yield (
        f"tuner's choice ({figures['tuner']['settings']}) against the best of a grid of {points} "
        f"(num_workers={best['num_workers']}, prefetch_factor={best['prefetch_factor']})",
        "the same settings" if proof["same_settings"] else compared(proof),
    )


ROWS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "transfer": transfer_rows,
    "idle": idle_rows,
    "utilisation": utilisation_rows,
    "pattern": pattern_rows,
    "tuner": tuner_rows,
}


def compared(one: dict[str, Any]) -> str:
    """A ratio with its interval and verdict."""
    if one["ratio"] is None:
        return one["verdict"]
    interval = ""
    if one["interval"] is not None:
        low, high = map(format_ratio, one["interval"])
        interval = f" ({low} to {high})"
    return f"{format_ratio(one['ratio'])} x{interval}: {one['verdict']}"


def share(value: float | None) -> str:
    """A share in percent, or that there is none."""
    return "not available" if value is None else format_share(value)


def cell(text: str) -> str:
    """Text that fits into one cell."""
    return " ".join(text.split()).replace("|", "\\|")
