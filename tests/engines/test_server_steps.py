"""Steps on the server: captured or compiled, they compute what they say, in every round."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kedge.check.problems import Problem, images
from kedge.core import rng, tree
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.steps import REFERENCE, ServerView
from kedge.core.tree import Tree, Weights
from kedge.core.update import ZERO
from kedge.core.view import Spec
from kedge.data.federation import Federation
from kedge.engines import Execution, capture, convolutions, server_steps
from kedge.engines.capture import Captures, shapes_of
from kedge.engines.server_steps import FastSteps
from kedge.errors import HookError
from kedge.sim.simulation import Simulation

CUDA = torch.device("cuda")
METHODS = (
    "fedgen(steps=3, batch=6, noise=3, width=2)",
    "fedgen(steps=2, batch=6, noise=3, width=2, level=input, keep_moments=false)",
    "feddf(generator_steps=3, student_steps=2, batch=6, noise=3, width=4)",
    "feddf(generator_steps=2, student_steps=2, batch=6, noise=3, width=4, level=feature)",
    "flboost:official(steps=2, generator_steps=2, batch=6, noise=3, width=4)",
    "flboost:paper(steps=2, student_steps=2, batch=6, noise=3, width=4)",
)


class Tape:
    """CUDA graphs on a CPU: the operators of the first run on the tensors that they had then.

    Replaying reads the buffers anew, but neither Python values nor tensors of a later round.
    """

    captured = 0

    def __init__(self, device: torch.device, carry: Tree) -> None:
        self._carry, self._tapes, self._results = carry, {}, {}

    def replay(self, name: Any, work: Callable[[], Any]) -> Any:
        if name not in self._tapes:
            Tape.captured += 1
            before = tree.map(torch.clone, self._carry)
            self._tapes[name] = make_fx(lambda x: work() or x)(torch.zeros(()))
            tree.map(lambda t, s: t.copy_(s), self._carry, before)
        found = self._tapes[name](torch.zeros(()))
        first = self._results.setdefault(name, found)  # in the same memory after every replay
        tree.map(lambda t, s: t.copy_(s), first, found)
        return first


@pytest.fixture(autouse=True)
def _on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    Tape.captured = 0
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(capture, "Graphs", Tape)
        for module in (capture, server_steps):  # fewer steps to trace
            monkeypatch.setattr(module, "UNROLL", 2)


def problem(norm: str = "bn", **options: Any) -> Problem:
    return images(norm=norm, optim=SGD(lr=0.05, schedule="exponential(0.5)"), **options)


def captured(sim: Simulation, joined: bool = False) -> Simulation:
    """The simulation with the server's steps as on a GPU; ``joined``: as in compiled steps, the
    student's passes join those of the clients' models."""
    sim.steps = FastSteps(Captures(True), CUDA, False)
    sim.steps.stacks_all = joined
    return sim


def run(sim: Simulation, cohorts: tuple[list[int], ...] = ([0, 1], [1, 2], [0, 2])) -> Tree:
    for cohort in cohorts:
        sim.run_round(cohort)
    return {"weights": sim.weights, "slots": sim.server.slots}


@pytest.mark.long
@pytest.mark.parametrize("norm", ["bn", pytest.param("gn", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_equal_the_reference(method: str, norm: str) -> None:
    """Three rounds with different clients, labels, keys and learning rates. Detects a value of the
    first round inside a graph."""
    expected = run(problem(norm).simulate(method))
    found = run(captured(problem(norm).simulate(method)))
    assert tree.gap(found, expected) < 1e-10
    assert Tape.captured <= 5  # in the first round only


@pytest.mark.long
@pytest.mark.parametrize("norm", ["bn", pytest.param("gn", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", [*METHODS[4:], f"{METHODS[5][:-1]}, level=feature)"])
def test_models_that_run_as_one_equal_the_reference(
    method: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "available", lambda: True)
    expected = run(problem(norm).simulate(method))
    assert tree.gap(run(captured(problem(norm).simulate(method), True)), expected) < 1e-10
    assert Tape.captured <= 6


@pytest.mark.long
def test_dropout_of_the_student_differs_between_steps_and_rounds() -> None:
    method = METHODS[2]
    expected = run(problem(dropout=0.5).simulate(method))
    assert tree.gap(run(captured(problem(dropout=0.5).simulate(method))), expected) < 1e-10


@pytest.mark.long
def test_a_cohort_of_another_size_is_captured_anew() -> None:
    cohorts = ([0, 1], [0, 1, 2], [1, 2], [2, 1, 0])
    expected = run(problem().simulate(METHODS[0]), cohorts)
    sim = captured(problem().simulate(METHODS[0]))
    run(sim, cohorts[:1])
    first = Tape.captured
    assert tree.gap(run(sim, cohorts[1:]), expected) < 1e-10
    assert Tape.captured == 2 * first


# -- one part -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk(Part):
    """Steps whose last two positions are remembered under swapped names."""

    factor: float = 2.0

    def server_init(self, spec: Spec) -> Tree:
        return {"now": torch.ones(3), "before": torch.zeros(3)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        xs = {"x": torch.arange(23.0)[:, None] * torch.ones(3)}
        given = {"lr": torch.full((), 0.5**r.round)}
        found = r.iterate(self._step, r.server, xs, given)
        return weights, found

    def _step(self, s: ServerView, given: Tree, carry: Tree, x: Tree) -> Tree:
        new = self.factor * carry["now"] - carry["before"] + given["lr"] * x["x"]
        return {"now": new, "before": carry["now"]}

    def _twice(self, s: ServerView, given: Tree) -> Tree:
        return {"twice": 2 * given["x"], "same": given["x"]}


def at_server(part: Part, round: int = 0, steps: Any = REFERENCE) -> tuple[Round, Weights]:
    sim = problem().simulate(part)
    r = Round(
        part=part, model=sim.bound.model, spec=sim.bound.spec, round=round, lr=0.1, key=rng.key(0),
        phase="", anchor=sim.weights, server=part.server_init(sim.bound.spec), uploads={},
        totals=ZERO.of([0], round), steps=steps,
    )  # fmt: skip
    return r, sim.weights


def test_steps_by_hand() -> None:
    """A carry whose leaves change places, over more steps than one graph holds."""
    steps = FastSteps(Captures(True), CUDA, False)
    for round in range(3):
        now, before = torch.ones(3), torch.zeros(3)
        for t in range(23):
            now, before = 2 * now - before + 0.5**round * t, now
        for how in (REFERENCE, steps):
            r, weights = at_server(Walk(), round, how)
            found = Walk().server_step(r, weights)[1]
            assert torch.equal(found["now"], now)
            assert torch.equal(found["before"], before)
    assert Tape.captured == 2  # two steps, and one


def test_results_are_not_overwritten() -> None:
    r, weights = at_server(Walk(), 0, FastSteps(Captures(True), CUDA, False))
    part, x = r._part, torch.ones(3)
    first = r.apply(part._twice, {"x": x}), part.server_step(r, weights)[1]
    kept = tree.map(torch.clone, {"a": first[0], "b": first[1]})
    r.apply(part._twice, {"x": 5 * x})
    r.server = tree.scale(r.server, 3.0)
    part.server_step(r, weights)
    assert tree.equal({"a": first[0], "b": first[1]}, kept)
    assert torch.equal(kept["a"]["twice"], 2 * x)
    assert torch.equal(x, torch.ones(3))


def test_borrowed_results_are_read_where_they_are() -> None:
    r, _ = at_server(Walk(), 0, FastSteps(Captures(True), CUDA, False))
    part, x, carry = r._part, torch.ones(3), r.server
    twice = r.apply(part._twice, {"x": x}, borrow=True)
    kept = r.keep(twice)
    again = r.apply(part._twice, {"x": 5 * x}, borrow=True)
    assert again["twice"] is twice["twice"]
    assert torch.equal(twice["twice"], 10 * x)
    assert torch.equal(kept["twice"], 2 * x)

    def step(lr: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return r.iterate(part._step, carry, {"x": row[None]}, {"lr": lr})["now"]

    lr, row = again["twice"], torch.arange(3.0)
    assert torch.equal(step(lr, row), 2 + 10 * row)
    made = Tape.captured
    r.apply(part._twice, {"x": 3 * x}, borrow=True)
    assert torch.equal(step(lr, row), 2 + 6 * row)
    assert Tape.captured == made
    # other tensors of this shape are neither mistaken for it nor written to its memory
    assert torch.equal(step(7 * x, row), 2 + 7 * row)
    assert torch.equal(step(7 * x, lr), 2 + 7 * 6 * x)
    assert torch.equal(step(lr, lr), 2 + 36 * x)
    assert torch.equal(lr, 6 * x)
    assert torch.equal(step(lr, row), 2 + 6 * row)


def test_a_borrowed_carry_goes_on_where_it_is() -> None:
    r, _ = at_server(Walk(), 0, FastSteps(Captures(True), CUDA, False))
    plain, _ = at_server(Walk())
    xs, given = {"x": torch.arange(6.0).reshape(2, 3)}, {"lr": torch.ones(())}
    last, expected = r.server, plain.server
    for _ in range(3):
        last = r.iterate(r._part._step, last, xs, given, borrow=True)
        expected = plain.iterate(plain._part._step, expected, xs, given)
        assert tree.equal(last, expected)
    kept, other = r.keep(last), {n: -x for n, x in expected.items()}
    r.iterate(r._part._step, other, xs, given, borrow=True)
    assert tree.equal(kept, expected)
    assert not tree.equal(last, expected)


def test_more_steps_than_a_graph_holds_leave_a_borrowed_result_alone() -> None:
    r, _ = at_server(Walk(), 0, FastSteps(Captures(True), CUDA, False))
    plain, _ = at_server(Walk())
    rows = torch.arange(15.0).reshape(5, 3)
    twice = r.apply(r._part._twice, {"x": rows}, borrow=True)
    given = {"lr": torch.ones(())}
    found = r.iterate(r._part._step, r.server, {"x": twice["twice"]}, given)
    assert tree.equal(found, plain.iterate(plain._part._step, plain.server, {"x": 2 * rows}, given))
    assert torch.equal(twice["twice"], 2 * rows)


def test_fields_of_the_part_belong_to_the_key() -> None:
    steps = FastSteps(Captures(True), CUDA, False)
    ends = []
    for factor in (2.0, 1.0, 2.0):
        part = Walk(factor)
        r, weights = at_server(part, 0, steps)
        ends.append(part.server_step(r, weights)[1]["now"])
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])


def test_no_steps_return_the_carry() -> None:
    for how in (REFERENCE, FastSteps(Captures(True), CUDA, False)):
        r, _ = at_server(Walk(), 0, how)
        carry = r.server
        assert r.iterate(r._part._step, carry, {"x": torch.zeros(0, 3)}, {}) is carry


def test_what_would_keep_its_value_is_refused() -> None:
    part = Walk()
    r, _ = at_server(part)
    with pytest.raises(HookError, match="passes a float to _step"):
        r.iterate(part._step, r.server, {"x": torch.zeros(1, 3)}, {"lr": 0.1})
    with pytest.raises(HookError, match="one of its methods"):
        r.apply(lambda s, given: given, {"x": torch.zeros(1)})
    with pytest.raises(HookError, match="object has no attribute 'clients'"):
        problem().simulate(Peeking()).run_round()


@dataclass(frozen=True)
class Peeking(Walk):
    """Reads the round inside a step."""

    needs_clients = True

    def _step(self, s: ServerView, given: Tree, carry: Tree, x: Tree) -> Tree:
        return tree.scale(carry, s.clients.params["head.bias"].sum())  # type: ignore[attr-defined]


# -- where memory or capture fails --------------------------------------------------------------


class Failing:
    error: Exception

    def __init__(self, *_: Any) -> None:
        pass

    def replay(self, name: Any, work: Callable[[], None]) -> None:
        raise self.error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("not permitted")])
def test_what_cannot_be_captured_runs_eagerly(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "Graphs", Failing)
    monkeypatch.setattr(Failing, "error", error, raising=False)
    captures = Captures(True)
    captures._captured["steps of clients"] = None
    r, weights = at_server(Walk(), 1, FastSteps(captures, CUDA, False))
    with pytest.warns(UserWarning, match=f"run eagerly: {error}"):
        found = r._part.server_step(r, weights)[1]
    again = r._part.server_step(r, weights)[1]  # no second warning
    plain, _ = at_server(Walk(), 1)
    expected = r._part.server_step(plain, weights)[1]
    assert tree.equal(found, expected)
    assert tree.equal(again, expected)
    freed = isinstance(error, torch.OutOfMemoryError)
    assert ("steps of clients" in captures._captured) != freed


# -- compiled ------------------------------------------------------------------------------------


def test_on_a_cpu_steps_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compiler(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
        compiled.append(function.__qualname__)

        def call(*arguments: Any) -> Any:
            assert shapes_of(arguments) == shapes_of(examples)
            return function(*arguments)

        return call

    monkeypatch.setattr(server_steps, "compile_function", compiler)
    expected = run(problem().simulate(METHODS[2], "vector"))
    sim = problem().simulate(METHODS[2], "vector")
    sim.steps = FastSteps(Captures(True), torch.device("cpu"), True)
    assert tree.equal(run(sim), expected)
    assert len(compiled) == 2  # the generator's step, the student's


def test_which_engines_have_fast_steps() -> None:
    def steps(engine: str, **options: Any) -> Any:
        made = problem().simulate("fedavg", Execution(engine, **options))  # type: ignore[arg-type]
        return [server_steps.server_steps(made.engine, d) for d in (torch.device("cpu"), CUDA)]

    for engine in ("loop", "vector"):
        assert steps(engine)[0] is REFERENCE
        assert isinstance(steps(engine)[1], FastSteps)
    assert steps("reference") == [REFERENCE, REFERENCE]
    assert isinstance(steps("vector", compile=True)[0], FastSteps)
    assert steps("loop", compile=True)[0] is REFERENCE  # a loop is compiled on a GPU only


@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler needs a C++ compiler")
@pytest.mark.long
def test_compiled_steps_equal_the_reference() -> None:
    method = "feddf(generator_steps=0, student_steps=2, batch=6, noise=3, width=4)"
    expected = run(problem().simulate(method))
    sim = problem().simulate(method)
    sim.steps = FastSteps(Captures(False), torch.device("cpu"), True)
    assert tree.gap(run(sim), expected) < 1e-9


# -- on a GPU ------------------------------------------------------------------------------------


def on_gpu(norm: str, method: str, engine: str, dtype: torch.dtype = torch.float32) -> Simulation:
    small = problem(norm)
    double = small.federation
    federation = Federation(
        double.x.to(dtype), double.y, torch.split(double.rows, double.sizes), double.task,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    return Simulation(
        federation, Model(small.module.to(dtype)), method, optim=small.optim, work=small.work,
        engine=engine,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("norm", ["bn", "gn"])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_equal_eager_steps(
    method: str, norm: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay repeats the kernels of a capture, so that the results are equal but for the choice
    of an algorithm. The reference sums in another order, and Adam turns rounding into steps where a
    gradient is next to zero: it is compared with in float64."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    # TF32 would round differently in every algorithm
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    states = []
    for captures in (Captures(True), Captures(False)):
        sim = on_gpu(norm, method, engine)
        sim.steps = FastSteps(captures, CUDA, False)
        states.append(run(sim))
        assert None not in captures._captured.values()  # none was given up
    assert tree.gap(*states) < 1e-6
    states = []
    for steps in (FastSteps(Captures(True), CUDA, False), REFERENCE):
        sim = on_gpu(norm, method, engine, torch.float64)
        sim.steps = steps
        states.append(run(sim))
    assert tree.gap(*states) < 1e-10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_simulation_on_a_gpu_captures_its_server() -> None:
    sim = on_gpu("bn", METHODS[4], "loop")
    run(sim)
    steps = {key[3].__name__ for key in sim.engine.captures._captured if key[0] == "server"}
    assert steps == {"_as_read", "_generator_step", "_lesson", "_student_step"}
