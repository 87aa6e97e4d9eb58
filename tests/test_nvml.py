"""GPU counters: fake bindings for the rules, a stand-in driver library for the real bindings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataloading.monitoring import ResourceMonitor, Sampler, monitor_resources
from dataloading.nvml import (
    DRIVER_MISMATCH,
    NO_DEVICES,
    NOT_AVAILABLE,
    OK,
    SAMPLE_BUFFER,
    Device,
    Nvml,
    Reading,
    choose_reading,
    classify_error_text,
    resolve_visible,
)
from dataloading.processes import ProcessTree
from dataloading.trace import ResourceTrace

ROOT = Path(__file__).resolve().parent.parent
UUIDS = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-ab12cd34-0000-1111-2222-333344445555"]
MEMORY_USED = 1_079_263_232


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


class FakeBindings:
    """The functions of pynvml that are used, answered from a dict; an exception is raised."""

    NVML_CLOCK_SM = 1
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_VALUE_TYPE_DOUBLE = 0

    def __init__(self, **answers: Any) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": UUIDS[0],
            "nvmlDeviceGetName": "NVIDIA A100",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=36, memory=4),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=MEMORY_USED, total=8 << 30),
            "nvmlDeviceGetPowerUsage": 150_500,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetSamples": FakeError("Not Supported"),
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("answers", {}):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append(name)
            answer = self.answers[name]
            answer = answer(*args) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def read_once(bindings: FakeBindings) -> tuple[ResourceTrace, dict[Any, Any]]:
    """One row of the sampler over fake bindings, and its trace."""
    trace = ResourceTrace(0.2, cpus=4)
    with Nvml(bindings, visible="0") as nvml:
        Sampler(trace, ProcessTree(workers=False), nvml).sample()
    return trace, trace.frame.iloc[0].to_dict()


# ---- the cases -------------------------------------------------------------------------------


def test_a_15_1_bindings_not_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # `import pynvml` raises ImportError
    with monitor_resources(interval_s=0.1) as trace:
        time.sleep(0.25)
    assert not [name for name in trace.frame.columns if name.startswith("gpu")]
    assert [topic for topic in trace.notes if topic.startswith("gpu")] == ["gpu"]
    assert "nvidia-ml-py" in trace.notes["gpu"]
    assert trace.gpu_source is None
    assert trace.pattern("gpu0_utilization") == "unknown"
    assert trace.frame["main_rss_bytes"].min() > 0


def test_a_15_2_utilization_not_supported_keeps_memory() -> None:
    trace, row = read_once(FakeBindings(nvmlDeviceGetUtilizationRates=FakeError("Not Supported")))
    assert "gpu0_utilization" not in row
    assert "not supported" in trace.notes["gpu0_utilization"]
    assert row["gpu0_memory_bytes"] == MEMORY_USED


def test_a_15_3_name_as_bytes_and_as_text() -> None:
    names = []
    for answer in ("NVIDIA A100", b"NVIDIA A100"):
        with Nvml(FakeBindings(nvmlDeviceGetName=answer), visible="0") as nvml:
            names.append(nvml.devices[0].name)
    assert names == ["NVIDIA A100", "NVIDIA A100"]


def test_a_15_4_undecodable_name() -> None:
    error = UnicodeDecodeError("utf-8", b"\xf8", 0, 1, "invalid start byte")
    for answer in (error, b"\xf8"):
        with Nvml(FakeBindings(nvmlDeviceGetName=answer), visible="0") as nvml:
            device = nvml.devices[0]
            assert device.name == "GPU 0"
            assert device.utilization() == Reading(36)
            assert device.memory_used().value == MEMORY_USED
            assert device.power_w().value == 150.5


def test_a_15_5_driver_mismatch() -> None:
    bindings = FakeBindings(nvmlInit=FakeError("Driver/library version mismatch"))
    monitor = ResourceMonitor(interval_s=0.1, nvml=Nvml(bindings))
    with monitor as trace:
        time.sleep(0.25)
    assert monitor._nvml is not None
    assert monitor._nvml.status == DRIVER_MISMATCH
    advice = (monitor._nvml.advice or "").lower()
    assert "reboot the host" in advice
    assert "container" in advice
    assert "driver mismatch" in trace.notes["gpu"]
    assert trace.frame["cpu_percent_of_usable"].notna().any()  # the rest goes on
    assert bindings.calls == ["nvmlInit"]  # nothing to shut down


def test_a_15_6_pytorch_assertion_is_a_driver_mismatch() -> None:
    text = (
        "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to PyTorch.'
    )
    assert classify_error_text(text) == DRIVER_MISMATCH
    assert classify_error_text("RuntimeError: DataLoader worker (pid 17) is killed") == "unknown"


@pytest.mark.parametrize(
    ("visible", "expected", "whole"),
    [
        ("GPU-8932f937", [0], True),
        ("0,GPU-ab12", [0, 1], True),
        ("GPU-ab12, 0", [1, 0], True),
        ("MIG-1c1b2f3a-0000-0000-0000-000000000000", [], False),
        ("", [], False),
        ("-1", [], False),
        ("1,-1,0", [1], False),
        ("7", [], False),
        ("0,0", [], False),
        ("GPU-", [], False),  # fits both
        ("NoDevFiles", [], False),
    ],
)
def test_a_15_7_visible_devices(visible: str, expected: list[int], whole: bool) -> None:
    bindings = FakeBindings(
        nvmlDeviceGetCount=2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetHandleByUUID=FakeError("Not Found"),
    )
    with Nvml(bindings, visible) as nvml:
        assert [device._handle for device in nvml.devices] == expected
        assert [device.index for device in nvml.devices] == list(range(len(expected)))
        assert nvml.status == (OK if expected else NO_DEVICES)
        assert (nvml.reason is None) == whole


def test_a_15_7_variable_not_set() -> None:
    assert resolve_visible(None, UUIDS) == ([0, 1], None)


def test_a_15_7_mig_slice_is_opened_by_its_uuid() -> None:
    bindings = FakeBindings(
        nvmlDeviceGetHandleByUUID=lambda uuid: f"slice {uuid}",
        nvmlDeviceGetUtilizationRates=FakeError("Not Supported"),
    )
    with Nvml(bindings, visible="MIG-1c1b") as nvml:
        assert nvml.devices[0].memory_used().value == MEMORY_USED
        assert nvml.devices[0].utilization().value is None


def test_a_15_8_process_not_listed() -> None:
    listed = [SimpleNamespace(pid=28290, usedGpuMemory=5 << 20)]
    device = Device(FakeBindings(nvmlDeviceGetComputeRunningProcesses=listed), "handle", 0)
    reading = device.process_memory_bytes([17])
    assert reading.value is None
    assert "28290" in str(reading.reason)
    assert "torch.cuda" in str(reading.reason)
    assert device.process_memory_bytes([28290]).value == 5 << 20


def test_a_15_8_pytorch_counter_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [SimpleNamespace(pid=1, usedGpuMemory=None)]
    bindings = FakeBindings(nvmlDeviceGetComputeRunningProcesses=listed)
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda index: 7 << 20)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    trace, row = read_once(bindings)
    assert row["gpu0_process_memory_bytes"] == 7 << 20
    assert "PyTorch" in trace.notes["gpu0_process_memory_bytes"]
    cuda.is_initialized = lambda: False
    trace, row = read_once(bindings)
    assert "gpu0_process_memory_bytes" not in row
    assert "NVML lists 1" in trace.notes["gpu0_process_memory_bytes"]


def test_a_15_9_library_not_found() -> None:
    with Nvml(FakeBindings(nvmlInit=FakeError("NVML Shared Library Not Found"))) as nvml:
        assert nvml.status == NOT_AVAILABLE
        assert nvml.devices == []
        assert "Shared Library Not Found" in str(nvml.reason)


def test_a_01_5_the_nvml_value_is_shown_with_its_source() -> None:
    chosen = choose_reading([Reading(97, "os"), Reading(36, "nvml")])
    assert (chosen.value, chosen.source) == (36, "nvml")
    trace, row = read_once(FakeBindings())
    assert row["gpu0_utilization"] == 36
    assert trace.gpu_source == "nvml"
    assert choose_reading([Reading(97, "os"), Reading(None, "nvml", "lost")]).source == "os"


# ---- more rules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetComputeRunningProcesses",
    ],
)
def test_each_call_may_fail_alone(call: str) -> None:
    whole = set(read_once(FakeBindings())[1])
    trace, row = read_once(FakeBindings(**{call: FakeError("GPU is lost")}))
    missing = whole - set(row)
    assert len(missing) <= 1
    assert all("GPU is lost" in trace.notes[name] for name in missing)


def test_unsupported_calls_are_asked_once() -> None:
    bindings = FakeBindings(nvmlDeviceGetPowerUsage=FakeError("Not Supported"))
    device = Device(bindings, "handle", 0)
    assert [device.power_w().value for _ in range(3)] == [None] * 3
    assert bindings.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_passing_failure_is_asked_again() -> None:
    answers = iter([FakeError("Unknown Error"), 100_000])
    device = Device(FakeBindings(nvmlDeviceGetPowerUsage=lambda _: next(answers)), "handle", 0)
    assert [device.power_w().value for _ in range(2)] == [None, 100.0]


def test_init_and_shutdown_are_balanced_after_an_error() -> None:
    bindings = FakeBindings()
    with pytest.raises(RuntimeError, match="train step"), Nvml(bindings, visible="0"):
        raise RuntimeError("train step")
    assert bindings.calls.count("nvmlInit") == bindings.calls.count("nvmlShutdown") == 1


def test_count_refused_is_no_device() -> None:
    with Nvml(FakeBindings(nvmlDeviceGetCount=FakeError("Insufficient Permissions"))) as nvml:
        assert nvml.status == NO_DEVICES
        assert nvml.reason == "Insufficient Permissions"


def test_bindings_without_the_functions() -> None:
    with Nvml(SimpleNamespace()) as nvml:  # some other package named pynvml
        assert nvml.status == NOT_AVAILABLE
        assert "nvmlInit" in str(nvml.reason)


def test_different_models_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    bindings = FakeBindings(
        nvmlDeviceGetCount=2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"model {handle}",
    )
    with Nvml(bindings, visible="0,1") as nvml:
        assert "CUDA_DEVICE_ORDER" in str(nvml.reason)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with Nvml(bindings, visible="0,1") as nvml:
        assert nvml.reason is None


def test_sample_buffer_is_read_once_and_without_empty_slots() -> None:
    def sample(time_us: int, percent: int) -> SimpleNamespace:
        return SimpleNamespace(timeStamp=time_us, sampleValue=SimpleNamespace(uiVal=percent))

    ring = [sample(0, 0), sample(20, 90), sample(10, 80)]
    bindings = FakeBindings(nvmlDeviceGetSamples=lambda *_: (1, ring))
    device = Device(bindings, "handle", 0)
    assert device.new_samples() == [(10, 80.0), (20, 90.0)]
    assert device.new_samples() == []
    ring.append(sample(30, 70))
    assert device.new_samples() == [(30, 70.0)]


def test_row_has_the_mean_of_the_new_samples() -> None:
    sample = SimpleNamespace
    batches = iter(
        [
            [sample(timeStamp=1_000_000, sampleValue=sample(uiVal=100))],  # from before the start
            [
                sample(timeStamp=1_050_000, sampleValue=sample(uiVal=20)),
                sample(timeStamp=1_100_000, sampleValue=sample(uiVal=60)),
            ],
        ]
    )
    trace = ResourceTrace(0.2, cpus=4)
    clock = iter([0.0, 0.0, 0.2])
    with Nvml(FakeBindings(nvmlDeviceGetSamples=lambda *_: (1, next(batches))), "0") as nvml:
        sampler = Sampler(trace, ProcessTree(workers=False), nvml, clock=lambda: next(clock))
        sampler.sample()
        for budget, _ in sampler._groups:
            budget._next_s = 0.0
        sampler.sample()
    assert trace.frame["gpu0_utilization"].tolist() == [36, 40]  # polled, then from the buffer
    assert trace.gpu_source == SAMPLE_BUFFER
    samples = trace.gpu_samples
    assert samples["time_s"].round(3).tolist() == [0.05, 0.1]
    assert samples["utilization"].tolist() == [20, 60]


# ---- the real bindings over the stand-in library ---------------------------------------------


@pytest.fixture(scope="session")
def stub_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in library, compiled here."""
    if sys.platform != "linux":
        pytest.skip("the stand-in library is found through LD_LIBRARY_PATH, which is Linux only")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compiler = next((c for c in ("gcc", "cc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
    return folder


def start_child(library_dir: Path, script: str, **environment: str) -> subprocess.Popen[str]:
    """Run a script in a Python that finds the stand-in library first."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NVML_STUB_"))}
    env["LD_LIBRARY_PATH"] = f"{library_dir}{os.pathsep}{env.get('LD_LIBRARY_PATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script],
        cwd=ROOT,
        env=env | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answer_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The one JSON object that a child prints, and nothing else."""
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, err
    assert err == ""
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


WATCH = """
import json, sys, threading, time
from dataloading.monitoring import monitor_resources

with monitor_resources(interval_s=0.1) as trace:
    time.sleep({seconds})
frame = trace.frame
print(json.dumps({{
    "columns": list(frame.columns),
    "median": frame.median().dropna().to_dict(),
    "source": trace.gpu_source,
    "notes": trace.notes,
    "patterns": [[p.name, p.period_s] for p in map(trace.pattern, ("gpu0_utilization", "gpu1_utilization"))],
    "samples": len(trace.gpu_samples),
    "threads": threading.active_count(),
    "repr": repr(trace),
}}))
"""

READ = """
import json, os
from dataloading.nvml import Nvml

with Nvml() as nvml:
    result = {
        "status": nvml.status,
        "reason": nvml.reason,
        "advice": nvml.advice,
        "devices": [
            {
                "name": d.name,
                "utilization": d.utilization().value,
                "memory": d.memory_used().value,
                "total": d.memory_total().value,
                "power": d.power_w().value,
                "clock": d.sm_clock_mhz().value,
                "samples": len(d.new_samples()),
                "process": d.process_memory_bytes([int(os.environ.get("OWN", 17))]).value,
                "reason": d.utilization().reason,
            }
            for d in nvml.devices
        ],
    }
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def watched(stub_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two children watch the stand-in at the same time: with and without its sample buffer."""
    log = tmp_path_factory.mktemp("log") / "calls.txt"
    children = {
        "buffer": start_child(
            stub_dir, WATCH.format(seconds=3), NVML_STUB_PERIOD_MS="200", NVML_STUB_LOG=str(log)
        ),
        "polled": start_child(
            stub_dir,
            WATCH.format(seconds=7),
            NVML_STUB_PERIOD_MS="500",
            NVML_STUB_UNSUPPORTED="samples,power",
        ),
    }
    answers = {name: answer_of(child) for name, child in children.items()}
    answers["buffer"]["log"] = log.read_text().split()
    return answers


def test_stub_columns_of_both_gpus(watched: dict[str, dict[str, Any]]) -> None:
    for gpu in (0, 1):
        median = watched["buffer"]["median"]
        assert median[f"gpu{gpu}_memory_bytes"] == MEMORY_USED * (gpu + 1)
        assert median[f"gpu{gpu}_power_w"] == 150.5 + gpu
        assert median[f"gpu{gpu}_sm_clock_mhz"] == 1410
    assert watched["buffer"]["median"]["gpu1_utilization"] == 40


def test_stub_sample_buffer_shows_the_sawtooth(watched: dict[str, dict[str, Any]]) -> None:
    answer = watched["buffer"]
    assert answer["source"] == "nvml sample buffer"
    assert answer["samples"] > 100  # of two GPUs, at 50 a second
    assert answer["patterns"][0][0] == "sawtooth"
    assert answer["patterns"][0][1] == pytest.approx(0.2, rel=0.1)
    assert answer["patterns"][1][0] == "starved"


def test_stub_polling_shows_the_sawtooth_too(watched: dict[str, dict[str, Any]]) -> None:
    answer = watched["polled"]
    assert answer["source"] == "nvml"
    assert answer["samples"] == 0
    assert answer["patterns"][0][0] == "sawtooth"
    assert answer["patterns"][0][1] == pytest.approx(0.5, rel=0.15)
    assert "gpu0_power_w" not in answer["columns"]
    assert "not supported" in answer["notes"]["gpu0_power_w"]


def test_stub_leaves_nothing_behind(watched: dict[str, dict[str, Any]]) -> None:
    assert watched["buffer"]["log"] == ["init", "shutdown"]
    assert watched["buffer"]["threads"] == 1
    assert "GPU0" in watched["buffer"]["repr"]


def test_stub_every_call_not_supported(stub_dir: Path) -> None:
    calls = "name,utilization,memory,power,clock,processes,samples"
    answer = answer_of(start_child(stub_dir, READ, NVML_STUB_UNSUPPORTED=calls))
    assert answer["status"] == OK
    assert [device["name"] for device in answer["devices"]] == ["GPU 0", "GPU 1"]
    for device in answer["devices"]:
        assert device["samples"] == 0
        assert "not supported" in device["reason"]
        assert all(
            device[key] is None
            for key in ("utilization", "memory", "total", "power", "clock", "process")
        )


def test_stub_undecodable_name_and_hidden_devices(stub_dir: Path) -> None:
    environment = {"NVML_STUB_BAD_NAME": "1", "NVML_STUB_PID": "28290", "OWN": "28290"}
    children = [
        start_child(stub_dir, READ, CUDA_VISIBLE_DEVICES=visible, **environment)
        for visible in ("GPU-ab12", "")
    ]
    one, none = map(answer_of, children)
    assert [device["name"] for device in one["devices"]] == ["GPU 0"]
    assert one["devices"][0]["memory"] == 2 * MEMORY_USED  # the second GPU, as cuda:0
    assert one["devices"][0]["process"] == 512 << 20
    assert none["devices"] == []
    assert none["status"] == NO_DEVICES
    assert "CUDA_VISIBLE_DEVICES" in none["reason"]


def test_stub_mismatch_not_loaded_and_missing_library(stub_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    mismatch, not_loaded, missing = map(
        answer_of,
        [
            start_child(stub_dir, READ, NVML_STUB_INIT="mismatch"),
            start_child(stub_dir, READ, NVML_STUB_INIT="not loaded"),
            start_child(tmp_path, READ),
        ],
    )
    assert mismatch["status"] == DRIVER_MISMATCH
    assert "Reboot" in mismatch["advice"]
    assert not_loaded["status"] == NOT_AVAILABLE
    assert "Driver Not Loaded" in not_loaded["reason"]
    assert missing["status"] == NOT_AVAILABLE
    assert "Not Found" in missing["reason"]
    assert mismatch["devices"] == not_loaded["devices"] == missing["devices"] == []
