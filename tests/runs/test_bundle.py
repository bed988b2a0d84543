"""The model leaves the run whole: what is loaded from a folder predicts from raw inputs, exactly
as the run tested it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import kedge
from kedge.core.task import Classification, register_task, tasks
from kedge.data.datasets import load as load_data
from kedge.errors import DataError, KedgeError, ModelError
from kedge.runs.build import federation_of
from kedge.saved.architecture import describe, rebuild
from kedge.saved.evaluate import evaluate_own, own_dataset

RNG = np.random.default_rng(0)
FAST: dict[str, Any] = {"rounds": 2, "seeds": [0], "clients": 3, "partition": "iid", "batch": 16}


def pictures(n: int, shape: tuple[int, ...], classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """8-bit images whose brightness tells their class."""
    y = np.arange(n) % classes
    x = RNG.integers(0, 60, (n, *shape)) + 70 * y.reshape(-1, *(1,) * len(shape))
    return x.astype(np.uint8), y


def write_npz(path: Path, shape: tuple[int, ...] = (16, 16, 3)) -> dict[str, np.ndarray]:
    x, y = pictures(90, shape)
    arrays = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
    np.savez(path, **arrays, classes=np.array(["low", "mid", "high"]))
    return arrays


def write_pets(folder: Path, size: tuple[int, int] = (10, 9)) -> Path:
    for split, n in (("train", 12), ("test", 7)):
        for c, name in enumerate(("cat", "dog")):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in range(n):
                pixels = RNG.integers(0, 150, (*size[::-1], 3)) + 60 * c
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
    return folder


def patients(n: int, shift: float = 0.0) -> pd.DataFrame:
    age, sex = RNG.normal(60 + shift, 10, n).round(1), RNG.choice(["f", "m"], n)
    score = (age - 60) / 10 + (sex == "m") + RNG.normal(0, 0.5, n)
    frame = pd.DataFrame({"id": [f"P{i}" for i in range(n)], "age": age, "sex": sex})
    frame["weight"] = RNG.normal(70, 9, n).round(0)
    frame.loc[::7, "weight"] = np.nan
    return frame.assign(outcome=np.where(score > 1.2, "sick", "well"))


def write_hospitals(folder: Path) -> Path:
    folder.mkdir()
    for k in range(3):
        patients(40, k).to_csv(folder / f"h{k}.csv", index=False)
    return folder


# -- exact ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_predictions_on_raw_digits_have_the_reported_accuracy(engine: str, tmp_path: Path) -> None:
    settings = FAST | {"seeds": [0, 3], "engine": engine}
    result = kedge.run("scaffold", out=tmp_path / "run", **settings)
    digits = load_data("digits")
    for i, seed in enumerate((0, 3)):
        model = kedge.load(tmp_path / "run", seed=seed).model
        right = model.predict(digits.x_test) == digits.y_test
        assert 100.0 * right.sum() / len(right) == result.records[i][-1]["accuracy"]
    parts = [model.predict_proba(digits.x_test[i : i + 7]) for i in range(0, 359, 7)]
    np.testing.assert_allclose(np.concatenate(parts), model.predict_proba(digits.x_test), atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_8_bit_colour_images_with_batchnorm(engine: str, tmp_path: Path) -> None:
    """Channels last, as in BloodMNIST: without the standardisation the model is useless."""
    arrays = write_npz(tmp_path / "blood.npz")
    settings = FAST | {"data": str(tmp_path / "blood.npz"), "model": "lenet5(norm=bn)"}
    settings |= {"rounds": 4, "lr": 0.05, "momentum": 0.9}
    result = kedge.run("fedavg", out=tmp_path / "run", engine=engine, **settings)
    assert result.last.mean > 60
    run = kedge.load(tmp_path / "run")
    names = np.array(["low", "mid", "high"])
    for raw in (
        arrays["x_test"],
        arrays["x_test"].transpose(0, 3, 1, 2),
        torch.tensor(arrays["x_test"]),
        arrays["x_test"].astype(np.int64),
        tmp_path / "blood.npz",
        [Image.fromarray(x) for x in arrays["x_test"]],
    ):
        right = run.model.predict(raw) == names[arrays["y_test"]]
        assert 100.0 * right.sum() / len(right) == result.records[0][-1]["accuracy"]
    batch = torch.tensor(arrays["x_test"]).permute(0, 3, 1, 2)
    unscaled = run.model.module(batch.float()).softmax(1).detach().numpy()
    assert np.abs(unscaled - run.model.predict_proba(arrays["x_test"])).max() > 0.01


@pytest.mark.parametrize("options", ["", "(size=8)", "(size=8, channels=1)"])
def test_a_folder_of_images(options: str, tmp_path: Path) -> None:
    pets = write_pets(tmp_path / "pets")
    result = kedge.run("fedavg", data=f"{pets}{options}", out=tmp_path / "run", **FAST)
    model = kedge.load(tmp_path / "run").model
    files = sorted((pets / "test").rglob("*.png"))
    right = model.predict(files) == [file.parent.name for file in files]
    assert 100.0 * right.sum() / len(right) == result.records[0][-1]["accuracy"]
    frame = model.frame(pets)
    assert list(frame) == ["id", "prediction", "p_cat", "p_dog"]
    assert len(frame) == 14
    odd = Image.open(files[0]).convert("P").resize((30, 30))
    if options:  # new images are scaled as those of the training were
        assert model.predict_proba(odd).shape == (1, 2)
    else:
        with pytest.raises(DataError, match="30x30 pixels; the model takes 10x9"):
            model.predict(odd)


def test_tables_in_any_order_of_columns(tmp_path: Path) -> None:
    hospitals = write_hospitals(tmp_path / "hospitals")
    data = f"{hospitals}(label=outcome, missing=mean, id=id)"
    settings = FAST | {"clients": 0, "partition": "silos", "split": "holdout(0.3)"}
    result = kedge.run("fedavg", data=data, out=tmp_path / "run", **settings)
    run = kedge.load(tmp_path / "run")
    federation = federation_of(run.config, own_dataset(run.bundle, run.config), 0)
    own = evaluate_own(run.model, federation)
    reported = result.records[0][-1]["accuracy"]
    assert own["global"]["accuracy"] == pytest.approx(reported, rel=1e-15)
    assert list(own["clients"]) == ["h0", "h1", "h2"]
    new = patients(30)
    new.to_csv(tmp_path / "new.csv", index=False)
    shuffled = new[["sex", "outcome", "weight", "age"]]
    expected = run.model.predict_proba(tmp_path / "new.csv")
    np.testing.assert_array_equal(expected, run.model.predict_proba(shuffled))
    columns = shuffled.drop(columns="outcome").to_dict("list")
    np.testing.assert_array_equal(expected, run.model.predict_proba(columns))
    frame = run.model.frame(tmp_path / "new.csv")
    assert list(frame["id"]) == list(new["id"])
    assert set(frame["prediction"]) <= {"sick", "well"}
    with pytest.raises(DataError, match="no column 'age'"):
        run.model.predict(new.drop(columns="age"))


def test_personal_models_are_saved_by_client(tmp_path: Path) -> None:
    settings = FAST | {"personal": True, "split": "holdout(0.2)", "model": "mlp(hidden=[8])"}
    result = kedge.run("fedper", out=tmp_path / "run", **settings)
    run = kedge.load(tmp_path / "run")
    assert run.clients == ("client 0", "client 1", "client 2")
    for k in range(3):
        for client in (k, f"client {k}"):
            state = run.personal(client).module.state_dict()
            assert all(
                torch.equal(state[n], v) for n, v in result.personal[0][k].state_dict().items()
            )
    with pytest.raises(KedgeError, match="no client 'client 7'. Did you mean"):
        run.personal("client 7")
    with pytest.raises(KedgeError, match="numbered 0 to 2"):
        run.personal(3)


def test_the_best_model_beside_the_last(tmp_path: Path) -> None:
    for name, rounds in (("run", 3), ("better", 1)):
        kedge.run("fedavg", out=tmp_path / name, **FAST | {"rounds": rounds})
    seed = tmp_path / "run" / "seed-0"
    shutil.copy(tmp_path / "better" / "seed-0" / "model.safetensors", seed / "best.safetensors")
    x = load_data("digits").x_test
    found = kedge.load(tmp_path / "run", which="best").model.predict_proba(x)
    expected = kedge.load(tmp_path / "better").model.predict_proba(x)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, kedge.load(tmp_path / "run").model.predict_proba(x))


# -- runs by kedge.fit ------------------------------------------------------------------------


class Net(nn.Module):
    """A class that can be built without arguments."""

    def __init__(self, width: int = 6, act: str = "relu") -> None:
        super().__init__()
        self.body, self.head, self.act = nn.Linear(5, width), nn.Linear(width, 2), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(torch, self.act)(self.body(x)))


class Needy(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


def fitted(module: nn.Module, folder: Path, x: Any = None, y: Any = None, **more: Any) -> Any:
    x = RNG.normal(2, 3, (40, 5)).astype(np.float32) if x is None else x
    y = RNG.integers(0, 2, 40) if y is None else y
    clients = [(x[:20], y[:20]), (x[20:], y[20:])]
    result = kedge.fit(module, clients, test=(x, y), rounds=2, out=folder, **more)
    return result, x, y


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Flatten(), nn.Linear(5, 2)),
    ],
)
def test_a_users_module_is_built_again(make: Any, tmp_path: Path) -> None:
    result, x, y = fitted(make(), tmp_path / "run")
    model = kedge.load(tmp_path / "run").model
    assert 100.0 * (model.predict(x) == y).mean() == pytest.approx(
        result.records[0][-1]["accuracy"], abs=1e-12
    )
    expected = result.models[0](torch.tensor(x)).softmax(1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(x), expected, atol=1e-6)
    assert model.predict(x[0]).shape == (1,)


def test_a_module_that_needs_arguments_is_given(tmp_path: Path) -> None:
    _, x, _ = fitted(Needy(3), tmp_path / "run")
    run = kedge.load(tmp_path / "run")
    with pytest.raises(
        ModelError, match=r"made with width; give the module: kedge.load\(FOLDER, mo"
    ):
        _ = run.model
    for given in (Needy(3), lambda: Needy(3)):
        assert kedge.load(tmp_path / "run", model=given).model.predict(x).shape == (40,)
    with pytest.raises(ModelError, match="do not fit the model"):
        _ = kedge.load(tmp_path / "run", model=Needy(4)).model


def test_a_module_with_other_options_is_noticed(tmp_path: Path) -> None:
    """The weights fit the class as it is by default, but its outputs are others."""
    fitted(Net(act="tanh"), tmp_path / "run")
    with pytest.raises(ModelError, match="gives other outputs"):
        _ = kedge.load(tmp_path / "run").model
    assert kedge.load(tmp_path / "run", model=Net(act="tanh")).model is not None


def test_numbers_and_labels_are_predicted(tmp_path: Path) -> None:
    x = RNG.normal(0, 1, (40, 5)).astype(np.float32)
    for outputs in (1, 3):
        y = x[:, :outputs] * 2.0
        fitted(nn.Linear(5, outputs), tmp_path / f"numbers{outputs}", x, y, task="regression")
        model = kedge.load(tmp_path / f"numbers{outputs}").model
        assert model.predict(x).shape == ((40,) if outputs == 1 else (40, 3))
        with pytest.raises(KedgeError, match="regression has no probabilities; use predict"):
            model.predict_proba(x)
    fitted(nn.Linear(5, 3), tmp_path / "labels", x, (x[:, :3] > 0).astype(np.float32))
    model = kedge.load(tmp_path / "labels").model
    probabilities = model.predict_proba(x)
    assert np.array_equal(model.predict(x), (probabilities > 0.5).astype(int))
    assert list(model.frame(x[:2])) == ["id", "0", "1", "2", "p_0", "p_1", "p_2"]


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    class Doubt(Classification):
        name = "doubt"

    register_task(Doubt)
    try:
        _, x, _ = fitted(nn.Linear(5, 2), tmp_path / "run", task="doubt")
        assert kedge.load(tmp_path / "run").model.predict_proba(x).shape == (40, 2)
    finally:
        tasks.remove("doubt")
    with pytest.raises(KedgeError, match="task = 'doubt' is not one of"):
        _ = kedge.load(tmp_path / "run").model


# -- what a bundle is -------------------------------------------------------------------------


def test_a_run_in_words(tmp_path: Path) -> None:
    result = kedge.run("fedavg", out=tmp_path / "run", **FAST)
    run = kedge.load(tmp_path / "run")
    assert run.config == result.config
    assert run.records == result.records
    assert list(run.frame()["round"]) == [1, 2]
    assert f"accuracy {result.last.mean:.2f}" in repr(run)
    assert "mlp(hidden=[64]), 1x8x8 -> 0, 1, 2" in str(run)
    assert repr(run.model) == "<Predictor 1x8x8 -> 10 classes, classification>"
    provenance = run.bundle.provenance
    assert provenance["fingerprint"] == load_data("digits").fingerprint
    assert provenance["versions"]["torch"] == torch.__version__
    assert not list((tmp_path / "run").rglob("*.p*k*l"))


def test_a_bundle_needs_neither_data_nor_place(tmp_path: Path) -> None:
    arrays = write_npz(tmp_path / "data.npz")
    kedge.run("fedavg", data=str(tmp_path / "data.npz"), out=tmp_path / "run", **FAST)
    expected = kedge.load(tmp_path / "run").model.predict_proba(arrays["x_test"])
    (tmp_path / "data.npz").unlink()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    found = kedge.load(tmp_path / "elsewhere").model.predict_proba(arrays["x_test"])
    np.testing.assert_array_equal(found, expected)


def test_architectures_are_plain_data() -> None:
    shared = nn.Linear(4, 4)
    module = nn.Sequential(
        nn.Conv1d(1, 4, 3, padding="same"), nn.GELU("tanh"), nn.Flatten(), shared
    )
    module.append(shared)
    again = rebuild(json.loads(json.dumps(describe(module))), (), 4)
    assert repr(again) == repr(module)
    again.load_state_dict(module.state_dict())
    before = torch.get_rng_state()
    describe(module)
    assert torch.equal(before, torch.get_rng_state())
    transformer = nn.TransformerEncoderLayer(8, 2)
    assert describe(transformer)["kind"] == "class"
    for bad in ({"kind": "layers", "layers": {"type": "Module.__init__"}}, {"kind": "pickle"}):
        with pytest.raises(KedgeError):
            rebuild(bad, (), 2)
    with pytest.raises(ModelError, match="is not a class of modules"):
        rebuild({"kind": "class", "path": "os:getcwd", "needs": []}, (), 2)


# -- what can be wrong ------------------------------------------------------------------------


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(KedgeError, match="there is no such folder"):
        kedge.load(tmp_path / "nothing")
    with pytest.raises(KedgeError, match="holds no run"):
        kedge.load(tmp_path)
    kedge.compare(["fedavg", "fedprox"], out=tmp_path / "both", **FAST)
    with pytest.raises(KedgeError, match="holds several runs.*fedavg, fedprox"):
        kedge.load(tmp_path / "both")
    run = tmp_path / "both" / "fedavg"
    with pytest.raises(KedgeError, match="is part of a run; give"):
        kedge.load(run / "seed-0")
    with pytest.raises(KedgeError, match="has no seed 4; it has: 0"):
        kedge.load(run, seed=4)
    with pytest.raises(DataError, match="no best model: only runs with validation data"):
        _ = kedge.load(run, which="best").model
    with pytest.raises(KedgeError, match="no personal models"):
        kedge.load(run).personal(0)
    (run / "seed-0" / "model.safetensors").unlink()
    with pytest.raises(
        DataError, match="seed 0 is not complete. Continue it with: kedge run --out"
    ):
        _ = kedge.load(run).model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is not a bundle of kedge"),
        ('{"format": 99}', "has format 99; kedge .* reads formats up to 1"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "encoding": {"kind": "smell"}, "classes": null, "mean": null,'
         '"std": null, "loaded": [], "shape": []}', "a newer kedge wrote it"),
    ],
)  # fmt: skip
def test_bundles_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(DataError, match=message):
        kedge.load(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    kedge.run("fedavg", out=tmp_path / "run", **FAST)
    path = tmp_path / "run" / "seed-0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="model.safetensors is damaged"):
        _ = kedge.load(tmp_path / "run").model


def test_inputs_of_another_kind(tmp_path: Path) -> None:
    kedge.run("fedavg", out=tmp_path / "run", **FAST)
    model = kedge.load(tmp_path / "run").model
    x = np.zeros((3, 1, 8, 8))
    for raw, message in [
        (
            np.zeros((3, 1, 9, 9), np.uint8),
            r"has shape \[3, 1, 9, 9\]; the model takes \[n, 1, 8, 8\]",
        ),
        (x + 0.5, "8-bit values from 0 to 255; write"),
        (x - 3, "from -3 to -3, but the model takes 8-bit values"),
        (x * np.nan, "row 0: nan is not a finite float32 number; fill it in"),
        (np.full((3, 1, 8, 8), "a"), "the model takes numbers"),
        ([[1, 2], [3]], "not numbers of one shape"),
        (np.zeros((0, 8, 8)), "no values"),
        (tmp_path / "none.png", "there is no such file"),
    ]:
        with pytest.raises(DataError, match=message):
            model.predict(raw)
    assert model.predict(np.full((8, 8), 7.0)).shape == (1,)  # one image, whole numbers
    x, y = RNG.normal(0, 1, (30, 1, 8, 8)).astype("float32"), np.arange(30) % 2
    np.savez(tmp_path / "float.npz", x_train=x, y_train=y)
    kedge.run("fedavg", data=str(tmp_path / "float.npz"), out=tmp_path / "floats", **FAST)
    model = kedge.load(tmp_path / "floats").model
    with pytest.raises(DataError, match="8-bit values, but the model was trained on numbers"):
        model.predict(np.zeros((3, 8, 8), np.uint8))
    with pytest.warns(UserWarning, match="far from the training data"):
        model.predict(np.full((3, 8, 8), 255.0))


def test_a_batch_that_normalises_itself(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz")
    settings = FAST | {"data": str(tmp_path / "data.npz"), "model": "lenet5(norm=bn)"}
    result = kedge.run("fedavg", out=tmp_path / "run", batchnorm="batch", **settings)
    model = kedge.load(tmp_path / "run").model
    y = load_data(tmp_path / "data.npz").y_test
    right = model.predict(tmp_path / "data.npz") == np.array(["low", "mid", "high"])[y]
    assert 100.0 * right.sum() / len(right) == result.records[0][-1]["accuracy"]


# -- what users give to kedge.fit -------------------------------------------------------------


def test_one_logit_and_classes_by_name(tmp_path: Path) -> None:
    x = RNG.normal(0, 1, (40, 5)).astype(np.float32)
    y = np.where(x[:, 0] > 0, "yes", "no")
    result, *_ = fitted(nn.Sequential(nn.Linear(5, 1)), tmp_path / "run", x, y, lr=0.5)
    model = kedge.load(tmp_path / "run").model
    assert set(model.predict(x)) == {"yes", "no"}
    right = (model.predict(x) == y).sum()
    assert 100.0 * right / 40 == result.records[0][-1]["accuracy"]
    assert model.predict_proba(x).shape == (40, 2)
    given = kedge.load(tmp_path / "run", model=nn.Sequential(nn.Linear(5, 1))).model
    np.testing.assert_array_equal(given.predict_proba(x), model.predict_proba(x))


def test_token_ids_stay_whole(tmp_path: Path) -> None:
    x = RNG.integers(0, 9, (40, 4))
    y = (x[:, 0] > 4).astype(int)
    module = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
    result, *_ = fitted(module, tmp_path / "run", x, y)
    model = kedge.load(tmp_path / "run").model
    assert 100.0 * (model.predict(x) == y).sum() / 40 == result.records[0][-1]["accuracy"]
    assert model.predict(x.astype(float)).shape == (40,)
    with pytest.raises(DataError, match="the model takes whole numbers"):
        model.predict(x + 0.5)
    with pytest.raises(DataError, match="a number that the model does not know"):
        model.predict(x + 90)


def test_series_and_16_bit_images(tmp_path: Path) -> None:
    y = np.arange(40) % 2
    series = RNG.normal(0, 1, (40, 2, 30)).astype("float32") + y[:, None, None]
    deep = (RNG.integers(0, 20000, (40, 6, 6)) + 30000 * y[:, None, None]).astype(np.uint16)
    for name, x in (("series", series), ("deep", deep)):
        np.savez(
            tmp_path / f"{name}.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:]
        )
        settings = FAST | {"data": str(tmp_path / f"{name}.npz")}
        result = kedge.run("fedavg", out=tmp_path / name, **settings)
        model = kedge.load(tmp_path / name).model
        right = (model.predict(x[30:]) == y[30:]).sum()
        assert 100.0 * right / 10 == result.records[0][-1]["accuracy"]


def test_data_frames(tmp_path: Path) -> None:
    clients = {"north": patients(40), "south": patients(40, 3)}
    test = patients(20)
    result = kedge.fit(
        None, clients, label="outcome", missing="mean", drop=["id"], test=test, rounds=2,
        out=tmp_path / "run",
    )  # fmt: skip
    model = kedge.load(tmp_path / "run").model
    right = (model.predict(test.drop(columns="outcome")) == test["outcome"]).sum()
    assert 100.0 * right / 20 == result.records[0][-1]["accuracy"]
