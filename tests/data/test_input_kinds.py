"""What arrays and images of other kinds become: token ids, series, volumes, 16-bit pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.data.build import federate
from kedge.data.datasets import available, load
from kedge.errors import DataError, FieldError
from tests.data.dataset_files import fails, labels, pixels, write_images, write_npz

RNG = np.random.default_rng(2)


def floats(*shape):
    return RNG.normal(size=shape)


def npz(tmp_path, x, **more):
    return str(write_npz(tmp_path / "a.npz", x=x, y=labels(len(x)), **more))


@pytest.mark.parametrize(
    ("x", "says", "dtype"),
    [
        (floats(6, 3, 100), "a: 3x100 series, 3 classes, 6 train", np.float32),
        (floats(6, 8, 8), "a: 1x8x8 images, 3 classes, 6 train", np.float32),
        (pixels(6, 5, 40), "a: 1x5x40 images, 3 classes, 6 train", np.uint8),
        (floats(6, 2, 4, 5, 6), None, np.float32),
        (pixels(6, 1, 4, 5, 6), "a: 1x4x5x6 volumes, 3 classes, 6 train", np.uint8),
        (pixels(6, 4, 5, 6, 3), "a: 3x4x5x6 volumes, 3 classes, 6 train", np.uint8),
        (RNG.integers(0, 9, (6, 12)), "a: 12 columns, 3 classes, 6 train", np.float32),
    ],
)
def test_kinds_are_guessed_from_shape_and_type(tmp_path, x, says, dtype):
    path = npz(tmp_path, x)
    if says is None:
        fails(path, "no axis is 1, 3 or 4 channels")
        return
    d = load(path)
    assert d.describe() == says
    assert d.x_train.dtype == dtype
    assert len(d.mean) == d.shape[0]


def test_series_are_standardised_per_channel(tmp_path):
    x = floats(9, 2, 50) * [[[3], [0.5]]] + [[[7], [-2]]]
    d = load(npz(tmp_path, x))
    assert np.array_equal(d.x_train, x.astype(np.float32))
    assert np.allclose(d.mean, x.mean((0, 2)))
    every = federate(d, "iid", clients=2).clean(torch.arange(9)).x
    assert torch.allclose(every.std((0, 2), correction=0), torch.ones(2), atol=1e-5)


def test_kinds_that_are_told(tmp_path):
    path = npz(tmp_path, floats(6, 9, 30))
    fails(path, "a.npz: x has samples of shape 9x30", "write kind=series", "or kind=image")
    assert load(f"{path}(kind=series)").describe().startswith("a: 9x30 series")
    assert load(path, kind="image").shape == (1, 9, 30)
    fails(f"{path}(kind=volume)", "x has shape (6, 9, 30); kind=volume needs [rows, depth")
    fails(f"{path}(kind=film)", "npz.kind = 'film' is not one of: auto, table", error=FieldError)
    path = npz(tmp_path, pixels(6, 9, 8, 7))
    fails(path, "no axis is 1, 3 or 4 channels. For volumes without channels write kind=volume")
    d = load(f"{path}(kind=volume)")
    assert (d.describe(), d.x_train.dtype) == ("a: 1x9x8x7 volumes, 3 classes, 6 train", np.uint8)
    path = npz(tmp_path, floats(6, 40))
    assert load(f"{path}(kind=series)").shape == (1, 40)
    path = npz(tmp_path, RNG.integers(-99, 99, (6, 2, 40)))
    fails(path, "pixel value", "for series write kind=series")
    assert load(f"{path}(kind=series)").x_train.dtype == np.float32


def test_token_ids_stay_whole_from_file_to_batch(tmp_path):
    x = RNG.integers(0, 2**40, (6, 12))
    d = load(npz(tmp_path, x) + "(kind=tokens)")
    assert d.x_train.dtype == np.int64
    assert d.describe() == "a: 12 token ids, 3 classes, 6 train"
    fed = federate(d, "iid", clients=2, split="holdout(0.5)")
    rows = torch.arange(6)
    assert torch.equal(fed.clean(rows).x, torch.tensor(x))
    assert torch.equal(fed.batch(rows, torch.tensor([1, 2], dtype=torch.int32)).x, torch.tensor(x))
    assert next(iter(fed.test_batches())).x.dtype == torch.int64
    with pytest.raises(DataError, match="noise is for numbers"):
        federate(d, "iid+noise(0.1)", clients=2)
    x[2, 3] = -1
    fails(npz(tmp_path, x) + "(kind=tokens)", "x, row 2, column 3: -1 is no token id")
    fails(npz(tmp_path, x / 2) + "(kind=tokens)", "is no token id; these are whole numbers")


def test_the_first_training_array_decides(tmp_path):
    """A test set of other proportions of steps and channels is no image."""
    made = {"x_train": floats(6, 4, 40), "y_train": labels(6)}
    path = write_npz(tmp_path / "a.npz", **made, x_test=floats(3, 4, 4), y_test=labels(3))
    fails(path, "(test) has samples of shape 4x4")


def test_16_bit_arrays(tmp_path):
    x = RNG.integers(0, 65536, (6, 5, 4), dtype=np.uint16)
    d = load(npz(tmp_path, x))
    assert d.describe() == "a: 1x5x4 images, 3 classes, 6 train"
    assert d.x_train.dtype == np.float32
    assert np.array_equal(d.x_train[:, 0], (x / np.float32(65535)).astype(np.float32))
    assert np.array_equal(load(npz(tmp_path, x // 512)).x_train.max() * 65535, (x // 512).max())


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_images(tmp_path, suffix):
    x = RNG.integers(0, 65536, (4, 5, 6), dtype=np.uint16)
    for i, image in enumerate(x):
        folder = tmp_path / "f" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.{suffix}")
    d = load("f")
    assert d.describe() == "f: 1x5x6 images, 2 classes, 4 train"
    assert np.allclose(d.x_train[:, 0], x[[0, 2, 1, 3]] / 65535)
    assert load("f(size=3, channels=3)").shape == (3, 3, 3)
    assert load("f(size=3)").x_train.std() > 0.05
    write_images(tmp_path / "f", classes=["c"], mode="L")
    fails("f", "c/0.png has pixels of 8 bits, unlike", f"0.{suffix}; save all alike")


def test_images_of_real_numbers(tmp_path):
    x = floats(4, 5, 6).astype(np.float32)
    for i, image in enumerate(x):
        folder = tmp_path / "f" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.tif")
    assert np.array_equal(load("f").x_train[:, 0], x[[0, 2, 1, 3]])
    Image.fromarray(np.full((5, 6), 70_000, np.int32)).save(tmp_path / "f" / "a" / "0.tif")
    fails("f", "0.tif: pixels outside 0 to 65535")
    Image.fromarray(np.full((5, 6), np.nan, np.float32)).save(tmp_path / "f" / "a" / "0.tif")
    fails("f", "0.tif: pixels that are NaN or infinite")


def test_listed_shapes_are_those_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))
    arrays = {"s": floats(6, 3, 100), "v": pixels(6, 1, 4, 5, 6), "d": pixels(6, 5, 4)}
    for name, x in arrays.items():
        write_npz(tmp_path / f"{name}.npz", x=x, y=labels(6))
    found = {entry.name: entry.shape for entry in available()}
    for name in arrays:
        assert found[name] == load(name).shape


# --- labels ---------------------------------------------------------------------------------------


def test_test_labels_that_no_training_row_has(tmp_path):
    made = {"x_train": floats(14, 4), "y_train": np.arange(14) % 7, "x_test": floats(3, 4)}
    path = write_npz(tmp_path / "a.npz", **made, y_test=np.array([0, 7, 1]))
    says = "y_test, row 1: label 7 occurs in no training row; those have 0, 1, 2, 3, 4"
    fails(path, path, says)
    write_npz(path, **made, y_test=np.array([0, 6, 1]))
    assert load(path).outputs == 7
    made["y_train"] = made["y_train"] + (made["y_train"] > 2)
    write_npz(path, **made, y_test=np.array([0, 3, 1]))
    fails(path, "y_test, row 1: label 3 occurs in no training row")
    write_npz(path, **made, y_test=np.array([0, 3, 1]), classes=list("abcdefgh"))
    assert load(path).outputs == 8
