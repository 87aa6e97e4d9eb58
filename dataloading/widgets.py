"""Sliders on the model, and a live view of the machine; both do without ipywidgets where it is missing.

Rules that keep widgets calm: sliders move the model, never a measurement; a slider acts when it is
let go; one output area of fixed height, whose old picture stays until the new one is there; only
what ipywidgets 7.7.1 and 8 share.
"""

from __future__ import annotations

import html
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataloading.batch_costs import BatchCosts
from dataloading.model import Prediction, predict_dataloader
from dataloading.plot_style import PAD_IN, WIDTH_IN, render_png
from dataloading.results import format_bytes, format_value
from dataloading.settings import DEFAULT_PREFETCH_FACTOR, LoaderSettings
from dataloading.workers import worker_cap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dataloading.diagnosis import Diagnosis

DPI = 100
EXPLORER_HEIGHT_IN = 7.0
SCROLLBAR_PX = 20  # room around the picture, so that no scroll bar shows
LINE_PX = 60  # two lines of text
MOST_WORKERS = 64  # of the slider
MOST_PREFETCH = 8
BATCH_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


def explore_settings(diagnosis: Diagnosis) -> Any:
    """Sliders for workers, prefetch, batch size and train step, on the model of a diagnosed loader.

    Nothing is measured or trained when a slider moves: the picture is what the model predicts.

    Args:
        diagnosis: What `diagnose_dataloader` found; it must know what a batch costs.

    Returns:
        In a notebook with ipywidgets, the widget. Elsewhere the figure for the present settings is
        drawn, a line says how to ask for others, and the Axes are returned.

    Raises:
        ValueError: The diagnosis doesn't know what a batch costs.

    Explained in: notebook 00
    """
    start = StartingPoint(diagnosis)
    missing = why_no_widgets()
    if missing is None:
        return SettingsExplorer(start).panel
    import matplotlib.pyplot as plt

    print(
        f"No sliders: {missing}. Ask for other settings with "
        "predict_dataloader(diagnosis.evidence.costs, LoaderSettings(num_workers=4), "
        f"step_s={start.step_s:.3g})."
    )
    figure = plt.figure(figsize=(WIDTH_IN, EXPLORER_HEIGHT_IN), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=PAD_IN, h_pad=PAD_IN)
    start.draw(figure, start.settings, start.step_s)
    return figure.axes[0]


def live_monitor(interval_s: float = 0.5) -> Any:
    """A button that starts and stops a view of GPU, CPU and memory as they are now.

    Readings go on while another cell runs. The picture is drawn between cells (in some notebooks
    also during them), so that it may stand still and catches up afterwards. It shows the last
    minute; `.live.trace` of the widget has everything. It stops by itself after an hour, and when
    the widget is closed.

    Args:
        interval_s: Seconds between two readings, at least 0.1.

    Returns:
        In a notebook with ipywidgets, the widget. Elsewhere one second is recorded and drawn, a
        line says how to record more, and the Axes are returned.

    Raises:
        ValueError: `interval_s` is too short.

    Explained in: notebook 01
    """
    from dataloading.live import LiveMonitor, record_once

    missing = why_no_widgets()
    if missing is None:
        return LiveMonitor(interval_s).panel
    print(
        f"No live view: {missing}. Record with `with monitor_resources() as trace:` around your "
        "code, then trace.plot()."
    )
    return record_once(interval_s).plot()


def why_no_widgets() -> str | None:
    """Why no widget can be shown here, or None where one can."""
    if not in_notebook():
        return "this is not a notebook"
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return "ipywidgets is not installed (pip install ipywidgets)"
    return None


def in_notebook() -> bool:
    """Whether this code runs in a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def output_area(height_in: float) -> Any:
    """The one output area of a widget: its height is fixed, so that the page never jumps."""
    import ipywidgets

    height = f"{height_in * DPI + SCROLLBAR_PX:.0f}px"
    return ipywidgets.Output(layout=ipywidgets.Layout(height=height, overflow="auto"))


class StartingPoint:
    """What a diagnosis gives the model: costs, train step, machine and present settings.

    Args:
        diagnosis: What was found.

    Raises:
        ValueError: The diagnosis doesn't know what a batch costs.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        evidence = diagnosis.evidence
        costs = evidence.costs
        if costs is None:
            why = evidence.reasons.get("cpu_s", "the evidence has no cpu_s or no batch_size")
            raise ValueError(
                f"Nothing to explore: what a batch costs is not known ({why}). Diagnose a DataLoader "
                "with diagnose_dataloader, or give Evidence these figures."
            )
        step_s = evidence.replay_step_s if evidence.replay_step_s is not None else evidence.step_s
        self.costs: BatchCosts = costs
        self.step_s = step_s or 0.0
        self.machine = diagnosis.machine
        self.settings = replace(evidence.settings, batch_size=costs.batch_size)
        self.measured_samples_per_s = _measured_rate(diagnosis)

    def predict(self, settings: LoaderSettings, step_s: float) -> Prediction:
        """What the model says of some settings."""
        return predict_dataloader(self.costs, settings, step_s=step_s, machine=self.machine)

    def draw(self, figure: Figure, settings: LoaderSettings, step_s: float) -> None:
        """The worker curve with the choice, and below it the run that the choice would give."""
        from dataloading.plots import plot_timeline, plot_worker_curve

        top, bottom = figure.subplots(2, 1, height_ratios=(1.0, 1.0))
        measured = None
        same = settings.batch_size == self.settings.batch_size and step_s == self.step_s
        if same and self.measured_samples_per_s is not None:
            measured = {self.settings.num_workers: self.measured_samples_per_s}
        plot_worker_curve(
            self.costs, step_s, self.machine, measured=measured, ax=top, settings=settings
        )
        plot_timeline(self.predict(settings, step_s).timeline, ax=bottom)


