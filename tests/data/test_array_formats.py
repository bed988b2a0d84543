"""npz, IDX and CIFAR files are read back, and then damaged in every way a user might meet."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from kedge.data.datasets import Dataset, load
from kedge.errors import FieldError, UnknownName
from tests.data.dataset_files import (
    arrays,
    fails,
    labels,
    pixels,
    write_cifar10,
    write_idx,
    write_mnist,
    write_npz,
)

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
    fails(
        c,
        "npz.task = 'guess' is not one of: classification, multilabel",
        task="guess",
        error=FieldError,
    )
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
        ({"x_train": np.full((12, 5, 5), 1e300)}, "x_train, row 0: 1e+300 is not a finite float32"),
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
    fails(
        "cifar100(labels=medium)",
        "cifar.labels = 'medium' is not one of: fine, coarse",
        error=FieldError,
    )
    fails("cifar100(lables=fine)", "Did you mean 'labels'?", error=UnknownName)


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


def test_a_forged_type_of_an_array_never_reaches_numpy(tmp_path):
    """With this state, numpy.dtype takes the bytes of an array for addresses, and follows them."""
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    forged = Forged(np.dtype, ("V8",), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 5))
    rebuild = pixels(1).__reduce__()[0]
    array = Forged(rebuild, (np.ndarray, (0,), b"b"), (1, (1,), forged, False, b"A" * 8))
    content = pickle.dumps({"data": array, "labels": [0]}, 2)
    (folder / "data_batch_2").write_bytes(content)
    fails(folder, folder / "data_batch_2", "data has type V8")


class Forged:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


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
