"""What one member answers never ends the run of the others, nor spoils it.

South lies. East, north and west go on, have no strike, and their model is that of a simulation of
the rounds and members that were accepted, bit for bit.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from kedge.core import tree
from kedge.core.part import Sum, parts
from kedge.core.tree import Weights
from kedge.errors import NotFinite, Paused
from kedge.federation import large_messages as spool
from kedge.federation.coordinator.requests import Exchange
from kedge.federation.messages import Direct, Failure, MemberRequest
from tests.attacks.liars import (
    FEDBR,
    HONEST,
    LIAR,
    again,
    cohorts,
    lying,
    patient,
    strikes,
    with_header,
    with_notes,
    with_statement,
)
from tests.flower.faulty import training
from tests.flower.federations import NAMES, assert_same, datasets, replay

KINDS = ("join", "agree", "train", "survey", "evaluate", "refuse", "finish")
LATER = ("agree", "train", "survey", "evaluate")
Forgery = Callable[[bytes], bytes]


def lacks(name: str) -> Forgery:
    return lambda message: with_notes(message, lambda notes: notes.__delitem__(name))


def other(**notes: Any) -> Forgery:
    return lambda message: with_notes(message, lambda values: values.update(notes))


def raw(change: Callable[[str], str]) -> Forgery:
    """The JSON of the notes itself is forged."""
    return lambda message: with_notes(message, lambda notes: change(json.dumps(notes)))


def twice(message: bytes) -> bytes:
    """The note ``round`` stands twice; one reader takes the first, another the last."""
    return raw(lambda text: text[:-1] + ', "round": "' + "7" + '", "code": ""}')(message)


def in_utf16(message: bytes) -> bytes:
    size = int.from_bytes(message[:8], "little")
    text = message[8 : 8 + size].decode().encode("utf-16")
    return len(text).to_bytes(8, "little") + text + message[8 + size :]


NOTES: dict[str, Forgery] = {
    "no code": lacks("code"),
    "no run": lacks("run"),
    "no round": lacks("round"),
    "no client": lacks("client"),
    "no ask": lacks("ask"),
    "no kind": lacks("kind"),
    "no version": lacks("version"),
    "no notes": raw(lambda text: "{}"),
    "notes that are a list": raw(lambda text: "[]"),
    "notes that are null": raw(lambda text: "null"),
    "notes that are no JSON": raw(lambda text: text[:-1]),
    "deep notes": raw(lambda text: "[" * 100_000),
    "deep notes that end": raw(lambda text: '{"a":' * 100_000 + "1" + "}" * 100_000),
    "a code that is null": other(code=None),
    "a code that is a list": other(code=[]),
    "a round that is a number": other(round=0),
    "a round that is true": other(round=True),
    "a round of 5000 digits": other(round="9" * 5000),
    "a round in other digits": other(round="\u0660"),
    "a number of 5000 digits": raw(lambda text: text[:-1] + ', "x": ' + "9" * 5000 + "}"),
    "a note that is NaN": other(more=float("nan")),
    "a note of another name": other(run=[[]]),
    "a lone surrogate": other(part="\ud800"),
    "a note of 2 MB": other(more="x" * (2 << 20)),
    "a note twice": twice,
    "a header in UTF-16": in_utf16,
    "no metadata": lambda m: with_header(m, lambda h: h.__delitem__("__metadata__")),
    "metadata that are a list": lambda m: with_header(m, lambda h: h.update(__metadata__=[])),
    "a header that is a list": lambda message: with_header(message, lambda header: [header]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_without_code_ends_nothing(kind: str, tmp_path: Path) -> None:
    def lie(request: MemberRequest, reply: bytes) -> Any:
        if (request.kind, kind) == ("join", "refuse"):
            return with_statement(reply, lambda values: values.update(versions={}))
        return NOTES["no code"](reply) if request.kind == kind else reply

    clients = 3 if kind in ("join", "refuse") else 4
    run, members, said = lying(tmp_path, lie, FEDBR, clients=clients)
    assert set(strikes(run)) == ({LIAR} if kind in LATER else set())
    assert all(set(HONEST) <= set(names) for names in cohorts(run))
    if kind not in ("refuse", "finish"):
        assert any("an unknown code, or none" in line and LIAR in line for line in said)
    if kind not in ("train", "survey"):  # surveyed, and not in the cohort
        assert_same(run, replay(run, members))


@pytest.mark.parametrize("kind", ["join", "agree", "train", "evaluate"])
@pytest.mark.parametrize("name", NOTES)
def test_forged_notes_are_bad_replies(name: str, kind: str, tmp_path: Path) -> None:
    def lie(request: MemberRequest, reply: bytes) -> Any:
        return NOTES[name](reply) if request.kind == kind else reply

    clients = 3 if kind == "join" else 4
    run, _, said = lying(tmp_path, lie, rounds=2, model="linear", clients=clients)
    assert strikes(run) == ({} if kind == "join" else {LIAR: 2 if kind == "train" else 3})
    assert all(set(HONEST) <= set(names) for names in cohorts(run))
    assert any(LIAR in line and ("cannot be read" in line or "dropped" in line) for line in said)
    assert all(line.isprintable() for line in said)


def test_a_member_that_answers_nonsense_to_the_terms_is_excluded_in_the_end(tmp_path: Path) -> None:
    def lie(request: MemberRequest, reply: bytes) -> Any:
        return b"nonsense" if request.kind == "agree" else reply

    run, members, said = lying(tmp_path, lie, rounds=6)
    assert strikes(run) == {LIAR: 3}
    assert f"{LIAR} is excluded: it sent 3 bad replies" in said
    assert cohorts(run) == [list(HONEST)] * 6
    assert_same(run, replay(run, members))


def test_whatever_an_opener_raises_is_a_bad_reply() -> None:
    """There is one place where replies are opened. Only what this machine lacks is no one's lie."""
    exchange = Exchange(Direct({"a": lambda message: b"reply"}), lambda text: None)

    def failure(error: BaseException) -> Failure:
        def opener(request: MemberRequest, message: Any) -> Any:
            raise error

        requests = {"a": MemberRequest("finish", "ab" * 8)}
        [(_, _, found)] = exchange.run(requests, 1.0, opener)
        assert isinstance(found, Failure)
        return found

    for error in (KeyError("code"), OverflowError(), RecursionError(), AssertionError("\x1b[2J\n")):
        found = failure(error)
        assert found.is_bad
        assert found.reason.isprintable()
        assert type(error).__name__ in found.reason
    for error in (MemoryError(), OSError(errno.ENOSPC, "No space left on device")):
        assert not failure(error).is_bad
    with pytest.raises(KeyboardInterrupt):
        failure(KeyboardInterrupt())


