"""A server that asks one member for whatever it likes, in messages of the right form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.core import tree
from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.data.datasets import Dataset
from kedge.federation.member.member import Member
from kedge.federation.member.own_data import schema_of
from kedge.federation.member.policy import Policy
from kedge.federation.member.releases import Releases
from kedge.federation.member.run_state import agreement_text
from kedge.federation.member.silo import bind
from kedge.federation.messages import MemberRequest, reply_header
from kedge.session import wire
from kedge.session.session import Broadcast
from kedge.session.terms import Terms

ROWS, WIDTH = 60, 8
RUN = "ab" * 8


def patients(rows: int = ROWS) -> Dataset:
    """A table of two classes."""
    x = np.random.default_rng(3).normal(size=(rows, WIDTH)).astype(np.float32)
    y = np.arange(rows) % 2
    return Dataset("north", x, y, np.zeros(WIDTH), np.ones(WIDTH), "classification", 2)


def linear() -> nn.Module:
    """Its update on one row is a multiple of the row."""
    module = nn.Sequential()
    module.add_module("head", nn.Linear(WIDTH, 2))
    return module


def with_statistics() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(WIDTH))
    module.add_module("head", nn.Linear(WIDTH, 2))
    return module


class Server:
    """A hostile server with one member.

    Args:
        folder: of the member.
        policy: of the member.
        module: the model.
        data: of the member.
        terms: what differs from rounds of one epoch in batches of ten.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        module: nn.Module | None = None,
        data: Dataset | None = None,
        **terms: Any,
    ) -> None:
        data, module = data or patients(), module or linear()
        self.member, self.folder = Member("north", data, folder, policy, model=module), folder
        values = {"num_clients": 2, "examples": 2 * ROWS, "batch": 10, "split": "holdout(0.1)"}
        values |= {"optimizer": "sgd(lr=0.1)", "rounds": 5, "model": "own"} | terms
        self.terms = Terms(schema_of(data), **values)  # type: ignore[arg-type]
        self.initial = Model(module, batchnorm=self.terms.batchnorm).own_weights()

    # -- requests -----------------------------------------------------------------------------

    def ask(self, kind: str, round: int = 0, **changes: Any) -> bytes:
        """The member's answer to a request."""
        request = MemberRequest(kind, RUN, round, client=0, terms=self.terms.hash)
        return self.member.handle(replace(request, **changes).pack())

    def agree(self, initial: Weights | None = None) -> str:
        """The code of the answer to the terms; empty if the member agrees."""
        value = {"initial": initial or self.initial}
        text = agreement_text(self.terms, "")
        return code(self.ask("agree", text=text, value=value))

    def down(self) -> Broadcast:
        """What an honest server broadcasts first."""
        module = self.member._model
        bound = bind(self.terms, Model(module, batchnorm=self.terms.batchnorm), self.silo.data)
        return Broadcast(bound.only_public(bound.initial), bound.sent(bound.server()))

    @property
    def silo(self) -> Any:
        assert self.member._member_run is not None
        return self.member._member_run.silo

    def train(self, down: Broadcast | None = None, round: int = 0, **changes: Any) -> bytes:
        return self.ask("train", round, **{"value": {"down": down or self.down()}} | changes)

    # -- what came of it ----------------------------------------------------------------------

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def released(self, kind: str) -> int:
        return Releases(self.folder / "released.txt").count(kind)


def code(reply: bytes) -> str:
    return reply_header(reply)[1]["code"]


def update(reply: bytes) -> dict[str, Tensor]:
    return wire.unpack(reply, "reply")["update"].delta.params


def norm(params: dict[str, Tensor]) -> float:
    return float(tree.sq_norm(tree.map(Tensor.double, params)).sqrt())


def row_of(params: dict[str, Tensor]) -> Tensor:
    """The row from which a linear model made an update of one row: weights over bias."""
    weight, bias = params["head.weight"], params["head.bias"]
    return weight[0] / bias[0]


def reads_a_row(params: dict[str, Tensor], data: Dataset) -> bool:
    """Whether the update gives a row of the data away."""
    found = row_of(params)
    gaps = (torch.from_numpy(data.x_train) - found).abs().amax(1)
    return bool(gaps.min() < 1e-3)


def with_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree whose first leaf of real numbers is changed."""
    done = False

    def maybe(leaf: Tensor) -> Tensor:
        nonlocal done
        if done or not leaf.is_floating_point() or not leaf.numel():
            return leaf
        done = True
        return change(leaf.clone())

    return tree.map(maybe, value)


def set_one(number: float) -> Callable[[Tensor], Tensor]:
    """Put a number into the last place of an array."""

    def change(leaf: Tensor) -> Tensor:
        leaf.view(-1)[-1] = number
        return leaf

    return change
