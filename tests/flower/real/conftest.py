"""One federation of real processes for all tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from running import Running

    @pytest.fixture(scope="session")
    def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        """Three members as resident nodes, each behind a SuperNode with a key of its own."""
        running = Running(tmp_path_factory.mktemp("fed") / "f")
        try:
            yield running
        finally:
            running.end()
