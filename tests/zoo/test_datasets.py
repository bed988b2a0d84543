"""Every format is written small, read back, and then damaged in every way a user might meet."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kedge.errors import DataError, FieldError, GrammarError, UnknownName
from kedge.zoo.datasets import Dataset, available, datasets, load
from kedge.zoo.datasets.find import natural

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def empty_places(tmp_path, monkeypatch):
    """No test but those marked ``data`` sees the datasets of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KEDGE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n, classes=3):
    return np.arange(n) % classes


def arrays(n=12, shape=(5, 4), **more):
    made = {"x_train": pixels(n, *shape), "y_train": labels(n)}
    return made | {"x_test": pixels(6, *shape), "y_test": labels(6)} | more


def write_npz(path, **made):
    np.savez(path, **made)
    return path


def write_idx(folder, name, array, pack=False):
    folder.mkdir(exist_ok=True, parents=True)
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    data = head + array.astype(np.uint8).tobytes()
    path = folder / (name + ".gz" * pack)
    path.write_bytes(gzip.compress(data) if pack else data)
    return path


def write_mnist(folder, pack=False, n=12):
    x, y = pixels(n, 4, 5), labels(n)
    write_idx(folder, "train-images-idx3-ubyte", x, pack)
    write_idx(folder, "train-labels-idx1-ubyte", y, pack)
    write_idx(folder, "t10k-images-idx3-ubyte", x[:6], pack)
    write_idx(folder, "t10k-labels-idx1-ubyte", y[:6], pack)
    return x, y


def write_cifar10(folder, protocol=2, keys=bytes.decode):
    folder.mkdir(exist_ok=True, parents=True)
    x = pixels(24, 3072)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        batch = {keys(b"data"): x[4 * i : 4 * i + 4], keys(b"labels"): [0, 1, 2, 9]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    names = {keys(b"label_names"): [f"class {i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol))
    return x


def write_images(folder, classes=("cat", "dog"), n=3, size=(6, 5), mode="RGB"):
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            shape = size[::-1] if mode == "L" else (*size[::-1], 3)
            Image.fromarray(pixels(1, *shape)[0]).save(folder / name / f"{i}.png")
    return folder


def write_csv(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def hospital(seed, n=8, columns="age,sex,pressure,diagnosis"):
    rng, rows = random.Random(seed), [columns]
    for i in range(n):
        row = {"age": rng.randint(20, 90), "sex": "fm"[i % 2], "pressure": round(rng.random(), 3)}
        row["diagnosis"] = ("flu", "healthy")[i % 2] if seed else "covid"
        rows.append(",".join(str(row[c]) for c in columns.split(",")))
    return "\n".join(rows) + "\n"


def fails(text, *says, error=DataError, **options):
    """Loading fails with a message that holds all of ``says``."""
    with pytest.raises(error) as caught:
        load(str(text), **options)
    for words in says:
        assert str(words) in str(caught.value)


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
    fails("digits(size=9)", "no option 'size'", error=FieldError)


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


# --- npz ------------------------------------------------------------------------------------------


def test_npz_round_trip(tmp_path):
    made = arrays(shape=(5, 4, 3), x_val=pixels(3, 5, 4, 3), y_val=labels(3)[:, None])
    d = load(str(write_npz(tmp_path / "a.npz", **made)))
    assert isinstance(d, Dataset)
    assert np.array_equal(d.x_train, made["x_train"].transpose(0, 3, 1, 2))
    assert np.array_equal(d.y_val, labels(3))
    assert (d.name, d.shape, d.num_classes, d.task) == ("a", (3, 5, 4), 3, "classification")
    assert np.allclose(d.mean, made["x_train"].mean((0, 1, 2)) / 255, atol=1e-6)
    assert np.allclose(d.std, made["x_train"].std((0, 1, 2)) / 255, atol=1e-6)
    assert d.groups is None


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [((5, 4), (1, 5, 4)), ((5, 4, 1), (1, 5, 4)), ((3, 5, 4), (3, 5, 4)), ((7,), (7,))],
)
def test_npz_shapes(tmp_path, shape, becomes):
    d = load(str(write_npz(tmp_path / "a.npz", **arrays(shape=shape))))
    assert d.shape == becomes
    assert d.x_train.dtype == (np.uint8 if len(becomes) == 3 else np.float32)


def test_npz_other_spellings(tmp_path):
    medical = {"train_images": pixels(6, 4, 4), "train_labels": labels(6)[:, None]}
    assert load(str(write_npz(tmp_path / "m.npz", **medical))).x_test is None
    d = load(str(write_npz(tmp_path / "x.npz", x=np.eye(4), y=labels(4), classes=["a", "b", "c"])))
    assert d.classes == ("a", "b", "c")
    assert d.x_train.dtype == np.float32


def test_npz_tasks(tmp_path):
    x, many = np.eye(4), np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]])
    a = str(write_npz(tmp_path / "a.npz", x=x, y=many))
    assert (load(a).task, load(a).outputs) == ("multilabel", 3)
    b = str(write_npz(tmp_path / "b.npz", x=x, y=np.eye(4, dtype=int)))
    assert (load(b).task, load(b).y_train.tolist()) == ("classification", [0, 1, 2, 3])
    assert load(b, task="multilabel").y_train.shape == (4, 4)
    c = str(write_npz(tmp_path / "c.npz", x=x, y=np.array([0.5, 1, 2, 3])))
    fails(c, "c.npz: y has type float64", "task=regression")
    d = load(f"{c}(task=regression)")
    assert (d.y_train.shape, d.outputs, d.task) == ((4, 1), 1, "regression")
    assert d.describe() == "c: 4 columns, 1 target, 4 train"
    fails(c, "row 0: label 0.5 is not a whole number", task="classification")
    fails(c, "write one of: classification, multilabel", task="guess", error=FieldError)
    fails(c, "needs [rows, labels]", task="multilabel")
    fails(a, "rows with several labels", task="classification")


