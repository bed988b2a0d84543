"""Code of an app that makes the server hostile: it asks members for what they must not answer.

An app may bring code (``--load``), which the server runs. Here it replaces requests of the second
round, in the first two attempts; the third one is honest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kedge
from kedge.core import tree
from kedge.federation.coordinator import requests as asking
from kedge.federation.coordinator.requests import Requests
from kedge.federation.member.run_state import agreement_text
from kedge.federation.messages import MemberRequest

FORGED_ROUND = 1
NUMBERS = (float("-inf"), float("nan"), float("inf"))


def _forged(self: Requests, request: MemberRequest) -> MemberRequest:
    if (request.kind, request.round) != ("train", FORGED_ROUND) or request.attempt > 1:
        return request
    value: Any = request.value
    if request.attempt == 0:  # a number that is not finite in the broadcast
        number = NUMBERS[request.client]
        return replace(request, value=tree.map(lambda x: x * number, value))
    output = tree.map(lambda x: x + 1, value["down"].weights)
    terms = replace(self.roster.terms, batch=1)  # of another run
    agree = {
        "text": agreement_text(terms, ""),
        "value": {"initial": self.session.bound.model.own_weights()},
    }
    return (
        replace(request, kind="evaluate", test="plain", value=value | {"output": output}),
        replace(request, round=10**6),
        replace(request, kind="agree", run="ab" * 8, terms=terms.hash, **agree),
    )[request.client]


_honest = Requests._request


def _request(self: Requests, *args: Any) -> MemberRequest:
    return _forged(self, _honest(self, *args))


if Path(sys.argv[0]).name in ("flwr-clientapp", "flwr-serverapp"):  # not in a test's own process

    @kedge.register
    @dataclass(frozen=True)
    class Innocent(kedge.Part):
        """A part that does nothing: files that are loaded must have one."""

    if Path(sys.argv[0]).name == "flwr-serverapp":
        Requests._request = _request  # type: ignore[method-assign]
        asking.FINAL_CODES = ()  # it goes on with members that refuse
