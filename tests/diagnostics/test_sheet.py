"""Sheets survive a file, and damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kedge.errors import DataError
from kedge.history.sheet import Chart, Sheet, SheetTable, png_uri, read_sheet


def sheet() -> Sheet:
    return Sheet(
        "data",
        "Data of 2 clients",
        findings=["Strong label skew."],
        tables=[SheetTable("Clients", ["client", "samples"], [["a", np.int64(3)], ["b", 4]])],
        charts=[Chart("Classes", "heatmap", [{"x": 0, "y": "a", "value": np.float64("nan")}])],
        values={"gini": np.array([0.5, 0.25])},
        seconds=0.5,
    )


def test_a_sheet_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(sheet().to_json())
    back = read_sheet(path)
    assert back.tables[0].rows == [["a", 3], ["b", 4]]
    assert back.charts[0].rows[0]["value"] is None
    assert back.values == {"gini": [0.5, 0.25]}
    assert back.to_dict() == sheet().to_dict()


def test_a_sheet_prints_its_findings() -> None:
    assert str(sheet()) == "Data of 2 clients\nStrong label skew."


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(DataError, match="data.json"):
        read_sheet(path)


def test_an_unknown_key_is_refused() -> None:
    found = json.loads(sheet().to_json()) | {"colour": "red"}
    with pytest.raises(DataError, match="colour"):
        Sheet.from_dict(found)


def test_kinds_of_charts() -> None:
    with pytest.raises(ValueError, match="pie"):
        Chart("Classes", "pie", [])
    assert png_uri(b"\x89PNG").startswith("data:image/png;base64,iVBO")
