"""The live view: a button, a thread that reads, and an event loop that draws.

The thread only fills a `ResourceTrace`. Everything that is shown is drawn by a task on the kernel's
event loop, through the values of widgets and never through printed output, so that no other cell
gets a character of it.
"""

from __future__ import annotations

import asyncio
import html
import time
from typing import TYPE_CHECKING, Any

from dataloading.monitoring import ResourceMonitor, ResourceTrace, monitor_resources
from dataloading.plot_style import WIDTH_IN, render_png, say_instead
from dataloading.results import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW_S = 60.0  # what the picture shows; the trace keeps everything
LONGEST_S = 3600.0  # a view forgotten in a closed tab ends by itself
DRAWING_SHARE = 0.1  # of one CPU at most: drawing must not slow down what is watched
LONGEST_PAUSE_S = 3.0  # the first picture takes long, as it imports what it needs
HEIGHT_IN = 5.6
RECORD_S = 1.0  # where there is no widget


class LiveMonitor:
    """A view with a Start/Stop button; `panel` is the widget to display.

    Args:
        interval_s: Seconds between two readings.

    Raises:
        ValueError: `interval_s` is too short.
    """

    def __init__(self, interval_s: float) -> None:
        import ipywidgets
        from IPython.display import display

        from dataloading.widgets import DPI, output_area

        monitor_resources(interval_s=interval_s)  # checks the interval; nothing is started
        self.interval_s = interval_s
        self.trace = ResourceTrace(interval_s, 0)
        self._dpi = DPI
        self._monitor: ResourceMonitor | None = None
        self._task: asyncio.Task[None] | None = None
        self.button = ipywidgets.Button(description="Start")
        self.button.on_click(self._clicked)
        self.line = ipywidgets.HTML(value="Readings go on while other cells run.")
        self.picture = ipywidgets.Image(
            format="png",
            value=self._png(),
            layout=ipywidgets.Layout(width=f"{WIDTH_IN * DPI:.0f}px", max_width="100%"),
        )
        self.output = output_area(HEIGHT_IN)
        with self.output:
            display(self.picture)  # once; from now on only its value changes
        self.panel = ipywidgets.VBox([ipywidgets.HBox([self.button, self.line]), self.output])
        self.panel.live = self
        self.panel.observe(self._closed, names="comm")

    @property
    def running(self) -> bool:
        """Whether readings are being taken."""
        return self._monitor is not None

    def start(self) -> None:
        """Begin to read and to draw; a view that runs already goes on."""
        if self.running:
            return
        monitor = monitor_resources(interval_s=self.interval_s)
        self.trace = monitor.start()
        self._monitor = monitor
        self.button.description = "Stop"
        self._say("Started; while a cell runs, the picture may stand still and catches up later.")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop: the picture is drawn at the end
            return
        self._task = loop.create_task(self._keep_drawing(monitor))
        self._task.add_done_callback(self._drawing_ended)

    def stop(self) -> None:
        """End the readings, wait for their thread, and draw the last picture."""
        if self._end():
            self.redraw()
            self._say(repr(self.trace))

    def redraw(self) -> None:
        """Draw the last minute once."""
        self.picture.value = self._png()
        if self.running:
            self._say(f"Running for {format_seconds(self.trace.duration_s)}.")

    def _end(self) -> bool:
        """Stop the thread; returns whether there was one."""
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return False
        monitor.stop()
        self.button.description = "Start"
        return True

    def _clicked(self, button: Any = None) -> None:
        with self.output:  # an error shows its traceback below the picture
            if self.running:
                self.stop()
            else:
                self.start()

    def _closed(self, change: Any) -> None:
        if change["new"] is None:
            self._end()

    async def _keep_drawing(self, monitor: ResourceMonitor) -> None:
        """Draw again and again until this monitor is stopped or an hour old."""
        pause_s = self.interval_s
        while True:
            await asyncio.sleep(pause_s)
            if self._monitor is not monitor:
                return
            if self.trace.duration_s > LONGEST_S:
                self.stop()
                return
            begun = time.perf_counter()
            self.redraw()
            rest_s = (time.perf_counter() - begun) / DRAWING_SHARE
            pause_s = max(self.interval_s, min(rest_s, LONGEST_PAUSE_S))

    def _drawing_ended(self, task: asyncio.Task[None]) -> None:
        """An error in the task would be lost, so it is shown."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end()
            self._say(f"Stopped by an error: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        self.line.value = html.escape(text)

    def _png(self) -> bytes:
        return render_png(self._draw, HEIGHT_IN, dpi=self._dpi)

    def _draw(self, figure: Figure) -> None:
        from dataloading.plots import plot_memory, plot_resources

        if not self.trace.rows.times:
            say_instead(figure.add_subplot(), "Live view", "nothing is recorded yet. Press Start.")
            return
        top, bottom = figure.subplots(2, 1)
        after_s = max(0.0, self.trace.duration_s - WINDOW_S)
        plot_resources(self.trace, ax=top, after_s=after_s)
        plot_memory(self.trace, ax=bottom, after_s=after_s)


def record_once(interval_s: float) -> ResourceTrace:
    """One second of readings, for where there is no widget."""
    with monitor_resources(interval_s=min(interval_s, RECORD_S / 5)) as trace:
        time.sleep(RECORD_S)
    return trace
