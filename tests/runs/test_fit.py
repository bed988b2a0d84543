"""``kedge.fit``: what clients and models may be, and the sentence for what they may not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import kedge
from kedge.core.part import parts
from kedge.errors import DataError, IncompatibleError, KedgeError, ModelError
from kedge.models import models

FAST: dict[str, Any] = {"rounds": 2, "steps": 2, "engine": "loop"}


def samples(n: int = 40, width: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=g)
    return x, (x[:, 0] > 0).long()


def halves(x: Any, y: Any) -> list[tuple[Any, Any]]:
    n = len(x) // 2
    return [(x[:n], y[:n]), (x[n:], y[n:])]


def net(outputs: int = 2, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, outputs))


def last(result: Any) -> dict[str, Any]:
    return result.records[0][-1]


# -- clients ----------------------------------------------------------------------------------


class Items(Dataset):
    """A user's map-style dataset."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i >= len(self):
            raise IndexError
        return self.x[i], int(self.y[i])


def test_torch_datasets_are_as_good_as_arrays() -> None:
    x, y = samples()
    expected = kedge.fit(net(), halves(x, y), **FAST)
    whole = TensorDataset(x, y)
    kinds: list[list[Any]] = [
        [TensorDataset(*pair) for pair in halves(x, y)],
        [Subset(whole, range(20)), Subset(whole, range(20, 40))],
        [Items(*pair) for pair in halves(x, y)],
        [(a.tolist(), b.tolist()) for a, b in halves(x, y)],
    ]
    for clients in kinds:
        found = kedge.fit(net(), clients, **FAST)
        assert last(found)["loss"] == last(expected)["loss"]


def test_frames_have_the_options_of_files(tmp_path: Path) -> None:
    """Messages about columns name them: ``id=patient``. A BOM belongs to no column."""
    north = pd.DataFrame({"patient": [f"n{i}" for i in range(40)], "age": np.arange(40.0)})
    north["sick"] = np.where(north["age"] > 20, "yes", "no")
    south = north.assign(patient=[f"s{i}" for i in range(40)])
    south = south.rename(columns={"patient": "\ufeffpatient"})
    clients = {"north": north, "south": south}
    with pytest.raises(DataError, match="id=patient"):
        kedge.fit(None, clients, label="sick", **FAST)
    kedge.fit(None, clients, label="sick", id="patient", out=tmp_path / "run", **FAST)
    found = kedge.load(tmp_path / "run").model
    assert found.encode(south).ids[:2] == ("s0", "s1")
    with pytest.raises(DataError, match="id is for DataFrames"):
        kedge.fit(net(), halves(*samples()), id="patient", **FAST)


def test_a_test_set_may_be_a_torch_dataset() -> None:
    x, y = samples()
    runs = [kedge.fit(net(), halves(x, y), test=t, **FAST) for t in ((x, y), TensorDataset(x, y))]
    assert last(runs[0])["loss"] == last(runs[1])["loss"]


def test_clients_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, ...]] = []
    seen = kedge.runs.build.assemble

    def note(config: Any, federation: Any, *rest: Any) -> Any:
        found.append(federation.client_names)
        return seen(config, federation, *rest)

    monkeypatch.setattr("kedge.runs.build.assemble", note)
    north, south = halves(*samples())
    kedge.fit(net(), {"north": north, "south": south}, **FAST)
    kedge.fit(net(), [north, south], **FAST)
    assert set(found) == {("north", "south"), ("client 0", "client 1")}


@pytest.mark.parametrize("kind", ["numpy", "objects", "list"])
def test_labels_may_be_texts(kind: str) -> None:
    x, y = samples()
    names = np.array(["well", "sick"])[y.numpy()]  # sorted: sick is class 0
    texts: Any = {"numpy": names, "objects": names.astype(object), "list": names.tolist()}[kind]
    found = kedge.fit(net(), halves(x, texts), test=(x, texts), **FAST)
    expected = kedge.fit(net(), halves(x, 1 - y), test=(x, 1 - y), **FAST)
    assert last(found)["loss"] == last(expected)["loss"]


def test_a_model_may_be_given_by_name_or_left_out() -> None:
    x, y = samples()
    texts = np.array(["a", "b"])[y.numpy()]
    named = kedge.fit("mlp(hidden=[5])", halves(x, texts), **FAST).models[0]
    assert [tuple(p.shape) for p in named.parameters()] == [(5, 4), (5,), (2, 5), (2,)]
    left_out = kedge.fit(clients={"a": (x[:20], y[:20]), "b": (x[20:], y[20:])}, **FAST)
    assert left_out.models[0](x).shape == (40, 2)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from ()


