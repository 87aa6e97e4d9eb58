"""Page-locked (pinned) memory: buffers that may be pinned here, and a bug of old versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.torch_version import TorchVersion

PINNING_KINDS = ("cuda", "xpu")  # accelerators that copy faster from pinned memory
BUG_SINCE, BUG_UNTIL = "1.1", "1.3"  # 1.0.1 was well, and 1.3 is again: pytorch issue 25010
HIGH_CPU_SHARE = 0.5  # with one worker, 50 to 100 % of all cores were seen busy there


def pinned_buffer(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> torch.Tensor:
    """An uninitialised CPU tensor to fill and copy from: pinned where that helps, else ordinary.

    On a Mac, `torch.empty(shape, device="cpu", pin_memory=True)` gives a tensor on the GPU in some
    versions of PyTorch, and raises an error in others (pytorch issues 181374 and 86060). So pinned
    memory is asked for only where an accelerator copies from it.

    Args:
        shape: Shape of the tensor.
        dtype: Type of its elements.
        device: Where it will be copied; None means the accelerator, if there is one.

    Returns:
        A tensor on the CPU.

    Raises:
        RuntimeError: The system gives no more page-locked memory.

    Example:
        >>> pinned_buffer((2, 3), dtype=torch.uint8, device="cpu").device
        device(type='cpu')

    Explained in: notebook 04
    """
    pin = pins_on_the_way_to(device)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pin)


def pins_on_the_way_to(device: str | torch.device | None = None) -> bool:
    """Whether copies to a device (None: to the accelerator) profit from pinned memory.

    Example:
        >>> pins_on_the_way_to("cpu"), pins_on_the_way_to("mps")
        (False, False)
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type not in PINNING_KINDS:
        return False
    return device is None or torch.device(device).type == here.type


def old_pinning_bug(torch_version: str, cpu_share: float) -> str | None:
    """What an old version of PyTorch does wrong when it pins, where that may be what is seen.

    In 1.1 and 1.2 the thread that pins uses all cores; 1.3 mended it.

    Args:
        torch_version: Version that the run used, such as `"1.2.0"` or `"2.11.0+cu128"`.
        cpu_share: Busy share of the usable CPUs, 0 to 1, in a run with `pin_memory=True`.

    Returns:
        Advice, or None for all other versions and for CPUs that are not busy.

    Example:
        >>> old_pinning_bug("2.6.0", 0.9) is None
        True

    Source: pytorch issues 25010 and 22866.

    Explained in: notebook 04
    """
    version = TorchVersion(torch_version)
    affected = torch_version[:1].isdigit() and BUG_SINCE <= version < BUG_UNTIL
    if not affected or cpu_share < HIGH_CPU_SHARE:
        return None
    return (
        f"PyTorch {torch_version} has a bug: with pin_memory=True and workers, the thread that pins "
        f"uses all CPU cores. Use {BUG_UNTIL} or later, or pin_memory=False."
    )
