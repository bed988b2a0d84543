"""A probe trains one more round, of which the simulation notices nothing."""

import pytest
import torch

from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.part import Part, parts
from kedge.core.tree import Tree
from kedge.diagnostics.training import probe as probing
from kedge.diagnostics.training.measures import measure
from kedge.diagnostics.training.probe import probe, spread
from kedge.diagnostics.training.sheet import findings
from kedge.errors import FieldError, NotFinite
from kedge.sim.simulation import Simulation

ALL = [cls(**cls.tiny) for cls in (parts[name] for name in parts)]


def copied(state: Tree) -> Tree:
    return tree.map(torch.clone, state)


def rounds(sim: Simulation, count: int) -> Simulation:
    for _ in range(count):
        sim.run_round()
    return sim


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize("part", ALL, ids=lambda p: p.name)
def test_the_simulation_does_not_change(part: Part) -> None:
    """Its state and its next round are the same, bit for bit, and the probe foresees that round."""
    for engine, norm in (("vector", "bn"), ("loop", "gn")):
        problem = images(norm=norm, task=part.tasks[0])
        probed, plain = (rounds(problem.simulate(part, engine, per_round=2), 1) for _ in range(2))
        before = copied(probed.state())
        found = probe(probed)
        assert tree.equal(probed.state(), before)
        rounds(probed, 1)
        rounds(plain, 1)
        assert tree.equal(probed.state(), plain.state())
        assert tree.gap(found.aggregate, plain.weights) < 1e-11
        assert found.round == 1
        assert found.clients == plain.session.draw_clients(1)
    assert findings([measure(found)])[0].endswith(".")  # every method has a verdict


def test_local_weights_by_hand() -> None:
    """f_k(w) = h_k (w - a_k)² / 2, two steps of 0.1 from 0: a_k (1 - (1 - 0.1 h_k)²)."""
    sim = quadratics((1.0, 5.0), (2.0, -1.0), lr=0.1, steps=2, copies=(3, 1)).simulate("fedavg")
    found = probe(sim)
    ends = [float(end.params["head.weight"]) for end in found.ends]
    first, second = 2 * (1 - 0.9**2), -(1 - 0.5**2)
    assert ends == pytest.approx([first, second])
    mean = (3 * first + second) / 4
    assert float(found.mean["head.weight"]) == pytest.approx(mean)
    assert float(found.aggregate.params["head.weight"]) == pytest.approx(mean)
    assert found.shares.tolist() == [0.75, 0.25]
    assert [float(d["head.weight"]) for d in found.deltas] == pytest.approx(ends)
    assert position(sim) == 0.0


def test_private_leaves_start_from_the_clients_own() -> None:
    """FedPer keeps heads on the clients: they differ before the second round."""
    sim = rounds(images().simulate("fedper"), 1)
    found = probe(sim)
    heads = [start.params["head.weight"] for start in found.starts]
    assert not torch.equal(heads[0], heads[1])
    assert "head.weight" not in found.mean
    assert found.leaves == [n for n in sim.bound.model.names if not n.startswith("head.")]
    assert found.has_private_leaves


def test_clients_are_chosen_by_a_fixed_rule() -> None:
    assert spread(range(100), 5) == [0, 24, 49, 74, 99]
    assert spread([3, 8], 5) == [3, 8]
    assert spread([3, 8], 1) == [3]
    sim = images(sizes=(3,) * 9).simulate("fedavg")
    whole, part = probe(sim), probe(sim, max_clients=3)
    assert part.clients == [0, 4, 8]
    assert part.cohort == list(range(9))
    assert tree.equal(part.aggregate, whole.aggregate)  # that of all clients
    assert tree.equal(part.ends[1], whole.ends[4])
    assert probe(sim, [7, 2]).clients == [2, 7]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = images(sizes=(3,) * 9).simulate("fedavg")
    monkeypatch.setattr(probing, "MAX_BYTES", 4 * tree.nbytes(sim.weights))
    assert len(probe(sim).ends) == 4


def test_wrong_clients() -> None:
    sim = images().simulate("fedavg")
    for clients in ([], [-1], [3]):
        with pytest.raises(FieldError, match=r"not in 0\.\.2"):
            probe(sim, clients)
    with pytest.raises(FieldError, match="below 1"):
        probe(sim, max_clients=0)


def test_a_loss_that_is_not_finite_leaves_the_simulation_as_it_was() -> None:
    sim = quadratics((1.0, 10.0), lr=1e200, steps=9).simulate("fedavg")
    before = copied(sim.state())
    with pytest.raises(NotFinite):
        probe(sim)
    assert tree.equal(sim.state(), before)