NAN = np.array([[1, 2], [3, np.nan], [5, 6]])
UNEQUAL = np.empty(3, object)
UNEQUAL[:] = [[1], [1, 2], [3]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y_train": labels(11)}, "x_train has 12 rows and {}: y_train has 11"),
        ({"x_test": pixels(6, 5, 5)}, "(test) has samples of shape 1x5x5"),
        ({"x_test": pixels(6, 5, 4) / 255}, "and type float32, but"),
        ({"y_test": None}, "there is x_test but no y_test"),
        ({"x_train": None, "y_train": None}, "the file has: x_test, y_test"),
        ({"y_train": labels(12) - 1}, "y_train, row 0: label -1 is negative"),
        ({"y_test": np.array([0, 1, 2, 0, 7, 99])}, "y_test, row 5: label 99 is out of range"),
        ({"classes": ["a", "b"]}, "y_train, row 2: label 2 is out of range: there are 2 classes"),
        ({"y_train": np.full(12, 2)}, "all 12 training samples are of one class (2)"),
        ({"y_train": np.array(list("abcabcabcabc"))}, "y_train has type <U1"),
        ({"y_train": np.zeros((12, 2, 2), int)}, "y_train has shape (12, 2, 2)"),
        ({"y_train": labels(24).reshape(12, 2)}, "label arrays of different shapes"),
        ({"x_train": pixels(0, 5, 4), "y_train": labels(0)}, "x_train is empty"),
        ({"x_train": pixels(12, 5, 4).astype(complex)}, "x_train has type complex128"),
        ({"x_train": pixels(12, 5, 4).astype(int) + 99}, "images must be uint8 (0 to 255)"),
        ({"x_train": pixels(12)}, "x_train has shape (12,)"),
        ({"x_train": pixels(12, 5, 4, 2)}, "no axis is 1, 3 or 4 channels"),
        ({"x_train": np.array(5), "y_train": np.array(5)}, "x_train has shape ()"),
        ({"x_train": UNEQUAL}, "x_train is an array of Python objects"),
        ({"x_train": NAN, "y_train": labels(3)}, "x_train, row 1, column 1: nan"),
        ({"x_train": np.full((12, 5, 4), 1e300)}, "x_train, row 0: 1e+300 is not a finite float32"),
    ],
)
def test_npz_errors(tmp_path, change, says):
    made = {k: v for k, v in arrays(**change).items() if v is not None}
    path = write_npz(tmp_path / "a.npz", **made)
    fails(path, "a.npz", says.format(path))