def test_answers_twice_late_and_for_another_client_change_nothing(tmp_path: Path) -> None:
    kept: list[bytes] = []

    def lie(request: MemberRequest, reply: bytes) -> Any:
        if not training(request):
            return reply
        kept.append(reply)
        forged = other(client="0")(reply)
        return [[reply, forged, b""], forged, [kept[0], reply]][request.round]

    run, members, said = lying(tmp_path, lie, "krum(byzantine=0)")
    assert strikes(run) == {LIAR: 2}
    assert [LIAR in names for names in cohorts(run)] == [True, False, False]
    assert any("client 0 of another request" in line for line in said)
    assert any("round 0 of another request" in line for line in said)
    assert_same(run, replay(run, members))


def test_a_header_may_not_take_more_memory_than_its_names_need(tmp_path: Path) -> None:
    """JSON of empty lists takes twenty times its length in memory."""
    filler = {"x": [[]] * 700_000}

    def lie(request: MemberRequest, reply: bytes) -> Any:
        if not training(request):
            return reply
        start = 8 + int.from_bytes(reply[:8], "little")
        return with_header(reply[:start], lambda header: header.update(filler))

    run, _, said = lying(tmp_path, lie, model="mlp(hidden=[70000])", rounds=1)
    assert cohorts(run) == [list(HONEST)]
    assert any("dropped: a header that is larger than" in line for line in said)


