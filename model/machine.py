"""The memory and CPUs this process may use: what the machine has, or what its cgroups leave if that is less.

A cgroup's limit holds for all cgroups below it, so each one from our own up to the root of the mount is looked at, in
version 2 (one tree) and version 1 (a tree for each controller). Torch-free. `root` is where /proc and /sys are found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class Cpus(NamedTuple):
    """`usable`: how many threads can compute at once; `quota`: CPUs' worth of time the cgroups allow, if limited."""

    usable: int
    online: int
    quota: float | None = None


def available_memory(root: Path = ROOT) -> int:
    """Bytes this process can still take without swapping."""
    left = [_machine_memory(root)]
    for folder in _cgroups(root, "memory"):
        left += _memory_left(folder)
    return max(0, min(left))


def usable_cpus(root: Path = ROOT) -> Cpus:
    """CPUs by affinity, and by the cgroups' quota rounded down, at least 1."""
    online = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    quotas = [quota for folder in _cgroups(root, "cpu") for quota in _cpu_quota(folder)]
    if not quotas:
        return Cpus(usable, online)
    return Cpus(min(usable, max(1, int(min(quotas)))), online, min(quotas))


def _machine_memory(root: Path) -> int:
    try:
        return 1024 * _field(root / "proc/meminfo", "MemAvailable:")
    except OSError:  # not Linux: only the installed memory is known
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_left(folder: Path) -> Iterator[int]:
    """What a cgroup's limit leaves. Inactive file pages count as free: the kernel drops them before it kills."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # no such file, or no limit: "max"
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            yield most - max(0, used - _field(folder / "memory.stat", cache))


def _cpu_quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # -1: no limit
            yield int(quota) / int(period)


def _field(file: Path, name: str) -> int:
    """The number after `name` in a file of one name and number per line; 0 if it is not there."""
    rows = (line.split() for line in file.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our cgroup and of those above it, in every hierarchy that can limit `controller`."""
    with suppress(OSError):
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        for _, controllers, path in memberships:
            if not controllers or controller in controllers.split(","):
                yield from _up_to_the_mount(root, path, _mounted(mounts, controllers and controller))


def _mounted(mounts: list[str], controller: str) -> tuple[str, str] | None:
    """(which cgroup is mounted, where) of a version 1 controller, or of version 2 if `controller` is empty."""
    for line in mounts:
        where, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", 2)
        if (kind == "cgroup" and controller in options.split(",")) if controller else kind == "cgroup2":
            top, place = where.split(" ")[3:5]
            return top, re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place)
    return None


def _up_to_the_mount(root: Path, path: str, mount: tuple[str, str] | None) -> Iterator[Path]:
    if mount is None:
        return
    top, place = mount
    base = root / place.lstrip("/")
    inside = os.path.relpath(path, top)
    if inside.startswith(".."):  # the mount shows another part of the tree: a container's own folder is its top
        inside = "."
    folder = base / inside
    while folder != base:
        yield folder
        folder = folder.parent
    yield base
