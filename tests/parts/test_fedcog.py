"""FedCOG: every option, the faults that its identities find, and how it goes with other parts."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.check.problems import DOUBLE, Problem, images
from kedge.core import client, rng, tree
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.core.view import View
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError, KedgeError
from kedge.parts.fedcog import FedCOG
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

ENGINES = ("loop", "vector")
TINY: dict[str, Any] = FedCOG.tiny


def made(run: Simulation, k: int, part: FedCOG | None = None) -> Any:
    """What client k generates in the present round (with another setting, if given)."""
    own = part or run.bound.parts[0]
    context = client.client_context(run.bound.at(run.round), take_jobs(run.cohort([k]).jobs, 0), {})
    return own.prepare(View(context, own, "prepare"))


def both(problem: Problem, method: Any, rounds: int = 2, **options: Any) -> list[Simulation]:
    runs = [problem.simulate(method, engine, **options) for engine in ENGINES]
    for run in runs:
        for _ in range(rounds):
            run.run_round()
        assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-10
    return runs


# -- options ----------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"targets": "uniform"},
    "custom": {"targets": "custom", "shares": (0.2, 0.0, 0.8)},
    "official": {"disagreement": "official", "lambda_dis": 1.0},
    "lambda": {"weighting": "lambda", "lambda_kd": 0.5},
    "warm": {"temperature": 3.0},
    "generator": {"source": "generator", "latent": 5, "width": 4},
    "cut": {"cut": "stage1"},
    "generator at a cut": {"cut": "stage2", "source": "generator", "latent": 5, "width": 4},
    "large batch": {"batch": 15},
    "slow Adam": {"betas": (0.9, 0.999)},
}


@pytest.mark.long
@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_alike_on_both_engines(option: str, task: str) -> None:
    values, norm = OPTIONS[option], "gn" if "cut" in OPTIONS[option] else "bn"
    problem = images(task=task, norm=norm, sizes=(5, 9))
    changed = both(problem, FedCOG(**TINY | values))[0]
    plain = both(problem, FedCOG(**TINY))[0]
    assert tree.gap(changed.weights, plain.weights) > 1e-9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", ["none", "bn"])
def test_before_its_start_it_is_fedavg_bit_for_bit(engine: str, norm: str) -> None:
    problem = images(norm=norm)
    part = FedCOG(**TINY | {"start": 2})
    run, plain = problem.simulate(part, engine), problem.simulate("fedavg", engine)
    for _ in range(2):
        run.run_round()
        plain.run_round()
    assert tree.equal(run.weights, plain.weights)
    assert bool((run.store.rows["fedcog"]["seen"] == 1).all())  # the models are there at the start
    run.run_round()
    plain.run_round()
    assert not tree.equal(run.weights, plain.weights)


@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.parametrize("source", ["inputs", "generator"])
def test_generation_lowers_its_loss_and_touches_no_model(source: str, task: str) -> None:
    settings = {
        "samples": 12,
        "lr": 0.05,
        "lambda_dis": 1.0,
        "source": source,
        "latent": 6,
        "width": 8,
    }
    run = images(task=task, norm="bn", sizes=(8, 12)).simulate(FedCOG(steps=2, **settings))
    for _ in range(2):
        run.run_round()
    held = {n: x.clone() for n, x in run.state().items()}
    previous = run.bound.model.module(run.weights)
    previous.load_state_dict(tree.take(run.store.rows["fedcog"]["previous"], 1), strict=False)

    def loss(data: Any) -> float:
        now, then = run.module()(data["x"]), previous(data["x"])
        if task == "multilabel":
            fit = F.binary_cross_entropy_with_logits(now, data["y"])
            now, then = (torch.stack([z, -z], -1).sigmoid() for z in (now, then))
        else:
            fit = F.cross_entropy(now, data["y"])
            now, then = now.softmax(1), then.softmax(1)
        m = (now + then) / 2
        js = 0.5 * (now * (now / m).log() + then * (then / m).log()).flatten(1).sum(1).mean()
        return float((fit + 1.0 * (1 - js)).detach())

    before, after = (made(run, 1, FedCOG(steps=s, **settings)) for s in (0, 60))
    assert loss(after) < loss(before) - 0.05
    assert torch.equal(before["y"], after["y"])
    assert tree.equal(held, run.state())


def test_targets_by_shares_and_all_alike() -> None:
    run = images(sizes=(5, 9)).simulate(FedCOG(samples=10, steps=0))
    shares = FedCOG(samples=10, steps=0, targets="custom", shares=(5, 3, 2))
    assert torch.bincount(made(run, 0, shares)["y"]).tolist() == [5, 3, 2]
    alike = FedCOG(samples=10, steps=0, targets="uniform")
    assert torch.bincount(made(run, 0, alike)["y"]).tolist() == [4, 3, 3]


def test_label_vectors_by_shares_and_all_alike() -> None:
    run = images(task="multilabel", sizes=(5, 9)).simulate(FedCOG(samples=2000, steps=0))
    shares = FedCOG(samples=2000, steps=0, targets="custom", shares=(0.1, 0.0, 1.0))
    found = made(run, 0, shares)["y"].mean(0)
    assert found.tolist() == pytest.approx([0.1, 0.0, 1.0], abs=0.03)
    alike = FedCOG(samples=2000, steps=0, targets="uniform")
    assert made(run, 0, alike)["y"].mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.04)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": "custom", "shares": (0.5, 0.5)}, "3 shares"),
        ({"targets": "custom", "shares": (0.5, -0.5, 1.0)}, "3 shares"),
        ({"targets": "custom", "shares": (0.0, 0.0, 0.0)}, "3 shares"),
        ({"targets": "custom"}, "3 shares"),
        ({"betas": (0.5, 0.9, 0.9)}, "list of 2 finite numbers"),
        ({"cut": "stage1"}, "without BatchNorm"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(values: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        images(norm="bn").simulate(FedCOG(**values))


def test_an_unknown_cut_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="stage9.* stage1, stage2"):
        images().simulate(FedCOG(cut="stage9"))


def test_disagreement_as_the_authors_compute_it() -> None:
    """KL(m || p) of probabilities clamped to [0.01, 0.99], the mean clamped to [0, 1]."""
    run = images().simulate(FedCOG(**TINY))
    part = FedCOG(disagreement="official")
    job = take_jobs(run.cohort([0]).jobs, 0)
    view = View(client.client_context(run.bound, job, {}), part, "prepare")
    a, b = 3 * rng.normal(rng.key(1), (2, 7, 3), DOUBLE)
    p, q = a.softmax(1), b.softmax(1)
    m = (0.5 * (p + q)).clamp(0.01, 0.99)
    p, q = p.clamp(0.01, 0.99), q.clamp(0.01, 0.99)
    halves = [0.5 * F.kl_div(s.log(), m, reduction="batchmean") for s in (p, q)]
    assert float(part._divergence(view, a, b)) == pytest.approx(float(sum(halves)), abs=1e-12)
    far = torch.tensor([[60.0, 0, 0]], dtype=DOUBLE), torch.tensor([[0, 60.0, 0]], dtype=DOUBLE)
    assert float(part._divergence(view, *far)) == 1.0
    true = FedCOG()
    assert float(true._divergence(view, *far)) == pytest.approx(math.log(2), abs=1e-12)
    assert float(true._divergence(view, a, a)) == pytest.approx(0.0, abs=1e-15)


def test_a_batch_may_hold_every_generated_sample_more_than_once() -> None:
    part = FedCOG(**TINY | {"samples": 3, "batch": 8})
    run = images().simulate(part)
    job = take_jobs(run.cohort([0]).jobs, 0)
    local, used = {"fedcog": made(run, 0)}, torch.zeros(3)
    for t in range(3):
        context = client.client_context(run.bound.at(run.round), job, local, torch.tensor(t))
        rows = part._rows(View(context, part, "term"))
        assert torch.bincount(rows, minlength=3).min() >= 2
        used += torch.bincount(rows, minlength=3)
    assert used.tolist() == [8, 8, 8]


class Tokens(nn.Module):
    """A table of embeddings for whole-number inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long())


