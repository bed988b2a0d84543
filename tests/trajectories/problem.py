"""One problem, in kedge and for the simulator, and the comparison of their runs.

Five clients of unequal size, three of them in a round, unequal numbers of steps, a decaying
learning rate, float64. The simulator takes cohorts and batch indices from kedge, which are tested
elsewhere; learning rates, client weights, shares and effective steps it computes itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.part import Method
from kedge.core.task import make_task
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.sim.simulation import Simulation
from tests.trajectories.simulator import Client, FedAvg, Net, Stats, Vector, World

ENGINES = ("loop", "vector")
SIZES = (3, 17, 6, 12, 9)
BATCH, PER_ROUND, ROUNDS, SEED = 4, 3, 4, 1
INPUT, WIDTH, OUTPUTS = (1, 2, 3), 5, 3
LR, GAMMA = 0.3, 0.8
STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
DOUBLE, TOLERANCE = torch.float64, 1e-12


@dataclass(frozen=True)
class Case:
    """A method on the problem, beside its simulation in numpy.

    ``optim`` are options of SGD; ``options`` go to the oracle besides ``fields``, which both get.
    """

    method: str | Method
    oracle: type[FedAvg]
    fields: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    weighting: str = "size"
    per_round: int = PER_ROUND
    rounds: int = ROUNDS
    epochs: float = 1.0
    augment: str = "none"
    norm: bool = False  # whether the network has BatchNorm
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)  # leaves that a part adds
    options: dict[str, Any] = field(default_factory=dict)
    plus: str = ""  # parts beside the one that is tested; "+fedper" has private heads

    @property
    def label(self) -> str:
        """A name for the test: the method and what is not the default."""
        settings = {**self.optim, **({} if self.weighting == "size" else {"by": self.weighting})}
        more = [f"{k}={v}" for k, v in settings.items()]
        if self.per_round != PER_ROUND:
            more.append(f"{self.per_round}-clients")
        if self.augment != "none":
            more.append(self.augment)
        if self.norm:
            more.append("BatchNorm")
        return "-".join([self.text, *more])

    @property
    def text(self) -> str:
        """The method string."""
        if isinstance(self.method, Method) or not self.fields:
            return str(self.method) + self.plus
        settings = ", ".join(f"{k}={_written(v)}" for k, v in self.fields.items())
        return f"{self.method}({settings}){self.plus}"


def by_both(*args: Any, **settings: Any) -> list[Case]:
    """A case with client weights by size and with uniform ones."""
    return [Case(*args, **settings, weighting=w) for w in ("size", "uniform")]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache
def data() -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Inputs, labels and rows of each client, with label skew."""
    total = sum(SIZES)
    keys = rng.split(rng.key(5), 4)
    y = rng.integers(keys[0], (total,), OUTPUTS)
    centre = rng.normal(keys[1], (OUTPUTS, *INPUT), DOUBLE)
    x = 0.6 * rng.normal(keys[2], (total, *INPUT), DOUBLE) + centre[y]
    order = torch.argsort(y + 1.5 * rng.uniform(keys[3], (total,), DOUBLE))
    return x, y, tuple(torch.split(order, list(SIZES)))


def module(norm: bool = False) -> nn.Sequential:
    """The network of :class:`simulator.Net` in torch."""
    layers: dict[str, nn.Module] = {
        "flat": nn.Flatten(),
        "body": nn.Linear(int(np.prod(INPUT)), WIDTH),
        **({"norm": nn.BatchNorm1d(WIDTH)} if norm else {}),
        "tanh": nn.Tanh(),
        "head": nn.Linear(WIDTH, OUTPUTS),
    }
    net = nn.Sequential(OrderedDict(layers)).to(DOUBLE)
    with torch.no_grad():
        for i, weight in enumerate(net.parameters()):
            weight.copy_(0.4 * rng.normal(rng.fold(rng.key(3), i), tuple(weight.shape), DOUBLE))
    return net


def simulate(case: Case, engine: str) -> Simulation:
    """The run in kedge."""
    x, y, rows = data()
    task = make_task("classification", OUTPUTS)
    federation = Federation(x, y, rows, task, test=(x, y), dtype=DOUBLE, augment=case.augment)
    return Simulation(
        federation,
        module(case.norm),
        case.method if isinstance(case.method, Method) else case.text,
        optim=SGD(lr=LR, schedule=f"exponential({GAMMA})", **case.optim),
        work=LocalWork(batch=BATCH, epochs=case.epochs),
        per_round=case.per_round,
        weighting=case.weighting,
        engine=engine,
        seed=SEED,
    )


def oracle(case: Case, run: Simulation) -> FedAvg:
    """The same run in numpy, before its first round."""
    x, y, rows = data()
    net = Net(int(np.prod(INPUT)), WIDTH, OUTPUTS, case.norm, case.extra)
    w0 = net.join({n: p.numpy() for n, p in run.weights.params.items()})
    world = World(net, x.numpy(), y.numpy(), [r.numpy() for r in rows], w0, **case.optim)
    world.init_key = lambda part: key_of("init", part)
    world.server_key = lambda round, part: key_of("server", round, part)
    private = {"private": "head"} if "fedper" in case.plus else {}
    return case.oracle(world, **private, **case.fields, **case.options)


