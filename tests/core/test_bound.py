"""The binding of a method: phases, the sum of pulls, and shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.check.problems import images, small_net
from kedge.core.part import Part
from kedge.core.task import make_task
from kedge.data.federation import Federation
from kedge.errors import ModelError


class Alternating(Part):
    """A part with two phases."""

    name = "alternating"

    def phase(self, round: int) -> str:
        return "odd" if round % 2 else "even"


def test_rounds_with_equal_phases_share_one_binding_of_one_root() -> None:
    bound = images().simulate(Alternating()).bound.root
    even, odd = bound.at(0), bound.at(1)
    assert (bound.phases, even.phases, odd.phases) == (
        {},
        {"alternating": "even"},
        {"alternating": "odd"},
    )
    assert even.root is odd.root is bound.root is bound
    assert even.at(2) is odd.at(0) is bound.at(2) is even
    assert even.at(1) is odd
    assert even.in_phases({}) is bound


def test_pulls_are_summed_only_for_a_part_that_reads_them() -> None:
    pulls = {
        method: images().simulate(method).bound.pull
        for method in ("fedavg", "fednova", "fedprox(mu=0.3)", "fedprox(mu=0.3) + fednova")
    }
    assert list(pulls.values()) == [0.0, 0.0, 0.0, 0.3]


def test_shapes_are_found_with_zeros_which_are_an_index_into_any_table() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x.long()).mean(1))

    data = Federation(
        torch.zeros(6, 2), torch.arange(6) % 3, [range(6)], make_task("classification", 3)
    )
    shapes = kedge.Simulation(data, Lookup(), "fedavg").bound.spec.shapes
    assert shapes == {"table": (2, 4), "features": (4,), "logits": (3,)}


def test_a_binding_with_other_data_keeps_them_in_every_round() -> None:
    bound = images().simulate("fedtr").bound
    bound.at(0)  # derived bindings are kept
    other = images(sizes=(4, 4)).federation
    for binding in (bound, bound.at(0)):
        assert binding.with_data(other).at(0).data is other
        assert binding.with_data(other).at(1).data is other
    assert bound.at(0).data is not other


def test_a_model_with_another_number_of_outputs_is_refused() -> None:
    problem = replace(images(), module=small_net("none", 5))
    with pytest.raises(ModelError, match=r"the model has 5 outputs, but the data need 3 \(class"):
        problem.simulate("fedavg")
