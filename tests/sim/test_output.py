"""The hook ``output``: the weights to evaluate and to keep, beside those to train on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.errors import HookError
from kedge.history.folder import CHECKPOINT
from kedge.sim.fleet import Fleet


@dataclass(frozen=True)
class SWA(Part):
    """Evaluate the mean of all iterates from a round on (stochastic weight averaging)."""

    begin: int = 1

    def server_init(self, spec):
        zero = torch.zeros((), dtype=spec.dtype, device=spec.device)
        return {"sum": tree.zeros_like(spec.params), "count": zero}

    def server_step(self, r, weights):
        if r.round < self.begin:
            return weights, r.server
        total = tree.map(torch.add, r.server["sum"], weights.params)
        return weights, {"sum": total, "count": r.server["count"] + 1}

    def output(self, server, weights):
        mean = tree.map(lambda s: s / server["count"].clamp_min(1), server["sum"])
        swa = tree.map(lambda m, w: torch.where(server["count"] > 0, m, w), mean, weights.params)
        return weights._replace(params=weights.params | swa)


@dataclass(frozen=True)
class Twice(Part):
    """Doubles the weights to evaluate."""

    def output(self, server, weights):
        return weights._replace(params=tree.scale(weights.params, 2.0))


@dataclass(frozen=True)
class Shifted(Part):
    def output(self, server, weights):
        return weights._replace(params=tree.map(lambda w: w + 1, weights.params))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_weight_averaging_is_a_part_of_three_hooks(engine: str) -> None:
    problem = images(norm="bn")
    run, plain = problem.simulate(SWA(), engine), problem.simulate("fedavg", engine)
    iterates: list[Weights] = []
    for t in range(4):
        run.run_round()
        plain.run_round()
        assert tree.equal(run.weights, plain.weights)  # training is not affected
        iterates.append(plain.weights)
        seen = iterates[1:] or iterates
        mean = tree.map(lambda *w: sum(w) / len(w), *(w.params for w in seen))
        assert tree.gap(run.output.params, mean) < 1e-14
        assert tree.equal(run.output.buffers, plain.weights.buffers)
        assert run.evaluate() == run.evaluate(run.output)
        assert (run.evaluate() == plain.evaluate()) == (t < 2)
    state = run.module().state_dict()
    assert tree.gap({n: state[n] for n in mean}, mean) < 1e-14


def test_outputs_are_taken_left_to_right() -> None:
    first, second = (images().simulate(m) for m in (Twice() + Shifted(), Shifted() + Twice()))
    start = first.weights.params
    assert tree.equal(first.output.params, tree.map(lambda w: 2 * w + 1, start))
    assert tree.equal(second.output.params, tree.map(lambda w: 2 * (w + 1), start))


def test_without_such_a_part_the_output_is_what_training_goes_on_from() -> None:
    run = images().simulate("scaffold")
    assert run.output is run.weights


def test_runs_keep_and_test_the_output(tmp_path: Path) -> None:
    """Records, results, the saved model and a resumed run have the output; checkpoints do not."""
    options = {"rounds": 4, "seeds": [0], "clients": 4, "steps": 1, "engine": "loop"}
    whole = kedge.run("fedexp", out=tmp_path / "whole", **options)
    last = kedge.run("fedexp(average=false)", out=tmp_path / "last", **options)
    model = whole.models[0]
    saved = kedge.load(tmp_path / "whole").model.module
    assert tree.equal(dict(saved.state_dict()), dict(model.state_dict()))
    three = kedge.run("fedexp(average=false)", **options | {"rounds": 3})
    for name, value in model.state_dict().items():
        one, other = (r.models[0].state_dict()[name] for r in (three, last))
        torch.testing.assert_close(value, (one + other) / 2)
        assert not torch.equal(value, other)
    states = [load_file(tmp_path / n / "seed-0" / CHECKPOINT) for n in ("whole", "last")]
    shared = [n for n in states[1] if n.startswith("weights")]
    assert shared
    assert all(torch.equal(states[0][n], states[1][n]) for n in shared)
    assert whole.records[0][0]["loss"] == last.records[0][0]["loss"]
    assert whole.records[0][3]["loss"] != last.records[0][3]["loss"]
    assert whole.records[0][3]["train_loss"] == last.records[0][3]["train_loss"]


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_held_out_rows_are_tested_with_the_output_and_personal_models_without(engine: str) -> None:
    problem = images(sizes=(8, 8, 8))
    fed = problem.federation
    rows = [own.chunk(2) for own in torch.split(fed.rows, 8)]
    train, held = ([pair[i] for pair in rows] for i in (0, 1))
    federation = Federation(fed.x, fed.y, train, fed.task, held_out=held, dtype=fed.dtype)
    own = dataclasses.replace(problem, federation=federation)
    twice, plain = (own.simulate(m, engine) for m in (Twice(), "fedavg"))
    for run in (twice, plain):
        run.run_round()
    assert twice.evaluate_clients(personal=True) == plain.evaluate_clients(personal=True)
    assert twice.evaluate_clients() != plain.evaluate_clients()


def test_lanes_have_outputs_of_their_own() -> None:
    together, alone = (
        [images(norm="bn").simulate("fedexp", "vector", seed=s) for s in (0, 1)] for _ in range(2)
    )
    fleet = Fleet(together)
    for _ in range(3):
        fleet.run_round()
        for sim in alone:
            sim.run_round()
    for a, b in zip(together, alone, strict=True):
        assert tree.gap(a.output, b.output) < 1e-12
    assert tree.gap(together[0].output.params, together[1].output.params) > 1e-4


def test_an_output_that_changes_its_arguments_is_rejected() -> None:
    class InPlace(Part):
        def output(self, server, weights):
            return weights._replace(params=tree.map(lambda w: w.mul_(2), weights.params))

    run = images().simulate(InPlace())
    with pytest.raises(HookError, match=r"inplace.output changed its argument weights"):
        run.evaluate()


def test_a_session_outside_the_simulator_has_the_output() -> None:
    run = images().simulate(Twice())
    assert tree.equal(run.session.output(), run.output)
    assert tree.equal(run.session.request("").broadcast.weights, run.weights)
