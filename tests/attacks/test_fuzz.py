"""Messages that are altered at random: requests to a member, replies and profiles of members.

Hypothesis draws the alterations, the same ones in every run. Whatever comes, a member answers with
one of its codes, and never with ``FAILED``, which is for faults of kedge; it counts no answer
twice, and still gives the honest server its old answers. A coordinator raises nothing but its
declared errors, and its model does not change.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from kedge.core import tree
from kedge.core.update import NO_WEIGHTS
from kedge.errors import TermsError, WireError
from kedge.federation.coordinator import enrolment as enrolment
from kedge.federation.coordinator.agreement import agree
from kedge.federation.member.policy import Policy
from kedge.federation.member.profile import MemberProfile
from kedge.federation.member.releases import KINDS, Releases
from kedge.federation.member.run_state import agreement_text
from kedge.federation.messages import CODES, CONTENT, PIECE, TESTS, MemberRequest, content_of
from kedge.session import blob, wire
from kedge.session.session import Broadcast
from kedge.session.terms import Terms
from tests.attacks.hostile import RUN, Server, code
from tests.attacks.liars import ASK, stated, with_header, with_notes
from tests.attacks.test_joins import table
from tests.flower.faulty import Faulty
from tests.flower.federations import Members, coordinator, datasets, settings

pytestmark = pytest.mark.long

NUMBERS = [
    0, -1, 1, 2, 7, 10**5, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-38,
    1e38, 1e308, -1e308,
]  # fmt: skip
TEXTS = [
    "", "0", "-1", "1e5", "9" * 50, "None", "\0", "\u202e", "\ud800", "a" * 3000, "train", "own",
    "fedavg", "scaffold", "mlp(hidden=[4])", "sgd(lr=1e5)", "float64", "holdout(0.5)", "[" * 2000,
    "north", "table", "classification", "int64", "uint8", "0" * 16, "crop(2)", RUN,
    "Weights:params", "down/Down:sent", "initial", "output", "a/" * 500,
]  # fmt: skip
#: NaN and infinity are written as json.dumps writes them, which is no JSON.
REALS = [float("nan"), float("inf"), -float("inf"), 3e38, 1e20, -1e15, 1e-45, -0.0, 0.1]
ODD = st.one_of(
    st.sampled_from([*NUMBERS, *TEXTS, *REALS[:3], None, True, False]),
    st.sampled_from([[], {}, [[]], [None], [0] * 300, {"a": {}}, ["a", "a"], [1e308, 1.0]]),
    st.integers(-5, 300),
    st.floats(width=32),
    st.text(max_size=8),
).map(copy.deepcopy)
#: What reading of a message that was altered already may raise in this file.
UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
Draw = Callable[[st.SearchStrategy[Any]], Any]


def fuzz(examples: int) -> Callable[[Any], Any]:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return bounded(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=slow,
    )  # fmt: skip


# -- alterations ----------------------------------------------------------------------------------


def altered_json(value: Any, draw: Draw) -> Any:
    """A JSON value with another one at a random place, one more, or one less."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(inner)) if inner else None
    is_branch = key is not None and isinstance(value[key], (dict, list)) and value[key]
    if is_branch and draw(st.integers(0, 3)):
        value[key] = altered_json(value[key], draw)
        return value
    what = draw(st.integers(0, 9))
    if key is not None and what == 0:
        del value[key]
    elif what == 1 and isinstance(value, list):
        value.append(draw(ODD))
    elif what == 1:
        value[draw(st.sampled_from(TEXTS))] = draw(ODD)
    elif key is not None:
        value[key] = draw(ODD)
    return value


def altered_text(text: str, draw: Draw) -> str:
    """A JSON text with other values, or that is none."""
    what = draw(st.integers(0, 9))
    if what == 0:
        return str(draw(st.sampled_from([*TEXTS, "null", "[]", "NaN", "{}", "1" * 5000])))
    if what == 1:
        return text[: draw(st.integers(0, len(text)))]
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        value = altered_json(value, draw)
    return json.dumps(value)


def altered_bytes(message: bytes, draw: Draw) -> bytes:
    what, at = draw(st.integers(0, 3)), draw(st.integers(0, max(0, len(message) - 1)))
    if what == 0:
        return message[:at]
    if what == 1:
        return message + draw(st.binary(max_size=64))
    if what == 2:
        return message[:at] + draw(st.binary(max_size=8)) + message[at:]
    return message[:at] + bytes([message[at] ^ (1 << at % 8)]) + message[at + 1 :]


