"""``kedge flower`` where Flower is not needed, or not there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kedge.errors import Interrupted
from kedge.federation.coordinator.rules import read_rules
from kedge.local import federation as local
from kedge.local import runs as submit
from kedge.local.federation import FederationSpec, NodeSpec
from kedge.local.processes import write_programs
from kedge.settings import load_config
from tests.cli.commands import kedge_command


def test_help_lists_the_commands() -> None:
    said = kedge_command("flower", "--help").stdout
    for name in ("init", "up", "run", "status", "log", "down", "node", "keys"):
        assert f" {name} " in said
    assert "--policy" in kedge_command("flower", "node", "--help").stdout
    assert "--method" in kedge_command("flower", "init", "--help").stdout


@pytest.mark.parametrize("command", ["up", "run", "status"])
def test_without_flower_there_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "flwr" else find(name, *a)
    )
    done = kedge_command("flower", command)
    assert done.returncode == 2
    assert done.stderr == "error: this needs Flower; install it with: pip install 'kedge[flower]'\n"


def test_init_writes_settings_and_rules(tmp_path: Path) -> None:
    words = ("--method", "scaffold", "--model", "mlp(hidden=[8])", "--clients", "3")
    done = kedge_command("flower", "init", str(tmp_path / "app"), *words, "--rule", "minimum=1.0")
    assert done.returncode == 0, done.stderr
    config = load_config(tmp_path / "app" / "kedge_app" / "settings.toml")
    assert (config.method, config.model, config.clients) == ("scaffold", "mlp(hidden=[8])", 3)
    assert config.seeds == (0,)
    assert read_rules(tmp_path / "app" / "kedge_app" / "rules.toml")[0].minimum == 1.0
    again = kedge_command("flower", "init", str(tmp_path / "app"))
    assert again.returncode == 2
    assert "is not empty" in again.stderr
    wrong = kedge_command("flower", "init", str(tmp_path / "b"), "--rule", "deadline")
    assert "--rule takes key=value" in wrong.stderr


def test_an_app_has_files_with_parts_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import kedge\n\n\n@kedge.register\nclass Tether(kedge.Part):\n    '''Nothing.'''\n"
    )
    words = ("--method", "tether", "--load", str(mine))
    done = kedge_command("flower", "init", str(tmp_path / "app"), *words)
    assert done.returncode == 0, done.stderr
    copied = tmp_path / "app" / "kedge_app" / "own_0.py"
    assert copied.read_text() == mine.read_text()


def test_where_there_is_no_federation(tmp_path: Path) -> None:
    for command in ("log", "down"):
        done = kedge_command("flower", command, "--at", str(tmp_path))
        assert done.returncode == 2
        assert "there is no federation" in done.stderr


@pytest.fixture
def with_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: find("json" if name == "flwr" else name, *a)
    )


@pytest.mark.usefixtures("with_flower")
def test_a_federation_that_is_there_is_not_changed_by_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = FederationSpec("token", 1, (NodeSpec("a", "x", 2), NodeSpec("b", "x", 3)), data="digits")
    spec.save(tmp_path)
    started: list[FederationSpec] = []
    monkeypatch.setattr(local, "up", lambda folder, found: started.append(found) or found)
    for words in (("--nodes", "3"), ("--data", "silos"), ("--no-resident",), ("--seed", "1")):
        done = kedge_command("flower", "up", *words, "--at", str(tmp_path))
        assert done.returncode == 2
        assert "already, of 2 members with digits" in done.stderr
        assert f"and {words[0].replace('--no-', '--')} would change it" in done.stderr
    assert not started
    for words in ((), ("--nodes", "2", "--data", "digits")):
        done = kedge_command("flower", "up", *words, "--at", str(tmp_path))
        assert done.returncode == 0, done.stderr
    assert started == [spec, spec]


@pytest.mark.usefixtures("with_flower")
def test_the_status_of_a_federation_whose_supervisor_is_gone(tmp_path: Path) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),)).save(tmp_path)
    said = kedge_command("flower", "status", "--at", str(tmp_path)).stdout
    assert f"does not run; start it: kedge flower up --at {tmp_path}" in said
    process = {"pid": 2**22 + 1, "since": 0.0}
    values = {"supervisor": 2**22 + 2, "token": "token", "processes": {"superlink": process}}
    (tmp_path / "processes.json").write_text(json.dumps(values))
    said = kedge_command("flower", "status", "--at", str(tmp_path)).stdout
    assert "does not run any more: its supervisor was ended; start it: kedge flower up" in said


@pytest.mark.usefixtures("with_flower")
def test_ctrl_c_while_a_federation_or_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),), data="digits").save(tmp_path)
    monkeypatch.setattr(local, "up", interrupt)
    done = kedge_command("flower", "up", "--at", str(tmp_path))
    assert done.returncode == 130
    assert f"no process runs. Start again with: kedge flower up --at {tmp_path}" in done.stderr
    monkeypatch.setattr(submit, "submit", interrupt)
    done = kedge_command("flower", "run", "--at", str(tmp_path), "--out", str(tmp_path / "run"))
    assert done.returncode == 130
    assert "interrupted before the run had started" in done.stderr


@pytest.mark.usefixtures("with_flower")
def test_a_folder_with_a_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),), data="digits").save(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    done = kedge_command("flower", "run", "--at", str(tmp_path), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
    assert not (tmp_path / "app").exists()


@pytest.mark.usefixtures("with_flower")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_asks_the_server_to_stop(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),), data="digits").save(tmp_path)
    run, calls = submit.Submitted("7", tmp_path / "journal.jsonl"), []

    def follow(*_: object) -> None:
        calls.append((tmp_path / "journal.jsonl.stop").exists())
        if len(calls) <= times:
            raise KeyboardInterrupt
        raise Interrupted("stopped after round 2 of seed 0. Resume with: kedge flower run")

    monkeypatch.setattr(submit, "submit", lambda *_, **__: run)
    monkeypatch.setattr(submit, "follow", follow)
    done = kedge_command("flower", "run", "--at", str(tmp_path), "--out", str(tmp_path / "run"))
    assert done.returncode == 130
    assert calls == [False, True]
    text = "stopped after round 2" if times == 1 else "the run stops after its present round. Res"
    assert text in done.stderr


def test_logs_of_members(tmp_path: Path) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),)).save(tmp_path)
    write_programs(tmp_path, "token", [])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "north.txt").write_text("".join(f"line {i}\n" for i in range(90_000)))
    done = kedge_command("flower", "log", "north", "-n", "2", "--at", str(tmp_path))
    assert done.stdout.splitlines()[1:] == ["line 89998", "line 89999"]
    done = kedge_command("flower", "log", "nort", "--at", str(tmp_path))
    assert "Did you mean 'north'?" in done.stderr
    assert "no run yet" in kedge_command("flower", "log", "--at", str(tmp_path)).stderr
    assert kedge_command("flower", "down", "--at", str(tmp_path)).returncode == 0
