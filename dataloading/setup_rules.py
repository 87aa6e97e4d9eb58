"""Rules about settings that do not do what they seem to."""

from __future__ import annotations

from dataloading.codes import Finding, finding
from dataloading.evidence import Evidence
from dataloading.machine import Machine


def invalid_settings_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Options that have no effect in their combination."""
    if not evidence.dropped_settings:
        return None
    named = "; ".join(f"{name}: {why}" for name, why in evidence.dropped_settings.items())
    return finding(
        "invalid-settings", f"Settings without effect: {named}.", evidence.dropped_settings
    )


def pins_memory(machine: Machine) -> bool:
    """Whether an accelerator here copies from pinned memory."""
    return any(a.kind in ("cuda", "xpu") for a in machine.accelerators)


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


SETUP_RULES = (invalid_settings_rule, pin_rule)
