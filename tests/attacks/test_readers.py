"""Data files that unpack to more than the memory, or whose headers promise what is not there."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kedge.data.datasets import formats, load
from kedge.data.datasets.known import available
from kedge.data.datasets.tables import files as table_files
from kedge.data.encodings import ArrayEncoding
from kedge.errors import DataError
from tests.attacks.hostile_runs import bounded

FREE = 50 * 2**20  # bytes of memory that are free, as the tests have it
HUGE = 2**62


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (formats, table_files):
        monkeypatch.setattr(module, "host_available", lambda: FREE)


def npy(shape: Any, dtype: str = "<f4", data: bytes = b"") -> bytes:
    """An array in numpy's format, of any shape."""
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


def png(width: int, height: int) -> bytes:
    """A grey image of zeros, of 1/1000 of its size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer, rows = zlib.compressobj(), []
    if width * height < 10**8:  # of others the header must do
        rows = [packer.compress(bytes(width + 1)) for _ in range(height)]
    data = b"".join([*rows, packer.flush()])
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def write_zip(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.npy", content)
    return path


def one_sentence(path: Path, error: pytest.ExceptionInfo[DataError]) -> None:
    text = str(error.value)
    assert path.name in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("shape", [(HUGE, HUGE), (HUGE,), (2**40, 64), (-1, 64), ("x",), 5])
def test_shapes_that_no_array_has(shape: Any, tmp_path: Path) -> None:
    small = npy((4,), "<i8", bytes(32))
    path = write_zip(tmp_path / "a.npz", x_train=npy(shape), y_train=small)
    with bounded(), pytest.raises(DataError) as error:
        load(path)
    one_sentence(path, error)
    path = tmp_path / "a.npy"
    path.write_bytes(npy(shape))
    with bounded(), pytest.raises(DataError) as error:
        ArrayEncoding((64,), "float32").encode(path)
    one_sentence(path, error)


@pytest.mark.usefixtures("little_memory")
def test_an_archive_of_zeros(tmp_path: Path) -> None:
    zeros = npy((2**20, 64), "<f4", bytes(2**28))
    path = write_zip(tmp_path / "a.npz", x_train=zeros, y_train=npy((2**20,), "|u1", bytes(2**20)))
    assert path.stat().st_size < 2**20
    for read in (load, ArrayEncoding((64,), "float32").encode):
        with bounded(megabytes=50), pytest.raises(DataError, match="are free; use less") as error:
            read(path)
        one_sentence(path, error)


@pytest.mark.usefixtures("little_memory")
def test_a_file_of_holes(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        file.write(npy((2**34, 64)))
        file.truncate(2**42)
    with bounded(megabytes=50), pytest.raises(DataError, match="are free; use less") as error:
        ArrayEncoding((64,), "float32").encode(path)
    one_sentence(path, error)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("line", [b"1,2\n", b"1"])
def test_a_table_that_unpacks_to_gigabytes(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = gzip.compress(line * (2**24 // len(line)), 1)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n") + 16 * block)
    assert path.stat().st_size < 3e6
    with bounded(megabytes=200), pytest.raises(DataError, match="of text; with the mem") as error:
        load(f"{path}(label=a)")
    one_sentence(path, error)
    if line.endswith(b"\n"):
        return
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))
    with bounded(5, megabytes=200):
        assert "a" in [listing.name for listing in available()]


@pytest.mark.usefixtures("little_memory")
def test_a_table_of_repeated_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": np.zeros(10**7), "b": np.zeros(10**7)}), path)
    assert path.stat().st_size < 1e5
    with bounded(megabytes=50), pytest.raises(DataError, match="are free; use less") as error:
        load(f"{path}(label=a)")
    one_sentence(path, error)


@pytest.mark.usefixtures("little_memory")
def test_images_whose_headers_promise_much(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / name / "a.png")
    path = folder / "cat/b.png"
    path.write_bytes(png(60_000, 60_000))
    with bounded(), pytest.raises(DataError, match="cannot be read as an image") as error:
        load(folder)
    one_sentence(path, error)
    for i in range(4):
        for name in ("cat", "dog"):
            (folder / name / f"{'abcd'[i]}.png").write_bytes(png(3000, 3000))
    with bounded(5, megabytes=200), pytest.raises(DataError, match="are free; use less") as error:
        load(folder)
    one_sentence(folder, error)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2, 28, 28), (0, 28, 28)])
def test_compressed_digits_of_any_length(shape: tuple[int, ...], tmp_path: Path) -> None:
    head = struct.pack(">HBB", 0, 8, 3) + struct.pack(">III", *shape)
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb") as file:
        file.write(head)
        for _ in range(16):
            file.write(bytes(2**24))
    for prefix in ("train", "t10k"):
        path = tmp_path / f"{prefix}-images-idx3-ubyte.gz"
        path.write_bytes(content.getvalue())
        labels = struct.pack(">HBBI", 0, 8, 1, 2) + bytes(2)
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with bounded(megabytes=50), pytest.raises(DataError, match="too long|are free; use") as error:
        load(tmp_path)
    one_sentence(tmp_path / "train-images-idx3-ubyte.gz", error)