def test_npz_that_is_none(tmp_path):
    path = tmp_path / "a.npz"
    for content, says in [
        (b"", "empty (0 bytes)"),
        (b"hello", "not an .npz file"),
        (pickle.dumps({"x": 1}), "not an .npz file"),
        (b"PK\3\4 cut short", "cannot be read as an .npz file"),
    ]:
        path.write_bytes(content)
        fails(path, path, says)
    with path.open("wb") as file:
        np.save(file, np.eye(3))
    fails(path, "one array, as numpy.save writes")


def test_known_names_bound_the_labels(tmp_path):
    write_npz(tmp_path / "cifar10.npz", **arrays(shape=(32, 32, 3)))
    assert load("cifar10.npz").outputs == 3
    (tmp_path / "cache" / "kedge").mkdir(parents=True)
    made = arrays(shape=(32, 32, 3))
    path = tmp_path / "cache" / "kedge" / "cifar10.npz"
    write_npz(path, **made)
    d = load("cifar10")
    assert (d.outputs, d.classes[9]) == (10, "truck")
    assert np.allclose(d.mean, [0.4914, 0.4822, 0.4465])
    made["y_test"][3] = 10
    write_npz(path, **made)
    fails("cifar10", "y_test, row 3: label 10 is out of range: there are 10 classes, 0 to 9")


# --- IDX and CIFAR --------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
def test_idx_round_trip(tmp_path, pack):
    x, y = write_mnist(tmp_path / "mine", pack)
    d = load(str(tmp_path / "mine"))
    assert np.array_equal(d.x_train[:, 0], x)
    assert np.array_equal(d.y_train, y)
    assert d.sizes == {"train": 12, "test": 6}


def test_idx_errors(tmp_path):
    folder = tmp_path / "mine"
    write_mnist(folder)
    images, test = folder / "train-images-idx3-ubyte", folder / "t10k-labels-idx1-ubyte"
    good = images.read_bytes()
    for content, says in [
        (b"", "the file is empty"),
        (b"\0\0\x08\x01" + good[4:], "not an IDX file with 3 axes"),
        (b"\0\0\x0d\x03" + good[4:], "IDX type 0x0d"),
        (good[:-50], "cut short: 12x4x5 values announced, 190 bytes found (row 9)"),
        (good + b"x", "too long"),
    ]:
        images.write_bytes(content)
        fails(folder, images, says)
    images.write_bytes(good)
    fails(images, "give the folder it is in")
    write_idx(folder, "t10k-labels-idx1-ubyte", labels(5))
    fails(folder, "t10k-images-idx3-ubyte has 6 rows", "t10k-labels-idx1-ubyte has 5")
    write_idx(folder, "t10k-labels-idx1-ubyte", np.array([0, 1, 2, 200, 0, 1]))
    fails(folder, f"{test}, row 3: label 200 is out of range")
    test.unlink()
    fails(folder, "t10k-labels-idx1-ubyte is not")
    write_mnist(tmp_path / "packed", pack=True)
    packed = tmp_path / "packed" / "train-labels-idx1-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:-12])
    fails(tmp_path / "packed", packed, "cannot be read as an IDX file")


