"""Models as pure functions: equal to the module they come from, in any layout."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.core.nets import DOUBLE, KEY, Custom, Recurrent, X, as_state, fill, normal, stages, state
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kedge.core import tree
from kedge.core.model import FunctionalModule, Layout, Model
from kedge.core.tree import Weights
from kedge.engines.layout import EngineLayout, prefers_channels_last
from kedge.errors import FieldError, ModelError

# -- equal to the plain module -----------------------------------------------------------------


@pytest.mark.parametrize("make", [stages, lambda: fill(Custom())])
def test_training_passes_are_the_modules_and_leave_it_alone(make: Any) -> None:
    module = make()
    plain, before = copy.deepcopy(module).train(), state(module)
    model = Model(module)
    weights = model.weights()
    for i in range(3):  # running statistics are carried from pass to pass
        x = normal(f"x{i}", 7, 2, 4, 4)
        done = model.forward(weights, x, "train")
        assert torch.equal(done.logits, plain(x))
        weights = Weights(weights.params, done.buffers)
        buffers = dict(plain.named_buffers())
        assert tree.equal(weights.buffers, {n: buffers[n] for n in weights.buffers})
    counters = [b for n, b in weights.buffers.items() if n.endswith("num_batches_tracked")]
    assert all(int(c) == 3 for c in counters)
    assert counters
    assert tree.equal(state(module), before)


@pytest.mark.parametrize("make", [stages, lambda: fill(Custom())])
def test_evaluation_is_the_modules(make: Any) -> None:
    module = make()
    model = Model(module)
    weights = model.weights()
    done = model.forward(weights, X, "eval")
    assert torch.equal(done.logits, copy.deepcopy(module).eval()(X))
    assert tree.equal(done.buffers, weights.buffers)


def test_gradients_are_the_modules() -> None:
    module = stages()
    model, plain = Model(module), copy.deepcopy(module).train()
    plain(X).pow(2).sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    weights = model.weights()
    leaves = {n: p.requires_grad_() for n, p in weights.params.items()}
    model.forward(Weights(leaves, weights.buffers), X).logits.pow(2).sum().backward()
    assert tree.gap({n: p.grad for n, p in leaves.items()}, expected) < 1e-14
    found = grad(lambda p: model.forward(Weights(p, weights.buffers), X).logits.pow(2).sum())(
        tree.detach(leaves)
    )
    assert tree.gap(found, expected) < 1e-14


@pytest.mark.parametrize("mode", ["train", "probe", "eval"])
def test_a_pass_changes_nothing_that_it_was_given(mode: Any) -> None:
    model = Model(stages())
    weights = model.weights()
    before = tree.map(torch.clone, weights)
    versions = [t._version for t in tree.leaves(weights)]
    model.forward(weights, X, mode)
    assert tree.equal(weights, before)
    assert [t._version for t in tree.leaves(weights)] == versions


def test_a_probe_normalises_by_the_batch_and_leaves_the_statistics() -> None:
    model = Model(stages())
    weights = model.weights()
    probe = model.forward(weights, X, "probe")
    assert torch.equal(probe.logits, model.forward(weights, X, "train").logits)
    assert tree.equal(probe.buffers, weights.buffers)
    assert not torch.allclose(probe.logits, model.forward(weights, X, "eval").logits)


@pytest.mark.parametrize("mode", ["train", "probe", "eval"])
@pytest.mark.parametrize("make", [stages, lambda: fill(Custom())])
def test_a_stack_of_models_is_the_models_one_by_one(make: Any, mode: Any) -> None:
    model = Model(make())
    many = [tree.map(lambda w, k=k: w * (1 + k), model.weights()) for k in range(3)]
    xs = torch.stack([normal(f"v{k}", 7, 2, 4, 4) for k in range(3)])

    def one(weights: Weights, x: Tensor) -> Any:
        done = model.forward(weights, x, mode)
        return {"logits": done.logits, "features": done.features, "buffers": done.buffers}

    mapped = vmap(one)(tree.stack(many), xs)
    looped = tree.stack([one(w, x) for w, x in zip(many, xs, strict=True)])
    assert tree.gap(mapped, looped) < 1e-13


def test_a_probe_leaves_the_statistics_of_instance_norm_alone() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True))
    net.append(nn.Flatten()).append(nn.Linear(32, 3))
    model = Model(fill(net))
    weights = model.weights()
    before = tree.map(torch.clone, weights)
    model.forward(weights, X, "probe")
    assert tree.equal(weights, before)


# -- BatchNorm policies ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["average", "local"])
def test_average_and_local_differ_on_the_server_only(policy: str) -> None:
    model, plain = Model(stages(), batchnorm=policy), copy.deepcopy(stages()).train()
    assert torch.equal(model.forward(model.weights(), X, "train").logits, plain(X))
    assert torch.equal(model.forward(model.weights(), X, "eval").logits, stages().eval()(X))


def test_frozen_statistics_are_used_and_never_moved() -> None:
    model = Model(stages(), batchnorm="frozen")
    weights = model.weights()
    done = model.forward(weights, X, "train")
    assert tree.equal(done.buffers, weights.buffers)
    for mode in ("train", "probe", "eval"):
        assert torch.equal(model.forward(weights, X, mode).logits, stages().eval()(X))  # type: ignore[arg-type]


def test_frozen_statistics_leave_dropout_at_work() -> None:
    model = Model(stages(dropout=0.5), batchnorm="frozen")
    weights = model.weights()
    trained = model.forward(weights, X, "train", key=KEY).logits
    assert not torch.allclose(trained, model.forward(weights, X, "eval").logits)


def test_batch_statistics_are_used_in_evaluation_too() -> None:
    model = Model(stages(dropout=0.5), batchnorm="batch")
    weights = model.weights()
    done = model.forward(weights, X, "eval")
    assert torch.equal(done.logits, stages().train()(X))  # without dropout
    assert tree.equal(done.buffers, weights.buffers)


def test_an_unknown_policy_is_refused() -> None:
    message = "batchnorm = 'none' is not one of: average, local, frozen, batch"
    with pytest.raises(FieldError, match=message):
        Model(stages(), batchnorm="none")


# -- a structure lent to other weights ---------------------------------------------------------


class Tied(nn.Module):
    """The same weight in two places, and a module used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.b.weight = self.a.weight
        self.again = self.bn

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.b(torch.tanh(self.bn(self.a(x)))))


