"""GPU counters through NVML, NVIDIA's management library.

Every query is guarded where it is made: "not available" is a value with a reason, never 0 and
never an exception. The bindings (`import pynvml`, from the package nvidia-ml-py) and the driver's
library are loaded only when `Nvml` is entered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

SAMPLE_BUFFER = "nvml sample buffer"  # the driver's own ring of readings, finer than polling
NVML = "nvml"
TORCH = "torch"
SOURCES = (SAMPLE_BUFFER, NVML, TORCH, "os")  # most trusted first; readings are never mixed

OK = "ok"
NO_DEVICES = "no devices"
DRIVER_MISMATCH = "driver mismatch"
NOT_AVAILABLE = "not available"
UNKNOWN = "unknown"

ADVICE = {
    DRIVER_MISMATCH: (
        "Reboot the host: its kernel module and its driver library are of different versions, "
        "mostly after an update. In a container, match the container's driver libraries to the "
        "host's driver."
    ),
    NO_DEVICES: "Unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists.",
    NOT_AVAILABLE: (
        "No GPU numbers here; everything else is measured. With an NVIDIA GPU: install the "
        "driver and `pip install nvidia-ml-py`."
    ),
}

# Words of error texts, lower case, and what they mean; the first match counts. The assertion is
# what PyTorch's allocator prints when it asks NVML while the driver was replaced under it.
ERROR_TEXTS = (
    ("driver/library version mismatch", DRIVER_MISMATCH),
    ("nvml/rm version mismatch", DRIVER_MISMATCH),
    ("nvml_success == r", DRIVER_MISMATCH),
    ("shared library not found", NOT_AVAILABLE),
    ("libnvidia-ml.so", NOT_AVAILABLE),
    ("no module named 'pynvml'", NOT_AVAILABLE),
    ("driver not loaded", NOT_AVAILABLE),
    ("found no nvidia driver", NOT_AVAILABLE),
)


@dataclass(frozen=True)
class Reading:
    """One number with its source, or None with the reason."""

    value: Any  # a number; inside this file also what NVML answered
    source: str | None = NVML
    reason: str | None = None


def classify_error_text(text: str) -> str:
    """Say what an error text means for GPU monitoring.

    Args:
        text: message of an exception, or the end of a traceback.

    Returns:
        "driver mismatch", "not available", or "unknown" where the text is about something else.

    >>> classify_error_text("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
    'driver mismatch'
    """
    lowered = text.lower()
    return next((status for words, status in ERROR_TEXTS if words in lowered), UNKNOWN)


def choose_reading(readings: Iterable[Reading]) -> Reading:
    """Pick one of several readings of the same thing: the most trusted source, never a mixture.

    Args:
        readings: at least one reading, each with its source.

    Returns:
        The reading of the source that stands first in `SOURCES` among those that have a value;
        the first reading (with its reason) if none has.

    >>> choose_reading([Reading(97, "os"), Reading(36, "nvml")])
    Reading(value=36, source='nvml', reason=None)
    """
    candidates = list(readings)
    known = [r for r in candidates if r.value is not None and r.source in SOURCES]
    return min(known, key=lambda r: SOURCES.index(str(r.source))) if known else candidates[0]


def resolve_visible(
    visible: str | None, uuids: Sequence[str | None]
) -> tuple[list[int | str], str | None]:
    """Turn CUDA_VISIBLE_DEVICES into NVML devices, in the order in which CUDA numbers them.

    As CUDA does, the list ends at the first entry that can't be resolved, and a device that is
    named twice empties it. Numbers are taken in the order of the PCI bus, which is NVML's.

    Args:
        visible: the variable's text, or None where it isn't set.
        uuids: UUID of each NVML device, None where it can't be read.

    Returns:
        Indices (or the UUID of a MIG slice, as text), and the reason why entries were left out.

    >>> resolve_visible("1,GPU-8932f937", ["GPU-8932f937-d72c", "GPU-ab12"])
    ([1, 0], None)
    >>> resolve_visible("-1", ["GPU-ab12"])
    ([], "CUDA_VISIBLE_DEVICES='-1': '-1' names no GPU of this machine")
    """
    if visible is None:
        return list(range(len(uuids))), None
    named = f"CUDA_VISIBLE_DEVICES={visible!r}"
    found: list[int | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        device = _resolve_entry(entry, uuids)
        if device is None:
            what = f"{entry!r} names no GPU of this machine" if entry else "it hides all GPUs"
            return found, f"{named}: {what}"
        if device in found:
            return [], f"{named}: {entry!r} is named twice, so that CUDA sees no GPU"
        found.append(device)
    return found, None


def _resolve_entry(entry: str, uuids: Sequence[str | None]) -> int | str | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return None


class Nvml:
    """NVML for the length of a `with` block; says what is there, and why something is not.

    Args:
        bindings: the `pynvml` module, or a stand-in; None imports it.
        visible: text of CUDA_VISIBLE_DEVICES; None reads the variable.

    Attributes:
        status: "ok", "no devices", "driver mismatch" or "not available".
        reason: why it is not "ok", in one sentence, or why only some devices are shown.
        advice: what to do about it.
        devices: the GPUs that this process can use, in the order of `cuda:0, cuda:1, ...`.

    Example:
        with Nvml() as nvml:
            for device in nvml.devices:
                print(device.name, device.utilization().value)
    """

    def __init__(self, bindings: Any = None, visible: str | None = None) -> None:
        self.status = NOT_AVAILABLE
        self.reason: str | None = "NVML was not opened"
        self.devices: list[Device] = []
        self._bindings = bindings
        self._visible = visible
        self._initialised = False

    @property
    def advice(self) -> str | None:
        """What to do where `status` is not "ok"."""
        return ADVICE.get(self.status)

    def __enter__(self) -> Nvml:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down again, once for each time it was opened; a failure changes nothing."""
        if self._initialised:
            self._initialised = False
            ask_nvml(self._bindings, "nvmlShutdown")

    def _open(self) -> None:
        if self._bindings is None:
            try:
                import pynvml
            except ImportError as error:
                self.reason = f"the package nvidia-ml-py can't be imported ({error})"
                return
            self._bindings = pynvml
        started = ask_nvml(self._bindings, "nvmlInit")
        if started.reason is not None:
            status = classify_error_text(started.reason)
            self.status = DRIVER_MISMATCH if status == DRIVER_MISMATCH else NOT_AVAILABLE
            self.reason = f"NVML can't start: {started.reason}"
            return
        self._initialised = True
        self.devices, self.reason = self._find_devices()
        self.status = OK if self.devices else NO_DEVICES

    def _find_devices(self) -> tuple[list[Device], str | None]:
        nvml = self._bindings
        count = ask_nvml(nvml, "nvmlDeviceGetCount")
        if not count.value:
            return [], count.reason or "NVML lists no GPU"
        numbers = range(int(count.value))
        handles = [ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", i).value for i in numbers]
        uuids = [as_text(ask_nvml(nvml, "nvmlDeviceGetUUID", handle).value) for handle in handles]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if self._visible is None else self._visible
        chosen, reason = resolve_visible(visible, uuids)
        devices: list[Device] = []
        for choice in chosen:
            if isinstance(choice, int):
                handle, why = handles[choice], f"NVML can't open GPU {choice}"
            else:
                answer = ask_nvml(nvml, "nvmlDeviceGetHandleByUUID", choice)
                handle, why = answer.value, f"MIG slice {choice!r}: {answer.reason}"
            if handle is None:
                return devices, why
            devices.append(Device(nvml, handle, index=len(devices)))
        if not reason and len({device.name for device in devices}) > 1:
            reason = order_warning(visible)
        return devices, reason


class Device:
    """One GPU: each method answers with a `Reading`, whatever the driver does.

    What the driver calls "not supported" is asked once and remembered.

    Args:
        bindings: the initialised `pynvml` module, or a stand-in.
        handle: NVML's handle of the device.
        index: number of the device in this process (`cuda:index`).
    """

    def __init__(self, bindings: Any, handle: Any, index: int) -> None:
        self.index = index
        self._nvml = bindings
        self._handle = handle
        self._unsupported: dict[str, str] = {}
        self._last_sample_us = 0

    @property
    def name(self) -> str:
        """Product name, or "GPU 0" where the driver's answer can't be read."""
        answer = ask_nvml(self._nvml, "nvmlDeviceGetName", self._handle)
        return as_text(answer.value) or f"GPU {self.index}"

    def utilization(self) -> Reading:
        """Percent of the driver's last window (1/6 to 1 s) in which any kernel was running."""
        return self._ask(
            "utilization", lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        )

    def new_samples(self) -> list[tuple[int, float]]:
        """Utilisation from the driver's ring buffer since the last call: (time in µs, percent).

        Empty where there is nothing new or the driver keeps no buffer. The first call gives
        what the buffer still holds from before.
        """
        answer = self._ask("samples", self._read_samples)
        return answer.value if isinstance(answer.value, list) else []

    def memory_used(self) -> Reading:
        """Bytes in use on the device, by all processes."""
        return self._ask("memory", lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def memory_total(self) -> Reading:
        """Bytes that the device has."""
        return self._ask("memory", lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def power_w(self) -> Reading:
        """Power drawn, in watt."""
        return self._ask("power", lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)

    def sm_clock_mhz(self) -> Reading:
        """Clock of the multiprocessors, in MHz."""
        return self._ask(
            "clock",
            lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM),
        )

    def process_memory_bytes(self, pids: Iterable[int]) -> Reading:
        """Bytes that these processes hold on the device.

        Args:
            pids: the processes' numbers as this process knows them.

        Returns:
            The sum; None with a reason where NVML doesn't list them (inside a container it
            lists the host's numbers), so that the caller can use PyTorch's own counters.
        """
        answer = self._ask(
            "processes", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        )
        if answer.value is None:
            return Reading(None, NVML, answer.reason)
        wanted = set(pids)
        listed: Any = answer.value
        ours = [p.usedGpuMemory for p in listed if p.pid in wanted]
        if not ours:
            seen = ", ".join(str(p.pid) for p in listed) or "no process"
            return Reading(
                None,
                NVML,
                f"NVML lists {seen}, not {', '.join(map(str, sorted(wanted)))} (inside a container "
                "it lists the host's numbers): use PyTorch's torch.cuda.memory_reserved()",
            )
        if any(used is None for used in ours):
            return Reading(None, NVML, "NVML doesn't say how much memory each process holds")
        return Reading(sum(ours))

    def _ask(self, what: str, call: Callable[[], Any]) -> Reading:
        if what in self._unsupported:
            return Reading(None, NVML, self._unsupported[what])
        answer = attempt(call)
        if answer.reason is not None and "not supported" in answer.reason.lower():
            self._unsupported[what] = f"{what}: not supported by this device or driver"
            return Reading(None, NVML, self._unsupported[what])
        return answer if answer.reason is None else Reading(None, NVML, f"{what}: {answer.reason}")

    def _read_samples(self) -> list[tuple[int, float]]:
        nvml = self._nvml
        kind, raw = nvml.nvmlDeviceGetSamples(
            self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_sample_us
        )
        field = "dVal" if kind == nvml.NVML_VALUE_TYPE_DOUBLE else "uiVal"
        samples = sorted(
            (int(sample.timeStamp), float(getattr(sample.sampleValue, field)))
            for sample in raw
            if sample.timeStamp > self._last_sample_us  # slots not yet filled have time 0
        )
        if samples:
            self._last_sample_us = samples[-1][0]
        return samples


def order_warning(visible: str | None) -> str | None:
    """Why `cuda:0` may be another GPU than NVML's first, on a machine with several models."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or (visible or "").startswith("GPU-"):
        return None
    return (
        "the GPUs differ, and CUDA puts the fastest first while NVML follows the PCI bus: set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID so that gpu0 is cuda:0"
    )


def ask_nvml(bindings: Any, name: str, *args: Any) -> Reading:
    """Call a function of the bindings by its name; a missing one is a reason too."""
    return attempt(lambda: getattr(bindings, name)(*args))


def attempt(call: Callable[[], Any]) -> Reading:
    """Make one NVML call and turn whatever goes wrong into a reason."""
    try:
        return Reading(call())
    except Exception as error:  # NVMLError, a missing function, undecodable text: all "no value"
        return Reading(None, NVML, str(error) or type(error).__name__)


def as_text(answer: Any) -> str | None:
    """NVML's text, which is bytes in some versions of the bindings and text in others.

    >>> as_text(b"NVIDIA A100"), as_text("NVIDIA A100"), as_text(b"\\xf8")
    ('NVIDIA A100', 'NVIDIA A100', None)
    """
    if isinstance(answer, bytes):
        try:
            return answer.decode()
        except UnicodeDecodeError:
            return None
    return answer if isinstance(answer, str) else None
