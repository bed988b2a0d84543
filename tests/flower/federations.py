"""Small federations in this process: real members, real bytes, and a simulation to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kedge.check.problems import images, small_net
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.optim import make_optimizer
from kedge.data.datasets import Dataset
from kedge.data.federation import Federation
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.coordinator.rules import Rules
from kedge.federation.member.member import Member
from kedge.federation.member.own_data import own_federation
from kedge.federation.member.policy import Policy
from kedge.federation.messages import Direct
from kedge.session.terms import Terms
from kedge.settings import Config
from kedge.sim.simulation import Simulation

SIZES = (9, 14, 20, 11)
NAMES = ("east", "north", "south", "west")
QUICK = Rules(wait_s=0.0, join_s=0.01, deadline_s=60.0)


def datasets(task: str = "classification", sizes: Sequence[int] = SIZES) -> list[Dataset]:
    """Images of three classes with label skew, one dataset per member."""
    fed = images(task=task, sizes=tuple(sizes)).federation
    found = []
    for k, name in zip(range(len(sizes)), NAMES, strict=False):
        rows = fed.rows[fed.offsets[k] : fed.offsets[k] + fed.sizes[k]]
        x = fed.x[rows].float().numpy()
        y = fed.y[rows].numpy()
        if task != "classification":
            y = y.astype(np.float32).reshape(len(y), -1)
        outputs = 1 if task == "regression" else 3
        found.append(Dataset(name, x, y, np.zeros(1), np.ones(1), task, outputs))
    return found


def net(norm: str = "bn", outputs: int = 3) -> nn.Module:
    return small_net(norm, outputs).float()


def settings(method: str = "fedavg", **changes: Any) -> Config:
    values: dict[str, Any] = {
        "method": method, "data": "members", "rounds": 3, "per_round": 3, "batch": 5, "lr": 0.05,
        "seeds": (0,), "clients": 4, "split": "holdout(0.25)",
    }  # fmt: skip
    return Config(**values | changes)


class Members:
    """Members in this process; ``handles`` may be wrapped to inject faults."""

    def __init__(
        self,
        folder: Path,
        data: Sequence[Dataset] | None = None,
        model: nn.Module | None = None,
        policies: dict[str, Policy] | None = None,
        names: Sequence[str] = NAMES,
    ) -> None:
        self.folder, self.model, self.policies = folder, model, policies or {}
        self.data = dict(zip(names, data or datasets(), strict=False))
        self.names = list(self.data)
        self.members: dict[str, Member] = {}
        self.handles: dict[str, Callable[[bytes], bytes]] = {}
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> Member:
        """A new process for a member, on its old folder."""
        policy = self.policies.get(name)
        member = Member(name, self.data[name], self.folder / name, policy, model=self.model)
        self.members[name] = member
        self.handles[f"node of {name}"] = member.handle
        return member

    def log(self, name: str) -> str:
        return (self.folder / name / "log.txt").read_text()


def coordinator(members: Members, config: Config, out: Path, **options: Any) -> Coordinator:
    options = {"rules": QUICK, "model": members.model} | options
    transport = options.pop("transport", None) or Direct(members.handles)
    return Coordinator(config, transport, out, **options)


def simulation(data: dict[str, Dataset], terms: Terms, model: nn.Module) -> Simulation:
    """The same federation in the simulator, from the same terms."""
    own = [own_federation(data[name], terms, name) for name in sorted(data)]
    starts = [0, *itertools.accumulate(len(fed.x) for fed in own)]
    federation = Federation(
        torch.cat([fed.x for fed in own]),
        torch.cat([fed.y for fed in own]),
        [fed.rows + start for fed, start in zip(own, starts, strict=False)],
        terms.task,
        held_out=[
            fed.held_out[0] + start if fed.held_out else torch.arange(0)
            for fed, start in zip(own, starts, strict=False)
        ],
        moments=(np.array(terms.data.mean), np.array(terms.data.std)),
        augment=terms.augment,
        dtype=getattr(torch, terms.dtype),
        client_names=sorted(data),
        tokens=terms.data.dtype == "int64",
    )
    return Simulation(
        federation,
        Model(model, batchnorm=terms.batchnorm, precision=terms.precision),
        terms.method,
        optim=make_optimizer(terms.optimizer),
        work=terms.workload.work,
        per_round=terms.per_round or None,
        weighting=terms.weighting,
        engine="loop",
        seed=terms.seed,
    )


def assert_same(run: Coordinator, sim: Simulation) -> None:
    """Weights, server slots and the clients' states are equal bit for bit."""
    assert tree.equal(run.session.server.weights, sim.server.weights)
    assert tree.equal(run.session.server.slots, sim.server.slots)


def replay(run: Coordinator, members: Members) -> Simulation:
    """A simulation with the cohorts of a run."""
    sim = simulation(members.data, run.roster.terms, members.model or nn.Module())
    for record in run.recorder.records:
        sim.run_round(record["cohort"])
    return sim
