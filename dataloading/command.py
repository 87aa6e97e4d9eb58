"""The headless main job: all four moves on a folder of images, and a report.

python helper_functions.py [IMAGE_DIR] [--step-ms 20] [--report PATH]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dataloading.comparison import compare_dataloaders
from dataloading.diagnosis import Diagnosis
from dataloading.machine import inspect_machine
from dataloading.recommendation import recommend_settings
from dataloading.results import format_seconds
from dataloading.settings import rebuild_dataloader
from dataloading.timing import TrainStep
from dataloading.train_steps import SimulatedStep, make_train_step, simulated_train_step
from dataloading.watchdog import loader_warnings_hidden

IMAGE_SIZE = 64  # the size that the Learn PyTorch course trains its TinyVGG on
SAMPLE_IMAGES = 320  # generated when no folder is given: ten batches of 32
CHECKED_IMAGES = 100  # decoded before measuring, so that a broken folder is found at once
DIAGNOSIS_SHARE = 0.45  # of the time for measuring; the rest goes to the comparison
SEED = 42
INTERRUPTED = 130  # the exit code of a command that was interrupted


def main(diagnose: Callable[..., Diagnosis], arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process: 0 done, 2 bad input, 130 interrupted.

    Args:
        diagnose: The front door's `diagnose_dataloader`.
        arguments: Command line; None takes the process's own.
    """
    options = _parse(arguments)
    try:
        run(options, diagnose)
    except KeyboardInterrupt:
        print("\nInterrupted. Nothing was left running.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        print(f"error: {reason[-1] if reason else type(error).__name__}", file=sys.stderr)
        sys.exit(2)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python helper_functions.py",
        description="Find, fix and prove the data-loading bottleneck of a folder of images.",
    )
    parser.add_argument(
        "image_dir",
        nargs="?",
        type=Path,
        help="one sub-folder of images per class, or one flat folder; photos are generated if absent",
    )
    parser.add_argument(
        "--batch-size", type=_positive(int), default=32, help="default: %(default)s"
    )
    parser.add_argument(
        "--step-ms",
        type=_positive(float),
        help="simulate an accelerator that needs so many milliseconds a batch (default: train a "
        "small CNN)",
    )
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=60.0,
        help="time for measuring (default: %(default)g); starting workers comes on top, and below 30 "
        "there are seldom enough pairs of blocks to prove anything",
    )
    parser.add_argument(
        "--report", type=Path, default=Path("report.html"), help="default: %(default)s"
    )
    return parser.parse_args(arguments)


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    convert.__name__ = "number"
    return convert


def run(options: argparse.Namespace, diagnose: Callable[..., Diagnosis]) -> None:
    """Make the four moves and write the report."""
    from dataloading.report import check_report_path, text_report, write_html_report

    report = options.report.expanduser().absolute()
    check_report_path(report)
    with tempfile.TemporaryDirectory(prefix="photos-") as scratch:
        loader, source = default_loader(options.image_dir, options.batch_size, Path(scratch))
        classes = len(loader.dataset.classes)  # type: ignore[attr-defined]
        train_step, device = make_step(options.step_ms, classes)
        about = f"{source}, in batches of {options.batch_size}; training: {_describe(train_step, device)}"
        print(f"{about}\n")
        machine = inspect_machine()
        diagnosis = diagnose(
            loader, train_step, seconds=options.seconds * DIAGNOSIS_SHARE, device=device
        )
        recommendation = recommend_settings(diagnosis)
        with loader_warnings_hidden():
            after = rebuild_dataloader(loader, recommendation.settings)
        comparison = compare_dataloaders(
            loader,
            after,
            train_step,
            seconds=options.seconds * (1 - DIAGNOSIS_SHARE),
            device=device,
        )
    print(text_report(machine, diagnosis, recommendation, comparison, about=about))
    write_html_report(report, machine, diagnosis, recommendation, comparison, about=about)
    print(f"\nReport: {report}")


def default_loader(
    image_dir: Path | None, batch_size: int, scratch: Path
) -> tuple[DataLoader, str]:
    """The loader that the Learn PyTorch course would build for these images.

    Args:
        image_dir: Folder of images; None generates photos in `scratch`.
        batch_size: Images per batch.
        scratch: An empty folder.

    Returns:
        The loader, and a line that says what it loads.

    Raises:
        FileNotFoundError: The folder is missing, or holds no images.
        OSError: Images that cannot be read; the text names them.
        ValueError: The batch is larger than the set.
    """
    from torchvision import transforms

    from dataloading.images import check_images, image_dataset
    from dataloading.sample_images import create_sample_images

    if image_dir is None:
        image_dir = create_sample_images(scratch / "photos", images=SAMPLE_IMAGES, progress=True)
        source = f"{SAMPLE_IMAGES} generated photos (give a folder to measure your own)"
    else:
        source = str(image_dir)
    steps = [transforms.Resize((IMAGE_SIZE, IMAGE_SIZE)), transforms.ToTensor()]
    dataset = image_dataset(image_dir, transforms.Compose(steps))
    if batch_size > len(dataset):
        raise ValueError(
            f"a batch of {batch_size} is larger than the set: {dataset.root} has {len(dataset)} "
            f"image(s). Expected at least one full batch; try --batch-size {len(dataset)}."
        )
    broken = check_images([path for path, _ in dataset.samples], limit=CHECKED_IMAGES)
    if broken:
        more = f" ({len(broken)} of the {CHECKED_IMAGES} checked)" if len(broken) > 1 else ""
        raise OSError(broken[0][1] + more)
    generator = torch.Generator().manual_seed(SEED)
    with loader_warnings_hidden():
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=True,
            num_workers=os.cpu_count() or 1,
            pin_memory=True,
            generator=generator,
        )
    return loader, f"{source}, {len(dataset)} images in {len(dataset.classes)} class(es)"


def make_step(step_ms: float | None, classes: int) -> tuple[TrainStep, torch.device | None]:
    """A real training step of a small CNN, or a simulated one.

    Returns:
        The step, and the device that batches are moved to (None when simulated).
    """
    if step_ms is not None:
        return simulated_train_step(step_ms / 1e3), None
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = small_cnn(classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return make_train_step(model, torch.nn.CrossEntropyLoss(), optimizer, device), device


def small_cnn(classes: int, channels: int = 10) -> torch.nn.Sequential:
    """A network of two convolution blocks, of the size of the course's TinyVGG."""
    nn = torch.nn

    def block(inputs: int) -> list[torch.nn.Module]:
        return [
            nn.Conv2d(inputs, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    head = nn.Linear(channels * (IMAGE_SIZE // 4) ** 2, max(2, classes))
    return nn.Sequential(*block(3), *block(channels), nn.Flatten(), head)


def _describe(train_step: TrainStep, device: torch.device | None) -> str:
    if isinstance(train_step, SimulatedStep):
        return f"a simulated accelerator, {format_seconds(train_step.seconds)} a step"
    return f"a small CNN on {device}"
