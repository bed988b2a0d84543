"""The part equals the plain PyTorch script: same weights, batches and draws, two rounds."""

import dataclasses
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from kedge.check.problems import DOUBLE, Problem, images
from kedge.core import rng
from kedge.core.tree import to_wire
from kedge.parts.fedimpro import FedImpro
from kedge.sim.simulation import Simulation

SCRIPT = Path(__file__).parents[2] / "examples" / "reference" / "fedimpro.py"
COHORTS = ([0, 2], [1, 2])
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"ramp": 1},
    "official": FedImpro.presets["official"] | {"ramp": 1, "weight": 1.5},
    "paper": FedImpro.presets["paper"],
    "momenta": {"ramp": 0, "beta_m": 0.6, "beta_g": 0.3, "s_max": 0.05},
    "shared": {"ramp": 0, "draws_from": "shared", "spread": "variance"},
}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_fedimpro", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def problem(net: str) -> Problem:
    """8x8 images on a network without BatchNorm, or with it on both sides of the first cut."""
    plain = images(sizes=(5, 9, 14))
    if net == "plain":
        return plain
    generator = torch.Generator().manual_seed(3)
    module = nn.Sequential()
    module.add_module(
        "stage1",
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.AvgPool2d(4)),
    )
    module.add_module(
        "stage2", nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh())
    )
    module.add_module("head", nn.Linear(6, 3))
    for p in module.parameters():
        p.data = 0.5 * torch.randn(p.shape, generator=generator)
    return dataclasses.replace(plain, module=module.to(DOUBLE))


def works(run: Simulation, part: FedImpro, ref: ModuleType, clients: list[int]) -> list[Any]:
    """The next round of some clients, with kedge's own batches and draws, as the script's input."""
    cohort, shape = run.cohort(clients), run.server.slots["fedimpro"]["mean"].shape
    found = []
    for i, k in enumerate(clients):
        own = rng.fold(cohort.jobs.key[i], "fedimpro")
        batches, normals = [], []
        for t in range(cohort.steps[i]):
            batch = run.federation.clean(cohort.batches[i, t])
            rows = len(batch.y) if part.labels == "batch" else 3 * (len(batch.y) // 3 + 1)
            key = rng.fold(rng.fold(own, "inject"), t)
            batches.append((batch.x, batch.y))
            normals.append(rng.normal(key, (rows, shape[1]), DOUBLE))
        keys = rng.split(rng.fold(own, "reply"), 2)
        noise = tuple(part.noise * rng.normal(key, tuple(shape), DOUBLE) for key in keys)
        found.append(ref.Work(run.federation.sizes[k], batches, normals, noise))
    return found


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("net", ["plain", "batchnorm"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cut", ["stage1", "stage2"])
def test_the_part_equals_the_script(engine: str, net: str, option: str, cut: str) -> None:
    ref, values = script(), OPTIONS[option]
    part = FedImpro(**values | {"cut": cut, "noise": 0.02})
    task = problem(net)
    run = task.simulate(part, engine)
    first = run.server.slots["fedimpro"]["mean"]
    rounds, losses = [], []
    for clients in COHORTS:
        rounds.append(works(run, part, ref, clients))
        done = run.run_round(clients)
        steps = torch.tensor([float(len(w.batches)) for w in rounds[-1]], dtype=DOUBLE)
        losses.append(float((sum(done.losses.values()) * steps).sum() / steps.sum()))
    settings = ref.Settings(**values | {"cut": cut, "lr": 0.05})
    model, mean, scale, history = ref.train(task.module, first, rounds, settings)
    got = to_wire({"": run.weights.params | run.weights.buffers, **run.server.slots["fedimpro"]})
    wanted = to_wire({"": model.state_dict(), "mean": mean, "scale": scale})
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((got[name].double() - value.double()).abs().max()) < 1e-9, name
    assert losses == pytest.approx(history, abs=1e-9)


def test_presets_of_the_script_and_of_the_part_agree() -> None:
    ref = script()
    assert FedImpro.presets == {"official": ref.OFFICIAL, "paper": ref.PAPER}
    names = {f.name for f in dataclasses.fields(ref.Settings)} - {"lr"}
    part = FedImpro().for_model(images().model)  # its default cut
    for name in names:
        assert getattr(ref.Settings(), name) == getattr(part, name)


def test_the_script_runs_alone_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("round")]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
    assert float(lines[-1].split()[-2]) > 85
