"""Made-up evidence of training loops, for tests of what reads it."""

from __future__ import annotations

from dataloading.evidence import Evidence

WAITING = {"cpu_s": 0.002, "sample_wait_s": 0.160}  # a slow disk: 8 samples of 20 ms
COMPUTING = {"cpu_s": 0.160, "sample_wait_s": 0.0}  # a decoder: the same time, on a CPU


def loop(*, workers=0, wait=0.0, step=0.040, other=0.0, steps=50, **more) -> Evidence:
    """Evidence of a loop whose steps take `wait + step + other` seconds."""
    period = wait + step + other
    values = {
        "steps": steps,
        "num_workers": workers,
        "batch_size": 8,
        "pin_memory": False,
        "persistent_workers": False,
        "wait_s": wait,
        "step_s": step,
        "period_s": period,
        "wait_share": wait / period,
        "step_share": step / period,
        "other_share": other / period,
        "transfer_share": 0.0,
        "spike_share": 0.0,
        "replay_step_s": step,
        "step_cpu_s": 0.0,
        "sample_wall_s": 0.020,
        "send_s": 0.001,
        "collate_s": 0.0002,
        "batch_bytes": 1_000_000,
        "tensors_per_batch": 2,
    }
    return Evidence(**{**values, **more})
