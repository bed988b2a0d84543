"""How many threads a run has, how they wait, and how long timings count."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.planning import make, planned

import kedge
from kedge.cli import let_waiting_threads_sleep
from kedge.engines import Execution
from kedge.errors import FieldError
from kedge.runs import planning, train
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.planning import SeedJob
from kedge.settings import Config
from kedge.tuning import plan as threads
from kedge.tuning import timings
from kedge.tuning.placement import Settings
from kedge.tuning.plan import Measurements
from kedge.tuning.timings import Timings

CPU = torch.device("cpu")
LOOP, VECTOR = Execution("loop", threads=1), Execution("vector", threads=1)
LOOP2, VECTOR2 = Execution("loop", threads=2), Execution("vector", threads=2)
SMALL = {"clients": 3, "steps": 2, "seeds": (0,)}


@pytest.fixture
def two_threads() -> Any:
    """As torch has on two cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# -- the size of the work -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "loop", "vector"),
    [(1e3, 1, 1), (2e6, 1, 4), (2e7, 4, 16), (1e8, 16, 16), (math.inf, 1, 1)],
)
def test_threads_follow_the_size_of_the_largest_operator(
    operator: float, loop: int, vector: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six clients at once share an operator of the vector engine; an unknown size has one."""
    sim = make(Config(clients=6))(0, Execution("loop"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    found = [
        threads.threads_of(Execution(name), operator, Settings(rounds=1), sim)
        for name in ("loop", "vector")
    ]
    assert found == [loop, vector]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert threads.threads_of(Execution("loop"), 2e7, Settings(rounds=1), sim) == 2
    assert threads.threads_of(Execution("loop"), 1e9, Settings(rounds=1, threads=3), sim) == 3


def test_the_label_of_workers_leaves_the_threads_of_the_rest_out() -> None:
    assert timings.label(Execution("loop", workers=2, threads=2)) == "2 workers"


def test_the_size_of_operators() -> None:
    a, b = torch.ones(4, 6), torch.ones(6, 5)
    assert threads.flops_of("aten::addmm", (torch.ones(5), a, b), a @ b) == 2 * 4 * 6 * 5
    stacked = torch.ones(3, 4, 6), torch.ones(3, 6, 5)
    assert threads.flops_of("aten::bmm", stacked, torch.bmm(*stacked)) == 3 * 2 * 4 * 6 * 5
    x, weight = torch.ones(2, 3, 8, 8), torch.ones(7, 3, 5, 5)
    out = torch.conv2d(x, weight)
    each = 2 * 2 * 7 * 4 * 4 * 3 * 5 * 5
    assert threads.flops_of("aten::convolution", (x, weight, None), out) == each
    grads = (x, weight, None)
    assert threads.flops_of("aten::convolution_backward", (out, x, weight), grads) == each
    assert threads.flops_of("aten::index.Tensor", (torch.ones(1000), [1]), torch.ones(10)) == 10
    assert threads.flops_of("aten::numel", (), None) == 0


def test_the_largest_operator_of_a_step() -> None:
    """Digits have 64 features: the first layer of a batch is 32 x 64 x 128."""
    config = Config(clients=3, model="mlp(hidden=[128])", batch=32)
    sim = make(config)(0, Execution("loop"))
    assert threads.largest_operator(sim, 2) == 2 * 32 * 64 * 128


def test_a_size_that_is_not_known_is_infinite() -> None:
    broken: Any = SimpleNamespace(federation=SimpleNamespace(device=CPU))
    assert threads.largest_operator(broken, 2) == math.inf


# -- one thread against several -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "spread", "chosen"),
    [
        ((1.0, 0.96), 0.0, LOOP),  # a tie
        ((1.0, 0.8), 0.0, LOOP2),
        ((1.0, 0.8), 0.3, LOOP),  # within the spread of the repeats
        ((1.0, 40.0), 0.0, LOOP),
    ],
)
def test_one_thread_where_it_wins_or_ties(
    steps: tuple[float, float], spread: float, chosen: Execution
) -> None:
    took = dict(zip(["loop", "loop on 2 threads"], steps, strict=True))
    known = Timings(took, took, 0.0, spread={"loop on 2 threads": spread})
    assert timings.fastest([LOOP, LOOP2], known, 10) == chosen


@pytest.mark.usefixtures("quick", "two_threads")
def test_a_run_has_its_threads_and_gives_them_back(tmp_path: Path) -> None:
    seen: list[int] = []
    watch = lambda seed, record: seen.append(torch.get_num_threads())  # noqa: E731
    config = {**SMALL, "rounds": 2, "model": "linear"}
    kedge.run(**config, out=tmp_path / "auto", watch=watch)
    kedge.run(**config, threads=2, out=tmp_path / "two", watch=watch)
    assert seen == [1, 1, 2, 2]
    assert torch.get_num_threads() == 2
    for name, count in (("auto", 1), ("two", 2)):
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert (environment["threads"], environment["how"]["threads"]) == (count, count)


def test_a_resumed_run_keeps_its_threads(tmp_path: Path) -> None:
    config = Config(rounds=2, model="linear", threads=2, **SMALL)
    train.run(config, tmp_path / "run")
    assert torch.get_num_threads() == 1
    folder = TrainingFolder.resume(tmp_path / "run", config)[0]
    try:
        found = planning.choose([SeedJob(config, config.seeds[0], make(config), folder)])
        assert (found.execution.threads, torch.get_num_threads()) == (2, 2)
    finally:
        torch.set_num_threads(1)


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(FieldError, match="threads"):
        Config(threads=-1)


# -- threads that wait ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(name: str) -> None:
    environment: dict[str, str] = {}
    let_waiting_threads_sleep(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    own = {name: "ACTIVE"}
    let_waiting_threads_sleep(own)
    assert own == {name: "ACTIVE"}


def test_they_sleep_before_torch_is_imported() -> None:
    code = (
        "import sys, os, kedge.cli; sys.argv = ['kedge', '--version']; seen = [];\n"
        "sys.addaudithook(lambda event, args: seen.append(os.environ.get('OMP_WAIT_POLICY'))\n"
        "                 if event == 'import' and args[0] == 'kedge.cli.app' else None)\n"
        "assert 'torch' not in sys.modules\n"
        "try: kedge.cli.main()\nexcept SystemExit: pass\n"
        "assert seen == ['PASSIVE'], seen"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# -- what is remembered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "counts"),
    [(29.0, True), (31.0, False), (-1.0, False)],  # the last: the clock was wrong
)
def test_timings_expire(days: float, counts: bool) -> None:
    took = {"loop": 1.0, "vector": 2.0}
    when = time.time() - days * 86400
    found = Measurements({}, Timings(took, took, 0.1), {}, 1e6, when)
    assert found.is_current == counts
    assert Measurements.from_record(dataclasses.asdict(found)) == found


@pytest.mark.usefixtures("quick")
def test_timings_carry_a_spread(cache: Path) -> None:
    planned(**SMALL)
    [record] = json.loads(cache.read_text()).values()
    found = record["timings"]
    assert set(found["spread"]) == set(found["steps"])
    assert all(value >= 0 for value in found["spread"].values())
    assert timings._spread([[9.0], [2.0, 4.0, 3.0]]) == pytest.approx(0.5)