def other_weights(module: nn.Module) -> dict[str, Tensor]:
    both = [*module.named_parameters(), *module.named_buffers()]
    return {n: v + normal(f"other {n}", *v.shape).abs() if v.ndim else v for n, v in both}


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Tied, (6, 4)), (Custom, (6, 2, 4, 4)), (Recurrent, (3, 6, 4)), (stages, (6, 2, 4, 4))],
)
def test_a_shell_is_torchs_functional_call(make: Any, shape: tuple[int, ...]) -> None:
    module, x = fill(make()).eval(), normal("shell", *shape)
    # torch's leaves strange weights in a module that hangs in two places
    shell, own, another = FunctionalModule(module), state(module), copy.deepcopy(module)

    def loss(call: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return (call(weights, x) ** 3).sum()

    def ours(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return shell.call(weights, x)

    def theirs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(another, weights, (x,))

    weights = tree.detach(other_weights(module))
    assert torch.equal(ours(weights, x), theirs(weights, x))
    if make is Recurrent:  # has no rule for vmap
        return
    params = {n: weights[n] for n, _ in module.named_parameters()}
    slopes = [
        grad(lambda p, call=call: loss(call, weights | p, x))(params) for call in (ours, theirs)
    ]
    assert tree.equal(*slopes)
    stack = tree.stack([params, tree.scale(params, 2.0)])
    mapped = [vmap(lambda p, call=call: call(weights | p, x))(stack) for call in (ours, theirs)]
    assert torch.equal(*mapped)
    assert tree.equal(state(module), own)


def test_a_shell_has_its_own_weights_back_after_an_error() -> None:
    module = fill(Tied()).eval()
    shell, own = FunctionalModule(module), dict(module.named_parameters())
    with pytest.raises(RuntimeError):
        shell.call(other_weights(module), normal("wrong", 6, 5))
    assert all(p is own[n] for n, p in module.named_parameters())
    assert module.b.weight is module.a.weight


def test_weights_that_are_not_given_are_the_modules_own() -> None:
    module, x = fill(Tied()).eval(), normal("shell", 6, 4)
    assert torch.equal(FunctionalModule(module).call({}, x), module(x))


def test_an_autocast_around_a_pass_does_not_change_its_precision() -> None:
    model, x = Model(stages().float()), X.float()
    weights = model.weights()
    plain = model.forward(weights, x, "eval").logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.forward(weights, x, "eval").logits, plain)


# -- channels last -----------------------------------------------------------------------------


def pooled() -> nn.Sequential:
    """Convolutions, a pool right before the layer that flattens, and dropout between them."""
    net = nn.Sequential()
    net.add_module("conv", nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh()))
    net.add_module("pool", nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.4)))
    net.add_module("flat", nn.Sequential(nn.Flatten(), nn.Linear(16, 6)))
    net.add_module("head", nn.Linear(6, 3))
    return fill(net)  # type: ignore[return-value]


def test_channels_last_changes_the_layout_alone() -> None:
    model = Model(pooled())
    weights, found = model.weights(), []
    for channels_last in (False, True):
        model = model.prepared(EngineLayout(channels_last=channels_last))
        leaves = {n: p.clone().requires_grad_() for n, p in weights.params.items()}
        done = model.forward(Weights(leaves, weights.buffers), X, key=KEY, taps=("conv", "pool"))
        slopes = torch.autograd.grad((done.logits**2).sum(), list(leaves.values()))
        found.append((done, slopes))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert done.at["conv"].is_contiguous(memory_format=layout)
    (one, a), (two, b) = found
    assert torch.equal(one.at["pool"] == 0, two.at["pool"] == 0)  # the same dropout
    torch.testing.assert_close(one.logits, two.logits)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


