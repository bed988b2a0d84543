"""Attention and recurrent layers: torch's results, in plain steps that draw from keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.core.nets import DOUBLE, KEY, normal
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from kedge.core import eager, rng, tree
from kedge.core.layers.keyed import Attention, keyed
from kedge.core.model import Model
from kedge.core.optim import SGD, Adam
from kedge.core.task import Classification
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.errors import ModelError
from kedge.sim.simulation import Simulation

X = normal("sequences", 3, 5, 4)  # [batch, time, features]


@pytest.fixture
def traced():
    """Every tensor counts as traced, so that recurrent layers go step by step."""
    before = eager.set_predicate(lambda _: False)
    yield
    eager.set_predicate(before)


RECURRENT: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
    (nn.LSTM, {"bias": False, "batch_first": True}),
    (nn.GRU, {"batch_first": True}),
    (nn.GRU, {"num_layers": 3, "bidirectional": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    (nn.RNN, {"num_layers": 2, "batch_first": True}),
]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batched", [True, False])
def test_recurrent_layers_go_step_by_step_as_torchs_do(
    kind: Any, options: dict[str, Any], given: bool, batched: bool
) -> None:
    theirs = kind(4, 6, dtype=DOUBLE, **options)
    ours = keyed(copy.deepcopy(theirs))
    x = X if batched else X[0]
    state = None
    if given:
        _, last = theirs(x)
        state = tuple(s + 1 for s in last) if isinstance(last, tuple) else last + 1
    expected, found = theirs(x, state), ours(x, state)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_dropout_is_between_recurrent_layers_and_not_after_the_last() -> None:
    layer = keyed(nn.GRU(4, 6, num_layers=2, dropout=0.5, dtype=DOUBLE))
    model = Model(nn.Sequential(layer, Last(), nn.Linear(6, 2, dtype=DOUBLE)))
    first, second = nn.GRU(4, 6, dtype=DOUBLE), nn.GRU(6, 6, dtype=DOUBLE)
    for alone, k in ((first, 0), (second, 1)):
        names = dict(alone.named_parameters())
        values = {n: getattr(layer, n.replace("_l0", f"_l{k}")) for n in names}
        alone.load_state_dict(values)
    inner = first(X)[0]
    mask = (rng.uniform(rng.fold(KEY, 1), tuple(inner.shape)) >= 0.5).to(DOUBLE) * 2
    expected = model.template[2](second(inner * mask)[0][:, -1])  # type: ignore[index]
    found = model.forward(model.weights(), X, "train", key=KEY).logits
    torch.testing.assert_close(found, expected)


class Last(nn.Module):
    """The last step of a sequence."""

    def forward(self, x: Any) -> Tensor:
        return (x[0] if isinstance(x, tuple) else x)[:, -1]


@pytest.mark.usefixtures("traced")
def test_a_packed_sequence_cannot_go_step_by_step() -> None:
    packed = pack_padded_sequence(X, torch.tensor([5, 4, 2]), batch_first=True)
    with pytest.raises(ModelError, match="PackedSequence"):
        keyed(nn.LSTM(4, 6, dtype=DOUBLE))(packed)


# -- attention --------------------------------------------------------------------------------

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [4]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False, "add_zero_attn": True},
        {"add_bias_kv": True, "batch_first": True},
        {"kdim": 4, "vdim": 3, "batch_first": True},
    ],
)
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "per head", "added"])
@pytest.mark.parametrize("average", [True, False])
def test_attention_is_torchs(options: dict[str, Any], masks: str, average: bool) -> None:
    theirs = nn.MultiheadAttention(6, 2, dtype=DOUBLE, **options)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours = keyed(copy.deepcopy(theirs))
    assert isinstance(ours, Attention)
    q, k = normal("q", 3, 5, 6), normal("k", 3, 5, theirs.kdim)
    v = normal("v", 3, 5, theirs.vdim)
    if not theirs.batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    given: dict[str, Any] = {}
    if masks in ("causal", "both"):
        given["attn_mask"] = CAUSAL
    if masks in ("padding", "both"):
        given["key_padding_mask"] = PADDING
    if masks == "per head":
        given["attn_mask"] = normal("mask", 6, 5, 5)
    if masks == "added":
        given["attn_mask"] = normal("mask", 5, 5)
    for need in (True, False):
        expected = theirs(q, k, v, need_weights=need, average_attn_weights=average, **given)
        found = ours(q, k, v, need_weights=need, average_attn_weights=average, **given)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    one = theirs(q[0], k[0], v[0]) if theirs.batch_first else theirs(q[:, 0], k[:, 0], v[:, 0])
    two = ours(q[0], k[0], v[0]) if theirs.batch_first else ours(q[:, 0], k[:, 0], v[:, 0])
    torch.testing.assert_close(two, one, rtol=0, atol=1e-13)


# -- functions that drop ----------------------------------------------------------------------


class Calls(nn.Module):
    """Calls random functions by itself."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.body, self.head, self.call = nn.Linear(4, 4, dtype=DOUBLE), Head(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.body(x), self.training))


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


