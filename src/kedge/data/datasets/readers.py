"""From a path to a Dataset: the reader for its kind, with that reader's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.data.datasets.cifar import read_cifar
from kedge.data.datasets.dataset import Dataset, Found, assemble
from kedge.data.datasets.find import detect
from kedge.data.datasets.hub import read_hub
from kedge.data.datasets.idx import read_idx
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

readers = Registry[Callable[..., Found]]("reader", see="kedge data")
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
"""What ``kedge show`` describes: every kind of data, by the function that reads it."""

_LIMITED = ("npz", "idx", "cifar")  # labels are numbers there, so a known dataset bounds them


def open_path(
    path: Path,
    name: str,
    options: dict[str, Any],
    kind: str | None = None,
    known: Known | None = None,
) -> Dataset:
    """Read a file or folder, as the kind it looks like unless told."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    paths, groups, kind = [path], None, kind or detect(path)
    if kind == "silos":
        kind, paths, groups = find_silos(path)
    options = bound_options(kind, readers[kind], options)
    limited = {"limit": known.count} if known and kind in _LIMITED else {}
    found = readers[kind](paths, **options, **limited)
    moments = None
    if known:
        moments = known.moments(found.parts[0]["train"][0].shape[1:])
        if found.classes is None and known.classes and len(known.classes) == found.outputs:
            found = found._replace(classes=known.classes)
    return assemble(name, paths, found, groups, moments)


def open_hub(name: str, options: dict[str, Any]) -> Dataset:
    options = bound_options("hf", read_hub, options)
    return assemble(f"hf:{name}", [f"hf:{name}"], read_hub(name, **options))


def schema(kind: str) -> Schema:
    """The options that data of a kind take; those of silos are the options of their files."""
    return _schema(kind, FORMATS[kind])


def bound_options(
    name: str, function: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """All options of a reader or a dataset, from those given and the defaults, checked."""
    return _schema(name, function).bind(Call(name, None, (), options))


def _schema(name: str, function: Callable[..., Any]) -> Schema:
    return schema_of(function, name, hidden=("limit",))  # a known dataset sets it
