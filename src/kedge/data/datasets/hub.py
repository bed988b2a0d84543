"""``hf:NAME``: datasets of the Hugging Face hub, through the optional ``datasets`` package."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from kedge.data.datasets.arrays import LabelledArray, assemble_labels
from kedge.data.datasets.dataset import ReadResult, TaskOption
from kedge.data.datasets.formats import SPLIT_NAMES, DataReader
from kedge.data.datasets.images import Channels, FirstImage, Pixels, check_shape, to_array
from kedge.data.datasets.tables.files import DataTable, frame_table
from kedge.data.datasets.tables.read import (
    DropOption,
    MissingOption,
    PlacedTable,
    Tables,
    find_column,
    label_columns,
)
from kedge.errors import DataError
from kedge.schema import Doc


@dataclass(frozen=True)
class Hub(DataReader):
    """A dataset of the Hugging Face hub, hf:NAME, through the optional package ``datasets``.

    It is read as images if it has an image column, else as a table of its scalar columns.
    """

    config: Annotated[str | None, Doc("which configuration of the dataset")] = None
    label: Annotated[str | None, Doc("column with the label")] = None
    image: Annotated[str | None, Doc("column with the image")] = None
    task: TaskOption = None
    size: Pixels = None
    channels: Channels = None
    drop: DropOption = ()
    missing: MissingOption = "error"

    examples = (
        ("hf:ylecun/mnist", "images; the columns are found by their types"),
        ("hf:NAME(config=plain, image=scan, label=finding)", "configuration and columns by name"),
        ("hf:NAME(size=64, channels=1)", "images of one form"),
        ("hf:NAME(label=dose, task=regression, drop=[id], missing=mean)", "a table"),
    )

    def read(self, paths: Sequence[str], limit: int | None = None) -> ReadResult:
        """Read ``hf:NAME``, the only one of the paths."""
        name = paths[0]
        splits = _splits(name, self.config)
        features = splits["train"].features
        kinds = {column: type(feature).__name__ for column, feature in features.items()}
        image = self.image or next((c for c, kind in kinds.items() if kind == "Image"), None)
        labels = [c for c, kind in kinds.items() if kind == "ClassLabel"]
        label = self.label or (labels[0] if len(labels) == 1 else None)
        if image is None:
            tables = [
                PlacedTable(0, split, _table(f"{name} ({split})", rows, kinds))
                for split, rows in splits.items()
            ]
            return Tables(label, self.task, self.drop, self.missing).encode(tables, 1)
        image = find_column(name, list(kinds), image)
        [label] = label_columns(name, list(kinds), label)
        first: FirstImage | None = None
        found = []
        for split, rows in splits.items():
            pixels = []
            for i, row in enumerate(_rows(f"{name} ({split})", rows)):
                where = f"{name} ({split}), row {i}"
                if row[image] is None:
                    raise DataError(f"{where}: no image")
                pixels.append(to_array(row[image], where, self.size, self.channels))
                first = check_shape(pixels[-1], where, first)
            y = np.asarray(rows[label])
            found.append(LabelledArray(0, split, np.stack(pixels), f"{name} ({split})", y))
        names = tuple(getattr(features[label], "names", None) or ()) or None
        return assemble_labels(found, 1, self.task, len(names) if names else None, names)


def _splits(name: str, config: str | None) -> dict[str, Any]:
    try:
        package = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name} needs the datasets package: pip install 'kedge[hf]'") from error
    try:
        found = package.load_dataset(name.removeprefix("hf:"), config)
    except Exception as error:  # errors of the package and of its network libraries
        message = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{name} cannot be fetched ({message}). Check the name and the network; "
            "what was downloaded before is found again offline with HF_HUB_OFFLINE=1"
        ) from error
    splits: dict[str, Any] = {}
    for split, rows in found.items():
        if SPLIT_NAMES.get(split) and len(rows):
            splits.setdefault(SPLIT_NAMES[split], rows)
    if "train" not in splits:
        raise DataError(f"{name} has no training rows; its splits are: {', '.join(found)}")
    return splits


def _rows(where: str, rows: Any) -> Any:
    try:
        yield from rows
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: an image cannot be decoded ({error})") from error


def _table(where: str, rows: Any, kinds: dict[str, str]) -> DataTable:
    import pandas as pd

    columns = [c for c, kind in kinds.items() if kind in ("Value", "ClassLabel")]
    names = {c: getattr(rows.features[c], "names", None) for c in columns}
    cells = [{c: _cell(row[c], names[c]) for c in columns} for row in _rows(where, rows)]
    return frame_table(where, pd.DataFrame(cells, columns=columns))


def _cell(value: Any, names: list[str] | None) -> Any:
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value
