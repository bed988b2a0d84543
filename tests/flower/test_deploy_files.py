"""The files of docs/deploy fit the program: options, rights, policy."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kedge.cli.flower import app
from kedge.federation.member.policy import Policy

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


def services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml, by name."""
    return yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))["services"]


def mounts(service: dict[str, Any]) -> dict[str, list[str]]:
    """Source and options of a service's mounts, by the folder in the container."""
    words = [mount.split(":") for mount in service["volumes"]]
    return {target: [source, *options] for source, target, *options in words}


def node_commands() -> list[list[str]]:
    return [shlex.split(unit("kedge-node")["ExecStart"]), services()["node"]["command"]]


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


def test_the_two_containers_of_a_hospital_have_two_users_and_one_socket() -> None:
    node, supernode = services()["node"], services()["supernode"]
    assert node["user"] != supernode["user"]
    assert node["network_mode"] == "none"
    assert f"--allow={supernode['user'].partition(':')[0]}" in node["command"]
    [path] = [word.partition("=")[2] for word in node["command"] if word.startswith("--socket=")]
    assert f'--node-config=socket="{path}"' in supernode["command"]
    assert path in node["healthcheck"]["test"]
    folder = str(Path(path).parent)
    assert mounts(supernode)[folder] == [*mounts(node)[folder], "ro"]
    of_node = {source for source, *_ in mounts(node).values()}
    assert of_node & {source for source, *_ in mounts(supernode).values()} == {"socket"}


@pytest.mark.parametrize("name", ["node", "supernode"])
def test_containers_have_no_rights_they_do_not_need(name: str) -> None:
    service = services()[name]
    assert not service["user"].startswith("0")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["pull_policy"] == "never"
    assert service["restart"] == "always"
    assert {"mem_limit", "pids_limit", "healthcheck"} <= set(service)
    assert not {"privileged", "cap_add", "ports", "pid", "ipc"} & set(service)
    # podman 4 rejects uid= and gid= here, Docker does not
    assert not any("uid=" in mount or "gid=" in mount for mount in service["tmpfs"])


def test_the_image_has_the_folder_of_the_socket_with_the_users_of_compose() -> None:
    text = (FILES / "Containerfile").read_text(encoding="utf-8")
    node = services()["node"]
    user, _, group = node["user"].partition(":")
    [path] = [word.partition("=")[2] for word in node["command"] if word.startswith("--socket=")]
    assert f"install -d -o {user} -g {group} -m 0755 {Path(path).parent}\n" in text
    assert f"\nUSER {node['user']}\n" in text
    page = (DOCS / "deploy.md").read_text(encoding="utf-8")
    assert f"podman build -t {node['image']} ." in page
    assert f"install -d -m 0700 -o {user} -g {group} /srv/kedge /var/lib/kedge\n" in page
    assert f"chown {services()['supernode']['user']} node.key\n" in page


def test_the_page_lists_all_files() -> None:
    page = (DOCS / "deploy.md").read_text(encoding="utf-8")
    assert [file.name for file in FILES.iterdir() if f"`{file.name}`" not in page] == []


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
