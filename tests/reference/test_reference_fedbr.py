"""FedBR the part equals FedBR the plain PyTorch script: same weights, batches and draws."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kedge.check.problems import images
from kedge.core import client, rng, tree
from kedge.core.optim import SGD
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.parts.fedbr import FedBR
from kedge.sim.simulation import Simulation

SCRIPT = Path(__file__).parents[2] / "examples" / "reference" / "fedbr.py"
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "unequal": {"inv_temperature2": 0.5, "lam": 0.1, "mu": 2.0},
    "mixture": {"mixture": 2},
}
COHORTS = {"all": ([0, 1, 2], [0, 1, 2]), "sampled": ([0, 2], [1, 2])}


def draws(run: Simulation, part: FedBR, clients: list[int]) -> tuple[dict, dict, list, dict]:
    """The next round's batches, who and what is behind each mean, and what is mixed in."""
    cohort = run.cohort(clients)
    batches, members, mixed = {}, {}, {}
    for i, k in enumerate(clients):
        job, steps = take_jobs(cohort.jobs, i), cohort.steps[i]
        batches[k] = [tuple(run.federation.clean(row)[:2]) for row in cohort.batches[i, :steps]]
        key = View(client.client_context(run.bound.at(run.round), job, {}), part, "survey").key
        members[k] = rng.integers(key, (part.rows, part.samples), run.federation.sizes[k])
        mixed[k] = []
        for t in range(steps):
            context = client.client_context(run.bound.at(run.round), job, {}, torch.tensor(t))
            key = View(context, part, "ascend").key
            batch = run.session.workload.work.batch
            mixed[k].append(rng.integers(key, (part.rows, part.mixture), batch))
    server = rng.fold(rng.fold(run.session.key, "server"), run.round)
    key = rng.fold(rng.fold(server, "survey"), part.name)
    owners = [clients[i] for i in rng.integers(key, (part.rows,), len(clients)).tolist()]
    return batches, members, owners, mixed


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("norm", ["none", "bn"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cohorts", COHORTS)
def test_the_part_equals_the_script(engine: str, norm: str, option: str, cohorts: str) -> None:
    script = runpy.run_path(str(SCRIPT))
    part = FedBR(rows=5, samples=3, width=7, out=4, **OPTIONS[option])
    optim = SGD(lr=0.05, momentum=0.9, weight_decay=1e-3)
    run = images(norm=norm, sizes=(5, 9, 14), batch=5, optim=optim).simulate(part, engine)
    fed, net = run.federation, run.module()
    assert isinstance(net, nn.Sequential)
    body, head = net[:-1], net[-1]
    projection = script["make_projection"](6, 7, 4).to(torch.float64)
    first = run.server.slots["fedbr"]["projection"]
    for i, layer in enumerate(projection[::2]):
        layer.load_state_dict({"weight": first[f"weight{i}"], "bias": first[f"bias{i}"]})
    data = [fed.clean(fed.rows[o : o + n]).x for o, n in zip(fed.offsets, fed.sizes, strict=True)]

    given = []
    for clients in COHORTS[cohorts]:
        given.append(draws(run, part, clients))
        run.run_round(clients)
    batches, members, owners, mixed = (list(items) for items in zip(*given, strict=True))
    trained = script["train"](
        body,
        head,
        projection,
        data,
        batches,
        members,
        owners,
        mixed if part.mixture else None,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-3,
        lam=part.lam,
        mu=part.mu,
        tau1=part.inv_temperature1,
        tau2=part.inv_temperature2,
    )
    body.load_state_dict(trained[0])
    head.load_state_dict(trained[1])
    ours, theirs = run.weights.params | run.weights.buffers, net.state_dict()
    assert tree.gap(ours, {n: theirs[n] for n in ours}) < 1e-9
    after = run.server.slots["fedbr"]["projection"]
    for i in range(3):
        for leaf in ("weight", "bias"):
            away = (trained[2][f"{2 * i}.{leaf}"] - after[f"{leaf}{i}"]).abs().max()
            assert float(away) < 1e-9
    assert tree.gap(first, after) > 1e-6


def test_the_script_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.startswith("accuracy ")
