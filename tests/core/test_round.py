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
from kedge.errors import HookError

#: What can be read of a round, and the declaration that it needs.
DECLARED = {
    "sum_delta": "needs_sum",
    "share_delta": "needs_share_sum",
    "clients": "needs_clients",
    "client_weights": "needs_clients",
}


def round_with(**members: Any) -> Round:
    """A round as a part named ``ridge`` with these members sees it; totals are their names."""
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
        totals={"count": 2.0} | {name: name for name in DECLARED},
    )


@pytest.mark.parametrize(("name", "needed"), DECLARED.items())
def test_a_value_is_read_by_those_who_declare_it(name: str, needed: str) -> None:
    assert getattr(round_with(**{needed: True}), name) == name
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
