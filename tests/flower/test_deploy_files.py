"""The files of docs/deploy fit the program: options, rights, policy."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from kedge.cli.flower import app
from kedge.flower.policy import Policy

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS / "deploy"


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=["="])
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    text = (FILES / f"{name}.service").read_text(encoding="utf-8").replace("\\\n", " ")
    parser.read_string(text)
    return parser["Service"]


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def node_commands() -> list[list[str]]:
    compose = yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))
    return [shlex.split(unit("kedge-node")["ExecStart"]), compose["services"]["node"]["command"]]


@pytest.mark.parametrize("words", node_commands(), ids=["systemd", "compose"])
def test_resident_nodes_are_started_with_options_that_exist(words: list[str]) -> None:
    command = typer.main.get_command(app).commands["node"]  # type: ignore[attr-defined]
    known = {name for param in command.params for name in param.opts}
    required = {param.opts[0] for param in command.params if param.required}
    assert options(words) <= known
    assert required | {"--policy", "--allow"} <= options(words)


def test_the_two_programs_of_a_hospital_have_two_users_and_one_socket() -> None:
    node, supernode = unit("kedge-node"), unit("kedge-supernode")
    assert node["User"] != supernode["User"]
    assert node["PrivateNetwork"] == "yes"
    assert f"--allow {supernode['User']}" in node["ExecStart"]
    [path] = re.findall(r"--socket (\S+)", node["ExecStart"])
    assert f'socket="{path}"' in supernode["ExecStart"]
    assert Path(path).parent == Path("/run") / node["RuntimeDirectory"]
    compose = yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert compose["node"]["network_mode"] == "none"
    assert f"--allow={compose['supernode']['user'].partition(':')[0]}" in compose["node"]["command"]
    assert compose["node"]["user"] != compose["supernode"]["user"]


def test_the_superlink_listens_on_loopback_alone() -> None:
    words = shlex.split(unit("kedge-superlink")["ExecStart"])
    address = f"{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"
    assert address == "127.0.0.1:8000"
    assert f"https://{address}" in (FILES / "nginx.conf").read_text(encoding="utf-8")
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(words)
    assert "--insecure" not in words


def test_the_policy_of_the_page_is_the_file() -> None:
    page = (DOCS / "deploy.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    policy = Policy.load(FILES / "policy.toml")
    assert Policy.of(tomllib.loads(text)) == policy
    assert policy.max_updates
    assert policy.max_tests
    assert "survey" not in policy.kinds
