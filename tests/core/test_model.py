"""Models as pure functions: equal to the module they come from, cut, injected, keyed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kedge.core import rng, tree
from kedge.core.dropout import Dropout
from kedge.core.model import Model, Rows
from kedge.core.shell import Shell
from kedge.core.tree import Weights
from kedge.errors import FieldError, ModelError, UnknownName

DOUBLE = torch.float64
KEY = rng.key(5)


def normal(name: str, *shape: int) -> Tensor:
    return rng.normal(rng.fold(KEY, name), shape, DOUBLE)


def fill(module: nn.Module) -> nn.Module:
    """Weights that do not depend on torch's global generator."""
    module = module.to(DOUBLE)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(normal(name, *p.shape) / max(1, p[0].numel()) ** 0.5)
        for name, b in module.named_buffers():
            if b.is_floating_point():
                b.copy_(normal(name, *b.shape).abs() + 0.5)
    return module


def stages(norm: bool = True, dropout: float = 0.0) -> nn.Sequential:
    net = nn.Sequential()
    bn: nn.Module = nn.BatchNorm2d(4) if norm else nn.Identity()
    net.add_module("stage1", nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), bn, nn.Tanh()))
    pooled = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 6))
    net.add_module("stage2", pooled)
    last: nn.Module = nn.BatchNorm1d(6) if norm else nn.Identity()
    net.add_module("stage3", nn.Sequential(last, nn.Tanh(), nn.Dropout(dropout)))
    net.add_module("head", nn.Linear(6, 3))
    return fill(net)  # type: ignore[return-value]


class Custom(nn.Module):
    """The same network written by hand, with a name of the head to choose."""

    def __init__(self, head: str = "fc", norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.hidden = nn.Linear(16, 6)
        self.add_module(head, nn.Linear(6, 3))
        self.last = head

    def body(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.bn(self.conv(x))), 2)
        return torch.tanh(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.last)(self.body(x))


X = normal("x", 7, 2, 4, 4)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in module.state_dict().items()}


def as_state(weights: Weights) -> dict[str, Tensor]:
    return weights.params | weights.buffers


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


# -- features, head, taps ----------------------------------------------------------------------


def test_features_are_what_goes_into_the_head() -> None:
    module = stages(norm=False)
    model = Model(module)
    done = model.forward(model.weights(), X)
    assert model.head_name == "head"
    assert torch.equal(done.features, module[:3](X))
    assert torch.equal(model.head(model.weights().params, done.features), done.logits)
    assert model.head_names() == ["head.weight", "head.bias"]
    other = tree.scale(model.weights().params, 2.0)
    expected = F.linear(done.features, other["head.weight"], other["head.bias"])
    assert torch.equal(model.head(other, done.features), expected)


def test_the_last_child_is_the_head_where_none_is_named_so() -> None:
    model = Model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)))
    assert model.head_name == "2"
    assert model.cuts == ["0", "1"]


@pytest.mark.parametrize("head", ["head", "fc", "classifier"])
def test_the_usual_names_of_a_head_are_found(head: str) -> None:
    module = fill(Custom(head, norm=False))
    model = Model(module)
    assert model.head_name == head
    done = model.forward(model.weights(), X)
    assert torch.equal(done.features, module.body(X))  # type: ignore[operator]
    assert torch.equal(done.logits, module(X))
    assert torch.equal(model.head(model.weights().params, done.features), done.logits)


def test_another_name_of_the_head_is_given() -> None:
    module = fill(Custom("out", norm=False))
    model = Model(module, head="out")
    assert torch.equal(model.forward(model.weights(), X).features, module.body(X))  # type: ignore[operator]
    with pytest.raises(UnknownName, match=r"no submodule \(head\) 'outt'. Did you mean 'out'"):
        Model(module, head="outt")