@pytest.mark.parametrize("keys", [bytes, bytes.decode])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_cifar10_round_trip(tmp_path, protocol, keys):
    x = write_cifar10(tmp_path / "cifar-10-batches-py", protocol, keys)
    d = load(str(tmp_path / "cifar-10-batches-py"))
    assert np.array_equal(d.x_train, x[:20].reshape(-1, 3, 32, 32))
    assert np.array_equal(d.x_test, x[20:].reshape(-1, 3, 32, 32))
    assert d.y_test.tolist() == [0, 1, 2, 9]
    assert d.classes[9] == "class 9"
    assert load(str(tmp_path)).shape == (3, 32, 32)


def test_cifar10_as_python_2_wrote_it(tmp_path):
    folder, x = tmp_path / "cifar-10-batches-py", pixels(4, 3072)
    write_cifar10(folder)
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + x.size.to_bytes(4, "little")
        + x.tobytes()
        + b"tbU\x06labels](K\x00K\x01K\x02K\x09eu."
    )
    (folder / "test_batch").write_bytes(content)
    d = load(folder)
    assert np.array_equal(d.x_test.reshape(4, -1), x)
    assert d.y_test.tolist() == [0, 1, 2, 9]


def test_cifar100(tmp_path):
    folder = tmp_path / "cache" / "kedge" / "cifar-100-python"
    folder.mkdir(parents=True)
    x = np.asfortranarray(pixels(4, 3072))
    batch = {b"data": x, b"fine_labels": [0, 1, 50, 99], b"coarse_labels": [0, 1, 5, 19]}
    names = {b"fine_label_names": [f"f{i}".encode() for i in range(100)]}
    names[b"coarse_label_names"] = [f"c{i}".encode() for i in range(20)]
    for name, content in [("train", batch), ("test", batch), ("meta", names)]:
        (folder / name).write_bytes(pickle.dumps(content, 2))
    d = load("cifar100")
    assert np.array_equal(d.x_train.reshape(4, -1), x)
    assert (d.outputs, d.classes[99], round(float(d.mean[0]), 4)) == (100, "f99", 0.5071)
    assert load("cifar100(labels=coarse)").classes[19] == "c19"
    fails("cifar100(labels=medium)", "labels=fine or labels=coarse", error=FieldError)
    fails("cifar100(lables=fine)", "Did you mean 'labels'?", error=FieldError)


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    folder, trace = tmp_path / "cifar-10-batches-py", tmp_path / "ran"
    write_cifar10(folder)
    for evil in (
        Evil(os.system, f"touch {trace}"),
        Evil(eval, f"open({str(trace)!r}, 'w')"),
        Evil(np.save, str(trace), 1),
        Evil(np.fromfile, "/etc/passwd"),
    ):
        content = pickle.dumps({"data": pixels(4, 3072), "labels": [0, 1, 2, evil]}, protocol)
        (folder / "data_batch_2").write_bytes(content)
        fails(folder, folder / "data_batch_2", "refused: this pickle asks for", "nothing was run")
    assert not list(tmp_path.glob("ran*"))


