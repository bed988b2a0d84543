"""Compiled functions compute what the functions themselves do."""

import shutil

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.core import tree
from kedge.sim import compiled as module
from kedge.sim.compiled import compiled
from kedge.sim.federation import Federation, LocalWork
from kedge.sim.simulation import Simulation
from kedge.sim.vector import _mapped

pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch's compiler needs a C++ compiler"
)


def test_a_step_of_three_clients_with_dropout() -> None:
    """Masks are drawn by a generator whose constants have 31 bits: none may pass through float32
    on the way, which would change every mask."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 6), torch.randint(0, 3, (60,))
    fed = Federation(x, y, torch.arange(60).split(20), kedge.Classification(3))
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    sim = Simulation(fed, net, "scaffold", work=LocalWork(batch=4, steps=2))
    cohort = sim.cohort([0, 1, 2])
    begin, step, _ = _mapped(sim.bound, {})
    carry, rows = begin(cohort.jobs), cohort.plan[:, 0]
    fast = compiled(step, cohort.jobs, carry, rows)
    wanted = step(cohort.jobs, step(cohort.jobs, carry, rows), cohort.plan[:, 1])
    found = fast(cohort.jobs, fast(cohort.jobs, carry, rows), cohort.plan[:, 1])
    assert tree.gap(found, wanted) < 1e-6


def test_what_is_too_long_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 3)

    def long(x: Tensor) -> Tensor:
        return ((x + 1) * 2 - 3) / 4

    assert compiled(long, torch.ones(2)) is long


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(module, "_inductor", fail)

    def double(x: Tensor) -> Tensor:
        return x * 2

    with pytest.warns(UserWarning, match="run as they are: no compiler here"):
        assert compiled(double, torch.ones(2)) is double
