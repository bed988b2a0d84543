"""Code of an app that makes client processes hostile: they reply with what is no message of kedge.

An app may bring code (``--load``), which the server and client processes without a resident node
run. Here it replaces the content of Flower's message in the second round, each time in another way.
The member itself is honest and trains. ``FORGERIES`` is a list of pairs: what is wrong, and what
makes the content from the honest bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import kedge
from kedge.federation.member.member import Member
from kedge.federation.messages import MemberRequest
from kedge.flower import arrays as parcel
from kedge.flower.arrays import KEY, STYPE

FORGED_ROUND, MEMBERS = 1, 3
FIRST = "000"  # the name of the first piece of a message


def _array(data: bytes, **changes: object) -> Array:
    values = {"dtype": "uint8", "shape": (len(data),), "stype": STYPE, "data": data} | changes
    return Array(**values)  # type: ignore[arg-type]


def _one(array: Array) -> RecordDict:
    return RecordDict({KEY: ArrayRecord({FIRST: array})})


def _two_arrays(data: bytes) -> RecordDict:
    return RecordDict({KEY: ArrayRecord({FIRST: _array(data), "more": _array(data)})})


def _two_records(data: bytes) -> RecordDict:
    return RecordDict({KEY: ArrayRecord({FIRST: _array(data)}), "m": MetricRecord({"num": 1e9})})


FORGERIES = [
    ("no record", lambda data: RecordDict()),
    ("settings in place of arrays", lambda data: RecordDict({KEY: ConfigRecord({KEY: data})})),
    ("another name of the record", lambda data: RecordDict({"arrays": _one(_array(data))[KEY]})),
    ("a second record", _two_records),
    ("a second array", _two_arrays),
    ("a declared length of a petabyte", lambda data: _one(_array(data, shape=(1 << 50,)))),
    ("two dimensions", lambda data: _one(_array(data, shape=(len(data), 1)))),
    ("the type of Python objects", lambda data: _one(_array(data, dtype="object"))),
    ("an array of NumPy", lambda data: _one(Array(np.full(100, 1e30)))),
]


_honest = Member.handle


def _handle(self: Member, message: bytes) -> bytes:
    """Answer a request, and have the content of a reply to a training request forged."""
    request = MemberRequest.unpack(message)
    number = request.attempt * MEMBERS + request.client
    is_forged = (request.kind, request.round) == ("train", FORGED_ROUND)
    if is_forged and number < len(FORGERIES):
        make = FORGERIES[number][1]
        parcel.RecordDict = lambda content: make(content[KEY][FIRST].data)  # type: ignore[misc]
    return _honest(self, message)


if Path(sys.argv[0]).name in ("flwr-clientapp", "flwr-serverapp"):  # not in a test's own process

    @kedge.register
    @dataclass(frozen=True)
    class Innocent(kedge.Part):
        """A part that does nothing: files that are loaded must have one."""

    if Path(sys.argv[0]).name == "flwr-clientapp":
        Member.handle = _handle  # type: ignore[method-assign]
