"""Numbers about a client's round, by hand; plans of batches are in ``test_work_properties``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.core.optim import SGD
from kedge.core.work import Lane, LocalWork, infos

HEAVY = SGD(momentum=0.5)


def lane(client: int, **fields: Any) -> Lane:
    """A client of 4 samples that takes 2 plain steps of length 0.1."""
    given: dict[str, Any] = {
        "size": 4, "steps": 2, "work": LocalWork(), "lr": 0.1, "weight": 4.0,
        "optim": SGD(), "pull": 0.0, "share": 1.0,
    }  # fmt: skip
    return Lane(client, **given | fields)


def test_numbers_of_lanes_of_one_run() -> None:
    lanes = [lane(7, share=0.5), lane(3, size=12, steps=6, weight=12.0, share=1.5)]
    found = infos(lanes, 5, torch.float64)
    assert {name: value.tolist() for name, value in found._asdict().items()} == {
        "client": [7, 3],
        "round": [5, 5],
        "lr": [0.1, 0.1],
        "num_steps": [2, 6],
        "effective_steps": [2, 6],
        "pulled_steps": [2, 6],
        "num_examples": [4, 12],
        "weight": [4, 12],
        "share": [0.5, 1.5],
    }
    assert {v.dtype for n, v in found._asdict().items() if n not in ("client", "round")} == {
        torch.float64
    }
    assert found.client.dtype == found.round.dtype == torch.int64


def test_lanes_of_several_runs_have_their_own_rates_and_weights() -> None:
    found = infos([lane(0), lane(1, lr=0.3, weight=1.0)], 0, torch.float64)
    assert found.lr.tolist() == [0.1, 0.3]
    assert found.weight.tolist() == [4, 1]
    assert infos([lane(0, weight=1.0)], 0, torch.float64).weight.tolist() == [1]


@pytest.mark.parametrize(
    "optims",
    [(SGD(), SGD(), HEAVY), (HEAVY, SGD(), SGD()), (SGD(), HEAVY, SGD()), (HEAVY, HEAVY, SGD())],
)
def test_effective_steps_go_by_the_optimiser_of_each_lane(optims: tuple[SGD, ...]) -> None:
    found = infos([lane(k, optim=o) for k, o in enumerate(optims)], 0, torch.float64)
    expected = [2.5 if o is HEAVY else 2.0 for o in optims]  # 2.5 = (1 + 0.5) + 1
    assert found.effective_steps.tolist() == found.pulled_steps.tolist() == expected


def test_pulled_steps_go_by_rate_and_pull_of_each_lane() -> None:
    lanes = [lane(0), lane(1, pull=2.0), lane(2, pull=2.0, lr=0.25), lane(3, pull=4.0, lr=0.25)]
    found = infos(lanes, 0, torch.float64)
    assert found.effective_steps.tolist() == [2, 2, 2, 2]
    assert found.pulled_steps.tolist() == pytest.approx([2, 1.8, 1.5, 1.0])  # 2 - lr * pull
