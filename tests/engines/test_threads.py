"""How many threads a run has, how they wait, and how long timings count."""

from __future__ import annotations

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
from planning import make, planned

import kedge
from kedge.cli import let_waiting_threads_sleep
from kedge.engines import Execution
from kedge.errors import FieldError
from kedge.runs import planning, runner
from kedge.runs.config import Config
from kedge.tuning import known, load, plan, threads, timings
from kedge.tuning.known import Measurements
from kedge.tuning.load import Load
from kedge.tuning.placement import Settings
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


def test_the_numbers_of_threads_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, expected in ((1, [1]), (2, [1, 2]), (4, [1, 4]), (16, [1, 4, 16])):
        monkeypatch.setattr(torch, "get_num_threads", lambda most=most: most)
        assert threads.thread_counts(Settings(rounds=1), CPU) == expected
    assert threads.thread_counts(Settings(rounds=1, threads=3), CPU) == [3]
    assert threads.thread_counts(Settings(rounds=1), torch.device("cuda")) == [0]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (1e3, [LOOP, VECTOR]),  # small for six clients at once, too
        (5e5, [LOOP, VECTOR, VECTOR2]),
        (2e6, [LOOP, VECTOR, LOOP2, VECTOR2]),
        (math.inf, [LOOP, VECTOR, LOOP2, VECTOR2]),
    ],
)
def test_small_work_has_one_thread_without_a_measurement(
    operator: float, expected: list[Execution]
) -> None:
    sim = make(Config(clients=6))(0, Execution("loop"))
    plain = [Execution("loop"), Execution("vector")]
    assert threads.with_threads(plain, [1, 2], operator, Settings(rounds=1), sim) == expected


def test_worker_processes_share_nothing_but_the_rest_of_a_run_has_threads() -> None:
    sim = make(Config(clients=6))(0, Execution("loop"))
    shared = Execution("loop", workers=2)
    for operator, count in ((2e6, 1), (1e9, 2)):
        [found] = threads.with_threads([shared], [1, 2], operator, Settings(rounds=1), sim)
        assert found == Execution("loop", workers=2, threads=count)
        assert timings.label(found) == "2 workers"


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


def test_a_size_that_is_not_known_is_measured() -> None:
    broken: Any = SimpleNamespace(federation=SimpleNamespace(device=CPU))
    assert threads.largest_operator(broken, 2) == math.inf
    assert threads.unmeasured([1, 2], math.inf) == 1
    assert threads.unmeasured([1, 2], 1e9) == 2


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
@pytest.mark.parametrize(("engine", "factor", "chosen"), [("loop", 0.5, 2), ("vector", 2.0, 1)])
def test_a_named_engine_is_timed_with_one_thread_and_with_several(
    engine: str, factor: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def timed(device: Any, work: Any, *args: Any) -> Any:
        """As if threads changed the time by a factor."""
        result = work(*args)
        return result, 0.01 * (factor if torch.get_num_threads() == 2 else 1.0)

    monkeypatch.setattr(timings, "timed", timed)
    monkeypatch.setattr(threads, "SMALL_OPERATOR", 0.0)
    train = plan.engines[engine].train

    def watched(self: Any, cohort: Any) -> Any:
        seen.append((self.name, torch.get_num_threads()))
        return train(self, cohort)

    monkeypatch.setattr(plan.engines[engine], "train", watched)
    found = planned(engine=engine, **SMALL)
    assert found.execution == Execution(engine, threads=chosen)
    assert {(engine, 1), (engine, 2)} <= set(seen)
    assert f"{engine} on 2 threads" in found.reason or chosen == 2
    if factor == 2.0:  # one step was enough to see it
        assert seen.count((engine, 2)) == 1
        assert ", vector on 2 threads" in found.reason


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
    runner.run(config, tmp_path / "run")
    assert torch.get_num_threads() == 1
    folder = runner.Folder.resume(tmp_path / "run", config)[0]
    try:
        found = planning.choose(config, make(config), CPU, folder)
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


def remembered(age: float, busy: bool = False) -> Measurements:
    took = {"loop": 1.0, "vector": 2.0}
    return Measurements({}, Timings(took, took, 0.1, busy=busy), {}, 1e6, time.time() - age)


@pytest.mark.parametrize(
    ("days", "measured_busy", "busy_now", "counts"),
    [
        (29.0, False, False, True),
        (29.0, False, True, True),
        (31.0, False, False, False),
        (-1.0, False, False, False),  # the clock was wrong
        (0.5, True, True, True),  # no better now
        (0.5, True, False, False),  # now it is quiet
        (1.5, True, True, False),
    ],
)
def test_timings_expire_and_are_repeated_on_a_quiet_machine(
    days: float, measured_busy: bool, busy_now: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "other_tasks", lambda: 100.0 * busy_now)
    found = remembered(days * 86400, measured_busy)
    assert found.is_current == counts
    assert Measurements.from_record(found.to_record()) == found


@pytest.mark.usefixtures("quick")
def test_what_was_measured_beside_other_work_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(load, "other_tasks", lambda: 100.0)
        first = planned(**SMALL)
        assert "; measured beside other work, 3 clients" in first.reason
        assert planned(**SMALL).reason == first.reason + " (cached)"
    again = planned(**SMALL)
    assert "; measured, 3 clients" in again.reason
    assert "(cached)" not in again.reason
    assert planned(**SMALL).reason == again.reason + " (cached)"


@pytest.mark.usefixtures("quick")
def test_timings_carry_a_spread(cache: Path) -> None:
    planned(**SMALL)
    [record] = json.loads(cache.read_text()).values()
    found = record["timings"]
    assert set(found["spread"]) == set(found["steps"])
    assert all(value >= 0 for value in found["spread"].values())
    assert timings._spread([[9.0], [2.0, 4.0, 3.0]]) == pytest.approx(0.5)


def test_other_work_shows_in_tasks_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_WAIT", 1.25)
    monkeypatch.setattr(load.os, "cpu_count", lambda: 4)
    for tasks, wall, busy in ((0.0, 1.0, False), (2.0, 1.0, True), (0.0, 1.5, True)):
        monkeypatch.setattr(load, "other_tasks", lambda tasks=tasks: tasks)
        found = Load()
        found.sample()
        found.add(wall, 1.0)
        assert found.is_busy == busy
        assert load.is_busy() == (tasks > 0)
    assert not Load().is_busy


def test_tasks_that_want_to_run() -> None:
    assert OTHERS() >= 0.0


OTHERS = load.other_tasks  # the fixture replaces it


def test_the_name_of_the_processor() -> None:
    assert known.processor_name()