def altered_notes(message: bytes, draw: Draw) -> bytes:
    def change(notes: dict[str, Any]) -> None:
        name = draw(st.sampled_from([*notes, "more"]))
        if draw(st.integers(0, 4)) == 0:
            notes.pop(name, None)
        elif notes.get(name, "").startswith("{"):
            notes[name] = altered_text(notes[name], draw)
        else:
            notes[name] = draw(st.one_of(st.sampled_from(TEXTS), ODD))

    return with_notes(message, change)


def altered_entries(message: bytes, draw: Draw) -> bytes:
    """Names, shapes, types and places of arrays."""
    return with_header(message, lambda header: altered_json(header, draw))


def altered_arrays(message: bytes, draw: Draw) -> bytes:
    """Numbers in arrays, with a checksum that is right."""
    size = int.from_bytes(message[:8], "little")
    start, count = 8 + size, (len(message) - 8 - size) // 4
    if not count:
        return message
    at = start + 4 * draw(st.integers(0, count - 1))
    number = torch.tensor([draw(st.sampled_from(REALS))]).numpy().tobytes()
    return blob.sealed(message[:at] + number + message[at + 4 :])


ALTERATIONS = [altered_bytes, altered_notes, altered_notes, altered_entries, altered_arrays]


def altered(message: bytes, draw: Draw) -> bytes:
    for _ in range(draw(st.integers(1, 2))):
        try:
            message = draw(st.sampled_from(ALTERATIONS))(message, draw)
        except UNREADABLE:
            return message  # it was altered beyond being read here
    return message


# -- a member -------------------------------------------------------------------------------------


def requests(server: Server) -> dict[str, MemberRequest]:
    down = server.down()
    plain = MemberRequest("train", RUN, client=0, terms=server.terms.hash)
    text, initial = agreement_text(server.terms, ""), {"initial": server.initial}
    changes: dict[str, dict[str, Any]] = {
        "join": {"text": ASK.to_json(), "client": -1, "terms": ""},
        "agree": {"text": text, "value": initial},
        "train": {"value": {"down": down}, "test": "plain"},
        "survey": {"value": {"down": down}, "part": "fedbr"},
        "evaluate": {"value": {"output": down.weights}, "test": "detailed"},
        "refuse": {"text": "no place"},
        "finish": {},
    }
    return {kind: replace(plain, kind=kind, **more) for kind, more in changes.items()}


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "round": st.integers(-2, 7),
    "attempt": st.integers(-1, 3),
    "client": st.integers(-2, 3),
    "accepted": st.integers(-2, 6),
    "personal": st.booleans(),
    "test": st.sampled_from(TESTS),
    "part": st.sampled_from(["", "fedbr", "scaffold"]),
    "run": st.sampled_from([RUN, "cd" * 8, "0" * 64]),
    "deadline": st.sampled_from([0.0, 1.0, 1e12]),
}
SHAPES = [(), (0,), (1,), (2, 0), (2, 2), (1, 1, 1, 1)]
TYPES = [torch.float64, torch.float16, torch.int64, torch.bool]


def well_formed(request: MemberRequest, draw: Draw) -> bytes:
    """A request of the right form with other fields, terms or arrays."""
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=2)):
        request = replace(request, **{name: draw(FIELDS[name])})
    if request.kind == "agree" and draw(st.booleans()):
        values = json.loads(request.text)
        values["terms"] = altered_text(values["terms"], draw)
        with contextlib.suppress(TermsError):
            request = replace(request, terms=Terms.from_json(values["terms"]).hash)
        request = replace(request, text=json.dumps(values))
    arrays = wire.named(request.value) if request.value else {}
    for _ in range(draw(st.integers(0, 2)) if arrays else 0):
        name, what = draw(st.sampled_from(sorted(arrays))), draw(st.integers(0, 5))
        if what == 0 and len(arrays) > 1:
            del arrays[name]
        elif what == 1:
            arrays[draw(st.sampled_from([*TEXTS, name + "/a"]))] = torch.ones(2)
        elif what == 2:
            arrays[name] = torch.ones(draw(st.sampled_from(SHAPES)))
        elif what == 3:
            arrays[name] = arrays[name].to(draw(st.sampled_from(TYPES)))
        elif arrays[name].numel():
            arrays[name] = arrays[name].clone()
            number = draw(st.sampled_from(REALS if arrays[name].is_floating_point() else [0, 1]))
            arrays[name].view(-1)[-1] = number
    notes = {"version": wire.VERSION, "kind": CONTENT}
    content = b"".join(blob.write(arrays, notes, PIECE)) if arrays else b""
    return joined(request.pieces([])[0], content)


def joined(head: bytes, content: bytes) -> bytes:
    """A request of which the header names its arrays, as far as it can be read."""
    mark = blob.checksum_of(content) if content else ""
    with contextlib.suppress(*UNREADABLE):
        head = with_notes(head, lambda notes: notes.update(content=mark))
    return head + content