def test_a_model_without_a_head_runs_but_says_what_to_write_when_asked_for_features() -> None:
    module = fill(Custom("out", norm=False))
    model = Model(module)
    assert not model.has_head
    done = model.forward(model.weights(), X)
    assert done.features is None
    assert torch.equal(done.logits, module(X))
    with pytest.raises(
        ModelError, match=r"moon needs to know the model's head .*Model\(module, he"
    ):
        model.require_head("moon")
    with pytest.raises(ModelError):
        model.head_names()


def test_the_head_of_a_model_without_one_is_refused() -> None:
    model = Model(nn.Linear(4, 3))
    with pytest.raises(ModelError):
        model.head(model.weights().params, torch.zeros(2, 4))


def test_the_head_of_a_sequential_model_may_lie_deeper() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 3)))
    model = Model(fill(net), head="1.1")
    x = normal("deep", 6, 4)
    done = model.forward(model.weights(), x)
    assert done.features is not None
    assert torch.equal(done.features, torch.tanh(net[0](x)))


def test_a_head_that_shares_its_weight_is_refused_by_itself() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(4, 4, bias=False)
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.encode.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.encode(x)))

    model = Model(fill(Tied()))
    params = tree.scale(model.weights().params, 3.0)
    done = model.forward(Weights(params, {}), normal("tied", 5, 4))
    assert done.features is not None
    with pytest.raises(ModelError, match="shares weights with another layer"):
        model.head(params, done.features)


def test_taps_read_what_passes_a_cut() -> None:
    module = stages(norm=False)
    model = Model(module)
    done = model.forward(model.weights(), X, taps=("stage1", "stage2"))
    assert set(done.at) == {"stage1", "stage2"}
    assert torch.equal(done.at["stage1"], module[0](X))
    assert torch.equal(done.at["stage2"], module[:2](X))
    custom = fill(Custom(norm=False))
    done = Model(custom).forward(Model(custom).weights(), X, taps=("conv",))
    assert torch.equal(done.at["conv"], custom.conv(X))  # type: ignore[operator]


def test_shapes_at_every_cut() -> None:
    model = Model(stages())
    found = model.shapes(model.weights(), X)
    assert found == {
        "stage1": (4, 4, 4),
        "stage2": (6,),
        "stage3": (6,),
        "features": (6,),
        "logits": (3,),
    }


def test_cuts_are_in_order_and_an_unknown_one_is_corrected() -> None:
    model = Model(stages())
    assert model.cuts == ["stage1", "stage2", "stage3"]
    model.check_cut("stage2")
    with pytest.raises(UnknownName, match="no cut 'stage4'. Did you mean 'stage[123]'"):
        model.check_cut("stage4")
    assert Model(fill(Custom())).cuts == ["conv", "bn", "hidden"]


def test_no_cut_lies_inside_the_head() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 5)
            self.classifier = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.body(x))

    assert Model(Deep()).cuts == ["body"]


