"""Tests see the datasets of this machine only if they ask for them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def empty_places(tmp_path, monkeypatch):
    """No test but those marked ``data`` sees the datasets of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KEDGE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
