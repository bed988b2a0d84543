"""Profiles of hypothesis: fixed examples, or many random ones.

By default every run draws the same examples and nothing is written to disk. With
``KEDGE_PROPERTIES=thorough`` the examples are random and many.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=50, **COMMON)
settings.register_profile("thorough", max_examples=2000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("KEDGE_PROPERTIES", "fixed"))

_home = tempfile.mkdtemp(prefix="kedge-hypothesis-")
set_hypothesis_home_dir(_home)  # its caches; by default they are in the working directory
atexit.register(shutil.rmtree, _home, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _no_traces() -> Iterator[None]:
    yield  # a worker process may end without atexit
    shutil.rmtree(_home, ignore_errors=True)