def test_functional_dropout_draws_from_the_key() -> None:
    module = Calls(lambda x, training: F.dropout(x, 0.4, training))
    model = Model(module)
    hidden = module.body(X)
    mask = (rng.uniform(rng.fold(KEY, 1), tuple(hidden.shape)) >= 0.4).to(DOUBLE) / 0.6
    found = model.forward(model.weights(), X, "train", key=KEY).logits
    torch.testing.assert_close(found, module.head(hidden * mask))
    torch.testing.assert_close(model.forward(model.weights(), X, "eval").logits, module.eval()(X))


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_inside_functional_attention_draws_from_the_key(causal: bool) -> None:
    def attend(x: Tensor, training: bool) -> Tensor:
        p = 1.0 - 1e-9 if training else 0.0  # p just below 1 keeps no weight
        return x + F.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=causal)

    model = Model(module := Calls(attend))
    found = model.forward(model.weights(), X, "train", key=KEY).logits
    torch.testing.assert_close(found, module.head(module.body(X)))
    torch.testing.assert_close(model.forward(model.weights(), X, "eval").logits, module.eval()(X))


def test_dropout_in_evaluation_is_refused() -> None:
    model = Model(Calls(lambda x, _: F.dropout(x, 0.4)))
    with pytest.raises(ModelError, match=r"F.dropout in evaluation, too; pass it self.training"):
        model.forward(model.weights(), X, "eval")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("randn_like", lambda x, _: x + torch.randn_like(x)),
        ("bernoulli", lambda x, _: x * torch.bernoulli(torch.full_like(x, 0.5))),
        ("alpha_dropout", lambda x, training: F.alpha_dropout(x, 0.5, training)),
    ],
)
def test_other_draws_are_refused(name: str, call: Any) -> None:
    model = Model(Calls(call))
    with pytest.raises(ModelError, match=f"draws random numbers by {name}, where no key"):
        model.forward(model.weights(), X, "train", key=KEY)


# -- both engines -----------------------------------------------------------------------------


class Reader(nn.Module):
    """Token ids, an embedding, a layer of sequences and a head."""

    def __init__(self, core: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(7, 8), core, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.core(self.embed(x))
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


CORES: dict[str, tuple[Any, int]] = {
    "encoder layer": (lambda: encoder(dropout=0.2), 8),
    "pre-norm encoder": (lambda: nn.TransformerEncoder(encoder(norm_first=True), 1), 8),
    "lstm": (lambda: nn.LSTM(8, 6, batch_first=True), 6),
    "deep gru": (
        lambda: nn.GRU(8, 4, 2, dropout=0.3, bidirectional=True, batch_first=True), 8,
    ),
}  # fmt: skip


def tokens() -> Federation:
    """Is token 1 in the sequence?"""
    x = rng.integers(rng.key(3), (48, 4), 7)
    y = (x == 1).any(1).long()
    clients = [range(20), range(20, 48)]
    return Federation(x, y, clients, Classification(2), (x, y), dtype=DOUBLE, tokens=True)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_sequence_models_are_the_same_on_both_engines(name: str) -> None:
    torch.manual_seed(0)
    make, width = CORES[name]
    module, runs = Reader(make(), width), {}
    for engine in ("loop", "vector"):
        run = Simulation(
            tokens(), module, "scaffold", optim=SGD(lr=0.2), work=LocalWork(batch=8, steps=2),
            engine=engine, seed=1,
        )  # fmt: skip
        run.run_round()
        runs[engine] = run
    assert tree.gap(runs["loop"].weights, runs["vector"].weights) < 1e-12
    assert runs["loop"].evaluate() == pytest.approx(runs["vector"].evaluate(), abs=1e-12)
    start = runs["loop"].bound.initial.params
    moved = {n: not torch.equal(w, start[n]) for n, w in runs["loop"].weights.params.items()}
    assert all(moved.values()), moved


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("name", ["encoder layer", "deep gru"])
def test_dropout_in_sequence_models_is_the_same_after_a_resume(engine: str, name: str) -> None:
    torch.manual_seed(0)
    make, width = CORES[name]
    module = Reader(make(), width)

    def simulation() -> Simulation:
        work = LocalWork(batch=8, steps=1)
        return Simulation(tokens(), module, optim=SGD(lr=0.2), work=work, engine=engine, seed=1)

    straight, first, second = simulation(), simulation(), simulation()
    straight.run_round()
    straight.run_round()
    first.run_round()
    second.load_state(first.state())
    second.run_round()
    assert tree.equal(straight.weights, second.weights)


@pytest.mark.parametrize("name", ["encoder layer", "lstm"])
def test_sequence_models_learn(name: str) -> None:
    torch.manual_seed(0)
    make, width = CORES[name]
    run = Simulation(
        tokens(), Reader(make(), width), optim=Adam(lr=0.03), work=LocalWork(batch=16, steps=8),
        engine="vector", seed=1,
    )  # fmt: skip
    for _ in range(8):
        run.run_round()
    assert run.evaluate()["accuracy"] > 90