X, Y = (v.numpy() for v in samples())


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (None, {}, "there are no clients"),
        ("abc", {}, "clients must be a list"),
        (TensorDataset(torch.zeros(3, 4), torch.zeros(3)), {}, "one for each client"),
        ([Stream()], {}, "client 0 is an iterable dataset without a length"),
        ([DataLoader(TensorDataset(torch.zeros(3, 4)))], {}, r"loader.dataset"),
        ([TensorDataset(torch.zeros(3, 4))], {}, "items of client 0 are not pairs"),
        ({"north": (X, Y), "south": (X[:, :3], Y)}, {}, r"south has inputs of shape \(3,\), north"),
        ([(X, Y), (X, Y[:, None].repeat(2, 1))], {}, r"client 1 has labels of shape \(2,\)"),
        ([(X, ["a"] * 40)], {}, "all labels are 'a'"),
        ([(X, [None, *["a", "b"] * 19, "a"])], {}, "client 0, row 0: the label is missing"),
        ([(X, ["a", "b"] * 20), (X, Y)], {}, "labels of client 1 are numbers"),
        (
            [(X, ["a", "b"] * 20)], {"test": (X, ["a", "c"] * 20)},
            "the test set, row 1: the label 'c' does not occur in training",
        ),
        ([(X, ["a", "b"] * 20)], {"task": "regression"}, "labels are texts"),
        ([(X.astype(str), Y)], {}, "client 0 holds texts"),
        ([([[1], [1, 2]], [0, 1])], {}, "client 0 holds objects"),
        ([(X, Y)], {"label": "sick"}, "label is for DataFrames"),
        ([(X, -Y)], {}, "client 0, row .*: label -1 is negative"),
        ([(X, Y)], {"test": (X * np.nan, Y)}, "the test set has NaN or infinite inputs"),
    ],
)  # fmt: skip
def test_clients_that_cannot_be_read_get_a_sentence(
    clients: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        kedge.fit(net(), clients, **options, **FAST)


def test_a_class_of_the_test_set_alone_is_rejected_unless_the_model_has_it() -> None:
    x, y = samples()
    test = (x[:3], torch.tensor([0, 1, 5]))
    for model in ("mlp(hidden=[4])", nn.Linear(4, 2)):
        with pytest.raises(DataError, match="row 2: the label 5 does not occur in training"):
            kedge.fit(model, halves(x, y), test=test, **FAST)
    found = kedge.fit(nn.Linear(4, 6), halves(x, y), test=test, **FAST).records[0][-1]["per_class"]
    assert found[5] is not None


# -- models -----------------------------------------------------------------------------------


class Returns(nn.Module):
    """A user's module with any kind of output."""

    def __init__(self, convert: Any, outputs: int = 2) -> None:
        super().__init__()
        self.body, self.head, self.convert = nn.Linear(4, 5), nn.Linear(5, outputs), convert

    def forward(self, x: Tensor) -> Any:
        return self.convert(self.head(torch.tanh(self.body(x))))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, "model is the class Linear; give an instance"),
        (lambda: nn.Linear(4, 2), "model is a function; give an nn.Module"),
        (3, "model is of type int"),
        (nn.Linear(4, 2, device="meta"), "has no values yet"),
        (Returns(lambda z: (z, z)), r"returns a tuple of 2; .* such as out\[0\]"),
        (Returns(lambda z: {"score": z}), "returns a dictionary of score"),
        (Returns(lambda z: z[:1]), "for 2 inputs; the batch must be its first axis"),
        (Returns(lambda z: z.argmax(-1)), "returns whole numbers"),
        (Returns(lambda z: z[:, None].repeat(1, 3, 1)), r"returns the shape \[3, 2\]"),
        (nn.Linear(5, 2), r"cannot take inputs of shape \(4,\)"),
        (nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 2)), "array of integers"),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), "ends in a sigmoid; leave it out"),
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), "ends in a softmax; leave it out"),
        (Returns(lambda z: z.softmax(-1)), "ends in a softmax; leave it out"),
    ],
)
def test_models_that_cannot_be_trained_get_a_sentence(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        kedge.fit(model, halves(*samples()), **FAST)


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (3, np.arange(40) % 5, "3 outputs, but the data have 5 classes, since labels go up to 4"),
        (1, np.arange(40) % 3, "one output, but the data have 3 classes"),
        (3, ["a", "b"] * 20, r"3 outputs, but the data have 2 classes \(a, b\)"),
    ],
)
def test_a_wrong_number_of_outputs_gets_a_sentence(outputs: int, labels: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        kedge.fit(net(outputs), [(X, labels)], **FAST)


def test_more_outputs_than_numbered_classes_are_allowed() -> None:
    assert kedge.fit(net(5), [(X, Y)], **FAST).models[0](torch.zeros(1, 4)).shape == (1, 5)


def test_a_dictionary_with_logits_is_a_tensor_of_outputs() -> None:
    x, y = samples()
    runs = []
    for convert in (lambda z: z, lambda z: {"loss": None, "logits": z}):
        torch.manual_seed(0)
        runs.append(kedge.fit(Returns(convert), halves(x, y), "fedprox+moon", **FAST))
    assert last(runs[0])["loss"] == last(runs[1])["loss"]
    assert torch.equal(runs[0].models[0](x), runs[1].models[0](x))


def test_lazy_layers_get_their_shapes() -> None:
    x, y = samples()
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    runs = [kedge.fit(model, halves(x, y), **FAST) for _ in range(2)]
    assert runs[0].models[0][0].weight.shape == (6, 4)
    assert last(runs[0])["loss"] == last(runs[1])["loss"]
    assert isinstance(model[0], nn.LazyLinear)  # the user's own is not changed


def test_a_model_in_double_precision_is_trained_in_single() -> None:
    x, y = samples()
    found = kedge.fit(net().double(), halves(x, y), **FAST)
    assert last(found)["loss"] == last(kedge.fit(net(), halves(x, y), **FAST))["loss"]


# -- one logit --------------------------------------------------------------------------------


def one_and_two() -> tuple[nn.Sequential, nn.Sequential]:
    """The same function with one output and, as [0, z], with two."""
    one, two = net(1), net(2)
    two.load_state_dict(one.state_dict() | {k: two.state_dict()[k] for k in ("2.weight", "2.bias")})
    return one, two


@pytest.mark.parametrize("kind", ["int", "float", "column", "text"])
@pytest.mark.parametrize("squeeze", [False, True])
def test_one_logit_is_trained_by_the_binary_cross_entropy(kind: str, squeeze: bool) -> None:
    """By hand: two full-batch steps of SGD on one client."""
    x, y = samples()
    labels: Any = {
        "int": y, "float": y.float(), "column": y.float()[:, None],
        "text": np.array(["no", "yes"])[y.numpy()],
    }[kind]  # fmt: skip
    module = net(1)
    given = nn.Sequential(*module, nn.Flatten(0)) if squeeze else module
    result = kedge.fit(
        given, [(x, labels)], test=(x, labels), rounds=2, batch=40, lr=0.3, engine="loop"
    )
    own, optim = net(1), None
    optim = torch.optim.SGD(own.parameters(), lr=0.3)
    for _ in range(2):
        optim.zero_grad()
        F.binary_cross_entropy_with_logits(own(x)[:, 0], y.float()).backward()
        optim.step()
    z = own(x)[:, 0].detach()
    torch.testing.assert_close(result.models[0](x).detach()[:, 1], z)
    assert not result.models[0](x)[:, 0].any()
    assert result.metric == "accuracy"
    right = 100 * ((z > 0) == (y > 0)).float().mean().item()
    assert last(result)["accuracy"] == pytest.approx(right)
    expected = F.binary_cross_entropy_with_logits(z, y.float()).item()
    assert last(result)["loss"] == pytest.approx(expected, rel=1e-5)


class Squeezed(nn.Module):
    """Its head has one output, which forward squeezes: the head alone is not the model's end."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.head(torch.tanh(self.body(x)))[:, 0]


def test_one_logit_keeps_the_head_only_where_it_is_the_end() -> None:
    x, y = samples()
    kedge.fit(Returns(lambda z: z, 1), halves(x, y), "moon", **FAST)
    assert kedge.fit(Squeezed(), halves(x, y), **FAST).models[0](x).shape == (40, 2)
    with pytest.raises(ModelError, match="moon needs to know the model's head"):
        kedge.fit(Squeezed(), halves(x, y), "moon", **FAST)


# -- whole numbers ----------------------------------------------------------------------------


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 9, (40, 3), generator=torch.Generator().manual_seed(2))
    return x, (x == 1).any(1).long()


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_token_ids_stay_whole(dtype: torch.dtype) -> None:
    x, y = tokens()
    result = kedge.fit(
        Reader(), halves(x.to(dtype), y), test=(x.to(dtype), y), rounds=30, lr=1.0, steps=5,
        engine="vector",
    )  # fmt: skip
    assert last(result)["accuracy"] == 100.0


def test_whole_numbers_are_real_for_models_that_take_no_others() -> None:
    x, y = tokens()
    runs = [kedge.fit(net(2, 3), halves(v, y), **FAST) for v in (x, x.float())]
    assert last(runs[0])["loss"] == last(runs[1])["loss"]
    kedge.fit("mlp", halves(x, y), **FAST)


def test_parts_that_make_inputs_refuse_token_ids_and_others_run() -> None:
    torch.manual_seed(0)
    module, (x, y), refused = Reader(), tokens(), set()
    for name, part in ((n, parts[n]) for n in parts if not parts[n].needs_batchnorm):
        own = part(**part.tiny | ({"cut": "embed"} if name == "fedimpro" else {}))
        try:
            kedge.fit(module, halves(x, y), own, rounds=1, steps=1, engine="loop")
        except IncompatibleError as error:
            refused.add((name, "makes or mixes inputs" in str(error)))
    names = ["fedbr", "fedcog", "feddf", "fedmix", "fedreg", "flboost", "mixup", "naivemix", "vhl"]
    assert refused == {(name, True) for name in names}


def test_a_named_model_for_token_ids_gets_a_sentence() -> None:
    assert "mlp" in models
    x, y = tokens()
    with pytest.raises(ModelError, match="array of integers"):
        kedge.fit(Reader(), halves(x.float(), y), **FAST)


# -- DataFrames -------------------------------------------------------------------------------


def hospitals(holes: bool = False) -> dict[str, Any]:
    pd = pytest.importorskip("pandas")
    g, frames = np.random.default_rng(0), {}
    for name in ("north", "south", "east"):
        age, ward = g.normal(60, 10, 60), g.choice(["a", "b"], 60)
        sick = np.where(age + 5 * (ward == "a") + g.normal(0, 2, 60) > 62, "yes", "no")
        frames[name] = pd.DataFrame({"age": age, "ward": ward, "sick": sick})
        if holes:
            frames[name].loc[3, "age"] = np.nan
    return frames


def test_frames_are_trained_on_in_one_line() -> None:
    result = kedge.fit(clients=hospitals(), label="sick", method="scaffold", rounds=15, lr=0.5)
    assert last(result)["accuracy"] > 80


def test_frames_take_missing_drop_and_a_test_set() -> None:
    frames = hospitals(holes=True)
    with pytest.raises(DataError, match="missing"):
        kedge.fit("linear", frames, label="sick", **FAST)
    result = kedge.fit(
        "linear", frames, label="sick", missing="mean", drop="ward", test=hospitals()["north"],
        **FAST,
    )  # fmt: skip
    assert result.models[0].head.weight.shape == (2, 1)


def test_frames_and_an_own_model_with_lazy_layers() -> None:
    model = nn.Sequential(
        nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1)
    )  # one logit, texts as labels
    result = kedge.fit(model, hospitals(), label="sick", **FAST)
    assert result.models[0][0].weight.shape[0] == 8


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (lambda f: f, {}, "name the label, one of age, ward, sick"),
        (lambda f: f | {"west": (X, Y)}, {"label": "sick"}, "west is no DataFrame"),
        (lambda f: f["north"], {"label": "sick"}, "give one for each client"),
        (lambda f: f, {"label": "sick", "test": (X, Y)}, "the test set is no DataFrame"),
    ],
)
def test_frames_that_cannot_be_read_get_a_sentence(
    clients: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        kedge.fit(net(), clients(hospitals()), **options, **FAST)


# -- loss, metric, class weights --------------------------------------------------------------


def test_an_own_loss_is_trained_by() -> None:
    """A loss of twice the cross-entropy is the cross-entropy at twice the learning rate."""
    x, y = samples()

    def twice(logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * F.cross_entropy(logits, labels, reduction="none")

    own = kedge.fit(net(), halves(x, y), loss=twice, lr=0.1, **FAST).models[0]
    plain = kedge.fit(net(), halves(x, y), lr=0.2, **FAST).models[0]
    torch.testing.assert_close(own(x), plain(x))


def test_an_own_metric_is_the_headline() -> None:
    x, y = samples()

    def brier(y_true: Any, y_score: Any) -> float:
        return float(((y_true - y_score) ** 2).mean())

    brier.higher_is_better = False  # type: ignore[attr-defined]
    result = kedge.fit(net(), halves(x, y), test=(x, y), metric=brier, **FAST)
    probs = torch.softmax(result.models[0](x), -1)[:, 1].detach().numpy()
    assert result.metric == "brier"
    assert result.last.mean == pytest.approx(brier(y.numpy(), probs), rel=1e-4)
    assert kedge.fit(net(1), halves(x, y), metric="auroc", **FAST).metric == "auroc"


def test_token_ids_beyond_the_embedding_get_a_sentence() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randint(0, 5, (20, 2)), torch.arange(20) % 2
    with pytest.raises(ModelError, match=r"rows 0 to 4, the inputs go from 10 to 1\d"):
        kedge.fit(model, [(x % 2 * 5 + 10, y)], **FAST)
    x[-1] = -1
    with pytest.raises(ModelError, match=r"token ids, from -1 to 4.*rows of its embeddings: 5"):
        kedge.fit(model, [(x, y)], **FAST)


def test_the_worst_client_by_an_own_metric_that_is_to_be_small(tmp_path: Path) -> None:
    def brier(y_true: Any, y_score: Any) -> float:
        return float(((y_true - y_score) ** 2).mean())

    brier.higher_is_better = False  # type: ignore[attr-defined]
    out = tmp_path / "run"
    kedge.fit(net(), halves(*samples()), metric=brier, split="holdout(0.3)", out=out, **FAST)
    scores = json.loads((out / "seed-0/scores.json").read_text())
    values = [client["brier"] for client in scores["clients"].values()]
    assert len(set(values)) > 1
    assert scores["over_clients"]["brier"]["worst"] == max(values)


def test_an_own_metric_that_cannot_take_the_test_set_is_an_error() -> None:
    def decisions_only(y_true: Any, y_score: Any) -> float:
        raise ValueError("cannot take continuous scores")

    with pytest.raises(KedgeError, match="decisions_only failed: ValueError: cannot take"):
        kedge.fit(net(), halves(*samples()), metric=decisions_only, **FAST)


def test_class_weights_by_name_by_number_and_in_words() -> None:
    x, y = samples()
    texts = np.array(["no", "yes"])[y.numpy()]
    ways: list[Any] = [{"yes": 5}, [1, 5], "1,5", "no=1,yes=5"]
    numbered = [kedge.fit(net(), [(x, y)], class_weights=w, **FAST) for w in ({1: 5}, "1=5")]
    assert all(torch.equal(run.models[0](x), numbered[0].models[0](x)) for run in numbered)
    nets = [kedge.fit(net(), [(x, texts)], class_weights=w, **FAST).models[0] for w in ways]
    assert all(torch.equal(nets[0](x), other(x)) for other in nets[1:])
    assert not torch.equal(nets[0](x), kedge.fit(net(), [(x, texts)], **FAST).models[0](x))


# -- saved models -----------------------------------------------------------------------------


def given_one_logit() -> nn.Module:
    return Returns(lambda z: {"logits": z[:, 0]}, 1)


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda: net(1), False),
        (lambda: nn.Sequential(nn.LazyLinear(1)), False),
        (given_one_logit, True),
    ],
    ids=["layers", "lazy", "class"],
)
def test_a_saved_model_with_one_logit_predicts_two_classes_by_name(
    tmp_path: Any, make: Any, needs: bool
) -> None:
    x, y = samples()
    texts = np.array(["well", "ill"])[y.numpy()]
    result = kedge.fit(make(), halves(x, texts), out=tmp_path / "run", **FAST)
    model = kedge.load(tmp_path / "run", model=make if needs else None).model
    expected = torch.softmax(result.models[0](x), -1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(x.numpy()), expected, atol=1e-6)
    names = np.array(["ill", "well"])[expected.argmax(1)]
    assert (model.predict(x) == names).all()


def test_a_saved_model_of_token_ids_takes_token_ids(tmp_path: Any) -> None:
    x, y = tokens()
    result = kedge.fit(Reader(), halves(x, y), out=tmp_path / "run", **FAST)
    model = kedge.load(tmp_path / "run", model=Reader).model
    expected = torch.softmax(result.models[0](x), -1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(x.numpy()), expected, atol=1e-6)


def test_personal_models_have_the_frozen_weights_too(tmp_path: Any) -> None:
    x, y = samples()
    module = net()
    module[0].requires_grad_(False)
    result = kedge.fit(module, halves(x, y), "fedper", out=tmp_path / "run", **FAST)
    model = kedge.load(tmp_path / "run").personal("client 1")
    expected = torch.softmax(result.personal[0][1](x), -1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(x.numpy()), expected, atol=1e-6)


def test_frames_are_predicted_as_they_were_trained_on(tmp_path: Any) -> None:
    frames = hospitals()
    result = kedge.fit(clients=frames, label="sick", out=tmp_path / "run", rounds=3, lr=0.5)
    model = kedge.load(tmp_path / "run").model
    assert set(model.predict(frames["north"].drop(columns="sick"))) <= {"yes", "no"}
    assert result.models[0](torch.zeros(1, 3)).shape == (1, 2)