# -- numbers --------------------------------------------------------------------------------------


def filled(value: Any, number: float) -> Any:
    """What a member sends besides its update: the contribution and uploads, or an answer."""

    def full(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, number)

    update = value["update"]
    changed = {name: tree.map(full, getattr(update, name)) for name in ("contribution", "uploads")}
    return value | {"update": update._replace(**changed)}


@pytest.mark.parametrize("number", [1e14, -9999.0])
@pytest.mark.parametrize(
    ("method", "kind"), [("scaffold", "train"), ("fednova", "train"), (FEDBR, "survey")]
)
def test_finite_but_huge_numbers_of_one_are_its_own_strike(
    method: str, kind: str, number: float, tmp_path: Path
) -> None:
    """They would be averaged, and the next replies of the others would be bad ones."""

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return again(reply, lambda value: filled(value, number)) if request.kind == kind else reply

    run, members, said = lying(tmp_path, lie, method)
    assert strikes(run) == {LIAR: 3}
    assert f"{LIAR} is excluded: it sent 3 bad replies" in said
    found = [line for line in said if "of size" in line and "those of most members are" in line]
    assert len(found) == 3
    assert all(set(HONEST) <= set(names) for names in cohorts(run))
    if kind == "train":
        assert_same(run, replay(run, members))


def test_a_variance_below_zero_is_a_bad_reply(tmp_path: Path) -> None:
    """Averaged, it would make the model's outputs NaN: every later reply would be refused."""

    def below(value: Any) -> Any:
        reply = value["update"]
        changed = {
            name: torch.full_like(x, -50.0) if name.endswith("running_var") else x
            for name, x in reply.delta.buffers.items()
        }
        assert any(name.endswith("running_var") for name in changed)
        delta = Weights(reply.delta.params, changed)
        return value | {"update": reply._replace(delta=delta)}

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return again(reply, below) if training(request, 0) else reply

    run, members, said = lying(tmp_path, lie, model="mlp(hidden=[4], norm=bn)")
    assert strikes(run) == {LIAR: 1}
    assert any("a variance below 0" in line for line in said)
    assert_same(run, replay(run, members))


#: Rules that somebody has opened wide, so that no bound keeps numbers from overflowing.
OPEN = patient(max_number=1e39, max_norm=1e60, max_statistics=1e60, max_ratio=1e60)


def updated(number: float) -> Forgery:
    """An update of equal numbers."""

    def change(value: Any) -> Any:
        reply = value["update"]
        params = tree.map(lambda x: torch.full_like(x, number), reply.delta.params)
        return value | {"update": reply._replace(delta=Weights(params, reply.delta.buffers))}

    return lambda reply: again(reply, change)


def test_who_makes_a_sum_overflow_is_named(tmp_path: Path) -> None:
    """Every number is finite. The member continues from its state before that reply."""

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return updated(1e38)(reply) if training(request, 1) else reply

    run, members, said = lying(tmp_path, lie, "scaffold", rules=OPEN, rounds=4)
    assert strikes(run) == {LIAR: 1}
    assert [LIAR in names for names in cohorts(run)] == [True, False, True, True]
    [line] = [line for line in said if "dropped" in line]
    assert line.startswith("round 2, train: south sent a bad reply, which was dropped: with it, ")
    assert "not finite" in line
    assert_same(run, replay(run, members))


def test_two_of_five_who_make_a_sum_overflow_are_named(tmp_path: Path) -> None:
    def lie(request: MemberRequest, reply: bytes) -> Any:
        return updated(1e38)(reply) if training(request, 1) else reply

    names, liars = (*NAMES, "zenith"), ("east", "south")
    data = [*datasets(), datasets()[3]]
    run, _, _ = lying(tmp_path, lie, data=data, rules=OPEN, liars=liars, names=names)
    assert strikes(run) == {"east": 1, "south": 1}
    assert cohorts(run)[1] == ["north", "west", "zenith"]