def test_which_models_like_channels_last() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    plain, normed, flat = Model(stages(norm=False)), Model(stages()), Model(nn.Linear(2, 2))
    assert prefers_channels_last(plain, cpu, torch.float32)
    assert not prefers_channels_last(plain, cpu, DOUBLE)
    assert not prefers_channels_last(normed, cpu, torch.float32)
    assert prefers_channels_last(normed, gpu, torch.float32)
    assert not prefers_channels_last(flat, gpu, torch.float32)


def test_a_pool_gets_its_gradient_in_its_own_layout() -> None:
    seen: list[bool] = []

    def watch(_: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))

    for channels_last in (True, False):
        model = Model(pooled()).prepared(EngineLayout(channels_last=channels_last))
        model._nets["train"].module.get_submodule("pool.0").register_forward_hook(watch)
        leaves = {n: p.clone().requires_grad_() for n, p in model.weights().params.items()}
        model.forward(Weights(leaves, {}), X, key=KEY).logits.sum().backward()
    assert seen == [True, False]


def test_a_prepared_model_leaves_the_one_it_comes_from_alone() -> None:
    plain = Model(pooled())
    weights = plain.weights()
    before = plain.forward(weights, X, key=KEY).logits
    other = plain.prepared(EngineLayout(channels_last=True, stacked=True))
    other.forward(weights, X, key=KEY)
    assert torch.equal(plain.forward(weights, X, key=KEY).logits, before)
    assert type(plain.layout) is Layout
    assert not any("Channels" in type(m).__name__ for m in plain._nets["train"].module.modules())


def test_channels_last_leaves_maps_of_many_clients_alone() -> None:
    model = Model(pooled())
    weights, xs = model.weights(), torch.stack([X, 2 * X])

    def one(x: Tensor) -> Tensor:
        return model.forward(weights, x, key=KEY).logits

    plain = vmap(one)(xs)
    model = model.prepared(EngineLayout(channels_last=True))
    torch.testing.assert_close(vmap(one)(xs), plain)


# -- weights in and out ------------------------------------------------------------------------


def test_weights_are_a_copy_in_the_modules_order() -> None:
    module = stages()
    model = Model(module)
    weights = model.weights()
    assert list(weights.params) == [n for n, _ in module.named_parameters()] == model.names
    assert list(weights.buffers) == [n for n, _ in module.named_buffers()]
    assert tree.equal(as_state(weights), {n: module.state_dict()[n] for n in as_state(weights)})
    before = state(module)
    next(iter(weights.params.values())).zero_()
    assert tree.equal(state(module), before)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert tree.equal(as_state(model.weights()), {n: before[n] for n in as_state(weights)})


def test_weights_go_into_a_module_and_back() -> None:
    module = stages()
    model = Model(module)
    weights = tree.map(lambda w: w * 2, model.weights())
    made = model.module(weights)
    assert type(made) is nn.Sequential
    assert not made.training
    assert tree.equal(as_state(Model(made).weights()), as_state(weights))
    assert torch.equal(made(X), model.forward(weights, X, "eval").logits)
    with torch.no_grad():
        next(made.parameters()).zero_()
    assert tree.gap(weights.params, tree.scale(model.weights().params, 2.0)) == 0
    assert tree.equal(state(module), state(stages()))


def test_leaves_of_parts_are_left_out_of_the_module() -> None:
    model = Model(stages())
    weights = model.weights()
    more = Weights(weights.params | {"moon/weight0": torch.zeros(3)}, weights.buffers)
    assert tree.equal(as_state(Model(model.module(more)).weights()), as_state(weights))
    assert torch.equal(
        model.forward(more, X, "eval").logits, model.forward(weights, X, "eval").logits
    )


def test_a_module_has_the_precision_of_its_weights() -> None:
    model = Model(nn.Sequential(nn.Linear(2, 2)))  # float32
    weights = tree.map(lambda w: w.to(DOUBLE) + 1e-12, model.weights())
    made = model.module(weights)
    assert tree.equal(as_state(Model(made).weights()), as_state(weights))


def test_a_model_needs_parameters() -> None:
    with pytest.raises(ModelError, match="no parameters to train"):
        Model(nn.Sequential(nn.Flatten()))
    with pytest.raises(ModelError, match=r"empty nn\.Sequential"):
        Model(nn.Sequential())


def test_features_of_a_bf16_pass_have_the_precision_of_the_weights() -> None:
    net = nn.Sequential(OrderedDict(body=nn.Linear(3, 4), head=nn.Linear(4, 2)))
    out = Model(net, precision="bf16").forward(Model(net).weights(), torch.ones(5, 3), "eval")
    assert out.features is not None
    assert out.features.dtype == out.logits.dtype == torch.float32
    exact = Model(net).forward(Model(net).weights(), torch.ones(5, 3), "eval")
    assert 0 < float((out.features - exact.features).abs().max()) < 0.02
