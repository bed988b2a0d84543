"""What one member states when it joins never ends the run of the others, nor spoils it.

South lies when it joins, before the others or at the same time. It is refused by name, with a
reason, and the run of east, north and west is that of a federation without it, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.core import tree
from kedge.data.datasets import Dataset
from kedge.errors import TermsError
from kedge.federation.coordinator.agreement import agree
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.coordinator.rules import Rules
from kedge.federation.member.profile import MemberProfile
from kedge.federation.messages import MemberRequest
from tests.attacks.liars import CLASSES, HONEST, LIAR, named, stated, with_classes, with_statement
from tests.flower.faulty import Faulty
from tests.flower.federations import NAMES, QUICK, Members, coordinator, datasets, settings

Change = Callable[[dict[str, Any]], Any]


def inner(name: str, **values: Any) -> Change:
    return lambda profile: profile[name].update(values)


def outer(**values: Any) -> Change:
    return lambda profile: profile.update(values)


def raw(change: Callable[[str], str]) -> Change:
    """The JSON itself is forged."""
    return lambda profile: change(json.dumps(profile))


def moment(name: str, value: Any) -> Change:
    return lambda profile: profile["moments"].update({name: [value]})


LIES: dict[str, Change] = {
    "a mean of 1e200": moment("mean", 1e200),
    "a mean of 1e308": moment("mean", -1e308),
    "a mean of 1e39": moment("mean", 1e39),
    "a mean of 1e30": moment("mean", 1e30),
    "a mean of 1e6": moment("mean", 1e6),
    "a mean of 400 digits": moment("mean", 10**400),
    "a mean that is true": moment("mean", True),
    "a mean that is NaN": moment("mean", float("nan")),
    "squares of 1e308": moment("squares", 1e308),
    "squares of 1e200": moment("squares", 1e200),
    "squares of 1e30": moment("squares", 1e30),
    "negative squares": moment("squares", -1.0),
    "no samples of the moments": inner("moments", count=0),
    "10^15 samples of the moments": inner("moments", count=10**15),
    "100 000 outputs": inner("schema", outputs=100_000),
    "20 000 outputs": inner("schema", outputs=20_000),
    "101 outputs": inner("schema", outputs=101),
    "outputs of another type": inner("schema", outputs=3.0),
    "outputs that are true": inner("schema", outputs=True),
    "an input of 10^8 numbers": inner("schema", shape=[1, 10**4, 10**4]),
    "a shape of 100 000 axes": inner("schema", shape=[10**9] * 100_000),
    "10^9 samples": outer(train=10**9),
    "2^62 samples": outer(train=2**62),
    "10^9 samples to test on": outer(test=10**9),
    "no samples": outer(train=0),
    "samples that are true": outer(train=True),
    "counts that are NaN": outer(counts=[float("nan")] * 3),
    "negative counts": outer(counts=[-1, 8, 8]),
    "a count of 400 digits": outer(counts=[10**400, 1, 1]),
    "a name of 1 MB": outer(name="x" * 1_000_000),
    "a name with a line": outer(name="south\n2026-01-01 00:00:00  complete"),
    "a name with an escape": outer(name="\x1b[2Jsouth"),
    "a name that turns lines around": outer(name="south\u202e"),
    "a name that is a lone surrogate": outer(name="\ud800"),
    "a name that nobody sees": outer(name="\u3164"),
    "a name that is a number": outer(name=7),
    "versions with a lone surrogate": outer(versions={"kedge": "\udfff"}),
    "another release, with an escape": outer(versions={"kedge": "\x1b[2J"}),
    "columns of an image": inner("schema", columns=["a"]),
    "an encoding of 10^6 columns": inner("encoding", columns=["a"] * 10**6),
    "an encoding that is text": outer(encoding="{}"),
    "an encoding of another type": outer(encoding=[["kind", "array"]]),
    "deep JSON": raw(lambda text: "[" * 100_000),
    "deep JSON that ends": raw(lambda text: '{"name":' * 100_000 + "1" + "}" * 100_000),
    "deep JSON in a field": outer(seat=json.loads("[" * 900 + "]" * 900)),
    "no JSON": raw(lambda text: text[:-1]),
    "a number of 5000 digits": raw(lambda text: text.replace('"test": ', '"test": ' + "9" * 5000)),
    "a field twice": raw(lambda text: text[:-1] + ', "train": 1}'),
    "1e999": raw(lambda text: text.replace('"mean": [', '"mean": [1e999, ', 1)),
    "NaN": raw(lambda text: text.replace('"train": ', '"train": NaN, "x": ')),
}  # fmt: skip


class Liar:
    """Four members of whom south lies, and a run of the other three."""

    def __init__(self, folder: Path, data: list[Dataset] | None = None) -> None:
        self.folder, self.said = folder, list[str]()
        self.members = Members(folder, data)

    def run(self, change: Change, **options: Any) -> Coordinator:
        def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
            is_lie = name == LIAR and request.kind == "join"
            return with_statement(reply, change) if is_lie else reply

        out = options.pop("out", self.folder / "run")
        options = {"transport": Faulty(self.members, fault), "report": self.said.append} | options
        config = settings(clients=3, per_round=0, rounds=2, model="linear")
        run = coordinator(self.members, config, out, **options)
        run.run()
        return run


def honest(folder: Path, data: list[Dataset] | None = None) -> Coordinator:
    """The run without south."""
    data = [d for d, name in zip(data or datasets(), NAMES, strict=True) if name != LIAR]
    members = Members(folder, data, names=HONEST)
    config = settings(clients=3, per_round=0, rounds=2, model="linear")
    run = coordinator(members, config, folder / "run")
    run.run()
    return run


def assert_without(run: Coordinator, other: Coordinator) -> None:
    assert [seat.name for seat in run.roster.participants] == list(HONEST)
    assert not any(seat.strikes for seat in run.roster.participants)
    assert run.roster.terms == other.roster.terms
    assert tree.equal(run.session.server.weights, other.session.server.weights)


@pytest.mark.parametrize("name", LIES)
def test_a_lying_statement_is_refused(name: str, tmp_path: Path) -> None:
    liar, start = Liar(tmp_path / "liar"), time.perf_counter()
    run = liar.run(LIES[name])
    assert time.perf_counter() - start < 30  # one hundred axes of 10^9 would take minutes
    assert_without(run, honest(tmp_path / "honest"))
    assert any(
        LIAR in line and ("refused: " in line or "did not join" in line) for line in liar.said
    )
    log = (tmp_path / "liar" / "run" / "log.txt").read_bytes().decode()
    assert all(line.isprintable() and len(line) < 1000 for line in [*liar.said, *log.split("\n")])


def test_the_model_stays_as_small_as_most_members_state(tmp_path: Path) -> None:
    """100 000 outputs of one member took 5 GB and 153 s of all."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = Liar(tmp_path).run(LIES["100 000 outputs"])
    assert run.roster.terms.data.outputs == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_liar_that_comes_first_does_not_take_the_place_of_an_honest_member(
    tmp_path: Path,
) -> None:
    """South, east and north are enough; west comes while the run waits for one in south's place."""
    members, late = Members(tmp_path), dict[str, Any]()
    late["node of west"] = members.handles.pop("node of west")

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        is_lie = name == LIAR and request.kind == "join"
        return with_statement(reply, LIES["a mean of 1e30"]) if is_lie else reply

    transport = Faulty(members, fault)
    transport.wait = lambda seconds: members.handles.update(late)  # type: ignore[method-assign]
    rules = dataclasses.replace(QUICK, join_s=30.0, wait_s=5.0)
    config = settings(clients=3, per_round=0, rounds=1, model="linear")
    run = coordinator(members, config, tmp_path / "run", transport=transport, rules=rules)
    run.run()
    assert [seat.name for seat in run.roster.participants] == list(HONEST)


