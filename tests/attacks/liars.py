"""Federations of four members in which some lie: what arrives in place of their answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.datasets import Dataset
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.coordinator.rules import Rules
from kedge.federation.member.own_data import read_data
from kedge.federation.member.profile import MemberProfile, Question, state
from kedge.federation.messages import REPLY, MemberRequest
from kedge.session import blob, wire
from tests.flower.faulty import Faulty
from tests.flower.federations import NAMES, QUICK, Members, coordinator, datasets, settings

LIAR, HONEST = "south", ("east", "north", "west")
FEDBR = "fedbr(rows=4, samples=3, width=5, out=3, refresh=round)"

#: (request, honest reply) -> what arrives; None: as it is.
Lie = Callable[[MemberRequest, bytes], Any]


def lying(
    tmp_path: Path,
    lie: Lie,
    method: str = "fedavg",
    data: Sequence[Dataset] | None = None,
    rules: Rules = QUICK,
    liars: Sequence[str] = (LIAR,),
    names: Sequence[str] = NAMES,
    **changes: Any,
) -> tuple[Coordinator, Members, list[str]]:
    """A run to its end, with what its coordinator said."""

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return lie(request, reply) if name in liars else reply

    members, said = Members(tmp_path, data, names=names), list[str]()
    values = {"per_round": 0, "rounds": 3, "model": "mlp(hidden=[4])"}
    values |= {"clients": len(names)} | changes
    run = coordinator(
        members, settings(method, **values), tmp_path / "run",
        transport=Faulty(members, fault), rules=rules, report=said.append,
    )  # fmt: skip
    run.run()
    members.model = run.bound.model.template
    members.data = {seat.name: members.data[seat.name] for seat in run.roster.participants}
    members.data = {seat.name: members.data[seat.name] for seat in run.roster.participants}
    return run, members, said


def strikes(run: Coordinator) -> dict[str, int]:
    return {seat.name: seat.strikes for seat in run.roster.participants if seat.strikes}


def cohorts(run: Coordinator) -> list[list[str]]:
    names = [seat.name for seat in run.roster.participants]
    return [[names[k] for k in record["cohort"]] for record in run.recorder.records]


def patient(**changes: Any) -> Rules:
    return replace(QUICK, **changes)


# -- forged messages ------------------------------------------------------------------------------


def with_header(message: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A message with another header, which ``change`` alters or returns."""
    size = int.from_bytes(message[:8], "little")
    values = json.loads(message[8 : 8 + size])
    found = change(values)
    text = json.dumps(values if found is None else found, separators=(",", ":")).encode()
    return blob.sealed(len(text).to_bytes(8, "little") + text + message[8 + size :])


def with_notes(message: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A message with other notes: ``change`` alters them, or returns their JSON."""

    def forge(header: dict[str, Any]) -> None:
        notes = json.loads(header["__metadata__"]["kedge"][blob.DIGITS :])
        found = change(notes)
        text = found if isinstance(found, str) else json.dumps(notes)
        header["__metadata__"]["kedge"] = "0" * blob.DIGITS + text

    return with_header(message, forge)


def again(message: bytes, change: Callable[[Any], Any]) -> bytes:
    """A reply with another value, packed as a member does."""
    value, notes = wire.unpack(message, REPLY), wire.notes_of(message)
    kind, _ = notes.pop("kind"), notes.pop("version")
    return wire.pack(kind, change(value), **notes)


def with_statement(message: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """An answer to ``join`` with another profile: ``change`` alters it, or returns its text."""

    def forge(notes: dict[str, Any]) -> None:
        values = json.loads(notes["text"])
        found = change(values)
        notes["text"] = found if isinstance(found, str) else json.dumps(values)

    return with_notes(message, forge)


# -- profiles ----------------------------------------------------------------------------------

ASK = Question(0, "holdout(0.25)", counts=True)
CLASSES = ("healthy", "ill", "unknown")


def stated(name: str, data: str | Path | Dataset) -> MemberProfile:
    return MemberProfile.from_json(state(read_data(data), ASK, name).to_json())


def named(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    """The dataset of a hospital that has some of the classes."""
    y = np.arange(len(dataset.y_train)) % len(classes)
    names = tuple(CLASSES[c] for c in classes)
    return dataclasses.replace(dataset, y_train=y, outputs=len(names), classes=names)


def with_classes(name: str, classes: list[str]) -> MemberProfile:
    values = json.loads(state(datasets()[0], Question(0, "holdout(0.25)"), name).to_json())
    values["schema"] |= {"classes": classes, "outputs": len(classes)}
    return MemberProfile.from_json(json.dumps(values))
