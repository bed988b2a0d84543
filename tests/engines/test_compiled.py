"""Compiled functions compute what the functions themselves do, and engines use them."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.client import Carry
from kedge.core.update import Totals, total
from kedge.core.view import Job
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines import Execution, torch_compiler, vector
from kedge.engines import compiled as module
from kedge.engines.capture import shapes_of
from kedge.engines.compiled import compile_function
from kedge.engines.vector import _map_over_clients
from kedge.sim.simulation import Simulation

RAGGED = (5, 9, 26, 14)  # in batches of 5: 1, 2, 6 and 3 steps


@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler needs a C++ compiler")
@pytest.mark.long
def test_a_step_of_three_clients_with_dropout() -> None:
    """Masks are drawn by a generator whose constants have 31 bits: none may pass through float32
    on the way, which would change every mask."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 6), torch.randint(0, 3, (60,))
    fed = Federation(x, y, torch.arange(60).split(20), kedge.Classification(3))
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    sim = Simulation(fed, net, "scaffold", work=LocalWork(batch=4, steps=2))
    cohort = sim.cohort([0, 1, 2])
    begin, step, _ = _map_over_clients(sim.bound, {})
    carry, rows = begin(cohort.jobs), cohort.batches[:, 0]
    fast = compile_function(step, cohort.jobs, carry, rows)
    wanted = step(cohort.jobs, step(cohort.jobs, carry, rows), cohort.batches[:, 1])
    found = fast(cohort.jobs, fast(cohort.jobs, carry, rows), cohort.batches[:, 1])
    assert tree.gap(found, wanted) < 1e-6


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler needs a C++ compiler")
def test_totals_are_summed_up_in_a_compiled_end() -> None:
    """As on a GPU: sums, means, single clients and numbers, with leaves that stay on clients."""
    sim = images(norm="bn").simulate("scaffold+fedbn+krum(byzantine=0)")
    cohort = sim.cohort([0, 1, 2])
    begin, step, end = _map_over_clients(sim.bound, {})

    def totals(jobs: Job, carry: Carry) -> Totals:
        return total(sim.bound, end(jobs, carry).update, jobs.anchor)

    carry = step(cohort.jobs, begin(cohort.jobs), cohort.batches[:, 0])
    found = compile_function(totals, cohort.jobs, carry)(cohort.jobs, carry)
    wanted = totals(cohort.jobs, carry)
    assert wanted.uploads
    assert len(wanted.stacked.weights.params) == len(sim.weights.params)
    assert found.up_bytes == wanted.up_bytes > 0
    assert tree.gap(found.summed, wanted.summed) < 1e-12
    assert tree.gap(found.stacked, wanted.stacked) < 1e-12


@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler needs a C++ compiler")
def test_numbers_of_a_result_stay_as_they_are() -> None:
    def counted(x: Tensor) -> dict[Any, Any]:
        return {"size": x.numel(), ("a", "b"): x * 2, "name": "x", "more": {"last": x + 1}}

    fast, x = compile_function(counted, torch.zeros(3)), torch.arange(3.0)
    found, wanted = fast(x), counted(x)
    assert list(found) == list(wanted)
    assert (found["size"], found["name"]) == (3, "x")
    assert torch.equal(found["a", "b"], x * 2)
    assert torch.equal(found["more"]["last"], x + 1)


def test_what_is_too_long_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 3)

    def long(x: Tensor) -> Tensor:
        return ((x + 1) * 2 - 3) / 4

    assert compile_function(long, torch.ones(2)) is long


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch_compiler, "inductor", fail)

    def double(x: Tensor) -> Tensor:
        return x * 2

    with pytest.warns(UserWarning, match="run eagerly: no compiler here"):
        assert compile_function(double, torch.ones(2)) is double


# -- the vectorised engine ---------------------------------------------------------------------


class Compiler:
    """Gives functions back as they are; notes what it was given and with how many lanes that was
    called."""

    def __init__(self) -> None:
        self.lanes: list[int] = []  # of every function
        self.calls: list[int] = []

    def __call__(self, function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
        self.lanes.append(len(examples[2]))

        def call(*arguments: Any) -> Any:
            assert shapes_of(arguments) == shapes_of(examples)  # all that a compiled one can take
            self.calls.append(len(arguments[2]))
            return function(*arguments)

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(vector, "compile_function", made)
    return made


def simulate(how: Execution, sizes: tuple[int, ...] = RAGGED) -> Simulation:
    return images(norm="bn", sizes=sizes, dropout=0.3).simulate("scaffold", how)


def test_steps_of_the_full_stack_are_compiled_once(compiler: Compiler) -> None:
    sim = simulate(Execution("vector", compile=True), sizes=(14, 14, 14))
    for _ in range(3):
        sim.run_round()
    assert compiler.lanes == [3]
    assert compiler.calls == [3] * 9


def steps(sim: Simulation, clients: Sequence[int]) -> list[int]:
    return [sim.session.workload.work.steps_for(sim.federation.sizes[k]) for k in clients]


def test_ragged_clients_stay_on_the_compiled_stack(compiler: Compiler) -> None:
    """Those that have finished go on with the others, and what they had is put back."""
    fused, plain = (simulate(Execution("vector", compile=c)) for c in (True, False))
    for _ in range(2):
        assert tree.equal(fused.run_round().losses, plain.run_round().losses)
    longest = max(steps(fused, range(4)))
    assert longest > min(steps(fused, range(4)))
    assert (compiler.lanes, compiler.calls) == ([4], [4] * 2 * longest)
    assert tree.equal(fused.state(), plain.state())


def test_the_last_few_leave_it(compiler: Compiler) -> None:
    sizes = (5, 14, 5, 5, 5)  # one step each, but for one
    fused, plain = (simulate(Execution("vector", compile=c), sizes) for c in (True, False))
    for _ in range(2):
        fused.run_round()
        plain.run_round()
    assert (compiler.lanes, compiler.calls) == ([5], [5, 5])
    assert tree.equal(fused.state(), plain.state())


def test_every_size_of_a_stack_is_compiled_for_itself(compiler: Compiler) -> None:
    fused, plain = (simulate(Execution("vector", compile=c)) for c in (True, False))
    cohorts = [[2, 1], [0, 1, 2], [3, 2], [2, 1, 3], [0, 1, 2, 3]]
    for clients in cohorts:
        fused.run_round(clients)
        plain.run_round(clients)
    assert compiler.lanes == [2, 3, 4]
    assert compiler.calls == [len(c) for c in cohorts for _ in range(max(steps(fused, c)))]
    assert tree.equal(fused.state(), plain.state())


def test_what_is_not_to_be_compiled_is_not(compiler: Compiler) -> None:
    for how in (Execution("vector"), Execution("loop", compile=True)):  # a loop only on a GPU
        simulate(how).run_round()
    assert compiler.lanes == []
