"""The ServerApp in this process: what it says, where, and what to type next."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import json
import logging
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.common.config import parse_config_args

from kedge.errors import Interrupted, Paused, TermsError
from kedge.federation.messages import MemberRequest, pack_refusal
from kedge.flower import apps
from kedge.local.runs import Submitted
from tests.flower.federations import Members, datasets
from tests.flower.grids import MemberGrid, app_folder

pytestmark = pytest.mark.flower


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `flwr log` shows."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", "flwr")
    return lambda: [record.getMessage() for record in caplog.records]


def failing(members: Members) -> Members:
    """Members that join and agree, and fail to train from the second round on."""
    for node, handle in members.handles.items():

        def answer(message: bytes, handle: Any = handle) -> bytes:
            request = MemberRequest.unpack(message)
            is_late = request.kind == "train" and request.round
            return pack_refusal(request, "FAILED") if is_late else handle(message)

        members.handles[node] = answer
    return members


def test_a_run_as_flower_starts_it(tmp_path: Path, lines: Any) -> None:
    folder = app_folder(tmp_path / "app")
    apps.run_server(folder, MemberGrid(Members(tmp_path)), {"out": str(tmp_path / "run")})  # type: ignore[arg-type]
    assert (tmp_path / "run" / "result.json").exists()
    assert lines()[0] == f"the folder of the run is {tmp_path / 'run'}"
    assert any(line.startswith("round 3 of 3: 3 of 3 replied") for line in lines())


@pytest.mark.parametrize("rounds", [0, 5])
def test_a_pause_says_how_to_resume_on_a_deployment(
    rounds: int, tmp_path: Path, lines: Any
) -> None:
    folder = app_folder(tmp_path / "app")
    config = {"app": str(tmp_path / "app"), "out": str(tmp_path / "run"), "rounds": rounds}
    members = failing(Members(tmp_path))
    with pytest.raises(Paused) as pause:
        apps.run_server(folder, MemberGrid(members), config)  # type: ignore[arg-type]
    words = f'out="{tmp_path / "run"}" resume=true' + (" rounds=5" if rounds else "")
    command = f"flwr run {tmp_path / 'app'} --run-config '{words}'"
    assert str(pause.value).endswith(f"Resume with: {command}")
    assert lines()[-1] == str(pause.value)
    config = parse_config_args(shlex.split(command)[-1:])
    apps.run_server(folder, MemberGrid(Members(tmp_path)), config)  # type: ignore[arg-type]
    records = (tmp_path / "run" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert len(records) == (rounds or 3)


def test_a_run_that_is_stopped_before_it_starts_leaves_no_folder(tmp_path: Path) -> None:
    folder, journal = app_folder(tmp_path / "app"), tmp_path / "journal"
    Submitted("", journal).stop()
    config = {"out": str(tmp_path / "run"), "journal": str(journal)}
    with pytest.raises(Interrupted, match="before all members had joined"):
        apps.run_server(folder, MemberGrid(Members(tmp_path)), config)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.glob("journal*")] == ["journal"]
    [first, last] = apps.read_journal(journal)
    assert first["out"] == str(tmp_path / "run")
    assert last["end"] == "stopped"


def test_the_folder_of_the_app_is_named_only_if_it_is_there(tmp_path: Path) -> None:
    out, gone = Path("/runs/a b"), apps.RUN_CONFIG | {"app": str(tmp_path / "gone")}
    expected = "flwr run APP --run-config 'out=\"/runs/a b\" resume=true'"
    assert apps.resume_command(gone, out) == expected
    assert apps.resume_command(apps.RUN_CONFIG, out) == expected
    hint = apps.RUN_CONFIG | {"hint": "kedge flower run --out x --resume"}
    assert apps.resume_command(hint, out) == "kedge flower run --out x --resume"


def test_why_a_run_cannot_start_is_in_the_log_and_in_the_journal(
    tmp_path: Path, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback, which would hide it."""
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)
    folder = app_folder(tmp_path / "app")
    members = Members(tmp_path, datasets()[:3])
    members.handles["node of west"] = lambda message: b"nonsense"
    config = apps.RUN_CONFIG | {"out": str(tmp_path / "run"), "journal": str(tmp_path / "journal")}
    app = apps.server_app(folder)
    context: Any = SimpleNamespace(run_config=config)
    with pytest.raises(TermsError, match="3 of 4 members can take part: node 3 sent an") as error:
        app(MemberGrid(members), context)  # type: ignore[arg-type]
    formatted = logging.Formatter().formatException(error._excinfo)  # as Flower logs it
    assert formatted == f"kedge.errors.TermsError: {error.value}"
    assert any("node 3 did not join: it sent an answer that cannot be read" in x for x in lines())
    entries = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert entries[-1] == {"end": "failed", "text": str(error.value)}
    assert not (tmp_path / "run").exists()
