"""The part equals the plain PyTorch script: same weights and batches, two rounds."""

import dataclasses
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kedge.check.problems import DOUBLE, images
from kedge.parts.fedtr import FedTR
from kedge.sim.simulation import Simulation

SCRIPT = Path(__file__).parents[2] / "examples" / "reference" / "fedtr.py"
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {**FedTR.presets["paper"], "lambda_R": 0.1},
    "persistent": {"drift_rule": "descent", "alpha": 1.0, "eta_g": 0.3, "persistent": True},
    "none": {"drift_rule": "none", "lambda_R": 2.0},
}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_fedtr", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def batches_of(run: Simulation, clients: list[int]) -> dict[int, Any]:
    """The batches of the next round, as the script takes them."""
    cohort = run.cohort(clients)
    return {
        k: [tuple(run.federation.clean(row)[:2]) for row in cohort.batches[i, : cohort.steps[i]]]
        for i, k in enumerate(clients)
    }


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("norm", ["none", "bn"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "cohorts", [([0, 1, 2], [0, 1, 2]), ([0, 2], [1, 2])], ids=["all", "sampled"]
)
def test_the_part_equals_the_script(engine: str, norm: str, option: str, cohorts: Any) -> None:
    ref, values = script(), OPTIONS[option]
    problem = images(norm=norm, sizes=(5, 9, 14))
    run = problem.simulate(FedTR(**values), engine)
    fed = run.federation
    data = []
    for k in range(3):
        own = fed.clean(fed.rows[fed.offsets[k] : fed.offsets[k] + fed.sizes[k]])
        data.append((own.x, own.y))
    rounds, losses = [], []
    for clients in cohorts:
        rounds.append(batches_of(run, clients))
        done = run.run_round(clients)
        steps = torch.tensor([float(len(b)) for b in rounds[-1].values()], dtype=DOUBLE)
        losses.append(float((sum(done.losses.values()) * steps).sum() / steps.sum()))
    settings = ref.Settings(**values | {"lr": 0.05})
    model, centroids, history = ref.train(problem.module, data, 3, rounds, settings)
    got = run.weights.params | run.weights.buffers
    wanted = model.state_dict()
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((got[name].double() - value.double()).abs().max()) < 1e-9, name
    assert float((run.server.slots["fedtr"]["centroids"] - centroids).abs().max()) < 1e-9
    assert losses == pytest.approx(history, abs=1e-9)


def test_presets_of_the_script_and_of_the_part_agree() -> None:
    ref = script()
    assert FedTR.presets["paper"] == ref.PAPER
    names = {f.name for f in dataclasses.fields(ref.Settings)} - {"lr"}
    for name in names:
        assert getattr(ref.Settings(), name) == getattr(FedTR(), name)


def test_the_script_runs_alone_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("round")]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert float(lines[-1].split()[-2]) > 85
