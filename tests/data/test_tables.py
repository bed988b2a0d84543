"""Tables with missing values, dates, categories and booleans; all their problems at once."""

from __future__ import annotations

import gzip
import sys

import numpy as np
import pandas as pd
import pytest

from kedge.data.datasets import available, load
from kedge.errors import DataError, FieldError, SeveralDataErrors
from tests.data.dataset_files import fails, hospital, write_csv

# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.csv.gz", "p.tsv.gz", "p.tsv", "p.parquet", "P.CSV"])
def test_the_same_table_in_every_format(tmp_path, name):
    text = "age,sex,well,day,y\n50,f,true,2024-01-31,a\n61.5,m,False,1970-01-02,b\n"
    expected = load(str(write_csv(tmp_path / "plain.csv", text)))
    if ".tsv" in name:
        text = text.replace(",", "\t")
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif name.endswith(".parquet"):
        frame = pd.read_csv(tmp_path / "plain.csv", parse_dates=["day"])
        assert frame.dtypes["day"].kind == "M"
        frame.to_parquet(path)
    else:
        path.write_text(text)
    d = load(str(path))
    assert np.array_equal(d.x_train, expected.x_train)
    assert (d.columns, d.classes, d.name.lower()) == (expected.columns, ("a", "b"), "p")
    assert np.array_equal(d.encoding.encode(path).x, d.x_train)


def test_packed_silos_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))
    (tmp_path / "h").mkdir()
    for i in range(3):
        data = hospital(i).encode()
        (tmp_path / "h" / f"site.{i}.csv.gz").write_bytes(gzip.compress(data))
    assert load("h(label=diagnosis)").group_names == ("site.0", "site.1", "site.2")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(hospital(1).encode()))
    pd.DataFrame({"a": [1, 2], "y": [0, 1]}).to_parquet(tmp_path / "u.parquet")
    assert load("t(label=diagnosis)").sizes == {"train": 8}
    sizes = {entry.name: entry.sizes for entry in available()}
    assert (sizes["h"], sizes["t"]) == ({"train": 24, "silos": 3}, {"train": 8})
    assert sizes["u"] == {"train": 2}


def test_damaged_and_missing_formats(tmp_path, monkeypatch):
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(hospital(1).encode())[:-10])
    fails("p.csv.gz", "p.csv.gz: cannot be read as a CSV file")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    fails("p.parquet", "p.parquet: cannot be read as a Parquet file")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails("p.parquet", "Parquet needs the package pyarrow: pip install 'kedge[parquet]'")


# --- columns --------------------------------------------------------------------------------------


def test_dates_are_days_and_a_season(tmp_path):
    days = ["1970-01-02", "1971-01-01 12:00", "2024-03-31"]
    rows = "".join(f"{day},{'ab'[i % 2]}\n" for i, day in enumerate(days))
    d = load(str(write_csv(tmp_path / "p.csv", "day,y\n" + rows)))
    assert d.columns == ("day", "day:sin", "day:cos")
    assert d.x_train[:, 0].tolist() == [1, 365.5, 19813]
    angle = 2 * np.pi * np.array([1, 365.5, 19813]) / 365.2425
    assert np.allclose(d.x_train[:, 1], np.sin(angle))
    assert np.allclose(d.x_train[:, 2], np.cos(angle))
    assert np.allclose(d.x_train[0, 1:], d.x_train[1, 1:], atol=0.02)  # both are in early January


@pytest.mark.parametrize(
    ("days", "first"),
    [
        (["31.01.2024", "01.02.2024"], "2024-01-31"),
        (["31/01/2024", "01/02/2024"], "2024-01-31"),
        (["01/31/2024", "02/01/2024"], "2024-01-31"),
    ],
)
def test_other_ways_to_write_dates(tmp_path, days, first):
    d = load(str(write_csv(tmp_path / "p.csv", f"day,y\n{days[0]},a\n{days[1]},b\n")))
    since = (pd.Timestamp(first) - pd.Timestamp(0)).days
    assert d.x_train[:, 0].tolist() == [since, since + 1]
    stamps = pd.DataFrame({"day": pd.to_datetime([first, None])}).dropna()
    assert d.encoding.encode(stamps).x[:, 0].tolist() == [since]


