"""Which errors say that memory ran out, of the host or of an accelerator."""

from __future__ import annotations

import errno
import re

import torch

# What libraries say beside `torch.OutOfMemoryError`: cuBLAS, cuDNN 8 and 9, MPS, XPU, the CPU.
NO_MEMORY_LEFT = re.compile(
    r"out[ _]of[ _](\w+[ _])?memory|(cublas|cudnn|cusolver|cusparse|cufft)\w*alloc\w*failed|"
    r"(can't|cannot) allocate memory|DefaultCPUAllocator: not enough memory",
    re.IGNORECASE,
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the host or an accelerator has no memory left.

    Example:
        >>> ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
        True
        >>> ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # its text may be translated
        return True
    told = isinstance(error, RuntimeError | OSError)  # a worker's OSError comes as text alone
    return told and NO_MEMORY_LEFT.search(str(error)) is not None
