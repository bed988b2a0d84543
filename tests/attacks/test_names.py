"""Names that look alike are one name, and what somebody else wrote is printed as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.errors import WireError
from kedge.federation.coordinator.agreement import agree
from kedge.federation.coordinator.enrolment import class_notes
from kedge.federation.member.member import Member
from kedge.federation.member.profile import MemberProfile
from kedge.federation.messages import MemberRequest
from kedge.federation.names import look, plain
from tests.attacks.liars import stated, with_classes, with_statement
from tests.flower.federations import Members, coordinator, datasets, settings

ALIKE = {
    "a Cyrillic o": "s\u043euth",
    "capitals": "SOUTH",
    "a zero-width space": "sou\u200bth",
    "a soft hyphen": "sou\u00adth",
    "a variation selector": "sout\ufe0fh",
    "a space at the end": "south ",
    "a space that does not break": "\u00a0south",
    "full width": "\uff53outh",
    "mathematical letters": "\U0001d42c\U0001d428\U0001d42e\U0001d42d\U0001d421",
    "capital Cyrillic and Greek": "S\u041eU\u03a4H",
    "Lisu": "\ua4e2\ua4f3\ua4f4\ua4d4\ua4e7",
    "a joiner of graphemes": "so\u034futh",
}


@pytest.mark.parametrize("kind", ALIKE)
def test_names_that_look_alike_are_one(kind: str) -> None:
    assert look(ALIKE[kind]) == "south"


@pytest.mark.parametrize(
    "name", ["sooth", "south2", "s\u00f6uth", "5outh", "\u0436", "sou-th", "so uth"]
)
def test_names_that_differ_are_two(name: str) -> None:
    assert look(name) != "south"


@pytest.mark.parametrize("kind", ["a Cyrillic o", "capitals", "a space at the end"])
def test_the_name_of_a_member_is_taken_by_one_that_looks_like_it(kind: str, tmp_path: Path) -> None:
    """The fourth node comes after north has joined, and is refused."""
    members = Members(tmp_path, datasets()[:3])
    twin = Member("twin", datasets()[3], tmp_path / "twin")
    name = ALIKE[kind]

    def handle(message: bytes) -> bytes:
        reply = twin.handle(message)
        is_join = MemberRequest.unpack(message).kind == "join"
        return with_statement(reply, lambda values: values.update(name=name)) if is_join else reply

    members.handles["another node"], said = handle, list[str]()
    config = settings(clients=3, per_round=0, rounds=1, model="linear")
    run = coordinator(members, config, tmp_path / "run", report=said.append)
    run.run()
    assert [seat.name for seat in run.roster.participants] == ["east", "north", "south"]
    sentence = f"refused: there is a member south already, and {name!a} looks like it; give this"
    assert any(sentence in line for line in said)


def test_classes_and_columns_that_look_alike_are_refused(tmp_path: Path) -> None:
    def of(name: str, column: str, label: str) -> MemberProfile:
        path = tmp_path / f"{name}.csv"
        rows = "".join(f"{i},{i % 3},{'no' if i % 2 else label}\n" for i in range(12))
        path.write_text(f"age,{column},ill\n{rows}")
        return stated(name, f"{path}(label=ill)")

    most = [of("a", "bmi", "yes"), of("b", "bmi", "yes")]
    agreement = agree([*most, of("c", "bmi", "y\u0435s"), of("d", "\u042cmi", "yes")])
    assert agreement.refusals["c"].startswith(
        "the class 'y\\u0435s' of c looks like 'yes' of a; write it alike in all files"
    )
    assert "d" in agreement.refusals
    agreement = agree([*most, of("e", "B\u039cI", "yes")])
    assert agreement.refusals == {
        "e": "the column 'B\\u039cI' of e looks like 'bmi' of a; write it alike on both"
    }


def test_letters_in_both_cases_are_two_classes_for_who_has_both() -> None:
    both = [with_classes(name, ["A", "B", "a", "b"]) for name in "abc"]
    agreement = agree([*both, with_classes("d", ["A", "a", "b"])])
    assert agreement.refusals == {}
    assert agreement.schema.classes == ("A", "B", "a", "b")
    with pytest.raises(WireError, match="two classes look alike"):
        with_classes("e", ["no", "n\u043e", "yes"])


def test_words_that_look_alike_are_noted(tmp_path: Path) -> None:
    for name, word in {"a": "Bonn", "b": "bonn"}.items():
        rows = "".join(
            f"{i},{word if i % 3 else 'Ulm'},{'no' if i % 2 else 'yes'}\n" for i in range(9)
        )
        (tmp_path / f"{name}.csv").write_text(f"age,city,ill\n{rows}")
    agreement = agree([stated(n, f"{tmp_path / n}.csv(label=ill)") for n in "ab"])
    assert agreement.refusals == {}
    assert class_notes(agreement)[-1].startswith(
        "the columns 'city=Bonn' and 'city=bonn' are two; if one is meant, write it alike"
    )


def test_plain_text_is_one_line_that_a_terminal_shows_as_it_is() -> None:
    text = plain("a\nb\r\x1b[2J\x85\u2028\u202e\ud800\x00\t\u200b M\u00fcller \u043e")
    assert text.isprintable()
    assert text.encode()
    assert text.endswith("M\u00fcller \u043e")
