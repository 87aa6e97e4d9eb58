"""Control groups: the CPU quota and memory limit of a container or batch job on Linux.

Both versions are read, for this process's own group and for all groups above it; the least counts.
Where there are no control groups (macOS, Windows) every answer is None.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
NO_LIMIT_BYTES = 2**62
# Enough for 2**63; longer ones are no numbers that a kernel or a scheduler wrote.
MAX_DIGITS = 19


@dataclass(frozen=True)
class CgroupMemory:
    """Memory limit of a control group and what is free of it; None means no limit, not known."""

    limit_bytes: int | None = None
    available_bytes: int | None = None


def cgroup_cpu_limit(root: Path = SYSTEM_ROOT) -> int | None:
    """Whole CPUs of the cgroup quota, rounded down, at least 1; None without a quota.

    Args:
        root: folder that holds `proc` and `sys`, for tests.
    """
    quota = cgroup_cpu_quota(root)
    return None if quota is None else max(1, int(quota))


def cgroup_cpu_quota(root: Path = SYSTEM_ROOT) -> float | None:
    """The least CPU quota over this process's control groups and those above, in CPUs.

    Source: `cpu.max` (cgroup v2) and `cpu.cfs_quota_us` (v1), kernel documentation.
    """
    quotas = [folder_cpu_quota(folder) for folder in cgroup_folders("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def folder_cpu_quota(folder: Path) -> float | None:
    """The quota in one control group's folder, v2 or v1, in CPUs."""
    values = read_text(folder / "cpu.max").split()  # "200000 100000", "max 100000"
    if len(values) != 2:
        values = [read_text(folder / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
    quota, period = map(positive_int, values)  # "max" and -1 are no numbers: no limit
    return quota / period if quota and period else None


def cgroup_memory(root: Path = SYSTEM_ROOT) -> CgroupMemory:
    """The least memory limit over this process's control groups and those above.

    Available is limit - usage + inactive file cache, the least over the groups that have a limit:
    the kernel drops inactive cache before it kills a process.

    Args:
        root: folder that holds `proc` and `sys`, for tests.
    """
    groups = [folder_memory(folder) for folder in cgroup_folders("memory", root)]
    limits = [group.limit_bytes for group in groups if group.limit_bytes is not None]
    free = [group.available_bytes for group in groups if group.available_bytes is not None]
    return CgroupMemory(min(limits, default=None), min(free, default=None))


def folder_memory(folder: Path) -> CgroupMemory:
    """Limit and free memory in one control group's folder, v2 or v1."""
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = positive_int(read_text(folder / limit_file))
        if limit is None or limit >= NO_LIMIT_BYTES:
            continue
        usage = whole_number(read_text(folder / usage_file))
        if usage is None:
            return CgroupMemory(limit)
        stat = dict(line.split()[:2] for line in stat_lines(folder / "memory.stat"))
        cache = whole_number(stat.get(cache_key)) or 0
        return CgroupMemory(limit, max(0, limit - usage + min(cache, usage)))
    return CgroupMemory()


def stat_lines(path: Path) -> list[str]:
    """The lines of a `memory.stat` file that have a name and a value."""
    return [line for line in read_text(path).splitlines() if len(line.split()) >= 2]


def cgroup_folders(controller: str, root: Path = SYSTEM_ROOT) -> list[Path]:
    """Folders of this process's control group and of all groups above it, v2 and v1.

    Args:
        controller: "cpu" or "memory".
        root: folder that holds `proc` and `sys`, for tests.
    """
    mount = root / "sys/fs/cgroup"
    v2_path = v1_path = "/"
    v1_mounts = [mount / controller]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)  # "0::/user.slice" (v2), "4:cpu,cpuacct:/job" (v1)
        if len(parts) < 3:
            continue
        if not parts[1]:
            v2_path = parts[2]
        elif controller in parts[1].split(","):
            v1_path = parts[2]
            v1_mounts.append(mount / parts[1])
    tops = [(mount, v2_path), (mount / "unified", v2_path), *((top, v1_path) for top in v1_mounts)]
    return [folder for top, path in tops for folder in own_and_above(top, path)]


def own_and_above(top: Path, path: str) -> list[Path]:
    """The group's folder below a mount point, then each folder up to the mount point itself.

    A container often sees only its own part of the tree while the path is the host's, so leading
    parts of the path that do not exist here are skipped.
    """
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    while names and not os.path.isdir(top.joinpath(*names)):
        names.pop(0)
    return [top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def read_text(path: Path) -> str:
    """A small system file as text; empty where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def whole_number(text: str | None) -> int | None:
    """Digits as a number, or None: "max", "-1" and what is not a number at all.

    >>> whole_number(" 200000"), whole_number("max"), whole_number("-1"), whole_number(None)
    (200000, None, None, None)
    """
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def positive_int(text: str | None) -> int | None:
    """A whole number of at least 1, or None."""
    return whole_number(text) or None
