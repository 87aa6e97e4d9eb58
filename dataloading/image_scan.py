"""What is in a set of image files: which cannot be read, and which are not plain RGB."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloading.arguments import check_int
from dataloading.image_headers import open_header
from dataloading.image_problems import BAD, HANDLING, ODD, Seen, look_at
from dataloading.images import existing_folder, images_below, spread_evenly
from dataloading.results import Result, format_count

if TYPE_CHECKING:
    import pandas as pd

SLOW = 10.0  # times the median
LEAST_EXTRA_S = 1e-3  # a smaller difference may be noise, and is not worth a word
FEWEST_TIMES = 4  # fewer have no median to compare with
RETIMED = 50  # the slowest so many are timed again
REPEATS = 3
SHOWN = 3  # names in a notebook table


COLUMNS = (
    *("path", "problem", "handling", "mode", "width", "height"),
    *("bytes", "orientation", "decode_s"),
)
WHOLE_NUMBERS = ("width", "height", "bytes", "orientation")


@dataclass(frozen=True, repr=False, eq=False)
class ImageScan(Result):
    """What was found in image files.

    Attributes:
        table: DataFrame with a row per file: `path`, `problem` (empty where there is none),
            `handling`, `mode`, `width`, `height`, `bytes`, `orientation` (the tag, 1 to 8) and
            `decode_s` (seconds in Pillow; NaN where it was not decoded).
        bad: `(path, reason)` of each file that gives no sample.
        counts: Files of each Pillow mode.
        problems: Files of each problem; one file may have several.
        outliers: `(path, times the median)` of each file that takes at least ten times the median
            to decode, also when tried again.
    """

    table: pd.DataFrame
    bad: tuple[tuple[str, str], ...]
    counts: dict[str, int]
    problems: dict[str, int]
    outliers: tuple[tuple[str, float], ...] = ()

    def summary(self) -> str:
        """Good and bad files, and what is odd about the good ones."""
        files = len(self.table)
        text = f"{format_count(files, 'file')}: {files - len(self.bad)} good, {len(self.bad)} bad"
        if bad := self._tally(BAD):
            text += f" ({bad})"
        if odd := self._tally(ODD):
            text += f"; to know: {odd}"
        if self.outliers:
            text += f"; {len(self.outliers)} slow to decode"
        return text

    def rows(self) -> list[tuple[str, Any]]:
        """Each problem with its files and its handling."""
        modes = ", ".join(f"{count} {mode}" for mode, count in self.counts.items())
        found = [("modes", modes or "none")]
        for problem, count in self.problems.items():
            has = self.table["problem"].str.split(", ").map(lambda all_of, p=problem: p in all_of)
            names = _named(self.table.loc[has, "path"].tolist())
            found.append((problem, f"{format_count(count, 'file')} ({names}): {HANDLING[problem]}"))
        if self.outliers:
            names = _named([path for path, _ in self.outliers])
            text = f"{format_count(len(self.outliers), 'file')} ({names}): make them smaller"
            found.append(("slow to decode", text))
        return found

    def _tally(self, kinds: dict[str, str]) -> str:
        return ", ".join(
            f"{n} {problem}" for problem, n in self.problems.items() if problem in kinds
        )


def scan_images(
    root_or_paths: Any,
    *,
    limit: int | None = None,
    max_pixels: int | None = None,
    decode: bool = True,
    progress: bool = True,
) -> ImageScan:
    """Look through image files before a training run does, and say how to handle what is odd.

    Finds files that give no sample (empty, no image, truncated, damaged, far too large), and files
    that load but are not plain RGB (16 bits, palette, CMYK, grey, transparency, orientation tag,
    animated, wrong extension, broken metadata, very large). Very large ones are told from their
    headers and not decoded. No setting of Pillow's is changed.

    Args:
        root_or_paths: A folder, with all folders below it; a file; files; or a data set with
            `samples`, such as an `ImageFolder`.
        limit: Look at no more than so many files, spread evenly over all; None looks at every file.
        max_pixels: Above this a file is very large, above twice that far too large. None takes
            Pillow's own limit, `Image.MAX_IMAGE_PIXELS` (89,478,485 pixels).
        decode: Decode each file; False reads headers only, and misses most truncated files.
        progress: Show a progress bar.

    Returns:
        An `ImageScan`.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no images.
        TypeError: What was given is neither a folder nor files.
        ValueError: `limit` or `max_pixels` is below 1.

    Example:
        >>> scan_images("photos/train").summary()  # doctest: +SKIP
        '10 files: 9 good, 1 bad (1 truncated)'

    Explained in: notebook 00
    """
    from PIL import Image

    check_int("max_pixels", max_pixels, least=1, optional=True)
    paths = spread_evenly(_files(root_or_paths), limit)
    most = Image.MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
    with _file_bar(len(paths), progress) as advance:
        seen = []
        for path in paths:
            seen.append(look_at(path, most, decode))
            advance()
        outliers = _outliers(seen)
    return _summed_up(seen, outliers)


def _files(root_or_paths: Any) -> list[str]:
    """The paths of all files that are meant."""
    if isinstance(root_or_paths, str | os.PathLike):
        path = Path(root_or_paths)
        if path.is_file():
            return [str(path)]
        folder = existing_folder(path)
        if found := list(images_below(folder)):
            return found
        raise FileNotFoundError(f"No images found in {folder} and the folders below it.")
    samples = getattr(root_or_paths, "samples", None)
    if samples is not None:
        return [str(sample[0]) for sample in samples]
    if not isinstance(root_or_paths, Iterable):
        raise TypeError(
            "Expected a folder, image files, or a data set with .samples, got "
            f"{type(root_or_paths).__name__}."
        )
    paths = list(root_or_paths)
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Expected paths of image files, got {type(path).__name__}.")
    return [str(path) for path in paths]


def _outliers(seen: list[Seen]) -> tuple[tuple[str, float], ...]:
    """The files that take far longer to decode than the median, also when tried again."""
    timed = [one for one in seen if one.decode_s is not None]
    if len(timed) < FEWEST_TIMES:
        return ()
    median = statistics.median(one.decode_s for one in timed if one.decode_s is not None)
    slowest = sorted(timed, key=lambda one: one.decode_s or 0.0, reverse=True)[:RETIMED]
    found = []
    for one in slowest:
        if not is_outlier(one.decode_s, median):
            break
        one.decode_s = min(one.decode_s or 0.0, *_decode_again(one.path))
        if is_outlier(one.decode_s, median):
            found.append((one.path, one.decode_s / max(median, 1e-9)))
    return tuple(found)


def is_outlier(decode_s: float | None, median_s: float) -> bool:
    """Whether a file takes far longer than the median, and by more than noise.

    Example:
        >>> is_outlier(0.02, 0.001), is_outlier(0.005, 0.001), is_outlier(0.0002, 0.00001)
        (True, False, False)
    """
    if decode_s is None:
        return False
    return decode_s >= SLOW * median_s and decode_s - median_s >= LEAST_EXTRA_S


def _decode_again(path: str) -> Iterator[float]:
    """Seconds of a few more tries; none where the file is gone by now."""
    try:
        content = Path(path).read_bytes()
        for _ in range(REPEATS):
            with open_header(io.BytesIO(content), path) as image:
                began = time.perf_counter()
                image.load()
                yield time.perf_counter() - began
    except OSError:
        return


def _summed_up(seen: list[Seen], outliers: tuple[tuple[str, float], ...]) -> ImageScan:
    import pandas as pd

    table = pd.DataFrame([_row(one) for one in seen], columns=list(COLUMNS))
    table = table.astype(dict.fromkeys(WHOLE_NUMBERS, "Int64") | {"decode_s": "float64"})
    found = Counter(problem for one in seen for problem in one.problems)
    return ImageScan(
        table=table,
        bad=tuple((one.path, one.reason) for one in seen if one.reason),
        counts=dict(Counter(one.mode for one in seen if one.mode is not None).most_common()),
        problems={problem: found[problem] for problem in HANDLING if problem in found},
        outliers=outliers,
    )


def _row(seen: Seen) -> tuple[Any, ...]:
    handling = "; ".join(HANDLING[problem] for problem in seen.problems)
    return (
        *(seen.path, ", ".join(seen.problems), handling, seen.mode, seen.width, seen.height),
        *(seen.size_bytes, seen.orientation, seen.decode_s),
    )


def _named(paths: list[str]) -> str:
    names = ", ".join(os.path.basename(path) for path in paths[:SHOWN])
    return f"{names} and {len(paths) - SHOWN} more" if len(paths) > SHOWN else names


@contextlib.contextmanager
def _file_bar(total: int, enabled: bool) -> Iterator[Any]:
    """A progress bar over files; yields the function that moves it by one."""
    if not enabled:
        yield lambda: None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns where ipywidgets is missing, and falls back
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's monitor thread would outlive the bar

    with Bar(total=total, desc="Scanning images", unit="file", leave=False) as bar:
        yield bar.update
