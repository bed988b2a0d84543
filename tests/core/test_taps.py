"""What a pass shows of itself, and rows that are fed in halfway."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.core.nets import Custom, Recurrent, X, fill, normal, stages
from torch import Tensor, nn
from torch.func import grad, vmap

import kedge
from kedge.core import tree
from kedge.core.model import InjectedRows, Model
from kedge.core.tree import Weights
from kedge.errors import IncompatibleError, ModelError, UnknownName

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


def test_a_module_in_two_places_is_a_cut_under_both_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between, self.head = nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.between(self.first(x))))

    assert Model(Twice()).cuts == ["first", "between", "again"]


def test_no_cut_lies_inside_the_head() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 5)
            self.classifier = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.body(x))

    assert Model(Deep()).cuts == ["body"]


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
    done = model.forward(model.weights(), X, rows=(InjectedRows("fedimpro", "stage2", rows),))
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
    done = model.forward(model.weights(), X, "train", rows=(InjectedRows("a", "stage2", rows),))
    together = torch.cat([module[:2](X), rows])  # stage1's statistics see the real rows alone
    assert torch.equal(done.logits, module[2:](together))
    buffers = dict(module.named_buffers())
    assert tree.equal(done.buffers, {n: buffers[n] for n in done.buffers})


def test_rows_of_two_owners_at_two_cuts() -> None:
    module = stages(norm=False)
    model = Model(module)
    late, early = normal("late", 2, 6), normal("early", 4, 4, 4, 4)
    rows = (InjectedRows("late", "stage2", late), InjectedRows("early", "stage1", early))
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
    rows = (InjectedRows("a", "stage1", a), InjectedRows("b", "stage1", b))
    done = model.forward(model.weights(), X, rows=rows)
    assert done.where == {"a": slice(7, 9), "b": slice(9, 12)}
    torch.testing.assert_close(done.logits[7:9], module[1:](a.reshape(2, 4, 4, 4)))
    torch.testing.assert_close(done.logits[9:], module[1:](b))


def test_rows_in_a_module_that_is_not_sequential() -> None:
    module = fill(Custom(norm=False))
    model = Model(module)
    rows = normal("rows", 3, 6)
    done = model.forward(model.weights(), X, rows=(InjectedRows("a", "hidden", rows),))
    torch.testing.assert_close(done.logits[:7], module(X))
    torch.testing.assert_close(done.logits[7:], module.fc(torch.tanh(rows)))  # type: ignore[operator]
    again = model.forward(model.weights(), X)  # the hooks are gone after the pass
    assert again.logits.shape == (7, 3)
    assert again.at == {}


def test_hooks_are_gone_after_a_pass_that_failed() -> None:
    model = Model(fill(Custom(norm=False)))
    with pytest.raises(RuntimeError):
        model.forward(model.weights(), X, rows=(InjectedRows("a", "hidden", torch.zeros(3, 5)),))
    assert model.forward(model.weights(), X).logits.shape == (7, 3)


def test_a_gradient_flows_to_the_injected_rows_and_under_vmap() -> None:
    model = Model(stages(norm=False))
    weights, rows = model.weights(), normal("rows", 2, 3, 6)

    def out(rows: Tensor) -> Tensor:
        return (
            model.forward(weights, X, rows=(InjectedRows("a", "stage2", rows),))
            .logits[7:]
            .pow(2)
            .sum()
        )

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
            model.weights(), normal("t", 5, 4), rows=(InjectedRows("p", "act", normal("r", 2, 4)),)
        )


def test_a_part_says_which_cuts_the_model_has() -> None:
    with pytest.raises(IncompatibleError, match=r"fedimpro cuts .*'stage2'.* after: stage1;"):
        kedge.run("fedimpro(cut=stage2, ramp=1)", clients=4, rounds=2, seeds=[0])
