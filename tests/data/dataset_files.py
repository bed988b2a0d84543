"""Small dataset files in every format."""

from __future__ import annotations

import gzip
import pickle
import random

import numpy as np
import pytest
from PIL import Image

from kedge.data.datasets import load
from kedge.errors import DataError

RNG = np.random.default_rng(0)


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n, classes=3):
    return np.arange(n) % classes


def arrays(n=12, shape=(5, 4), **more):
    required = {"x_train": pixels(n, *shape), "y_train": labels(n)}
    return required | {"x_test": pixels(6, *shape), "y_test": labels(6)} | more


def write_npz(path, **arrays):
    np.savez(path, **arrays)
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


def fails(text, *phrases, error=DataError, **options):
    """Loading fails with a message that contains all of ``phrases``."""
    with pytest.raises(error) as caught:
        load(str(text), **options)
    for phrase in phrases:
        assert str(phrase) in str(caught.value)
