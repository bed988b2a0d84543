"""The simulation end to end: tasks, models, cohorts, saving, errors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.check.problems import Problem, images, quadratics
from kedge.core import tree
from kedge.core.part import Mean, Part
from kedge.core.round import Round
from kedge.core.task import Classification
from kedge.core.tree import Weights
from kedge.core.view import Spec, View
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine
from kedge.engines.cohort import clone
from kedge.errors import FieldError, IncompatibleError, KedgeError, ModelError, NotFinite
from kedge.models import build
from kedge.sim.simulation import Simulation

ENGINES = ("loop", "vector")


def run_both(problem: Problem, method: str, rounds: int = 2, **options) -> list[Simulation]:
    runs = [problem.simulate(method, engine, **options) for engine in ENGINES]
    for run in runs:
        for _ in range(rounds):
            run.run_round()
    return runs


def noise_federation(shape, outputs, sizes, dtype=torch.float64) -> Federation:
    g = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x = torch.randn(n, *shape, generator=g, dtype=dtype)
    y = torch.randint(0, outputs, (n,), generator=g)
    clients = torch.split(torch.arange(n), list(sizes))
    return Federation(x, y, clients, kedge.Classification(outputs), test=(x, y), dtype=dtype)


@pytest.mark.parametrize("method", ["fednova", "fedexp+fedper", "groupdro+scaffold"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_beside_a_contribution_is_counted(method: str, engine: str) -> None:
    """The mean of the updates is taken in any case, so they travel, too: three clients, eight bytes
    a number, and what the parts declare beside FedAvg's update."""
    run = images(norm="bn").simulate(method, engine)
    symbols = [run.bound.spec.symbols(part) for part in run.bound.method.parts]
    sums = zip(run.bound.method.parts, symbols, strict=True)
    declared = sum(part.count(part.uploads, own) for part, own in sums)
    plain = images(norm="bn").simulate("fedavg", engine)
    assert run.run_round().up_bytes - plain.run_round().up_bytes == 3 * 8 * declared


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_task_learns(task: str, engine: str) -> None:
    run = images(
        task=task,
        norm="gn",
        sizes=(20, 30, 40),
        optim=kedge.SGD(lr=0.3 if task != "regression" else 0.05),
    ).simulate("fedprox+scaffold", engine)
    before = run.evaluate()
    for _ in range(12):
        run.run_round()
    after = run.evaluate()
    metric, up = run.federation.task.metric, run.federation.task.higher_is_better
    assert after["loss"] < 0.7 * before["loss"]
    assert (after[metric] > before[metric]) is up


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("mlp(hidden=[12, 8])", (6,)),
        ("lenet5(norm=bn)", (1, 28, 28)),
        ("lenet5(norm=gn)", (1, 28, 28)),
        ("fedcog_cnn", (1, 28, 28)),
        ("fedcog_cnn", (3, 32, 32)),
        ("resnet18(norm=bn)", (3, 8, 8)),
        pytest.param("resnet18(norm=gn)", (3, 8, 8), marks=pytest.mark.long),
    ],
)
def test_loop_is_vector_on_real_models(model: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = build(model, shape, 3)
    federation = noise_federation(shape, 3, (6, 8))
    problem = Problem(federation, module, LocalWork(batch=6), kedge.SGD(lr=0.05))
    loop, vector = run_both(problem, "moon(mu=1, projection=0)+scaffold")
    assert tree.gap(loop.state(), vector.state()) < 1e-9


class OwnNet(nn.Module):
    """A user's module that is not sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.inner(x))))


def test_a_users_module_needs_no_head_unless_a_part_does() -> None:
    federation = noise_federation((4,), 3, (7, 9))
    torch.manual_seed(1)
    net = OwnNet()
    problem = Problem(federation, net, LocalWork(batch=4), kedge.SGD(lr=0.05))
    loop, vector = run_both(problem, "scaffold+fedsam")
    assert tree.gap(loop.state(), vector.state()) < 1e-11
    with pytest.raises(ModelError, match=r"moon needs to know the model's head.*head="):
        problem.simulate("moon")
    run = Simulation(federation, kedge.Model(net, head="out"), "moon(projection=0)")
    run.run_round()
    assert run.bound.spec.features == 6


def test_the_trained_module_is_ordinary_and_the_given_one_untouched() -> None:
    federation = noise_federation((4,), 3, (7, 9))
    torch.manual_seed(1)
    net = OwnNet().double()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run = Simulation(federation, net)
    run.run_round()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    trained = run.module()
    logits = trained(federation.x)
    assert isinstance(trained, OwnNet)
    assert not torch.equal(trained.inner.weight, net.inner.weight)
    expected = run.bound.model.forward(run.weights, federation.x, "eval").logits
    torch.testing.assert_close(logits, expected)


def test_one_client_one_step_is_plain_sgd() -> None:
    """With a single client FedAvg is SGD on its data."""
    federation = noise_federation((4,), 3, (5,))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    options = {"optim": kedge.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5)}
    run = Simulation(federation, net, work=LocalWork(batch=5, steps=4), engine="vector", **options)
    run.run_round()
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(4):
        own.zero_grad()
        nn.functional.cross_entropy(net(federation.x), federation.y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        own.step()
    for name, weight in net.named_parameters():
        torch.testing.assert_close(run.weights.params[name], weight.detach(), atol=1e-12, rtol=0)


def test_batchnorm_policies() -> None:
    def after(policy: str, engine: str = "vector") -> Simulation:
        run = images(norm="bn", batchnorm=policy).simulate("fedavg", engine)
        run.run_round()
        return run

    mean = "stage1.1.running_mean"
    start = images(norm="bn").simulate("fedavg").weights.buffers[mean]
    assert not torch.equal(after("average").weights.buffers[mean], start)
    assert torch.equal(after("frozen").weights.buffers[mean], start)
    local = after("local")
    assert torch.equal(local.weights.buffers[mean], start)
    rows = local.store.rows["private"]["buffers"][mean]
    assert not torch.allclose(rows[0], rows[1])
    assert torch.equal(local.personal([1]).buffers[mean][0], rows[1])
    # by the batch: evaluation does not look at the running statistics
    batch = after("batch")
    other = tree.map(lambda x: x + 1, batch.weights.buffers)
    changed = batch.evaluate(batch.weights._replace(buffers=other))
    assert changed == batch.evaluate()
    average = after("average")
    assert average.evaluate(average.weights._replace(buffers=other)) != average.evaluate()


def test_averaged_buffers_are_the_weighted_mean_and_counters_stay_whole() -> None:
    run = images(norm="bn", sizes=(5, 15), batch=5).simulate("fedavg")
    alone = []
    for client in range(2):
        one = images(norm="bn", sizes=(5, 15), batch=5).simulate("fedavg")
        one.run_round([client])
        alone.append(one.weights.buffers)
    run.run_round()
    mean = "stage1.1.running_mean"
    expected = 0.25 * alone[0][mean] + 0.75 * alone[1][mean]
    torch.testing.assert_close(run.weights.buffers[mean], expected)
    count = run.weights.buffers["stage1.1.num_batches_tracked"]
    assert count.dtype == torch.int64
    assert int(count) == 2  # 1 and 3 steps, weighted 1:3, rounds from 2.5 to 2


def test_cohorts_are_the_same_for_every_method_and_differ_by_round() -> None:
    sizes = (4,) * 10
    a = images(sizes=sizes, batch=4).simulate("fedavg", per_round=4)
    b = images(sizes=sizes, batch=4).simulate("moon", per_round=4)
    drawn = [a.session.draw_clients(t) for t in range(6)]
    assert drawn == [b.session.draw_clients(t) for t in range(6)]
    assert all(len(set(c)) == 4 for c in drawn)
    assert len({tuple(c) for c in drawn}) > 1
    often = torch.tensor([k for t in range(400) for k in a.session.draw_clients(t)])
    counts = torch.bincount(often)
    assert counts.min() > 120  # each client is drawn in 160 of 400 rounds on average
    assert counts.max() < 200


def test_state_of_another_method_is_refused() -> None:
    plain, other = images().simulate("fedavg"), images().simulate("scaffold")
    with pytest.raises(KedgeError, match="belongs to another method, model or federation"):
        other.load_state(plain.state())


def test_state_survives_a_file_and_goes_on(tmp_path) -> None:
    first = images(norm="bn").simulate("scaffold+fedrep", "vector", per_round=2)
    first.run_round()
    blob = save({k: v.contiguous() for k, v in first.state().items()})
    second = images(norm="bn").simulate("scaffold+fedrep", "vector", per_round=2)
    second.load_state(load(blob))
    assert second.round == 1
    for run in (first, second):
        run.run_round()
    assert tree.equal(first.state(), second.state())


def test_a_loss_that_is_not_finite_names_round_client_and_terms() -> None:
    run = quadratics().simulate("fedprox", optim=kedge.SGD(lr=50.0))
    with pytest.raises(
        NotFinite, match=r"client 1 is not finite in round \d+; terms: task .*, fedprox .*clip"
    ):
        for _ in range(60):
            run.run_round()


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(FieldError, match="per_round = 5 is not between 1 and the 3 clients"):
        images().simulate("fedavg", per_round=5)
    with pytest.raises(FieldError, match="weighting = 'sizes' is not one of: size, uniform"):
        images().simulate("fedavg", weighting="sizes")
    with pytest.raises(KedgeError, match="no engine 'vectr'. Did you mean 'vector'"):
        images().simulate("fedavg", "vectr")
    with pytest.raises(IncompatibleError, match="scaffold divides the update .* adam does not"):
        images().simulate("scaffold", optim=kedge.Adam())


def test_a_part_without_a_meaning_for_the_task_says_so() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class OnlyClasses(kedge.Part):
        name = "onlyclasses"
        tasks = ("classification",)

    with pytest.raises(IncompatibleError, match="onlyclasses has no meaning for regression"):
        images(task="regression").simulate(OnlyClasses())


def test_uniform_weighting() -> None:
    """Clients of 1 and 3 samples pull equally: after one step w = (0.05 * 0 + 0.5 * 1)/2."""
    problem = quadratics(steps=1, copies=(1, 3))
    run = problem.simulate("fedavg", weighting="uniform")
    run.run_round()
    assert float(run.weights.params["head.weight"]) == pytest.approx(0.25)
    run = problem.simulate("fedavg")
    run.run_round()
    assert float(run.weights.params["head.weight"]) == pytest.approx(0.375)


def test_schedule_reaches_the_clients() -> None:
    optim = kedge.SGD(lr=0.1, schedule="exponential(0.5)")
    run = quadratics((1.0,), (1.0,), steps=1).simulate("fedavg", optim=optim)
    run.run_round()
    run.run_round()
    # w1 = 0.1, w2 = w1 + 0.05 (1 - w1)
    assert float(run.weights.params["head.weight"]) == pytest.approx(0.1 + 0.05 * 0.9)


def test_adam_and_dropout_agree_on_both_engines() -> None:
    loop, vector = run_both(images(dropout=0.4, optim=kedge.Adam(lr=0.01)), "fedprox")
    assert tree.gap(loop.state(), vector.state()) < 1e-11


def test_a_server_part_that_needs_the_head_refuses_a_private_one() -> None:
    with pytest.raises(IncompatibleError, match="ccvr works on the head on the server, but fedrep"):
        images().simulate("ccvr+fedrep")


def test_what_a_client_generates_can_be_looked_at() -> None:
    run = images().simulate("fedcog(samples=6, steps=3, batch=4)")
    made = run.prepared(1)["fedcog"]
    assert made["x"].shape == (6, 1, 8, 8)
    again = run.prepared(1)["fedcog"]
    assert torch.equal(made["x"], again["x"])
    assert not torch.equal(made["x"], run.prepared(0)["fedcog"]["x"])


def test_streams_are_for_a_loop_on_a_gpu() -> None:
    for how, device in (
        (Execution("loop", streams=2), "cpu"),
        (Execution("vector", streams=2), "cuda"),
    ):
        message = f"streams = 2: .* this is engine = {how.engine} on {device}; leave streams out"
        with pytest.raises(FieldError, match=message):
            make_engine(how, torch.device(device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_clients_on_streams_of_a_gpu(norm: str) -> None:
    """Side by side they do what they do one after the other, bit for bit."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(300, 1, 28, 28, generator=g), torch.arange(300) % 10
    rows = torch.arange(300).split([30, 50, 70, 40, 60, 50])
    states = []
    for streams in (0, 3):
        torch.manual_seed(0)
        fed = Federation(x, y, rows, Classification(10), device="cuda")
        net, how = (
            build(f"lenet5(norm={norm})", (1, 28, 28), 10),
            Execution("loop", streams=streams),
        )
        sim = Simulation(fed, net, "scaffold", work=LocalWork(batch=10, epochs=2), engine=how)
        for _ in range(4):
            sim.run_round()
        assert len(sim.engine._streams) == streams
        states.append(sim.state())
    assert tree.gap(*states) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("compile", [False, True])
def test_totals_of_a_gpu_outlive_the_round(engine: str, compile: bool) -> None:
    """Graphs write to the same place in every round; what they gave before is not there."""
    x, y = torch.rand(80, 6), torch.arange(80) % 3
    rows = torch.arange(80).split([20, 30, 10, 20])
    fed = Federation(x, y, rows, Classification(3), device="cuda")
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    sim = Simulation(fed, net, "scaffold", engine=Execution(engine, compile=compile))
    first = sim.run_round().totals
    before = clone(first)
    second = sim.run_round().totals
    assert len(list(tree.leaves((first.summed, first.stacked)))) > 10
    assert first.summed.uploads
    assert tree.equal(first.summed, before.summed)
    assert tree.equal(first.stacked, before.stacked)
    assert tree.gap(first.summed.delta, second.summed.delta) > 0


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.first, x, use_reentrant=False))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_model_that_repeats_its_pass_is_refused(engine: str) -> None:
    """By then its weights would be gone, and the gradient another."""
    rows = torch.arange(12).split(6)
    fed = Federation(torch.rand(12, 4), torch.arange(12) % 3, rows, Classification(3))
    sim = Simulation(fed, Checkpointed(), engine=engine)
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint; remove them|vmap support"):
        sim.run_round()


