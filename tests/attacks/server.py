"""A lying server with one member: well-formed requests with whatever content it likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.data.datasets import Dataset
from kedge.federation.member.member import Member
from kedge.federation.member.own_data import schema_of
from kedge.federation.member.policy import Policy
from kedge.federation.member.profile import MemberProfile, Question
from kedge.federation.member.releases import Releases
from kedge.federation.member.run_state import agreement_text
from kedge.federation.member.silo import bind
from kedge.federation.messages import MemberRequest, reply_header
from kedge.session import wire
from kedge.session.session import NEVER, Broadcast
from kedge.session.terms import Terms

RUN = "ab" * 8
HELD_OUT, WIDTH = 60, 4


def patients(labels: Sequence[int] = (), task: str = "classification") -> Dataset:
    """A table with 60 patients to train on, and 60 held out with these labels."""
    x = np.random.default_rng(3).normal(size=(2 * HELD_OUT, WIDTH)).astype(np.float32)
    y: Any = np.arange(2 * HELD_OUT) % 2
    if len(labels):
        y[HELD_OUT:] = labels
    if task == "multilabel":
        y = np.stack([y, 1 - y], 1).astype(np.float32)
    if task == "regression":
        y = x[:, :1] * 2
    outputs = {"classification": int(y.max()) + 1, "multilabel": 2, "regression": 1}[task]
    return Dataset(
        "north", x[:HELD_OUT], y[:HELD_OUT], np.zeros(WIDTH), np.ones(WIDTH), task, outputs,
        x_test=x[HELD_OUT:], y_test=y[HELD_OUT:],
    )  # fmt: skip


def linear(outputs: int = 2) -> nn.Module:
    module = nn.Sequential()
    module.add_module("head", nn.Linear(WIDTH, outputs))
    return module


class Server:
    """A lying server, and its only member.

    Args:
        folder: of the member; its secret is the same in every test.
        policy: of the member.
        data: of the member.
        terms: what differs from the terms of a run of a hundred rounds.
    """

    def __init__(
        self, folder: Path, policy: Policy | None = None, data: Dataset | None = None, **terms: Any
    ) -> None:
        self.data = data or patients()
        module = linear(self.data.outputs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "secret").write_bytes(b"s" * 32)
        self.member = Member("north", self.data, folder, policy, model=module)
        self.folder, self.module, self.round = folder, module, 0
        values: dict[str, Any] = {
            "num_clients": 2, "examples": 2 * HELD_OUT, "batch": 10, "split": "given",
            "optimizer": "sgd(lr=0.1)", "rounds": 100, "model": "own",
        }  # fmt: skip
        self.terms = Terms(schema_of(self.data), **values | terms)
        self.initial = Model(module, batchnorm=self.terms.batchnorm).own_weights()

    def ask(self, kind: str, round: int = 0, **changes: Any) -> bytes:
        """The member's answer to a request."""
        request = MemberRequest(kind, RUN, round, client=0, terms=self.terms.hash)
        return self.member.handle(replace(request, **changes).pack())

    def agree(self, initial: Weights | None = None, **changes: Any) -> str:
        """The code of the answer to the terms; empty if the member agrees."""
        value = {"initial": initial or self.initial}
        return code(
            self.ask("agree", **{"text": agreement_text(self.terms, ""), "value": value} | changes)
        )

    def down(self, weights: Weights | None = None) -> Broadcast:
        """A broadcast; the initial one, but for weights of the server's choice."""
        assert self.member._member_run is not None
        model = Model(self.module, batchnorm=self.terms.batchnorm)
        bound = bind(self.terms, model, self.member._member_run.silo.data)
        return Broadcast(bound.only_public(weights or self.initial), bound.sent(bound.server()))

    def test(self, weights: Weights | None = None, kind: str = "train", **changes: Any) -> Any:
        """The sums of a test of weights that ride along with a request to train or to survey."""
        values = {
            "test": "plain", "accepted": NEVER, "value": {"down": self.down(weights)},
        } | changes  # fmt: skip
        return sums(self.ask(kind, **values))

    def evaluate(self, weights: Weights, round: int, **changes: Any) -> Any:
        """The sums of a test that is asked for alone."""
        return sums(
            self.ask("evaluate", round, **{"test": "plain", "value": {"output": weights}} | changes)
        )

    def join(self, question: Question | None = None, run: str = RUN) -> MemberProfile | str:
        """What the member states, or the code of its refusal."""
        text = (question or Question(0, "given")).to_json()
        reply = self.ask("join", text=text, run=run, client=-1, terms="")
        return code(reply) or MemberProfile.from_json(reply_header(reply)[1]["text"])

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def released(self, kind: str) -> int:
        return Releases(self.folder / "released.txt").count(kind)


def code(reply: bytes) -> str:
    return reply_header(reply)[1]["code"]


def sums(reply: bytes) -> Any:
    """Sums of the global model; None where there is no test."""
    assert code(reply) == ""
    return wire.unpack(reply, "reply").get("sums")


def step_at(column: int, threshold: float, slope: float = 1e6) -> Weights:
    """Weights of a linear model that says 1 to rows above the threshold in a column."""
    weight, bias = torch.zeros(2, WIDTH), torch.zeros(2)
    weight[1, column], bias[1] = slope, -slope * float(threshold)
    return Weights({"head.weight": weight, "head.bias": bias}, {})


def cells(found: dict[str, Tensor]) -> list[float]:
    """All numbers of samples that sums tell, and their complements."""
    count, right = found["count"].double(), found["right"].double()
    wrong, more = count - right, found["predicted"].double() - right
    total = count.sum()
    shown = [count, right, wrong, more, total - count, right.sum(), wrong.sum()]
    return [float(n) for group in shown for n in group.reshape(-1)]
