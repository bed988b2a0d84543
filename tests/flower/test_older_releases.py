"""Folders that an older release has written open, or are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kedge.core import tree
from kedge.errors import Paused
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.messages import MemberRequest
from kedge.files import write_file
from kedge.session import wire
from tests.flower.faulty import Faulty, training
from tests.flower.federations import Members, assert_same, coordinator, net, replay, settings

CONFIG = settings("scaffold", rounds=3, per_round=0)


def paused(tmp_path: Path) -> tuple[Coordinator, Members]:
    """A run that has paused after its second round."""

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if training(request, 2) else reply

    members = Members(tmp_path, model=net())
    run = coordinator(members, CONFIG, tmp_path / "run", transport=Faulty(members, fault))
    with pytest.raises(Paused):
        run.run()
    return run, members


def test_a_member_whose_files_have_an_older_version_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes none of them, and the others go on."""
    run, members = paused(tmp_path)
    folder = tmp_path / "south" / "runs" / run.roster.run
    place = members.members["south"].folder.place(run.roster.run, _data(members))
    assert place is not None
    with monkeypatch.context() as patch:
        patch.setattr(wire, "VERSION", "1")
        write_file(
            folder / "initial.safetensors", wire.pack("initial", place.initial), private=True
        )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    members.start("south")
    again = coordinator(members, CONFIG, tmp_path / "run", resume=True)
    again.run()
    assert [r["cohort"] for r in again.recorder.records][-1] == [0, 1, 3]
    assert not any(seat.strikes for seat in again.roster.participants)
    assert "south does not know these terms (TERMS)" in (tmp_path / "run/log.txt").read_text()
    [line, *_] = [x for x in members.log("south").splitlines() if "refused with TERMS" in x]
    assert "this kedge reads '2'" in line
    assert line.endswith("go on with the kedge that began the run, or start a new one")
    assert "Traceback" not in members.log("south")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert_same(again, replay(again, members))


def _data(members: Members) -> str:
    return members.members["south"].dataset.fingerprint


def test_a_run_whose_records_lack_the_bytes_on_the_wire_goes_on(tmp_path: Path) -> None:
    paused(tmp_path)
    path = tmp_path / "run" / "seed-0" / "metrics.jsonl"
    older = [json.loads(line) for line in path.read_text().splitlines()]
    for record in older:
        assert record.pop("wire_mb_up") > 0
        assert record.pop("wire_mb_down") > 0
    path.write_text("".join(json.dumps(record) + "\n" for record in older))
    members = Members(tmp_path, model=net())
    again = coordinator(members, CONFIG, tmp_path / "run", resume=True)
    result = again.run()
    assert [r["round"] for r in result.records[0]] == [1, 2, 3]
    assert ["wire_mb_up" in r for r in result.records[0]] == [False, False, True]
    other = Members(tmp_path / "other", model=net())
    undisturbed = coordinator(other, CONFIG, tmp_path / "other" / "run")
    undisturbed.run()
    assert tree.equal(again.session.state(), undisturbed.session.state())