def test_who_makes_the_state_of_the_method_not_finite_is_named(tmp_path: Path) -> None:
    """The weights would be finite after this round, and nothing after the next."""

    def lie(request: MemberRequest, reply: bytes) -> Any:
        number = 3.4e38 if request.client == 2 else 1e38
        return again(reply, lambda v: filled(v, number)) if training(request, 1) else reply

    names, liars = (*NAMES, "zenith"), ("south", "zenith")
    data = [*datasets(), datasets()[3]]
    options = {"data": data, "rules": OPEN, "liars": liars, "names": names, "rounds": 2}
    run, _, _ = lying(tmp_path, lie, "scaffold", **options)
    assert strikes(run) == {"south": 1}


@dataclass(frozen=True)
class Solver(kedge.Part):
    """A method whose server solves equations: a matrix that has no root makes it raise."""

    def survey(self, v: Any) -> Any:
        return {"matrix": Sum(torch.eye(2) + 0 * v.info.weight)}

    def surveys(self) -> Any:
        return "every"

    def absorb(self, r: Any, weights: Weights) -> tuple[Weights, Any]:
        torch.linalg.cholesky(r.uploads["matrix"])
        return weights, {}


@pytest.fixture
def solver() -> Iterator[None]:
    kedge.register(Solver)
    yield
    parts.remove("solver")


def unsolvable(request: MemberRequest, reply: bytes) -> Any:
    """No number is large, and whatever a part raises is the fault of one answer."""

    def change(value: Any) -> Any:
        update = value["update"]
        return value | {"update": update._replace(uploads=tree.scale(update.uploads, -9.0))}

    return again(reply, change) if request.kind == "survey" else reply


@pytest.mark.usefixtures("solver")
def test_who_sends_an_answer_that_breaks_the_method_is_named(tmp_path: Path) -> None:
    run, _, said = lying(tmp_path, unsolvable, "solver")
    assert strikes(run) == {LIAR: 3}
    assert sum("with it, the sum fails or is not finite (" in line for line in said) == 3
    assert all(line.isprintable() for line in said)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("minimum", [0.5, 1.0])
def test_who_is_excluded_by_a_survey_is_not_asked_to_train(minimum: float, tmp_path: Path) -> None:
    """Nor is anybody, if those who are left are too few."""
    trained: list[int] = []

    def lie(request: MemberRequest, reply: bytes) -> Any:
        trained.extend([request.client] if request.kind == "train" else [])
        return unsolvable(request, reply) if request.client == 2 else reply

    rules = patient(strikes=1, minimum=minimum)
    if minimum == 1.0:
        with pytest.raises(Paused, match="3 of 4 members replied, 4 are needed"):
            lying(tmp_path, lie, "solver", rules=rules, liars=NAMES)
        assert trained == []
    else:
        run, *_ = lying(tmp_path, lie, "solver", rules=rules, liars=NAMES)
        assert strikes(run) == {LIAR: 1}
        assert set(trained) == {0, 1, 3}


def test_if_nobody_is_to_blame_the_run_says_so(tmp_path: Path) -> None:
    """All updates are equally large: the step is too large, and no member lies."""

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return updated(2e37)(reply) if training(request, 1) else reply

    with pytest.raises(NotFinite, match="weights are not finite after round 2, though all replies"):
        lying(tmp_path, lie, rules=OPEN, liars=NAMES)


def test_whole_numbers_are_bounded_too(tmp_path: Path) -> None:
    """2^62 of four members is 0 in 64 bits; here the number of the client, which is put right."""

    def change(value: Any) -> Any:
        update = value["update"]
        huge = tree.map(
            lambda x: x if x.is_floating_point() else torch.full_like(x, 2**62), update.uploads
        )
        return value | {"update": update._replace(uploads=huge)}

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return again(reply, change) if request.kind == "survey" else reply

    run, _, said = lying(tmp_path, lie, FEDBR)
    assert strikes(run) == {LIAR: 3}
    assert any("a number above 1e+15" in line for line in said)


