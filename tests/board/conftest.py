"""A folder with a real comparison, and the application over it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kedge

pytest.importorskip("starlette", reason="the extra board is not installed")


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
