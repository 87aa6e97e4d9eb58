"""Widgets: sliders that act once, one area that never jumps, a monitor that leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import nbformat
import pytest
from matplotlib.axes import Axes
from nbclient import NotebookClient

from dataloading import live, widgets
from dataloading.diagnosis import Diagnosis, diagnose
from dataloading.evidence import Evidence
from dataloading.live import LiveMonitor
from dataloading.machine import Machine
from dataloading.settings import LoaderSettings
from dataloading.trace import ResourceTrace
from dataloading.widgets import SettingsExplorer, StartingPoint, explore_settings, live_monitor

PROJECT = Path(__file__).resolve().parent.parent
EVIDENCE = Evidence(
    steps=60,
    num_workers=0,
    batch_size=32,
    wait_share=0.8,
    step_share=0.2,
    period_s=0.15,
    replay_step_s=0.03,
    cpu_s=0.12,
    batch_bytes=10**6,
)
KINDS_OF_BOTH_VERSIONS = {  # ipywidgets 7.7.1 (Colab) and 8 have all of these
    "VBox", "HBox", "IntSlider", "FloatSlider", "SelectionSlider", "HTML", "Output", "Button", "Image",
}  # fmt: skip


def made_diagnosis(**changes: Any) -> Diagnosis:
    return diagnose(replace(EVIDENCE, **changes), Machine(usable_cpus=8))


def monitor_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "resource-monitor"]


def all_inside(widget: Any) -> list[Any]:
    return [widget, *(w for child in getattr(widget, "children", ()) for w in all_inside(child))]


@pytest.fixture
def explorer() -> Any:
    made = SettingsExplorer(StartingPoint(made_diagnosis()))
    yield made
    made.panel.close()


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every picture that is shown, in order."""
    shown: list[bytes] = []
    monkeypatch.setattr("IPython.display.display", lambda image: shown.append(image.data))
    return shown


@pytest.fixture
def monitor() -> Any:
    made = LiveMonitor(0.1)
    yield made
    made.stop()
    made.panel.close()


# ---- Without widgets -----------------------------------------------------------------------------


def test_a_17_2_outside_a_notebook_the_figure_and_a_plain_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ax = explore_settings(made_diagnosis())
    hint = capsys.readouterr().out
    assert isinstance(ax, Axes)
    assert len(ax.figure.axes) == 2
    assert hint.count("\n") == 1
    assert "this is not a notebook" in hint
    assert "predict_dataloader(diagnosis.evidence.costs, LoaderSettings(num_workers=4)" in hint
    plt.close(ax.figure)


def test_a_17_2_without_ipywidgets_everything_still_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # importing it fails
    monkeypatch.setattr(widgets, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "RECORD_S", 0.5)
    for made, call in (
        (explore_settings(made_diagnosis()), "predict_dataloader("),
        (live_monitor(), "monitor_resources() as trace"),
    ):
        assert isinstance(made, Axes)
        plt.close(made.figure)
        assert call
    hints = capsys.readouterr().out
    assert hints.count("ipywidgets is not installed") == 2
    assert "predict_dataloader(" in hints
    assert "with monitor_resources() as trace:" in hints
    assert monitor_threads() == []


def test_a_17_2_the_plain_call_of_the_hint_works(capsys: pytest.CaptureFixture[str]) -> None:
    from dataloading.model import predict_dataloader

    diagnosis = made_diagnosis()
    plt.close(explore_settings(diagnosis).figure)
    call = capsys.readouterr().out.split("settings with ")[1].strip().rstrip(".")
    names = {"predict_dataloader": predict_dataloader, "diagnosis": diagnosis}
    assert eval(call, names | {"LoaderSettings": LoaderSettings}).samples_per_s > 0


# ---- Settings ------------------------------------------------------------------------------------


def test_a_17_3_sliders_act_when_they_are_let_go(explorer: SettingsExplorer) -> None:
    assert list(explorer.sliders) == ["num_workers", "prefetch_factor", "batch_size", "step_ms"]
    assert all(slider.continuous_update is False for slider in explorer.sliders.values())


def test_a_17_3_one_release_is_one_prediction(
    explorer: SettingsExplorer, pictures: list[bytes]
) -> None:
    explorer.sliders["num_workers"].value = 4
    assert len(pictures) == 1
    explorer.sliders["num_workers"].value = 4  # let go where it was
    assert len(pictures) == 1
    explorer.sliders["step_ms"].value = 10.0
    assert len(pictures) == 2
    assert pictures[0] != pictures[1]


