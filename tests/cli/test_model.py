"""``kedge predict``, ``evaluate`` and ``export``, as a user types them."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

import kedge
from kedge.cli.model import evaluation_tables
from kedge.data.datasets import load as load_data
from kedge.saved.evaluate import holds_training_data
from tests.cli.commands import kedge_command

RNG = np.random.default_rng(1)
FAST: dict[str, Any] = {"rounds": 2, "seeds": [0], "batch": 16}


def patients(n: int, shift: float = 0.0) -> pd.DataFrame:
    age, ward = RNG.normal(60 + shift, 10, n).round(1), RNG.choice(["a", "b", "c"], n)
    score = (age - 60) / 10 + (ward == "a") + RNG.normal(0, 0.5, n)
    frame = pd.DataFrame({"age": age, "ward": ward, "outcome": np.where(score > 1, "ill", "well")})
    frame.insert(0, "id", [f"P{i}" for i in range(n)])
    return frame


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on hospitals (with personal models), one on digits, and new data."""
    folder = tmp_path_factory.mktemp("use")
    (folder / "hospitals").mkdir()
    for name, shift in (("north", 0), ("south", 4), ("west", 8)):
        patients(40, shift).to_csv(folder / "hospitals" / f"{name}.csv", index=False)
    patients(30).to_csv(folder / "new.csv", index=False)
    settings = FAST | {"personal": True, "split": "holdout(0.25)"}
    data = f"{folder / 'hospitals'}(label=outcome, id=id)"
    kedge.run("fedper", data=data, out=folder / "run", **settings)
    kedge.run("fedavg", out=folder / "digits", clients=3, partition="iid", **FAST)
    return folder


def test_predictions_of_a_new_file(place: Path) -> None:
    done = kedge_command("predict", "run", "new.csv", "-o", "out.csv", "--force", cwd=place)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("30 predictions in out.csv\n")
    frame, new = pd.read_csv(place / "out.csv"), pd.read_csv(place / "new.csv")
    assert list(frame) == ["id", "prediction", "p_ill", "p_well"]
    assert list(frame["id"]) == list(new["id"])
    expected = kedge.load(place / "run").model.predict_proba(new)
    np.testing.assert_array_equal(frame[["p_ill", "p_well"]].astype("float32"), expected)
    printed = kedge_command("predict", "run", "new.csv", cwd=place)
    assert printed.stdout == (place / "out.csv").read_text()
    own = kedge_command("predict", "run", "new.csv", "--client", "south", cwd=place)
    expected = kedge.load(place / "run").personal("south").predict_proba(new)
    found = pd.read_csv(io.StringIO(own.stdout))["p_ill"]
    np.testing.assert_array_equal(found.astype("float32"), expected[:, 0])
    everyone = kedge_command("predict", "run", "hospitals", cwd=place)
    table = pd.read_csv(io.StringIO(everyone.stdout))
    assert list(table["client"].value_counts(sort=False)) == [40, 40, 40]


def test_an_image_file(place: Path) -> None:
    Image.fromarray(load_data("digits").x_test[40, 0]).save(place / "digit.png")
    done = kedge_command("predict", "digits", "digit.png", cwd=place)
    assert done.stdout.startswith("id,prediction,p_0,p_1")
    assert done.stdout.splitlines()[1].startswith("digit.png,")


def test_all_metrics_of_a_new_file(place: Path) -> None:
    done = kedge_command("evaluate", "run", "new.csv", "--json", cwd=place)
    found, new = json.loads(done.stdout), pd.read_csv(place / "new.csv")
    model = kedge.load(place / "run").model
    score = model.predict_proba(new)[:, 1]
    assert found["global"]["auroc"] == pytest.approx(roc_auc_score(new["outcome"] == "well", score))
    right = (model.predict(new) == new["outcome"]).mean()
    assert found["global"]["accuracy"] == pytest.approx(100 * right)
    text = kedge_command("evaluate", "run", "new.csv", cwd=place).stdout
    for word in (
        "new.csv, 30 samples",
        "accuracy %",
        "AUROC",
        "log loss",
        "ill",
        "true \\ predicted",
    ):
        assert word in text


