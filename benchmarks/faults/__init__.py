"""Injected faults with known causes: does the diagnosis name them?

python -m benchmarks.faults [--seeds 10] [--only F01 K2 ...] [--quick] [--rivals]
"""