def clients_of(case: Case, run: Simulation, world: World) -> list[Client]:
    """The cohort of the run's present round, for the simulator."""
    drawn = run.session.draw_clients(run.round)
    indices = run.cohort(drawn).batches.numpy()  # [K, max steps, batch]
    n = np.array([len(rows) for rows in world.rows], dtype=float)
    weight = n if case.weighting == "size" else np.ones(len(n))
    steps = [int(np.ceil(case.epochs * size / BATCH)) for size in SIZES]
    return [
        Client(
            k=k,
            n=len(world.rows[k]),
            lr=LR * GAMMA**run.round,
            weight=weight[k],
            p=weight[k] / weight[drawn].sum(),
            share=len(n) * weight[k] / weight.sum(),
            batches=list(indices[i, : steps[k]]),
            a=effective_steps(world, steps[k]),
            key=partial(key_of, "clients", run.round, k),
        )
        for i, k in enumerate(drawn)
    ]


def key_of(*address: str | int) -> torch.Tensor:
    """The run's root key, folded with each item of an address.

    A client draws with the address ("clients", round, client, part, hook, step).
    """
    key = rng.key(SEED)
    for item in address:
        key = rng.fold(key, item)
    return key


def effective_steps(world: World, steps: int) -> float:
    """How far local SGD goes for a gradient of 1 in every step and a learning rate of 1."""
    u = total = 0.0
    for _ in range(steps):
        u = world.momentum * u + 1.0
        total += 1.0 + world.momentum * u if world.nesterov else u
    return total


def compare(case: Case, engine: str) -> None:
    """Run both; weights, server state and all clients' states agree after every round."""
    run = simulate(case, engine)
    expected = oracle(case, run)
    seen: list[int] = []
    for t in range(case.rounds):
        cohort = clients_of(case, run, expected.world)
        seen += [c.k for c in cohort]
        expected.round(cohort)
        done = run.run_round()
        if case.oracle is FedAvg:  # the logged loss
            losses = np.array([c.loss for c in cohort])
            assert_equal(expected.net, f"round {t}, loss", done.losses["task"], losses)
        assert_equal(expected.net, f"round {t}, weights", run.weights.params, expected.w)
        assert_equal(expected.net, f"round {t}, output", run.output.params, expected.output())
        stats = statistics(expected.stats, expected.seen)
        assert_equal(expected.net, f"round {t}, statistics", run.weights.buffers, stats)
        assert_equal(expected.net, f"round {t}, server", run.server.slots, expected.server_state())
        for k in range(expected.N):
            rows = tree.take(run.store.rows, k)
            state = expected.client_state(k)
            if "private" in rows:
                private: dict[str, Any] = {"params": (1 - expected.public) * expected.own[k]}
                if expected.private_stats:
                    private["buffers"] = statistics(expected.own_stats[k], expected.own_seen[k])
                state = state | {"private": private}
            assert_equal(expected.net, f"round {t}, client {k}", rows, state)
        for k, vector in enumerate(map(expected.personal, range(expected.N))):
            if vector is not None:
                own, where = tree.take(run.personal([k]), 0), f"round {t}, personal weights of {k}"
                assert_equal(expected.net, where, own.params, vector)
                stats = statistics(expected.personal_stats(k), expected.personal_seen(k))
                assert_equal(expected.net, where, own.buffers, stats)
    run.finish()
    expected.finish()
    assert_equal(expected.net, "weights at the end", run.weights.params, expected.w)
    assert case.per_round == 5 or len(set(seen)) < len(seen) > 5, "no client came back"


def statistics(stats: Stats, seen: Any) -> dict[str, Any]:
    """BatchNorm's buffers by name; none for a network without."""
    return {} if stats is None else dict(zip(STATISTICS, (*stats, seen), strict=True))


def assert_equal(net: Net, where: str, got: Any, expected: Any, scale: float = 1e-3) -> None:
    """Compare a tree of kedge with vectors; a dict of the network's leaves is one vector.

    Differences are relative to the largest entry of the vector or array, at least ``scale``.
    """
    if hasattr(got, "_asdict"):
        got = got._asdict()
    if isinstance(got, torch.Tensor):
        worst = np.max(np.abs(got.numpy() - expected), initial=0.0)
        scale = np.max(np.abs(expected), initial=scale)
        if not worst <= TOLERANCE * scale:
            pytest.fail(f"{where}: off by {worst:.2e}, at values up to {scale:.2e}")
        return
    if isinstance(expected, np.ndarray):
        leaves, scale = net.split(expected), np.max(np.abs(expected), initial=scale)
        rest = set(leaves) - set(got)
        assert not any(np.any(leaves[n]) for n in rest), f"{where}: {sorted(rest)} are missing"
        expected = {n: leaves[n] for n in got}
    got = {n: v for n, v in got.items() if not _is_empty(v)}
    expected = {n: v for n, v in expected.items() if not _is_empty(v)}
    assert got.keys() == expected.keys(), f"{where}: {sorted(got)} beside {sorted(expected)}"
    for name, value in got.items():
        assert_equal(net, f"{where}, {name}", value, expected[name], scale)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_empty(v) for v in value.values())


__all__ = ["ENGINES", "Case", "Vector", "by_both", "compare"]
