"""What a part sees on the server: reduced values, and no others than it has declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.check.problems import images
from kedge.core import rng
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.tree import Weights
from kedge.core.update import Stacked, Summed, Totals
from kedge.errors import HookError

TOTALS = Totals(
    {0: 3, 2: 3},
    Summed(plain_delta={"sum_delta": torch.ones(1)}, share_delta={"share_delta": torch.ones(1)}),
    Stacked(torch.ones(2), weights=Weights({"clients": torch.ones(2, 1)}, {})),
)
#: What can be read of a round, and the declaration that it needs.
DECLARED = {
    "sum_delta": "needs_sum",
    "share_delta": "needs_share_sum",
    "clients": "needs_clients",
    "client_weights": "needs_clients",
}
VALUES = {
    "sum_delta": TOTALS.summed.plain_delta,
    "share_delta": TOTALS.summed.share_delta,
    "clients": TOTALS.stacked.weights,
    "client_weights": TOTALS.stacked.weight,
}


def round_with(**members: Any) -> Round:
    """A round as a part named ``ridge`` with these members sees it."""
    part: Part = type("Ridge", (Part,), {"name": "ridge", **members})()
    bound = images().simulate("fedavg").bound
    return Round(
        part=part,
        model=bound.model,
        spec=bound.spec,
        round=3,
        lr=0.05,
        key=rng.key(4),
        phase="late",
        anchor=bound.initial,
        server={},
        uploads={},
        totals=TOTALS,
    )


@pytest.mark.parametrize(("name", "needed"), DECLARED.items())
def test_a_value_is_read_by_those_who_declare_it(name: str, needed: str) -> None:
    assert getattr(round_with(**{needed: True}), name) is VALUES[name]
    others = {other: True for other in DECLARED.values() if other != needed}
    with pytest.raises(HookError, match=rf"^ridge reads r\.{name}: declare {needed} = True$"):
        getattr(round_with(**others), name)


def test_a_round_has_its_number_phase_and_key() -> None:
    r = round_with()
    assert (r.round, r.lr, r.phase, r.cohort, r.num_clients) == (3, 0.05, "late", 2, 3)
    assert type(r.cohort) is int
    assert torch.equal(r.key, rng.fold(rng.key(4), "ridge"))


def test_a_pass_on_the_server_has_the_cuts_of_the_part() -> None:
    def cuts(self: Part) -> tuple[str, ...]:
        return ("stage1",)

    r = round_with(cuts=cuts)
    x = rng.normal(rng.key(1), (2, 1, 8, 8), torch.float64)
    done = r.forward(r.anchor, x)
    stage: Any = r.model.module(r.anchor).get_submodule("stage1")
    expected: Tensor = stage(x)
    assert list(done.at) == ["stage1"]
    torch.testing.assert_close(done.at["stage1"], expected)