def test_cifar_errors(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    path, x = folder / "data_batch_3", pixels(4, 3072)
    for content, says in [
        ([1, 2], "not a CIFAR batch but a list"),
        ({"x": 1}, "needed are 'data' and 'labels', it has 'x'"),
        ({"data": x.astype(float), "labels": [0] * 4}, "has type f8"),
        ({"data": x[:, :9], "labels": [0] * 4}, "data has shape (4, 9)"),
        ({"data": x[:0], "labels": []}, "data is empty"),
        ({"data": x, "labels": [0] * 3}, "data has 4 rows and labels has 3"),
        ({"data": x, "labels": [0, 1, "a", 2]}, "labels, row 2: 'a' is not a class number"),
        ({"data": x, "labels": [0, 1, 2, 10]}, "labels, row 3: label 10 is out of range"),
    ]:
        path.write_bytes(pickle.dumps(content, 2))
        fails(folder, path, says)
    path.write_bytes(pickle.dumps({"data": x, "labels": [0] * 4}, 2)[:-900])
    fails(folder, path, "cannot be read as a CIFAR batch")
    path.write_bytes(b"")
    fails(folder, path, "empty (0 bytes)")
    path.unlink()
    fails(folder, path, "missing; unpack all of the CIFAR archive")


# --- image folders --------------------------------------------------------------------------------


def test_image_folder_round_trip(tmp_path):
    write_images(tmp_path / "pets")
    d = load(str(tmp_path / "pets"))
    assert (d.classes, d.shape, d.x_test) == (("cat", "dog"), (3, 5, 6), None)
    first = np.asarray(Image.open(tmp_path / "pets" / "cat" / "0.png"))
    assert np.array_equal(d.x_train[0], first.transpose(2, 0, 1))
    assert d.y_train.tolist() == [0, 0, 0, 1, 1, 1]


def test_image_folder_with_splits(tmp_path):
    for split, n in [("train", 4), ("test", 2), ("validation", 1)]:
        write_images(tmp_path / "x" / split, n=n, mode="L")
    (tmp_path / "x" / "README.md").write_text("X-rays")
    (tmp_path / "x" / "train" / ".DS_Store").write_text("")
    d = load("x")
    assert d.describe() == "x: 1x5x6 images, 2 classes, 8 train, 2 val, 4 test"
    write_images(tmp_path / "x" / "test", classes=["Cat"])
    fails("x", Path("x/test/Cat"), "no training images of class 'Cat'", "cat, dog")


def test_images_of_different_forms(tmp_path):
    folder = write_images(tmp_path / "pets")
    write_images(folder, classes=["eel"], size=(9, 8))
    fails(folder, folder / "eel" / "0.png", "is 9x8 pixels but", "is 6x5", "write size=5")
    assert load(f"images(path='{folder}', size=5)").shape == (3, 5, 5)
    write_images(folder, classes=["eel"], mode="L")
    fails(folder, folder / "eel" / "0.png", "is grey but", "channels=1 or channels=3")
    assert load(str(folder), channels=1).shape == (1, 5, 6)
    fails(f"{folder}(channels=2)", "channels=1 (grey)", error=FieldError)
    fails(f"{folder}(size=big)", "such as size=64", error=FieldError)


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK"])
def test_image_modes(tmp_path, mode):
    for name in ("a", "b"):
        (tmp_path / "f" / name).mkdir(parents=True)
        suffix = "tif" if mode == "CMYK" else "png"
        Image.new(mode, (3, 3)).save(tmp_path / "f" / name / f"0.{suffix}")
    assert load("f").shape[0] == (1 if mode in ("1", "LA") else 3)


def test_image_folder_errors(tmp_path):
    folder = write_images(tmp_path / "pets")
    bad = folder / "cat" / "1.png"
    good = bad.read_bytes()
    for content in (b"", b"not an image", good[:60], good[:-60]):
        bad.write_bytes(content)
        fails(folder, bad, "cannot be read as an image")
    Image.fromarray(np.zeros((5, 6), np.uint16)).save(bad)
    fails(folder, bad, "pixels of more than 8 bits")
    bad.write_bytes(good)
    (folder / "cat" / "scan.dcm").write_bytes(b"x")
    fails(folder, folder / "cat" / "scan.dcm", "not an image kedge reads")
    (folder / "cat" / "scan.dcm").unlink()
    (folder / "labels.csv").write_text("a,b")
    fails(folder, folder / "labels.csv", "a file beside the class folders")
    (folder / "labels.csv").unlink()
    (folder / "empty").mkdir()
    fails(folder, folder / "empty", "no training images of class 'empty'")
    write_images(tmp_path / "one", classes=["cat"])
    fails("one", "all 3 training samples are of one class ('cat')")
    (tmp_path / "void").mkdir()
    fails("void", "void: empty folder. kedge reads an .npz")
    fails(bad, "give the folder it is in")


# --- CSV ------------------------------------------------------------------------------------------


def test_csv_round_trip(tmp_path):
    text = "age,sex,pressure,Label\n50,f,1.5,ill\n60,m,-2e1,well\n\n70,f,0,ill\n"
    d = load(str(write_csv(tmp_path / "p.csv", "\ufeff" + text)))
    assert d.columns == ("age", "sex=f", "sex=m", "pressure")
    assert d.x_train.tolist() == [[50, 1, 0, 1.5], [60, 0, 1, -20], [70, 1, 0, 0]]
    assert (d.y_train.tolist(), d.classes, d.x_test) == ([0, 1, 0], ("ill", "well"), None)
    assert np.allclose(d.mean, d.x_train.mean(0))
    assert np.allclose(d.std, d.x_train.std(0))
    assert d.describe() == "p: 4 columns, 2 classes, 3 train"
    d = load("p.csv(label=sex, drop=[age, Label])")
    assert d.columns == ("pressure",)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_delimiters(tmp_path, delimiter):
    text = 'a|b|y\n1|"2"|x y\n3|4|"z|z"\n'.replace("|", delimiter).replace("\n", "\r\n")
    d = load(str(write_csv(tmp_path / "p.csv", text)))
    assert d.x_train.tolist() == [[1, 2], [3, 4]]
    assert d.classes == ("x y", f"z{delimiter}z")


def test_csv_classes_are_sorted_as_numbers(tmp_path):
    rows = "".join(f"{i},{label}\n" for i, label in enumerate(["10", "9", "9.0", "2"]))
    d = load(str(write_csv(tmp_path / "p.csv", "a,y\n" + rows)))
    assert (d.classes, d.y_train.tolist()) == (("2", "9", "10"), [2, 1, 1, 0])


def test_csv_constant_columns_do_not_divide_by_zero(tmp_path):
    d = load(str(write_csv(tmp_path / "p.csv", "a,b,y\n0.1,1e-20,x\n0.1,2e-20,z\n0.1,3e-20,x\n")))
    assert d.std[0] == 1
    assert 0 < d.std[1] < 1e-19


def test_csv_tasks(tmp_path):
    rows = "".join(f"{i},{i * 0.1:.1f},{i % 2},{i % 3 // 2}\n" for i in range(25))
    path = write_csv(tmp_path / "p.csv", "a,dose,u,v\n" + rows)
    fails(path, "no column is called label", "label='v'", "a, dose, u, v")
    fails(f"{path}(label=dose)", f"{path}, line 3, column 'dose': '0.1' is one of 25", "regression")
    d = load(f'csv(path="{path}", label="dose", task=regression)')
    assert (d.task, d.y_train.shape, d.classes) == ("regression", (25, 1), None)
    d = load("p.csv(label=[u, v])")
    assert (d.task, d.outputs, d.classes, d.shape) == ("multilabel", 2, ("u", "v"), (2,))
    fails("p.csv(label=[u, dose])", "line 3, column 'dose': '0.1' is neither 0 nor 1")
    fails("p.csv(label=[u, v], task=classification)", "one label column")
    fails("p.csv(label=dos)", "no column 'dos'. Did you mean 'dose'?")
    fails("p.csv(label=u, drop=w)", "no column 'w'")
    for option in ("kind", "name", "known", "limit", "path"):
        fails(f"p.csv({option}=1)", f"kind csv has no option {option!r}", error=FieldError)


def test_csv_with_a_test_file(tmp_path):
    write_csv(tmp_path / "d" / "train.csv", "a,c,y\n1,u,x\n2,v,z\n")
    write_csv(tmp_path / "d" / "test.csv", "c,y,a\nw,x,7\n")
    for text in ("d", "d/train.csv(test='d/test.csv')"):
        d = load(text)
        assert d.columns == ("a", "c=u", "c=v", "c=w")
        assert d.x_test.tolist() == [[7, 0, 0, 1]]
        assert d.y_test.tolist() == [0]
    write_csv(tmp_path / "d" / "test.csv", "c,y,a\nu,x,7\nu,q,7\n")
    fails("d", "test.csv, line 3, column 'y': 'q' is a label that no training row has")
    write_csv(tmp_path / "d" / "test.csv", "c,y,b\nu,x,7\n")
    fails("d", "test.csv has no column 'a', unlike")


LINES = [f"{i},w{i},{'xz'[i % 2]}\n" for i in range(30)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": the file is empty"),
        (" \n\n", ": the file is empty"),
        ("a,y\n", ": only a header, no rows"),
        ("1,2\n3,4\n", ": the first line is numbers"),
        ("a,a,y\n1,2,x\n", ": two columns are called 'a'"),
        (",a,y\n0,1,x\n", ": column 1 has no name"),
        ("a,y\n1,x\n2\n", ", line 3: 1 values, but the header has 2 columns"),
        ("a,y\n1,x\n\n,z\n", ", line 4, column 'a': '' is a missing value; fill it in"),
        ("a,y\n1,x\nNaN,z\n", ", line 3, column 'a': 'NaN' is a missing value"),
        ("a,y\n1,x\n2,?\n", ", line 3, column 'y': '?' is a missing value"),
        ("a,y\n1,x\ninf,z\n", ", line 3, column 'a': 'inf' is not a finite number"),
        ("a,y\n1,x\n1e99,z\n", ", line 3, column 'a': '1e99' is not a finite number"),
        ("a,y\n1,x\n2,z\no3,z\n", ", line 4, column 'a': 'o3' is not a number, as most"),
        ("a;y\n1,5;x\n2,5;z\n", ", line 2, column 'a': '1,5' has a comma"),
        ("a,b,y\n" + "".join(LINES), ", line 2, column 'b': 'w0' is not a number, and with 30"),
        ("y\nx\nz\n", ": no column is left to learn from beside y"),
        ("a,y\n1,x\n2,x\n", ": all 2 training samples are of one class ('x')"),
        ("a,y,label\n1,x,x\n", ": several columns could be the label"),
        (
            "a,y\n" + "".join(f"1,n{i}\n" for i in range(30)),
            "column 'y': 30 different labels in 30",
        ),
        ('a,y\n1,"x\n2,z\n', ", line 2: unexpected end of data"),
        ("a,y\n1," + "x" * 200_000 + "\n", ", line 2: field larger than field limit"),
    ],
)
def test_csv_errors(tmp_path, text, says):
    path = write_csv(tmp_path / "p.csv", text)
    fails(path, f"{path}{says}" if says[0] in ":," else says)


