"""Several simulations in lock-step are what each of them is alone."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import kedge
import kedge.runs.build
import kedge.settings
from kedge.check.problems import images, small_net
from kedge.core import tree
from kedge.core.part import Part, parts
from kedge.core.work import LocalWork
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.lane_bound import Number, floats
from kedge.errors import IncompatibleError, NotFinite
from kedge.runs.build import simulation
from kedge.session.sampler import Uniform
from kedge.settings import load_config
from kedge.sim.clients import share
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

SEEDS = (0, 1, 2)


def simulate(method, seed=0, engine="vector", norm="bn", **options) -> Simulation:
    options = {"per_round": 2} | options
    problem = {k: options.pop(k) for k in ("sizes", "dropout", "batchnorm") if k in options}
    return images(norm=norm, **problem).simulate(method, engine, seed=seed, **options)


def gap(some: list[Simulation], others: list[Simulation]) -> float:
    pairs = zip(some, others, strict=True)
    return max(tree.gap(a.state(), b.state()) for a, b in pairs)


def run_together(sims: list[Simulation], rounds: int = 2, **options) -> Fleet:
    fleet = Fleet(sims, **options)
    for _ in range(rounds):
        fleet.run_round()
    return fleet


def run_alone(sims: list[Simulation], rounds: int = 2) -> list[Simulation]:
    for sim in sims:
        for _ in range(rounds):
            sim.run_round()
    return sims


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "scaffold+fedprox(mu=0.1)",  # state of clients, uploads that are summed
        "fedrep",  # leaves that stay on the client
        "fedproto+fedtr",  # whole data in pieces
        "krum(byzantine=0, select=2)+moon",  # single clients on the server, in the cohort's order
        "fedmix(rows=4, samples=2)",  # surveys
        "spherefed",  # reads the run's key on the client
    ],
)
def test_seeds_in_lock_step_are_the_seeds_alone(method: str) -> None:
    make = [simulate(method, seed, sizes=(5, 9, 14, 26), per_round=3) for seed in SEEDS]
    alone = [simulate(method, seed, sizes=(5, 9, 14, 26), per_round=3) for seed in SEEDS]
    fleet = Fleet(make)
    for _ in range(3):
        found, expected = fleet.run_round(), [sim.run_round() for sim in alone]
        for one, other in zip(found, expected, strict=True):
            assert one.round == other.round
            assert one.totals.clients == other.totals.clients
            assert one.totals.uploads.keys() == other.totals.uploads.keys()
            assert one.up_bytes == other.up_bytes
            assert one.down_bytes == other.down_bytes
            assert tree.gap(one.losses, other.losses) < 1e-12
    assert fleet.lanes == [9]
    assert gap(make, alone) < 1e-12
    apart = tree.gap(make[0].weights.params, make[1].weights.params)
    assert apart > 1e-4  # seeds do differ


def test_dropout_and_local_statistics() -> None:
    options = {"dropout": 0.3, "batchnorm": "local"}
    together, alone = ([simulate("fedsam", s, **options) for s in SEEDS] for _ in range(2))
    run_together(together)
    assert gap(together, run_alone(alone)) < 1e-12


def test_numbers_of_the_optimiser_and_the_amount_of_work_are_lanes() -> None:
    ways = [
        (kedge.SGD(0.1, 0.5, weight_decay=1e-3, clip=1.0), LocalWork(5, epochs=1.0), "size"),
        (kedge.SGD(0.02, 0.9, weight_decay=1e-2, clip=0.5), LocalWork(5, epochs=2.0), "uniform"),
        (kedge.SGD(0.3, 0.9, weight_decay=1e-2, clip=0.5, schedule="exponential(0.5)"),
         LocalWork(5, steps=2, replacement=True), "size"),
    ]  # fmt: skip
    together, alone = (
        [simulate("fednova", optim=o, work=w, weighting=g) for o, w, g in ways] for _ in range(2)
    )
    assert run_together(together, 3).lanes == [6]
    assert gap(together, run_alone(alone, 3)) < 1e-12


def test_momentum_of_zero_is_another_computation() -> None:
    ways = [kedge.SGD(0.1, momentum) for momentum in (0.0, 0.5)]
    together, alone = ([simulate("fedavg", optim=o) for o in ways] for _ in range(2))
    with pytest.warns(UserWarning, match="settings that differ in momentum train one after the"):
        assert run_together(together).lanes == [2, 2]
    assert gap(together, run_alone(alone)) < 1e-12


def test_adam() -> None:
    ways = [kedge.Adam(0.01), kedge.Adam(0.003, beta1=0.8, eps=1e-6)]
    together, alone = ([simulate("fedprox", optim=o) for o in ways] for _ in range(2))
    run_together(together)
    assert gap(together, run_alone(alone)) < 1e-12


# where a field is used as a plain Python number on the client; settings train one after the other
NOT_LANES = {("fedcog", "lr")}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize(
    "part",
    [cls(**cls.tiny) for cls in map(parts.__getitem__, parts) if list(floats(cls(**cls.tiny)))],
    ids=lambda part: part.name,
)
def test_float_fields_of_every_part_are_lanes(part: Part) -> None:
    def pair(fields: list[str]) -> list[Part]:
        values = [(f, getattr(part, f) or 0.4) for f in fields]
        changes = [dict(values), {f: 0.6 * x for f, x in values}]
        return [dataclasses.replace(part, **change) for change in changes]

    def run(fields: list[str], lanes: list[int]) -> None:
        def make() -> list[Simulation]:
            problem = images(norm="bn", task=part.tasks[0])
            return [problem.simulate(way, "vector", per_round=2) for way in pair(fields)]

        together, alone = make(), run_alone(make())
        assert run_together(together).lanes == lanes
        assert gap(together, alone) < 1e-12

    able = [f for f in floats(part) if (part.name, f) not in NOT_LANES]
    if able:
        run(able, [4])
    for field in [f for f in floats(part) if f not in able]:
        with pytest.warns(UserWarning, match=f"differ in {part.name}.{field} train one after the"):
            run([field], [2, 2])


def test_a_part_that_branches_on_its_field_trains_setting_by_setting() -> None:
    @dataclasses.dataclass(frozen=True)
    class Kinked(kedge.Part):
        mu: float = 1.0

        def term(self, v, params, batch, out):
            near = tree.sq_dist(params, v.anchor.params)
            return self.mu * near if self.mu > 0.5 else near * 0

    def make(values) -> list[Simulation]:
        return [simulate(Kinked(mu), seed) for mu in values for seed in (0, 1)]

    same = make((0.7, 0.9))  # the branch has one answer in all lanes
    assert run_together(same).lanes == [8]
    assert gap(same, run_alone(make((0.7, 0.9)))) < 1e-12
    differing = make((0.1, 0.9))
    with pytest.warns(UserWarning, match="kinked.mu train one after the other.*Python branch"):
        fleet = run_together(differing)
    assert fleet.lanes == [4, 4]
    assert gap(differing, run_alone(make((0.1, 0.9)))) < 1e-12


def test_a_part_that_reads_the_first_weights_trains_seed_by_seed() -> None:
    @dataclasses.dataclass(frozen=True)
    class Home(kedge.Part):
        """Its first weights are other ones in every simulation."""

        def term(self, v, params, batch, out):
            return tree.sq_dist(params, v.spec.params)

    def make() -> list[Simulation]:
        nets = [small_net("none", 3) for _ in range(2)]
        with torch.no_grad():
            nets[1][0][0].weight.mul_(1.5)
        fed = images().federation
        return [Simulation(fed, net, Home(), optim=kedge.SGD(0.05)) for net in nets]

    together = make()
    with pytest.warns(UserWarning, match="other: v.spec.params differs between lanes"):
        assert run_together(together).lanes == [3, 3]
    assert gap(together, run_alone(make())) < 1e-12


def test_federations_of_other_samples_and_sizes() -> None:
    """Every simulation has samples of its own; whole data come in pieces of other sizes."""

    def make() -> list[Simulation]:
        first = images(sizes=(5, 9, 14))
        sims = []
        for k, sizes in enumerate([(5, 9, 14), (20, 4, 4), (9, 9, 10)]):
            x = first.federation.x + (0.1 * k if k < 2 else 0.0)
            rows = torch.split(torch.arange(28), list(sizes))
            fed = Federation(
                x, first.federation.y, rows, first.federation.task, dtype=torch.float64
            )
            sims.append(Simulation(fed, first.module, "fedtr", work=LocalWork(5), seed=k))
        return sims

    together, alone = make(), run_alone(make())
    run_together(together)
    assert gap(together, alone) < 1e-12
    # the third has the samples of the first: two copies, side by side in one tensor
    a, b, c = (sim.federation.x for sim in together)
    assert c.data_ptr() == a.data_ptr()
    assert b.data_ptr() == a.data_ptr() + a.numel() * a.element_size()


def test_equal_samples_are_shared() -> None:
    data = load("digits")
    config = load_config(flags={"clients": 4})
    how = Execution("vector")
    cpu = torch.device("cpu")
    one, two = (simulation(config, data, s, cpu, how) for s in (0, 1))
    two.federation.x = two.federation.x.clone()
    share(one.federation, two.federation)
    assert two.federation.x is one.federation.x
    assert two.federation.test_data is one.federation.test_data


def test_one_that_is_ahead_waits_and_nothing_changes_bit_for_bit() -> None:
    straight = [simulate("scaffold", seed) for seed in SEEDS]
    run_together(straight, 4)
    stopped = [simulate("scaffold", seed) for seed in SEEDS]
    run_together(stopped, 2)
    early = [tree.map(torch.clone, sim.state()) for sim in stopped]
    run_together(stopped, 1)
    resumed = [simulate("scaffold", seed) for seed in SEEDS]
    resumed[0].load_state(stopped[0].state())  # one round ahead of the others
    resumed[1].load_state(early[1])
    resumed[2].load_state(early[2])
    fleet = Fleet(resumed)
    assert fleet.round == 2
    found = fleet.run_round()
    assert found[0] is None
    assert len(found[1].totals.clients) == 2
    assert [sim.round for sim in resumed] == [3, 3, 3]
    fleet.run_round()
    for one, other in zip(straight, resumed, strict=True):
        assert tree.equal(one.state(), other.state())


def test_a_loss_that_is_not_finite_stops_one_or_all() -> None:
    def make() -> list[Simulation]:
        rates = (0.05, 1e200, 0.1)
        return [simulate("fedprox", optim=kedge.SGD(lr), norm="none") for lr in rates]

    strict = make()
    with pytest.raises(NotFinite, match="is not finite in round 1"):
        run_together(strict, 3)
    assert [sim.round for sim in strict] == [0, 0, 0]
    sims = make()
    fleet = run_together(sims, 3, strict=False)
    assert list(fleet.failed) == [1]
    assert [sim.round for sim in sims] == [3, 0, 3]
    bad = run_together([make()[1], make()[1]], 2, strict=False)
    assert list(bad.failed) == [0, 1]
    assert bad.run_round() == [None, None]
    alone = [make()[0], make()[2]]
    assert gap([sims[0], sims[2]], run_alone(alone, 3)) < 1e-12


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"method": "scaffold"}, "their methods"),
        ({"optim": kedge.Adam()}, "their optimisers"),
        ({"norm": "gn"}, "their models"),
        ({"sizes": (5, 9, 14, 6)}, "their numbers of clients"),
        ({"work": LocalWork(4)}, "their batches"),
    ],
)
def test_what_differs_in_structure_is_refused(other: dict, what: str) -> None:
    with pytest.raises(IncompatibleError, match=f"side by side: {what} differ"):
        Fleet([simulate("fedavg"), simulate(**{"method": "fedavg"} | other)])


def test_a_fleet_on_the_loop_engine() -> None:
    together, alone = ([simulate("scaffold", s, "loop") for s in (0, 1)] for _ in range(2))
    assert run_together(together).lanes == [2, 2]
    run_alone(alone)
    for one, other in zip(together, alone, strict=True):
        assert tree.equal(one.state(), other.state())


def test_a_round_that_fails_leaves_everything_as_it_was() -> None:
    sims = [simulate("fedmix(rows=4, samples=2)", seed) for seed in (0, 1)]
    before = [tree.map(torch.clone, sim.state()) for sim in sims]
    fleet, train = Fleet(sims), sims[0].engine.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sims[0].engine, "train", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fleet.run_round()
    assert sims[0].engine.train == train
    for sim, state in zip(sims, before, strict=True):
        assert tree.equal(sim.state(), state)
    fleet.run_round()
    alone = run_alone([simulate("fedmix(rows=4, samples=2)", seed) for seed in (0, 1)], 1)
    assert gap(sims, alone) < 1e-12


def test_a_number_that_differs_between_lanes() -> None:
    every = (2.0, 4.0)

    def use(value, x):
        n = Number(value, every)
        assert n
        assert n > 1
        assert not n < 2
        assert n != 3
        for ask in (lambda: n > 3, lambda: n == 2.0, lambda: float(n), lambda: bool(n - n)):
            with pytest.raises((TypeError, RuntimeError)):
                ask()
        three = torch.stack([1 - n, n / 4, 8 / n, n**2, 2**n, -n, abs(n), n + n, n * n - 1])
        return torch.cat([three, x * n, x.clamp_max(n), torch.where(x < n, x, n)])

    x = torch.tensor([1.0, 5.0])
    found = torch.func.vmap(use, in_dims=(0, None))(torch.tensor(every), x)
    for row, n in zip(found, every, strict=True):
        plain = [1 - n, n / 4, 8 / n, n**2, 2**n, -n, n, 2 * n, n * n - 1]
        expected = [*plain, n, 5 * n, 1.0, min(5, n), 1.0, min(5, n)]
        torch.testing.assert_close(row, torch.tensor(expected))
        slope = torch.func.grad(lambda v: (Number(v, every) * x).sum())(torch.tensor(n))
        assert float(slope) == 6.0


def test_a_round_may_be_drawn_ahead() -> None:
    """As on a GPU, which works while the host draws; a draw for other clients is not taken."""
    sims = [simulate("scaffold", seed, per_round=2) for seed in (0, 1, 2, 0, 1, 2)]
    for sim in sims[3:]:
        sim.clients.draws_ahead = True
    for some in (sims[:2], sims[3:5]):
        run_together(some, 3)
    alone, ahead = sims[2], sims[5]
    for sim in (alone, ahead):
        for clients in (None, [0, 1, 2], None):
            sim.run_round(clients)
    assert gap(sims[:3], sims[3:]) == 0
    drawn = ahead.clients._stack._ahead
    assert drawn is not None
    assert drawn.inputs[0] == 3


def test_no_warnings_where_all_goes_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_together([simulate("scaffold", seed) for seed in (0, 1)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("chunk", [0, 4])
def test_recorded_rounds_on_a_gpu(chunk: int) -> None:
    """Seeds and settings on a GPU, where rounds are recorded; ragged, with state of clients."""
    data = load("digits")
    device = torch.device("cuda")

    def make(chunk: int) -> list[Simulation]:
        how = Execution("vector", chunk=chunk)
        found = []
        for mu in (0.01, 0.5):
            flags = {"clients": 6, "per_round": 5, "method": f"scaffold+fedprox(mu={mu})"}
            config = load_config(flags=flags)
            found += [simulation(config, data, s, device, how) for s in (0, 1)]
        return found

    together, alone = make(chunk), run_alone(make(0), 3)
    assert run_together(together, 3).lanes == [20]
    assert gap(together, alone) < 1e-4
    assert together[0].federation.x.data_ptr() == together[3].federation.x.data_ptr()


def test_a_round_drawn_ahead_is_drawn_again_for_another_sampler() -> None:
    plain, ahead = simulate("fedavg", per_round=2), simulate("fedavg", per_round=2)
    ahead.clients.draws_ahead = True
    for sim in (plain, ahead):
        sim.run_round()
        sim.session.sampler = Uniform(3)
        sim.run_round()
    assert gap([plain], [ahead]) == 0
