"""How much faster images arrive than with the loader of the Learn PyTorch course.

    python -m benchmarks.speedup [IMAGE_DIR] [--seconds 5] [--rounds 7] [--rivals [DIR]] [--json PATH]

On 1,000 generated photos (512 x 512 pixels, about 50 kB), or on any folder of images:

- default: `ImageFolder` with Pillow, random crop to 224, flip and `ToTensor` in the workers, as many
  of them as `os.cpu_count()` says;
- fast: `ImageFiles` with decoder="torchvision", as many workers as CPUs may be used, uint8 batches,
  converted to float here, where they arrive;
- warm cache: photos decoded and resized once (shorter side 256, the middle 256 x 256 of it kept), from
  which crop and flip are taken: pictures of less detail than those of the other arms;
- cold cache: the epoch that fills it;
- each of these with "uint8": as for an accelerator, which sorts channels and converts by itself;
- ceiling: as many processes as CPUs, which only decode, crop and flip, without a DataLoader.

All arms take turns, forwards and backwards, so that a machine that drifts hits all of them alike. In
each round every arm is set against the default of that round; the table has the median of these
ratios with its 95 % bootstrap interval. With --rivals, other packages take their turns too, with the
same decoder and crop, in an environment of their own (kept in DIR if one is named). The process that
receives has one intra-op thread, since workers have the CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from benchmarks.speedup_arms import Rate, ceiling_arm, cold_arm, default_arm, fast_arm, warm_arm
from dataloading.machine import inspect_machine
from dataloading.paired_ratios import CONFIDENCE, RESAMPLES
from dataloading.results import format_share
from dataloading.sample_images import create_sample_images
from dataloading.watchdog import one_thread

PHOTOS = 1000
DEFAULT, CEILING = "default", "ceiling"
PROMISED = {"fast": 2.0, "warm cache": 5.0, "cold cache": 0.95}
UINT8 = ", uint8"


def run_rounds(arms: dict[str, Rate], rounds: int, seconds: float) -> pd.DataFrame:
    """Let all arms take turns; a row per round, a column per arm, in samples per second.

    An arm that fails is told of and left out from then on.
    """
    arms, rows = dict(arms), []
    for number in range(rounds):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        row = {}
        for name in names:
            try:
                row[name] = arms[name](seconds)
            except (RuntimeError, OSError, ValueError, MemoryError) as error:
                if name == DEFAULT:
                    raise
                print(f"{name}: not measured: {str(error).strip().splitlines()[-1]}", flush=True)
                del arms[name]
        rows.append(row)
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row.items())
        print(f"round {number + 1}/{rounds} (samples/s): {rates}", flush=True)
    measured = [name for name in arms if name in rows[-1]]
    return pd.DataFrame(rows)[measured]


def summed_up(rates: pd.DataFrame) -> pd.DataFrame:
    """The table: a row per arm, with the median of its ratios to the default, round by round.

    Returns:
        Columns `samples_per_s` (median), `ratio`, `low`, `high` (95 % bootstrap interval of the
        median) and `ceiling_share` (median of the shares, NaN without that arm).
    """
    table = []
    for name in rates:
        ratios = (rates[name] / rates[DEFAULT]).to_numpy()
        low, high = median_interval(ratios)
        share = (rates[name] / rates[CEILING]).median() if CEILING in rates else np.nan
        figures = (rates[name].median(), float(np.median(ratios)), low, high, share)
        table.append((name, *figures))
    columns = ["arm", "samples_per_s", "ratio", "low", "high", "ceiling_share"]
    return pd.DataFrame(table, columns=columns).set_index("arm")


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Bootstrap interval of a median (percentiles)."""
    drawn = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def in_words(table: pd.DataFrame, rounds: int) -> list[str]:
    """The table as lines, with what was promised."""
    lines = [
        f"median of {rounds} rounds; ratio to the default (95 % interval); share of the ceiling"
    ]
    for name, row in table.iterrows():
        least = PROMISED.get(str(name).removesuffix(UINT8))
        promised = f"  promised >= {least:g}" if least is not None else ""
        share = "" if np.isnan(row.ceiling_share) else f"  {format_share(row.ceiling_share):>6}"
        lines.append(
            f"{name:24} {row.samples_per_s:8,.0f} samples/s  {row.ratio:5.2f} "
            f"({row.low:.2f} to {row.high:.2f}){share}{promised}"
        )
    return lines


@contextlib.contextmanager
def all_arms(root: Path, rivals: Path | None) -> Iterator[dict[str, Rate]]:
    """Every arm, ready to run."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    with contextlib.ExitStack() as stack:
        arms = {CEILING: stack.enter_context(ceiling_arm(root))}
        arms[DEFAULT] = default_arm(root, device)
        kinds = {"fast": fast_arm, "warm cache": warm_arm, "cold cache": cold_arm}
        for name, arm in kinds.items():
            arms[name] = arm(root, device, convert=True)
            arms[name + UINT8] = arm(root, device, convert=False)
        if rivals is not None:
            from benchmarks.speedup_rivals import rival_arms

            arms |= stack.enter_context(rival_arms(root, rivals))
        yield arms


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure all arms in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "image_dir", nargs="?", type=Path, help="a folder with sub-folders of images"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each arm in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--photos", type=int, default=PHOTOS, help="to generate")
    parser.add_argument(
        "--rivals", nargs="?", const="", help="other packages too; their environment"
    )
    parser.add_argument("--json", type=Path, help="where to write the rates of every round")
    options = parser.parse_args(arguments)
    print(inspect_machine())
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        root = options.image_dir or create_sample_images(
            Path(scratch, "photos"), images=options.photos
        )
        environment = Path(options.rivals or Path(scratch, "environment"))
        with all_arms(root, environment if options.rivals is not None else None) as arms:
            rates = run_rounds(arms, options.rounds, options.seconds)
    table = summed_up(rates)
    print(*in_words(table, options.rounds), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(rates.to_dict("list"), indent=1), encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