# -- tests ----------------------------------------------------------------------------------------

FORGED_SUMS = [
    ("regression", "auto", "sum_sq", -1e14),
    ("regression", "auto", "sum_abs", -1.0),
    ("regression", "r2", "sum_y", 1e14),
    ("regression", "auto", "sum_y2", -1.0),
    ("classification", "auto", "predicted", 1e14),
    ("classification", "auto", "right", -1.0),
    ("classification", "auroc", "histogram", 1e14),
    ("classification", "ece", "calibration", -1e14),
    ("multilabel", "auto", "said", 1e14),
    ("multilabel", "auto", "count", 1e14),
    ("multilabel", "auto", "hits", 1e14),
]


@pytest.mark.parametrize(("task", "metric", "name", "number"), FORGED_SUMS)
def test_sums_of_a_test_that_no_samples_have(
    task: str, metric: str, name: str, number: float, tmp_path: Path
) -> None:
    found: list[int] = []

    def change(value: Any) -> Any:
        sums = value.get("sums", {})
        if name not in sums:
            return value
        found.append(1)
        return value | {"sums": sums | {name: torch.full_like(sums[name], number)}}

    def lie(request: MemberRequest, reply: bytes) -> Any:
        return again(reply, change) if request.test else reply

    run, _, _ = lying(tmp_path, lie, data=datasets(task), metric=metric, rounds=2, model="linear")
    assert strikes(run) == {LIAR: len(found)}
    assert len(found) == 3
    assert [record["tested"] for record in run.recorder.records] == [3, 3]
    for record in run.recorder.records:
        assert abs(record[run.recorder.task.metric]) < 1e6


# -- what is printed ------------------------------------------------------------------------------

CONTROL = "\x1b]0;owned\x07\x1b[2J\r\n2026-01-01 00:00:00  round 9 of 9: complete\u202e\u2028\x85"


def test_what_the_coordinator_prints_and_writes_is_plain(tmp_path: Path) -> None:
    """No line that a member made up, and no control of a terminal."""
    forged = [other(**{name: CONTROL}) for name in ("kind", "version", "part", "code", "tested")]
    forged.append(lambda reply: again(reply, lambda value: value | {CONTROL: torch.zeros(1)}))

    def lie(request: MemberRequest, reply: bytes) -> Any:
        if request.kind == "survey":
            return Failure(CONTROL, is_bad=True)
        return forged[request.round](reply) if training(request) else reply

    run, _, said = lying(tmp_path, lie, FEDBR, rounds=6, rules=patient(strikes=100))
    assert strikes(run) == {LIAR: 12}
    log = (tmp_path / "run" / "log.txt").read_bytes().decode()
    assert all(line.isprintable() for line in [*said, *log.split("\n")])
    assert not any(line.startswith("2026-01-01") for line in log.splitlines())


# -- disks ----------------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_nobodys_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large reply that cannot be kept is lost, as if the network had lost it."""

    def no_space(pieces: Any, folder: Any = None) -> Any:
        monkeypatch.setattr("kedge.federation.coordinator.requests.spooled", spool.spooled)
        raise OSError(errno.ENOSPC, "No space left on device")

    def lie(request: MemberRequest, reply: bytes) -> Any:
        if training(request, 1):
            monkeypatch.setattr("kedge.federation.coordinator.requests.spooled", no_space)
        return reply

    run, members, said = lying(tmp_path, lie, "scaffold")
    assert strikes(run) == {}
    assert [LIAR in names for names in cohorts(run)] == [True, False, True]
    assert any("south did not reply (this machine could not keep" in line for line in said)
    assert_same(run, replay(run, members))
