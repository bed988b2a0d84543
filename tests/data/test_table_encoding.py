"""Encodings of tables: what was read once is read again to the bit, from any source."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from kedge.data.datasets import load
from kedge.data.datasets.tables.encoding import TableEncoding
from kedge.data.datasets.tables.read import dataset_of_frames
from kedge.data.encoding import encodings
from kedge.errors import DataError, FieldError, SeveralDataErrors
from tests.data.dataset_files import write_csv

RNG = np.random.default_rng(5)


def frame(n=40, seed=0):
    rng = np.random.default_rng(seed)
    made = pd.DataFrame(
        {
            "patient_id": [f"p{i}" for i in range(n)],
            "age": rng.normal(60, 9, n),
            "sex": rng.choice(["f", "m"], n),
            "smokes": rng.random(n) < 0.5,
            "visit": pd.Timestamp("2020-05-01") + pd.to_timedelta(rng.integers(0, 900, n), "D"),
            "stage": rng.integers(1, 4, n),
            "sick": np.where(np.arange(n) % 3 == 0, "yes", "no"),
        }
    )
    for row, column in [(3, "age"), (5, "sex"), (7, "visit")]:
        if row < n:
            made.loc[row, column] = None
    return made


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "p.csv"
    frame().to_csv(path, index=False)
    return path


@pytest.mark.parametrize("missing", ["mean", "median", "indicator"])
def test_the_training_file_is_encoded_to_the_same_bits(csv, missing):
    d = load(f"{csv}(label=sick, id=patient_id, missing={missing})")
    assert "stage=missing" not in d.columns
    assert ("age=missing" in d.columns) == (missing == "indicator")
    rebuilt = encodings["table"].from_dict(json.loads(json.dumps(d.encoding.to_dict())))
    assert rebuilt == d.encoding
    assert rebuilt.names == d.columns
    turned = frame()[frame().columns[::-1]].assign(extra=1)
    sources = [csv, str(csv), frame(), turned, turned.to_dict("list"), turned.to_dict("records")]
    for raw in sources:
        samples = rebuilt.encode(raw)
        assert samples.x.dtype == np.float32
        assert np.array_equal(samples.x, d.x_train)
        assert samples.ids == tuple(frame().patient_id)
        assert [d.classes.index(label) for label in samples.labels] == d.y_train.tolist()


def test_rows_that_are_dropped_in_training_are_dropped_later(csv):
    d = load(f"{csv}(label=sick, id=patient_id, missing=drop)")
    with pytest.warns(UserWarning, match="3 of 40 rows have missing values and are left out"):
        samples = d.encoding.encode(frame())
    assert np.array_equal(samples.x, d.x_train)
    assert samples.ids[:4] == ("p0", "p1", "p2", "p4")
    assert len(samples.labels) == 37


def test_labels_are_optional(csv):
    encoding = load(f"{csv}(label=sick, id=patient_id, missing=mean)").encoding
    assert encoding.encode(frame().drop(columns="sick")).labels is None
    assert encoding.encode(frame().assign(sick=np.nan)).labels is None
    some = frame()
    some.loc[0, "sick"] = None
    assert encoding.encode(some).labels[:2].tolist() == [None, "no"]


def test_labels_that_are_numbers(tmp_path):
    text = "a,u,v\n" + "".join(f"{i},{i / 8},{i % 2}\n" for i in range(8))
    write_csv(tmp_path / "p.csv", text)
    encoding = load("p.csv(label=u, task=regression, drop=v)").encoding
    assert encoding.encode("p.csv").labels.tolist() == [i / 8 for i in range(8)]
    encoding = load("p.csv(label=[u,v], task=regression)").encoding
    assert encoding.encode("p.csv").labels.shape == (8, 2)


def test_ids_without_a_column_for_them(tmp_path):
    write_csv(tmp_path / "p.csv", "a,y\n1,x\n2,z\n")
    encoding = load("p.csv").encoding
    assert encoding.encode("p.csv").ids == ("0", "1")
    named = pd.DataFrame({"a": [5, 6]}, index=["x", "y"])
    assert encoding.encode(named).ids == ("x", "y")
    assert encoding.encode({"a": [5, 6], "Patient ID": [70, 80]}).ids == ("70", "80")


def test_new_words_are_zeros_with_a_warning(csv):
    encoding = load(f"{csv}(label=sick, id=patient_id, missing=mean)").encoding
    new = frame(4, seed=1)
    new = new.assign(sex=["f", "x", "m", "w"], visit=frame().visit[:4])
    with pytest.warns(UserWarning, match="no training row has sex=w, sex=x; such values are"):
        x = encoding.encode(new).x
    at = encoding.names.index("sex=f")
    assert x[:, at : at + 2].tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]


def test_what_cannot_be_encoded(tmp_path):
    write_csv(tmp_path / "p.csv", "age,dose,y\n1,1,x\n2,4,z\n")
    encoding = load("p.csv").encoding
    with pytest.raises(DataError, match=r"no column 'dose'\. The model needs: age, dose"):
        encoding.encode({"age": [1]})
    filled = load("p.csv(missing=mean)").encoding
    with pytest.raises(DataError, match=r"no column 'dose'\. Add it; empty cells are filled in"):
        filled.encode({"age": [1]})
    with pytest.raises(DataError, match=r"no column 'age', 'dose'\. Is 'Age' 'age'\? Then rename"):
        encoding.encode({"Age": [1]})
    with pytest.raises(SeveralDataErrors) as caught:
        encoding.encode({"age": [1, None, 3], "dose": ["1", "two", "inf"]})
    for phrase in (
        "the table, row 1, column 'age': nan is a missing value; fill it in with missing=mean",
        "the table, row 1, column 'dose': 'two' is not a number",
        "the table, row 2, column 'dose': 'inf' is not a finite number",
    ):
        assert phrase in str(caught.value)
    for raw, says in [
        (5, "a table must be the path of a CSV or Parquet file, a DataFrame or a dict"),
        ("nowhere.csv", "nowhere.csv: there is no such file"),
        ({"age": [1, 2], "dose": [1]}, "these columns are no table"),
        ({"age": [], "dose": []}, "no rows"),
        ({"age": [[1]], "dose": [1]}, "column 'age': cells must be numbers, text or dates"),
    ]:
        with pytest.raises(DataError, match=says):
            encoding.encode(raw)


def test_types_of_pandas_do_not_matter(csv):
    d = load(f"{csv}(label=sick, id=patient_id, missing=mean)")
    same = frame()
    typed = same.assign(
        sex=same.sex.astype("category"),
        smokes=same.smokes.astype("boolean"),
        stage=same.stage.astype("Int8"),
        visit=same.visit.dt.tz_localize("UTC"),
        age=same.age.astype(object),
    )
    text = same.astype(object).map(lambda v: "" if v is None or v != v else f" {v} ")
    for raw in (typed, same.convert_dtypes(), text):
        assert np.array_equal(d.encoding.encode(raw).x, d.x_train)


# --- frames ---------------------------------------------------------------------------------------


def test_frames_are_read_as_files_are(tmp_path):
    sites = {"north": frame(30, 1), "south": frame(20, 2)[frame().columns[::-1]]}
    for name, site in sites.items():
        (tmp_path / "h").mkdir(exist_ok=True)
        site.to_csv(tmp_path / "h" / f"{name}.csv", index=False)
    options = {"label": "sick", "id": "patient_id", "missing": "indicator"}
    files, frames = load("h", **options), dataset_of_frames(sites, **options)
    assert frames.fingerprint == files.fingerprint
    assert frames.group_names == ("north", "south")
    assert np.array_equal(frames.mean, files.mean)
    assert frames.encoding == files.encoding
    assert isinstance(frames.encoding, TableEncoding)


def test_frames_with_test_data():
    sites = [frame(30, 1), frame(20, 2)]
    options = {"label": "sick", "drop": ["patient_id"], "missing": "mean"}
    d = dataset_of_frames(sites, test=frame(9, 3), **options)
    assert d.group_names == ("client 0", "client 1")
    assert (d.sizes, d.groups_test) == ({"train": 50, "test": 9}, None)
    tests = {"a": frame(8, 3), "b": frame(9, 4)}
    d = dataset_of_frames(dict(zip("ab", sites, strict=True)), test=tests, **options)
    assert np.bincount(d.groups_test).tolist() == [8, 9]


def test_frames_that_cannot_be_used():
    good = frame().dropna()
    bad = good.reset_index(drop=True).assign(age=np.nan)
    with pytest.raises(DataError, match="south, row 0, column 'age': nan is a missing value"):
        dataset_of_frames({"north": good, "south": bad}, "sick", drop="patient_id")
    with pytest.raises(DataError, match="south: ndarray is no pandas DataFrame"):
        dataset_of_frames({"north": good, "south": np.eye(3)}, "sick", drop="patient_id")
    with pytest.raises(DataError, match="there are no clients"):
        dataset_of_frames({}, "sick")
    with pytest.raises(DataError, match="one for each client of the same name"):
        dataset_of_frames({"north": good}, "sick", test={"south": good})
    with pytest.raises(DataError, match="no column 'sik'. Did you mean 'sick'"):
        dataset_of_frames({"north": good}, "sik")
    with pytest.raises(FieldError, match="missing = 'mode' is not one of"):
        dataset_of_frames({"north": good}, "sick", missing="mode")


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "array", "shape": [1, 8, 8], "dtype": "uint8", "columns": [], "from_files": True},
        {"kind": "image", "shape": [3, 5, 6], "resize": False, "dtype": "uint8"},
        {
            "kind": "table", "labels": ["sick"], "classes": True, "missing": "mean", "id": None,
            "columns": [
                {"name": "age", "kind": "number", "words": [], "format": "", "fill": [58.5],
                 "indicator": True},
                {"name": "sex", "kind": "words", "words": ["f", "m"], "format": "", "fill": None,
                 "indicator": False},
            ],
        },
    ],
)  # fmt: skip
def test_the_encodings_of_saved_bundles_are_read_strictly(values):
    options = {key: value for key, value in values.items() if key != "kind"}
    read = encodings[values["kind"]].from_dict
    assert json.loads(json.dumps(read(options).to_dict())) == options
    first = next(iter(options))
    for wrong in ({**options, first: 3}, {**options, "more": 1}, {first: options[first]}):
        with pytest.raises(ValueError, match="encoding"):
            read(wrong)
