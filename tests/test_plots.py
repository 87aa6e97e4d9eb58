"""Pictures, on made-up results: what is drawn, what it says, and that nothing else is touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from torch.utils.data import DataLoader

from dataloading import plots
from dataloading.batch_costs import BatchCosts
from dataloading.batch_sizes import BatchSizeSearch
from dataloading.comparison import Comparison, judge_pairs
from dataloading.diagnosis import Diagnosis, diagnose
from dataloading.evidence import Evidence
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine
from dataloading.model import simulate_timeline
from dataloading.plot_style import KINDS, render_png
from dataloading.profiling import SampleProfile
from dataloading.regression import RunTrend
from dataloading.scaling import ScalingFit
from dataloading.settings import LoaderSettings
from dataloading.trace import ResourceTrace
from dataloading.trials import Trial, trial_table
from dataloading.tuning import TuningResult

MACHINE = Machine(usable_cpus=8)
COSTS = BatchCosts(
    cpu_s=0.1, wait_s=0.02, send_s=0.002, batch_size=32, batch_bytes=10**6, tensors=2
)


@pytest.fixture(autouse=True)
def no_figure_left() -> Iterator[None]:
    yield
    plt.close("all")


def made_timing(wait_s: float = 0.12, step_s: float = 0.03, steps: int = 20) -> LoaderTiming:
    return LoaderTiming(
        wait_s=np.full(steps, wait_s),
        transfer_s=np.full(steps, 0.004),
        step_s=np.full(steps, step_s),
        other_s=np.full(steps, 0.002),
        samples=np.full(steps, 32),
    )


def made_profile(stages: dict[str, tuple[float, float]]) -> SampleProfile:
    """Stages as name -> (wall seconds, CPU seconds)."""
    table = pd.DataFrame(
        [(name, wall, cpu, wall - cpu) for name, (wall, cpu) in stages.items()],
        columns=["stage", "wall_s", "cpu_s", "wait_s"],
    )
    table["share"] = table["wall_s"] / table["wall_s"].sum()
    return SampleProfile(
        stages=table,
        sample_wall_s=0.003,
        sample_cpu_s=0.002,
        collate_s=0.004,
        batch_size=32,
        batch_bytes=10**6,
        tensors_per_batch=2,
        transfer_s=None,
        slow_samples=pd.DataFrame(),
        samples=64,
        wall_s=np.full(64, 0.003),
    )


def made_diagnosis(**changes: Any) -> Diagnosis:
    evidence = Evidence(
        steps=60,
        num_workers=0,
        batch_size=32,
        wait_share=0.8,
        step_share=0.2,
        other_share=0.0,
        period_s=0.16,
        wait_s=0.12,
        step_s=0.03,
        replay_step_s=0.04,
        alone_period_s=0.128,
        cpu_s=0.12,
        sample_wall_s=0.004,
    )
    return diagnose(replace(evidence, **changes), MACHINE)


def made_pairs(ratio: float, pairs: int = 8) -> pd.DataFrame:
    before = 200 + np.arange(pairs) % 3
    after = before * ratio * (1 + 0.002 * (np.arange(pairs) % 4 - 1.5))
    return pd.DataFrame(
        {"before_samples_per_s": before, "after_samples_per_s": after, "ratio": after / before}
    )


def made_trace(**columns: Any) -> ResourceTrace:
    """A trace with a row every 0.1 s; each column is an array of equal length."""
    trace = ResourceTrace(0.1, 8)
    trace.memory_label = "pss"
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        trace.rows.append(number * 0.1, dict(zip(columns, values, strict=True)))
    return trace


def made_fit(exponent: float, interval: tuple[float, float] = (1.3, 1.5)) -> ScalingFit:
    sizes = np.array([1000, 2000, 4000, 8000, 16000])
    return ScalingFit(exponent, interval, sizes, 0.1 * (sizes / 1000) ** exponent, ())


def sawtooth(teeth: int = 15, period: int = 12) -> np.ndarray:
    return np.tile(np.r_[np.full(period // 2, 90.0), np.full(period - period // 2, 5.0)], teeth)


def texts(ax: Any) -> str:
    """All that is written in a picture."""
    found = [ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()]
    found += [t.get_text() for t in (*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels())]
    if ax.get_legend() is not None:
        found += [t.get_text() for t in ax.get_legend().get_texts()]
    return "\n".join(found)


def made_size_search() -> BatchSizeSearch:
    sizes = pd.DataFrame(
        {
            "batch_size": [32, 64, 128],
            "status": ["passed", "passed", "out of memory"],
            "samples_per_s": [900.0, 1100.0, np.nan],
            "peak_memory_bytes": [1e8, 2e8, np.nan],
            "chosen": [False, True, False],
        }
    )
    return BatchSizeSearch(64, 64, 32, (100, 50), sizes)


def made_trend() -> RunTrend:
    runs = pd.DataFrame(
        {
            "time_utc": pd.date_range("2026-01-01", periods=5, tz="UTC"),
            "samples_per_s": [100.0, 102.0, 99.0, 101.0, 80.0],
            "in_baseline": [True] * 4 + [False],
        }
    )
    return RunTrend("slower", 0.8, (0.77, 0.83), runs)


def made_tuning() -> TuningResult:
    trials = [
        Trial(LoaderSettings(num_workers=0), 90.0, rates=[88.0, 91.0], steps=40, status="tried"),
        Trial(LoaderSettings(num_workers=2), 180.0, rates=[175.0, 172.0], steps=60, status="tried"),
        Trial(LoaderSettings(num_workers=2, prefetch_factor=4), 180.0, rates=[171.0], steps=9),
        Trial(LoaderSettings(num_workers=8), 240.0, status="refused", reason="needs memory"),
    ]
    loader = DataLoader(range(4))
    return TuningResult(
        settings=trials[1].settings,
        dataloader=loader,
        trials=trial_table(trials, trials[1].settings),
        predicted=None,
        measured=judge_pairs(made_pairs(2.0)),
        samples_per_s=173.5,
        searched_by="model",
    )


def bars(ax: Any) -> list[Any]:
    from matplotlib.patches import Rectangle

    return [p for p in ax.patches if isinstance(p, Rectangle) and p.get_width() > 0]


def all_pictures() -> dict[str, Any]:
    """Every picture there is, as functions of an Axes."""
    timeline = simulate_timeline(COSTS, LoaderSettings(num_workers=2), step_s=0.04, machine=MACHINE)
    trace = made_trace(
        gpu0_utilization=sawtooth(),
        cpu_percent_of_usable=np.full(180, 50.0),
        memory_bytes=np.linspace(1e9, 2e9, 180),
        main_pss_bytes=np.full(180, 5e8),
        workers_pss_bytes=np.linspace(5e8, 1.5e9, 180),
        shared_memory_used_bytes=np.full(180, 1e8),
    )
    return {
        "plot_time_split": lambda ax: plots.plot_time_split(made_timing(), ax=ax),
        "plot_waits": lambda ax: plots.plot_waits(made_timing(), ax=ax),
        "plot_sample_stages": lambda ax: plots.plot_sample_stages(
            made_profile({"read": (0.001, 0.0002), "decode": (0.002, 0.002)}), ax=ax
        ),
        "plot_ceilings": lambda ax: plots.plot_ceilings(made_diagnosis(), ax=ax),
        "plot_batch_sizes": lambda ax: plots.plot_batch_sizes(made_size_search(), ax=ax),
        "plot_comparison": lambda ax: plots.plot_comparison(judge_pairs(made_pairs(2.0)), ax=ax),
        "plot_gpu_curve": lambda ax: plots.plot_gpu_curve(trace, ax=ax),
        "plot_history": lambda ax: plots.plot_history(made_trend(), ax=ax),
        "plot_memory": lambda ax: plots.plot_memory(trace, ax=ax),
        "plot_resources": lambda ax: plots.plot_resources(trace, ax=ax),
        "plot_scaling": lambda ax: plots.plot_scaling(made_fit(1.4), ax=ax),
        "plot_timeline": lambda ax: plots.plot_timeline(timeline, ax=ax),
        "plot_tuning": lambda ax: plots.plot_tuning(made_tuning(), ax=ax),
        "plot_worker_curve": lambda ax: plots.plot_worker_curve(COSTS, 0.03, MACHINE, ax=ax),
    }


# ---- What holds for every picture ----------------------------------------------------------------


def test_every_plot_function_is_tried_here() -> None:
    assert set(all_pictures()) == {name for name in plots.__all__ if name.startswith("plot_")}


@pytest.mark.parametrize("name", sorted(all_pictures()))
def test_draws_on_the_given_axes_and_sets_nothing_global(name: str) -> None:
    before = dict(mpl.rcParams)
    figure, (ax, other) = plt.subplots(2, 1)
    returned = all_pictures()[name](ax)
    figure.canvas.draw()
    assert returned is ax
    assert plt.get_fignums() == [figure.number]
    assert not other.has_data()
    assert dict(mpl.rcParams) == before
    assert ax.get_title(loc="left")


@pytest.mark.parametrize("name", sorted(all_pictures()))
def test_makes_one_white_figure_of_readable_width(name: str) -> None:
    ax = all_pictures()[name](None)
    assert plt.get_fignums() == [ax.figure.number]
    assert 650 <= ax.figure.get_figwidth() * 100 <= 750
    assert ax.figure.get_facecolor() == (1, 1, 1, 1)


def shown_texts(ax: Any) -> list[Any]:
    """Every text that is painted: tick labels outside the limits are not."""
    found = [*ax.texts, ax._left_title, ax.xaxis.label, ax.yaxis.label]
    found += ax.get_legend().get_texts() if ax.get_legend() is not None else []
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        low, high = sorted(limits)
        found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_text()]


def crowded_pictures() -> dict[str, Any]:
    """Pictures with much to say."""
    many = [
        "read",
        "decode",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ColorJitter",
        "ToTensor",
    ]
    stages = dict.fromkeys([*many, "Normalize", "rest of __getitem__", "collate"], (0.0004, 0.0003))
    all_parts = made_diagnosis(
        num_workers=2, send_s=0.01, epoch_restart_s=0.5, steps_per_epoch=40, period_s=0.03
    )
    aa = made_pairs(1.0, 14)
    aa["ratio"] = [1.01, 0.99] * 7
    return {
        "three runs": lambda: plots.plot_time_split(
            {
                n: made_timing(wait_s=w)
                for n, w in (("as it is", 0.12), ("tuned", 0.01), ("cached", 0))
            }
        ),
        "even stages": lambda: plots.plot_sample_stages(made_profile(stages)),
        "one stage": lambda: plots.plot_sample_stages(
            made_profile({"rest of __getitem__": (0.0016, 0.001), "collate": (8e-6, 8e-6)})
        ),
        "all ceilings": lambda: plots.plot_ceilings(all_parts),
        "rate unknown": lambda: plots.plot_ceilings(made_diagnosis(period_s=None)),
        "equal loaders": lambda: plots.plot_comparison(judge_pairs(aa)),
        "slower": lambda: plots.plot_comparison(judge_pairs(made_pairs(0.4, 14))),
        "one process": lambda: plots.plot_timeline(
            simulate_timeline(COSTS, LoaderSettings(), step_s=0.06, machine=MACHINE)
        ),
        "twelve workers": lambda: plots.plot_timeline(
            simulate_timeline(
                COSTS, LoaderSettings(num_workers=12), step_s=0.01, machine=Machine(usable_cpus=16)
            )
        ),
        "all marks": lambda: plots.plot_worker_curve(
            COSTS, 0.03, MACHINE, {0: 210.0}, settings=LoaderSettings(num_workers=8)
        ),
        "many workers": lambda: plots.plot_worker_curve(
            replace(COSTS, wait_s=2.0), 0.03, Machine(usable_cpus=16)
        ),
        "no growth": lambda: plots.plot_scaling(
            replace(made_fit(0.0), seconds_per_epoch=np.array([1.0, 1.001, 1.0, 0.999, 1.0]))
        ),
        "close sizes": lambda: plots.plot_scaling(
            replace(made_fit(1.0), sizes=np.array([1000, 1010, 1500, 9000, 16000]))
        ),
        "nothing": lambda: plots.plot_resources(ResourceTrace(0.1, 8)),
    }


PICTURES = {name: (lambda draw=draw: draw(None)) for name, draw in all_pictures().items()}


@pytest.mark.parametrize("name", [*PICTURES, *crowded_pictures()])
def test_texts_stay_inside_the_figure_and_apart_from_each_other(name: str) -> None:
    ax = (PICTURES | crowded_pictures())[name]()
    figure = ax.figure
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(ax)]
    assert len(boxes) >= 2
    for text, box in boxes:
        inside = (box.x0 >= 0, box.y0 >= 0, box.x1 <= 720, box.y1 <= figure.bbox.height)
        assert all(inside), f"{text!r} leaves the figure"
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(wide, high) <= 1, f"{one!r} and {two!r} overlap"


def test_kinds_of_time_differ_in_grey_and_in_hatch() -> None:
    from matplotlib.colors import to_rgb

    def lightness(color: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)
        ]
        return 116 * float(np.dot((0.2126, 0.7152, 0.0722), linear)) ** (1 / 3) - 16

    for one, two in itertools.combinations(KINDS, 2):
        first, second = KINDS[one], KINDS[two]
        apart = abs(lightness(first.color) - lightness(second.color))
        assert apart >= 5 or first.hatch != second.hatch, f"{one} and {two}"
    four = sorted(lightness(KINDS[kind].color) for kind in ("wait", "transfer", "step", "other"))
    assert min(np.diff(four)) > 8, "the four parts of a step must differ in grey alone"
    assert len({KINDS[kind].hatch for kind in ("wait", "transfer", "step", "other")}) == 4


def test_text_is_light_on_a_dark_figure() -> None:
    figure, ax = plt.subplots(facecolor="black")
    plots.plot_time_split(made_timing(), ax=ax)
    ink = mpl.colors.to_rgb(ax._left_title.get_color())
    assert min(ink) > 0.8
    assert figure.get_facecolor() == ax.get_facecolor()


def test_png_needs_no_pyplot_figure() -> None:
    png = render_png(
        lambda figure: plots.plot_waits(made_timing(), ax=figure.add_subplot()), 3, dpi=50
    )
    assert png.startswith(b"\x89PNG")
    assert plt.get_fignums() == []


# ---- Time split ----------------------------------------------------------------------------------


def test_time_split_shows_each_part_in_its_colour_and_adds_up() -> None:
    ax = plots.plot_time_split(made_timing())
    parts = bars(ax)
    assert [bar.get_hatch() or "" for bar in parts] == [
        KINDS[k].hatch for k in ("wait", "transfer", "step", "other")
    ]
    assert [bar.get_width() for bar in parts] == pytest.approx([120, 4, 30, 2])
    assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(156)
    assert "ms" in ax.get_xlabel()
    assert "77 %" in ax.get_title(loc="left")
    assert "205 samples/s" in texts(ax)


def test_time_split_of_several_runs_names_them() -> None:
    ax = plots.plot_time_split({"before": made_timing(), "after": made_timing(wait_s=0.0)})
    assert [t.get_text() for t in ax.get_yticklabels()] == ["before", "after"]
    assert len({round(bar.get_y(), 3) for bar in bars(ax)}) == 2


def test_time_split_without_steps_says_so() -> None:
    assert "no steady step" in texts(plots.plot_time_split(made_timing(steps=0)))
    with pytest.raises(ValueError, match="timing is empty"):
        plots.plot_time_split({})


def test_time_split_chooses_the_unit() -> None:
    slow = made_timing(wait_s=2.0)
    assert plots.plot_time_split(slow).get_xlabel().endswith(" s")


# ---- Waits ---------------------------------------------------------------------------------------


def test_waits_show_median_and_95_percent() -> None:
    waits = np.r_[np.full(18, 0.010), 0.100, 0.100]
    timing = replace(made_timing(), wait_s=waits)
    ax = plots.plot_waits(timing)
    heights = [line.get_ydata()[0] for line in ax.lines]
    assert heights == pytest.approx([10.0, 100.0])
    assert "median 10 ms" in texts(ax)
    assert ax.get_ylim()[1] >= 100
    assert "ms" in ax.get_ylabel()


@pytest.mark.parametrize("waits", [np.zeros(5), np.array([np.nan, 0.01, 0.02])])
def test_waits_of_zero_and_gaps_are_drawn(waits: np.ndarray) -> None:
    ax = plots.plot_waits(replace(made_timing(), wait_s=waits))
    ax.figure.canvas.draw()
    assert "median" in texts(ax)


def test_no_waits_at_all_says_so() -> None:
    assert "Not available" in texts(plots.plot_waits(made_timing(steps=0)))


# ---- Stages of a sample --------------------------------------------------------------------------


def test_sample_stages_follow_one_another_and_tell_waiting_from_working() -> None:
    ax = plots.plot_sample_stages(
        made_profile({"read": (0.002, 0.0005), "decode": (0.001, 0.001), "collate": (0.001, 0.001)})
    )
    drawn = bars(ax)
    ends = {round(b.get_y(), 2): round(b.get_x() + b.get_width(), 6) for b in drawn}
    assert list(ends.values()) == pytest.approx([2.0, 3.0, 4.0])
    waits = [b for b in drawn if b.get_hatch() == KINDS["sample_wait"].hatch]
    assert [b.get_width() for b in waits] == pytest.approx([1.5])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["read", "decode", "collate"]
    assert "50 %" in texts(ax)
    assert "most of it: read" in ax.get_title(loc="left")


def test_sample_stages_leave_out_what_is_not_a_number() -> None:
    ax = plots.plot_sample_stages(
        made_profile({"read": (np.nan, np.nan), "decode": (0.001, np.nan)})
    )
    assert [t.get_text() for t in ax.get_yticklabels()] == ["decode"]
    nothing = plots.plot_sample_stages(made_profile({"read": (np.nan, np.nan)}))
    assert "no stage was measured" in texts(nothing)


# ---- Ceilings ------------------------------------------------------------------------------------


def test_ceilings_mark_the_lowest_and_the_measured_rate() -> None:
    ax = plots.plot_ceilings(made_diagnosis())  # loader 250, train step 800, CPUs 2,133 samples/s
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == ["loader alone", "train step alone", "all usable CPUs"]
    assert [t.get_fontweight() for t in ax.get_yticklabels()] == ["bold", "normal", "normal"]
    (line,) = ax.lines
    assert line.get_xdata()[0] == pytest.approx(200)
    assert "measured: 200 samples/s" in texts(ax)
    assert "250 samples/s" in texts(ax)
    assert "Lowest ceiling: loader alone" in texts(ax)
    assert "samples/s" in ax.get_xlabel()


def test_ceilings_cut_off_what_is_far_above_with_its_value() -> None:
    ax = plots.plot_ceilings(made_diagnosis())
    assert "→ 2,133 samples/s" in texts(ax)
    assert max(bar.get_width() for bar in bars(ax)) < 1000


def test_ceilings_name_what_was_not_measured() -> None:
    ax = plots.plot_ceilings(made_diagnosis(alone_period_s=None))
    assert "not measured: loader alone" in texts(ax)
    assert len(ax.get_yticklabels()) == 2


def test_ceilings_without_a_measured_rate_or_without_any() -> None:
    ax = plots.plot_ceilings(made_diagnosis(period_s=None))
    assert not ax.lines
    assert "not measured" in texts(ax)
    empty = plots.plot_ceilings(diagnose(Evidence(), MACHINE))
    assert "no ceiling was measured" in texts(empty)


def test_measured_rate_comes_from_the_run_where_there_is_one() -> None:
    diagnosis = diagnose(made_diagnosis().evidence, MACHINE, timing=made_timing())
    assert plots.measured_rate(diagnosis) == pytest.approx(32 / 0.156)


# ---- Comparison ----------------------------------------------------------------------------------


def test_comparison_draws_a_line_per_pair_and_the_interval() -> None:
    result = judge_pairs(made_pairs(2.0))
    ax = plots.plot_comparison(result)
    assert result.ratio is not None
    assert result.interval is not None
    connections = ax.collections[0].get_segments()
    assert len(connections) == 8
    low, high = result.interval
    assert f"×{result.ratio:.2f}  ({low:.2f} to {high:.2f})" in texts(ax)
    assert "faster" in ax.get_title(loc="left")
    assert ax.get_xlabel() == "samples/s"


def test_comparison_does_not_call_equal_loaders_different() -> None:
    pairs = made_pairs(1.0)
    pairs["ratio"] = [1.01, 0.99] * 4
    assert "no difference shown" in plots.plot_comparison(judge_pairs(pairs)).get_title(loc="left")


def test_comparison_that_could_not_be_made_says_why() -> None:
    result = Comparison(None, None, "not comparable", made_pairs(1.0, 0), False, ("other samples",))
    ax = plots.plot_comparison(result)
    assert "other samples" in texts(ax)
    assert "not comparable" in texts(ax)


@pytest.mark.parametrize("pairs", [1, 60])
def test_comparison_of_few_and_many_pairs_fits(pairs: int) -> None:
    ax = plots.plot_comparison(judge_pairs(made_pairs(1.5, pairs)))
    ax.figure.canvas.draw()
    assert ax.figure.get_figheight() <= 6
    assert len(ax.get_yticks()) <= 16


# ---- Resources -----------------------------------------------------------------------------------


def test_gpu_curve_names_the_pattern_and_marks_its_teeth() -> None:
    ax = plots.plot_gpu_curve(made_trace(gpu0_utilization=sawtooth(teeth=15, period=12)))
    assert "GPU 0: sawtooth, a tooth every 1.2 s" in ax.get_title(loc="left")
    marks = [line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1]
    assert np.diff(marks) == pytest.approx(np.full(len(marks) - 1, 1.2), rel=0.05)
    assert "%" in ax.get_ylabel()
    assert "seconds" in ax.get_xlabel()


def test_gpu_curve_of_a_steady_gpu_has_no_marks() -> None:
    ax = plots.plot_gpu_curve(made_trace(gpu0_utilization=np.full(100, 95.0)))
    assert "steady" in ax.get_title(loc="left")
    assert len(ax.lines) == 1


def test_gpu_curve_leaves_out_what_is_old() -> None:
    trace = made_trace(gpu0_utilization=np.full(100, 95.0))
    ax = plots.plot_gpu_curve(trace, after_s=5.0)
    assert ax.lines[0].get_xdata()[0] >= 5.0


def test_gpu_curve_falls_back_to_the_cpu() -> None:
    ax = plots.plot_gpu_curve(made_trace(cpu_percent_of_usable=np.full(50, 40.0)))
    assert ax.get_title(loc="left") == "CPU of this process"  # "starved" is for a GPU


def test_gpu_curve_without_readings_says_why() -> None:
    trace = ResourceTrace(0.1, 8)
    trace.notes["gpu"] = "no driver: libnvidia-ml.so.1 is missing"
    assert "libnvidia-ml.so.1 is missing" in texts(plots.plot_gpu_curve(trace))
    assert "libnvidia-ml.so.1 is missing" in texts(plots.plot_gpu_curve(trace, "gpu0_utilization"))


def test_gpu_curve_of_nothing_but_gaps_says_so() -> None:
    trace = made_trace(gpu0_utilization=np.full(20, np.nan))
    assert "Not available" in texts(plots.plot_gpu_curve(trace, "gpu0_utilization"))


def test_gpu_curve_refuses_a_column_that_is_not_in_percent() -> None:
    trace = made_trace(memory_bytes=np.full(20, 1e9))
    with pytest.raises(ValueError, match="not in percent"):
        plots.plot_gpu_curve(trace, "memory_bytes")


def test_memory_shows_processes_and_growth() -> None:
    trace = made_trace(
        memory_bytes=np.linspace(1e9, 2e9, 100),
        main_pss_bytes=np.full(100, 1e9),
        workers_pss_bytes=np.where(np.arange(100) % 10 == 0, np.linspace(0, 1e9, 100), np.nan),
    )
    ax = plots.plot_memory(trace)
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels == ["all processes", "training process (PSS)", "workers (PSS)"]
    assert "growing" in ax.get_title(loc="left")
    assert "GiB" in ax.get_ylabel()
    assert [len(line.get_xdata()) for line in ax.lines] == [100, 100, 10]
    assert ax.lines[0].get_ydata()[-1] == pytest.approx(2e9 / 2**30)


def test_memory_falls_back_to_resident_memory() -> None:
    ax = plots.plot_memory(made_trace(main_rss_bytes=np.full(20, 5e8)))
    assert "training process (RSS)" in texts(ax)
    assert "MiB" in ax.get_ylabel()


def test_resources_shows_the_most_telling_curve_there_is() -> None:
    both = made_trace(gpu0_utilization=sawtooth(), cpu_percent_of_usable=np.full(180, 80.0))
    assert [t.get_text() for t in plots.plot_resources(both).get_legend().get_texts()] == [
        "GPU 0",
        "CPU of this process",
    ]
    only_memory = made_trace(main_rss_bytes=np.full(20, 5e8))
    assert "Memory" in plots.plot_resources(only_memory).get_title(loc="left")
    assert "Not available" in texts(plots.plot_resources(ResourceTrace(0.1, 8)))


# ---- Timeline ------------------------------------------------------------------------------------


def test_timeline_has_a_row_per_worker_the_queue_and_training() -> None:
    settings = LoaderSettings(num_workers=3)
    table = simulate_timeline(COSTS, settings, step_s=0.01, machine=MACHINE)
    ax = plots.plot_timeline(table)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == ["worker 0", "worker 1", "worker 2", "ready batches", "training"]
    share = plots_wait_share(ax)
    period = table["step_ended_s"].diff().iloc[30:].mean()
    assert share == pytest.approx(100 * (1 - 0.01 / period), abs=3)
    hatches = {collection.get_hatch() for collection in ax.collections}
    assert {KINDS["prepare"].hatch, KINDS["wait"].hatch} <= hatches


def plots_wait_share(ax: Any) -> float:
    return float(ax.get_title(loc="left").removeprefix("Training waits ").split(" %")[0])


def test_timeline_without_workers_shows_loading_and_training_taking_turns() -> None:
    table = simulate_timeline(COSTS, LoaderSettings(), step_s=0.06, machine=MACHINE)
    ax = plots.plot_timeline(table)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["loading", "training"]
    assert plots_wait_share(ax) == pytest.approx(100 * 0.12 / 0.18, abs=1)


def test_timeline_counts_ready_batches() -> None:
    table = pd.DataFrame(
        {
            "batch": [0, 1, 2],
            "worker": [0, 1, 2],
            "begun_s": [0.0, 0.0, 0.0],
            "ready_s": [1.0, 1.0, 1.0],
            "asked_s": [0.0, 2.0, 3.0],
            "step_begun_s": [1.0, 2.0, 3.0],
            "step_ended_s": [2.0, 3.0, 4.0],
            "wait_s": [1.0, 0.0, 0.0],
        }
    )
    assert "up to 2" in texts(plots.plot_timeline(table))


def test_timeline_with_many_workers_names_those_not_drawn() -> None:
    settings = LoaderSettings(num_workers=20)
    table = simulate_timeline(COSTS, settings, step_s=0.01, machine=Machine(usable_cpus=32))
    ax = plots.plot_timeline(table)
    assert len(ax.get_yticklabels()) == 14
    assert "8 more workers" in ax.get_xlabel()


def test_timeline_refuses_no_batches_and_says_when_it_is_empty() -> None:
    table = simulate_timeline(COSTS, LoaderSettings(), step_s=0.06, machine=MACHINE)
    with pytest.raises(ValueError, match="batches=0"):
        plots.plot_timeline(table, batches=0)
    assert "no batch" in texts(plots.plot_timeline(table.iloc[:0]))


# ---- Growth --------------------------------------------------------------------------------------


def test_scaling_draws_the_points_the_power_and_proportion() -> None:
    ax = plots.plot_scaling(made_fit(1.4))
    proportion, power = ax.lines
    assert power.get_ydata() == pytest.approx([0.1, 0.1 * 16**1.4])
    assert proportion.get_ydata() == pytest.approx([0.1, 1.6])
    assert ax.collections[0].get_offsets()[:, 0].tolist() == [1000, 2000, 4000, 8000, 16000]
    assert "power 1.40" in ax.get_title(loc="left")
    assert "power 1.40 (95 %: 1.30 to 1.50)" in texts(ax)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "16,000" in texts(ax)


def test_scaling_without_an_interval_or_enough_sizes() -> None:
    unsure = plots.plot_scaling(made_fit(1.0, (-np.inf, np.inf)))
    assert "interval" not in unsure.get_title(loc="left")
    lone = replace(made_fit(1.0), sizes=np.array([10]), seconds_per_epoch=np.array([1.0]))
    assert "fewer than two sizes" in texts(plots.plot_scaling(lone))


# ---- Workers -------------------------------------------------------------------------------------


def test_worker_curve_marks_enough_chosen_and_measured() -> None:
    ax = plots.plot_worker_curve(
        COSTS, 0.03, MACHINE, {0: 210.0, 2: 470.0, 3: None}, settings=LoaderSettings(num_workers=2)
    )
    curve = next(line for line in ax.lines if line.get_label() == "predicted")
    rates = dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True))
    assert rates[0] == pytest.approx(32 / 0.15)
    assert rates[1] == pytest.approx(32 / 0.12)
    assert rates[4] == pytest.approx(32 / 0.03)
    assert "enough: 4" in texts(ax)
    assert "chosen: 2" in texts(ax)
    assert "more than the CPUs carry" in texts(ax)
    measured = next(c for c in ax.collections if c.get_label() == "measured")
    assert measured.get_offsets().tolist() == [[0, 210], [2, 470]]
    assert ax.get_xlabel() == "num_workers"
    assert ax.get_ylabel() == "samples/s"


def test_worker_curve_follows_the_batch_size_of_the_settings() -> None:
    ax = plots.plot_worker_curve(COSTS, 0.03, MACHINE, settings=LoaderSettings(batch_size=64))
    curve = next(line for line in ax.lines if line.get_label() == "predicted")
    assert curve.get_ydata()[0] == pytest.approx(64 / 0.27)


def test_worker_curve_on_one_cpu_and_with_a_free_step() -> None:
    ax = plots.plot_worker_curve(COSTS, 0.0, Machine(usable_cpus=1))
    ax.figure.canvas.draw()
    assert "train step alone" not in texts(ax)
    with pytest.raises(ValueError, match="step_s=-1"):
        plots.plot_worker_curve(COSTS, -1, MACHINE)
