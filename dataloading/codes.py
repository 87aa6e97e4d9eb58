"""The registry of finding codes: what each means, what proves it, what rules it out, what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from dataloading.results import Result, format_value

SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True)
class Code:
    """One entry of the registry."""

    group: str
    meaning: str
    proof: str
    ruled_out_by: str
    advice: str
    notebook: str


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "compute": Code(
            group="time",
            meaning="The train step takes the time; the data is there when it is asked for.",
            proof="The share of waiting is small, and a replay of one fixed batch is as slow.",
            ruled_out_by="A replay of one fixed batch that is much faster than the real run.",
            advice="Leave the loader as it is; make the model, the precision or the step faster.",
            notebook="01",
        ),
        "host-work": Code(
            group="time",
            meaning="Other work of the training process takes the time: logging, hooks, checkpoints.",
            proof="Much of a step is neither waiting nor training, or rare steps are far longer.",
            ruled_out_by="Waiting and training together fill the step.",
            advice="Do that work less often, or in a thread or process of its own.",
            notebook="01",
        ),
        "too-few-workers": Code(
            group="time",
            meaning="More workers would help: the work waits, or CPUs are free.",
            proof="Training waits, and the predicted step with more workers is shorter.",
            ruled_out_by="All usable CPUs already prepare data, or a batch costs next to nothing.",
            advice="Raise num_workers.",
            notebook="00",
        ),
        "cpu-bound": Code(
            group="time",
            meaning="All usable CPUs are busy preparing data; more workers only share them.",
            proof="Training waits, and the CPU work of a batch over the usable CPUs is the limit.",
            ruled_out_by="Samples that mostly wait, or CPUs without work.",
            advice="Make a sample cheaper, cache it, or move work to the accelerator.",
            notebook="09",
        ),
        "per-sample-overhead": Code(
            group="time",
            meaning="Samples are so small that handling each one costs more than its content.",
            proof="A sample takes microseconds, and preparing a batch is mostly calls.",
            ruled_out_by="Samples that take much longer than a few calls.",
            advice="Fetch a whole batch at once (`__getitems__`, or tensors sliced by batch), "
            "without workers.",
            notebook="00",
        ),
        "collate": Code(
            group="time",
            meaning="Putting samples together into a batch takes most of the loading time.",
            proof="Collating takes the larger part of a batch's time.",
            ruled_out_by="Fetching the samples takes longer than collating them.",
            advice="Collate smaller types (uint8), avoid padding to the longest, write into one "
            "tensor made beforehand.",
            notebook="01",
        ),
        "transfer": Code(
            group="time",
            meaning="Handing finished batches from worker to main process takes most of the time.",
            proof="Sending a batch takes longer than preparing it.",
            ruled_out_by="A loader without workers, or batches that are cheap to send.",
            advice="Send fewer, smaller tensors: uint8 instead of float32, one tensor instead of "
            "many.",
            notebook="01",
        ),
        "epoch-startup": Code(
            group="time",
            meaning="Starting workers anew takes a large part of each epoch.",
            proof="The first batch of a later epoch is late, compared with the whole epoch.",
            ruled_out_by="Long epochs, or workers that are kept.",
            advice="Set persistent_workers=True.",
            notebook="01",
        ),
        "interference": Code(
            group="time",
            meaning="Loader and training are each fast alone, and slow together.",
            proof="The real run is much slower than both arms alone.",
            ruled_out_by="One of the arms alone is as slow as the real run.",
            advice="Look for what they share: CPUs (threads of the train step), the GIL, other "
            "processes.",
            notebook="01",
        ),
        "invalid-settings": Code(
            group="setup",
            meaning="Some settings have no effect in this combination, or are refused by PyTorch.",
            proof="The option is dropped when the settings are cleaned.",
            ruled_out_by="Every setting is accepted as it is.",
            advice="Drop the option, or set what it needs.",
            notebook="00",
        ),
        "pin-without-accelerator": Code(
            group="setup",
            meaning="pin_memory=True where no accelerator can copy from pinned memory.",
            proof="pin_memory is on, and there is no CUDA or XPU device.",
            ruled_out_by="A CUDA or XPU device, or pin_memory=False.",
            advice="Set pin_memory=False here; it only costs.",
            notebook="00",
        ),
    }
)


@dataclass(frozen=True, repr=False, eq=False)
class Finding(Result):
    """One thing that was found, with the numbers that show it.

    Attributes:
        code: The entry in the registry `CODES`.
        group: `time`, `memory`, `samples` or `setup`.
        severity: `info`, `warning` or `critical`.
        message: What was found, in one sentence with figures.
        evidence: The numbers behind it, thresholds and steps included: name -> value.
        advice: What to do.
        expected_gain: Predicted rate over the present rate when the advice is taken; None where it
            cannot be computed.
    """

    code: str
    group: str
    severity: str
    message: str
    evidence: Mapping[str, Any]
    advice: str
    expected_gain: float | None = None

    derived: ClassVar[tuple[str, ...]] = ()

    def summary(self) -> str:
        """Severity, code and message."""
        return f"[{self.severity}] {self.code}: {self.message}"

    def rows(self) -> list[tuple[str, Any]]:
        """The finding and each number behind it."""
        gain = "not predicted" if self.expected_gain is None else f"{self.expected_gain:.2f}x"
        numbers = [(f"  {k}", format_value(k, v)) for k, v in self.evidence.items()]
        return [
            ("finding", f"{self.code} ({self.severity})"),
            ("meaning", CODES[self.code].meaning),
            ("message", self.message),
            *numbers,
            ("advice", self.advice),
            ("expected gain", gain),
        ]


def finding(
    code: str,
    message: str,
    evidence: Mapping[str, Any],
    *,
    severity: str = "warning",
    advice: str | None = None,
    expected_gain: float | None = None,
) -> Finding:
    """Make a finding of a registered code; its group and usual advice come from the registry.

    Raises:
        KeyError: The code is not registered.
        ValueError: The severity is unknown.
    """
    entry = CODES[code]
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r} must be one of {SEVERITIES}.")
    return Finding(
        code, entry.group, severity, message, dict(evidence), advice or entry.advice, expected_gain
    )
