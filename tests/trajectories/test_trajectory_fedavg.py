"""Trajectories of FedAvg: the local optimiser, client weights and participation."""

from __future__ import annotations

import pytest

from tests.trajectories.problem import ENGINES, Case, compare
from tests.trajectories.simulator import FedAvg

CASES = [
    Case("fedavg", FedAvg),
    Case("fedavg", FedAvg, weighting="uniform"),
    Case("fedavg", FedAvg, per_round=5),
    Case("fedavg", FedAvg, optim={"momentum": 0.7}),
    Case("fedavg", FedAvg, optim={"momentum": 0.7, "nesterov": True}),
    Case("fedavg", FedAvg, optim={"weight_decay": 0.05}),
    Case("fedavg", FedAvg, optim={"clip": 0.9}),
    Case("fedavg", FedAvg, optim={"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}),
    Case("fedavg", FedAvg, norm=True),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_fedavg(case: Case, engine: str) -> None:
    compare(case, engine)
