"""Models of Hugging Face, built from tiny configurations in a folder; no network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import Classification
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.errors import GrammarError, KedgeError, ModelError
from kedge.models import build, read
from kedge.models.hf import LoRA, add_lora
from kedge.sim.clients import unlike
from kedge.sim.simulation import Simulation

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(
        vocab_size=20, intermediate_size=16, max_position_embeddings=8, **SMALL
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=8
    ),
    "vit": lambda: transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, intermediate_size=16, **SMALL
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pretrained model of each kind, without a classifier."""
    found = {}
    for name, make in CONFIGS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModel.from_config(make()).save_pretrained(found[name])
    return found


def data(name: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    if name == "vit":
        x = torch.rand(24, 1, 8, 8, generator=g)
        return x, (x[:, 0, 0, 0] > 0.5).long()
    x = torch.randint(1, 20, (24, 6), generator=g)
    x[:8, 4:] = 0  # padding
    return x, (x[:, 0] > 9).long()


def federation(name: str) -> Federation:
    x, y = data(name)
    return Federation(
        x, y, [range(10), range(10, 24)], Classification(2), (x, y), dtype=torch.float64,
        tokens=name != "vit",
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", ["", "(lora=2)"])
def test_both_engines_train_the_same(name: str, options: str, folders: dict[str, Path]) -> None:
    x, _ = data(name)
    torch.manual_seed(3)
    module = build(f"hf:{folders[name]}{options}", tuple(x.shape[1:]), 2)
    runs = []
    for engine in ("loop", "vector"):
        work = LocalWork(batch=4, steps=2)
        run = Simulation(
            federation(name), module, optim=SGD(lr=0.5), work=work, engine=engine, seed=1
        )
        run.run_round()
        runs.append(run)
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-12
    moved = [
        not torch.equal(w, runs[0].bound.initial.params[n])
        for n, w in runs[0].weights.params.items()
    ]
    assert sum(moved) > len(moved) / 2


def test_padding_is_masked_in_the_way_that_all_clients_at_once_allow(
    folders: dict[str, Path],
) -> None:
    module = build(f"hf:{folders['bert']}", (6,), 2).eval()
    assert module.wide_mask
    x = data("bert")[0]
    longer = torch.cat([x[:8, :4], torch.zeros(8, 2).long()], 1)
    torch.testing.assert_close(module(longer), module(x[:8, :4]))
    assert not torch.allclose(module(longer), module(longer.clamp_min(1)))


def test_pretrained_weights_are_kept_and_the_classifier_depends_on_the_seed(
    folders: dict[str, Path],
) -> None:
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(build(f"hf:{folders['bert']}", (6,), 3).state_dict())
    base = transformers.AutoModel.from_pretrained(folders["bert"]).state_dict()
    for n, w in base.items():
        if "pooler" not in n:
            assert torch.equal(made[0][f"net.bert.{n}"], w), n
    heads = [m["net.classifier.weight"] for m in made]
    assert heads[0].shape == (3, 8)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_lora_sends_its_updates_and_the_classifier_alone(folders: dict[str, Path]) -> None:
    module = build(f"hf:{folders['bert']}(lora=2)", (6,), 2)
    model = Model(module)
    prefix = "net.bert.encoder.layer.0.attention.self."
    expected = {f"{prefix}{p}.{m}" for p in ("query", "value") for m in "ab"}
    assert set(model.names) == expected | {"net.classifier.weight", "net.classifier.bias"}
    x, y = data("bert")
    result = kedge.fit(
        f"hf:{folders['bert']}(lora=2)",
        [(x[:12], y[:12]), (x[12:], y[12:])],
        rounds=1,
        engine="loop",
    )
    numbers = 4 * 2 * 8 + 8 * 2 + 2
    assert result.records[0][0]["mb_up"] == 2 * 4 * numbers / 1e6
    base = module.state_dict()
    trained = result.models[0].state_dict()
    for name, value in base.items():
        if ".base." in name or "embeddings" in name:
            assert torch.equal(trained[name], value), name


def test_the_classifier_alone_may_be_trained(folders: dict[str, Path]) -> None:
    module = build(f"hf:{folders['vit']}(train=head)", (1, 8, 8), 2)
    assert Model(module).names == ["net.classifier.weight", "net.classifier.bias"]
    assert Model(module).head_name == "net.classifier"


def test_a_command_takes_it(folders: dict[str, Path], tmp_path: Path) -> None:
    import numpy as np

    x, y = data("distilbert")
    np.savez(tmp_path / "tokens.npz", x_train=x.numpy(), y_train=y.numpy())
    folder = folders["distilbert"]
    own: dict[str, Any] = {
        "clients": 2, "rounds": 1, "seeds": (0,), "engine": "loop", "partition": "iid",
    }  # fmt: skip
    result = kedge.run(
        "fedavg", data=f"{tmp_path}/tokens.npz(kind=tokens)", model=f"hf:{folder}(lora=1)", **own
    )
    assert result.records[0][0]["loss"] > 0
    with pytest.raises(ModelError, match="kind=tokens"):
        kedge.run("fedavg", data=f"{tmp_path}/tokens.npz", model=f"hf:{folder}", **own)
    with pytest.raises(ModelError, match="no default model for token ids"):
        kedge.run("fedavg", data=f"{tmp_path}/tokens.npz(kind=tokens)", **own)
    with pytest.raises(ModelError, match="cannot take whole-number inputs"):
        kedge.run("fedavg", data=f"{tmp_path}/tokens.npz(kind=tokens)", model="mlp", **own)


@pytest.mark.parametrize(("name", "options"), [("distilbert", "(lora=2)"), ("vit", "")])
def test_a_saved_run_predicts_without_the_folder_of_the_model(
    name: str, options: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(folders[name], tmp_path / "pretrained")
    x, y = data(name)
    clients = [(x[k::2].numpy(), y[k::2].numpy()) for k in range(2)]
    text, out = f"hf:{source}{options}", tmp_path / "run"
    result = kedge.fit(text, clients, rounds=1, seeds=(0,), engine="loop", out=out)
    shutil.rmtree(source)
    with torch.no_grad():
        expected = result.models[0].eval()(x).softmax(-1)
    found = torch.as_tensor(kedge.load(out).model.predict_proba(x.numpy()))
    assert torch.allclose(found, expected, atol=1e-6)


def test_low_rank_updates_by_hand() -> None:
    base = nn.Linear(4, 3)
    net = nn.Sequential()
    net.add_module("query", base)
    net.add_module("other", nn.Linear(3, 3))
    x, before = torch.randn(5, 4), base.weight.clone()
    expected = net(x)
    add_lora(net, 2, 8.0)
    layer = net.query
    assert isinstance(layer, LoRA)
    assert torch.equal(net(x), expected)  # B is zero at first
    with torch.no_grad():
        layer.b.normal_()
    whole = before + 4.0 * layer.b @ layer.a
    torch.testing.assert_close(layer(x), x @ whole.T + base.bias)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["query.a", "query.b"]


def test_frozen_parameters_are_neither_trained_nor_sent() -> None:
    x, y = torch.randn(20, 4), torch.randint(0, 2, (20,))
    model = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 2))
    before = model[0].requires_grad_(False).weight.clone()
    for engine in ("loop", "vector"):
        result = kedge.fit(model, [(x[:10], y[:10]), (x[10:], y[10:])], rounds=1, engine=engine)
        assert result.records[0][0]["mb_up"] == 2 * 4 * 102 / 1e6
        assert torch.equal(result.models[0][0].weight, before)
        assert not torch.equal(result.models[0][1].weight, model[1].weight)
    assert Model(model).weights().buffers == {}


def test_seeds_with_other_frozen_weights_do_not_train_together() -> None:
    problem = federation("vit")
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3).requires_grad_(False), nn.Linear(3, 2))
        runs.append(Simulation(problem, net))
    first, same, other = (run.clients for run in runs)
    assert unlike(first, same) == ""
    assert unlike(first, other) == "their frozen weights"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:", "names no model"),
        ("hf:x(lora=-1)", "lora = -1"),
        ("hf:x(rank=2)", "no option 'rank'|rank"),
        ("hf:/no/such/folder", "there is no folder /no/such/folder"),
        ("hf:EMPTY", "holds no model for classification"),
        ("hf:BERT(lora=2, targets=[q])", "no linear layer is called q; name some of: dense, key"),
    ],
)
def test_wrong_models_get_a_sentence(
    text: str, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    text = text.replace("EMPTY", str(tmp_path)).replace("BERT", str(folders["bert"]))
    with pytest.raises((GrammarError, KedgeError), match=message):
        read(text)((6,), 2)


def test_too_long_texts_and_unknown_tokens_get_a_sentence(folders: dict[str, Path]) -> None:
    name = f"hf:{folders['distilbert']}"
    with pytest.raises(ModelError, match=r"cannot take 9 tokens \(it has positions for 8\)"):
        build(name, (9,), 2)
    x, y = data("distilbert")
    x[-1, 0] = 33  # beyond the vocabulary, in a row that no first look sees
    with pytest.raises(ModelError, match=r"token ids, from 0 to 33.*embeddings: 20, 8\)"):
        kedge.fit(name, [(x.numpy(), y.numpy())], rounds=1, seeds=(0,), engine="loop")


def test_a_name_that_is_not_here_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = transformers.AutoModelForSequenceClassification
    for text, expected in (
        ("We couldn't connect to 'https://huggingface.co'", "Hugging Face cannot be reached"),
        ("no/such is not a valid model identifier", "cannot be loaded from Hugging Face"),
    ):

        def fail(*_: Any, text: str = text, **__: Any) -> None:
            raise OSError(text)

        monkeypatch.setattr(auto, "from_pretrained", fail)
        with pytest.raises(ModelError, match=expected):
            build("hf:no/such", (6,), 2)
    with pytest.raises(ModelError, match="not inputs of shape"):
        build("hf:no/such", (6, 2), 2)


def test_without_the_library_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'kedge\[hf\]'"):
        build("hf:any", (6,), 2)