def test_metrics_per_client_of_the_data_of_the_run(place: Path) -> None:
    found = json.loads(kedge_command("evaluate", "run", "--json", cwd=place).stdout)
    [records] = kedge.load(place / "run").records
    assert found["global"]["accuracy"] == pytest.approx(records[-1]["accuracy"])
    for key, name in ((found, "client"), (found["personal"], "personal")):
        values = [one["accuracy"] for one in key["clients"].values()]
        assert values == pytest.approx(records[-1][f"per_{name}"])
    silos = json.loads(kedge_command("evaluate", "run", "hospitals", "--json", cwd=place).stdout)
    assert (
        list(silos["clients"]) == list(silos["personal"]["clients"]) == ["north", "south", "west"]
    )
    shown = kedge_command("evaluate", "run", cwd=place).stdout
    assert shown.index("personal:") < shown.index("global:") < shown.index("clients:")


def test_the_headline_of_personal_models_is_that_of_the_run() -> None:
    rows = {"north": {"samples": 3, "accuracy": 50.0, "auroc": 0.5}}
    own = {"north": {"samples": 3, "accuracy": 60.0, "auroc": 0.875}}
    found = {"global": {}, "clients": rows, "personal": {"clients": own}}
    text = "\n".join(map(str, evaluation_tables(found, "auroc")))
    assert "0.875" in text
    assert "60.00" not in text


def test_the_global_model_of_a_personal_method_is_named_so(place: Path) -> None:
    """Its clients' models are what the run reports; the global one may be next to worthless."""
    warning = (
        "fedper is judged by its clients' own, and its private layers were never trained in the "
        "global one; take that of a client with --client NAME"
    )
    for command in (["predict", "run", "new.csv"], ["evaluate", "run", "new.csv"]):
        assert warning in kedge_command(*command, cwd=place).stderr
        own = kedge_command(*command, "--client", "south", cwd=place)
        assert (own.returncode, own.stderr) == (0, "")
    assert "last personal model of south, seed 0" in own.stdout
    assert kedge_command("evaluate", "run", cwd=place).stderr == ""  # shows both
    assert kedge_command("predict", "digits", "digits", cwd=place).stderr == ""
    assert "north, south, west" in kedge_command("predict", "run", "new.csv", cwd=place).stderr


def test_training_samples_are_not_taken_for_a_test(place: Path) -> None:
    for data in ("hospitals", "hospitals/north.csv", str(place / "hospitals")):
        done = kedge_command("evaluate", "run", data, "--client", "north", cwd=place)
        assert f"{data} is data of this run, so these are mostly samples" in done.stderr
    own = str(place / "hospitals")
    assert holds_training_data(f"{own}(label=outcome)", own)
    assert not holds_training_data(own, str(place / "new.csv"))
    assert not holds_training_data("digits", "digits")
    (place / "split").mkdir()
    for name in ("train.csv", "test.csv"):  # the test set is what is read of such a folder
        (place / "split" / name).write_bytes((place / "new.csv").read_bytes())
    assert not holds_training_data(str(place / "split"), str(place / "split"))
    assert holds_training_data(str(place / "split"), str(place / "split" / "train.csv"))


def test_data_that_changed_are_not_taken_for_the_data_of_the_run(place: Path) -> None:
    file = place / "hospitals" / "west.csv"
    before = file.read_text()
    try:
        file.write_text(before.replace("ill", "x", 1).replace("well", "ill", 1).replace("x", "ill"))
        done = kedge_command("evaluate", "run", cwd=place)
    finally:
        file.write_text(before)
    assert "is not what the run was made with" in done.stderr
    (place / "hospitals").rename(place / "moved")
    try:
        done = kedge_command("evaluate", "run", cwd=place)
    finally:
        (place / "moved").rename(place / "hospitals")
    assert done.returncode == 2
    assert "go there, or give the data: kedge evaluate RUN DATA" in done.stderr


@pytest.mark.parametrize("name", ["run", "digits"])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, on loading
def test_exported_programs_give_the_same_probabilities(name: str, place: Path) -> None:
    for kind, file in (("onnx", f"{name}.onnx"), ("torch", f"{name}.pt2")):
        done = kedge_command("export", name, "--to", kind, "-o", file, cwd=place)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stdout + done.stderr
        assert done.stdout == ""
    model = kedge.load(place / name).model
    samples = model.encode(place / "new.csv" if name == "run" else "digits")
    expected = model.values(model.logits(samples.x))
    session = onnxruntime.InferenceSession(place / f"{name}.onnx")
    program = torch.export.load(place / f"{name}.pt2").module()
    for n in (1, 3, len(samples.x)):
        x = samples.x[:n]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected[:n], atol=1e-5)
        np.testing.assert_allclose(program(torch.tensor(x)).numpy(), expected[:n], atol=1e-5)
    described = json.loads((place / f"{name}.onnx.json").read_text())
    inside = json.loads(session.get_modelmeta().custom_metadata_map["kedge"])
    assert described == inside
    if name == "run":
        assert described["input"]["columns"] == ["age", "ward=a", "ward=b", "ward=c"]
        assert described["output"]["classes"] == ["ill", "well"]
    else:
        assert described["input"]["dtype"] == "uint8"