def _measured_rate(diagnosis: Diagnosis) -> float | None:
    from dataloading.plots import measured_rate

    return measured_rate(diagnosis)


class SettingsExplorer:
    """Four sliders, a line of figures and one picture; `panel` is the widget to display.

    Args:
        start: Where the sliders stand at first.
    """

    def __init__(self, start: StartingPoint) -> None:
        import ipywidgets

        self.start = start
        sizes = sorted({max(1, round(start.costs.batch_size * f)) for f in BATCH_FACTORS})
        common = {
            "continuous_update": False,
            "style": {"description_width": "105px"},
            "layout": ipywidgets.Layout(width="340px"),
        }
        step_ms = start.step_s * 1e3
        self.sliders = {
            "num_workers": ipywidgets.IntSlider(
                value=start.settings.num_workers,
                min=0,
                max=_most_workers(start),
                description="num_workers",
                **common,
            ),
            "prefetch_factor": ipywidgets.IntSlider(
                value=min(start.settings.prefetch_factor or DEFAULT_PREFETCH_FACTOR, MOST_PREFETCH),
                min=1,
                max=MOST_PREFETCH,
                description="prefetch_factor",
                **common,
            ),
            "batch_size": ipywidgets.SelectionSlider(
                value=start.costs.batch_size, options=sizes, description="batch_size", **common
            ),
            "step_ms": ipywidgets.FloatSlider(
                value=step_ms,
                min=0.0,
                max=max(4 * step_ms, 2e3 * start.costs.batch_s, 1.0),
                step=_slider_step(max(4 * step_ms, 2e3 * start.costs.batch_s, 1.0)),
                readout_format=".3g",
                description="train step, ms",
                **common,
            ),
        }
        for slider in self.sliders.values():
            slider.observe(self.redraw, names="value")
        self.line = ipywidgets.HTML(
            layout=ipywidgets.Layout(height=f"{LINE_PX}px", overflow="auto")
        )
        self.output = output_area(EXPLORER_HEIGHT_IN)
        controls = ipywidgets.HBox(
            list(self.sliders.values()), layout=ipywidgets.Layout(flex_flow="row wrap")
        )
        self.panel = ipywidgets.VBox([controls, self.line, self.output])
        self.redraw()

    @property
    def step_s(self) -> float:
        """Train step of the slider; exactly the measured one until it is moved."""
        step_ms = self.sliders["step_ms"].value
        moved = abs(step_ms - self.start.step_s * 1e3) > 1e-9
        return step_ms / 1e3 if moved else self.start.step_s

    @property
    def settings(self) -> LoaderSettings:
        """The present settings with what the sliders say."""
        wishes = {
            name: self.sliders[name].value
            for name in ("num_workers", "prefetch_factor", "batch_size")
        }
        return replace(self.start.settings, **wishes)

    def redraw(self, change: Any = None) -> None:
        """Predict and draw once; an error shows its traceback where the picture would be."""
        from IPython.display import Image, display

        with self.output:
            self.output.clear_output(wait=True)  # the old picture stays until the new one is there
            settings, step_s = self.settings, self.step_s
            lines = map(html.escape, prediction_lines(self.start.predict(settings, step_s)))
            self.line.value = "<br>".join(lines)
            png = render_png(
                lambda figure: self.start.draw(figure, settings, step_s),
                EXPLORER_HEIGHT_IN,
                dpi=DPI,
            )
            display(Image(data=png, format="png", width=int(WIDTH_IN * DPI)))


def prediction_lines(prediction: Prediction) -> list[str]:
    """What stands under the sliders: rate with interval and waiting, and what it needs."""
    low, high = prediction.samples_per_s_interval
    return [
        f"{format_value('samples_per_s', prediction.samples_per_s)} "
        f"(90 % interval {low:,.0f} to {high:,.0f}), limited by {prediction.limit}; "
        f"training waits {format_value('x_share', prediction.wait_share)} of the time",
        f"Memory of the workers {format_bytes(prediction.memory_bytes)}, "
        f"of it shared memory {format_bytes(prediction.shared_memory_bytes)}; "
        f"{prediction.open_files} open files",
    ]


def _most_workers(start: StartingPoint) -> int:
    machine = start.machine
    wanted = max(2 * machine.cpus_per_rank, worker_cap(machine, start.costs.cpu_share), 4)
    return max(min(wanted, MOST_WORKERS), start.settings.num_workers)


def _slider_step(most: float) -> float:
    """A round step, about a hundredth of the range."""
    rough = most / 100
    magnitude = 10.0 ** (len(f"{rough:.0f}") - 1) if rough >= 1 else 0.1 if rough >= 0.1 else 0.01
    return magnitude * max(1, round(rough / magnitude))
