"""A folder with a real comparison, and the application over it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kedge

pytest.importorskip("starlette", reason="the extra board is not installed")

HOLD = """
import sys, time
from pathlib import Path
from kedge.history.lock import Lock
lock = Lock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the comparison of two methods on two seeds; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    kedge.compare(
        ["fedavg", "scaffold"], out=folder / "both", rounds=4, seeds=[0, 1], clients=4,
        engine="loop", model="mlp(hidden=[8])",
    )  # fmt: skip
    return folder


@pytest.fixture
def runs(compared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(compared, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def holder(runs: Path) -> Any:
    """A process that holds the lock of the run ``both/fedavg``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(runs / "both/fedavg")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
        yield process
    process.kill()
    process.wait()
