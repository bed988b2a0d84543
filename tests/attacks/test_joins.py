"""Joining tells no patient: rare words, values that fill gaps, sums over few, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.core.model import Model
from kedge.data.datasets import Dataset, load
from kedge.federation.member.policy import OPEN, Policy
from kedge.federation.member.profile import MemberProfile, Question, state
from kedge.models import build
from tests.attacks.server import Server, patients
from tests.flower.federations import Members, coordinator, settings

LISTED = Policy(uploads=("update", "loss", "test"), min_samples=20)
ASKED = Question(0, "holdout(0.2)")


def table(
    folder: Path, columns: dict[str, Sequence[Any]], options: str = "", name: str = "north"
) -> Dataset:
    """A CSV file of a hospital, with the columns given, an age and a label."""
    rows = len(next(iter(columns.values())))
    rng = np.random.default_rng(len(name))
    every = columns | {"age": rng.normal(50, 9, rows).round(1), "label": np.arange(rows) % 2}
    lines = [",".join(every)] + [
        ",".join(str(values[i]) for values in every.values()) for i in range(rows)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return load(f"{path}{options}")


def joined(tmp_path: Path, data: Dataset, policy: Policy = LISTED) -> MemberProfile | str:
    return Server(tmp_path / "member", policy, data).join(ASKED)


def stated(tmp_path: Path, data: Dataset, policy: Policy = LISTED) -> MemberProfile:
    found = joined(tmp_path, data, policy)
    assert isinstance(found, MemberProfile)
    return found


def log(tmp_path: Path) -> str:
    return (tmp_path / "member" / "log.txt").read_text()


# -- words ----------------------------------------------------------------------------------------

TOWNS = ["Bonn"] * 30 + ["Kiel"] * 18 + ["Jena"] * 12


def test_a_word_of_few_patients_does_not_leave(tmp_path: Path) -> None:
    data = table(tmp_path, {"town": [*TOWNS[:-2], "Zell", "Wyhl"]})
    assert "Zell" in state(data, ASKED, "north").to_json()
    found = stated(tmp_path, data)
    assert "Zell" not in found.to_json()
    assert "Wyhl" not in found.to_json()
    # two rows have none of these words: one more is left out, so that their number tells nothing
    assert found.schema.columns == ("town=Bonn", "town=Kiel", "age")
    assert len(found.moments.mean) == 3
    assert found.encoding["columns"][0]["words"] == ["Bonn", "Kiel"]


def test_frequent_words_stay(tmp_path: Path) -> None:
    found = stated(tmp_path, table(tmp_path, {"town": TOWNS}))
    assert found.schema.columns == ("town=Bonn", "town=Jena", "town=Kiel", "age")
    free = stated(tmp_path, table(tmp_path, {"town": [*TOWNS[:-1], "Zell"]}), OPEN)
    assert "town=Zell" in (free.schema.columns or ())


def test_a_column_without_a_frequent_word_is_not_told(tmp_path: Path) -> None:
    data = table(tmp_path, {"town": [f"town{i % 12}" for i in range(60)]})
    assert joined(tmp_path, data) == "POLICY"
    assert "no word of column 'town' has 10 rows; group its words, or drop=town" in log(tmp_path)


def test_a_name_of_a_class_of_few_patients_does_not_leave(tmp_path: Path) -> None:
    data = replace(patients(), classes=("well", "sick", "rare"), outputs=3)
    data.y_train[:2] = 2
    assert joined(tmp_path, data) == "POLICY"
    assert "the class 'rare' has 2 samples, and its name would leave" in log(tmp_path)
    guessed = Server(tmp_path / "member", LISTED, data)  # does the member refuse terms without it?
    for classes in (("well", "sick", "rare"), ("well", "sick", "other")):
        guessed.terms = replace(guessed.terms, data=replace(guessed.terms.data, classes=classes))
        assert guessed.agree() == "POLICY"


def test_a_class_that_only_few_patients_to_test_on_have_does_not_leave(tmp_path: Path) -> None:
    data = replace(patients([2, *[0, 1] * 29, 0]), classes=("well", "sick", "rare"))
    assert joined(tmp_path, data) == "POLICY"
    assert "the class 'rare' has 1 samples, and its name would leave" in log(tmp_path)


def test_terms_do_not_tell_whether_a_word_occurs(tmp_path: Path) -> None:
    data = table(tmp_path, {"town": [*TOWNS[:-1], "Zell"]})
    lying = Server(tmp_path / "member", LISTED, data, split="holdout(0.2)", model="linear")
    kept = ("town=Bonn", "town=Kiel", "age")
    for word in ("Zell", "Kuhl"):
        columns = (*kept, f"town={word}")
        schema = replace(
            lying.terms.data, columns=columns, shape=(4,), mean=(0.0,) * 4, std=(1.0,) * 4
        )
        lying.terms = replace(lying.terms, data=schema)
        lying.initial = Model(build("linear", (4,), 2)).own_weights()
        assert lying.agree(run=f"{len(word) + ord(word[0]):08x}") == ""


def test_members_with_and_without_rare_words_train_together(tmp_path: Path) -> None:
    """What is rare here may be frequent there; here it is encoded as zeros."""
    tables = {
        "north": table(tmp_path, {"town": [*TOWNS[:-1], "Zell"]}, name="north"),
        "south": table(tmp_path, {"town": ["Zell"] * 20 + TOWNS}, name="south"),
    }
    members = Members(
        tmp_path / "members", list(tables.values()), policies={"north": LISTED}, names=list(tables)
    )
    config = settings("fedavg", clients=2, per_round=0, model="linear", split="holdout(0.25)")
    run = coordinator(members, config, tmp_path / "run")
    run.run()
    assert run.roster.terms.data.columns == (
        "town=Bonn", "town=Jena", "town=Kiel", "town=Zell", "age",
    )  # fmt: skip
    own = members.members["north"].dataset
    assert own.columns == ("town=Bonn", "town=Kiel", "age")
    assert "Zell" not in members.log("north")


# -- values ---------------------------------------------------------------------------------------


def test_a_median_is_a_value_of_a_patient(tmp_path: Path) -> None:
    lab = [1.5, 2.5, "", *np.arange(3.0, 60.0)]
    data = table(tmp_path, {"lab": lab}, "(missing=median)")
    assert joined(tmp_path, data) == "POLICY"
    assert "missing=median would send a value of one sample (column 'lab')" in log(tmp_path)
    found = stated(tmp_path / "mean", table(tmp_path, {"lab": lab}, "(missing=mean)"))
    [fill] = found.encoding["columns"][0]["fill"]
    assert fill not in lab


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_the_mean_of_few_values_does_not_leave(missing: str, tmp_path: Path) -> None:
    data = table(tmp_path, {"lab": [7.25] + [""] * 59}, f"(missing={missing})")
    assert joined(tmp_path, data) == "POLICY"
    assert "column 'lab' has fewer than 10 values" in log(tmp_path)
    assert "7.25" not in log(tmp_path)


def test_moments_do_not_tell_the_few_that_differ(tmp_path: Path) -> None:
    """60 values, of which one is 7.25 and all others 0: the sum is the patient's value."""
    lab = [7.25] + [0.0] * 59
    data = table(tmp_path, {"lab": lab, "flag": ["true"] * 3 + ["false"] * 57})
    free = stated(tmp_path / "open", data, OPEN).moments
    assert free.mean[0] * 60 == pytest.approx(7.25)
    found = stated(tmp_path, data).moments
    assert found.mean[:2] == found.squares[:2] == (0.0, 0.0)
    assert found.squares[2] > 0