def test_csv_that_is_not_text(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"a,y\n1,x\n2,\xff\xfe\n")
    fails("p.csv", "p.csv, line 3: not UTF-8 text")


# --- silos ----------------------------------------------------------------------------------------


def test_ten_hospitals_as_csv(tmp_path):
    orders = ("age,sex,pressure,diagnosis", "diagnosis,pressure,sex,age")
    for i in range(10):
        text = hospital(i, n=5 + i, columns=orders[i % 2])
        write_csv(tmp_path / "hospitals" / f"hospital_{i + 1}.csv", text)
    d = load('silos(path="hospitals", label="diagnosis")')
    assert d.group_names == tuple(f"hospital_{i + 1}" for i in range(10))
    assert np.bincount(d.groups).tolist() == list(range(5, 15))
    assert d.groups.dtype == np.int64
    assert d.classes == ("covid", "flu", "healthy")
    assert set(d.y_train[d.groups == 0]) == {0}
    assert (d.x_test, d.groups_test, d.shape) == (None, None, (4,))
    assert d.describe() == "hospitals: 4 columns, 3 classes, 95 train, 10 silos"
    assert np.array_equal(load("hospitals/", label="diagnosis").x_train, d.x_train)
    fails("hospitals", "hospital_1.csv: no column is called label")


