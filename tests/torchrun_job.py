"""A whole training script that runs alone and under torchrun.

    python tests/torchrun_job.py photos report
    torchrun --standalone --nproc_per_node=2 tests/torchrun_job.py photos report

On two machines with four processes each, the same line on both (HOST: the name of one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        tests/torchrun_job.py photos report

It uses CPUs (gloo); with GPUs take `"nccl"`, and `device = f"cuda:{os.environ['LOCAL_RANK']}"` for
the model and the batches. Each rank leaves `report/rank-N.json`: which samples each of its epochs
delivered.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from data_setup import create_dataloaders
from dataloading.distributed import rank_and_world_size

TO_TENSOR = v2.Compose([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
BATCH_SIZE = 4


def make_loaders(
    photos: Path, num_workers: int, cache: Path | None
) -> tuple[DataLoader, DataLoader]:
    """This rank's loaders, for training and for testing."""
    return create_dataloaders(
        photos, photos, TO_TENSOR, BATCH_SIZE, num_workers, seed=42, cache=cache
    )[:2]


def fingerprints(images: torch.Tensor) -> list[int]:
    """A number for each image of a batch, the same in every process."""
    return [zlib.crc32(image.numpy().tobytes()) for image in images]


def train(photos: Path, num_workers: int, epochs: int, cache: Path | None) -> dict[str, Any]:
    """Train a tiny model; returns what this rank was given."""
    rank, world_size = rank_and_world_size()
    train_loader, test_loader = make_loaders(photos, num_workers, cache)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    steps, delivered = [], []
    for _ in range(epochs):  # no set_epoch: the sampler goes on by itself
        steps.append(0)
        delivered.append([])
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps[-1] += 1
            delivered[-1] += fingerprints(images)
    tested = [number for images, _ in test_loader for number in fingerprints(images)]
    weights = [value for part in model.parameters() for value in part.flatten().tolist()]
    return {
        "rank": rank,
        "world_size": world_size,
        "process": os.getpid(),
        "steps": steps,
        "delivered": delivered,
        "tested": tested,
        "weights": weights,
        "cached": None if cache is None else test_loader.dataset.counts().cached,  # type: ignore[attr-defined]
    }


def main() -> None:
    """Join the other ranks, where there are any, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="folder with one sub-folder of images per class")
    parser.add_argument("report", type=Path, help="folder for what each rank was given")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="folder that the ranks of a machine share")
    options = parser.parse_args()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    try:
        found = train(options.photos, options.num_workers, options.epochs, options.cache)
        options.report.mkdir(parents=True, exist_ok=True)
        (options.report / f"rank-{found['rank']}.json").write_text(json.dumps(found))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
