"""Readers: one function per data format, and their options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.data.datasets.cifar import read_cifar
from kedge.data.datasets.dataset import Dataset, ReadResult, assemble
from kedge.data.datasets.find import detect
from kedge.data.datasets.hub import read_hub
from kedge.data.datasets.idx import read_idx
from kedge.data.datasets.image_encoding import with_image_encoding
from kedge.data.datasets.images import read_images
from kedge.data.datasets.npz import read_npz
from kedge.data.datasets.silos import find_silos
from kedge.data.datasets.tables import read_csv
from kedge.errors import DataError
from kedge.grammar import Call
from kedge.registry import Registry
from kedge.schema import Schema, schema_of

if TYPE_CHECKING:
    from kedge.data.datasets.known import Known

readers = Registry[Callable[..., ReadResult]]("reader", see="kedge data")
readers.add("npz", read_npz)
readers.add("idx", read_idx)
readers.add("cifar", read_cifar)
readers.add("images", read_images)
readers.add("csv", read_csv)

KINDS = (*readers, "silos")
FORMATS: dict[str, Callable[..., Any]] = {
    **{name: readers[name] for name in readers},
    "silos": find_silos,
    "hf": read_hub,
}
"""The function that reads each format, for ``kedge show``."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "csv": (
        ("patients.csv(label=sick)", "the label is the column sick"),
        ("patients.csv(label=dose, task=regression)", "predict a number"),
        ("patients.csv(drop=[chol,visit])", "leave out two columns"),
        ("patients.csv(missing=median)", "fill in missing values; or mean, indicator, drop"),
        ("patients.csv(id=patient)", "the column names the rows in predictions"),
        ("patients.csv.gz(test='new.csv')", "test on a second file"),
        ("hospitals(label=sick, missing=mean)", "a folder with one file per client"),
    ),
    "npz": (
        ("scans.npz(task=multilabel)", "rows of 0 and 1 are labels, not classes"),
        ("ecg.npz(kind=series)", "inputs [n, channels, time]"),
        ("texts.npz(kind=tokens)", "whole numbers for an embedding, never scaled"),
    ),
    "images": (
        ("xrays(size=64)", "scale all images to 64 x 64 pixels"),
        ("xrays(channels=1)", "make all images grey"),
    ),
    "silos": (
        ("hospitals", "a folder with one file or folder per client"),
        ("hospitals(label=sick, missing=mean)", "with the options of its files"),
    ),
    "hf": (
        ("hf:ylecun/mnist", "images; the columns are found by their types"),
        ("hf:NAME(config=plain, image=scan, label=finding)", "configuration and columns by name"),
        ("hf:NAME(size=64, channels=1)", "images of one form"),
        ("hf:NAME(label=dose, task=regression, drop=[id], missing=mean)", "a table"),
    ),
}
"""How options of each format are written after ``--data``, and what they do."""

_LIMITED = ("npz", "idx", "cifar")  # formats with numeric labels, which a known dataset bounds


def open_path(
    path: Path,
    name: str,
    options: dict[str, Any],
    kind: str | None = None,
    known: Known | None = None,
) -> Dataset:
    """Read a file or folder.

    Args:
        path: the file or folder.
        name: name of the dataset.
        options: options of the reader.
        kind: name of the reader, or ``silos``; detected if None.
        known: the known dataset that the path holds, for its constants.

    Raises:
        DataError: the data cannot be read or used.
        UnknownName: the reader has no such option.
        FieldError: the value of an option is wrong.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    paths, groups, kind = [path], None, kind or detect(path)
    if kind == "silos":
        kind, paths, groups = find_silos(path)
    options = bind_options(kind, readers[kind], options)
    limited = {"limit": known.count} if known and kind in _LIMITED else {}
    result = readers[kind](paths, **options, **limited)
    if kind == "images":
        result = with_image_encoding(result, options["size"])
    moments = None
    if known:
        moments = known.moments(result.sources[0]["train"][0].shape[1:])
        if result.classes is None and known.classes and len(known.classes) == result.outputs:
            result = result._replace(classes=known.classes)
    return assemble(name, paths, result, groups, moments)


def open_hub(name: str, options: dict[str, Any]) -> Dataset:
    """Read a dataset of the Hugging Face hub."""
    options = bind_options("hf", read_hub, options)
    return assemble(f"hf:{name}", [f"hf:{name}"], read_hub(name, **options))


def schema(kind: str) -> Schema:
    """The options of a format; silos take the options of their files."""
    return _schema(kind, FORMATS[kind])


def bind_options(
    name: str, function: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Check the given options of a reader or a dataset and fill in the defaults."""
    return _schema(name, function).bind(Call(name, None, (), options))


def _schema(name: str, function: Callable[..., Any]) -> Schema:
    return schema_of(function, name, hidden=("limit",))  # set by a known dataset
