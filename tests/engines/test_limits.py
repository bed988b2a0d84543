"""Limits of processes and control groups count as free memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.limits import host_available

MIB = 2**20


def machine(root: Path, files: dict[str, str]) -> str:
    """A tree with these files, and 8 GiB of free memory."""
    meminfo = f"MemTotal: 1 kB\nMemAvailable:   {8 * 2**20} kB\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert host_available(machine(tmp_path, {})) == 8 * 2**30
    limits = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"}
    assert host_available(machine(tmp_path, limits)) == 8 * 2**30


@pytest.mark.parametrize("level", ["", "user.slice/", "user.slice/job/"])
def test_the_tightest_group_of_version_2_counts(level: str, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/job\n",
        f"sys/fs/cgroup/{level}memory.max": f"{100 * MIB}\n",
        f"sys/fs/cgroup/{level}memory.current": f"{70 * MIB}\n",
        f"sys/fs/cgroup/{level}memory.stat": f"file {60 * MIB}\ninactive_file {20 * MIB}\n",
    }
    assert host_available(machine(tmp_path, files)) == 50 * MIB


def test_groups_of_version_1_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "11:cpu,cpuacct:/x\n9:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{64 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{80 * MIB}\n",
    }
    root = machine(tmp_path, files)
    assert host_available(root) == 0
    (tmp_path / "sys/fs/cgroup/memory/job/memory.stat").write_text(
        f"total_inactive_file {30 * MIB}\n"
    )
    assert host_available(root) == 14 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_of_the_process_counts() -> None:
    code = (
        "import importlib.util, resource, sys, types\n"
        "errors = types.ModuleType('kedge.errors'); errors.OutOfMemory = MemoryError\n"
        "sys.modules |= {'kedge': types.ModuleType('kedge'), 'kedge.errors': errors}\n"
        "spec = importlib.util.spec_from_file_location('limits', sys.argv[1])\n"
        "limits = importlib.util.module_from_spec(spec); spec.loader.exec_module(limits)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))\n"
        "print(limits.host_available())\n"
    )
    import kedge.limits as limits

    done = subprocess.run(
        [sys.executable, "-c", code, str(limits.__file__)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 5e8 < int(done.stdout) < 1e9
