"""Local optimisers against torch.optim, and the learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from kedge.core import rng, tree
from kedge.core.ops import REFERENCE
from kedge.core.optim import SGD, Adam, Optimizer, make_optimizer, optimizers, register
from kedge.core.schedules import schedule, schedules
from kedge.engines.ops import FOREACH, IN_PLACE
from kedge.errors import FieldError, GrammarError, UnknownName
from kedge.schema import Range

DOUBLE = torch.float64


def start() -> dict[str, Tensor]:
    keys = rng.split(rng.key(0), 3)
    return {
        "weight": rng.normal(keys[0], (4, 3), DOUBLE),
        "bias": rng.normal(keys[1], (4,), DOUBLE),
        "unused": rng.normal(keys[2], (2,), DOUBLE),  # has a zero gradient
    }


def loss(params: dict[str, Tensor], t: int) -> Tensor:
    """Not quadratic, and different in each step."""
    x = rng.normal(rng.fold(rng.key(1), t), (5, 3), DOUBLE)
    out = torch.tanh(x @ params["weight"].T + params["bias"])
    return (out**4 + 3 * out).sum() + 0 * params["unused"].sum()


def gradients(params: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    flat = torch.autograd.grad(loss(leaves, t), list(leaves.values()))
    return dict(zip(leaves, flat, strict=True))


def run_ours(optim: Optimizer, steps: int = 10) -> list[dict[str, Tensor]]:
    params, path = start(), []
    state, lr = optim.init(params), torch.tensor(optim.lr, dtype=DOUBLE)
    for t in range(steps):
        params, state = optim.update(params, gradients(params, t), state, lr)
        path.append(params)
    return path


def run_torch(kind: Any, clip: float, steps: int = 10, **options: Any) -> list[dict[str, Tensor]]:
    params, path = {n: p.requires_grad_() for n, p in start().items()}, []
    optim = kind(list(params.values()), **options)
    for t in range(steps):
        optim.zero_grad()
        loss(params, t).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(list(params.values()), clip)
        optim.step()
        path.append({n: p.detach().clone() for n, p in params.items()})
    return path


def assert_same_path(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) == 10
    for t, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert tree.gap(a, b) < 1e-13, f"step {t}"
    assert tree.gap(ours[0], ours[-1]) > 1e-3  # it moved


# -- equal to torch ----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 2.0, 1e6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool, decay: float, clip: float) -> None:
    ours = SGD(lr=0.03, momentum=momentum, nesterov=nesterov, weight_decay=decay, clip=clip)
    options = {"lr": 0.03, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    assert_same_path(run_ours(ours), run_torch(torch.optim.SGD, clip, **options))


@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
def test_adam_is_torchs(betas: tuple[float, float], decay: float, clip: float) -> None:
    ours = Adam(lr=0.02, beta1=betas[0], beta2=betas[1], weight_decay=decay, clip=clip)
    options = {"lr": 0.02, "betas": betas, "weight_decay": decay}
    assert_same_path(run_ours(ours), run_torch(torch.optim.Adam, clip, **options))


def test_adams_eps_is_where_torch_has_it() -> None:
    ours = run_ours(Adam(lr=0.02, eps=0.5))
    assert_same_path(ours, run_torch(torch.optim.Adam, 0.0, lr=0.02, eps=0.5))


def test_clipping_bounds_the_norm_of_all_leaves_together() -> None:
    grads = {"a": torch.tensor([3.0], dtype=DOUBLE), "b": torch.tensor([4.0], dtype=DOUBLE)}
    zero, one = tree.zeros_like(grads), torch.ones((), dtype=DOUBLE)
    moved, _ = SGD(lr=1.0, clip=1.0).update(zero, grads, {}, one)
    assert float(tree.sq_norm(moved)) == pytest.approx(1.0, rel=1e-6)
    assert float(moved["a"] / moved["b"]) == pytest.approx(0.75)
    moved, _ = SGD(lr=1.0, clip=10.0).update(zero, grads, {}, one)
    assert tree.equal(moved, tree.scale(grads, -1.0))


def test_a_zero_gradient_survives_clipping() -> None:
    zero = {"a": torch.zeros(3, dtype=DOUBLE)}
    moved, _ = SGD(clip=1.0).update(zero, zero, {}, torch.ones(()))
    assert tree.equal(moved, zero)


def test_weight_decay_comes_after_clipping() -> None:
    params = {"w": torch.tensor([100.0], dtype=DOUBLE)}
    grads = {"w": torch.tensor([0.0], dtype=DOUBLE)}
    optim = SGD(lr=1.0, clip=1.0, weight_decay=0.1)
    moved, _ = optim.update(params, grads, {}, torch.ones((), dtype=DOUBLE))
    assert float(moved["w"]) == pytest.approx(90.0)


@pytest.mark.parametrize("optim", [SGD(momentum=0.9, clip=1.0, weight_decay=0.1), Adam(clip=1.0)])
def test_a_step_is_pure(optim: Optimizer) -> None:
    params, grads = start(), gradients(start(), 0)
    state = optim.init(params)
    before = tree.map(torch.clone, {"p": params, "g": grads, "s": state})
    lr = torch.tensor(0.1, dtype=DOUBLE)
    once = optim.update(params, grads, state, lr)
    again = optim.update(params, grads, state, lr)
    assert tree.equal({"p": params, "g": grads, "s": state}, before)
    assert tree.equal(once[0], again[0])
    assert tree.equal(once[1], again[1])


@pytest.mark.parametrize(
    "optim", [SGD(), SGD(momentum=0.9, nesterov=True, clip=0.5, weight_decay=0.1), Adam(clip=0.5)]
)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (DOUBLE, 1e-15)])
def test_the_quick_way_is_the_plain_one(optim: Optimizer, dtype: torch.dtype, near: float) -> None:
    params = tree.map(lambda x: x.to(dtype), start())
    grads = tree.map(lambda x: x.to(dtype), gradients(start(), 0))
    grads["weight"] = grads["weight"].T.contiguous().T  # in another layout than the parameter
    grads["unused"] = torch.ones((), dtype=dtype).expand(2)
    before = tree.map(torch.clone, {"p": params, "g": grads})
    ways = []
    for ops in (REFERENCE, FOREACH, IN_PLACE):
        state, now = optim.init(params), params
        for t in range(4):
            lr = torch.tensor(0.1 / (t + 1), dtype=dtype)
            first = FOREACH if ops is IN_PLACE and t == 0 else ops
            now, state = optim.update(now, grads, state, lr, first)
        ways.append({"params": now, "state": state})
        assert now["weight"].is_contiguous()
    plain, quick, in_place = ways
    assert tree.gap(plain, quick) < near
    assert tree.equal(quick, in_place)
    assert tree.equal({"p": params, "g": grads}, before)


def test_the_quick_way_is_torchs_bit_for_bit() -> None:
    params = {n: p.float().requires_grad_() for n, p in start().items()}
    theirs, ours = torch.optim.SGD(list(params.values()), lr=0.3), tree.detach(params)
    ours = tree.map(torch.clone, ours)
    for t in range(5):
        for n, g in gradients(start(), t).items():
            params[n].grad = g.float()
        theirs.step()
        grads = {n: p.grad for n, p in params.items()}
        ours, _ = SGD().update(ours, grads, {}, torch.tensor(0.3), FOREACH)
        assert tree.equal(ours, tree.detach(params))


@pytest.mark.parametrize("optim", [SGD(), SGD(momentum=0.9, nesterov=True, clip=0.5), Adam()])
def test_a_step_is_the_same_under_vmap(optim: Optimizer) -> None:
    """Clients with different weights, gradients and learning rates, two steps each."""
    many = [tree.scale(start(), 1.0 + k) for k in range(3)]
    grads = [gradients(params, k) for k, params in enumerate(many)]
    rates = torch.tensor([0.1, 0.01, 0.3], dtype=DOUBLE)

    def two_steps(params: Any, grads: Any, lr: Tensor) -> Any:
        params, state = optim.update(params, grads, optim.init(params), lr)
        return optim.update(params, grads, state, lr)[0]

    mapped = vmap(two_steps)(tree.stack(many), tree.stack(grads), rates)
    looped = tree.stack([two_steps(p, g, r) for p, g, r in zip(many, grads, rates, strict=True)])
    assert tree.gap(mapped, looped) < 1e-14


# -- effective steps ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optim",
    [
        SGD(),
        SGD(momentum=0.5),
        SGD(momentum=0.9),
        SGD(momentum=0.99),
        SGD(momentum=0.5, nesterov=True),
        SGD(momentum=0.9, nesterov=True),
    ],
    ids=repr,
)
def test_effective_steps_are_what_a_constant_gradient_adds_up_to(optim: SGD) -> None:
    params = {"w": torch.zeros(1, dtype=DOUBLE)}
    grads, one = {"w": torch.ones(1, dtype=DOUBLE)}, torch.ones((), dtype=DOUBLE)
    state, brute = optim.init(params), []
    for _ in range(30):
        params, state = optim.update(params, grads, state, one)
        brute.append(-float(params["w"]))
    steps = torch.arange(1, 31, dtype=DOUBLE)
    found = optim.effective_steps(steps)
    torch.testing.assert_close(found, torch.tensor(brute, dtype=DOUBLE), rtol=1e-12, atol=0)


def test_effective_steps_are_the_sum_of_the_coefficients_of_all_gradients() -> None:
    """Step i alone has a gradient: what it moves is its coefficient."""
    optim, tau = SGD(momentum=0.8, nesterov=True), 7
    one, total = torch.ones((), dtype=DOUBLE), 0.0
    for i in range(tau):
        params = {"w": torch.zeros(1, dtype=DOUBLE)}
        state = optim.init(params)
        for t in range(tau):
            grads = {"w": torch.full((1,), float(t == i), dtype=DOUBLE)}
            params, state = optim.update(params, grads, state, one)
        total -= float(params["w"])
    assert float(optim.effective_steps(torch.tensor(tau, dtype=DOUBLE))) == pytest.approx(total)


def test_effective_steps_as_fednova_writes_them() -> None:
    rho = 0.9
    for tau in (1, 2, 5, 100):
        expected = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        found = SGD(momentum=rho).effective_steps(torch.tensor(tau, dtype=DOUBLE))
        assert float(found) == pytest.approx(expected, rel=1e-13)
    assert float(SGD().effective_steps(torch.tensor(5.0))) == 5.0


@pytest.mark.parametrize(
    "optim",
    [SGD(), SGD(momentum=0.7), SGD(momentum=0.7, nesterov=True)],
    ids=repr,
)
def test_pulled_steps_are_what_a_constant_gradient_with_a_pull_adds_up_to(optim: SGD) -> None:
    params, lr = {"w": torch.zeros(1, dtype=DOUBLE)}, torch.tensor(0.3, dtype=DOUBLE)
    state, brute = optim.init(params), []
    for _ in range(30):
        params, state = optim.update(params, {"w": 1 + 0.4 * params["w"]}, state, lr)
        brute.append(-float(params["w"]) / 0.3)
    found = optim.pulled_steps(torch.arange(1, 31, dtype=DOUBLE), 0.3 * 0.4)
    torch.testing.assert_close(found, torch.tensor(brute, dtype=DOUBLE), rtol=1e-12, atol=0)


def test_pulled_steps_as_fednova_writes_them() -> None:
    steps = torch.tensor([1.0, 2.0, 7.0, 400.0])
    for pull in (1e-6, 0.1, 0.9):
        expected = (1 - (1 - pull) ** steps.double()) / pull
        torch.testing.assert_close(SGD().pulled_steps(steps, pull), expected.float())


@pytest.mark.parametrize("rho", [0.99, 0.999])
def test_effective_steps_are_accurate_in_float32(rho: float) -> None:
    steps = torch.tensor([1.0, 5.0, 50.0])
    exact = SGD(momentum=rho).effective_steps(steps.to(DOUBLE))
    found = SGD(momentum=rho).effective_steps(steps)
    torch.testing.assert_close(found.to(DOUBLE), exact, rtol=1e-5, atol=0)


# -- schedules ---------------------------------------------------------------------------------


def factors(text: str, rounds: int) -> list[float]:
    factor = schedule(text)
    return [factor(t) for t in range(rounds)]


def test_schedules_by_hand() -> None:
    assert factors("constant", 3) == [1, 1, 1]
    assert factors("exponential(0.5)", 4) == [1, 0.5, 0.25, 0.125]
    assert factors("step(2)", 5) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert factors("step(every=3, gamma=0.5)", 7) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    assert factors("warmup(rounds=4)", 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors("cosine(4)", 6) == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]
    )
    assert factors("cosine(rounds=2, floor=0.2)", 4) == pytest.approx([1, 0.6, 0.2, 0.2])
    assert factors("cosine(1)", 3) == pytest.approx([1, 0, 0])


def test_factors_of_joined_schedules_multiply() -> None:
    assert factors("warmup(4)+exponential(0.5)", 3) == [0.25, 0.25, 0.1875]


def test_schedules_are_torchs() -> None:
    weight = torch.zeros(1, requires_grad=True)
    pairs = [
        ("step(3, 0.5)", lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
        ("exponential(0.9)", lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
        ("cosine(8)", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8)),
    ]
    for text, make in pairs:
        optim = torch.optim.SGD([weight], lr=1.0)
        scheduler, seen = make(optim), []
        for _ in range(9):
            seen.append(optim.param_groups[0]["lr"])
            optim.step()
            scheduler.step()
        assert factors(text, 9) == pytest.approx(seen, abs=1e-12), text


def test_a_wrong_schedule_is_refused_when_the_optimiser_is_made() -> None:
    with pytest.raises(UnknownName, match="no schedule 'cosin'. Did you mean 'cosine'"):
        SGD(schedule="cosin(10)")
    with pytest.raises(
        FieldError, match=r"exponential.gamma has no default; write exponential\(gamma=...\)"
    ):
        SGD(schedule="exponential")
    with pytest.raises(UnknownName, match="no option of exponential 'gama'. Did you mean 'gamma'"):
        Adam(schedule="exponential(gama=0.5)")
    with pytest.raises(GrammarError):
        SGD(schedule="step(")


@pytest.mark.parametrize(
    "text",
    ["exponential(fast)", "step(0)", "step(every=-1)", "warmup(0)", "cosine(soon)", "cosine:a(9)"],
)
def test_wrong_arguments_of_a_schedule_are_refused_when_the_optimiser_is_made(text: str) -> None:
    with pytest.raises((FieldError, GrammarError)):
        SGD(schedule=text)


# -- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-0.1), r"sgd\.lr = -0\.1 is below 0"),
        (lambda: SGD(lr=math.nan), r"sgd\.lr = nan is not a finite number at least 0"),
        (lambda: SGD(lr=math.inf), r"sgd\.lr = inf is not a finite number"),
        (lambda: SGD(lr="0.1"), r"sgd\.lr = '0\.1' is not a finite number"),  # type: ignore[arg-type]
        (lambda: SGD(weight_decay=-1), r"sgd\.weight_decay = -1 is below 0"),
        (lambda: SGD(clip=-1), r"sgd\.clip = -1 is below 0"),
        (lambda: SGD(momentum=1.0), r"sgd\.momentum = 1\.0 is not below 1"),
        (lambda: SGD(momentum=-0.1), r"sgd\.momentum = -0\.1 is below 0"),
        (lambda: SGD(nesterov=True), r"nesterov needs momentum > 0; write momentum=0\.9"),
        (lambda: Adam(lr=-1), r"adam\.lr = -1 is below 0"),
        (lambda: Adam(beta1=1.0), r"adam\.beta1 = 1\.0 is not below 1"),
        (lambda: Adam(beta2=-0.5), r"adam\.beta2 = -0\.5 is below 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(momentum=0.9, nesterov="false"),  # type: ignore[arg-type]
        lambda: SGD(lr=True),
        lambda: Adam(eps=-1.0),
        lambda: Adam(eps="small"),  # type: ignore[arg-type]
    ],
)
def test_every_field_is_checked(make: Any) -> None:
    with pytest.raises(FieldError):
        make()


def test_only_sgd_says_that_its_update_is_a_sum_of_gradients() -> None:
    assert SGD.is_linear
    assert not Adam.is_linear
    assert (SGD.name, Adam.name) == ("sgd", "adam")


def test_an_optimiser_may_choose_its_name_and_does_not_inherit_it() -> None:
    class Chosen(SGD):
        name = "sgd_w"

    class Derived(Chosen):
        pass

    assert (Chosen.name, Derived.name) == ("sgd_w", "derived")


# -- by name -----------------------------------------------------------------------------------


def test_an_optimiser_is_read_from_text_and_written_back() -> None:
    for optim in (
        SGD(),
        SGD(lr=0.5, momentum=0.9, nesterov=True),
        Adam(beta1=0.5, schedule="warmup(4)+exponential(0.5)"),
    ):
        assert make_optimizer(str(optim)) == optim
    assert make_optimizer("adam(0.01, beta1=0.5)") == Adam(lr=0.01, beta1=0.5)
    with pytest.raises(UnknownName, match="no optimizer 'adma'. Did you mean 'adam'"):
        make_optimizer("adma")
    with pytest.raises(
        UnknownName, match="no field of adam 'beta'. Did you mean 'beta2' or 'beta1'"
    ):
        make_optimizer("adam(beta=0.5)")
    with pytest.raises(FieldError, match="adam.beta1 = 2 is not below 1"):
        make_optimizer("adam(beta1=2)")


def test_settings_fill_the_fields_that_the_text_leaves_open() -> None:
    settings = {"lr": 0.5, "momentum": 0.0, "clip": 1.0}
    assert make_optimizer("sgd", settings) == SGD(lr=0.5, clip=1.0)
    assert make_optimizer("adam(lr=0.01)", settings) == Adam(lr=0.01, clip=1.0)
    assert make_optimizer("adam(lr=0.5)", settings, chosen=["lr"]) == Adam(lr=0.5, clip=1.0)
    with pytest.raises(FieldError, match=r"lr is given twice: lr = 0.5 and optimizer = adam\(lr=0"):
        make_optimizer("adam(lr=0.01)", settings, chosen=["lr"])
    with pytest.raises(FieldError, match="momentum belongs to sgd; leave it out with adam"):
        make_optimizer("adam", {"momentum": 0.9}, chosen=["momentum"])


def test_an_optimiser_of_ones_own_is_one_class() -> None:
    @register
    @dataclass(frozen=True)
    class SignSGD(Optimizer):
        """Steps of equal size."""

        lr: Annotated[float, Range(0)] = 0.01
        schedule: str = "constant"

        def init(self, params: Any) -> Any:
            return {}

        def update(self, params: Any, grads: Any, state: Any, lr: Any, *_: Any) -> Any:
            return {n: w - lr * grads[n].sign() for n, w in params.items()}, state

    try:
        optim = make_optimizer("signsgd(lr=0.5)", {"momentum": 0.0})
        assert optim == SignSGD(lr=0.5)
        assert not optim.is_linear
        new, _ = optim.update({"w": torch.ones(2)}, {"w": torch.tensor([2.0, -3.0])}, {}, 0.5)
        assert new["w"].tolist() == [0.5, 1.5]
        with pytest.raises(FieldError, match=r"signsgd.lr = -1 is below 0"):
            make_optimizer("signsgd(lr=-1)")
    finally:
        optimizers.remove("signsgd")


def test_plain_is_said_by_the_optimiser() -> None:
    assert SGD().is_plain
    assert SGD(weight_decay=0.1).is_plain
    assert not SGD(momentum=0.9).is_plain
    assert not Adam().is_plain


def test_a_schedule_of_ones_own_is_one_function() -> None:
    @schedules.register("linear")
    def linear(*, rounds: Annotated[int, Range(1)]) -> Any:
        return lambda t: max(0.0, 1 - t / rounds)

    try:
        assert factors("linear(4)", 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
        assert SGD(schedule="linear(rounds=4)+exponential(0.5)").schedule
        with pytest.raises(FieldError, match=r"linear.rounds = 0 is below 1"):
            schedule("linear(0)")
    finally:
        schedules.remove("linear")
