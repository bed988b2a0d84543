"""A hook of the server that raises: the round leaves no trace, and nobody is blamed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from kedge.core import tree
from kedge.core.part import Sum, parts
from kedge.core.tree import Weights
from kedge.errors import HookError, Interrupted, Paused
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.messages import MemberRequest
from tests.flower.faulty import Faulty, training
from tests.flower.federations import Members, assert_same, coordinator, net, replay, settings

HOOKS = ("receive of a survey", "absorb", "receive", "server_step")


class Broken(Exception):
    """What a part of the server raises."""


#: Calls of each hook in the second round, and which of them raise.
calls: dict[str, int] = {}
bad: dict[str, range] = {}


def call(hook: str, r: Any) -> None:
    if r.round == 1:
        calls[hook] = calls.get(hook, -1) + 1
        if calls[hook] in bad.get(hook, ()):
            raise Broken(f"{hook} in round 2")


@dataclass(frozen=True)
class Fragile(kedge.Part):
    """Counts surveys and rounds on the server, and moves the weights by both."""

    def server_init(self, spec: Any) -> Any:
        zero = torch.zeros((), dtype=spec.dtype, device=spec.device)
        return {"surveys": zero, "rounds": zero, "received": zero}

    def survey(self, v: Any) -> Any:
        return {"clients": Sum(torch.ones_like(v.info.weight))}

    def surveys(self) -> Any:
        return "every"

    def receive(self, r: Any, totals: Any) -> Any:
        call("receive" if totals.summed.delta.params else "receive of a survey", r)
        return totals, r.server | {"received": r.server["received"] + 1}

    def absorb(self, r: Any, weights: Weights) -> tuple[Weights, Any]:
        call("absorb", r)
        return weights, r.server | {"surveys": r.server["surveys"] + r.uploads["clients"]}

    def server_step(self, r: Any, weights: Weights) -> tuple[Weights, Any]:
        call("server_step", r)
        moved = tree.map(lambda w: w + 1e-3 * r.server["surveys"], weights.params)
        return weights._replace(params=moved), r.server | {"rounds": r.server["rounds"] + 1}


@pytest.fixture(autouse=True)
def fragile() -> Iterator[None]:
    kedge.register(Fragile)
    calls.clear()
    bad.clear()
    yield
    parts.remove("fragile")


def federation(folder: Path, **options: Any) -> tuple[Coordinator, Members]:
    members = Members(folder, model=net())
    fault = options.pop("fault", lambda name, request, reply: reply)
    config = settings("scaffold+fragile", rounds=3)
    options |= {"transport": Faulty(members, fault)}
    return coordinator(members, config, folder / "run", **options), members


def undisturbed(folder: Path) -> Any:
    """The server's state after a run without faults."""
    run, members = federation(folder)
    run.run()
    assert_same(run, replay(run, members))
    calls.clear()
    return run.session.state()


def resumed(run: Coordinator, members: Members) -> Any:
    """The state of a run that is resumed without faults, in new processes."""
    again = coordinator(members, run.config, run.folder.path, resume=True)
    again.run()
    assert_same(again, replay(again, members))
    return again.session.state()


def assert_untouched(run: Coordinator) -> None:
    """The second round has left no trace: in memory, in the checkpoint, in the roster."""
    saved = run.folder.load(0)
    assert saved is not None
    assert tree.equal(run.session.state(), saved)
    assert int(saved["round"]) == 1
    assert max(run.session.ledger) == 0
    assert not any(seat.strikes or seat.excluded for seat in run.roster.participants)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_leaves_the_run_as_it_was(hook: str, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    bad[hook] = range(100)
    run, members = federation(tmp_path / "broken")
    with pytest.raises(HookError, match=f"{hook} in round 2"):
        run.run()
    assert calls[hook] > 3  # without each of the members, too
    assert_untouched(run)
    bad.clear()
    assert tree.equal(resumed(run, members), expected)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_once_is_called_again(hook: str, tmp_path: Path) -> None:
    """With all replies: a survey is absorbed once, and no member is blamed."""
    expected = undisturbed(tmp_path / "undisturbed")
    bad[hook] = range(1)
    run, members = federation(tmp_path / "broken")
    run.run()
    assert calls[hook] > 0
    assert tree.equal(run.session.state(), expected)
    assert not any(seat.strikes for seat in run.roster.participants)
    assert_same(run, replay(run, members))
    asked = [(node, r.kind, r.round) for node, r in run.transport.requests if r.kind != "agree"]  # type: ignore[attr-defined]
    assert len(set(asked)) == len(asked)  # nobody is asked twice


def test_a_pause_after_a_survey_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    expected, alive = undisturbed(tmp_path / "undisturbed"), [False]

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return reply if alive[0] or not training(request, 1) else None

    run, members = federation(tmp_path / "paused", fault=fault)
    with pytest.raises(Paused):
        run.run()
    assert calls["absorb"] == 0
    assert_untouched(run)
    alive[0] = True
    assert tree.equal(resumed(run, members), expected)


def test_a_stop_after_a_survey_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """Someone asks for it while the members are asked to train again."""
    expected = undisturbed(tmp_path / "undisturbed")

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if training(request, 1) else reply

    run, members = federation(tmp_path / "stopped", fault=fault, stop=lambda: "absorb" in calls)
    with pytest.raises(Interrupted, match="stopped after round 1"):
        run.run()
    assert_untouched(run)
    assert tree.equal(resumed(run, members), expected)
