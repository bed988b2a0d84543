"""Datasets by name, where they are looked for, those of the hub, and what is no dataset."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kedge.data.datasets import available, datasets, known, load
from kedge.errors import DataError, GrammarError, UnknownName
from tests.data.dataset_files import (
    arrays,
    fails,
    hospital,
    pixels,
    write_cifar10,
    write_csv,
    write_images,
    write_mnist,
    write_npz,
)

# --- names and places -----------------------------------------------------------------------------


def test_digits():
    d = load("digits")
    assert d.describe() == "digits: 1x8x8 images, 10 classes, 1438 train, 359 test"
    assert d.x_train.dtype == np.uint8
    assert d.x_train.max() == 255
    assert d.y_train.dtype == np.int64
    share = np.bincount(d.y_test) / np.bincount(np.concatenate([d.y_train, d.y_test]))
    assert np.abs(share - 0.2).max() < 0.01
    x = d.x_train / 255
    assert np.allclose(d.mean, x.mean())
    assert np.allclose(d.std, x.std())
    assert np.array_equal(d.x_train, load("digits").x_train)
    assert repr(d).startswith("<Dataset digits")
    fails("digits(size=9)", "no option of digits 'size'", error=UnknownName)


def test_names_are_found_in_kedge_data_then_in_the_cache(tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache" / "kedge"
    data.mkdir()
    cache.mkdir(parents=True)
    write_npz(cache / "mine.npz", **arrays(n=9))
    assert load("mine").sizes == {"train": 9, "test": 6}
    monkeypatch.setenv("KEDGE_DATA", str(data))
    write_npz(data / "mine.npz", **arrays(n=15))
    assert load("mine").sizes["train"] == 15
    write_csv(data / "table.csv", "a,label\n1,x\n2,y\n")
    assert load("table").classes == ("x", "y")
    assert load("csv(path='table.csv')").shape == (1,)


def test_a_missing_dataset_says_what_to_put_where(tmp_path, monkeypatch):
    fails("mnist", "Put mnist.npz", "train-images-idx3-ubyte.gz", tmp_path / "cache" / "kedge")
    fails("mnist", "set KEDGE_DATA")
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "nowhere"))
    fails("cifar10", "cifar-10-batches-py", "nowhere ($KEDGE_DATA, which is not a folder)")
    fails("xrays", "neither xrays.npz, xrays.csv nor a folder xrays", "Known by name: cifar10")
    fails("mnst", "Did you mean 'mnist'? See: kedge data", error=UnknownName)
    fails("hospitals/", "hospitals/: there is no such file or folder")
    fails("a.csv(label=b)", "a.csv: there is no such file or folder")
    fails("csv", 'csv(path="...")')
    fails("csv(path=", "Write for example: csv(path=", error=GrammarError)
    fails("csv('a', 'b')", "only the path", error=GrammarError)
    fails("", "such as 'digits'")
    fails("x\0y", "there is no such file")


def test_a_path_that_is_almost_right_is_suggested(tmp_path, monkeypatch):
    write_csv(tmp_path / "silos" / "hospitals" / "a.csv", "a,label\n1,x\n2,y\n")
    monkeypatch.chdir(tmp_path / "silos")
    fails("hospitls(label=b)", "hospitls: there is no such file or folder. Did you mean hospitals?")
    fails("hospitals/b.csv", "Did you mean hospitals/a.csv?")
    fails(f"{tmp_path}/silo", f"Did you mean {tmp_path}/silos?")
    fails(f"{tmp_path}/nothing/alike", "no such file or folder, here or in")


def test_a_registered_name_wins_over_a_file_here(tmp_path):
    write_images(tmp_path / "digits")
    assert load("digits").shape == (1, 8, 8)
    assert load("./digits").shape == (3, 5, 6)
    write_mnist(tmp_path / "mnist")
    assert load("mnist").classes == tuple("0123456789")


def test_datasets_can_be_registered():
    made = load("digits")
    datasets.add("mine", lambda **options: made)
    try:
        assert load("mine") is made
        assert "mine" in [entry.name for entry in available()]
    finally:
        datasets.remove("mine")


def test_available(tmp_path, monkeypatch):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "data"))
    data = tmp_path / "data"
    data.mkdir()
    write_npz(data / "cifar10.npz", **arrays(shape=(32, 32, 3)))
    write_mnist(data / "MNIST" / "raw", pack=True)
    write_cifar10(data / "cifar-10-batches-py")
    write_images(data / "pets" / "train")
    for i in range(3):
        write_csv(data / "hospitals" / f"h{i}.csv", hospital(i))
    write_csv(data / "t.csv", hospital(1))
    (data / "broken.npz").write_bytes(b"PK nothing")
    (data / "notes.txt").write_text("not data")
    found = {entry.name: entry for entry in available()}
    digits = load("digits")
    assert (found["digits"].shape, found["digits"].sizes) == (digits.shape, digits.sizes)
    assert (found["cifar10"].kind, found["cifar10"].shape) == ("npz", (3, 32, 32))
    assert found["mnist"].sizes == {"train": 12, "test": 6}
    assert found["mnist"].shape == load("mnist").shape == (1, 4, 5)
    assert found["cifar-10-batches-py"].kind == "cifar"
    assert (found["pets"].shape, found["pets"].sizes) == ((3, 5, 6), {"train": 6})
    assert found["hospitals"].sizes == {"train": 24, "silos": 3}
    assert found["t"].sizes == {"train": 8}
    assert "cannot be read" in found["broken"].note
    assert found["cifar100"].note.startswith("could be put: cifar100.npz")
    assert "notes" not in found
    assert "MNIST" not in found


# --- Hugging Face ---------------------------------------------------------------------------------


class Value:
    pass


Picture = type("Image", (), {})


class ClassLabel:
    names = ["no", "yes"]


class Rows(list):
    """As much of a Hugging Face split as kedge uses."""

    def __init__(self, rows, **features):
        super().__init__(rows)
        self.features = features

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def hub(monkeypatch, answer):
    def load_dataset(name, config=None):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_digits_are_read_without_scikit_learn_or_by_it(monkeypatch):
    code = "import sys, kedge.data.datasets as d; d.load('digits'); print('sklearn' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
    expected = load("digits").fingerprint
    elsewhere = SimpleNamespace(locate_file=lambda name: "/nowhere")
    monkeypatch.setattr(known, "distribution", lambda name: elsewhere)
    assert load("digits").fingerprint == expected


def test_hub_images(monkeypatch):
    rows = [{"img": Image.fromarray(pixels(1, 4, 4)[0]), "label": i % 2} for i in range(6)]
    features = {"img": Picture(), "label": ClassLabel()}
    hub(monkeypatch, {"train": Rows(rows, **features), "test": Rows(rows[:2], **features)})
    d = load("hf:someone/xrays")
    assert d.describe() == "hf:someone/xrays: 1x4x4 images, 2 classes, 6 train, 2 test"
    assert d.classes == ("no", "yes")
    assert load("hf:xrays(size=2)").shape == (1, 2, 2)
    fails("hf:xrays(label=lab)", "no column 'lab'", "img, label")
    fails("hf:xrays(colour=1)", "no option of hf 'colour'", error=UnknownName)
    rows[3]["label"] = -1
    fails("hf:xrays", "hf:xrays (train), row 3: label -1 is negative")


def test_hub_tables(monkeypatch):
    rows = [{"age": 30 + i, "smokes": bool(i % 2), "ill": i % 2} for i in range(6)]
    features = {"age": Value(), "smokes": Value(), "ill": ClassLabel()}
    hub(monkeypatch, {"train": Rows(rows, **features)})
    d = load("hf:health")
    assert (d.columns, d.classes, d.x_train[1].tolist()) == (
        ("age", "smokes"),
        ("no", "yes"),
        [31, 1],
    )
    rows[2]["age"] = None
    fails("hf:health", "hf:health (train), row 2, column 'age': nan is a missing value")


def test_hub_failures(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails("hf:mnist", "pip install 'kedge[hf]'")
    hub(monkeypatch, ConnectionError("could not reach the hub"))
    fails("hf:mnist", "hf:mnist cannot be fetched (could not reach the hub)", "network")
    hub(monkeypatch, {"all": Rows([])})
    fails("hf:mnist", "its splits are: all")


# --- anything else --------------------------------------------------------------------------------


def test_unreadable_paths(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    fails("a.pdf", "not a kind of file that kedge reads")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "x").write_text("x")
    fails("loop", "no data that kedge recognises in this folder")
    fails("npz(path='nowhere.npz')", "nowhere.npz: there is no such file or folder")
    write_csv(tmp_path / "odd (1)" / "p.csv", "a,y\n1,x\n2,z\n")
    assert load("odd (1)/p.csv").shape == (1,)
    assert load("odd (1)/p.csv(label=y)").classes == ("x", "z")


def test_damaged_bytes_never_end_in_another_error(tmp_path):
    """Whatever bytes are flipped or cut off: a dataset or a KedgeError, nothing else."""
    write_npz(tmp_path / "a.npz", **arrays(n=6))
    np.savez_compressed(tmp_path / "b.npz", **arrays(n=6))
    write_mnist(tmp_path / "plain")
    write_mnist(tmp_path / "packed", pack=True)
    write_cifar10(tmp_path / "cifar")
    write_images(tmp_path / "pets")
    write_csv(tmp_path / "p.csv", hospital(1).replace("diagnosis", "label"))
    Image.fromarray(pixels(1, 5, 6, 3)[0]).save(tmp_path / "pets" / "cat" / "1.jpg")
    files = {"a.npz": "", "b.npz": "", "p.csv": "", "plain": "t10k-labels-idx1-ubyte"}
    files |= {"packed": "train-images-idx3-ubyte.gz", "cifar": "test_batch"}
    rng = random.Random(0)
    outcomes = set()
    for name, inner in [*files.items(), ("pets", "cat/0.png"), ("pets", "cat/1.jpg")]:
        path = tmp_path / name / inner if inner else tmp_path / name
        good = path.read_bytes()
        for _ in range(40):
            bad = bytearray(good[: rng.randrange(len(good))] if rng.random() < 0.3 else good)
            for _ in range(rng.choice([1, 1, 3]) if bad else 0):
                bad[rng.randrange(min(len(bad), 400))] = rng.randrange(256)
            path.write_bytes(bad)
            try:
                load(str(tmp_path / name))
                outcomes.add("loaded")
            except DataError as error:
                outcomes.add("refused" if name in str(error) else str(error))
        path.write_bytes(good)
        load(str(tmp_path / name))
    assert outcomes == {"loaded", "refused"}


REAL = os.environ.get("KEDGE_DATA")


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="set KEDGE_DATA to a folder with the real datasets")
@pytest.mark.parametrize(
    ("name", "shape", "classes", "sizes"),
    [
        ("cifar10", (3, 32, 32), 10, {"train": 50_000, "test": 10_000}),
        ("mnist", (1, 28, 28), 10, {"train": 60_000, "test": 10_000}),
        ("fashion_mnist", (1, 28, 28), 10, {"train": 60_000, "test": 10_000}),
        ("organamnist", (1, 28, 28), 11, {"train": 34_561, "val": 6_491, "test": 17_778}),
        ("covid_darkcovidnet64", (1, 64, 64), 3, {"train": 899, "test": 225}),
    ],
)
def test_real_datasets(monkeypatch, name, shape, classes, sizes):
    monkeypatch.setenv("KEDGE_DATA", str(REAL))
    d = load(name)
    assert (d.shape, d.num_classes, d.sizes) == (shape, classes, sizes)
    assert d.x_train.dtype == np.uint8
    assert len(np.unique(d.y_train)) == len(np.unique(d.y_test)) == classes
    x = d.x_train[:2000].astype(np.float32) / 255
    assert np.abs(x.mean((0, 2, 3)) - d.mean).max() < 0.02
    assert np.abs(x.std((0, 2, 3)) - d.std).max() < 0.02
