"""Injected faults with known causes: does the diagnosis name them?

python -m benchmarks.faults [--seeds 1] [--only F01 K2 ...]
"""
