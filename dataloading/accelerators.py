"""The devices PyTorch can train on, found without starting CUDA."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from types import ModuleType

from dataloading.nvml import DRIVER_MISMATCH, NO_DEVICES, Device, Nvml, attempt
from dataloading.results import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Accelerator:
    """One device that PyTorch can train on.

    Args:
        kind: `"cuda"` (also ROCm), `"mps"` or `"xpu"`.
        name: the product's name, or "cuda device" where the driver does not tell.
        memory_bytes: its memory, or None where it is not known without starting the device.
    """

    kind: str
    name: str
    memory_bytes: int | None = None

    def __str__(self) -> str:
        memory = f" ({format_bytes(self.memory_bytes)})" if self.memory_bytes else ""
        return self.name + memory


def find_accelerators(torch: ModuleType) -> tuple[tuple[Accelerator, ...], list[str]]:
    """The devices PyTorch can use, and sentences about those it cannot.

    `torch.cuda.is_available` and `get_device_properties` start the CUDA driver, after which CUDA
    fails in forked processes. So CUDA devices are counted by `torch.cuda.device_count`, which asks
    NVML, and named through NVML, unless CUDA is in use already. Only where there is no NVML at all
    does PyTorch ask the CUDA runtime for the count.

    Args:
        torch: the module, passed in so that tests can fake it.
    """
    found, notes = cuda_accelerators(torch)
    if torch.backends.mps.is_available():
        found.append(Accelerator("mps", "Apple GPU"))  # shares the main memory
    if hasattr(torch, "xpu"):
        started = torch.xpu.is_initialized()
        for index in range(torch.xpu.device_count()):
            properties = torch.xpu.get_device_properties(index) if started else None
            found.append(
                Accelerator("xpu", properties.name, properties.total_memory)
                if properties
                else Accelerator("xpu", "xpu device")
            )
    return tuple(found), notes


def cuda_accelerators(torch: ModuleType) -> tuple[list[Accelerator], list[str]]:
    """CUDA devices (or ROCm ones) that PyTorch can use, without starting CUDA."""
    if torch.cuda.is_initialized():
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [Accelerator("cuda", p.name, p.total_memory) for p in properties], []
    with Nvml() as nvml:
        gpus = [named_by_nvml(gpu) for gpu in nvml.devices]
        obstacle = cuda_obstacle(torch, gpus)
        notes = [obstacle] if obstacle else []
        if nvml.status == DRIVER_MISMATCH or (nvml.status == NO_DEVICES and VISIBLE in os.environ):
            notes.append(f"{nvml.reason}. {nvml.advice}")
    if obstacle or not is_built_for_gpus(torch):
        return [], notes
    with warnings.catch_warnings():  # PyTorch warns where the driver is missing or does not match
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count()
    unnamed = [Accelerator("cuda", "cuda device")] * max(0, count - len(gpus))
    return gpus[:count] + unnamed, notes


def named_by_nvml(gpu: Device) -> Accelerator:
    """One of NVML's devices, with its memory where NVML tells."""
    memory = gpu.memory_total().value
    return Accelerator("cuda", gpu.name, None if memory is None else int(memory))


def is_built_for_gpus(torch: ModuleType) -> bool:
    """Whether this PyTorch has CUDA or ROCm in it."""
    return torch.version.cuda is not None or torch.version.hip is not None


def cuda_obstacle(torch: ModuleType, gpus: list[Accelerator]) -> str | None:
    """Why PyTorch cannot use the NVIDIA GPUs that NVML lists, or None. NVML must be open."""
    if not gpus:
        return None
    if not is_built_for_gpus(torch):
        names = ", ".join(map(str, gpus))
        return (
            f"{names} found, but this PyTorch ({torch.__version__}) is built without CUDA: "
            "install a CUDA build to use it."
        )
    driver_cuda = driver_cuda_major()
    if driver_cuda and torch.version.cuda and driver_cuda < int(torch.version.cuda.split(".")[0]):
        return (
            f"The NVIDIA driver supports CUDA {driver_cuda}, but this PyTorch is built for CUDA "
            f"{torch.version.cuda}: update the driver, or install a PyTorch for CUDA {driver_cuda}."
        )
    return None


def driver_cuda_major() -> int | None:
    """The CUDA version that the NVIDIA driver supports, such as 12; NVML must be open."""
    import pynvml

    version = attempt(pynvml.nvmlSystemGetCudaDriverVersion).value  # 12040 is CUDA 12.4
    return int(version) // 1000 if version else None
