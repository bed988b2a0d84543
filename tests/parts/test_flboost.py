"""FLBoost: bases, invariants, options and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.identities.flboost import SUMMED
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images
from kedge.core import rng, tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.round import Round
from kedge.core.task import make_task
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError, ModelError
from kedge.parts.distil import client_order, student_logits, teacher_logits
from kedge.parts.flboost import FLBoost, _Game
from kedge.parts.generators import image_generator
from kedge.runs.grid import combine, read_words
from kedge.settings import load_config
from kedge.sim.clients import unlike
from kedge.sim.simulation import Simulation

BASES = ("fedavg", "fedprox(mu=0.1)", "feddyn(alpha=1)", "scaffold")


def part(**options: Any) -> FLBoost:
    return FLBoost(**FLBoost.tiny | options)


def ran(method: Any, rounds: int = 2, norm: str = "bn", **options: Any) -> Simulation:
    run = images(norm=norm, **options).simulate(method, per_round=2)
    for _ in range(rounds):
        run.run_round()
    return run


def at_server(run: Simulation, boost: FLBoost, clients: list[int]) -> tuple[Round, Weights]:
    """What the part's server step gets in the next round, and the aggregated weights."""
    found = run.clients.answer(run.session.request("", clients))
    mean = tree.map(lambda x: x / found.summed.weight.to(x.dtype), found.summed.delta)
    r = Round(
        part=boost,
        model=run.bound.model,
        spec=run.bound.spec,
        round=run.round,
        lr=0.05,
        key=rng.key(4),
        phase="",
        anchor=run.weights,
        server=run.server.slots[boost.name],
        uploads={"counts": run.federation.label_counts()[clients]},
        totals=found,
    )
    params = tree.add(run.weights.params, mean.params)
    return r, Weights(params, tree.take(found.stacked.weights.buffers, 0))


# -- on any base ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("base", BASES)
def test_no_steps_is_the_base_bit_for_bit(base: str, engine: str) -> None:
    runs = [images(norm="bn").simulate(m, engine) for m in (base, f"{base}+flboost(steps=0)")]
    for run in runs:
        for _ in range(3):
            run.run_round([0, 2])
    assert tree.equal(runs[0].weights, runs[1].weights)


@pytest.mark.parametrize("base", BASES)
def test_it_tunes_every_base(base: str) -> None:
    plain, run = ran(base), ran(f"{base}+{part()}")
    assert 1e-4 < tree.gap(plain.weights.params, run.weights.params) < 1.0


def test_clients_start_from_the_tuned_model_and_control_variates_refer_to_it() -> None:
    run = ran(f"scaffold+{part()}", rounds=1)
    job = run.cohort([1]).jobs
    assert tree.equal(job.anchor, run.weights)
    # one full-batch step from there: c_k+ - c_k + c is the gradient at the tuned model
    run = images(sizes=(5, 5), batch=5, steps=1).simulate(f"scaffold+{part()}")
    run.run_round()
    start, c = run.weights, run.server.slots["scaffold"]
    before = tree.take(run.store.rows["scaffold"], 1)
    batch = run.federation.clean(run.cohort([1]).batches[0, 0])
    leaves = {n: p.clone().requires_grad_() for n, p in start.params.items()}
    logits = run.bound.model.forward(Weights(leaves, {}), batch.x).logits
    slope = torch.autograd.grad(F.cross_entropy(logits, batch.y), leaves.values())
    run.run_round()
    after = tree.take(run.store.rows["scaffold"], 1)
    for name, g in zip(leaves, slope, strict=True):
        assert torch.allclose(after[name], g, atol=1e-12)
        assert not torch.allclose(before[name] - c[name], g)


def test_parameters_of_other_parts_are_left_alone() -> None:
    plain, run = ran("moon(projection=4)", 1), ran(f"moon(projection=4)+{part()}", 1)
    for name in run.weights.params:
        same = torch.equal(plain.weights.params[name], run.weights.params[name])
        assert same == name.startswith("moon/"), name


def test_leaves_that_stay_on_the_client_are_left_alone() -> None:
    run = images(norm="bn").simulate(f"fedrep+{part()}")
    first = run.weights.params
    run.run_round()
    for name in run.bound.model.head_names():
        assert torch.equal(run.weights.params[name], first[name])


# -- invariants -------------------------------------------------------------------------------


