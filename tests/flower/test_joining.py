"""Joining: classes, columns and scaling are agreed by name; who does not fit is told why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.data.datasets import Dataset, load
from kedge.data.datasets.dataset import mean_and_std
from kedge.errors import TermsError, WireError
from kedge.federation.coordinator.agreement import agree, difference
from kedge.federation.coordinator.enrolment import class_notes
from kedge.federation.coordinator.settings import terms_of
from kedge.federation.member.own_data import own_federation, read_data
from kedge.federation.member.profile import MemberProfile, Question, state
from kedge.federation.messages import MemberRequest, pack_refusal
from tests.flower.faulty import Faulty
from tests.flower.federations import (
    QUICK,
    Members,
    assert_same,
    coordinator,
    datasets,
    net,
    replay,
    settings,
)

ASK = Question(0, "holdout(0.25)", counts=True)


def stated(name: str, source: str | Path | Dataset) -> MemberProfile:
    profile = state(read_data(source), ASK, name)
    again = MemberProfile.from_json(profile.to_json())
    assert again == profile
    return again


def pictures(folder: Path, classes: tuple[str, ...], count: int = 4, size: int = 8) -> Path:
    rng = np.random.default_rng(len(str(folder)))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (size, size), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_classes_of_image_folders_are_united_by_name(tmp_path: Path) -> None:
    """(cat, dog) and (dog, horse): label 0 must not mean a cat here and a dog there."""
    folders = {
        "a": pictures(tmp_path / "a", ("cat", "dog")),
        "b": pictures(tmp_path / "b", ("dog", "horse")),
        "c": pictures(tmp_path / "c", ("horse",)),  # one class only
    }
    agreement = agree([stated(name, folder) for name, folder in folders.items()])
    assert agreement.schema.classes == ("cat", "dog", "horse")
    assert agreement.schema.outputs == 3
    terms = terms_of(settings("fedavg", per_round=0), agreement)
    labels = {k: own_federation(read_data(f), terms, k).y.tolist() for k, f in folders.items()}
    assert labels == {"a": [0] * 4 + [1] * 4, "b": [1] * 4 + [2] * 4, "c": [2] * 4}
    pixels = np.concatenate([read_data(f).x_train for f in folders.values()])
    mean, std = mean_and_std([pixels])
    assert agreement.schema.mean == pytest.approx(mean.tolist(), abs=1e-6)
    assert agreement.schema.std == pytest.approx(std.tolist(), abs=1e-6)
    assert sum(agreement.counts) == sum(s.train for s in agreement.members)


NORTH = "age,sex,label\n1,f,no\n2,m,yes\n3,f,no\n4,m,yes\n5,f,no\n"
SOUTH = "label,sex,age\nyes,x,7.5\nmaybe,m,8\nyes,x,2\nmaybe,m,9\n"


def test_who_lacks_a_class_is_noted_and_names_that_look_alike(tmp_path: Path) -> None:
    rows = {"a": ("no", "yes"), "b": ("no",), "c": ("No", "yes")}
    profiles = []
    for name, words in rows.items():
        lines = "\n".join(f"{i},{words[i % len(words)]}" for i in range(20))
        path = table(tmp_path / f"{name}.csv", f"age,sick\n{lines}\n")
        profiles.append(stated(name, f"{path}(label=sick)"))
    assert class_notes(agree(profiles[:1])) == []
    assert class_notes(agree(profiles[:2])) == [
        "the classes of all members are: no, yes",
        "b has no class yes",
    ]
    agreement = agree(profiles)
    assert class_notes(agreement)[1:] == ["b has no class yes"]
    sentence = "the class 'No' of c looks like 'no' of a; write it alike in all files"
    assert agreement.refusals == {"c": sentence}


def test_columns_and_words_of_tables_are_united(tmp_path: Path) -> None:
    north = table(tmp_path / "north.csv", NORTH)
    south = table(tmp_path / "south.csv", SOUTH)
    agreement = agree([stated("south", south), stated("north", north)])
    schema = agreement.schema
    assert [s.name for s in agreement.members] == ["north", "south"]
    assert schema.columns == ("age", "sex=f", "sex=m", "sex=x")
    assert schema.classes == ("maybe", "no", "yes")
    terms = terms_of(settings("fedavg", per_round=0), agreement)
    own = own_federation(read_data(south), terms, "south")
    assert own.x[0].tolist() == [7.5, 0, 0, 1]
    assert own.y.tolist() == [2, 0, 2, 0]
    # as a reader of both files
    (tmp_path / "both").mkdir()
    table(tmp_path / "both" / "north.csv", NORTH)
    table(tmp_path / "both" / "south.csv", SOUTH)
    pooled = load(str(tmp_path / "both"))
    assert (pooled.columns, pooled.classes) == (schema.columns, schema.classes)
    assert schema.mean == pytest.approx(pooled.mean.tolist(), abs=1e-6)
    assert schema.std == pytest.approx(pooled.std.tolist(), abs=1e-6)
    assert agreement.encoding == pooled.encoding


def test_moments_are_those_of_pooled_data() -> None:
    """Also with a large mean, where sums of squares would lose all digits; and constants."""
    rng = np.random.default_rng(0)
    xs = [1000 + 100 * k + rng.normal(0, 0.01, (50 + k, 3)).astype(np.float32) for k in range(3)]
    for x in xs:
        x[:, 2] = 0.1
    columns = ("a", "b", "c")
    members = [
        stated(
            name,
            Dataset(name, x, np.arange(len(x)) % 2, x.mean(0), x.std(0), "classification", 2,
                    columns=columns),
        )
        for name, x in zip("xyz", xs, strict=True)
    ]  # fmt: skip
    schema = agree(members).schema
    mean, std = mean_and_std(xs)
    assert schema.mean == pytest.approx(mean.tolist(), rel=1e-6)
    assert schema.std == pytest.approx(std.tolist(), rel=1e-6)
    assert schema.std[2] == 1.0
    assert agree(members[::-1]).schema == schema


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (NORTH.replace("age", "weight"), "other has no column 'age', which north has"),
        (
            NORTH.replace("age,", "age,bmi,").replace("\n", "\n1,")[:-2],
            "a column 'bmi', which north",
        ),
        ("age,sex,label\nold,f,no\nyoung,m,yes\nold,f,no\n", "holds words at other and numbers at"),
        (
            "age,sex,label\n1,True,no\n2,False,yes\n",
            "column 'sex' holds numbers at other and words",
        ),
        ("age,sex,sick\n1,f,no\n2,m,yes\n", "labels"),
    ],
)
def test_other_columns_are_refused_with_a_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    north = stated("north", table(tmp_path / "north.csv", NORTH))
    south = stated("south", table(tmp_path / "south.csv", SOUTH))
    source = str(table(tmp_path / "other.csv", text))
    label = "(label=sick)" if "sick" in text else ""
    agreement = agree([north, stated("other", source + label), south])
    assert [s.name for s in agreement.members] == ["north", "south"]
    assert sentence in agreement.refusals["other"]


def test_another_task_shape_type_or_naming_is_refused() -> None:
    one, other, *_ = datasets()
    first = stated("one", one)
    bytes_ = (one.x_train * 10).clip(0, 255).astype(np.uint8)
    strange = {
        "labels for regression": datasets("regression")[0],
        "inputs of shape [1, 4, 4]": dataclasses.replace(
            other, x_train=other.x_train[..., ::2, ::2]
        ),
        "inputs of type uint8": dataclasses.replace(one, x_train=bytes_),
        "only numbers them": dataclasses.replace(other, classes=("a", "b", "c")),
    }
    for sentence, dataset in strange.items():
        assert sentence in difference(first, stated("other", dataset))
    assert difference(first, stated("other", other)) == ""


def test_the_odd_one_is_refused_whoever_comes_first() -> None:
    data = datasets()
    odd = dataclasses.replace(data[0], x_train=data[0].x_train[..., ::2, ::2])
    agreement = agree(
        [stated("a", odd), *(stated(n, d) for n, d in zip("bcd", data, strict=False))]
    )
    assert list(agreement.refusals) == ["a"]


def test_members_hear_why_they_are_refused(tmp_path: Path) -> None:
    data = datasets()
    data[1] = datasets("regression")[1]
    members = Members(tmp_path, data, net())
    said: list[str] = []
    run = coordinator(members, settings(), tmp_path / "run", report=said.append)
    with pytest.raises(TermsError, match="3 of 4 members can take part.*north has labels for regr"):
        run.run()
    assert any("refused: north has labels for regression" in line for line in said)
    assert "north has labels for regression, east for classification" in members.log("north")
    assert not (tmp_path / "run").exists()


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    twin = Members(tmp_path / "twin", model=net())
    members.handles["another node"] = twin.members["east"].handle
    said: list[str] = []
    coordinator(members, settings(), tmp_path / "run", report=said.append).run()
    assert sum("there is a member east already" in line for line in said) == 1
    assert "there is a member east already" in twin.log("east")


def test_missing_classes_and_one_class_only_train(tmp_path: Path) -> None:
    names = ("cat", "dog", "horse")
    data = []
    for dataset, classes in zip(datasets(), ((0, 1), (1, 2), (2,), (0, 1, 2)), strict=True):
        y = np.array(classes)[np.arange(len(dataset.y_train)) % len(classes)]
        own = tuple(names[c] for c in classes)
        y = np.searchsorted(classes, y)
        data.append(dataclasses.replace(dataset, y_train=y, outputs=len(own), classes=own))
    members = Members(tmp_path, data, net())
    run = coordinator(members, settings("scaffold", class_weights="balanced"), tmp_path / "run")
    run.run()
    assert run.roster.terms.data.classes == names
    assert len(run.roster.terms.class_weights) == 3
    assert_same(run, replay(run, members))


def test_statements_of_strangers_are_read_with_care() -> None:
    text = stated("one", datasets()[0]).to_json()
    for change in (
        {"train": -1}, {"train": 10**12}, {"train": 3.5}, {"name": ""}, {"name": "a\nb"},
        {"name": 7}, {"counts": [1, 2]}, {"schema": []}, {"moments": {}}, {"more": 1},
        {"encoding": "x"}, {"encoding": {"kind": "array"}}, {"encoding": {"kind": "other"}},
        {"encoding": {"kind": "array", "shape": [3], "dtype": "x", "columns": [], "from_files": 1}},
        {"versions": {"kedge": 1}},
    ):  # fmt: skip
        with pytest.raises(WireError):
            MemberProfile.from_json(json.dumps(json.loads(text) | change))
    for inner, change in (
        ("moments", {"mean": [float("nan")]}), ("moments", {"squares": [-1.0]}),
        ("moments", {"mean": [0.0, 0.0]}), ("schema", {"task": "x"}), ("schema", {"outputs": 0}),
        ("schema", {"dtype": "object"}), ("schema", {"shape": [-1]}),
        ("schema", {"outputs": 10**9}), ("schema", {"shape": [10**5, 10**5]}),
    ):  # fmt: skip
        values = json.loads(text)
        values[inner] |= change
        with pytest.raises(WireError):
            MemberProfile.from_json(json.dumps(values))
    for nonsense in ("", "[]", "[" * 100_000, "null", '{"name": 1}'):
        with pytest.raises(WireError):
            MemberProfile.from_json(nonsense)


def test_columns_of_strangers_are_read_with_care(tmp_path: Path) -> None:
    text = stated("north", table(tmp_path / "north.csv", NORTH)).to_json()
    for change in (
        {"words": [1]}, {"words": "x"}, {"kind": "code"}, {"name": 3}, {"fill": ["x"]},
        {"indicator": 1}, {"more": 1}, {"name": "other"},
    ):  # fmt: skip
        values = json.loads(text)
        values["encoding"]["columns"][1] |= change
        with pytest.raises(WireError):
            MemberProfile.from_json(json.dumps(values))


def test_a_member_that_fails_for_a_while_joins_later(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    handle, failed = members.handles["node of south"], []

    def failing(message: bytes) -> bytes:
        if len(failed) < 3:
            failed.append(message)
            return pack_refusal(MemberRequest.unpack(message), "FAILED")
        return handle(message)

    members.handles["node of south"] = failing
    patient = dataclasses.replace(QUICK, join_s=20.0)
    transport = Faulty(members, lambda name, request, reply: reply)
    run = coordinator(members, settings(), tmp_path / "run", transport=transport, rules=patient)
    run.run()
    assert len(run.roster.participants) == 4


def test_a_member_with_very_many_samples_is_noted(tmp_path: Path) -> None:
    data = datasets()
    many = np.repeat(data[2].x_train, 30, 0), np.repeat(data[2].y_train, 30, 0)
    data[2] = dataclasses.replace(data[2], x_train=many[0], y_train=many[1])
    members, said = Members(tmp_path, data, net()), list[str]()
    coordinator(members, settings(rounds=1), tmp_path / "run", report=said.append).run()
    assert any("south states 450 samples, the median is" in line for line in said)
