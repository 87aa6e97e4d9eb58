"""Whether the recommended settings beat the Learn PyTorch default, on photos.

    python -m benchmarks.recommended [IMAGE_DIR ...] [--seconds 60]

For each folder (generated photos when none is given) and for two train steps (a small CNN, and a
simulated accelerator of 20 ms) it diagnoses the default loader, recommends, and compares, as
`python helper_functions.py` does. It prints what came out, also where nothing was gained.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from dataloading.command import default_loader, make_step
from helper_functions import (
    compare_dataloaders,
    diagnose_dataloader,
    inspect_machine,
    rebuild_dataloader,
    recommend_settings,
)


def run(folder: Path | None, step_ms: float | None, seconds: float, scratch: Path) -> None:
    """Make the four moves once and print prediction and proof."""
    loader, source = default_loader(folder, 32, scratch)
    train_step, device = make_step(step_ms, len(loader.dataset.classes))  # type: ignore[attr-defined]
    diagnosis = diagnose_dataloader(loader, train_step, seconds=seconds / 2, device=device)
    recommendation = recommend_settings(diagnosis)
    after = rebuild_dataloader(loader, recommendation.settings)
    comparison = compare_dataloaders(loader, after, train_step, seconds=seconds, device=device)
    print(f"\n{source}; train step: {'small CNN' if step_ms is None else f'{step_ms:g} ms'}")
    print(f"  {diagnosis}\n  {recommendation}\n  {comparison}", flush=True)


def main() -> None:
    """Run all folders with both steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, metavar="IMAGE_DIR")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each comparison")
    options = parser.parse_args()
    print(inspect_machine())
    for folder in options.folders or [None]:
        for step_ms in (None, 20.0):
            with tempfile.TemporaryDirectory() as scratch:
                run(folder, step_ms, options.seconds, Path(scratch))


if __name__ == "__main__":
    main()
