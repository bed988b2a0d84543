"""Plans are remembered for one test only; runs that are long enough to be measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kedge.tuning import timings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is long enough to be measured, and that takes a moment only."""
    monkeypatch.setattr(timings, "MIN_RUN_S", 0.0)
    monkeypatch.setattr(timings, "MIN_TRIAL_S", 0.3)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