class Recurrent(nn.Module):
    """A submodule of it returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


def test_a_module_with_tuples_inside_runs() -> None:
    module = fill(Recurrent())
    model, x = Model(module), normal("sequence", 3, 6, 4)
    done = model.forward(model.weights(), x)
    torch.testing.assert_close(done.logits, module(x))
    torch.testing.assert_close(done.features, module.lstm(x)[0][:, -1])  # type: ignore[operator]


def test_a_module_with_tuples_inside_has_shapes() -> None:
    model = Model(fill(Recurrent()))
    found = model.shapes(model.weights(), normal("sequence", 3, 6, 4))
    assert found["features"] == (5,)
    assert "lstm" not in found


# -- injected rows -----------------------------------------------------------------------------


def test_injected_rows_pass_through_the_rest_only() -> None:
    module = stages(norm=False)
    model = Model(module)
    rows = normal("rows", 3, 6)
    done = model.forward(model.weights(), X, rows=(Rows("fedimpro", "stage2", rows),))
    plain = model.forward(model.weights(), X)
    assert done.logits.shape == (10, 3)
    assert done.where == {"fedimpro": slice(7, 10)}
    torch.testing.assert_close(done.logits[:7], plain.logits)
    torch.testing.assert_close(done.features[:7], plain.features)  # type: ignore[index]
    torch.testing.assert_close(done.logits[7:], module[2:](rows))
    torch.testing.assert_close(done.features[7:], module[2](rows))  # type: ignore[index]
    assert torch.equal(done.at["stage2"], module[:2](X))  # real rows alone


def test_injected_rows_share_batch_norm_with_the_real_ones() -> None:
    module = stages().train()
    model = Model(module)
    rows = normal("rows", 3, 6)
    done = model.forward(model.weights(), X, "train", rows=(Rows("a", "stage2", rows),))
    together = torch.cat([module[:2](X), rows])  # stage1's statistics see the real rows alone
    assert torch.equal(done.logits, module[2:](together))
    buffers = dict(module.named_buffers())
    assert tree.equal(done.buffers, {n: buffers[n] for n in done.buffers})


def test_rows_of_two_owners_at_two_cuts() -> None:
    module = stages(norm=False)
    model = Model(module)
    late, early = normal("late", 2, 6), normal("early", 4, 4, 4, 4)
    rows = (Rows("late", "stage2", late), Rows("early", "stage1", early))
    done = model.forward(model.weights(), X, rows=rows)
    assert done.where == {"early": slice(7, 11), "late": slice(11, 13)}
    torch.testing.assert_close(done.logits[done.where["early"]], module[1:](early))
    torch.testing.assert_close(done.logits[done.where["late"]], module[2:](late))
    torch.testing.assert_close(done.logits[:7], module(X))
    assert len(done.at["stage1"]) == len(done.at["stage2"]) == 7


def test_two_owners_at_one_cut_and_flat_rows() -> None:
    module = stages(norm=False)
    model = Model(module)
    a, b = normal("a", 2, 64), normal("b", 3, 4, 4, 4)  # flat rows take the shape at the cut
    rows = (Rows("a", "stage1", a), Rows("b", "stage1", b))
    done = model.forward(model.weights(), X, rows=rows)
    assert done.where == {"a": slice(7, 9), "b": slice(9, 12)}
    torch.testing.assert_close(done.logits[7:9], module[1:](a.reshape(2, 4, 4, 4)))
    torch.testing.assert_close(done.logits[9:], module[1:](b))


def test_rows_in_a_module_that_is_not_sequential() -> None:
    module = fill(Custom(norm=False))
    model = Model(module)
    rows = normal("rows", 3, 6)
    done = model.forward(model.weights(), X, rows=(Rows("a", "hidden", rows),))
    torch.testing.assert_close(done.logits[:7], module(X))
    torch.testing.assert_close(done.logits[7:], module.fc(torch.tanh(rows)))  # type: ignore[operator]
    again = model.forward(model.weights(), X)  # the hooks are gone after the pass
    assert again.logits.shape == (7, 3)
    assert again.at == {}


def test_hooks_are_gone_after_a_pass_that_failed() -> None:
    model = Model(fill(Custom(norm=False)))
    with pytest.raises(RuntimeError):
        model.forward(model.weights(), X, rows=(Rows("a", "hidden", torch.zeros(3, 5)),))
    assert model.forward(model.weights(), X).logits.shape == (7, 3)


def test_a_gradient_flows_to_the_injected_rows_and_under_vmap() -> None:
    model = Model(stages(norm=False))
    weights, rows = model.weights(), normal("rows", 2, 3, 6)

    def out(rows: Tensor) -> Tensor:
        return model.forward(weights, X, rows=(Rows("a", "stage2", rows),)).logits[7:].pow(2).sum()

    mapped = vmap(grad(out))(rows)
    torch.testing.assert_close(mapped, torch.stack([grad(out)(r) for r in rows]))
    assert float(mapped.abs().min()) > 0


def test_rows_at_a_submodule_that_is_called_twice_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.act(self.b(self.act(self.a(x)))))

    model = Model(fill(Twice()))
    with pytest.raises(ModelError, match="act"):
        model.forward(
            model.weights(), normal("t", 5, 4), rows=(Rows("p", "act", normal("r", 2, 4)),)
        )


# -- keyed dropout -----------------------------------------------------------------------------


def dropping(p: float = 0.3, kind: Any = nn.Dropout) -> Model:
    """Dropout right before an identity head, so that logits show what was dropped."""
    return Model(fill(nn.Sequential(nn.Linear(2, 2), kind(p), nn.Identity())))


def drop(model: Model, x: Tensor, key: Tensor, mode: Any = "train") -> Tensor:
    eye = {"0.weight": torch.eye(2, dtype=DOUBLE), "0.bias": torch.zeros(2, dtype=DOUBLE)}
    return model.forward(Weights(eye, {}), x, mode, key=key).logits


@pytest.mark.parametrize("p", [0.1, 0.3, 0.8])
def test_dropout_drops_its_share_and_scales_the_rest(p: float) -> None:
    n = 20_000
    out = drop(dropping(p), torch.ones(n, 2, dtype=DOUBLE), KEY)
    dropped = float((out == 0).to(DOUBLE).mean())
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / (2 * n))
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p)))


def test_dropout_is_a_function_of_its_key() -> None:
    model, x = dropping(), torch.ones(50, 2, dtype=DOUBLE)
    assert torch.equal(drop(model, x, KEY), drop(model, x, KEY))
    assert not torch.equal(drop(model, x, KEY), drop(model, x, rng.fold(KEY, 1)))
    torch.manual_seed(1)
    first = drop(model, x, KEY)
    torch.manual_seed(2)
    assert torch.equal(first, drop(model, x, KEY))


def test_dropout_is_at_work_in_a_probe_and_off_in_evaluation() -> None:
    model, x = dropping(), torch.ones(50, 2, dtype=DOUBLE)
    assert torch.equal(drop(model, x, KEY, "probe"), drop(model, x, KEY, "train"))
    assert torch.equal(drop(model, x, KEY, "eval"), x)
    assert torch.equal(model.forward(model.weights(), x, "eval").logits, model._template[0](x))


def test_two_dropouts_of_one_pass_draw_differently() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.5), nn.Identity())
    out = drop(Model(fill(net)), torch.ones(4000, 2, dtype=DOUBLE), KEY)
    kept = float((out != 0).to(DOUBLE).mean())
    assert abs(kept - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 8000)


def test_dropout_is_the_same_in_a_loop_and_under_vmap() -> None:
    model = Model(stages(dropout=0.4))
    weights, keys = model.weights(), rng.fold(KEY, torch.arange(4))
    xs = torch.stack([normal(f"d{k}", 7, 2, 4, 4) for k in range(4)])

    def one(x: Tensor, key: Tensor) -> Tensor:
        return model.forward(weights, x, "probe", key=key).logits

    looped = torch.stack([one(x, k) for x, k in zip(xs, keys, strict=True)])
    torch.testing.assert_close(vmap(one)(xs, keys), looped, rtol=1e-13, atol=1e-14)
    same_input = vmap(one)(xs[:1].expand_as(xs), keys)
    assert not torch.allclose(same_input[0], same_input[1])


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_channel_dropout_drops_whole_channels(kind: Any) -> None:
    space = {nn.Dropout1d: (6,), nn.Dropout2d: (3, 2), nn.Dropout3d: (3, 2, 1)}[kind]
    model = Model(nn.Sequential(kind(0.5), nn.Flatten(), nn.Linear(24, 2)))
    x = torch.ones(500, 4, *space)
    out = model.forward(model.weights(), x, "train", key=KEY, taps=("0",)).at["0"].flatten(2)
    assert torch.equal(out.amin(2), out.amax(2))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert abs(float((out == 0).float().mean()) - 0.5) < 5 * math.sqrt(0.25 / 2000)


def test_a_model_knows_whether_it_is_random() -> None:
    assert dropping(0.3).is_random
    assert not dropping(0.0).is_random
    assert not Model(stages()).is_random


def test_dropout_inside_a_custom_module_is_found() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Dropout(0.5)])
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.inner[0](x))

    model = Model(Block())
    skeleton = model._skeletons["train"]
    assert not any(isinstance(m, nn.Dropout) for m in skeleton.modules())
    assert any(isinstance(m, Dropout) for m in skeleton.modules())
    assert any(isinstance(m, nn.Dropout) for m in model.module(model.weights()).modules())


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_that_cannot_be_keyed_is_refused(kind: Any) -> None:
    message = rf"{kind.__name__} \(1\) cannot draw from a key; use nn.Dropout"
    with pytest.raises(ModelError, match=message):
        Model(nn.Sequential(nn.Linear(2, 2), kind(0.5), nn.Linear(2, 2)))


def test_a_dropout_that_is_used_twice_is_keyed_twice() -> None:
    shared = nn.Dropout(0.5)
    net = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared, nn.Linear(2, 2))
    skeleton = Model(net)._skeletons["train"]
    assert not any(isinstance(m, nn.Dropout) for m in skeleton.modules())


def test_dropping_everything_gives_zeros() -> None:
    out = drop(dropping(1.0), torch.ones(3, 2, dtype=DOUBLE), KEY)
    assert torch.equal(out, torch.zeros(3, 2, dtype=DOUBLE))


def test_a_random_pass_without_a_key_is_refused() -> None:
    model, x = dropping(), torch.ones(50, 2, dtype=DOUBLE)
    drop(model, x, KEY)  # its key must not stay behind
    with pytest.raises(ModelError, match="key"):
        model.forward(model.weights(), x, "train")


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(4, 2, dropout=0.5),
        lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5),
    ],
)
def test_dropout_hidden_inside_a_layer_is_refused(layer: Any) -> None:
    with pytest.raises(ModelError, match="key"):
        Model(nn.Sequential(layer(), nn.Linear(4, 2)))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.25, 0.3, 0.5, 0.999, 1 - 1e-9])
def test_dropout_keeps_the_uniform_draws_from_p_up(p: float) -> None:
    x = torch.ones(3000, 2, dtype=DOUBLE)
    draws = rng.uniform(rng.fold(KEY, 1), (3000, 2))
    assert torch.equal(drop(dropping(p), x, KEY) != 0, draws >= p)


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
    shell, own, another = Shell(module), state(module), copy.deepcopy(module)

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
    shell, own = Shell(module), dict(module.named_parameters())
    with pytest.raises(RuntimeError):
        shell.call(other_weights(module), normal("wrong", 6, 5))
    assert all(p is own[n] for n, p in module.named_parameters())
    assert module.b.weight is module.a.weight


def test_weights_that_are_not_given_are_the_modules_own() -> None:
    module, x = fill(Tied()).eval(), normal("shell", 6, 4)
    assert torch.equal(Shell(module).call({}, x), module(x))


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
        model.channels_last = channels_last
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
    assert plain.likes_channels_last(cpu, torch.float32)
    assert not plain.likes_channels_last(cpu, DOUBLE)
    assert not normed.likes_channels_last(cpu, torch.float32)
    assert normed.likes_channels_last(gpu, torch.float32)
    assert not flat.likes_channels_last(gpu, torch.float32)


def test_a_pool_gets_its_gradient_in_its_own_layout() -> None:
    model, seen = Model(pooled()), []
    model.channels_last = True
    pool = model._skeletons["train"].get_submodule("pool.0")

    def watch(_: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))

    pool.register_forward_hook(watch)
    leaves = {n: p.clone().requires_grad_() for n, p in model.weights().params.items()}
    model.forward(Weights(leaves, {}), X, key=KEY).logits.sum().backward()
    assert seen == [True]
    model.channels_last = False
    model.forward(Weights(leaves, {}), X, key=KEY).logits.sum().backward()
    assert seen == [True, False]


def test_channels_last_leaves_maps_of_many_clients_alone() -> None:
    model = Model(pooled())
    weights, xs = model.weights(), torch.stack([X, 2 * X])

    def one(x: Tensor) -> Tensor:
        return model.forward(weights, x, key=KEY).logits

    plain = vmap(one)(xs)
    model.channels_last = True
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
