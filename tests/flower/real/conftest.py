"""One federation of real processes for all tests of this folder that need resident nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# for the forgeries of test_distrust.py, and those of tests/attacks
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "attacks")]


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Three members as resident nodes, each behind a SuperNode with a key of its own."""
    from running import Running

    running = Running(tmp_path_factory.mktemp("fed") / "f")
    try:
        yield running
    finally:
        running.end()