def test_teachers_and_inputs_are_unchanged() -> None:
    boost = part()
    run = images(norm="bn").simulate(boost)
    r, weights = at_server(run, boost, [0, 1, 2])
    held = [*tree.leaves(r.clients), *tree.leaves(weights), *tree.leaves(r.server), r.key]
    before, versions = [x.clone() for x in held], [x._version for x in held]
    new, slot = boost.server_step(r, weights)
    assert [x._version for x in held] == versions
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert tree.gap(new, weights) > 0
    assert tree.gap(slot, r.server) > 0


def test_weights_of_the_ensemble_sum_to_one_where_a_class_is_present() -> None:
    counts = rng.integers(rng.key(0), (7, 10), 40).to(torch.float32) * (torch.arange(10) != 3)
    a = FLBoost()._ensemble(counts)
    expected = (torch.arange(10) != 3).to(torch.float32)
    assert torch.allclose(a.sum(0), expected, atol=1e-6)
    assert (a >= 0).all()


@pytest.mark.parametrize("labels", ["allotted", "drawn"])
@pytest.mark.parametrize("focused", [True, False])
def test_an_absent_class_is_never_drawn(labels: Any, focused: bool) -> None:
    boost = FLBoost(labels=labels, focused=focused, steps=20, batch=33)
    for seed in range(20):
        counts = rng.integers(rng.key(seed), (12,), 50) * (torch.arange(12) % 3 > 0)
        _, y = boost._draw(rng.key(seed), counts.to(torch.float32), torch.float32)
        assert y.shape == (20, 33)
        seen = torch.bincount(y.flatten(), minlength=12)
        assert not seen[counts == 0].any()
        if labels == "allotted":
            share = counts / counts.sum() if focused else (counts > 0) / (counts > 0).sum()
            assert ((seen - 660 * share).abs() < 1).all()


def test_labels_are_shuffled_and_depend_on_the_key_alone() -> None:
    boost, counts = FLBoost(), torch.tensor([300.0, 200.0])
    (z, y), (z2, y2) = (boost._draw(rng.key(1), counts, torch.float32) for _ in range(2))
    assert torch.equal(z, z2)
    assert torch.equal(y, y2)
    assert z.shape == (10, 50, 100)
    assert 0 < int(y[0].sum()) < 50  # not sorted: the first batch holds both classes
    z3, y3 = boost._draw(rng.key(2), counts, torch.float32)
    assert not torch.equal(z, z3)
    assert not torch.equal(y, y3)
    assert abs(float(z.mean())) < 0.02
    assert abs(float(z.std()) - 1) < 0.02


def test_nothing_is_drawn_from_torchs_own_generator() -> None:
    problem, before = images(norm="bn", dropout=0.3), torch.get_rng_state()
    image_generator.cache_clear()
    problem.simulate(part()).run_round()
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_clients_at_the_start_have_no_divergence() -> None:
    boost = part()
    run = images(norm="bn").simulate(boost)
    r, _ = at_server(run, boost, [0, 1])
    one = tree.take(r.clients, 0)
    stacked = r._totals.stacked._replace(weights=tree.stack([one, one]))
    r._totals = r._totals._replace(stacked=stacked)
    x = rng.normal(rng.key(0), (6, 1, 8, 8), DOUBLE)
    share = torch.full((2, 6), 0.5, dtype=DOUBLE)
    taught, said = (
        teacher_logits(r, "input", r.clients, x),
        student_logits(r, "input", one, x, "eval")[0],
    )
    for measure in ("kl", "l1_logits", "mse_logits"):
        assert float(boost._discrepancy(r, measure, taught, said, share).abs()) < 1e-15


def test_traffic_is_one_number_per_class() -> None:
    boost = part()
    run = images(norm="bn").simulate(boost)
    symbols = run.bound.spec.symbols(boost)
    counted = [boost.count(f, symbols) for f in (boost.sends, boost.uploads, boost.keeps)]
    assert counted == [0, 3, 0]
    found = run.clients.answer(run.session.request("", [0, 2]))
    uploads = found.uploads[boost.name, "counts"].value
    assert torch.equal(uploads, run.federation.label_counts()[[0, 2]])


