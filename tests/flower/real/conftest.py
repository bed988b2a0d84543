"""One federation of real processes for all tests of this folder that need resident nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# for the forgeries of test_distrust.py, and those of tests/attacks


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Three members as resident nodes, each behind a SuperNode with a key of its own."""
    from tests.flower.real.running import Running

    running = Running(tmp_path_factory.mktemp("fed") / "f")
    try:
        yield running
    finally:
        running.end()
