"""FedMix and NaiveMix: the pool, every option, and faults that their identities must find."""

from dataclasses import dataclass

import pytest
import torch

from kedge.check.identities.pools import _unit_vectors
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, Problem, images
from kedge.core import client, tree
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.core.task import Batch, make_task
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.data.federation import Federation
from kedge.errors import FieldError
from kedge.parts.pools import FedMix, NaiveMix
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class FirstOrder(FedMix):
    def term(self, v, params, batch, out):  # the derivative is a constant
        def loss(x):
            return v.task.loss(v.forward(tree.detach(params), x).logits, Batch(x, batch.y)).sum()

        slope = torch.func.grad(loss)(batch.x)
        return self.lam * (slope * self._partners(v, len(batch.x))["x"]).sum() / len(batch.x)


@dataclass(frozen=True)
class DividesTwice(FedMix):
    def term(self, v, params, batch, out):  # 1/B^2
        return super().term(v, params, batch, out) / len(batch.x)


@dataclass(frozen=True)
class TermTurned(FedMix):
    def term(self, v, params, batch, out):
        return -super().term(v, params, batch, out)


@dataclass(frozen=True)
class PoolsLabel(FedMix):
    def term(self, v, params, batch, out):  # the derivative of the loss with the mixed label
        def loss(x):
            return v.task.loss(v.forward(params, x).logits, batch._replace(x=x)).sum()

        slope = torch.func.grad(loss)(batch.x)
        return self.lam * (slope * self._partners(v, len(batch.x))["x"]).sum() / len(batch.x)


@dataclass(frozen=True)
class NotShrunk(FedMix):
    def transform(self, v, batch):  # x in place of (1 - lam) x
        return super().transform(v, batch)._replace(x=batch.x)


@dataclass(frozen=True)
class KeepsLabels(NaiveMix):
    def transform(self, v, batch):  # mixes inputs alone
        return super().transform(v, batch)._replace(target=None)


@dataclass(frozen=True)
class SharesTurned(NaiveMix):
    def transform(self, v, batch):  # lam of the own sample
        other = self._partners(v, len(batch.x))
        return self._mixed(v, batch, self.lam * batch.x + (1 - self.lam) * other["x"], other["y"])


@dataclass(frozen=True)
class OtherLabels(NaiveMix):
    def absorb(self, r, weights):  # labels of another row
        _, pool = super().absorb(r, weights)
        return weights, pool | {"y": pool["y"].roll(1, 0)}


@dataclass(frozen=True)
class OverClients(NaiveMix):
    def absorb(self, r, weights):  # means over several clients
        _, pool = super().absorb(r, weights)
        return weights, tree.map(lambda x: (x + x.roll(1, 0)) / 2, pool)