def test_the_generator_goes_on_from_round_to_round_and_its_moments_do_not() -> None:
    run = images(norm="bn").simulate(part())
    first = run.server.slots["flboost"]
    assert set(first) == {"params", "buffers"}
    tracked = [n for n in first["buffers"] if n.endswith("num_batches_tracked")]
    for i in (1, 2):
        before = run.server.slots["flboost"]
        run.run_round()
        after = run.server.slots["flboost"]
        # I passes and 3 clients: steps of at most about lr, as Adam's are from a fresh start
        moved = max(
            float((after["params"][n] - p).abs().max()) for n, p in before["params"].items()
        )
        assert 0.01 < moved <= 6 * 0.01 * 1.01
        assert all(int(after["buffers"][n]) == 6 * i for n in tracked)


# -- options ----------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"focused": False},
    {"attention": False},
    {"adversarial": False},
    {"direction": "student_teacher"},
    {"generator_md": "kl"},
    {"generator_md": "mse_logits"},
    {"student_md": "mse_logits"},
    {"class_mean": False},
    {"detach_teachers": False},
    {"cls_weights": "sample"},
    {"per_client": False},
    {"labels": "drawn"},
    {"student_bn": "frozen"},
    {"student_bn": "batch"},
    {"level": "feature"},
    {"final_norm": False},
    {"lambda_cls": 0.0},
    {"lambda_r": 0.0},
    {"weight_decay": 0.1},
    {"decay": 0.5},
    {"lr": 0.2},
    {"generator_lr": 0.001},
    {"generator_steps": 2},
    {"student_steps": 1},
    {"noise": 4},
    {"width": 6},
    {"batch": 7},
    {"start": 1},
    {"warmup": 1},
    {"bound": 0.01},
    {"confidence": 0.35},
]


@pytest.fixture(scope="module")
def default() -> Simulation:
    return ran(part())


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(map(str, *o.items())))
def test_every_option_changes_the_result(option: dict[str, Any], default: Simulation) -> None:
    run = ran(part(**option))
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    assert tree.gap(default.weights, run.weights) > 1e-6


@pytest.mark.long
@pytest.mark.parametrize("law", ["pure", "engines", "resumable", "permutation", "frugal"])
@pytest.mark.parametrize("preset", ["paper", "mse"])
def test_presets_obey_the_laws(preset: str, law: str) -> None:
    LAWS[law](part(**FLBoost.presets[preset]))


@pytest.mark.parametrize("law", ["pure", "engines", "resumable", "permutation", "frugal"])
def test_a_held_back_fine_tuning_obeys_the_laws(law: str) -> None:
    LAWS[law](part(start=1, warmup=1, bound=0.1, confidence=0.35))


