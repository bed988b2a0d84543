"""FedGen and FedDF: options, invariants, and faults that the identities must find."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.identities.two_linear import COUNTS, server_round_of
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images
from kedge.core import rng, tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import Adam
from kedge.core.part import Part
from kedge.core.task import make_task
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError, ModelError
from kedge.parts.distil import allot_labels, draw_labels, student_logits
from kedge.parts.generated import FedDF, FedGen
from kedge.parts.generators import feature_generator, image_generator
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found


def gen(**options: Any) -> FedGen:
    return FedGen(**FedGen.tiny | options)


def df(**options: Any) -> FedDF:
    return FedDF(**FedDF.tiny | options)


def ran(method: Any, rounds: int = 2, norm: str = "bn", **options: Any) -> Simulation:
    run = images(norm=norm, **options).simulate(method, per_round=2)
    for _ in range(rounds):
        run.run_round()
    return run


def finite(run: Simulation) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))


# -- options ----------------------------------------------------------------------------------

GEN: list[dict[str, Any]] = [
    {"alpha": 1.0},
    {"beta": 1.0},
    {"fade": 0.5},
    {"fade": 0.01, "floor": 5.0},
    {"rows": 3},
    {"steps": 1},
    {"batch": 7},
    {"generator_lr": 0.1},
    {"weight_decay": 1.0},
    {"eta": 50.0},
    {"prior": "normal"},
    {"level": "input"},
    {"noise": 4},
    {"width": 3},
]


@pytest.fixture(scope="module")
def plain_gen() -> Simulation:
    return ran(gen())


@pytest.mark.parametrize("option", GEN, ids=lambda o: "-".join(map(str, o.values())))
def test_every_option_of_fedgen_changes_the_result(
    option: dict[str, Any], plain_gen: Simulation
) -> None:
    run = ran(gen(**option))
    assert finite(run)
    assert tree.gap(plain_gen.weights, run.weights) > 1e-7


@pytest.mark.parametrize("option", [{"decay": 0.1}, {"keep_moments": False}])
def test_these_options_of_fedgen_matter_from_the_third_round_on(option: dict[str, Any]) -> None:
    same, other = ran(gen(**option), rounds=2), ran(gen(), rounds=2)
    assert tree.equal(same.weights, other.weights)
    same.run_round()
    other.run_round()
    assert tree.gap(same.weights, other.weights) > 1e-9


def test_images_may_end_without_a_norm() -> None:
    runs = [ran(gen(level="input", final_norm=norm)) for norm in (True, False)]
    assert tree.gap(runs[0].weights, runs[1].weights) > 1e-6


DF: list[dict[str, Any]] = [
    {"generator_steps": 1},
    {"student_steps": 1},
    {"batch": 7},
    {"lr": 0.05},
    {"generator_lr": 0.1},
    {"decay": 0.5},
    {"weight_decay": 0.1},
    {"eta": 5.0},
    {"student_bn": "frozen"},
    {"level": "feature"},
    {"noise": 4},
    {"width": 6},
    {"final_norm": False},
]


@pytest.fixture(scope="module")
def plain_df() -> Simulation:
    return ran(df())


@pytest.mark.parametrize("option", DF, ids=lambda o: "-".join(map(str, *o.items())))
def test_every_option_of_feddf_changes_the_result(
    option: dict[str, Any], plain_df: Simulation
) -> None:
    run = ran(df(**option))
    assert finite(run)
    assert tree.gap(plain_df.weights, run.weights) > 1e-7


SETTINGS = [
    gen(level="input"),
    gen(keep_moments=False, prior="normal", rows=3),
    df(level="feature"),
]


@pytest.mark.long
@pytest.mark.parametrize("law", ["pure", "engines", "neutral", "resumable", "frugal"])
@pytest.mark.parametrize("part", SETTINGS, ids=str)
def test_laws_hold_for_other_settings(part: Part, law: str) -> None:
    LAWS[law](part)


def test_presets_are_the_papers() -> None:
    star = parse("fedgen:star").parts[0]
    assert isinstance(star, FedGen)
    assert (star.level, star.noise, star.width, star.generator_lr, star.decay) == (
        "input", 100, 128, 0.01, 0.998,
    )  # fmt: skip
    assert replace(star, level="feature") == parse("fedgen:flboost").parts[0]
    assert parse("fedgen(level=input)").parts[0] == FedGen(level="input")
    assert str(parse("fedgen:emnist")) == "fedgen(beta=1.0, generator_lr=0.0001)"
    assert parse("feddf:flboost").parts[0] == FedDF()
    assert str(parse("feddf:cifar100")) == "feddf(noise=256)"
    own = FedGen()
    assert (own.alpha, own.beta, own.fade, own.floor, own.steps) == (10.0, 10.0, 0.98, 1e-4, 50)


# -- FedGen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_the_first_round_of_fedgen_is_fedavgs(engine: str) -> None:
    runs = [images(norm="bn").simulate(m, engine) for m in ("fedavg", gen())]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)
    for run in runs:
        run.run_round()
    assert tree.gap(runs[0].weights, runs[1].weights) > 1e-4


@pytest.mark.parametrize("level", ["feature", "input"])
def test_the_generator_is_sent_and_the_counts_come_back(level: Any) -> None:
    part = gen(level=level)
    run = images(norm="bn").simulate(part)
    run.run_round()
    slot = run.server.slots["fedgen"]
    assert tree.equal(run.bound.sent(run.server)["fedgen"], slot["generator"])
    found = run.clients.answer(run.session.request("", [0, 2]))
    uploads = found.uploads["fedgen", "counts"].value
    assert torch.equal(uploads, run.federation.label_counts()[[0, 2]])


@pytest.mark.parametrize(
    ("shape", "classes", "features"), [((3, 32, 32), 10, 512), ((1, 28, 28), 62, 84)]
)
def test_size_of_the_generator_on_the_wire(
    shape: tuple[int, ...], classes: int, features: int
) -> None:
    symbols = {"F": features, "C": classes, "X": int(torch.Size(shape).numel())}
    nowhere = torch.device("meta")

    def size(net: Any) -> int:
        return tree.numel(net.init(rng.key(0, nowhere), torch.float32, nowhere))

    star, own = FedGen(level="input"), FedGen()
    assert star.count("G", symbols) == size(image_generator(shape, classes, 32, 128))
    assert own.count("G", symbols) == size(feature_generator((features,), classes, 32, 8))
    assert own.count("C", symbols) == classes


def test_a_generator_for_cifar10_has_the_parameters_of_the_table() -> None:
    """682 307 of Table 5a, and the statistics of four BatchNorms: 128, 128, 64, 3 channels."""
    symbols = {"F": 512, "C": 10, "X": 3072}
    star = parse("fedgen:star").parts[0]
    assert star.count(star.sends, symbols) == 682_307 + 2 * (128 + 128 + 64 + 3) + 4


def test_generated_samples_leave_batchnorms_statistics_alone() -> None:
    runs = [ran(m, rounds=2, steps=1, optim=None) for m in (gen(level="input"), gen())]
    frozen = [images(norm="bn", steps=1).simulate(gen(level="input", alpha=a)) for a in (0.0, 9.0)]
    for run in frozen:
        run.run_round([0, 1])
        run.run_round([0, 1])
    # one step a round: the statistics depend on the weights before it, not on the generated rows
    assert tree.equal(frozen[0].weights.buffers, frozen[1].weights.buffers)
    name = "stage1.1.num_batches_tracked"
    assert [int(r.weights.buffers[name]) for r in runs] == [2, 2]


def test_labels_enter_a_generator_one_hot() -> None:
    """Also under vmap and in a captured graph, where ``F.one_hot`` would read values."""
    net = feature_generator((6,), 3, 4, 2)
    weights = net.init(rng.key(0), DOUBLE, torch.device("cpu"))
    z, y = rng.normal(rng.key(1), (7, 4), DOUBLE), torch.arange(7) % 3
    inputs = torch.cat([z, F.one_hot(y, 3).to(DOUBLE)], 1)
    expected = net._model.forward(weights, inputs, "eval").logits
    assert torch.equal(net(weights, z, y, train=False)[0], expected)
    rows = torch.func.vmap(lambda z, y: net(weights, z[None], y[None], train=False)[0][0])(z, y)
    assert tree.gap(rows, expected) < 1e-12


def test_server_steps_leave_their_inputs_alone() -> None:
    for part in (gen(), gen(level="input"), df()):
        r, weights = server_round_of(part)
        held = [*tree.leaves(r.clients), *tree.leaves(weights), *tree.leaves(r.server), r.key]
        before, versions = [x.clone() for x in held], [x._version for x in held]
        new, slot = part.server_step(r, weights)
        assert [x._version for x in held] == versions
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
        assert tree.gap(slot, r.server) > 0
        assert (tree.gap(new, weights) > 0) == isinstance(part, FedDF)


def test_absent_classes_are_neither_drawn_nor_allotted() -> None:
    for seed in range(10):
        counts = rng.integers(rng.key(seed), (12,), 50) * (torch.arange(12) % 3 > 0)
        some = draw_labels(rng.key(seed), (counts > 0).to(torch.int64), 600)
        every = allot_labels(rng.key(seed), counts, 600)
        for y in (some, every):
            seen = torch.bincount(y, minlength=12)
            assert not seen[counts == 0].any()
            assert int(seen.sum()) == 600
        share = 600 * counts / counts.sum()
        assert ((torch.bincount(every, minlength=12) - share).abs() < 1).all()


# -- FedDF ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["fedavg", "fedprox(mu=0.1)", "feddyn(alpha=1)", "scaffold"])
def test_feddf_without_steps_is_the_base_bit_for_bit(base: str) -> None:
    runs = [images(norm="bn").simulate(m) for m in (base, f"{base}+{df(student_steps=0)}")]
    for run in runs:
        for _ in range(2):
            run.run_round([0, 2])
    assert tree.equal(runs[0].weights, runs[1].weights)
    assert tree.gap(runs[0].weights, ran(f"{base}+{df()}").weights) > 1e-4


def test_frozen_statistics_stay_as_aggregated() -> None:
    runs = {o: ran(df(student_bn=o), rounds=1) for o in ("train", "frozen")}
    plain = ran("fedavg", rounds=1)
    assert tree.equal(runs["frozen"].weights.buffers, plain.weights.buffers)
    name = "stage1.1.num_batches_tracked"
    moved = runs["train"].weights.buffers[name] - plain.weights.buffers[name]
    assert int(moved) == df().student_steps


def test_parameters_of_other_parts_are_left_alone() -> None:
    plain, run = ran("moon(projection=4)", 1), ran(f"moon(projection=4)+{df()}", 1)
    for name in run.weights.params:
        same = torch.equal(plain.weights.params[name], run.weights.params[name])
        assert same == name.startswith("moon/"), name


def test_dropout_in_the_model_is_drawn_from_the_key() -> None:
    for part in (gen(level="input"), df()):
        runs = [ran(part, dropout=0.3) for _ in range(2)]
        assert tree.equal(runs[0].state(), runs[1].state())


def test_nothing_is_drawn_from_torchs_own_generator() -> None:
    problem, before = images(norm="bn", dropout=0.3), torch.get_rng_state()
    image_generator.cache_clear()
    feature_generator.cache_clear()
    problem.simulate(parse(f"{gen()}+{df()}")).run_round()
    assert torch.equal(torch.get_rng_state(), before)


# -- what they refuse -------------------------------------------------------------------------


def table(module: nn.Module, method: str) -> Simulation:
    x, y = rng.normal(rng.key(0), (12, 5)), torch.arange(12) % 3
    clients = list(torch.arange(12).reshape(2, 6))
    federation = Federation(x, y, clients, make_task("classification", 3))
    return Simulation(federation, Model(module), method)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def test_tables_have_features_but_no_images() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    for part in (gen(level="input"), df()):
        with pytest.raises(ModelError, match="level=feature"):
            table(net, str(part))
    for part in (gen(), df(level="feature")):
        run = table(net, str(part))
        run.run_round()
        run.run_round()
        assert finite(run)
        with pytest.raises(ModelError, match="head"):
            table(Plain(), str(part))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(IncompatibleError, match="nothing to distil into"):
        images().simulate(f"fedrep+{df(level='feature')}")
    with pytest.raises(FieldError, match="no room for the label"):
        images().simulate(gen(width=1))
    for name in ("fedgen", "feddf"):
        with pytest.raises(IncompatibleError, match="no meaning for regression"):
            images(task="regression").simulate(name)
    with pytest.raises(FieldError, match="level"):
        FedGen(level="logits")  # type: ignore[arg-type]


# -- faults -----------------------------------------------------------------------------------
# Each of these has one fault; the comment names it, and an identity must find it.


def pieces(part, v, params, batch):
    """The loss of generated samples and the logits of the teacher, as the part has them."""
    key_y, key_other, key_same = rng.split(v.key, 3)
    labels = rng.integers(key_y, (part.rows or len(batch.x),), v.task.outputs)
    wrong = F.cross_entropy(part._generated_logits(v, params, key_other, labels), labels)
    return wrong, part._generated_logits(v, params, key_same, batch.y)


@dataclass(frozen=True)
class LiveTeacher(FedGen):
    def term(self, v, params, batch, out):  # a gradient into h(G(z, y))
        term = super().term(v, params, batch, out)
        if v.phase == "first":
            return term
        live = v.task.divergence(pieces(self, v, params, batch)[1], out.logits.detach()).mean()
        return term + self._weight(v, self.beta) * (live - live.detach())


@dataclass(frozen=True)
class TurnedRound(FedGen):
    def term(self, v, params, batch, out):  # KL(f(x) || h(G(z, y)))
        term = super().term(v, params, batch, out)
        if v.phase == "first":
            return term
        taught = pieces(self, v, params, batch)[1].detach()
        right = v.task.divergence(taught, out.logits).mean()
        wrong = v.task.divergence(out.logits, taught).mean()
        return term + self._weight(v, self.beta) * (wrong - right)


@dataclass(frozen=True)
class NoRatio(FedGen):
    def term(self, v, params, batch, out):  # B'/B forgotten
        term = super().term(v, params, batch, out)
        if v.phase == "first":
            return term
        ratio = (self.rows or len(batch.x)) / len(batch.x)
        return term + self._weight(v, self.alpha) * (1 - ratio) * pieces(self, v, params, batch)[0]


@dataclass(frozen=True)
class Early(FedGen):
    def phase(self, round):  # learns from an untrained generator
        return "later"


@dataclass(frozen=True)
class Unfading(FedGen):
    def _weight(self, v, first):  # alpha_t = alpha
        return torch.zeros_like(v.info.lr) + first


@dataclass(frozen=True)
class Floorless(FedGen):
    def _weight(self, v, first):
        return first * self.fade ** v.round.to(v.spec.dtype)


@dataclass(frozen=True)
class EqualClients(FedGen):
    def _ensemble(self, counts):  # 1/K for every client
        return torch.full_like(counts, 0.5)


@dataclass(frozen=True)
class OwnShares(FedGen):
    def _ensemble(self, counts):  # n_k^y / n_k
        return counts / counts.sum(1, keepdim=True)


@dataclass(frozen=True)
class Collapsing(FedGen):
    def _generator_loss(self, *args):  # - eta L_div: all samples alike
        loss, buffers = super()._generator_loss(*args)
        return 2 * FedGen._generator_loss(replace(self, eta=0.0), *args)[0] - loss, buffers


@dataclass(frozen=True)
class Undecayed(FedGen):
    def server_step(self, r, weights):  # no weight decay
        return FedGen.server_step(replace(self, weight_decay=0.0), r, weights)


@dataclass(frozen=True)
class NewMoments(FedGen):
    def server_step(self, r, weights):  # Adam forgets
        if self.keep_moments:
            fresh = Adam().init(r.server["generator"]["params"])
            r.server = r.server | {"moments": fresh}
        return super().server_step(r, weights)


@dataclass(frozen=True)
class Forgetful(FedGen):
    def server_step(self, r, weights):  # the generator never learns
        return weights, r.server


@dataclass(frozen=True)
class MeanLogits(FedDF):
    def _ensemble(self, logits):  # softmax of the mean logits
        return logits.mean(0)


@dataclass(frozen=True)
class BySize(FedDF):
    def _ensemble(self, logits):  # clients weighted by their data
        share = (COUNTS.sum(1) / COUNTS.sum()).to(logits.dtype)
        return torch.einsum("k,kbc->bc", share, torch.softmax(logits, -1)).log()


@dataclass(frozen=True)
class StudentTeacher(FedDF):
    def _student_loss(self, student, s, x, mean, key):  # the other KL
        said, buffers = student_logits(s, self.level, student, x, "train", key)
        return s.task.divergence(said, mean).mean(), buffers


@dataclass(frozen=True)
class BatchSum(FedDF):
    def _student_loss(self, student, s, x, mean, key):  # not the mean over samples
        loss, buffers = super()._student_loss(student, s, x, mean, key)
        return len(x) * loss, buffers


@dataclass(frozen=True)
class FromTheAnchor(FedDF):
    def server_step(self, r, weights):  # distils into last round's model
        return super().server_step(r, r.anchor)


@dataclass(frozen=True)
class Undecaying(FedDF):
    def server_step(self, r, weights):  # no weight decay
        return FedDF.server_step(replace(self, weight_decay=0.0), r, weights)


@dataclass(frozen=True)
class SameRate(FedDF):
    def server_step(self, r, weights):  # the same step size in every round
        return FedDF.server_step(replace(self, decay=1.0), r, weights)


@dataclass(frozen=True)
class SumOfClients(FedDF):
    def _generator_loss(self, *args):  # the clients' losses are not averaged
        loss, buffers = super()._generator_loss(*args)
        quiet = FedDF._generator_loss(replace(self, eta=0.0), *args)[0]
        return loss + quiet, buffers


@dataclass(frozen=True)
class Alike(FedDF):
    def _generator_loss(self, *args):  # - eta L_div
        loss, buffers = super()._generator_loss(*args)
        return 2 * FedDF._generator_loss(replace(self, eta=0.0), *args)[0] - loss, buffers


@dataclass(frozen=True)
class Still(FedDF):
    def _train_generator(self, r, generator, counts):  # G's statistics are lost
        return super()._train_generator(r, generator, counts)._replace(buffers=generator.buffers)


@dataclass(frozen=True)
class Uniform(FedDF):
    def _draws(self, r, player, steps, counts):  # labels whatever the clients have
        return super()._draws(r, player, steps, torch.ones_like(counts))


@dataclass(frozen=True)
class Whole(FedDF):
    def _tuned_names(self, spec):  # features reach the head, but all leaves decay
        return spec.model.names


FAULTY = [
    LiveTeacher, TurnedRound, NoRatio, Early, Unfading, Floorless, EqualClients, OwnShares,
    Collapsing, Undecayed, NewMoments, Forgetful, MeanLogits, BySize, StudentTeacher, BatchSum,
    FromTheAnchor, Undecaying, SameRate, SumOfClients, Alike, Still, Uniform, Whole,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


def test_labels_of_generated_samples_are_uniform_whatever_the_client_has() -> None:
    seen: list[torch.Tensor] = []

    @dataclass(frozen=True)
    class Recorded(FedGen):
        def _generated_logits(self, v, params, key, labels):
            seen.append(labels.clone())
            return super()._generated_logits(v, params, key, labels)

    run = images(sizes=(5, 9), batch=5, steps=1).simulate(Recorded(**gen(rows=300).__dict__))
    run.run_round([0])
    assert not seen  # nothing is imagined in the first round
    run.run_round([0])
    other, same = seen[-2:]  # those before come from the check of the hooks
    assert (torch.bincount(other, minlength=3) > 75).all()
    assert same.tolist() == [0] * 5  # all that the client has


@pytest.mark.parametrize(("side", "stages"), [(8, 2), (64, 2), (65, 3), (128, 4)])
def test_larger_images_have_more_stages(side: int, stages: int) -> None:
    names = image_generator((1, side, side), 3, 4, 4, True)._layers
    assert [f"stage{i}" in names for i in range(1, 6)] == [i <= stages for i in range(1, 6)]
