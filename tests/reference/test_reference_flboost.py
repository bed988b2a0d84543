"""The part equals the plain-PyTorch script that was written from the paper, number by number."""

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kedge.check.problems import Problem, images
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.parts.flboost import FLBoost
from kedge.sim.simulation import Simulation

PATH = Path(__file__).parents[2] / "examples" / "reference" / "flboost.py"
COHORTS = ([0, 2], [2, 1])
SMALL: dict[str, Any] = {
    "steps": 3, "generator_steps": 2, "student_steps": 2, "batch": 7, "noise": 5, "width": 6,
}  # fmt: skip
PARTS = {"default": FLBoost(**SMALL), "paper": FLBoost(**SMALL | FLBoost.presets["paper"])}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_flboost", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def problem() -> Problem:
    local = SGD(lr=0.1, weight_decay=1e-3, schedule="exponential(0.998)")
    return images(norm="bn", sizes=(7, 9, 14), batch=5, optim=local)


def simulate(method: str, part: FLBoost, engine: str) -> Simulation:
    options = "+".join([method, str(part)])
    return problem().simulate(options, engine, weighting="uniform")


def draws(run: Simulation, part: FLBoost, clients: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The server's draws of the round that comes next."""
    key = rng.fold(rng.fold(rng.fold(run.session.key, "server"), run.round), "flboost")
    counts = run.federation.label_counts()[clients]
    return part._draw(key, counts.sum(0), torch.float64)


def generator_of(reference: ModuleType, run: Simulation, part: FLBoost) -> torch.nn.Module:
    """The script's generator with the simulation's present weights."""
    net = reference.Generator(5, 3, 1, 8, 6, part.final_norm).double()
    slot = run.server.slots["flboost"]
    with torch.no_grad():
        for mine, theirs in zip(net.parameters(), slot["params"].values(), strict=True):
            assert mine.shape == theirs.shape
            mine.copy_(theirs)
        for mine, theirs in zip(net.buffers(), slot["buffers"].values(), strict=True):
            mine.copy_(theirs)
    return net


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("name", PARTS)
def test_two_rounds_are_equal(reference: ModuleType, name: str, method: str, engine: str) -> None:
    part = PARTS[name]
    run = simulate(method, part, engine)
    model, generator = copy.deepcopy(problem().module), generator_of(reference, run, part)
    rounds = []
    for clients in COHORTS:
        cohort = run.cohort(clients)
        batches = [
            [tuple(run.federation.clean(rows)[:2]) for rows in cohort.batches[i, : cohort.steps[i]]]
            for i in range(len(clients))
        ]
        rounds.append(reference.Round(clients, batches, *draws(run, part, clients)))
        run.run_round(clients)
    counts = run.federation.label_counts()
    final, made, s = reference.flboost(
        model,
        generator,
        rounds,
        counts,
        scaffold=method == "scaffold",
        printed=name == "paper",
        generator_steps=2,
        student_steps=2,
    )
    found = final.state_dict()
    weights = run.weights.params | run.weights.buffers
    assert found.keys() == weights.keys()
    for leaf, value in weights.items():
        assert (found[leaf] - value).abs().max() < 1e-8, leaf
    slot = run.server.slots["flboost"]
    for mine, theirs in zip(made.parameters(), slot["params"].values(), strict=True):
        assert (mine - theirs).abs().max() < 1e-8
    for mine, theirs in zip(made.buffers(), slot["buffers"].values(), strict=True):
        assert (mine - theirs).abs().max() < 1e-8
    if method == "scaffold":
        for mine, theirs in zip(s, run.server.slots["scaffold"].values(), strict=True):
            assert (mine - theirs).abs().max() < 1e-8
    base = problem().simulate(method, engine, weighting="uniform")
    for clients in COHORTS:
        base.run_round(clients)
    assert tree.gap(base.weights.params, run.weights.params) > 1e-3  # it does something


def test_the_demonstration_learns(reference: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert reference.main(rounds=6) > 60
    assert "SCAFFOLD+FLBoost" in capsys.readouterr().out