def test_export_without_its_packages(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = kedge_command("export", "run", "-o", "none.onnx", cwd=place)
    assert done.stderr.strip() == (
        "error: ONNX needs the package onnxscript: pip install 'kedge[onnx]'"
    )
    assert not (place / "none.onnx").exists()


def test_one_sentence_for_every_mistake(place: Path) -> None:
    (place / "taken.csv").write_text("mine")
    (place / "short.csv").write_text("ward\na\n")
    (place / "empty.csv").write_text("age,ward\n,a\n")
    (place / "broken.png").write_bytes(b"\x89PNG no")
    mistakes = [
        (("predict", "nothing", "new.csv"), "there is no such folder"),
        (("predict", "run/seed-0", "new.csv"), "is part of a run; give run"),
        (("predict", "run", "none.csv"), "none.csv"),
        (("predict", "run", "short.csv"), "no column 'age'"),
        (("predict", "run", "empty.csv"), "age"),
        (("predict", "run", "new.csv", "-o", "taken.csv"), "exists already; write --force"),
        (("predict", "run", "new.csv", "-o", "no/out.csv"), "there is no folder no"),
        (("predict", "run", "new.csv", "-o", "hospitals"), "is a folder"),
        (("predict", "run", "new.csv", "-o", "out.xlsx"), "must end with .csv, such as out.csv"),
        (("run", "--data", "hospitals(label=outcome"), "found the end). Write for example: hosp"),
        (("predict", "run", "new.csv", "-o", "/dev/full/out.csv"), "cannot be written"),
        (("predict", "run", "new.csv", "--client", "nort"), "Did you mean 'north'"),
        (("predict", "digits", "new.csv", "--client", "0"), "no personal models"),
        (("predict", "digits", "broken.png"), "cannot be read as an image"),
        (("evaluate", "run", "short.csv"), "no column 'age'"),
        (("evaluate", "digits", "broken.png"), "cannot be read as an image"),
        (("export", "run", "--to", "tflite"), "not one of: onnx, torch"),
        (("export", "run", "-o", "model.txt"), "must end with .onnx"),
    ]
    for command, message in mistakes:
        done = kedge_command(*command, cwd=place)
        assert done.returncode == 2, command
        assert message in done.stderr, (command, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1
    assert (place / "taken.csv").read_text() == "mine"
    assert not list(place.glob(".*"))


def test_data_without_labels_or_with_unknown_ones(place: Path) -> None:
    new = pd.read_csv(place / "new.csv")
    new.drop(columns="outcome").to_csv(place / "unlabelled.csv", index=False)
    done = kedge_command("evaluate", "run", "unlabelled.csv", cwd=place)
    assert "the data have no labels (no column 'outcome')" in done.stderr
    new.assign(outcome="dead").to_csv(place / "other.csv", index=False)
    done = kedge_command("evaluate", "run", "other.csv", cwd=place)
    assert "sample P0 is of class 'dead', which the training data do not have" in done.stderr


def test_a_full_disk_leaves_no_half_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = kedge_command("predict", "run", "new.csv", "-o", "full.csv", cwd=place)
    assert done.stderr.strip() == "error: full.csv cannot be written: No space left on device"
    for to, name in (("torch", "full.pt2"), ("onnx", "full.onnx")):
        done = kedge_command("export", "run", "--to", to, "-o", name, cwd=place)
        assert f"{name} cannot be written: No space left on device" in done.stderr
    assert not [*place.glob("*full*"), *place.glob(".*.part")]


def test_a_run_with_a_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import kedge\nfrom torch import nn\n\n\n"
        '@kedge.models.models.register("tiny")\n'
        "def tiny(shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    options = ("--rounds", "1", "--seeds", "0", "--clients", "3", "--out", "run")
    kedge_command("run", "--model", "tiny", "--load", "tiny.py", *options, cwd=tmp_path)
    bundle = json.loads((tmp_path / "run" / "bundle.json").read_text())
    assert bundle["loaded"][0]["path"] == str(tmp_path / "tiny.py")
    done = kedge_command("predict", "run", "digits", cwd=tmp_path)
    assert f"This run was started with --load {tmp_path / 'tiny.py'}" in done.stderr
    done = kedge_command("predict", "run", "digits", "--load", "tiny.py", cwd=tmp_path)
    assert len(done.stdout.splitlines()) == 360