def test_ten_hospitals_as_image_folders(tmp_path):
    for i in range(10):
        classes = [("covid", "well"), ("flu", "well")][i % 2]
        write_images(tmp_path / "h" / f"site{i}", classes, n=1 + i % 3, mode="L")
    (tmp_path / "h" / "site0" / "flu").mkdir()
    d = load("h")
    assert d.classes == ("covid", "flu", "well")
    assert d.group_names[9] == "site9"
    assert set(d.y_train[d.groups == 1]) == {1, 2}
    assert d.shape == (1, 5, 6)


def test_silos_as_npz_with_test_sets(tmp_path):
    (tmp_path / "h").mkdir()
    for i in range(3):
        write_npz(tmp_path / "h" / f"{i}.npz", **arrays(n=4 + i))
    d = load("h")
    assert d.groups.tolist() == [0] * 4 + [1] * 5 + [2] * 6
    assert np.bincount(d.groups_test).tolist() == [6, 6, 6]
    write_npz(tmp_path / "h" / "1.npz", x=pixels(4, 5, 4), y=labels(4))
    fails("h", Path("h/0.npz"), "has a test set and", Path("h/1.npz"))
    write_npz(tmp_path / "h" / "1.npz", **arrays(shape=(4, 4)))
    fails("h", Path("h/1.npz"), "has samples of shape 1x4x4", "1x5x4")
    write_npz(tmp_path / "h" / "1.npz", **arrays(classes=["a", "b", "c"]))
    fails("h", "'classes' differs from that of")