def test_every_silo_has_its_own_way_to_write_dates(tmp_path):
    days = {"a": "2024-01-{:02d}", "b": "{:02d}.01.2024", "c": "{:02d}/01/2024"}
    for name, form in days.items():
        rows = "".join(f"{form.format(d)},{'ny'[d % 2]}\n" for d in range(1, 31))
        write_csv(tmp_path / "h" / f"{name}.csv", "day,y\n" + rows)
    d = load(str(tmp_path / "h"))
    first = (pd.Timestamp("2024-01-01") - pd.Timestamp(0)).days
    assert d.x_train[:, 0].tolist() == [first + i for i in range(30)] * 3
    for day in ("2024-01-05", "05.01.2024", "05/01/2024"):  # a new file may have any of them
        assert d.encoding.encode({"day": [day]}).x[0, 0] == first + 4
    again = type(d.encoding).from_dict(d.encoding.to_dict())
    assert again.encode({"day": ["05.01.2024"]}).x[0, 0] == first + 4
    rows = "".join(f"01/{d:02d}/2024,{'ny'[d % 2]}\n" for d in range(1, 31))
    write_csv(tmp_path / "h" / "d.csv", "day,y\n" + rows)
    fails("h", "d.csv, line 2, column 'day': '01/01/2024' has the month first, and other files the")
    (tmp_path / "h" / "c.csv").unlink()
    load(str(tmp_path / "h"))
    rows = "".join(f"2024-01-{d:02d},{'ny'[d % 2]}\n" for d in range(1, 31))
    write_csv(tmp_path / "h" / "d.csv", f"day,y\n{rows}31.01.24,y\n")
    fails("h", "d.csv, line 32, column 'day': '31.01.24' is not a date like most of this column")


def test_dates_that_are_none(tmp_path):
    path = write_csv(tmp_path / "p.csv", "day,y\n01/02/2024,a\n02/01/2024,b\n")
    fails(path, "line 2, column 'day': '01/02/2024' may have the day or the month first")
    write_csv(tmp_path / "d" / "train.csv", "day,y\n2024-01-31,a\n2024-02-01,b\n")
    write_csv(tmp_path / "d" / "test.csv", "day,y\n2024-02-30,a\n7,b\n")
    fails("d", "test.csv, line 2, column 'day': '2024-02-30' is not a date", "'7' is not a date")


def test_booleans_are_one_column(tmp_path):
    d = load(str(write_csv(tmp_path / "p.csv", "a,b,y\ntrue,False,1\nFALSE,true,0\nTrue,true,1\n")))
    assert d.columns == ("a", "b")
    assert d.x_train.tolist() == [[1, 0], [0, 1], [1, 1]]
    write_csv(tmp_path / "q.csv", "a,b,y\n1,true,true\n2,true,False\n")
    assert load("q.csv").classes == ("False", "True")
    write_csv(tmp_path / "d" / "train.csv", "a,y\ntrue,a\nfalse,b\n")
    write_csv(tmp_path / "d" / "test.csv", "a,y\n0,a\n1,b\n")
    assert load("d").x_test.tolist() == [[0], [1]]
    write_csv(tmp_path / "d" / "test.csv", "a,y\nmaybe,a\n1,b\n")
    fails("d", "line 2, column 'a': 'maybe' is neither true nor false")


def test_a_column_that_is_numbers_in_one_file_and_words_in_another(tmp_path):
    write_csv(tmp_path / "h" / "a.csv", "stage,y\n1,u\n2.0,v\n")
    write_csv(tmp_path / "h" / "b.csv", "stage,y\nx,u\nx,v\n2,u\nx,u\n")
    d = load("h")
    assert d.columns == ("stage=1", "stage=2", "stage=x")
    assert d.x_train.argmax(1).tolist() == [0, 1, 2, 2, 1, 2]


def test_columns_that_name_rows(tmp_path):
    rows = "".join(f"p{i},{i},{'ab'[i % 2]}\n" for i in range(30))
    path = write_csv(tmp_path / "p.csv", "patient,age,y\n" + rows)
    fails(path, "column 'patient': 'p0' is not a number", "drop=patient", "id=patient")
    for text in ("p.csv(id=patient)", "p.csv(drop=patient)"):
        d = load(text)
        assert d.columns == ("age",)
        assert d.encoding.encode(path).ids[:2] == ("p0", "p1")


# --- missing values -------------------------------------------------------------------------------

GAPS = "a,c,y\n1,u,x\n,u,z\n3,NA,x\n8,v,z\n"


def gaps(tmp_path, missing):
    write_csv(tmp_path / "p.csv", GAPS)
    return load(f"p.csv(missing={missing})")