def test_a_17_4_one_area_of_fixed_height_that_waits_for_the_new_picture(
    explorer: SettingsExplorer, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    areas = [w for w in all_inside(explorer.panel) if isinstance(w, ipywidgets.Output)]
    assert areas == [explorer.output]
    height = areas[0].layout.height
    assert height.endswith("px")
    cleared: list[dict[str, Any]] = []
    monkeypatch.setattr(ipywidgets.Output, "clear_output", lambda self, **how: cleared.append(how))
    for number in range(1, 11):
        explorer.sliders["num_workers"].value = number
    assert cleared == [{"wait": True}] * 10
    assert len(pictures) == 10
    assert areas[0].layout.height == height


def test_picture_fits_into_its_area(explorer: SettingsExplorer, pictures: list[bytes]) -> None:
    explorer.redraw()
    height = int.from_bytes(pictures[0][20:24], "big")  # of the PNG's header
    assert height < int(explorer.output.layout.height.removesuffix("px"))


def test_sliders_begin_with_the_present_settings() -> None:
    made = SettingsExplorer(StartingPoint(made_diagnosis(num_workers=3, prefetch_factor=4)))
    assert {name: slider.value for name, slider in made.sliders.items()} == {
        "num_workers": 3,
        "prefetch_factor": 4,
        "batch_size": 32,
        "step_ms": pytest.approx(30),
    }
    assert made.settings.num_workers == 3
    assert made.step_s == 0.03
    made.panel.close()


def test_the_line_gives_the_figures_of_the_prediction(explorer: SettingsExplorer) -> None:
    explorer.sliders["num_workers"].value = 2
    expected = explorer.start.predict(
        LoaderSettings(num_workers=2, batch_size=32, prefetch_factor=2), 0.03
    )
    line = explorer.line.value
    assert f"{expected.samples_per_s:,.0f} samples/s" in line
    low, high = expected.samples_per_s_interval
    assert low < 0.9 * expected.samples_per_s < expected.samples_per_s < 0.95 * high
    assert f"90 % interval {low:,.0f} to {high:,.0f}" in line
    assert "limited by workers" in line
    assert "training waits 50 % of the time" in line
    assert "Memory of the workers" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 100},  # more than the slider would offer
        {"batch_size": 1},
        {"prefetch_factor": 20, "num_workers": 2},
        {"replay_step_s": None, "step_s": None},
        {"replay_step_s": 0.0},
        {"replay_step_s": 7e-6, "cpu_s": 2e-6},
        {"cpu_s": 60.0},
        {"num_workers": None},
    ],
)
def test_sliders_take_unusual_loaders(changes: dict[str, Any], pictures: list[bytes]) -> None:
    made = SettingsExplorer(StartingPoint(made_diagnosis(**changes)))
    for slider in (made.sliders["step_ms"], made.sliders["num_workers"]):
        assert slider.min <= slider.value <= slider.max
        slider.value = slider.max
    assert len(pictures) >= 2
    made.panel.close()


def test_unknown_costs_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"Nothing to explore.*not a DataLoader"):
        explore_settings(made_diagnosis(cpu_s=None, reasons={"cpu_s": "not a DataLoader"}))


def test_only_classes_of_both_versions_are_used(
    explorer: SettingsExplorer, monitor: LiveMonitor
) -> None:
    used = {type(w).__name__ for p in (explorer.panel, monitor.panel) for w in all_inside(p)}
    assert used | {type(monitor.picture).__name__} <= KINDS_OF_BOTH_VERSIONS


# ---- Live monitor --------------------------------------------------------------------------------


def test_live_monitor_starts_and_stops_its_thread(monitor: LiveMonitor) -> None:
    assert monitor_threads() == []
    monitor.button.click()
    assert monitor.button.description == "Stop"
    assert len(monitor_threads()) == 1
    monitor.start()  # runs already
    assert len(monitor_threads()) == 1
    before = monitor.picture.value
    monitor.button.click()
    assert monitor_threads() == []
    assert monitor.button.description == "Start"
    assert monitor.trace.complete
    assert monitor.picture.value != before
    assert "readings" in monitor.line.value


def test_live_monitor_can_be_started_again(monitor: LiveMonitor) -> None:
    monitor.start()
    first = monitor.trace
    monitor.stop()
    monitor.start()
    assert monitor.trace is not first
    monitor.stop()
    monitor.stop()  # changes nothing
    assert monitor_threads() == []


def test_closing_the_widget_ends_the_thread() -> None:
    made = LiveMonitor(0.1)
    made.start()
    made.panel.close()
    assert monitor_threads() == []
    assert not made.running


def test_a_17_6_only_the_event_loop_touches_widgets(
    monitor: LiveMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "DRAWING_SHARE", 1.0)
    drawn_by: list[str] = []
    draw = monitor.redraw
    monkeypatch.setattr(
        LiveMonitor,
        "redraw",
        lambda self: (drawn_by.append(threading.current_thread().name), draw()),
    )

    async def watch() -> None:
        monitor.start()
        until = time.monotonic() + 20
        while len(drawn_by) < 2 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        monitor.stop()

    asyncio.run(watch())
    assert len(drawn_by) >= 2
    assert set(drawn_by) == {threading.current_thread().name}
    assert "monitor" not in monitor.trace.notes