def test_without_others_in_its_place_the_run_says_who_was_refused(tmp_path: Path) -> None:
    liar = Liar(tmp_path)
    del liar.members.handles["node of west"]
    with pytest.raises(
        TermsError, match="2 of 3 members can take part: south states inputs of size"
    ):
        liar.run(LIES["a mean of 1e30"])
    assert not (tmp_path / "run").exists()


def test_a_second_statement_in_the_middle_of_a_run_changes_nothing(tmp_path: Path) -> None:
    """South comes back under another id, with its token, and states other data."""
    members = Members(tmp_path)

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if request.kind == "train" and request.round == 0 and "node of south" in members.handles:
            members.handles["south again"] = members.handles.pop("node of south")
        if name == "south again" and request.kind == "join":
            return with_statement(reply, inner("schema", outputs=9))
        return reply

    config = settings(per_round=0, rounds=3, model="linear")
    run = coordinator(members, config, tmp_path / "run", transport=Faulty(members, fault))
    run.run()
    assert run.roster.terms.data.outputs == 3
    assert not any(seat.strikes for seat in run.roster.participants)
    assert [len(record["cohort"]) for record in run.recorder.records] == [3, 4, 4]


# -- honest members differ ------------------------------------------------------------------------


def test_hospitals_that_lack_classes_and_have_many_more_samples_take_part() -> None:
    data = [named(d, c) for d, c in zip(datasets(), ((0, 1), (2,), (1, 2), (0, 1, 2)), strict=True)]
    rows = np.arange(9000) % 9
    many = dataclasses.replace(
        data[0], x_train=data[0].x_train[rows], y_train=data[0].y_train[rows]
    )
    agreement = agree([stated(n, d) for n, d in zip("abcd", [many, *data[1:]], strict=True)])
    assert agreement.refusals == {}
    assert agreement.schema.classes == CLASSES


