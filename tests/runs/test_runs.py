"""Runs from Python: results, comparison, own data, folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.errors import DataError, FieldError, KedgeError
from kedge.history.compare import gain_over
from kedge.history.run import Stat

FAST = {"clients": 5, "rounds": 3, "seeds": (0, 1)}


def test_run_gives_arrays_summary_and_models() -> None:
    result = kedge.run("scaffold+fedprox(mu=0.01)", data="digits", target=10.0, **FAST)
    assert result.array().shape == (2, 3)
    assert result.rounds.tolist() == [1, 2, 3]
    assert result.last.n == 2
    assert result.last.values == tuple(result.array()[:, -1])
    assert result.best.mean >= result.last.mean
    assert result.rounds_to(10.0)[0] is not None
    assert result.rounds_to(100.5) == [None, None]
    assert result.array()[:, -1].mean() > 25
    record = result.records[0][-1]
    assert set(record) >= {
        "round", "accuracy", "loss", "train_loss", "divergence", "per_class", "mb_up", "mb_down",
        "seconds",
    }  # fmt: skip
    assert len(record["per_class"]) == 10
    # SCAFFOLD sends twice the model both ways; 4 bytes a number, 5 clients
    numbers = sum(p.numel() for p in result.models[0].parameters())
    assert record["mb_up"] == pytest.approx(2 * numbers * 4 * 5 / 1e6)
    assert record["mb_down"] == pytest.approx(2 * numbers * 4 * 5 / 1e6)
    assert isinstance(result.models[1], nn.Module)


def test_json_has_what_it_promises() -> None:
    found = json.loads(kedge.run("fedavg", target=50.0, **FAST).to_json())
    assert set(found) == {
        "method", "config", "partition_hash", "seeds", "metric", "higher_is_better", "last",
        "best", "top5_mean", "rounds_to", "mb_up", "mb_down", "seconds", "engine", "device",
        "headline", "global_last", "beside", "diverged", "best_on",
    }  # fmt: skip
    assert set(found["last"]) == {"mean", "sd", "n", "values"}
    assert found["metric"] == "accuracy"
    assert found["higher_is_better"] is True
    assert found["last"]["mean"] > 1  # in percent
    assert len(found["partition_hash"]) == 2


def test_runs_repeat_and_engines_agree() -> None:
    one = kedge.run("scaffold", **FAST, engine="loop")
    again = kedge.run("scaffold", **FAST, engine="loop")
    other = kedge.run("scaffold", **FAST, engine="vector")
    assert np.array_equal(one.array("loss"), again.array("loss"))
    np.testing.assert_allclose(one.array("loss"), other.array("loss"), rtol=2e-5)


def test_compare_starts_everybody_equally() -> None:
    results = kedge.compare(["fedavg", "fedprox(mu=0)", "scaffold"], **FAST)
    assert len({tuple(r.partition_hash) for r in results}) == 1
    # mu = 0 is FedAvg bit for bit only if batches, cohorts and first weights are the same
    assert np.array_equal(results[0].array("loss"), results[1].array("loss"))
    difference = gain_over(results[2], results[0])
    assert difference is not None
    expected = results[2].array()[:, -1] - results[0].array()[:, -1]
    assert difference.mean == pytest.approx(expected.mean(), abs=1e-12)


def test_interval_by_hand() -> None:
    """1, 2, 3: mean 2, sd 1, t(2) = 4.30265, so 2 ± 4.30265/sqrt(3) = 2 ± 2.48414."""
    low, high = Stat.of([1, 2, 3]).interval()
    assert low == pytest.approx(2 - 2.48414, abs=1e-5)
    assert high == pytest.approx(2 + 2.48414, abs=1e-5)
    # 15 times 0 and 15 times 2: sd = sqrt(30/29), t(29) = 2.04523; the normal's 1.96 is too small
    low, high = Stat.of([0, 2] * 15).interval()
    assert high - 1 == pytest.approx(2.04523 * (30 / 29) ** 0.5 / 30**0.5, rel=1e-5)
    assert low == pytest.approx(2 - high)
    assert Stat.of([5]).interval() is None
    assert str(Stat.of([1, 2, 3])) == "2.00±1.00"


def clients_of(rng: np.random.Generator, task: str = "classification") -> list:
    pairs = []
    for k in range(4):
        x = rng.normal(size=(30 + 10 * k, 6)).astype("float32")
        score = x[:, 0] - x[:, 1] + 0.3 * k
        y = {"classification": (score > 0).astype(int), "regression": score[:, None]}.get(task)
        if task == "multilabel":
            y = np.stack([score > 0, x[:, 2] > 0, x[:, 3] > 0], 1).astype("float32")
        pairs.append((x, y))
    return pairs


@pytest.mark.parametrize("task", ["classification", "regression", "multilabel"])
def test_fit_ones_own_model_and_data(task: str) -> None:
    outputs = {"classification": 2, "regression": 1, "multilabel": 3}[task]
    lr = 0.05 if task == "regression" else 0.5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))
    clients = clients_of(np.random.default_rng(0), task)
    result = kedge.fit(model, clients, "fedprox", rounds=15, lr=lr, personal=True)
    losses = result.array("loss")[0]
    assert losses[-1] < 0.8 * losses[0]
    assert result.metric == {"classification": "accuracy", "regression": "rmse"}.get(task, "f1")
    last = result.records[0][-1]
    assert len(last["per_client"]) == len(last["per_personal"]) == 4
    worst = min if result.higher_is_better else max
    assert last["client_worst"] == worst(last["per_client"])
    assert len(result.personal[0]) == 4
    assert result.models[0](torch.zeros(2, 6)).shape == (2, outputs)


def test_fit_with_a_test_set_and_a_personal_head() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    clients = clients_of(np.random.default_rng(0))
    result = kedge.fit(model, clients, "fedrep", test=clients[0], rounds=3, personal=True)
    heads = [m[2].weight for m in result.personal[0]]
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(result.models[0][2].weight, model[2].weight)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "there are no clients"),
        ([(np.zeros((3, 6)), np.zeros(2, int))], "client 0 has 3 inputs but 2 labels"),
        ([(np.zeros((0, 6)), np.zeros(0, int))], "client 0 has no samples"),
        ([np.zeros((3, 6))], "client 0 is not a pair"),
        ([(np.full((3, 6), np.nan), np.zeros(3, int))], "client 0 has NaN or infinite inputs"),
        (
            [(np.zeros((3, 6)), np.zeros(3, int)), (np.zeros((3, 5)), np.zeros(3, int))],
            r"client 1 has inputs of shape \(5,\), client 0 of \(6,\)",
        ),
    ],
)
def test_fit_refuses_bad_data_by_message(clients: list, message: str) -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    with pytest.raises(DataError, match=message):
        kedge.fit(model, clients, rounds=1)


def test_a_folder_holds_everything_and_gives_the_model_back(tmp_path: Path) -> None:
    result = kedge.run("fedavg", out=tmp_path / "run", **FAST)
    names = {p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*.*")}
    assert names >= {
        "config.toml", "environment.json", "log.txt", "result.json", "seed-0/partition.json",
        "seed-0/metrics.jsonl", "seed-0/checkpoint.safetensors", "seed-0/model.safetensors",
        "seed-1/metrics.jsonl",
    }  # fmt: skip
    assert not [n for n in names if n.endswith((".part", ".pkl", ".pt"))]
    model = kedge.load(tmp_path / "run", seed=1).model.module
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(model(x), result.models[1](x))
    with pytest.raises(KedgeError, match="holds a run already. Continue it with --resume"):
        kedge.run("fedavg", out=tmp_path / "run", **FAST)


def test_frame_is_a_table_where_pandas_is(tmp_path: Path) -> None:
    result = kedge.run("fedavg", **FAST)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install pandas"):
            result.frame()
    else:
        assert len(result.frame()) == 6


def test_eval_every_and_angles_and_holdout() -> None:
    result = kedge.run(
        "fedavg", clients=5, rounds=4, seeds=(0,), eval_every=2, angles=(0.0, 90.0),
        split="holdout(0.3)", augment="crop(1)+flip",
    )  # fmt: skip
    assert result.rounds.tolist() == [2, 4]
    assert len(result.records[0]) == 4
    assert "accuracy" not in result.records[0][0]
    last = result.records[0][-1]
    assert len(last["per_client"]) == 5


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(FieldError, match="torch sees no GPU here; use device = cpu"):
        kedge.run(device="cuda", rounds=1)


def test_too_many_clients_and_unknown_data() -> None:
    with pytest.raises(KedgeError, match="more clients than samples"):
        kedge.run(clients=5000, rounds=1, partition="iid")
    with pytest.raises(KedgeError, match="digitz"):
        kedge.run(data="digitz", rounds=1)


def test_centralised_training_is_one_client_with_everything() -> None:
    result = kedge.run("fedavg", partition="central", rounds=2, seeds=(0,))
    record = result.records[0][-1]
    assert record["divergence"] == pytest.approx(0, abs=1e-3)
    with pytest.raises(KedgeError, match="central .*write clients = 1"):
        kedge.run("fedavg", partition="central", clients=3, rounds=1)


@pytest.mark.parametrize(
    ("method", "ran"),
    [(None, "fedprox(mu=0.5)"), ("fedavg", "fedavg"), (kedge.parse("fedavg"), "fedavg")],
)
def test_an_explicit_method_overrides_the_file_even_fedavg(
    method: kedge.Method | str | None, ran: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "fedprox(mu=0.5)"\nclients = 3\nrounds = 1\nseeds = [0]\n')
    assert kedge.run(method, config=file).config.method == ran
    swept = kedge.sweep(method, {"lr": [0.1, 0.2]}, config=file, engine="loop")
    assert [r.config.method for r in swept] == [ran, ran]


def test_without_a_method_and_a_file_fedavg_is_run() -> None:
    assert kedge.run(clients=3, rounds=1, seeds=(0,)).config.method == "fedavg"
