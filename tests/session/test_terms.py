"""Terms: equal hashes mean equal terms; members' data are read by names, not by places."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kedge.data.datasets import Dataset, load
from kedge.errors import TermsError
from kedge.federation.member.own_data import conform, schema_of
from kedge.session.terms import DataSchema, Terms

DATA = DataSchema((3,), "classification", 3, ("cat", "dog", "horse"), ("a", "b=x", "b=y"))
TERMS = Terms(DATA, 4, 80, method="scaffold", per_round=2, optimizer="sgd(lr=0.3)")


def table(columns: tuple[str, ...], classes: tuple[str, ...], name: str = "north") -> Dataset:
    x = np.arange(4 * len(columns), dtype=np.float32).reshape(4, -1)
    y = np.arange(4) % len(classes)
    return Dataset(name, x, y, x.mean(0), x.std(0), "classification", len(classes),
                   classes=classes, columns=columns)  # fmt: skip


def test_terms_travel_as_text_and_their_hash_tells_them_apart() -> None:
    again = Terms.from_json(TERMS.to_json())
    assert again == TERMS
    assert again.hash == TERMS.hash
    for change in (
        {"seed": 1},
        {"method": "fedavg"},
        {"batch": 16},
        {"weighting": "uniform"},
        {"examples": 81},
    ):
        assert dataclasses.replace(TERMS, **change).hash != TERMS.hash  # type: ignore[arg-type]
    other = dataclasses.replace(DATA, classes=("cat", "horse", "dog"))
    assert dataclasses.replace(TERMS, data=other).hash != TERMS.hash


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no terms"),
        ("[]", "no terms"),
        ("{}", "another format"),
        (TERMS.to_json().replace('"format": 2', '"format": 9'), "another format"),
        (TERMS.to_json().replace('"seed"', '"sed"'), "unknown or missing: sed, seed"),
    ],
)
def test_other_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TermsError, match=reason):
        Terms.from_json(text)


def test_classes_are_known_by_name() -> None:
    """(cat, dog) here and (dog, horse) there are not the same two labels."""
    first = conform(table(DATA.columns or (), ("cat", "dog")), DATA)
    second = conform(table(DATA.columns or (), ("dog", "horse")), DATA)
    assert first.y_train.tolist() == [0, 1, 0, 1]
    assert second.y_train.tolist() == [1, 2, 1, 2]
    assert first.outputs == second.outputs == 3
    with pytest.raises(TermsError, match="a class 'cow' that the terms do not have; they have: c"):
        conform(table(DATA.columns or (), ("cow", "dog")), DATA)


def test_columns_are_known_by_name_and_missing_words_are_zeros() -> None:
    found = conform(table(("b=y", "a"), ("cat", "dog")), DATA)
    assert found.columns == DATA.columns
    assert found.x_train.tolist() == [[1, 0, 0], [3, 0, 2], [5, 0, 4], [7, 0, 6]]
    with pytest.raises(TermsError, match="north has a column 'b=z' that the terms do not have"):
        conform(table(("a", "b=x", "b=z"), ("cat", "dog")), DATA)
    with pytest.raises(TermsError, match="no column 'a', which the terms have"):
        conform(table(("b=x", "b=y"), ("cat", "dog")), DATA)


def test_scaling_is_agreed() -> None:
    schema = dataclasses.replace(DATA, mean=(1.0, 0.0, 0.0), std=(2.0, 1.0, 1.0))
    found = conform(table(DATA.columns or (), ("cat", "dog")), schema)
    assert found.mean.tolist() == [1.0, 0.0, 0.0]
    assert found.std.tolist() == [2.0, 1.0, 1.0]


def test_another_task_or_shape_is_refused() -> None:
    with pytest.raises(TermsError, match="labels are for classification, the terms say regr"):
        conform(table(DATA.columns or (), ("cat",)), dataclasses.replace(DATA, task="regression"))
    plain = dataclasses.replace(DATA, columns=None)
    with pytest.raises(TermsError, match=r"inputs have the shape \[2\], the terms say \[3\]"):
        conform(table(("a", "b"), ("cat",)), plain)


def test_the_schema_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "north.csv"
    file.write_text("age,sex,label\n1,f,no\n2,m,yes\n3,f,no\n4,m,yes\n")
    schema = schema_of(load(str(file)))
    assert schema.columns == ("age", "sex=f", "sex=m")
    assert schema.classes == ("no", "yes")
    assert schema.shape == (3,)
    assert schema.mean[0] == 2.5
    other = tmp_path / "south.csv"
    other.write_text("label,sex,age\nyes,m,7\nno,m,8\n")
    found = conform(load(str(other)), schema)
    assert found.x_train.tolist() == [[7, 0, 1], [8, 0, 1]]
    assert found.y_train.tolist() == [1, 0]