def test_missing_values_are_errors_that_say_what_to_type(tmp_path):
    path = write_csv(tmp_path / "p.csv", GAPS)
    fails(
        path,
        "2 problems in the data",
        f"\n  {path}, line 3, column 'a': '' is a missing value\n",
        f"\n  {path}, line 4, column 'c': 'NA' is a missing value\n",
        "Missing values: fill them in with missing=mean (or median, indicator), leave out such "
        "rows with missing=drop, or leave out the columns with drop=[a, c]",
        error=SeveralDataErrors,
    )
    fails(
        f"{path}(drop=c)",
        f"{path}, line 3, column 'a': '' is a missing value; fill it in with missing=mean (or "
        "median, indicator), leave out such rows with missing=drop, or leave out the column with "
        "drop=a",
    )
    for name in ("n", "s"):
        write_csv(tmp_path / "h" / f"{name}.csv", GAPS + ",u,x\n")
    text = "n.csv, line 3, column 'a': '' is a missing value (and 3 more in this column of 2 files)"
    fails("h(drop=c)", text + "; fill them in with missing=mean")
    fails(f"{path}(missing=mode)", "csv.missing = 'mode' is not one of: error", error=FieldError)


def test_missing_values_are_filled_in(tmp_path):
    x = gaps(tmp_path, "mean").x_train
    assert np.allclose(x[:, 0], [1, 4, 3, 8])
    assert np.allclose(x[2, 1:], [2 / 3, 1 / 3])
    x = gaps(tmp_path, "median").x_train
    assert x.tolist() == [[1, 1, 0], [3, 1, 0], [3, 1, 0], [8, 0, 1]]
    d = gaps(tmp_path, "indicator")
    assert d.columns == ("a", "a=missing", "c=u", "c=v", "c=missing")
    assert d.x_train[1].tolist() == [4, 1, 1, 0, 0]
    assert d.x_train[2].tolist() == [3, 0, 0, 0, 1]
    d = gaps(tmp_path, "drop")
    assert d.x_train.tolist() == [[1, 1, 0], [8, 0, 1]]
    assert d.y_train.tolist() == [0, 1]


@pytest.mark.parametrize("missing", ["mean", "median"])
def test_fills_are_sums_over_silos_of_training_rows(tmp_path, missing):
    """The test file and the order of files change nothing; a mean of means would be another one."""
    silos = {"n": [1.0, 2.0, 9.0], "s": [5.0]}
    for name, values in silos.items():
        lines = [f"{v},{'xz'[i % 2]}" for i, v in enumerate(values)]
        write_csv(tmp_path / "h" / name / "train.csv", "\n".join(["a,y", *lines, ",x"]))
        write_csv(tmp_path / "h" / name / "test.csv", "a,y\n1000,x\n,z\n")
    d = load(f"h(missing={missing})")
    expected = {"mean": (1 + 2 + 9 + 5) / 4, "median": (2 + 5) / 2}[missing]
    assert d.encoding.columns[0].fill == (expected,)
    assert d.x_train[[3, 5], 0].tolist() == [expected] * 2
    assert d.x_test[1, 0] == expected


def test_missing_labels_are_never_filled_in(tmp_path):
    path = write_csv(tmp_path / "p.csv", "a,y\n1,x\n2,\n3,z\n")
    fails(f"{path}(missing=mean)", "line 3, column 'y': '' is a missing value; labels are never")
    assert load(f"{path}(missing=drop)").x_train.tolist() == [[1], [3]]


def test_columns_without_values(tmp_path):
    path = write_csv(tmp_path / "p.csv", "a,b,y\n1,,x\n2,,z\n")
    fails(f"{path}(missing=mean)", "column 'b': every value is missing", "drop=b")
    fails(f"{path}(missing=drop)", "every row has a missing value")
    assert load(f"{path}(drop=b)").shape == (1,)


# --- all at once ----------------------------------------------------------------------------------


def test_all_problems_of_all_files_are_reported_together(tmp_path):
    write_csv(tmp_path / "h" / "a.csv", "a,b,y\n1,2,x\n,2,z\n3,,x\n4,1,\n")
    write_csv(tmp_path / "h" / "b.csv", "a,b,y\n")
    write_csv(tmp_path / "h" / "c.csv", "a,y\n1,x\n2,z\n")
    write_csv(tmp_path / "h" / "d.csv", "b,y,a\n1,x,2\n1;5,z,3\n2,z,inf\n2,z,-inf\n")
    with pytest.raises(SeveralDataErrors) as caught:
        load("h")
    lines = [str(error) for error in caught.value.errors]
    for phrase in (
        "b.csv: only a header, no rows",
        "c.csv has no column 'b', unlike h/a.csv; columns must be the same: add it, or leave it "
        "out with drop=b",
        "a.csv, line 3, column 'a': '' is a missing value",
        "a.csv, line 4, column 'b': '' is a missing value",
        "a.csv, line 5, column 'y': '' is a missing value",
        "d.csv, line 3, column 'b': '1;5' is not a number",
        "d.csv, line 4, column 'a': 'inf' is not a finite number; correct it or delete the row "
        "(and 1 more in this column)",
    ):
        assert sum(phrase in line for line in lines) == 1, phrase
    assert len(lines) == 7


