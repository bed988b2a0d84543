"""A hospital's engineer: one command trains, another predicts on new files; the numbers agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

import kedge
from tests.cli.commands import kedge_command

RNG = np.random.default_rng(3)


def patients(n: int, shift: float) -> pd.DataFrame:
    """About one in eight dies; every tenth pressure is missing."""
    frame = pd.DataFrame({"id": [f"{shift:g}-{i}" for i in range(n)]})
    frame["age"], frame["ward"] = RNG.normal(60 + shift, 10, n).round(1), RNG.choice(list("abc"), n)
    frame["pressure"] = RNG.normal(130, 15, n).round(0)
    score = (frame["age"] - 60) / 10 + (frame["pressure"] - 130) / 15 + 2.0 * (frame["ward"] == "a")
    frame["outcome"] = np.where(score + RNG.normal(0, 1, n) > 3.2, "died", "survived")
    frame.loc[::10, "pressure"] = np.nan
    return frame


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten hospitals with test files of their own, and all test rows in one new file."""
    folder = tmp_path_factory.mktemp("engineer")
    tests = []
    for k in range(10):
        own = folder / "hospitals" / f"hospital_{k}"
        own.mkdir(parents=True)
        patients(60, k / 2).to_csv(own / "train.csv", index=False)
        tests.append(patients(20, k / 2))
        tests[-1].to_csv(own / "test.csv", index=False)
    columns = ["outcome", "pressure", "ward", "age", "id"]  # another order
    pd.concat(tests)[columns].to_csv(folder / "new.csv", index=False)
    return folder


def test_ten_hospitals_on_the_command_line(place: Path) -> None:
    data = "hospitals(label=outcome, missing=median, id=id)"
    options = ("--rounds", "8", "--seeds", "0", "--out", "run")
    done = kedge_command("run", "--data", data, *options, cwd=place)
    assert done.returncode == 0, done.stderr
    reported = json.loads(kedge_command("evaluate", "run", "--json", cwd=place).stdout)
    assert len(reported["clients"]) == 10
    named = json.loads(kedge_command("evaluate", "run", "hospitals", "--json", cwd=place).stdout)
    assert named["global"] == pytest.approx(reported["global"])
    assert named["clients"]["hospital_3"] == pytest.approx(reported["clients"]["hospital_3"])
    done = kedge_command("predict", "run", "new.csv", "-o", "predictions.csv", cwd=place)
    assert done.returncode == 0, done.stderr
    new, predicted = pd.read_csv(place / "new.csv"), pd.read_csv(place / "predictions.csv")
    assert list(predicted["id"]) == list(new["id"])
    auroc = roc_auc_score(new["outcome"] == "survived", predicted["p_survived"])
    assert auroc > 0.75
    assert auroc == pytest.approx(reported["global"]["auroc"], abs=1e-12)
    saved = json.loads((place / "run" / "seed-0" / "scores.json").read_text())
    assert saved["global"]["auroc"] == pytest.approx(auroc, abs=1e-6)


def test_ten_hospitals_in_python(place: Path) -> None:
    folders = sorted((place / "hospitals").iterdir())
    clients = {f.name: pd.read_csv(f / "train.csv").drop(columns="id") for f in folders}
    new = pd.read_csv(place / "new.csv")
    out = place / "fit"
    kedge.fit(
        None, clients, label="outcome", missing="median", test=new.drop(columns="id"), rounds=8,
        out=out,
    )  # fmt: skip
    model = kedge.load(out).model
    auroc = roc_auc_score(new["outcome"] == "survived", model.predict_proba(new)[:, 1])
    saved = json.loads((out / "seed-0" / "scores.json").read_text())
    assert saved["global"]["auroc"] == pytest.approx(auroc, abs=1e-6)


def test_a_folder_of_images(tmp_path: Path) -> None:
    for split, n in (("train", 20), ("test", 10)):
        for c, name in enumerate(("benign", "malignant")):
            folder = tmp_path / "scans" / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = (RNG.integers(0, 130, (12, 12)) + 40 * c).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    options = ("--clients", "4", "--partition", "iid", "--rounds", "6", "--seeds", "0")
    kedge_command("run", "--data", "scans", *options, "--out", "run", cwd=tmp_path)
    kedge_command("predict", "run", "scans/test", "-o", "out.csv", cwd=tmp_path)
    predicted = pd.read_csv(tmp_path / "out.csv")
    truth = predicted["id"].str.startswith("malignant")
    auroc = roc_auc_score(truth, predicted["p_malignant"])
    saved = json.loads((tmp_path / "run" / "seed-0" / "scores.json").read_text())
    assert saved["global"]["auroc"] == pytest.approx(auroc, abs=1e-6)
    right = (predicted["prediction"] == np.where(truth, "malignant", "benign")).mean()
    assert saved["global"]["accuracy"] == pytest.approx(100 * right)