@pytest.mark.parametrize("policy", [None, Policy(min_samples=20, clip=1.0, noise=1.0)], ids=bool)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_altered_requests(method: str, policy: Policy | None, tmp_path: Path) -> None:
    if policy is not None and method != "fedavg":
        policy = replace(policy, clip=0.0, noise=0.0)
    server = Server(tmp_path, policy, method=method, batch=20)
    assert server.agree() == ""
    asked = requests(server)
    honest = {k: (r.pieces([])[0], b"".join(content_of(r.value))) for k, r in asked.items()}
    released = Releases(tmp_path / "released.txt")
    kinds = ("join", "agree", "train", "evaluate")
    before = {kind: server.member.handle(b"".join(honest[kind])) for kind in kinds}

    @fuzz(2000)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        draw = data.draw
        kind = draw(st.sampled_from(sorted(honest)))
        head, content = honest[kind]
        if draw(st.integers(0, 3)):
            message = well_formed(asked[kind], draw)
        elif content and draw(st.booleans()):
            message = joined(head, altered(content, draw))
        else:
            message = joined(altered(head, draw), content)
        first = server.member.handle(message)
        assert code(first) in CODES.keys() | {""}
        assert code(first) != "FAILED", server.log[-3000:]
        count = sum(map(released.count, KINDS))
        second = server.member.handle(message)
        assert second == first
        assert sum(map(released.count, KINDS)) == count

    attack()
    assert len((tmp_path / "released.txt").read_text().splitlines()) == sum(
        map(released.count, KINDS)
    )
    for kind in kinds:
        assert server.member.handle(b"".join(honest[kind])) == before[kind], kind


# -- the coordinator ------------------------------------------------------------------------------

FEDBR = "fedbr(rows=4, samples=3, width=5, out=3)"


@pytest.mark.parametrize("method", ["fedavg", "scaffold", FEDBR])
def test_altered_replies(method: str, tmp_path: Path) -> None:
    seen = list[tuple[MemberRequest, bytes]]()

    def keep(name: str, request: MemberRequest, reply: bytes) -> bytes:
        seen.append((request, reply))
        return reply

    members = Members(tmp_path)
    changes = {"rounds": 2, "per_round": 0, "model": "mlp(hidden=[4], norm=bn)"}
    run = coordinator(
        members, settings(method, **changes), tmp_path / "run", transport=Faulty(members, keep)
    )
    run.run()
    empty = Broadcast(NO_WEIGHTS, {})  # of a test alone
    checks, before = run.requests.checks, tree.map(torch.clone, run.session.server)
    arrays = [(r, m) for r, m in seen if r.kind in ("train", "survey", "evaluate")]
    texts = [(r, m) for r, m in seen if r.kind in ("join", "agree")]

    @fuzz(2000)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        draw = data.draw
        request, reply = draw(st.sampled_from(arrays))
        message = altered(reply, draw)
        try:
            opened = checks.open(message, request, request.value.get("down", empty))
        except WireError:
            return
        assert opened.code in CODES.keys() | {""}
        sums = {"sums", "personal"}  # NaN stands for those that a policy keeps back
        for name in opened.value.keys() - sums:
            assert tree.is_finite(opened.value[name])

    @fuzz(2000)
    @given(st.data())
    def attack_joining(data: st.DataObject) -> None:
        draw = data.draw
        request, reply = draw(st.sampled_from(texts))
        message = altered(reply, draw)
        try:
            if request.kind == "join":
                run.enrolment._stated(request, message)
            else:
                enrolment.opened(request, message)
        except (WireError, TermsError):
            return

    attack()
    attack_joining()
    assert tree.equal(run.session.server, before)


def test_altered_statements(tmp_path: Path) -> None:
    """Who is honest stays, whatever one other states."""
    towns = {"town": ["Bonn", "Kiel"] * 20, "sex": ["w", "m", "", "w"] * 10}
    data = table(tmp_path, towns, "(missing=indicator)")
    tables = [stated(name, data) for name in ("east", "north", "south", "west")]
    images = [stated(one.name, one) for one in datasets()]

    @fuzz(3000)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        draw = data.draw
        liar, *honest = draw(st.sampled_from([tables, images]))
        text = altered_text(liar.to_json(), draw)
        try:
            found = MemberProfile.from_json(text)
            agree([found])
        except (WireError, TermsError):
            return
        if found.name in [one.name for one in honest]:
            return  # the name is taken
        agreement = agree([*honest, found])
        assert {one.name for one in agreement.members} >= {one.name for one in honest}
        assert tree.is_finite({"mean": torch.tensor(agreement.schema.mean)})
        assert all(0 < std < float("inf") for std in agreement.schema.std)

    attack()