def test_numbered_classes_differ_within_reason() -> None:
    data = [
        dataclasses.replace(d, outputs=n) for d, n in zip(datasets(), (3, 5, 100, 4), strict=True)
    ]
    assert agree([stated(n, d) for n, d in zip("abcd", data, strict=True)]).schema.outputs == 100


def test_many_words_of_text_take_part(tmp_path: Path) -> None:
    """One hospital has the most that a column may have, the others two."""
    files = {}
    for name, cities in {"a": 20, "b": 2, "c": 2}.items():
        rows = "".join(f"{i},city{i % cities},{'no' if i % 2 else 'yes'}\n" for i in range(1000))
        files[name] = tmp_path / f"{name}.csv"
        files[name].write_text(f"age,city,ill\n{rows}")
    agreement = agree([stated(name, f"{path}(label=ill)") for name, path in files.items()])
    assert agreement.refusals == {}
    assert len(agreement.schema.columns or ()) == 21


def test_units_may_differ_by_a_factor_of_a_thousand() -> None:
    data = datasets()
    data[1] = dataclasses.replace(data[1], x_train=data[1].x_train * 1000)
    assert agree([stated(n, d) for n, d in zip("abcd", data, strict=True)]).refusals == {}


# -- together -------------------------------------------------------------------------------------


def test_far_more_classes_than_most_are_refused_and_the_rules_can_allow_them() -> None:
    members = [with_classes(name, list(CLASSES)) for name in "abc"]
    members.append(with_classes("liar", [*CLASSES, *(f"junk {i}" for i in range(200))]))
    agreement = agree(members)
    assert list(agreement.refusals) == ["liar"]
    assert "liar has 203 classes, far more than most members" in agreement.refusals["liar"]
    assert agreement.schema.classes == CLASSES
    assert agree(members, None, Rules(max_variety=100.0)).schema.outputs == 203


def test_together_they_have_no_more_classes_than_the_rules_allow() -> None:
    members = [with_classes(n, [f"{n if n == 'd' else ''} {i}" for i in range(80)]) for n in "abcd"]
    agreement = agree(members, None, Rules(max_classes=100))
    assert list(agreement.refusals) == ["d"]
    assert agreement.schema.outputs == 80


def test_two_that_deviate_from_each_other_are_told_so() -> None:
    one = with_classes("east", list("ab"))
    many = dataclasses.replace(
        one, train=10**6, moments=dataclasses.replace(one.moments, count=10**6 * 64)
    )
    with pytest.raises(
        TermsError, match="west has 200 classes, far more.*; east states 1000000 samples"
    ):
        agree([many, with_classes("west", [f"c{i}" for i in range(200)])])


def test_of_two_the_smaller_one_stays() -> None:
    small, large = stated("z", datasets()[0]), stated("a", datasets()[1])
    wide = dataclasses.replace(large, schema=dataclasses.replace(large.schema, outputs=9999))
    assert list(agree([wide, small]).refusals) == ["a"]
    big = dataclasses.replace(datasets()[1], x_train=np.repeat(datasets()[1].x_train, 50, 2))
    assert list(agree([stated("a", big), small]).refusals) == ["a"]


def test_an_encoding_that_only_looks_like_that_of_others_is_refused(tmp_path: Path) -> None:
    """Its columns have the same names, and another meaning: they could not be united."""
    path = tmp_path / "a.csv"
    path.write_text("day,sex,ill\n2024-01-02,f,no\n2024-02-03,m,yes\n2024-05-03,f,no\n")
    first = stated("a", f"{path}(label=ill)")
    values = json.loads(dataclasses.replace(first, name="liar").to_json())
    columns = [
        {
            "name": name,
            "kind": "number",
            "words": [],
            "format": "",
            "fill": None,
            "indicator": False,
        }
        for name in first.schema.columns or ()
    ]
    values["encoding"]["columns"] = columns
    liar = MemberProfile.from_json(json.dumps(values))
    agreement = agree([first, dataclasses.replace(first, name="b"), liar])
    assert list(agreement.refusals) == ["liar"]
    assert "in different ways" in agreement.refusals["liar"]
