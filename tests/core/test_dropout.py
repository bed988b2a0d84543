"""Dropout by keys: one mask for one key, whatever the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.core.nets import DOUBLE, KEY, fill, normal, stages
from torch import Tensor, nn
from torch.func import vmap

from kedge.core import rng
from kedge.core.layers.dropout import Dropout
from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.errors import ModelError

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
    assert torch.equal(model.forward(model.weights(), x, "eval").logits, model.template[0](x))


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
    skeleton = model._nets["train"].module
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
    skeleton = Model(net)._nets["train"].module
    assert not any(isinstance(m, nn.Dropout) for m in skeleton.modules())


def test_dropping_everything_gives_zeros() -> None:
    out = drop(dropping(1.0), torch.ones(3, 2, dtype=DOUBLE), KEY)
    assert torch.equal(out, torch.zeros(3, 2, dtype=DOUBLE))


def test_a_random_pass_without_a_key_is_refused() -> None:
    model, x = dropping(), torch.ones(50, 2, dtype=DOUBLE)
    drop(model, x, KEY)  # its key must not stay behind
    with pytest.raises(ModelError, match="key"):
        model.forward(model.weights(), x, "train")


class OwnLSTM(nn.LSTM):
    """A user's subclass: kedge cannot know what its forward does."""


def test_dropout_hidden_inside_an_own_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="OwnLSTM drops out inside, where no key reaches"):
        Model(nn.Sequential(OwnLSTM(4, 4, num_layers=2, dropout=0.5), nn.Linear(4, 2)))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.25, 0.3, 0.5, 0.999, 1 - 1e-9])
def test_dropout_keeps_the_uniform_draws_from_p_up(p: float) -> None:
    x = torch.ones(3000, 2, dtype=DOUBLE)
    draws = rng.uniform(rng.fold(KEY, 1), (3000, 2))
    assert torch.equal(drop(dropping(p), x, KEY) != 0, draws >= p)


def test_a_draw_just_below_p_is_dropped() -> None:
    """Draws are multiples of 2**-24; p lies between two of them."""
    x = torch.ones(3000, 2, dtype=DOUBLE)
    draws = rng.uniform(rng.fold(KEY, 1), (3000, 2))
    below = draws[(draws >= 0.125) & (draws < 0.25)].max()
    p = float(below) + 2.0**-26  # exact in float32
    kept = drop(dropping(p), x, KEY) != 0
    assert torch.equal(kept, draws >= p)
    assert not kept[draws == below].any()
