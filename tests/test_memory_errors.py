"""Errors that say that memory ran out are told from all others, by type and by text."""

from __future__ import annotations

import pytest
import torch

from dataloading.memory_errors import ran_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 7.93 GB)"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 400 bytes."),
        OSError(12, "Nicht genügend Hauptspeicher verfügbar"),
        OSError("Caught OSError in DataLoader worker process 0.\nOSError: [Errno 12] Cannot allocate memory"),
    ],
)  # fmt: skip
def test_memory_that_ran_out_is_known(error: Exception) -> None:
    assert ran_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        OSError(28, "No space left on device"),
        ValueError("out of memory"),
        KeyError("x"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not ran_out_of_memory(error)


def test_the_allocator_itself_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)
