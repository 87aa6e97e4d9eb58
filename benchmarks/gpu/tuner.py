"""The tuner against a grid of settings, on photos that are really decoded and a step on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.gpu.plan import CLASSES, SEED, NotAvailable, Plan, course_step
from benchmarks.gpu.transfer import figures_of
from dataloading.comparison import compare_dataloaders
from dataloading.cpus import usable_cpu_count
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.timing import measure_dataloader
from dataloading.train_steps import TrainStep

PHOTOS = 512
PHOTO_SIZE = 512  # pixels: about 50 kB a file
IMAGE_SIZE = 224
BATCH_SIZE = 64
BATCHES = 400  # an epoch, drawn with replacement: long enough that no run sees its end
PREFETCH = (2, 4, 8)
WORKER_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)  # of the usable CPUs
GRID_SHARE, TUNER_SHARE, PROOF_SHARE = 0.45, 0.28, 0.17  # of the time; the rest makes photos
WANTED = 0.97  # of the best setting of the grid


def measure(plan: Plan, figures: dict[str, Any]) -> None:
    """Measure the grid, let the tuner choose, and compare its choice with the grid's best.

    Args:
        plan: Where, and how long.
        figures: Filled as the measuring goes on.

    Raises:
        NotAvailable: There is no tuner, or no photos can be made.
    """
    try:
        from dataloading.tuning import tune_dataloader
    except ImportError as error:
        reason = str(error).partition(" (")[0]  # without the path of the file
        raise NotAvailable(f"the tuner cannot be imported: {reason}") from None
    with tempfile.TemporaryDirectory() as folder:
        loader = photo_loader(plan, Path(folder))
        train_step = course_step(plan)
        grid = list(settings_grid(plan))
        figures["grid"] = measure_grid(plan, loader, train_step, grid)
        best = max(figures["grid"], key=lambda row: row["samples_per_s"])
        tuned = tune_dataloader(
            loader,
            train_step,
            seconds=plan.seconds * TUNER_SHARE,
            device=plan.device,
            progress=False,
        )
        figures["tuner"] = {
            "settings": tuned.settings.summary(),
            "trials": tuned.trials,
            "predicted_samples_per_s": tuned.predicted and tuned.predicted.samples_per_s,
            "samples_per_s": tuned.samples_per_s,
            "gain": figures_of(tuned.measured),  # against the loader as it was
        }
        figures["best"] = best
        settings = grid[figures["grid"].index(best)]
        if settings.kwargs() == tuned.settings.changed(batch_size=None).kwargs():
            figures["proof"] = {"same_settings": True, "ratio": 1.0, "interval": None}
            return
        result = compare_dataloaders(
            rebuild_dataloader(loader, settings),
            rebuild_dataloader(loader, tuned.settings),
            train_step,
            seconds=plan.seconds * PROOF_SHARE,
            device=plan.device,
            progress=False,
        )
        figures["proof"] = {"same_settings": False, **figures_of(result)}


def photo_loader(plan: Plan, folder: Path) -> DataLoader:
    """A loader that decodes, shrinks and collates photos, as the course's loader is set."""
    try:
        from torchvision import transforms

        from dataloading.images import image_dataset
        from dataloading.sample_images import create_sample_images
    except ImportError as error:
        raise NotAvailable(f"no photos can be made: {error}") from None
    photos = create_sample_images(
        folder / "photos",
        images=8 if plan.dry_run else PHOTOS,
        classes=2 if plan.dry_run else CLASSES,
        size=48 if plan.dry_run else PHOTO_SIZE,
        seed=SEED,
    )
    side = plan.size if plan.dry_run else IMAGE_SIZE
    dataset = image_dataset(
        photos, transforms.Compose([transforms.Resize((side, side)), transforms.ToTensor()])
    )
    batch_size = plan.images if plan.dry_run else BATCH_SIZE
    sampler = RandomSampler(
        dataset,
        replacement=True,
        num_samples=batch_size * BATCHES,
        generator=torch.Generator().manual_seed(SEED),
    )
    pins = plan.device.type == "cuda"
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, pin_memory=pins)


def settings_grid(plan: Plan) -> Iterator[LoaderSettings]:
    """Workers x prefetch; no workers once. 22 points on 16 CPUs."""
    pins = plan.device.type == "cuda"
    cpus = usable_cpu_count()
    numbers = [1] if plan.dry_run else sorted({max(1, round(s * cpus)) for s in WORKER_SHARES})
    yield LoaderSettings(num_workers=0, pin_memory=pins)
    for workers in numbers:
        for prefetch in PREFETCH[:1] if plan.dry_run else PREFETCH:
            yield LoaderSettings(num_workers=workers, prefetch_factor=prefetch, pin_memory=pins)


def measure_grid(
    plan: Plan, loader: DataLoader, train_step: TrainStep, grid: list[LoaderSettings]
) -> list[dict[str, Any]]:
    """The rate of each setting."""
    each = plan.seconds * GRID_SHARE / len(grid)
    rows = []
    for settings in grid:
        timing = measure_dataloader(
            rebuild_dataloader(loader, settings),
            train_step,
            seconds=each,
            device=plan.device,
            progress=False,
        )
        rows.append(
            {
                "num_workers": settings.num_workers,
                "prefetch_factor": settings.prefetch_factor,
                "samples_per_s": timing.samples_per_s,
                "wait_share": timing.wait_share,
                "steps": timing.steps,
            }
        )
    return rows