def test_columns_and_words_that_differ_in_their_spelling_alone(tmp_path):
    write_csv(tmp_path / "h" / "a.csv", "CRP,sex,sick\n1,m,Yes\n2,f,No\n")
    write_csv(tmp_path / "h" / "b.csv", "crp,sex,sick\n1,M,yes\n2,f,no\n")
    fails("h(label=sick)", "b.csv has no column 'CRP'", "if 'crp' is 'CRP', use one name in all")
    write_csv(tmp_path / "h" / "a.csv", "crp,sex,sick\n1,m,Yes\n2,f,No\n")
    with pytest.warns(UserWarning, match="spell them alike in all files") as caught:
        load("h(label=sick)")
    words, classes = [str(warning.message) for warning in caught]
    assert "column 'sex': 'm' (h/a.csv) and 'M' (h/b.csv) count as different words" in words
    assert "'No' (h/a.csv) and 'no' (h/b.csv), 'Yes' (h/a.csv) and 'yes' (h/b.csv) co" in classes


def test_long_lists_of_problems_are_cut(tmp_path):
    names = [f"c{i}" for i in range(26)]
    text = ",".join([*names, "y"]) + "\n" + ",".join(["1"] * 26 + ["x"]) + "\n" + "," * 26 + "z\n"
    with pytest.raises(SeveralDataErrors) as caught:
        load(str(write_csv(tmp_path / "p.csv", text)))
    lines = str(caught.value).splitlines()
    assert lines[0] == "26 problems in the data:"
    assert lines[21] == "  and 6 more"
    assert lines[22].startswith("Missing values: fill them in with missing=mean")
    assert len(lines) == 23
    assert isinstance(caught.value, DataError)


def test_dropped_columns_need_not_be_in_every_file(tmp_path):
    write_csv(tmp_path / "h" / "a.csv", "a,visit,y\n1,2,x\n2,3,z\n")
    write_csv(tmp_path / "h" / "b.csv", "y,a,note\nx,1,?\nz,5,hm\n")
    d = load("h(drop=[visit,note])")
    assert d.x_train[:, 0].tolist() == [1, 2, 1, 5]


def test_quoted_cells_of_several_lines_keep_their_place(tmp_path):
    text = 'note,a,y\n"two\nlines",1,x\n\n,,\nz,o1,z\n"q",2,z\nz,3,z\n'
    fails(write_csv(tmp_path / "p.csv", text), "line 6, column 'a': 'o1' is not a number")


def test_one_test_file_for_all_silos(tmp_path):
    for i in range(2):
        write_csv(tmp_path / "h" / f"site{i}.csv", hospital(i))
    write_csv(tmp_path / "new.csv", hospital(7))
    d = load(f"{tmp_path / 'h'}(label=diagnosis, test='{tmp_path / 'new.csv'}')")
    assert d.sizes == {"train": 16, "test": 8}
    assert d.groups_test is None
    assert np.array_equal(d.x_test, d.encoding.encode(tmp_path / "new.csv").x)


def test_decimal_commas_in_files_with_semicolons(tmp_path):
    text = "a;b;w;y\n1,5;1.203,5;x,y;p\n2;-7,25e1;x,y;q\n;0;z;q\n"
    d = load(str(write_csv(tmp_path / "a.csv", text)) + "(missing=mean)")
    assert d.x_train[:, 0].tolist() == [1.5, 2.0, 1.75]
    assert d.x_train[:, 1].tolist() == [1203.5, -72.5, 0.0]
    assert d.columns == ("a", "b", "w=x,y", "w=z")
    new = write_csv(tmp_path / "new.csv", 'w,b,a\nz,0,1.5\n"x,y",1203.5,2\n')  # of another kind
    assert d.encoding.encode(new).x[:, :2].tolist() == [[1.5, 0.0], [2.0, 1203.5]]