def test_silo_errors(tmp_path):
    folder = tmp_path / "h"
    write_csv(folder / "a.csv", hospital(1))
    fails(folder, f"{folder}: only a.csv in there")
    write_csv(folder / "b.csv", hospital(2, columns="age,sex,diagnosis"))
    fails(folder, folder / "b.csv", "has no column 'pressure', unlike", label="diagnosis")
    write_csv(folder / "b.csv", "age,sex,pressure,diagnosis\n")
    fails(folder, folder / "b.csv", "only a header", label="diagnosis")
    write_csv(
        folder / "b.csv", hospital(2).replace("\n", ",1\n").replace("diagnosis,1", "diagnosis,n")
    )
    fails(folder, folder / "b.csv", "has a column 'n'", label="diagnosis")
    write_csv(folder / "b.csv", hospital(2))
    write_csv(folder / "b.tsv", hospital(2))
    fails(folder, "b.csv and b.tsv are silos of the same name")
    (folder / "b.tsv").unlink()
    (folder / "c.xlsx").write_bytes(b"PK")
    fails(folder, folder / "c.xlsx", "not a kind of file that kedge reads")
    (folder / "c.xlsx").unlink()
    write_npz(folder / "c.npz", **arrays())
    fails(folder, "c.npz is of kind npz but", "a.csv of kind csv")
    (folder / "c.npz").unlink()
    write_csv(folder / "test.csv", hospital(3))
    fails(folder, folder / "test.csv", "names a split, not a client")
    fails(f"silos(path='{folder / 'a.csv'}')", "not a folder")


def test_natural_order():
    assert sorted(["h10", "h2", "a", "2", "10"], key=natural) == ["2", "10", "a", "h2", "h10"]


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


def test_hub_images(monkeypatch):
    rows = [{"img": Image.fromarray(pixels(1, 4, 4)[0]), "label": i % 2} for i in range(6)]
    features = {"img": Picture(), "label": ClassLabel()}
    hub(monkeypatch, {"train": Rows(rows, **features), "test": Rows(rows[:2], **features)})
    d = load("hf:someone/xrays")
    assert d.describe() == "hf:someone/xrays: 1x4x4 images, 2 classes, 6 train, 2 test"
    assert d.classes == ("no", "yes")
    assert load("hf:xrays(size=2)").shape == (1, 2, 2)
    fails("hf:xrays(label=lab)", "no column 'lab'", "img, label")
    fails("hf:xrays(colour=1)", "no option 'colour'", error=FieldError)
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
    fails("hf:health", "hf:health (train), line 2, column 'age': '' is a missing value")


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
