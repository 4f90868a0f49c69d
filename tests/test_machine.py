"""Memory and CPUs from made-up /proc and /sys trees: cgroups of both versions, nested, limited anywhere on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenteller.model.machine import Cpus, available_memory, usable_cpus

MIB = 2**20
NO_LIMIT = 9223372036854771712  # how version 1 says so
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)


def tree(root: Path, cgroup: str, mounts: str, **folders: dict[str, str]) -> Path:
    """/proc of a machine with 1,000 MiB available, and the named folders below /sys/fs/cgroup; `_` stands for /."""
    write(root / "proc", {"meminfo": f"MemTotal: 9 kB\nMemAvailable:  {1000 * 1024} kB\n"})
    write(root / "proc/self", {"cgroup": cgroup, "mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + mounts})
    for name, files in folders.items():
        write(root / "sys/fs/cgroup" / name.replace("_", "/"), files)
    return root


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def memory2(limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    limit = limit if isinstance(limit, str) else limit * MIB
    stat = f"anon 1\nfile {cache * MIB}\ninactive_file {cache * MIB}\nactive_file 5\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used * MIB}\n", "memory.stat": stat}


def memory1(limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"inactive_file 0\ntotal_inactive_file {cache * MIB}\n"
    return {"memory.limit_in_bytes": f"{limit}", "memory.usage_in_bytes": f"{used * MIB}", "memory.stat": stat}


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    root = tree(tmp_path, "", "")
    assert available_memory(root) == 1000 * MIB
    assert usable_cpus(root) == Cpus(3, 4)


def test_without_proc_the_installed_memory_counts(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_cpus(tmp_path) == Cpus(3, 4)


@pytest.mark.parametrize(
    ("own", "above", "left"),
    [
        (memory2(600, 100), memory2("max", 900), 500),
        (memory2("max", 100), memory2(700, 300), 400),  # only the one above is limited
        (memory2(600, 100), memory2(700, 650), 50),  # siblings have used up what is shared
        (memory2(600, 580, cache=200), memory2("max", 580), 220),  # pages of files are given up first
        (memory2(600, 100, cache=200), memory2("max", 0), 600),
        (memory2("max", 1), memory2("max", 1), 1000),
        (memory2(5000, 1), memory2("max", 1), 1000),
        (memory2(100, 130), memory2("max", 130), 0),
        ({}, {}, 1000),
    ],
)
def test_version_2_leaves_the_least_of_our_cgroup_and_those_above(
    tmp_path: Path, own: dict[str, str], above: dict[str, str], left: int
) -> None:
    root = tree(tmp_path, "0::/pod/box\n", V2, pod_box=own, pod=above)
    assert available_memory(root) == left * MIB


def test_version_1_too_and_its_top_has_no_limit(tmp_path: Path) -> None:
    cgroup = "4:memory:/pod/box\n2:cpu,cpuacct:/pod/box\n0::/\n"
    folders = {"memory": memory1(NO_LIMIT, 3000), "memory_pod": memory1(700 * MIB, 300, cache=50)}
    folders |= {"memory_pod_box": memory1(NO_LIMIT, 200)}
    quota = {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}
    none = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
    folders |= {"cpu,cpuacct_pod": quota, "cpu,cpuacct_pod_box": none, "cpu,cpuacct": none}
    root = tree(tmp_path, cgroup, V1.format(top="/"), **folders)
    assert available_memory(root) == 450 * MIB
    assert usable_cpus(root) == Cpus(2, 4, 2.5)


@pytest.mark.parametrize("top", ["/docker/abc", "/.."])
def test_a_container_sees_its_own_cgroup_as_the_mount(tmp_path: Path, top: str) -> None:
    """/proc/self/cgroup may name a path of the host that is not below the mount."""
    root = tree(tmp_path, "4:memory:/docker/abc\n", V1.format(top=top), memory=memory1(512 * MIB, 12))
    assert available_memory(root) == 500 * MIB


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    mounts = V1.format(top="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    folders = {"memory_a": memory1(400 * MIB, 100), "unified_b": memory2(500, 300)}
    root = tree(tmp_path, "4:memory:/a\n0::/b\n", mounts, **folders)
    assert available_memory(root) == 200 * MIB


def test_a_mount_point_may_have_spaces(tmp_path: Path) -> None:
    write(tmp_path / "my groups/a", memory2(300, 100))
    root = tree(tmp_path, "0::/a\n", "30 23 0:26 / /my\\040groups rw - cgroup2 none rw\n")
    assert available_memory(root) == 200 * MIB


@pytest.mark.parametrize(
    ("own", "above", "cpus"),
    [
        ("150000 100000", "max 100000", Cpus(1, 4, 1.5)),
        ("max 100000", "200000 100000", Cpus(2, 4, 2.0)),
        ("100 100000", "max 100000", Cpus(1, 4, 0.001)),
        ("900000 100000", "max 100000", Cpus(3, 4, 9.0)),
        ("max 100000", "max 100000", Cpus(3, 4)),
    ],
)
def test_threads_follow_affinity_and_the_smallest_quota(tmp_path: Path, own: str, above: str, cpus: Cpus) -> None:
    root = tree(tmp_path, "0::/pod/box\n", V2, pod_box={"cpu.max": own}, pod={"cpu.max": above})
    assert usable_cpus(root) == cpus


def test_this_machine_has_memory_and_a_cpu() -> None:
    assert available_memory() > 0 and usable_cpus().usable >= 1