PRINTED: dict[str, Any] = {  # every field of the printed form
    "steps": 10, "generator_steps": 1, "student_steps": 5, "batch": 50,
    "lr": 0.1, "generator_lr": 0.01, "decay": 0.998, "weight_decay": 1e-3,
    "lambda_cls": 1.0, "lambda_r": 1.0,
    "focused": True, "attention": True, "adversarial": True,
    "direction": "student_teacher", "student_md": "kl", "generator_md": "kl",
    "class_mean": False, "detach_teachers": False, "cls_weights": "sample", "per_client": False,
    "labels": "drawn", "student_bn": "train", "level": "input",
    "noise": 100, "width": 128, "final_norm": False,
    "start": 0, "warmup": 0, "bound": None, "confidence": None,
}  # fmt: skip
CHANGED: dict[str, dict[str, Any]] = {
    "paper": {},
    "mse": {
        "direction": "teacher_student", "student_md": "mse_logits", "generator_md": "mse_logits",
        "labels": "allotted", "final_norm": True,
    },
    "official": {
        "lr": None, "direction": "teacher_student", "generator_md": "l1_logits",
        "class_mean": True, "detach_teachers": True, "cls_weights": "batch", "per_client": True,
        "labels": "allotted", "final_norm": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", CHANGED)
def test_presets_fix_every_value(preset: str) -> None:
    """They do not move with the defaults: all fields are listed here."""
    found = parse(f"flboost:{preset}").parts[0]
    assert dataclasses.asdict(found) == PRINTED | CHANGED[preset]


def test_the_default_is_the_authors_code() -> None:
    assert parse("flboost") == parse("flboost:official")
    assert FLBoost.schema().is_default(FLBoost.presets["official"])
    assert str(parse("flboost:cifar100")) == "flboost(noise=256)"


def test_a_rate_of_none_is_written_read_and_swept() -> None:
    assert parse("flboost(lr=none)") == parse("flboost") == parse("flboost(lr=None)")
    assert str(parse("flboost")) == "flboost"
    assert str(parse("flboost(lr=0.1)")) == "flboost(lr=0.1)"
    method = parse("flboost:paper(lr=none)")
    assert method.parts[0].lr is None  # type: ignore[attr-defined]
    assert parse(str(method)) == method
    with pytest.raises(FieldError, match="is not a finite number at least 0 or none"):
        parse("flboost(lr=fast)")
    for grid in (read_words(["flboost.lr=none,0.1"]), {"flboost.lr": [None, 0.1]}):
        settings = combine(grid, flags={"method": "scaffold+flboost"})
        assert [setting.name for setting in settings] == ["flboost.lr=none", "flboost.lr=0.1"]
        methods = [setting.config.method for setting in settings]
        assert methods == ["scaffold+flboost", "scaffold+flboost(lr=0.1)"]


def test_a_rate_of_none_in_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('method = "flboost:paper(lr=none)"\n')
    config = load_config(tmp_path / "run.toml")
    assert parse(config.method).parts[0].lr is None  # type: ignore[attr-defined]


def test_runs_with_and_without_a_rate_do_not_share_lanes() -> None:
    runs = {lr: images(norm="bn").simulate(part(lr=lr)) for lr in (None, 0.1, 0.2)}
    none, some, other = (run.clients for run in runs.values())
    assert unlike(none, some) == unlike(some, none) == "their methods"
    assert unlike(some, other) == ""


def test_frozen_statistics_stay_as_aggregated() -> None:
    runs = {o: ran(part(student_bn=o), rounds=1) for o in ("train", "batch", "frozen")}
    plain = ran("fedavg", rounds=1)
    for kept in ("batch", "frozen"):
        assert tree.equal(runs[kept].weights.buffers, plain.weights.buffers)
    name = "stage1.1.num_batches_tracked"
    moved = runs["train"].weights.buffers[name] - plain.weights.buffers[name]
    assert int(moved) == part().steps * part().student_steps


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_before_its_start_it_is_the_base_bit_for_bit(engine: str) -> None:
    runs = [
        images(norm="bn").simulate(m, engine) for m in ("scaffold", f"scaffold+{part(start=2)}")
    ]
    first = runs[1].server.slots["flboost"]
    for _ in range(2):
        for run in runs:
            run.run_round([0, 2])
        assert tree.equal(runs[0].weights, runs[1].weights)
        assert tree.equal(runs[1].server.slots["flboost"], first)
    for run in runs:
        run.run_round([0, 2])
    assert tree.gap(runs[0].weights.params, runs[1].weights.params) > 1e-4


def test_a_start_after_the_last_round_is_pointed_out() -> None:
    assert part(start=3, warmup=2).advice(6) == ""
    assert "from round 5 on (start + warmup), but the run has only 5" in part(
        start=3, warmup=2
    ).advice(5)


def test_a_bound_acts_on_statistics_by_the_same_factor() -> None:
    """Half the way in the parameters is half the way in the running means and variances."""
    free = part()
    run = images(norm="bn").simulate(free)
    r, weights = at_server(run, free, [0, 1, 2])
    tuned = free.server_step(r, weights)[0]
    moved = tree.sq_dist(weights.params, tuned.params).sqrt()
    update = tree.sq_dist(weights.params, r.anchor.params).sqrt()
    half = part(bound=float(0.5 * moved / update)).server_step(r, weights)[0]
    for name, start in (weights.params | weights.buffers).items():
        end, got = (w.params.get(name, w.buffers.get(name)) for w in (tuned, half))
        assert end is not None
        assert got is not None
        expected = (start + end) / 2 if start.is_floating_point() else end
        assert torch.allclose(got, expected, atol=1e-12), name
    loose = part(bound=float(1.5 * moved / update)).server_step(r, weights)[0]
    assert tree.gap(loose, tuned) < 1e-15


def test_without_trusted_samples_the_statistics_stay() -> None:
    boost = part(confidence=1.0)
    run = images(norm="bn").simulate(boost)
    r, weights = at_server(run, boost, [0, 1, 2])
    new, slot = boost.server_step(r, weights)
    assert tree.equal(new, weights)
    assert tree.gap(slot, r.server) > 1e-3  # the generator learns all the same


def test_features_tune_the_head_alone() -> None:
    plain, run = ran("fedavg", rounds=1), ran(part(level="feature"), rounds=1)
    head = run.bound.model.head_names()
    for name, value in plain.weights.params.items():
        assert torch.equal(value, run.weights.params[name]) == (name not in head)
    assert tree.equal(plain.weights.buffers, run.weights.buffers)


def test_class_mean_divides_the_step_by_the_number_of_classes() -> None:
    quiet = {"steps": 1, "student_steps": 1, "weight_decay": 0.0}
    moves = []
    for class_mean in (False, True):
        boost = part(class_mean=class_mean, **quiet)
        run = images(norm="bn").simulate(boost)
        r, weights = at_server(run, boost, [0, 1, 2])
        moves.append(tree.sub(boost.server_step(r, weights)[0].params, weights.params))
    assert tree.gap(moves[0], tree.scale(moves[1], 3.0)) < 1e-14


@pytest.mark.parametrize("detach", [False, True])
def test_where_the_discrepancy_reaches_the_generator(detach: bool) -> None:
    """Its gradient in the images has a path through the global model and one through the clients'
    models; detached teachers close the second, and only in L_md."""
    boost = part(**SUMMED | {"detach_teachers": detach}, lambda_cls=0.5, lambda_r=0.0)
    run = images(norm="bn").simulate(boost)
    r, weights = at_server(run, boost, [0, 1, 2])
    z, y = (drawn[0] for drawn in boost._draw(r.key, r.uploads["counts"].sum(0), DOUBLE))
    share = boost._ensemble(r.uploads["counts"])[:, y]
    params, buffers = r.server["params"], r.server["buffers"]
    game = _Game(z, y, share, r.key)
    rest = r, weights, r.clients, game, 3
    got, _ = torch.func.grad(
        lambda own: boost._generator_loss(Weights(own, buffers), *rest), has_aux=True
    )(params)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    x = boost._generator(r.spec)(Weights(leaves, buffers), z, y, train=True)[0]
    said = r.forward(weights, x).logits
    loss = torch.zeros((), dtype=DOUBLE)
    for k in range(3):
        logits = r.forward(tree.take(r.clients, k), x).logits
        gaps = r.task.divergence(logits.detach() if detach else logits, said)
        wrong = F.cross_entropy(logits, y, reduction="none")
        loss = loss + (share[k] * (0.5 * wrong - gaps)).mean()
    expected = torch.autograd.grad(loss, list(leaves.values()))
    for name, slope in zip(leaves, expected, strict=True):
        assert torch.allclose(got[name], slope, atol=1e-13), name


def test_dropout_in_the_model_is_drawn_from_the_key() -> None:
    runs = [ran(part(), dropout=0.3) for _ in range(2)]
    assert tree.equal(runs[0].state(), runs[1].state())
    assert tree.gap(runs[0].weights, ran(part(), dropout=0.6).weights) > 1e-3


def test_single_steps_follow_the_counts_not_the_order_of_arrival() -> None:
    counts = torch.tensor([[2.0, 5.0], [3.0, 1.0], [3.0, 4.0]])
    assert client_order(counts).tolist() == [2, 1, 0]
    assert client_order(counts[[2, 0, 1]]).tolist() == [0, 2, 1]


# -- what it refuses --------------------------------------------------------------------------


def table(module: nn.Module, method: str) -> Simulation:
    x, y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    clients = list(torch.arange(12).reshape(2, 6))
    federation = Federation(x, y, clients, make_task("classification", 3))
    return Simulation(federation, Model(module), method)


def test_tables_have_features_but_no_images() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ModelError, match="level=feature"):
        table(net, "flboost")
    runs = [table(net, method) for method in ("fedavg", str(part(level="feature")))]
    for run in runs:
        run.run_round()
    plain, tuned = (run.weights.params for run in runs)
    for name in plain:  # the head alone is fine-tuned
        assert torch.equal(plain[name], tuned[name]) == name.startswith("0.")


def test_features_need_a_head_that_is_shared() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

    with pytest.raises(ModelError, match="head"):
        table(Plain(), str(part(level="feature")))
    with pytest.raises(IncompatibleError, match="nothing to fine-tune"):
        images().simulate(f"fedrep+{part(level='feature')}")


def test_it_is_for_classes() -> None:
    with pytest.raises(IncompatibleError, match="no meaning for regression"):
        images(task="regression").simulate(part())
    with pytest.raises(FieldError, match="batch"):
        FLBoost(batch=1)
    with pytest.raises(FieldError, match="direction"):
        FLBoost(direction="sideways")  # type: ignore[arg-type]