FAULTY = [
    FirstOrder, DividesTwice, TermTurned, PoolsLabel, NotShrunk, KeepsLabels, SharesTurned,
    OtherLabels, OverClients,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("law", ["engines", "resumable", "permutation", "frugal"])
@pytest.mark.parametrize(
    "text",
    ["fedmix(rows=5, samples=2, refresh=round)", "naivemix(rows=7, refresh=round, lam=0.4)"],
)
def test_laws_hold_for_a_pool_that_is_made_anew(text: str, law: str) -> None:
    LAWS[law](parse(text).parts[0])


def test_presets_and_ranges() -> None:
    assert parse("fedmix:fedbr").parts[0] == FedMix(lam=0.1, samples=10)
    assert parse("fedmix:cifar10").parts[0] == FedMix(lam=0.05)
    assert parse("naivemix:cifar10").parts[0] == NaiveMix(lam=0.1)
    assert parse("naivemix:femnist").parts[0] == NaiveMix(lam=0.2)
    with pytest.raises(FieldError, match=r"fedmix.lam = 1.5 is above 1"):
        FedMix(lam=1.5)
    with pytest.raises(FieldError, match=r"naivemix.rows = 0 is below 1"):
        NaiveMix(rows=0)


# -- the pool -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("refresh", ["once", "round"])
def test_who_is_asked_and_when(engine: str, refresh: str) -> None:
    """Once: all clients before round 0, then never again. Each round: the cohort alone."""
    part = NaiveMix(rows=6, samples=4, refresh=refresh)  # type: ignore[arg-type]
    run = _unit_vectors((3, 30, 4)).simulate(part, engine)
    pools, surveyed = [], []
    plain = _unit_vectors((3, 30, 4)).simulate("fedavg", engine)
    for cohort in ([1, 2], [0]):
        own, base = run.run_round(cohort), plain.run_round(cohort)
        surveyed.append(own.up_bytes - base.up_bytes)
        pools.append(run.server.slots["naivemix"])
    owners = [owners_of(pool["x"]) for pool in pools]
    one = 8 * (2 * (37 + 3) + 1)  # two means with labels, and the client's number
    if refresh == "once":
        assert owners[0] == {0: 2, 1: 2, 2: 2}
        assert tree.equal(pools[0], pools[1])
        assert surveyed == [3 * one, 0]
    else:
        assert sum(owners[0].values()) == 6
        assert set(owners[0]) == {1, 2}
        assert owners[1] == {0: 6}
        assert surveyed == [2 * one, one]


def owners_of(means: torch.Tensor) -> dict[int, int]:
    """Execution many rows come from which client of :func:`_unit_vectors` (3, 30, 4)."""
    shares = torch.stack([part.sum(1) for part in torch.split(means, [3, 30, 4], 1)], 1)
    assert float((shares.amax(1) - 1).abs().max()) < 1e-12
    who = shares.argmax(1)
    return {int(k): int((who == k).sum()) for k in who.unique()}


def test_a_small_pool_has_rows_of_some_clients() -> None:
    run = _unit_vectors((3, 30, 4)).simulate(NaiveMix(rows=2, samples=4))
    run.run_round()
    owners = owners_of(run.server.slots["naivemix"]["x"])
    assert sum(owners.values()) == 2
    assert len(owners) == 2


def test_samples_are_drawn_alike() -> None:
    """The mean of many means is near the client's own mean."""
    run = _unit_vectors((3, 30, 4)).simulate(NaiveMix(rows=900, samples=5))
    run.run_round()
    means = run.server.slots["naivemix"]["x"]
    own = means[means[:, 3:33].sum(1) > 0.5][:, 3:33]
    assert len(own) == 300
    assert own.mean(0).tolist() == pytest.approx([1 / 30] * 30, abs=0.02)


def test_partners_run_through_the_pool() -> None:
    """Batches of two, a pool of six rows: three steps see every row once, and the fourth begins
    again; another round has another order."""
    part = NaiveMix(rows=6, samples=4)
    run = _unit_vectors((3, 30, 4)).simulate(part)
    run.run_round()
    pool, orders = run.server.slots["naivemix"]["x"], []
    for _ in range(2):
        seen = [int((pool == row).all(1).nonzero()[0]) for t in range(4) for row in met(run, t)]
        assert sorted(seen[:6]) == list(range(6))
        assert seen[6:] == seen[:2]
        orders.append(seen)
        run.run_round()
    assert orders[0] != orders[1]


def met(run: Simulation, step: int) -> torch.Tensor:
    """The pool's rows that client 1 meets at a step."""
    part = run.bound.parts[0]
    job = take_jobs(run.cohort([1]).jobs, 0)
    carry = client.begin(run.bound, job)
    at = torch.tensor(step, dtype=torch.int32)
    context = client.client_context(run.bound, job, carry.local, at)
    return part._partners(View(context, part, "transform"), 2)["x"]


def test_both_hooks_of_fedmix_meet_the_same_rows() -> None:
    """The term uses the partners of the batch: with several rows, it is the directional derivative
    along the rows that ``transform`` took the labels of."""
    part = FedMix(rows=5, samples=3, lam=0.3)
    run = images(sizes=(9, 9), batch=4, steps=1).simulate(part)
    run.survey(part, None)
    cohort = run.cohort([0])
    job = take_jobs(cohort.jobs, 0)
    carry = client.begin(run.bound, job)
    context = client.client_context(run.bound, job, carry.local, carry.step)
    batch = run.federation.clean(cohort.batches[0, 0])
    mixed = part.transform(View(context, part, "transform"), batch)
    pool, own = run.server.slots["fedmix"], run.federation.task.soft(batch.y, batch.x.dtype)
    labels = (mixed.target - 0.7 * own) / 0.3
    rows = [int((pool["y"] - y).abs().sum(1).argmin()) for y in labels]
    assert tree.gap(pool["y"][rows], labels) < 1e-12
    step = 1e-5

    def loss(x: torch.Tensor) -> float:
        logits = run.bound.model.forward(run.weights, x, "eval").logits
        return float(run.federation.task.loss(logits, Batch(x, batch.y)).mean())

    way = step * part._partners(View(context, part, "term"), 4)["x"]
    slope = (loss(mixed.x + way) - loss(mixed.x - way)) / (2 * step)
    got = run.run_round([0]).losses["fedmix"][0]
    assert float(got) == pytest.approx(0.3 * slope, abs=1e-8)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_means_of_clients_that_are_swept_in_several_pieces(engine: str) -> None:
    """Unit vectors tell which samples are in a mean: all of 300 are drawn, beyond a piece too."""
    x, y = torch.eye(320, dtype=DOUBLE), torch.arange(320) % 2
    clients = [range(300), range(300, 320)]
    federation = Federation(x, y, clients, make_task("classification", 2), dtype=DOUBLE)
    module = torch.nn.Sequential(torch.nn.Linear(320, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    part = NaiveMix(rows=400, samples=7)
    run = Problem(federation, module.to(DOUBLE), images().work).simulate(part, engine)
    run.survey(part, None)
    pool = run.server.slots["naivemix"]
    counts = 7 * pool["x"]
    assert float((counts - counts.round()).abs().max()) < 1e-9
    assert counts.sum(1).tolist() == pytest.approx([7.0] * 400)
    assert tree.gap(7 * pool["y"][:, 1], counts[:, 1::2].sum(1)) < 1e-12
    assert int((counts[:, :300].sum(1) > 0).sum()) == 200  # as many means from each client
    used = counts.sum(0) > 0
    assert float(used[:256].double().mean()) > 0.9
    assert float(used[256:300].double().mean()) > 0.9


def test_soft_labels_of_parts_to_the_left_are_mixed_further() -> None:
    run = images(norm="bn", batch=9).simulate("mixup(alpha=50)+naivemix(lam=0.5, rows=3)")
    run.run_round()
    part, mixup = run.bound.parts[1], run.bound.parts[0]
    job = take_jobs(run.cohort([1]).jobs, 0)
    carry = client.begin(run.bound, job)
    context = client.client_context(run.bound, job, carry.local, carry.step)
    batch = run.federation.clean(run.cohort([1]).batches[0, 0])
    once = mixup.transform(View(context, mixup, "transform"), batch)
    assert bool(((once.target > 0.2) & (once.target < 0.8)).any())
    both = part.transform(View(context, part, "transform"), once)
    others = part._partners(View(context, part, "transform"), len(batch.y))["y"]
    assert tree.gap(both.target, 0.5 * once.target + 0.5 * others) < 1e-14
    assert torch.equal(both.y, batch.y)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
@pytest.mark.parametrize("text", ["fedmix(rows=4)", "naivemix(rows=4)"])
def test_every_task(text: str, task: str) -> None:
    run = images(task=task).simulate(text)
    first = run.run_round().losses["task"].mean()
    for _ in range(15):
        last = run.run_round().losses["task"].mean()
    assert float(last) < float(first)
    outputs = 1 if task == "regression" else 3
    assert run.server.slots[run.bound.parts[0].name]["y"].shape == (4, outputs)
