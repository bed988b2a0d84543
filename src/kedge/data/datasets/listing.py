"""``available``: the datasets on this machine, and the known ones that are missing."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from kedge.data.datasets.checks import reading
from kedge.data.datasets.find import FILES, detect, entries, locate, roots, stem_of, suffix_of
from kedge.data.datasets.idx import idx_files, idx_shape
from kedge.data.datasets.images import DEEP, GREY, scan, split_folders
from kedge.data.datasets.input_arrays import channels_first, guess_kind
from kedge.data.datasets.known import Known, datasets
from kedge.data.datasets.npz import open_npz, split_keys
from kedge.data.datasets.silos import find_silos
from kedge.data.datasets.table_files import PARQUET, read_table
from kedge.data.datasets.tables import csv_files
from kedge.errors import DataError

MAX_LINE = 2**24  # bytes of a line that are counted as one
Peek = tuple[tuple[int, ...] | None, dict[str, int]]


@dataclass(frozen=True)
class Listing:
    """One line of ``kedge data``."""

    name: str
    kind: str = ""  # empty if the dataset is missing
    where: str = ""
    shape: tuple[int, ...] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    note: str = ""  # an error, or where to put the dataset
    classes: int = 0  # 0: not known without reading the labels
    files: str = ""  # of a missing dataset


def available() -> list[Listing]:
    """List built-in datasets and those in $KEDGE_DATA or the user's cache, then missing ones.

    No dataset is loaded: shapes and sizes come from file headers and counts.
    """
    present, missing = [], []
    listed: set[Path] = set()
    for name in datasets:
        entry = datasets[name]
        if not isinstance(entry, Known):
            shape, sizes = (
                ((1, 8, 8), {"train": 1438, "test": 359}) if name == "digits" else (None, {})
            )
            where, classes = ("scikit-learn", 10) if sizes else ("", 0)
            present.append(Listing(name, "built in", where, shape, sizes, classes=classes))
            continue
        path = locate(name, entry.layouts)
        if path is None:
            note = f"could be put: {entry.advice()}"
            missing.append(Listing(name, "", "", entry.shape, {}, note, entry.count, entry.files()))
        else:
            present.append(replace(_listing(name, path), classes=entry.count))
            listed.add(path)
    names = {listing.name for listing in present}
    for root in roots():
        for path in entries(root) if root.is_dir() else []:
            name = stem_of(path)
            usable = path.is_dir() or suffix_of(path) in FILES
            if usable and name not in names and not any(path in (t, *t.parents) for t in listed):
                present.append(_listing(name, path))
                names.add(name)
    return present + missing


def _listing(name: str, path: Path) -> Listing:
    kind = ""
    try:
        kind = detect(path)
        shape, sizes = peek(path, kind)
    except DataError as error:
        return Listing(name, kind or "unreadable", str(path), note=str(error))
    return Listing(name, kind, str(path), shape, sizes)


def peek(path: Path, kind: str) -> Peek:
    """Sample shape and number of samples per split, from file headers and counts."""
    match kind:
        case "npz":
            return _peek_npz(path)
        case "idx":
            shapes = {split: idx_shape(x, 3) for split, (x, _) in idx_files(path).items()}
            return channels_first(shapes["train"][1:]), {
                split: shape[0] for split, shape in shapes.items()
            }
        case "cifar":
            return (3, 32, 32), {"train": 50_000, "test": 10_000}
        case "images":
            return _peek_images(path)
        case "csv":
            return None, {split: _count_rows(file) for split, file in csv_files(path).items()}
        case _:
            inner, paths, _ = find_silos(path)
            peeks = [peek(p, inner) for p in paths]
            total = {s: sum(sizes.get(s, 0) for _, sizes in peeks) for s in peeks[0][1]}
            return peeks[0][0], total | {"silos": len(paths)}


def _peek_npz(path: Path) -> Peek:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype] = {}
    with open_npz(path) as archive:
        assert archive.zip is not None  # the archive is open
        for split, (x, _) in split_keys(path, archive.files).items():
            with archive.zip.open(f"{x}.npy") as file:
                version = np.lib.format.read_magic(file)
                header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
                shapes[split], _, dtypes[split] = getattr(np.lib.format, header)(file)
    if not all(shapes.values()):
        raise DataError(f"{path}: an array without rows")
    shape = shapes["train"][1:]
    kind = guess_kind(shape, dtypes["train"], f"{path}: x") if len(shape) in (1, 2, 3, 4) else ""
    if kind in ("image", "volume"):
        shape = channels_first(shape, 2 if kind == "image" else 3) or shape
    return shape, {split: shape[0] for split, shape in shapes.items()}


def _peek_images(path: Path) -> Peek:
    scans = {split: scan(folder) for split, folder in split_folders(path).items()}
    first = next(file for files in scans["train"].values() for file in files)
    with reading(first, "an image"), Image.open(first) as image:
        shape = (1 if image.mode in (*GREY, *DEEP) else 3, image.height, image.width)
    return shape, {s: sum(map(len, classes.values())) for s, classes in scans.items()}


def _count_rows(path: Path) -> int:
    suffix = suffix_of(path)
    if suffix in PARQUET:
        return len(read_table(path))
    open_file = gzip.open if suffix.endswith(".gz") else open
    with reading(path, "a CSV file"), open_file(path, "rb") as file:
        lines = iter(partial(file.readline, MAX_LINE), b"")
        return max(0, sum(1 for line in lines if line.strip()) - 1)
