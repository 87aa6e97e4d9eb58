"""What the machine allows: every limit with made-up files and numbers, the real thing once."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dataloading import accelerators, cpus, machine
from dataloading.accelerators import Accelerator, find_accelerators
from dataloading.cgroups import (
    CgroupMemory,
    cgroup_cpu_limit,
    cgroup_cpu_quota,
    cgroup_folders,
    cgroup_memory,
    own_and_above,
    whole_number,
)
from dataloading.machine import (
    Machine,
    cpu_count_changed,
    inspect_machine,
    report_lines,
    thread_report,
    usable_cpu_count,
    usable_cpus,
    usable_memory,
)

GIB = 2**30
LAUNCHER_VARIABLES = {*cpus.SCHEDULER_VARIABLES, *cpus.RANK_VARIABLES, "PYTHON_CPU_COUNT"}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="sched_setaffinity is Linux only")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """The variables of the machine the tests run on must not decide them."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_cpus(monkeypatch):
    """Set logical CPUs, affinity and cgroup root of a made-up machine."""

    def set_up(logical, affinity, root=Path("does not exist")):
        monkeypatch.setattr(cpus.psutil, "cpu_count", lambda logical=True, _n=logical: _n)
        monkeypatch.setattr(cpus, "affinity_count", lambda: affinity)
        for module in (cpus, machine):
            monkeypatch.setattr(module, "SYSTEM_ROOT", root)
        monkeypatch.setattr(machine, "affinity_count", lambda: affinity)
        monkeypatch.setattr(machine, "AFFINITY_AT_IMPORT", affinity)

    return set_up


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run_child(code: str, **environ: str) -> object:
    """Run code in a fresh Python and read the literal it prints last."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=kept | environ,
        cwd=Path(machine.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


# CPUs


def test_a_07_1_affinity_and_scheduler_leave_one_cpu_and_the_source_is_shown(
    fake_cpus, monkeypatch
):
    fake_cpus(logical=36, affinity=1)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    found = inspect_machine()
    assert (found.usable_cpus, found.cpu_source) == (1, "affinity")
    assert found.cpu_limits == {"logical CPUs": 36, "affinity": 1, "SLURM_CPUS_PER_TASK": 1}
    assert ("usable CPUs", "1 (affinity)") in found.rows()
    assert "1 usable CPU (affinity)" in repr(found)
    assert report_lines(found)[0].startswith("[NOTE] CPU: 1 usable (affinity), 36 logical")


@pytest.mark.parametrize(
    ("files", "expected", "source"),
    [
        ({"cpu.max": "200000 100000\n"}, 2, "cgroup quota"),
        ({"cpu.max": "150000 100000\n"}, 1, "cgroup quota"),
        ({"cpu.max": "50000 100000\n"}, 1, "cgroup quota"),
        ({"cpu.max": "max 100000\n"}, 64, "logical CPUs"),
        (
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            64,
            "logical CPUs",
        ),
        (
            {"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
            "cgroup quota",
        ),
    ],
)
def test_a_07_2_the_least_of_affinity_and_quota_is_usable(
    fake_cpus, tmp_path, files, expected, source
):
    write_files(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    fake_cpus(logical=64, affinity=64, root=tmp_path)
    assert usable_cpu_count() == expected
    found = inspect_machine()
    assert (found.usable_cpus, found.cpu_source) == (expected, source)


def test_a_07_4_32_threads_on_8_cpus_are_flagged_with_2_per_rank():
    sentence = thread_report(Machine(usable_cpus=8, local_ranks=4), threads_per_rank=8)
    assert sentence is not None
    assert "32 threads on 8 usable CPUs" in sentence
    assert "Use 2 per rank: torch.set_num_threads(2)" in sentence


@pytest.mark.parametrize(
    ("usable", "ranks", "threads", "flagged"),
    [
        (8, 4, 2, False),
        (8, 4, 3, True),
        (8, 1, 8, False),
        (2, 1, 8, True),
        (2, 4, 1, True),
        (2, 2, 1, False),
    ],
)
def test_threads_are_flagged_only_where_they_outnumber_the_cpus(usable, ranks, threads, flagged):
    sentence = thread_report(
        Machine(usable_cpus=usable, local_ranks=ranks), threads_per_rank=threads
    )
    assert (sentence is not None) == flagged


def test_more_ranks_than_cpus_cannot_be_mended_by_fewer_threads():
    sentence = thread_report(Machine(usable_cpus=2, local_ranks=4), threads_per_rank=1)
    assert sentence == (
        "4 ranks with 1 intra-op thread each make 4 threads on 2 usable CPUs. "
        "Start fewer ranks, or ask for more CPUs."
    )


def test_thread_report_refuses_no_threads():
    with pytest.raises(ValueError, match="threads_per_rank must be at least 1, not 0"):
        thread_report(Machine(usable_cpus=8), threads_per_rank=0)


def test_a_07_6_affinity_40_of_80_with_a_note_about_the_scheduler_hint(fake_cpus, monkeypatch):
    fake_cpus(logical=80, affinity=40)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "80")
    found = inspect_machine()
    assert (found.usable_cpus, found.cpu_source) == (40, "affinity")
    notes = " ".join(found.notes)
    assert "40 of 80 logical CPUs" in notes
    assert "SLURM_CPUS_PER_TASK=80 differs from the CPU affinity (40)" in notes


def test_a_scheduler_hint_below_the_affinity_counts_and_is_noted(fake_cpus, monkeypatch):
    fake_cpus(logical=16, affinity=16)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    found = inspect_machine()
    assert (found.usable_cpus, found.cpu_source) == (4, "SLURM_CPUS_PER_TASK")
    assert any("the least limit counts: 4 (SLURM_CPUS_PER_TASK)" in note for note in found.notes)


def test_a_07_7_a_dropped_cpu_count_is_told_with_both_numbers(fake_cpus, monkeypatch):
    sentence = cpu_count_changed(10, 1)
    assert sentence is not None
    assert "from 10 to 1 CPU " in sentence
    fake_cpus(logical=10, affinity=1)
    monkeypatch.setattr(machine, "AFFINITY_AT_IMPORT", 10)
    assert sentence in inspect_machine().notes


@pytest.mark.parametrize(("before", "after"), [(8, 8), (1, 8), (None, 8), (8, None)])
def test_no_warning_where_the_cpu_count_did_not_drop(before, after):
    assert cpu_count_changed(before, after) is None


def test_usable_cpus_names_the_least_limit_and_the_first_of_equal_ones():
    assert usable_cpus({"logical CPUs": 8, "affinity": 8, "cgroup quota": None}) == (
        8,
        "logical CPUs",
    )
    assert usable_cpus({"logical CPUs": 64, "affinity": 8, "cgroup quota": 2}) == (
        2,
        "cgroup quota",
    )
    assert usable_cpus({"logical CPUs": 8, "affinity": 0}) == (8, "logical CPUs")
    assert usable_cpus({}) == (1, "unknown")


def test_a_rounded_quota_is_noted_and_a_whole_one_is_not():
    notes = cpus.cpu_notes({"logical CPUs": 8, "cgroup quota": 1}, 1.5)
    assert len(notes) == 1
    assert "quota of 1.5 CPUs is counted as 1" in notes[0]
    assert cpus.cpu_notes({"logical CPUs": 8, "cgroup quota": 2}, 2.0) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": "8"}, {"SLURM_CPUS_PER_TASK": 8}),
        ({"PBS_NUM_PPN": "4", "NCPUS": "4"}, {"PBS_NUM_PPN": 4, "NCPUS": 4}),
        ({"NCPUS": "4", "PBS_JOBID": "17.host"}, {"NCPUS": 4}),
        ({"NCPUS": "4"}, {}),
        ({"LSB_DJOB_NUMPROC": " 12 "}, {"LSB_DJOB_NUMPROC": 12}),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, {}),
        ({"SLURM_CPUS_PER_TASK": "0", "PBS_NUM_PPN": "-2", "LSB_DJOB_NUMPROC": ""}, {}),
    ],
)
def test_scheduler_variables(environ, expected):
    assert cpus.scheduler_limits(environ) == expected


@linux_only
def test_affinity_of_a_child_process_is_its_usable_cpus():
    code = (
        "import os; cpu = min(os.sched_getaffinity(0)); os.sched_setaffinity(0, {cpu})\n"
        "import sys; from dataloading.machine import usable_cpu_count\n"
        "count, heavy = usable_cpu_count(), {'torch', 'pynvml'} & set(sys.modules)\n"
        "from dataloading.machine import inspect_machine; found = inspect_machine()\n"
        "print((count, sorted(heavy), found.usable_cpus, found.cpu_limits['affinity']))"
    )
    assert run_child(code) == (1, [], 1, 1)


@linux_only
@pytest.mark.skipif(usable_cpu_count() < 2, reason="needs two CPUs to drop one")
def test_affinity_dropped_after_the_import_is_noted():
    code = (
        "import os; import dataloading.machine as m; before = m.AFFINITY_AT_IMPORT\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print([before, [n for n in m.inspect_machine().notes if 'went from' in n]])"
    )
    before, notes = run_child(code)
    assert len(notes) == 1
    assert f"from {before} to 1 CPU" in notes[0]


@pytest.mark.skipif(sys.version_info < (3, 13), reason="PYTHON_CPU_COUNT came with Python 3.13")
def test_python_cpu_count_is_a_limit():
    code = "from dataloading.cpus import *; print(usable_cpus(seen_cpu_limits()))"
    assert run_child(code, PYTHON_CPU_COUNT="1")[0] == 1


# Ranks


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "many", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-4"}, 1),
        ({"LOCAL_WORLD_SIZE": "4.0"}, 1),
        ({"LOCAL_WORLD_SIZE": "²"}, 1),
    ],
)
def test_local_ranks(environ, expected):
    assert cpus.local_ranks(environ)[0] == expected


def test_garbage_in_local_world_size_counts_as_one_rank_with_a_note(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    found = inspect_machine()
    assert found.local_ranks == 1
    assert any("LOCAL_WORLD_SIZE='four' is not a whole number" in note for note in found.notes)


def test_torchrun_ranks_share_the_cpus_of_one_slurm_task(fake_cpus, monkeypatch):
    fake_cpus(logical=64, affinity=32)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "32")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = inspect_machine()
    assert (found.usable_cpus, found.local_ranks, found.cpus_per_rank) == (32, 4, 8)


def test_slurm_cpus_per_task_are_not_divided_again_where_each_rank_is_a_task(
    fake_cpus, monkeypatch
):
    fake_cpus(logical=64, affinity=8)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    found = inspect_machine()
    assert (found.usable_cpus, found.local_ranks, found.cpus_per_rank) == (8, 4, 8)
    assert thread_report(found, threads_per_rank=8) is None
    assert "64 threads on 32 usable CPUs" in str(thread_report(found, threads_per_rank=16))


# Control groups


def test_the_least_quota_of_a_group_and_its_ancestors_counts(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step/task\n",
            "sys/fs/cgroup/job/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/step/task/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/other/cpu.max": "100000 100000\n",
        },
    )
    assert cgroup_cpu_limit(tmp_path) == 3
    top = tmp_path / "sys/fs/cgroup"
    assert cgroup_folders("cpu", tmp_path)[:4] == [
        top / "job/step/task",
        top / "job/step",
        top / "job",
        top,
    ]


def test_cgroup_v1_finds_each_controller_under_its_own_path_and_mount(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/mem/job\n3:cpu,cpuacct:/cpu/job\n1:name=systemd:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu/job/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/mem/memory.limit_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/memory/mem/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/mem/job/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cgroup_cpu_quota(tmp_path) == 2.5
    assert cgroup_memory(tmp_path) == CgroupMemory(6 * GIB, 5 * GIB)


def test_hybrid_cgroups_read_both_versions(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/\n0::/user\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/user/cpu.max": "200000 100000\n",
        },
    )
    assert cgroup_cpu_limit(tmp_path) == 2


def test_a_container_that_sees_only_its_part_of_the_tree_finds_its_own_limits(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc/worker\n0::/../../docker/abc/worker\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/worker/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/cpu.max": "100000 100000\n",
        },
    )
    assert cgroup_memory(tmp_path).limit_bytes == 2 * GIB
    assert cgroup_cpu_limit(tmp_path) == 1
    assert own_and_above(tmp_path, "/../..") == [tmp_path]


@pytest.mark.parametrize(
    "text", ["", "\n", "garbage", "0 1000", "1000 0", "1000", "1 2 3", "-1 1000", "é é", "1e5 1e5"]
)
def test_odd_cpu_files_are_no_limit(tmp_path, text):
    write_files(tmp_path, {"proc/self/cgroup": text, "sys/fs/cgroup/cpu.max": text})
    assert cgroup_cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "period"), [("", ""), ("garbage", "1000"), ("1000", "0"), ("0", "1000"), ("1000", "")]
)
def test_odd_cpu_files_of_v1_are_no_limit(tmp_path, quota, period):
    folder = "sys/fs/cgroup/cpu/cpu.cfs_"
    write_files(tmp_path, {f"{folder}quota_us": quota, f"{folder}period_us": period})
    assert cgroup_cpu_limit(tmp_path) is None


@pytest.mark.parametrize("text", ["", "garbage", "-5", "0", "9" * 5000, "\x00\x00"])
def test_odd_memory_limits_are_no_limit(tmp_path, text):
    write_files(tmp_path, {"sys/fs/cgroup/memory.max": text, "sys/fs/cgroup/memory.current": "1"})
    assert cgroup_memory(tmp_path) == CgroupMemory(None, None)


def test_bytes_that_are_no_text_are_no_limit(tmp_path):
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_bytes(b"\xff\xfe\x00 100000")
    assert cgroup_cpu_limit(tmp_path) is None


def test_files_that_may_not_be_read_are_no_limit(tmp_path, monkeypatch):
    write_files(tmp_path, {"sys/fs/cgroup/cpu.max": "200000 100000", "proc/self/cgroup": "0::/"})
    assert cgroup_cpu_limit(tmp_path) == 2

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cgroup_cpu_limit(tmp_path) is None
    assert cgroup_memory(tmp_path) == CgroupMemory(None, None)


def test_whole_numbers_only():
    assert whole_number("0") == 0
    assert whole_number(" 12\n") == 12
    assert [whole_number(text) for text in ("max", "-1", "1.5", "٣", "", None)] == [None] * 6


# Memory, shared memory, files


def test_a_16_3_a_limit_of_4_gib_with_3_used_on_a_host_of_128(tmp_path, fake_cpus, monkeypatch):
    write_files(
        tmp_path,
        {
            "sys/fs/cgroup/memory.max": "4294967296\n",
            "sys/fs/cgroup/memory.current": "3221225472\n",
        },
    )
    fake_cpus(logical=8, affinity=8, root=tmp_path)
    monkeypatch.setattr(machine, "host_memory", lambda: (128 * GIB, 100 * GIB))
    found = inspect_machine()
    assert (found.memory_bytes, found.available_memory_bytes) == (4 * GIB, 1 * GIB)
    assert found.memory_source == "cgroup"
    assert "[OK] Memory: 1.0 GiB free of 4.0 GiB (cgroup), 75 % in use" in report_lines(found)


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max\n", "memory.current": "3221225472\n"},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"memory/memory.limit_in_bytes": "9223372036854710272\n"},  # with pages of 64 KiB
        {},
    ],
)
def test_a_16_4_without_a_limit_the_host_counts(tmp_path, files):
    write_files(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    memory = usable_memory(128 * GIB, 100 * GIB, cgroup_memory(tmp_path))
    assert memory == (128 * GIB, 100 * GIB, "host")


@pytest.mark.parametrize(
    ("prefix", "limit", "usage", "stat"),
    [
        ("", "memory.max", "memory.current", "anon 5\ninactive_file 1073741824\nodd\n"),
        (
            "memory/",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "inactive_file 7\ntotal_inactive_file 1073741824\n",
        ),
    ],
)
def test_inactive_file_cache_counts_as_free(tmp_path, prefix, limit, usage, stat):
    files = {limit: str(4 * GIB), usage: str(3 * GIB), "memory.stat": stat}
    write_files(tmp_path, {f"sys/fs/cgroup/{prefix}{name}": text for name, text in files.items()})
    assert cgroup_memory(tmp_path) == CgroupMemory(4 * GIB, 2 * GIB)


def test_the_tightest_group_above_decides_what_is_free(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/task\n",
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.current": str(7 * GIB + GIB // 2),
            "sys/fs/cgroup/job/task/memory.max": str(4 * GIB),
            "sys/fs/cgroup/job/task/memory.current": "0",
        },
    )
    assert cgroup_memory(tmp_path) == CgroupMemory(4 * GIB, GIB // 2)


@pytest.mark.parametrize(
    ("host", "cgroup", "expected"),
    [
        ((128, 2), CgroupMemory(4, 3), (4, 2, "cgroup")),  # the host itself is nearly full
        ((128, 100), CgroupMemory(4, None), (4, None, "cgroup")),  # usage may not be read
        ((None, None), CgroupMemory(4, 3), (4, 3, "cgroup")),
        ((None, None), CgroupMemory(4, None), (4, None, "cgroup")),
        ((None, None), CgroupMemory(None, None), (None, None, "host")),
        ((128, 100), CgroupMemory(256, 200), (128, 100, "host")),
    ],
)
def test_usable_memory(host, cgroup, expected):
    assert usable_memory(*host, cgroup) == expected


def test_usage_above_the_limit_leaves_nothing_free(tmp_path):
    write_files(
        tmp_path,
        {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "1200"},
    )
    assert cgroup_memory(tmp_path).available_bytes == 0


def test_no_shared_memory_folder_is_none_and_said(tmp_path):
    assert machine.shared_memory(tmp_path) == (None, None)
    lines = report_lines(Machine(usable_cpus=8, platform="Linux-6.1"))
    assert "[NOTE] Shared memory: no limit of /dev/shm found" in lines
    lines = report_lines(Machine(usable_cpus=8, platform="macOS-15"))
    assert "[OK] Shared memory: no limit of /dev/shm here" in lines


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_shared_memory_is_what_the_system_tells():
    total, free = machine.shared_memory(Path("/"))
    status = os.statvfs("/dev/shm")
    assert total == status.f_blocks * status.f_frsize
    assert 0 <= free <= total


@pytest.mark.parametrize(
    ("machine_fields", "line"),
    [
        (
            {"shared_memory_bytes": 64 * 2**20, "shared_memory_free_bytes": 64 * 2**20},
            "[NOTE] Shared memory: 64.0 MiB free of 64.0 MiB in /dev/shm; a container gets more with --shm-size=8g or --ipc=host",
        ),
        (
            {"shared_memory_bytes": 8 * GIB, "shared_memory_free_bytes": 8 * GIB},
            "[OK] Shared memory: 8.0 GiB free of 8.0 GiB in /dev/shm",
        ),
        (
            {"open_files_limit": 256},
            "[NOTE] Open files: up to 256; raise it with `ulimit -n 4096` before the start",
        ),
        ({"open_files_limit": 1024}, "[OK] Open files: up to 1,024"),
        (
            {"memory_bytes": 100 * GIB, "available_memory_bytes": 5 * GIB},
            "[NOTE] Memory: 5.0 GiB free of 100.0 GiB (host), 95 % in use",
        ),
        (
            {"start_method": "spawn", "environment": "jupyter"},
            "[NOTE] Start method: spawn; workers get the data set by pickling, so define it in a .py file, not in a cell",
        ),
        ({"start_method": "fork", "environment": "jupyter"}, "[OK] Start method: fork"),
        (
            {"accelerators": (Accelerator("cuda", "NVIDIA A100", 40 * GIB),)},
            "[OK] Accelerator: NVIDIA A100 (40.0 GiB) [cuda]",
        ),
        ({"notes": ("Something odd.",)}, "[NOTE] Something odd."),
    ],
)
def test_report_lines_say_what_is_fine_and_what_is_worth_a_look(machine_fields, line):
    assert line in report_lines(Machine(usable_cpus=8, **machine_fields))


def test_report_names_threads_that_do_not_fit():
    lines = report_lines(Machine(usable_cpus=8, local_ranks=4, intraop_threads=8))
    assert any(line.startswith("[NOTE] 4 ranks with 8 intra-op threads") for line in lines)


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit on Windows")
def test_open_files_limit_is_the_soft_one_and_unlimited_is_none(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (512, 4096))
    assert machine.open_files_limit() == 512
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, 4096))
    assert machine.open_files_limit() is None


# Start method and environment


@pytest.mark.parametrize("method", [None, "spawn", "forkserver"])
def test_start_method_is_found_and_left_as_it_was(method):
    if sys.platform == "win32" and method == "forkserver":
        pytest.skip("no forkserver on Windows")
    code = (
        "import multiprocessing as mp\n"
        f"method = {method!r}\n"
        "if method: mp.set_start_method(method)\n"
        "import dataloading.machine as m\n"
        "found, after = m.start_method(), mp.get_start_method(allow_none=True)\n"
        "print((found, after, mp.get_start_method()))"
    )
    found, after, real = run_child(code)
    assert after == method
    assert found == real


def test_inspecting_a_fresh_process_changes_nothing():
    code = (
        "import multiprocessing as mp, os, threading, torch\n"
        "fds = lambda: len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0\n"
        "from dataloading.machine import inspect_machine\n"
        "inspect_machine(); before = fds(), threading.active_count(), torch.get_num_threads()\n"
        "inspect_machine(); after = fds(), threading.active_count(), torch.get_num_threads()\n"
        "print((mp.get_start_method(allow_none=True), torch.cuda.is_initialized(), before == after))"
    )
    assert run_child(code) == (None, False, True)


def test_environments_are_told_apart(monkeypatch):
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert machine.environment({}) == "script"
    assert machine.environment({"COLAB_RELEASE_TAG": "release"}) == "colab"
    assert machine.environment({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}) == "kaggle"
    for shell, expected in (
        (SimpleNamespace(kernel=object()), "jupyter"),
        (SimpleNamespace(), "script"),  # IPython in a terminal
        (None, "script"),  # IPython imported by some package
    ):
        module = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert machine.environment({}) == expected


# Accelerators


def fake_torch(cuda="12.8", hip=None, count=0, initialised=False, mps=False, xpu=0):
    """A torch that fails the test when it is asked what would start CUDA."""

    def properties(index):
        assert initialised, "get_device_properties starts CUDA"
        return SimpleNamespace(name=f"GPU of torch {index}", total_memory=2 * GIB)

    def is_available():
        raise AssertionError("is_available starts the CUDA driver")

    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            is_initialized=lambda: initialised,
            is_available=is_available,
            device_count=lambda: count,
            get_device_properties=properties,
        ),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
        xpu=SimpleNamespace(is_initialized=lambda: False, device_count=lambda: xpu),
    )


class FakeNvml(ModuleType):
    """Stands for pynvml with two GPUs and counts how often it is opened and closed."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver_cuda=12080, refused=(), start_error=None):
        super().__init__("pynvml")
        self.opened = self.closed = 0
        self.refused, self.start_error, self.driver_cuda = refused, start_error, driver_cuda

    def answer(self, name, value):
        if name in self.refused:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):
        if self.start_error:
            raise self.NVMLError(self.start_error)
        self.opened += 1

    def nvmlShutdown(self):
        self.closed += 1

    def nvmlSystemGetCudaDriverVersion(self):
        return self.answer("driver", self.driver_cuda)

    def nvmlDeviceGetCount(self):
        return self.answer("count", 2)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return self.answer("name", [b"NVIDIA A100", "NVIDIA L4"][handle])

    def nvmlDeviceGetUUID(self, handle):
        return ["GPU-aaaa-1", "GPU-bbbb-2"][handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self.answer("memory", SimpleNamespace(total=[40, 24][handle] * GIB, used=0))


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(**options):
        module = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


A100, L4 = Accelerator("cuda", "NVIDIA A100", 40 * GIB), Accelerator("cuda", "NVIDIA L4", 24 * GIB)


def test_cuda_devices_are_named_through_nvml_without_starting_cuda(nvml):
    module = nvml()
    assert find_accelerators(fake_torch(count=2)) == ((A100, L4), [])
    assert (module.opened, module.closed) == (1, 1)


def test_visible_devices_choose_and_order_the_gpus(nvml, monkeypatch):
    nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_accelerators(fake_torch(count=1)) == ((L4,), [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,GPU-aaaa")
    assert find_accelerators(fake_torch(count=2)) == ((L4, A100), [])


def test_hidden_gpus_are_told(nvml, monkeypatch):
    nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, notes = find_accelerators(fake_torch(count=0))
    assert found == ()
    assert len(notes) == 1
    assert "CUDA_VISIBLE_DEVICES" in notes[0]


@pytest.mark.parametrize("refused", [("memory",), ("memory", "driver")])
def test_what_nvml_does_not_tell_is_none(nvml, refused):
    module = nvml(refused=refused)
    found, _ = find_accelerators(fake_torch(count=2))
    assert [(a.name, a.memory_bytes) for a in found] == [("NVIDIA A100", None), ("NVIDIA L4", None)]
    assert module.opened == module.closed == 1


def test_devices_that_nvml_does_not_list_are_still_counted(nvml):
    nvml(refused=("count",))
    found, _ = find_accelerators(fake_torch(count=2))
    assert found == (Accelerator("cuda", "cuda device"),) * 2


def test_devices_that_pytorch_does_not_count_are_left_out(nvml):
    nvml()
    assert find_accelerators(fake_torch(count=1)) == ((A100,), [])


def test_without_pynvml_devices_are_counted_without_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    assert find_accelerators(fake_torch(count=1)) == ((Accelerator("cuda", "cuda device"),), [])
    assert find_accelerators(fake_torch(count=0)) == ((), [])


def test_a_driver_that_does_not_match_is_told(nvml):
    module = nvml(start_error="Driver/library version mismatch")
    found, notes = find_accelerators(fake_torch(count=0))
    assert found == ()
    assert len(notes) == 1
    assert "Driver/library version mismatch" in notes[0]
    assert module.closed == 0


def test_a_driver_too_old_for_this_pytorch_is_told_and_gives_no_accelerator(nvml):
    nvml(driver_cuda=12040)
    found, notes = find_accelerators(fake_torch(cuda="13.0", count=2))
    assert found == ()
    assert "driver supports CUDA 12" in notes[0]
    found, notes = find_accelerators(fake_torch(cuda="12.8", count=2))  # minor versions may differ
    assert (len(found), notes) == (2, [])


def test_a_gpu_without_a_cuda_build_is_told(nvml):
    nvml()
    found, notes = find_accelerators(fake_torch(cuda=None))
    assert found == ()
    assert "NVIDIA A100 (40.0 GiB)" in notes[0]
    assert "built without CUDA" in notes[0]


def test_once_cuda_runs_its_own_properties_are_used(nvml):
    module = nvml()
    found, _ = find_accelerators(fake_torch(count=1, initialised=True))
    assert found == (Accelerator("cuda", "GPU of torch 0", 2 * GIB),)
    assert module.opened == 0


def test_mps_and_xpu_are_accelerators_without_a_known_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found, _ = find_accelerators(fake_torch(cuda=None, mps=True, xpu=1))
    assert [(a.kind, a.memory_bytes) for a in found] == [("mps", None), ("xpu", None)]


def test_a_warning_of_torch_about_the_driver_does_not_reach_the_reader(monkeypatch, recwarn):
    import warnings

    monkeypatch.setitem(sys.modules, "pynvml", None)
    torch = fake_torch()

    def warn():
        warnings.warn("Can't initialize NVML", stacklevel=1)
        return 0

    torch.cuda.device_count = warn
    assert accelerators.find_accelerators(torch) == ((), [])
    assert not recwarn.list


# The result


def test_the_real_machine_is_plausible():
    found = inspect_machine()
    assert 1 <= found.cpus_per_rank <= found.usable_cpus <= found.logical_cpus
    assert found.cpu_limits[found.cpu_source] == found.usable_cpus == usable_cpu_count()
    assert 0 < found.available_memory_bytes <= found.memory_bytes
    assert found.python_version == ".".join(map(str, sys.version_info[:3]))
    assert found.intraop_threads >= 1
    lines = report_lines(found)
    assert len(lines) >= 7
    assert all(line.startswith(("[OK] ", "[NOTE] ")) and "\n" not in line for line in lines)


def test_a_machine_can_be_made_by_hand_and_changed():
    made = Machine(usable_cpus=16)
    assert (made.cpus_per_rank, made.accelerators, made.memory_bytes) == (16, (), None)
    assert dataclasses.replace(made, usable_cpus=64, local_ranks=8).cpus_per_rank == 8
    assert dataclasses.replace(made, usable_cpus=2, local_ranks=8).cpus_per_rank == 1
    assert repr(made) == "Machine: 16 usable CPUs (given), no accelerator"


def test_to_dict_is_ready_for_json():
    made = Machine(
        usable_cpus=4, cpu_limits={"affinity": 4}, accelerators=(A100,), notes=("A note.",)
    )
    again = json.loads(json.dumps(made.to_dict()))
    assert again["accelerators"] == [
        {"kind": "cuda", "name": "NVIDIA A100", "memory_bytes": 40 * GIB}
    ]
    assert again["cpu_limits"] == {"affinity": 4}
    assert json.loads(json.dumps(inspect_machine().to_dict()))["usable_cpus"] >= 1


def test_the_html_table_is_escaped():
    made = Machine(
        usable_cpus=4,
        cpu_source="<b>x</b>",
        accelerators=(Accelerator("cuda", "<script>alert(1)</script>"),),
        notes=("a < b & c",),
    )
    table = made._repr_html_()
    assert "<script>" not in table
    assert "<b>" not in table
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in table
    assert "a &lt; b &amp; c" in table
