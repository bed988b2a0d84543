"""Tests on what clients hold out: all at once is one after the other."""

from __future__ import annotations

import pytest
import torch

from kedge.check.problems import images
from kedge.core.optim import SGD
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines import vector as vector_engine
from kedge.sim.simulation import Simulation


def simulate(engine: str, task: str, batchnorm: str = "average") -> Simulation:
    problem = images(task=task, norm="bn", sizes=(5, 9, 14, 12))
    fed = problem.federation
    rows = torch.split(fed.rows, [5, 9, 14, 12])
    train = [own[: len(own) // 2] for own in rows]
    held = [own[len(own) // 2 :] for own in rows]
    held[2] = held[2][:0]  # holds nothing out
    made = Federation(fed.x, fed.y, train, fed.task, held_out=held, dtype=fed.dtype)
    model = type(problem.simulate("fedavg").bound.model)(problem.module, batchnorm=batchnorm)
    work = LocalWork(batch=4)
    return Simulation(made, model, "fedper", optim=SGD(lr=0.1), work=work, engine=engine)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
@pytest.mark.parametrize("batchnorm", ["average", "local", "batch"])
@pytest.mark.parametrize("rows", [1024, 8])
def test_held_out_rows(
    task: str, batchnorm: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_engine, "EVALUATION_ROWS", rows)  # two of each client at a time
    loop, vector = (simulate(engine, task, batchnorm) for engine in ("loop", "vector"))
    for sim in (loop, vector):
        for _ in range(2):
            sim.run_round()
    for personal in (False, True):
        one, other = (sim.evaluate_clients(personal) for sim in (loop, vector))
        assert one[2] == other[2] == {}
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=1e-9)
    own, shared = loop.evaluate_clients(True), loop.evaluate_clients()
    assert own[0]["loss"] != pytest.approx(shared[0]["loss"], rel=1e-3)