class Forgetful(Part):
    """Keeps something else than it began with."""

    name = "forgetful"
    keeps = "1"

    def client_init(self, spec: Spec) -> Tensor:
        return torch.zeros(2, dtype=spec.dtype)

    def reply(self, v: View, weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
        return v.client.sum(), {}


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_state_of_another_shape_is_refused_and_nothing_is_changed(engine: str) -> None:
    sim = images().simulate(Forgetful(), engine)
    before = {name: x.clone() for name, x in sim.state().items()}
    with pytest.raises(
        KedgeError,
        match=r"forgetful.reply returned a client state .* of shape \[\] in place of shape \[2\]",
    ):
        sim.run_round()
    assert tree.equal(sim.state(), before)


class Counting(Part):
    """Uploads means of whole numbers and of yes or no."""

    name = "counting"
    uploads = "2"

    def server_init(self, spec: Spec) -> dict[str, Tensor]:
        return {"few": torch.zeros(()), "odd": torch.zeros(())}

    def reply(self, v: View, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        few = torch.full_like(v.info.client, 200, dtype=torch.uint8)
        return {}, {"few": Mean(few), "odd": Mean(v.info.client % 2 == 1)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, dict[str, Tensor]]:
        return weights, dict(r.uploads)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_means_of_whole_numbers(engine: str) -> None:
    sim = images(sizes=(6, 6, 6, 6)).simulate(Counting(), engine)
    sim.run_round()
    assert {n: float(x) for n, x in sim.server.slots["counting"].items()} == {
        "few": 200.0, "odd": 0.5,
    }  # fmt: skip
