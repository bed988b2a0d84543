"""One thread: the tests are many small computations. Which engine a run takes by itself does not
depend on how busy the machine is, and nothing is remembered beyond these tests."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from kedge.tuning import timings

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _nothing_measured() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KEDGE_CACHE", folder)
        patch.setattr(timings, "MIN_RUN_S", float("inf"))
        yield