def test_whole_bytes_of_columns_are_not_told_one_by_one(tmp_path: Path) -> None:
    data = patients()
    whole = replace(data, x_train=(data.x_train * 20 + 99).astype(np.uint8), x_test=None)
    assert joined(tmp_path, whole) == "POLICY"
    assert "save them as float32" in log(tmp_path)


def test_the_sums_of_few_rows_do_not_leave(tmp_path: Path) -> None:
    data = patients()
    one = replace(data, x_train=data.x_train[:1], y_train=data.y_train[:1])
    assert joined(tmp_path, one, Policy()) == "POLICY"
    assert "1 samples are fewer than min_per_word" in log(tmp_path)


# -- many joins -----------------------------------------------------------------------------------


def test_joins_are_counted_by_what_they_tell(tmp_path: Path) -> None:
    data = replace(patients(), x_test=None, y_test=None)
    lying = Server(tmp_path / "member", LISTED, data)
    for run in range(20):  # honest servers ask the same in every run
        assert isinstance(lying.join(ASKED, run=f"{run:016x}"), MemberProfile)
    assert lying.released("join") == 1
    splits = [Question(0, f"holdout({share / 100})", True) for share in range(5, 60, 2)]
    found = [lying.join(question) for question in splits]
    assert sum(isinstance(one, MemberProfile) for one in found) <= 10
    assert lying.released("join") == 10
    assert found[-1] == "POLICY"
    assert "max_joins=10, and as many have left already" in lying.log
    assert isinstance(lying.join(ASKED), MemberProfile)


@pytest.mark.parametrize(
    "question",
    [
        Question(0, "holdout(1e999)"),
        Question(0, "holdout(" * 10),
        Question(0, "given"),
        Question(-(2**70), "holdout(0.5)"),
        Question(0, "hf:somewhere"),
    ],
)
def test_a_question_without_an_answer_is_refused(question: Question, tmp_path: Path) -> None:
    lying = Server(tmp_path / "member", LISTED, replace(patients(), x_test=None, y_test=None))
    assert lying.join(question) in ("TERMS", "BAD_REQUEST") or isinstance(
        lying.join(question), MemberProfile
    )
    assert "Traceback" not in lying.log
