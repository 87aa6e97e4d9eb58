"""Rules about settings that do not do what they seem to."""

from __future__ import annotations

from dataloading.codes import Finding, finding
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.pinning import PINNING_KINDS


def invalid_settings_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Options that have no effect in their combination."""
    if not evidence.dropped_settings:
        return None
    named = "; ".join(f"{name}: {why}" for name, why in evidence.dropped_settings.items())
    return finding(
        "invalid-settings", f"Settings without effect: {named}.", evidence.dropped_settings
    )


SHARE_ADVICE = (
    "Give each worker its share in __iter__: with info = get_worker_info(), yield every "
    "info.num_workers-th sample, beginning with number info.id."
)


def copies_of_a_stream(shares_out: bool | None, num_workers: int | None) -> Finding | None:
    """Several workers that each go through all samples of an iterable data set."""
    if shares_out is not False or (num_workers or 0) < 2:
        return None
    return finding(
        "duplicate-samples",
        f"Each of the {num_workers} workers goes through all samples of the iterable data set, so "
        f"every sample comes {num_workers} times an epoch.",
        {"num_workers": num_workers, "workers_share_out": False},
        severity="critical",
        advice=SHARE_ADVICE,
    )


def copies_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """An iterable data set that every worker goes through as a whole."""
    return copies_of_a_stream(evidence.shares_out, evidence.num_workers)


def shared_handle(path: str, kind: str, handles: int, severity: str) -> Finding:
    """Something open in the data set, of which forked workers get no copy of their own."""
    article = "an" if kind.startswith(("open", "HDF5", "HTTP", "LMDB", "S3")) else "a"
    harm = "they share its position" if kind.startswith("open") else "they share it"
    return finding(
        "fork-unsafe-handle",
        f"{path} is {article} {kind} that is open before the workers are forked: {harm}, and "
        "disturb one another.",
        {"path": path, "kind": kind, "handles": handles},
        severity=severity,
    )


def handle_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Open files and connections that forked workers share; the run itself went well with them."""
    if not evidence.open_handles or not evidence.open_handle or not evidence.num_workers:
        return None
    if evidence.start_method != "fork":
        return None
    kind = evidence.open_handle_kind or "handle"
    return shared_handle(evidence.open_handle, kind, evidence.open_handles, "warning")


def pins_memory(machine: Machine) -> bool:
    """Whether an accelerator here copies from pinned memory."""
    return any(a.kind in PINNING_KINDS for a in machine.accelerators)


def pin_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Pinned memory without an accelerator that uses it."""
    if not evidence.pin_memory or pins_memory(machine):
        return None
    kinds = ", ".join(a.kind for a in machine.accelerators) or "none"
    return finding(
        "pin-without-accelerator",
        f"pin_memory=True, but no accelerator here copies from pinned memory (found: {kinds}).",
        {"pin_memory": True, "accelerators": kinds},
        severity="info",
    )


def short_epoch_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """An epoch that ended before its last batch."""
    came, promised = evidence.steps_per_epoch, evidence.promised_steps
    if came is None or promised is None or came >= promised:
        return None
    return finding(
        "dropped-samples",
        f"An epoch ended after {came} of the {promised} batches that len(dataloader) promises.",
        {"steps_per_epoch": came, "promised_steps": promised},
        severity="critical",
        advice="Look for a sample that raises StopIteration (a next() without a default in "
        "__getitem__): it ends the epoch without a word. Or for a sampler with a wrong length.",
    )


SETUP_RULES = (copies_rule, short_epoch_rule, handle_rule, invalid_settings_rule, pin_rule)
