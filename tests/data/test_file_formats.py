"""Image folders, CSV files and silos are read back, and then damaged as users might meet them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.data.datasets import load
from kedge.data.datasets.formats import natural
from kedge.errors import FieldError, UnknownName
from tests.data.dataset_files import (
    arrays,
    fails,
    hospital,
    labels,
    pixels,
    write_csv,
    write_images,
    write_npz,
)

# --- image folders --------------------------------------------------------------------------------


def test_image_folder_round_trip(tmp_path):
    write_images(tmp_path / "pets")
    d = load(str(tmp_path / "pets"))
    assert (d.classes, d.shape, d.x_test) == (("cat", "dog"), (3, 5, 6), None)
    first = np.asarray(Image.open(tmp_path / "pets" / "cat" / "0.png"))
    assert np.array_equal(d.x_train[0], first.transpose(2, 0, 1))
    assert d.y_train.tolist() == [0, 0, 0, 1, 1, 1]


def test_image_folder_with_splits(tmp_path):
    for split, n in [("train", 4), ("test", 2), ("validation", 1)]:
        write_images(tmp_path / "x" / split, n=n, mode="L")
    (tmp_path / "x" / "README.md").write_text("X-rays")
    (tmp_path / "x" / "train" / ".DS_Store").write_text("")
    d = load("x")
    assert d.describe() == "x: 1x5x6 images, 2 classes, 8 train, 2 val, 4 test"
    write_images(tmp_path / "x" / "test", classes=["Cat"])
    fails("x", Path("x/test/Cat"), "no training images of class 'Cat'", "cat, dog")


def test_images_of_different_forms(tmp_path):
    folder = write_images(tmp_path / "pets")
    write_images(folder, classes=["eel"], size=(9, 8))
    fails(folder, folder / "eel" / "0.png", "is 9x8 pixels but", "is 6x5", "write size=5")
    assert load(f"images(path='{folder}', size=5)").shape == (3, 5, 5)
    write_images(folder, classes=["eel"], mode="L")
    fails(folder, folder / "eel" / "0.png", "is grey but", "channels=1 or channels=3")
    assert load(str(folder), channels=1).shape == (1, 5, 6)
    fails(f"{folder}(channels=2)", "images.channels = 2 is not one of: 1, 3", error=FieldError)
    fails(
        f"{folder}(size=big)",
        "images.size = 'big' is not a whole number at least 1",
        error=FieldError,
    )


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK"])
def test_image_modes(tmp_path, mode):
    for name in ("a", "b"):
        (tmp_path / "f" / name).mkdir(parents=True)
        suffix = "tif" if mode == "CMYK" else "png"
        Image.new(mode, (3, 3)).save(tmp_path / "f" / name / f"0.{suffix}")
    assert load("f").shape[0] == (1 if mode in ("1", "LA") else 3)


def test_all_faults_of_images_at_once(tmp_path):
    folder = write_images(tmp_path / "pets")
    write_images(folder, classes=["eel"], size=(9, 8), n=4)
    (folder / "dog" / "7.png").write_bytes(b"no image")
    Image.fromarray(np.zeros((5, 6), np.uint16)).save(folder / "dog" / "8.png")
    fails(
        folder,
        "3 problems in the data",
        folder / "dog" / "7.png",
        "cannot be read as an image",
        folder / "dog" / "8.png",
        "more than 8 bits",
        folder / "eel" / "0.png",
        "write size=5 to scale all to one size (and 3 more such images)",
    )


def test_image_folder_errors(tmp_path):
    folder = write_images(tmp_path / "pets")
    bad = folder / "cat" / "1.png"
    good = bad.read_bytes()
    for content in (b"", b"not an image", good[:60], good[:-60]):
        bad.write_bytes(content)
        fails(folder, bad, "cannot be read as an image")
    Image.fromarray(np.zeros((5, 6), np.uint16)).save(bad)
    fails(folder, bad, "pixels of more than 8 bits")
    bad.write_bytes(good)
    (folder / "cat" / "scan.dcm").write_bytes(b"x")
    fails(folder, folder / "cat" / "scan.dcm", "not an image kedge reads")
    (folder / "cat" / "scan.dcm").unlink()
    (folder / "labels.csv").write_text("a,b")
    fails(folder, folder / "labels.csv", "a file beside the class folders")
    (folder / "labels.csv").unlink()
    (folder / "empty").mkdir()
    fails(folder, folder / "empty", "no training images of class 'empty'")
    write_images(tmp_path / "one", classes=["cat"])
    fails("one", "all 3 training samples are of one class ('cat')")
    (tmp_path / "void").mkdir()
    fails("void", "void: empty folder. kedge reads an .npz")
    fails(bad, "give the folder it is in")


# --- CSV ------------------------------------------------------------------------------------------


def test_csv_round_trip(tmp_path):
    text = "age,sex,pressure,Label\n50,f,1.5,ill\n60,m,-2e1,well\n\n70,f,0,ill\n"
    d = load(str(write_csv(tmp_path / "p.csv", "\ufeff" + text)))
    assert d.columns == ("age", "sex=f", "sex=m", "pressure")
    assert d.x_train.tolist() == [[50, 1, 0, 1.5], [60, 0, 1, -20], [70, 1, 0, 0]]
    assert (d.y_train.tolist(), d.classes, d.x_test) == ([0, 1, 0], ("ill", "well"), None)
    assert np.allclose(d.mean, d.x_train.mean(0))
    assert np.allclose(d.std, d.x_train.std(0))
    assert d.describe() == "p: 4 columns, 2 classes, 3 train"
    d = load("p.csv(label=sex, drop=[age, Label])")
    assert d.columns == ("pressure",)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_delimiters(tmp_path, delimiter):
    text = 'a|b|y\n1|"2"|x y\n3|4|"z|z"\n'.replace("|", delimiter).replace("\n", "\r\n")
    d = load(str(write_csv(tmp_path / "p.csv", text)))
    assert d.x_train.tolist() == [[1, 2], [3, 4]]
    assert d.classes == ("x y", f"z{delimiter}z")


def test_csv_classes_are_sorted_as_numbers(tmp_path):
    rows = "".join(f"{i},{label}\n" for i, label in enumerate(["10", "9", "9.0", "2"]))
    d = load(str(write_csv(tmp_path / "p.csv", "a,y\n" + rows)))
    assert (d.classes, d.y_train.tolist()) == (("2", "9", "10"), [2, 1, 1, 0])


def test_csv_constant_columns_do_not_divide_by_zero(tmp_path):
    d = load(str(write_csv(tmp_path / "p.csv", "a,b,y\n0.1,1e-20,x\n0.1,2e-20,z\n0.1,3e-20,x\n")))
    assert d.std[0] == 1
    assert 0 < d.std[1] < 1e-19


def test_csv_tasks(tmp_path):
    rows = "".join(f"{i},{i * 0.1:.1f},{i % 2},{i % 3 // 2}\n" for i in range(25))
    path = write_csv(tmp_path / "p.csv", "a,dose,u,v\n" + rows)
    fails(path, "no column is called label", "label='v'", "a, dose, u, v")
    fails(f"{path}(label=dose)", f"{path}, line 3, column 'dose': '0.1' is one of 25", "regression")
    d = load(f'csv(path="{path}", label="dose", task=regression)')
    assert (d.task, d.y_train.shape, d.classes) == ("regression", (25, 1), None)
    d = load("p.csv(label=[u, v])")
    assert (d.task, d.outputs, d.classes, d.shape) == ("multilabel", 2, ("u", "v"), (2,))
    fails("p.csv(label=[u, dose])", "line 3, column 'dose': '0.1' is neither 0 nor 1")
    fails("p.csv(label=[u, v], task=classification)", "one label column")
    fails("p.csv(label=dos)", "no column 'dos'. Did you mean 'dose'?")
    fails("p.csv(label=u, drop=w)", "no column 'w'")
    wrong = "p.csv(label=dos, drop=[w, v], id=patient)"
    fails(wrong, "3 problems", "no column 'dos'", "no column 'w'", "no column 'patient'")
    for option in ("kind", "name", "known", "limit", "path"):
        fails(f"p.csv({option}=1)", f"no option of csv {option!r}", error=UnknownName)


def test_csv_with_a_test_file(tmp_path):
    write_csv(tmp_path / "d" / "train.csv", "a,c,y\n1,u,x\n2,v,z\n")
    write_csv(tmp_path / "d" / "test.csv", "c,y,a\nw,x,7\n")
    for text in ("d", "d/train.csv(test='d/test.csv')"):
        with pytest.warns(UserWarning, match="no training row has c=w; such values are encoded"):
            d = load(text)
        assert d.columns == ("a", "c=u", "c=v")
        assert d.x_test.tolist() == [[7, 0, 0]]
        assert d.y_test.tolist() == [0]
    write_csv(tmp_path / "d" / "test.csv", "c,y,a\nu,x,7\nu,q,7\n")
    fails("d", "test.csv, line 3, column 'y': 'q' is a label that no training row has")
    write_csv(tmp_path / "d" / "test.csv", "c,y,b\nu,x,7\n")
    fails("d", "test.csv has no column 'a', unlike")


LINES = [f"{i},w{i},{'xz'[i % 2]}\n" for i in range(30)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": the file is empty"),
        (" \n\n", ": the file is empty"),
        ("a,y\n", ": only a header, no rows"),
        ("1,2\n3,4\n", ": the first line is numbers"),
        ("a,a,y\n1,2,x\n", ": two columns are called 'a'"),
        (",a,y\n0,1,x\n", ": column 1 has no name"),
        ("a,y\n1,x\n2\n", ", line 3: 1 values, but the header has 2 columns"),
        ("a,y\n1,x\n\n,z\n", ", line 4, column 'a': '' is a missing value; fill it in"),
        ("a,y\n1,x\nNaN,z\n", ", line 3, column 'a': 'NaN' is a missing value"),
        ("a,y\n1,x\n2,?\n", ", line 3, column 'y': '?' is a missing value"),
        ("a,y\n1,x\ninf,z\n", ", line 3, column 'a': 'inf' is not a finite number"),
        ("a,y\n1,x\n1e99,z\n", ", line 3, column 'a': '1e99' is not a finite number"),
        ("a,y\n1,x\n2,z\no3,z\n", ", line 4, column 'a': 'o3' is not a number, as most"),
        ("a\ty\n1,5\tx\n2,5\tz\n", ", line 2, column 'a': '1,5' has a comma"),
        ("a,b,y\n" + "".join(LINES), ", line 2, column 'b': 'w0' is not a number, and with 30"),
        ("y\nx\nz\n", ": no column is left to learn from beside y"),
        ("a,y\n1,x\n2,x\n", ": all 2 training samples are of one class ('x')"),
        ("a,y,label\n1,x,x\n", ": several columns could be the label"),
        (
            "a,y\n" + "".join(f"1,n{i}\n" for i in range(30)),
            "column 'y': 30 different labels in 30",
        ),
        ('a,y\n1,"x\n2,z\n', ", line 2: unexpected end of data"),
        (
            "a,y\n1," + "x" * 200_000 + "\n",
            f": all 1 training samples are of one class ('{'x' * 60}')",
        ),
    ],
)
def test_csv_errors(tmp_path, text, says):
    path = write_csv(tmp_path / "p.csv", text)
    fails(path, f"{path}{says}" if says[0] in ":," else says)


def test_csv_that_is_not_text(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"a,y\n1,x\n2,\xff\xfe\n")
    fails("p.csv", "p.csv, line 3: not UTF-8 text")


# --- silos ----------------------------------------------------------------------------------------


def test_ten_hospitals_as_csv(tmp_path):
    orders = ("age,sex,pressure,diagnosis", "diagnosis,pressure,sex,age")
    for i in range(10):
        text = hospital(i, n=5 + i, columns=orders[i % 2])
        write_csv(tmp_path / "hospitals" / f"hospital_{i + 1}.csv", text)
    d = load('silos(path="hospitals", label="diagnosis")')
    assert d.group_names == tuple(f"hospital_{i + 1}" for i in range(10))
    assert np.bincount(d.groups).tolist() == list(range(5, 15))
    assert d.groups.dtype == np.int64
    assert d.classes == ("covid", "flu", "healthy")
    assert set(d.y_train[d.groups == 0]) == {0}
    assert (d.x_test, d.groups_test, d.shape) == (None, None, (4,))
    assert d.describe() == "hospitals: 4 columns, 3 classes, 95 train, 10 silos"
    assert np.array_equal(load("hospitals/", label="diagnosis").x_train, d.x_train)
    fails("hospitals", "hospital_1.csv: no column is called label")


def test_ten_hospitals_as_image_folders(tmp_path):
    for i in range(10):
        classes = [("covid", "well"), ("flu", "well")][i % 2]
        write_images(tmp_path / "h" / f"site{i}", classes, n=1 + i % 3, mode="L")
    (tmp_path / "h" / "site0" / "flu").mkdir()
    d = load("h")
    assert d.classes == ("covid", "flu", "well")
    assert d.group_names[9] == "site9"
    assert set(d.y_train[d.groups == 1]) == {1, 2}
    assert d.shape == (1, 5, 6)


def test_silos_as_npz_with_test_sets(tmp_path):
    (tmp_path / "h").mkdir()
    for i in range(3):
        write_npz(tmp_path / "h" / f"{i}.npz", **arrays(n=4 + i))
    d = load("h")
    assert d.groups.tolist() == [0] * 4 + [1] * 5 + [2] * 6
    assert np.bincount(d.groups_test).tolist() == [6, 6, 6]
    write_npz(tmp_path / "h" / "1.npz", x=pixels(4, 5, 4), y=labels(4))
    fails("h", Path("h/0.npz"), "has a test set and", Path("h/1.npz"))
    write_npz(tmp_path / "h" / "1.npz", **arrays(shape=(4, 4)))
    fails("h", Path("h/1.npz"), "has samples of shape 1x4x4", "1x5x4")
    write_npz(tmp_path / "h" / "1.npz", **arrays(classes=["a", "b", "c"]))
    fails("h", "'classes' differs from that of")


def test_silo_errors(tmp_path):
    folder = tmp_path / "h"
    write_csv(folder / "a.csv", hospital(1))
    fails(folder, f"{folder}: only a.csv in there")
    write_csv(folder / "b.csv", hospital(2, columns="age,sex,diagnosis"))
    fails(folder, folder / "b.csv", "has no column 'pressure', unlike", label="diagnosis")
    write_csv(folder / "b.csv", "age,sex,pressure,diagnosis\n")
    fails(folder, folder / "b.csv", "only a header", label="diagnosis")
    write_csv(
        folder / "b.csv", hospital(2).replace("\n", ",1\n").replace("diagnosis,1", "diagnosis,n")
    )
    fails(folder, folder / "b.csv", "has a column 'n'", label="diagnosis")
    write_csv(folder / "b.csv", hospital(2))
    write_csv(folder / "b.tsv", hospital(2))
    fails(folder, "b.csv and b.tsv are silos of the same name")
    (folder / "b.tsv").unlink()
    (folder / "c.xlsx").write_bytes(b"PK")
    fails(folder, folder / "c.xlsx", "not a kind of file that kedge reads")
    (folder / "c.xlsx").unlink()
    write_npz(folder / "c.npz", **arrays())
    fails(folder, "c.npz is of kind npz but", "a.csv of kind csv")
    (folder / "c.npz").unlink()
    write_csv(folder / "test.csv", hospital(3))
    fails(folder, folder / "test.csv", "names a split, not a client")
    fails(f"silos(path='{folder / 'a.csv'}')", "not a folder")


def test_natural_order():
    assert sorted(["h10", "h2", "a", "2", "10"], key=natural) == ["2", "10", "a", "h2", "h10"]


def test_a_sheet_is_to_be_saved_as_csv(tmp_path):
    write_csv(tmp_path / "h" / "a.csv", hospital(1))
    (tmp_path / "h" / "list.xlsx").write_bytes(b"PK")
    fails("h", "list.xlsx: not a kind of file", "save its table as CSV (UTF-8)", label="diagnosis")
