"""Progress bars: `tqdm.auto` in a terminal and in a notebook, silent where nobody wants one."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator

REFRESH_S = 0.2  # a bar that moves more often costs more than it tells


class TimeBar:
    """A bar over a time budget; `update()` is cheap enough to be called at every step."""

    def __init__(self, bar: object | None, total_s: float) -> None:
        self._bar = bar
        self._total_s = total_s
        self._started = time.perf_counter()
        self._next = self._started + REFRESH_S

    def update(self, note: str = "") -> None:
        """Move the bar to the time that has passed."""
        if self._bar is None or (now := time.perf_counter()) < self._next:
            return
        self._next = now + REFRESH_S
        passed = min(now - self._started, self._total_s)
        if note:
            self._bar.set_postfix_str(note, refresh=False)  # type: ignore[attr-defined]
        self._bar.n = passed  # type: ignore[attr-defined]  # adding up would round past the total
        self._bar.refresh()  # type: ignore[attr-defined]


@contextlib.contextmanager
def time_bar(total_s: float, doing: str, enabled: bool = True) -> Iterator[TimeBar]:
    """Show a progress bar over `total_s` seconds while the block runs."""
    if not enabled:
        yield TimeBar(None, total_s)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns where ipywidgets is missing, and falls back
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's monitor thread would outlive the bar

    template = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with Bar(total=total_s, desc=doing, bar_format=template, leave=False) as bar:
        yield TimeBar(bar, total_s)
