"""Cases of starting workers: what it costs, what runs again, and what that does to the samples."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import audit_workloads as audited
import case_workloads as cases
import faulty_workloads as faulty
import pytest
import torch
import workloads
from evidence_made_up import loop
from torch.utils.data import DataLoader
from workloads import linux_only

from dataloading.audit import check_samples
from dataloading.comparison import same_samples
from dataloading.diagnosis import diagnose
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.main_script import MainScript, look_at_script
from dataloading.pickling import PickleProbe
from dataloading.preflight import Preflight, look_at
from dataloading.preflight_rules import RULES
from dataloading.recommendation import recommend_settings
from dataloading.settings import LoaderSettings
from dataloading.timing import measure_dataloader
from dataloading.train_steps import simulated_train_step

TESTS = Path(__file__).parent
MACHINE = Machine(usable_cpus=5, start_method="fork")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


def before_the_start(
    script: MainScript | None, in_main: tuple[str, ...] = (), **options: Any
) -> list[Any]:
    """What the rules say of a loader with four spawned workers, seen in a script."""
    settings = LoaderSettings(
        num_workers=4, multiprocessing_context=options.pop("method", "spawn"), **options
    )
    probe = PickleProbe("dataset", None, None, size_bytes=10, seconds=0.0, in_main=in_main)
    seen = Preflight(
        loader=DataLoader(faulty.Blobs()),
        settings=settings,
        machine=MACHINE,
        start_method=settings.multiprocessing_context or "fork",
        probes=(probe,),
        script=script,
        epochs=2,
    )
    return [found for rule in RULES if (found := rule(seen)) is not None]


# ---- what runs again in every worker ------------------------------------------------------------

GUARDED = """
import torch
SIZE = 8
print("top level")
class Photos(torch.utils.data.Dataset):
    pass
if __name__ == "__main__":
    class Hidden(torch.utils.data.Dataset):
        pass
    print("once")
"""


def test_a_02_2_lines_that_every_worker_runs_again_are_counted() -> None:
    script = look_at_script(GUARDED, "train.py")
    assert script == MainScript("train.py", True, lines_run=(4,), under_guard=("Hidden",))
    (found,) = before_the_start(script)
    assert (found.code, found.severity) == ("epoch-startup", "info")
    assert (found.evidence["extra_runs_per_start"], found.evidence["extra_runs"]) == (4, 8)
    assert "train.py again (line 4): 4 extra runs an epoch, 8 in 2 epochs" in found.message
    (kept,) = before_the_start(script, persistent_workers=True)
    assert kept.evidence["extra_runs"] == 4
    assert before_the_start(script, method="fork") == []


def test_a_02_2_a_script_without_the_guard_is_named() -> None:
    script = look_at_script(GUARDED.partition("if __name__")[0], "train.py")
    (found,) = before_the_start(script)
    assert (found.code, found.severity) == ("unpicklable", "critical")
    assert "train.py has no `if __name__ == '__main__':`" in found.message
    assert "spawn" in found.message
    assert before_the_start(script, method="fork") == []


@pytest.mark.parametrize(
    "source", ["import os", "def main(): print(1)", "x = [1]\nif x:\n    y = 2", "'A title.'"]
)
def test_imports_definitions_and_settings_are_no_runs(source: str) -> None:
    script = look_at_script(f"{source}\nif '__main__' == __name__:\n    print(2)", "train.py")
    assert script.has_guard
    assert script.lines_run == ()
    assert before_the_start(script) == []


def test_calls_inside_of_if_try_and_loops_are_runs() -> None:
    source = (
        "if 1:\n    print(1)\ntry:\n    print(2)\nexcept OSError:\n    pass\nfor x in []:\n    x"
    )
    assert look_at_script(source, "train.py").lines_run == (2, 4, 7)


SCRIPT = """
from torch.utils.data import DataLoader
print("top level")
if __name__ == "__main__":
    from dataloading.preflight_rules import check_dataloader
    loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    for found in check_dataloader(loader, epochs=2):
        print("expected", found.evidence["extra_runs"], flush=True)
    for epoch in range(2):
        for batch in loader:
            pass
