"""FedCOG the part equals FedCOG the plain PyTorch script: same weights, batches and draws."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.optim import SGD
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.parts.fedcog import FedCOG
from kedge.sim.simulation import Simulation

SCRIPT = Path(__file__).parents[2] / "examples" / "reference" / "fedcog.py"
SMALL: dict[str, Any] = {"samples": 6, "batch": 4, "steps": 4, "lr": 0.05}
OPTIONS: dict[str, dict[str, Any]] = {
    "balanced": {"lambda_dis": 1.0},
    "lambda": {"weighting": "lambda", "lambda_kd": 0.5, "temperature": 2.0, "lambda_dis": 1.0},
    "later": {"start": 1},
}
COHORTS = {"all": ([0, 1, 2], [0, 1, 2]), "sampled": ([0, 2], [1, 2])}


def draws(run: Simulation, part: FedCOG, clients: list[int]) -> tuple[dict, dict, dict]:
    """The next round's batches, noise and order of the generated samples."""
    cohort = run.cohort(clients)
    batches, noise, orders = {}, {}, {}
    for i, k in enumerate(clients):
        job, steps = take_jobs(cohort.jobs, i), cohort.steps[i]
        batches[k] = [tuple(run.federation.clean(row)[:2]) for row in cohort.batches[i, :steps]]
        context = client.client_context(run.bound.at(run.round), job, {})
        view = View(context, FedCOG(**SMALL | {"steps": 0}), "prepare")
        if view.phase == "wait":
            continue
        noise[k] = view._part.prepare(view)["x"]
        local = {part.name: part.prepare(View(context, part, "prepare"))}
        orders[k] = []
        for t in range(steps):
            here = client.client_context(run.bound.at(run.round), job, local, torch.tensor(t))
            orders[k].append(part._rows(View(here, part, "term")))
    return batches, noise, orders


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("norm", ["none", "bn"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cohorts", COHORTS)
def test_the_part_equals_the_script(engine: str, norm: str, option: str, cohorts: str) -> None:
    values = OPTIONS[option]
    part = FedCOG(**SMALL | values)
    optim = SGD(lr=0.05, momentum=0.9, weight_decay=1e-3)
    run = images(norm=norm, sizes=(5, 9, 14), optim=optim).simulate(part, engine)
    net = run.module()
    start = {n: x.clone() for n, x in net.state_dict().items()}
    given = []
    for clients in COHORTS[cohorts]:
        given.append(draws(run, part, clients))
        run.run_round(clients)
    batches, noise, orders = (list(items) for items in zip(*given, strict=True))
    found = runpy.run_path(str(SCRIPT))["train"](
        net,
        start,
        batches,
        run.federation.label_counts(),
        noise,
        orders,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-3,
        steps=4,
        lr_generate=0.05,
        lambda_dis=part.lambda_dis,
        lambda_kd=part.lambda_kd if part.weighting == "lambda" else None,
        temperature=part.temperature,
        start=part.start,
    )
    ours = run.weights.params | run.weights.buffers
    assert tree.gap(ours, {n: found[n] for n in ours}) < 1e-9
    assert tree.gap(ours, {n: start[n] for n in ours}) > 1e-3


def test_the_script_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.startswith("accuracy ")
