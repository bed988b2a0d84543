"""Hide the datasets of this machine from the tests, except from those marked ``data``."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def empty_data_folders(tmp_path, monkeypatch):
    """Use empty folders for the cache, $KEDGE_DATA and the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KEDGE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