class Reader(nn.Module):
    """A user's model of tokens that is not sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = Tokens(), nn.Dropout(0.2)
        self.register_buffer("place", torch.linspace(-1, 1, 5)[:, None])
        self.mix = nn.Linear(6, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.drop(self.embed(x) + self.place))).mean(1))


class MaskedReader(Reader):
    """One that looks at the tokens once more, after they are embedded."""

    def forward(self, x: Tensor) -> Tensor:
        known = (x > 0)[..., None].to(self.place.dtype)
        return self.head((self.mix(self.embed(x)) * known).mean(1))


def token_problem(module: nn.Module) -> Problem:
    y = rng.integers(rng.key(1), (20,), 3)
    x = (rng.integers(rng.key(2), (20, 5), 4) + 3 * y[:, None]).clamp_max(10)
    clients = list(torch.split(torch.argsort(y, stable=True), [8, 12]))
    federation = Federation(x, y, clients, kedge.Classification(3), dtype=DOUBLE)
    return Problem(federation, module.to(DOUBLE), LocalWork(batch=4), kedge.SGD(lr=0.1))


def test_embeddings_are_generated_for_models_of_tokens() -> None:
    torch.manual_seed(0)
    runs = both(token_problem(Reader()), FedCOG(cut="embed", **TINY), rounds=3)
    data = made(runs[0], 0)
    assert data["x"].shape == (6, 5, 6)
    with torch.no_grad():
        module = runs[0].module()
        rest = module.head(torch.tanh(module.mix(data["x"] + module.place)).mean(1))
    assert float((rest - data["logits"]).abs().max()) < 1e-12


def test_a_model_that_looks_at_its_tokens_again_fails_loudly() -> None:
    torch.manual_seed(0)
    with pytest.raises(KedgeError, match=r"fedcog\.prepare failed"):
        token_problem(MaskedReader()).simulate(FedCOG(cut="embed", **TINY), "loop").run_round()


def test_generator_for_tables() -> None:
    y = torch.arange(14) % 3
    x = rng.normal(rng.key(4), (14, 4), DOUBLE)
    clients = [range(6), range(6, 14)]
    federation = Federation(x, y, clients, kedge.Classification(3), dtype=DOUBLE)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(DOUBLE)
    problem = Problem(federation, module, LocalWork(batch=4), kedge.SGD(lr=0.1))
    part = FedCOG(**TINY | {"source": "generator", "latent": 3, "width": 4})
    assert made(both(problem, part)[0], 0)["x"].shape == (6, 4)


def test_generator_at_the_papers_size() -> None:
    """A linear layer to 8192 = 128 * 8 * 8 numbers, then three 3x3 convolutions (A.5.1)."""
    layers = FedCOG(source="generator")._layers((3, 32, 32))
    assert layers == [(8192, 256), (128, 128, 3, 3), (64, 128, 3, 3), (3, 64, 3, 3)]


@pytest.mark.parametrize("shape", [(1, 7, 5), (2, 4, 9)])
def test_generator_for_odd_sizes(shape: tuple[int, ...]) -> None:
    x = rng.normal(rng.key(4), (8, *shape), DOUBLE)
    federation = Federation(
        x, torch.arange(8) % 2, [range(8)], kedge.Classification(2), dtype=DOUBLE
    )
    module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 2)).to(DOUBLE)
    part = FedCOG(samples=40, steps=0, source="generator", latent=30, width=16)
    run = Problem(federation, module, LocalWork(batch=4)).simulate(part)
    context = client.client_context(run.bound.at(run.round), take_jobs(run.cohort([0]).jobs, 0), {})
    seeds = part._seeds(run.bound.spec, rng.split(View(context, part, "prepare").key, 3)[1])
    small = (math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
    act = nn.LeakyReLU(0.2)
    net = nn.Sequential(
        nn.Linear(30, 16 * math.prod(small)), act, nn.Unflatten(1, (16, *small)),
        nn.Upsample(shape[1:]), nn.Conv2d(16, 16, 3, padding=1), act,
        nn.Conv2d(16, 8, 3, padding=1), act, nn.Conv2d(8, shape[0], 3, padding=1),
    ).to(DOUBLE)  # fmt: skip
    layers = [m for m in net if hasattr(m, "weight")]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(seeds[f"weight{i}"])
            layer.bias.zero_()
        expected = net(seeds["z"])
    assert tree.gap(made(run, 0)["x"], expected) < 1e-13
    # He's initialisation: variance 2 / fan_in after an activation, and 1 / fan_in before any
    for i in range(len(layers)):
        weight = seeds[f"weight{i}"]
        fan_in = weight[0].numel()
        found = float((weight**2).mean()) * fan_in / (1 if i == 0 else 2)
        assert abs(found - 1) < 5 * (2 / weight.numel()) ** 0.5  # five standard deviations


# -- with others ------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["scaffold", "fedsam", "fedrep", "mixup", "moon(projection=4)"])
def test_together_with(other: str) -> None:
    both(images(norm="bn", sizes=(5, 9)), parse(other) + FedCOG(**TINY))


def test_the_previous_model_has_the_clients_own_head() -> None:
    """The body is kept, and a head that stays on the client is that of both models."""
    part = FedCOG(samples=6, steps=3, batch=4, lr=0.05, lambda_dis=5.0)
    run = images(sizes=(5, 9)).simulate(parse("fedrep") + part)
    for _ in range(2):
        run.run_round()
    job = take_jobs(run.cohort([1]).jobs, 0)
    v = View(client.client_context(run.bound.at(run.round), job, {}), part, "prepare")
    data, kept = part.prepare(v), v.client["previous"]
    assert not set(kept) & set(run.bound.model.head_names())
    now, then = (run.bound.model.module(v.anchor) for _ in range(2))
    then.load_state_dict(kept, strict=False)
    x = part._seeds(v.spec, rng.split(v.key, 3)[1])["x"].requires_grad_()
    adam = torch.optim.Adam([x], lr=0.05, betas=part.betas)
    for _ in range(3):
        adam.zero_grad()
        p, q = now(x).softmax(1), then(x).softmax(1)
        m = (p + q) / 2
        js = 0.5 * (p * (p / m).log() + q * (q / m).log()).sum(1).mean()
        (F.cross_entropy(now(x), data["y"]) + 5.0 * (1 - js)).backward()
        adam.step()
    assert tree.gap(data["x"], x.detach()) < 1e-10


def test_statistics_that_stay_on_the_client_and_dropout() -> None:
    both(images(norm="bn", batchnorm="local", dropout=0.3, sizes=(5, 9)), FedCOG(**TINY))


def test_partial_participation() -> None:
    runs = both(images(norm="bn", sizes=(5, 9, 14)), FedCOG(**TINY), rounds=3, per_round=2)
    seen = {k for t in range(3) for k in runs[0].session.draw_clients(t)}
    assert runs[0].store.rows["fedcog"]["seen"].tolist() == [float(k in seen) for k in range(3)]


@pytest.mark.parametrize("preset", ["paper", "official", "flair"])
def test_presets_in_the_method_grammar(preset: str) -> None:
    method = parse(f"fedcog:{preset}")
    assert parse(str(method)) == method
    assert method.parts[0].start in (50, 400)


def test_lists_in_the_method_grammar() -> None:
    method = parse("fedcog(targets=custom, shares=[0.5, 0.25, 0.25], betas=[0.9, 0.99])")
    assert method.parts[0] == FedCOG(targets="custom", shares=(0.5, 0.25, 0.25), betas=(0.9, 0.99))
    assert parse(str(method)) == method


# -- each of these has one fault; the comment names it, and an identity must find it -----------


@dataclass(frozen=True)
class Reversed(FedCOG):
    def term(self, v, params, batch, out):  # KL(student || teacher)
        rows = self._rows(v)
        student = self._student_logits(v, params, v.local["x"][rows])
        gap = v.task.divergence(student, v.local["logits"][rows], self.temperature).mean()
        return self._weights(v)[1] * self.temperature**2 * gap


@dataclass(frozen=True)
class NoSquare(FedCOG):
    def term(self, v, params, batch, out):  # T^2 is forgotten
        return super().term(v, params, batch, out) / self.temperature**2


@dataclass(frozen=True)
class LearningTeacher(FedCOG):
    def term(self, v, params, batch, out):  # the teacher is the model in training
        x = v.local["x"][self._rows(v)]
        teacher = v.forward(params, x, train=False).logits
        gap = v.task.divergence(teacher, self._student_logits(v, params, x)).mean()
        return self._weights(v)[1] * gap


@dataclass(frozen=True)
class Agrees(FedCOG):
    def _divergence(self, v, anchor_logits, previous_logits):  # 1 + JS
        return -super()._divergence(v, anchor_logits, previous_logits)


@dataclass(frozen=True)
class Doubled(FedCOG):
    def _divergence(self, v, anchor_logits, previous_logits):  # the half of JS is forgotten
        return 2 * super()._divergence(v, anchor_logits, previous_logits)


@dataclass(frozen=True)
class OneSided(FedCOG):
    def _divergence(self, v, anchor_logits, previous_logits):  # half of it has no gradient
        return super()._divergence(v, anchor_logits, previous_logits.detach())


@dataclass(frozen=True)
class Forgets(FedCOG):
    def reply(self, v, weights):  # no previous model is kept
        return v.client, {}


@dataclass(frozen=True)
class KeepsGlobal(FedCOG):
    def reply(self, v, weights):  # keeps the global model in place of the local one
        return super().reply(v, v.anchor)


@dataclass(frozen=True)
class RandomPrevious(FedCOG):
    def client_init(self, spec):  # a client without a previous model takes a random one
        first = super().client_init(spec)
        return {
            "previous": tree.scale(first["previous"], 1.5),
            "seen": torch.ones_like(first["seen"]),
        }


@dataclass(frozen=True)
class OwnClass(FedCOG):
    def _targets(self, v, key):  # what the client has most of
        if v.task.name == "multilabel":
            return super()._targets(v, key)
        return v.label_counts.argmax().expand(self.samples)


@dataclass(frozen=True)
class RoundedDown(FedCOG):
    def _targets(self, v, key):  # what rounding down leaves over goes to class 0
        if v.task.name == "multilabel":
            return super()._targets(v, key)
        lacking = v.label_counts.max() - v.label_counts
        quota = (self.samples * lacking / lacking.sum().clamp_min(1)).floor().to(torch.int64)
        y = (torch.arange(self.samples)[:, None] >= quota.cumsum(0)).sum(1)
        return torch.where(y == len(quota), 0, y)


@dataclass(frozen=True)
class SwappedWeights(FedCOG):
    def _weights(self, v):  # a client that has little trains on it alone
        return super()._weights(v)[::-1]


@dataclass(frozen=True)
class BudgetWeights(FedCOG):
    def _weights(self, v):  # N_gen is taken for the number of generated samples
        real = v.info.num_examples / (v.info.num_examples + self.samples)
        return (real, 1 - real) if self.weighting == "balanced" else super()._weights(v)


@dataclass(frozen=True)
class StaleLogits(FedCOG):
    def prepare(self, v):  # the logits are those of the noise
        noise = self._render(v.spec, self._seeds(v.spec, rng.split(v.key, 3)[1]))
        return super().prepare(v) | {"logits": self._logits(v, v.anchor, noise)}


@dataclass(frozen=True)
class BatchStatistics(FedCOG):
    def _logits(self, v, weights, x):  # generation in training mode
        return v.spec.model.forward(weights, x, "probe").logits


@dataclass(frozen=True)
class EvalStudent(FedCOG):
    def _student_logits(self, v, params, x):  # distillation in evaluation mode
        return v.forward(params, x, train=False).logits


@dataclass(frozen=True)
class QuietStudent(FedCOG):
    def _student_logits(self, v, params, x):  # generated rows leave the running statistics alone
        return v.forward(params, x).logits


@dataclass(frozen=True)
class SameBatch(FedCOG):
    def _rows(self, v):  # never more than the first batch
        return torch.arange(self.batch) % self.samples


@dataclass(frozen=True)
class MeanOverLabels(FedCOG):
    def _divergence(self, v, anchor_logits, previous_logits):  # labels averaged, not added
        share = anchor_logits.shape[-1] if v.task.name == "multilabel" else 1
        return super()._divergence(v, anchor_logits, previous_logits) / share


FAULTY = [
    Reversed, NoSquare, LearningTeacher, Agrees, Doubled, OneSided, Forgets, KeepsGlobal,
    RandomPrevious, OwnClass, RoundedDown, SwappedWeights, BudgetWeights, StaleLogits,
    BatchStatistics, EvalStudent, QuietStudent, SameBatch, MeanOverLabels,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())