def test_an_error_while_drawing_is_shown_and_ends_the_thread(
    monitor: LiveMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LiveMonitor) -> None:
        raise RuntimeError("no <ink>")

    async def watch() -> None:
        monitor.start()
        monkeypatch.setattr(LiveMonitor, "redraw", broken)
        until = time.monotonic() + 20
        while monitor.running and time.monotonic() < until:
            await asyncio.sleep(0.02)

    asyncio.run(watch())
    assert "RuntimeError: no &lt;ink&gt;" in monitor.line.value
    assert monitor_threads() == []
    monkeypatch.undo()


def test_a_forgotten_view_ends_by_itself(
    monitor: LiveMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LONGEST_S", -1.0)

    async def watch() -> None:
        monitor.start()
        until = time.monotonic() + 20
        while monitor.running and time.monotonic() < until:
            await asyncio.sleep(0.02)

    asyncio.run(watch())
    assert not monitor.running
    assert monitor_threads() == []


def test_live_picture_shows_the_last_minute(monitor: LiveMonitor) -> None:
    from matplotlib.figure import Figure

    trace = ResourceTrace(1.0, 8)
    for second in range(200):
        trace.rows.append(float(second), {"cpu_percent": 50.0, "main_rss_bytes": 1e9})
    monitor.trace = trace
    figure = Figure()
    monitor._draw(figure)
    for ax in figure.axes:
        assert ax.lines[0].get_xdata()[0] == 199 - live.WINDOW_S


def test_too_short_an_interval_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"interval_s=0\.01"):
        LiveMonitor(0.01)


# ---- In a kernel ---------------------------------------------------------------------------------

CELLS = {
    "show": f"""
        import sys
        sys.path.insert(0, {str(PROJECT)!r})
        from dataloading.diagnosis import diagnose
        from dataloading.evidence import Evidence
        from dataloading.machine import Machine
        from dataloading.widgets import StartingPoint, explore_settings, live_monitor
        evidence = Evidence(steps=60, num_workers=0, batch_size=32, replay_step_s=0.03, cpu_s=0.12)
        panel = explore_settings(diagnose(evidence, Machine(usable_cpus=8)))
        panel
        """,
    "redraw": """
        slider = panel.children[0].children[0]
        for number in range(1, 11):
            slider.value = number
        """,
    "fail": """
        def broken(*arguments):
            raise RuntimeError("the model is broken")
        predict, StartingPoint.predict = StartingPoint.predict, broken
        slider.value = 1
        StartingPoint.predict = predict
        """,
    "mend": "slider.value = 2",
    "start": """
        monitor = live_monitor(0.1)
        monitor.live.start()
        """,
    "watch": """
        import time
        while len(monitor.live.trace.rows.times) < 5:
            time.sleep(0.05)
        """,
    "between": "pass",
    "stop": """
        monitor.live.stop()
        import threading
        assert not [t for t in threading.enumerate() if t.name == "resource-monitor"]
        assert "monitor" not in monitor.live.trace.notes
        """,
}


@pytest.fixture(scope="module")
def executed() -> dict[str, tuple[list[Any], list[Any]]]:
    """A notebook with both widgets, run by a real kernel: of each cell its own output, and after it
    what the output area of the sliders holds."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(code)) for code in CELLS.values()]
    )
    client = NotebookClient(notebook, kernel_name="python3", timeout=60)
    areas = []

    def remember(**_: Any) -> None:
        outputs = [s for s in client.widget_state.values() if s.get("_model_name") == "OutputModel"]
        areas.append([dict(output) for output in outputs[0]["outputs"]])

    client.on_cell_executed = remember
    client.execute()
    found = zip(notebook.cells, areas, strict=True)
    return dict(zip(CELLS, ((cell.outputs, area) for cell, area in found), strict=True))


def test_a_17_4_ten_redraws_leave_one_picture(executed: Any) -> None:
    _, first = executed["show"]
    own, last = executed["redraw"]
    assert [output["output_type"] for output in first] == ["display_data"]
    assert [output["output_type"] for output in last] == ["display_data"]
    assert first[0]["data"]["image/png"] != last[0]["data"]["image/png"]
    assert own == []


def test_an_error_in_a_slider_shows_in_its_area_and_goes_with_the_next_picture(
    executed: Any,
) -> None:
    own, area = executed["fail"]
    assert own == []
    assert [output["output_type"] for output in area] == ["error"]
    assert "the model is broken" in area[0]["evalue"]
    assert [output["output_type"] for output in executed["mend"][1]] == ["display_data"]


def test_a_17_5_the_monitor_writes_into_no_cell(executed: Any) -> None:
    for cell in ("start", "watch", "between", "stop"):
        assert executed[cell][0] == [], cell
