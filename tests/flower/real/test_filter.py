"""The path filter of docs/deploy.md: Debian's nginx in front of a real SuperLink, with TLS."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kedge.local import federation as local
from kedge.local.processes import ProcessSpec, free_ports, is_open
from kedge.local.runs import call, follow, submit
from tests.flower.real.running import settings, wait

pytest.importorskip("flwr", reason="needs Flower: pip install 'kedge[flower]'")

pytestmark = pytest.mark.flower
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONF = Path(__file__).parents[3] / "docs" / "deploy" / "nginx.conf"
PROTOBUF = "application/protobuf"
PROGRAMS = local.programs
MAIN = """\
daemon off;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{}}
http {{
    access_log {home}/access.log;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    {site}
}}
"""
if NGINX is None:
    pytest.skip("needs nginx", allow_module_level=True)


class Filtered:
    """A federation of two members whose SuperNodes know the address of the filter alone."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.spec = local.create(folder, "digits", "iid", 2)
        [self.port] = free_ports(1)
        self.home = folder / "nginx"
        self.home.mkdir()
        patch.setattr(local, "programs", self.programs)
        self.nginx = subprocess.Popen([str(NGINX), "-c", str(self.write_conf())])
        try:
            wait(lambda: is_open(self.port), 20)
            local.up(folder, self.spec, owner=os.getpid())
        except BaseException:
            self.end()
            raise

    def write_conf(self) -> Path:
        site = CONF.read_text(encoding="utf-8")
        for old, new in (
            ("listen 8443", f"listen 127.0.0.1:{self.port}"),
            ("https://127.0.0.1:8000", f"https://127.0.0.1:{self.spec.port}"),
            ("/etc/kedge/", f"{self.folder / 'keys'}/"),
        ):
            assert old in site
            site = site.replace(old, new)
        path = self.home / "nginx.conf"
        # workers run as the owner of the keys, who may be root
        user = "user root;\n" if os.getuid() == 0 else ""
        path.write_text(user + MAIN.format(home=self.home, site=site), encoding="utf-8")
        return path

    def programs(self, folder: Path, own: local.FederationSpec) -> list[ProcessSpec]:
        """As usual, but SuperNodes connect to the filter."""
        inner, outer = f"127.0.0.1:{own.port}", f"127.0.0.1:{self.port}"
        names = {node.name for node in own.nodes}
        return [
            replace(p, command=[outer if word == inner else word for word in p.command])
            if p.name in names
            else p
            for p in PROGRAMS(folder, own)
        ]

    def end(self) -> None:
        local.down(self.folder)
        self.nginx.terminate()
        self.nginx.wait(20)

    def status(self, path: str, method: str = "POST", port: int = 0) -> int:
        """Status of a request whose path is sent as it is."""
        context = ssl.create_default_context(cafile=str(self.folder / "keys" / "ca.crt"))
        plain = socket.create_connection(("127.0.0.1", port or self.port), timeout=20)
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n"
            connection.sendall(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        return int(answer.split(b" ", 2)[1])


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filtered]:
    with pytest.MonkeyPatch.context() as patch:
        running = Filtered(tmp_path_factory.mktemp("filter") / "f", patch)
        try:
            yield running
        finally:
            running.end()


FORBIDDEN = [
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/pull-messages",
    "/docs",
    "/openapi.json",
    "/",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/./pull-messages",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/%2e%2e%2fcontrol%2flist-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/..;/control/list-runs",
    "/v1/fleet//../control/list-runs",
    "//v1/control/list-runs",
    "/v1//control/list-runs",
    "/v1/./control/list-runs",
    "/%76%31/control/list-runs",
    "/v1/fleet/pull-messages?to=/v1/control/list-runs",
    "/v1/fleet/pull-messages%3f/../../control/list-runs",
    "/v1/fleet/pull-messages%0a",
    "/V1/Fleet/pull-messages",
    "/v1/control/list-runs/../../fleet/pull-messages",
    "https://localhost/v1/control/list-runs",
]


def test_the_superlink_itself_answers_what_the_filter_must_stop(filtered: Filtered) -> None:
    """Without this the test below would pass with a SuperLink that has no such paths."""
    inner = filtered.spec.port
    assert filtered.status("/openapi.json", "GET", inner) == 200
    assert filtered.status("/docs", "GET", inner) == 200
    assert filtered.status("/v1/control/list-runs", port=inner) == 200


@pytest.mark.parametrize("path", FORBIDDEN)
def test_other_paths_are_forbidden(path: str, filtered: Filtered) -> None:
    assert filtered.status(path) in (403, 400)  # 400: nginx cannot read the path at all
    assert filtered.status(path, "GET") in (403, 400)


def test_fleet_paths_reach_the_superlink(filtered: Filtered) -> None:
    assert filtered.status("/v1/fleet/pull-messages") == 401  # by the SuperLink: no signature
    assert filtered.status("/v1/fleet/pull-messages", "GET") == 403


def test_real_nodes_train_through_the_filter(filtered: Filtered, tmp_path: Path) -> None:
    config = replace(
        settings("fedavg", 1), clients=2, partition="iid", model="mlp(hidden=[1200, 1200])"
    )
    run = submit(filtered.folder, config, tmp_path / "run")
    follow(filtered.folder, run, "")
    assert (tmp_path / "run" / "result.json").exists()
    log = (filtered.home / "access.log").read_text(encoding="utf-8")
    passed = set(re.findall(r'"POST (/\S+) HTTP/1.1" 200', log))
    assert {"/v1/fleet/pull-messages", "/v1/fleet/push-messages"} <= passed
    assert all(path.startswith("/v1/fleet/") for path in passed)
    assert "403" not in {line.split('" ')[1][:3] for line in log.splitlines() if "httpx" in line}


def test_commands_of_flower_fail_at_the_filter(filtered: Filtered, tmp_path: Path) -> None:
    """Who has only the certificate and the address cannot list, start or register."""
    text = (filtered.folder / "flower" / "config.toml").read_text(encoding="utf-8")
    other = tmp_path / "other"
    (other / "flower").mkdir(parents=True)
    inner, outer = f"127.0.0.1:{filtered.spec.port}", f"127.0.0.1:{filtered.port}"
    (other / "flower" / "config.toml").write_text(text.replace(inner, outer), encoding="utf-8")
    assert call(filtered.folder, "list", "kedge")["success"]
    start = time.perf_counter()
    with pytest.raises(Exception, match="flwr list failed"):
        call(other, "list", "kedge")
    assert time.perf_counter() - start < 60