"""


def run_script(path: Path, source: str) -> list[str]:
    """Run a script by itself; the lines it printed, workers included."""
    path.write_text(source, encoding="utf-8")
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_02_2_as_many_runs_are_seen_as_were_expected(tmp_path: Path) -> None:
    lines = run_script(tmp_path / "train.py", SCRIPT)
    assert lines == ["top level", "expected 2", "top level", "top level"]


def test_a_10_6_a_class_under_the_guard_belongs_above_it() -> None:
    script = look_at_script(GUARDED, "train.py")
    found = next(f for f in before_the_start(script, ("Hidden",)) if f.code == "unpicklable")
    assert found.severity == "critical"
    assert "Hidden is defined under `if __name__ == '__main__':` in train.py" in found.message
    assert "Move Hidden above the guard" in found.advice
    assert "unpicklable" not in [f.code for f in before_the_start(script, ("Photos",))]
    (forked,) = before_the_start(script, ("Hidden",), method="fork")
    assert forked.severity == "info"


HIDDEN_CLASS = """
from torch.utils.data import DataLoader, Dataset
from dataloading.preflight_rules import check_dataloader
if __name__ == "__main__":
    class Hidden(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return index
    loader = DataLoader(Hidden(), num_workers=2, multiprocessing_context="spawn")
    print([(found.code, found.evidence.get("name")) for found in check_dataloader(loader)])
"""


def test_a_10_6_it_is_found_in_a_real_script(tmp_path: Path) -> None:
    assert run_script(tmp_path / "train.py", HIDDEN_CLASS) == ["[('unpicklable', 'Hidden')]"]


# ---- when workers pay ---------------------------------------------------------------------------


@pytest.mark.parametrize(("items", "workers"), [(45, 0), (600, 0), (740, 4), (5000, 4)])
def test_a_02_3_workers_pay_from_the_break_even_on(items: int, workers: int) -> None:
    """Start 5 s, item 10 ms, 4 workers: 5 / (0.010 * (1 - 1/4)) = 667 items."""
    evidence = loop(
        workers=4,
        wait=0.0025,
        step=0.0,
        cpu_s=0.010,
        sample_wait_s=0.0,
        send_s=0.0,
        sample_wall_s=0.010,
        epoch_restart_s=5.0 + 0.010,
        steps_per_epoch=items,
    )
    diagnosis = diagnose(replace(evidence, batch_size=1), MACHINE)
    assert recommend_settings(diagnosis, epochs=1).settings.num_workers == workers


@linux_only
def test_a_03_2_the_set_up_of_workers_is_paid_per_epoch_or_once() -> None:
    seen, calls = {}, {}
    for kept in (False, True):
        set_up = cases.SetsUp(0.3)
        loader = DataLoader(
            faulty.Blobs(24),
            batch_size=2,
            num_workers=2,
            worker_init_fn=set_up,
            persistent_workers=kept,
            multiprocessing_context="fork",
        )
        step = simulated_train_step(0.01)
        seen[kept] = measure_dataloader(
            loader, step, seconds=20.0, max_steps=5 * 12, progress=False
        )
        calls[kept] = set_up.calls.value
    assert calls == {False: 2 * 5, True: 2}
    for timing in seen.values():
        assert timing.startup_s is not None
        assert timing.startup_s > 0.3
    assert seen[False].epoch_restart_s > 0.3  # type: ignore[operator]
    assert seen[True].epoch_restart_s < 0.1  # type: ignore[operator]
    found = {
        kept: diagnose(Evidence().with_timing(timing), MACHINE) for kept, timing in seen.items()
    }
    assert found[False].cause == "epoch-startup"
    assert "persistent_workers=True" in found[False].findings[0].advice
    assert "epoch-startup" not in [one.code for one in found[True].findings]


def epochs_of(loader: DataLoader) -> list[tuple[list[int], list[float]]]:
    """Indices and augmented values of two epochs, sorted by index."""
    told = []
    for _ in range(2):
        batches = list(loader)
        indices = torch.cat([index for _, index in batches]).tolist()
        values = torch.cat([value[:, 0] for value, _ in batches]).tolist()
        pairs = sorted(zip(indices, values, strict=True))
        told.append(([index for index, _ in pairs], [value for _, value in pairs]))
    return told


@linux_only
def test_a_03_4_kept_workers_deliver_the_same_samples_with_other_augmentation() -> None:
    data = audited.Augmented(16)

    def make(*, kept: bool) -> DataLoader:
        return DataLoader(
            data,
            batch_size=4,
            shuffle=True,
            num_workers=2,
            persistent_workers=kept,
            generator=torch.Generator().manual_seed(0),
            multiprocessing_context="fork",
        )

    torch.manual_seed(0)
    (first, second), (first_kept, second_kept) = (
        epochs_of(make(kept=False)),
        epochs_of(make(kept=True)),
    )
    assert first == first_kept  # the same values in the first epoch
    assert second[0] == second_kept[0] == first[0]  # the same samples in the second
    assert second[1] != second_kept[1]  # though augmented otherwise
    for kept in (False, True):
        audit = check_samples(make(kept=kept))
        assert (audit.ok, audit.findings) == (True, ())
    assert same_samples(make(kept=False), make(kept=True)) is True


@linux_only
def test_a_03_5_the_start_method_in_use_is_reported_with_its_cost() -> None:
    startup = {}
    for method in ("fork", "forkserver", "spawn"):
        loader = DataLoader(
            faulty.Blobs(8), batch_size=2, num_workers=1, multiprocessing_context=method
        )
        assert look_at(loader, spawn_check=False).start_method == method
        seen = measure_dataloader(loader, seconds=5.0, max_steps=4, progress=False)
        assert seen.settings is not None
        assert seen.settings.multiprocessing_context == method
        startup[method] = seen.startup_s
    assert startup["spawn"] > startup["fork"]  # type: ignore[operator]
    usual = look_at(DataLoader(faulty.Blobs(8), num_workers=1))
    assert usual.start_method == multiprocessing.get_start_method()
