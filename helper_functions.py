"""Find, fix and prove PyTorch data-loading bottlenecks: the four moves, and the course's helpers.

    baseline   measure_dataloader(loader, train_step)
    diagnose   diagnosis = diagnose_dataloader(loader, train_step)
    tune       recommendation = recommend_settings(diagnosis)
    prove      compare_dataloaders(loader, rebuild_dataloader(loader, recommendation.settings))

Run as a script, this file makes all four moves on a folder of images and writes a report:
`python helper_functions.py IMAGE_DIR`. It also has the helpers of the Learn PyTorch course, with the
same names, so it can take the place of their `helper_functions.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from dataloading.arguments import check_loader, check_seconds, check_train_step
from dataloading.arms import gather_evidence, measure_arms, profile_or_reason
from dataloading.audit import SampleAudit, check_samples
from dataloading.batch_costs import BatchCosts
from dataloading.batch_sizes import BatchSizeSearch, find_batch_sizes
from dataloading.codes import Finding
from dataloading.comparison import Comparison, compare_dataloaders
from dataloading.course import (
    accuracy_fn,
    download_data,
    plot_decision_boundary,
    plot_loss_curves,
    plot_predictions,
    pred_and_plot_image,
    print_train_time,
    set_seeds,
    walk_through_dir,
)
from dataloading.diagnosis import Diagnosis, diagnose, failed_diagnosis
from dataloading.drift import Drift, find_drift
from dataloading.history import RunRecord, read_runs, record_run
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine, inspect_machine
from dataloading.model import Prediction, predict_dataloader
from dataloading.monitoring import monitor_resources
from dataloading.preflight_rules import check_dataloader
from dataloading.probing import measure_batch_costs
from dataloading.profiling import SampleProfile, profile_samples
from dataloading.recommendation import Recommendation, recommend_settings
from dataloading.regression import RunTrend, find_regression
from dataloading.repeatability import StreamComparison, compare_streams
from dataloading.scaling import ScalingFit, measure_scaling
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.timing import TrainStep, measure_dataloader
from dataloading.train_steps import make_train_step, simulated_train_step
from dataloading.training_tuner import TrainingTuner, tune_while_training
from dataloading.tuning import TuningResult, tune_dataloader
from dataloading.watching import watch_dataloader

if TYPE_CHECKING:
    from dataloading.plots import (
        plot_batch_sizes,
        plot_ceilings,
        plot_comparison,
        plot_gpu_curve,
        plot_history,
        plot_memory,
        plot_resources,
        plot_sample_stages,
        plot_scaling,
        plot_time_split,
        plot_timeline,
        plot_tuning,
        plot_waits,
        plot_worker_curve,
    )
    from dataloading.report import text_report, write_html_report
    from dataloading.widgets import explore_settings, live_monitor

__all__ = [
    "BatchCosts",
    "BatchSizeSearch",
    "Comparison",
    "Diagnosis",
    "Drift",
    "Finding",
    "LoaderSettings",
    "LoaderTiming",
    "Machine",
    "Prediction",
    "Recommendation",
    "RunRecord",
    "RunTrend",
    "SampleAudit",
    "SampleProfile",
    "ScalingFit",
    "StreamComparison",
    "TrainingTuner",
    "TuningResult",
    "accuracy_fn",
    "check_dataloader",
    "check_samples",
    "compare_dataloaders",
    "compare_streams",
    "diagnose_dataloader",
    "download_data",
    "explore_settings",
    "find_batch_sizes",
    "find_drift",
    "find_regression",
    "inspect_machine",
    "live_monitor",
    "make_train_step",
    "measure_batch_costs",
    "measure_dataloader",
    "measure_scaling",
    "monitor_resources",
    "plot_batch_sizes",
    "plot_ceilings",
    "plot_comparison",
    "plot_decision_boundary",
    "plot_gpu_curve",
    "plot_history",
    "plot_loss_curves",
    "plot_memory",
    "plot_predictions",
    "plot_resources",
    "plot_sample_stages",
    "plot_scaling",
    "plot_time_split",
    "plot_timeline",
    "plot_tuning",
    "plot_waits",
    "plot_worker_curve",
    "pred_and_plot_image",
    "predict_dataloader",
    "print_train_time",
    "profile_samples",
    "read_runs",
    "rebuild_dataloader",
    "recommend_settings",
    "record_run",
    "set_seeds",
    "simulated_train_step",
    "text_report",
    "tune_dataloader",
    "tune_while_training",
    "walk_through_dir",
    "watch_dataloader",
    "write_html_report",
]

ARMS_SHARE = 0.7  # of a diagnosis' time; the rest goes to profiling samples


def diagnose_dataloader(
    dataloader: Any,
    train_step: TrainStep | None = None,
    *,
    seconds: float = 30.0,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Find out why a training loop is as fast as it is.

    Measures the real loop, training on one fixed batch and the loader alone, watches the machine
    meanwhile, profiles samples stage by stage, and lets the rules judge.

    Args:
        dataloader: A `DataLoader`, or anything that yields batches.
        train_step: Called with each batch; None diagnoses the loader alone.
        seconds: Time budget.
        device: Move each batch there first, and time it; None leaves moving to `train_step`.
        progress: Show progress bars.

    Returns:
        A `Diagnosis`: verdict, cause, ranked findings with evidence, ceilings.

    Raises:
        ValueError: A bad argument, or a loader that delivers no batch.

    In a distributed job (DDP) give no train step that talks to the other ranks, which take another
    number of steps; watch the loop with `watch_dataloader` there.

    A data set that raises, a worker that dies and a loader that hangs are diagnosed, not raised;
    errors of the train step are raised.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(1000), batch_size=10)
        >>> diagnosis = diagnose_dataloader(loader, simulated_train_step(0.002), seconds=2)
        ... # doctest: +SKIP

    Explained in: notebook 00
    """
    check_loader(dataloader)
    check_train_step(train_step)
    check_seconds(seconds)
    machine = inspect_machine()
    settings = LoaderSettings.of(dataloader) if isinstance(dataloader, DataLoader) else None
    with monitor_resources() as trace:
        try:
            arms = measure_arms(
                dataloader,
                train_step,
                seconds=seconds * ARMS_SHARE,
                device=device,
                progress=progress,
            )
        except Exception as error:
            if not isinstance(found := getattr(error, "finding", None), Finding):
                raise  # not an error of the loader: a bad argument, or the train step's own
            return failed_diagnosis(found, machine, settings=settings)
    if arms.real.failure is not None:
        return failed_diagnosis(arms.real.failure, machine, arms.real, settings)
    profile, reason = profile_or_reason(dataloader)
    evidence = gather_evidence(
        dataloader, arms, profile, machine=machine, trace=trace, profile_reason=reason
    )
    return diagnose(evidence, machine, timing=arms.real, profile=profile, trace=trace)


def __getattr__(name: str) -> Any:
    """Load pictures, widgets and reports, and with them matplotlib and ipywidgets, only when used."""
    if name in __all__:
        part = "plots" if name.startswith("plot_") else "widgets"
        part = "report" if name.endswith("_report") else part
        return getattr(import_module(f"dataloading.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    from dataloading.command import main

    main(diagnose_dataloader)
