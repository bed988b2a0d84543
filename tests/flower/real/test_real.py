"""Real processes on loopback: SuperLink, SuperNodes with keys, TLS, resident nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import json
import os
import re
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from kedge.core import tree
from kedge.errors import KedgeError
from kedge.local import federation as spec
from kedge.local.keys import make_authority, make_node_key
from kedge.local.processes import TOKEN, free_ports, read_processes
from kedge.local.runs import follow
from tests.flower.real.running import (
    NODES,
    Running,
    assert_same,
    kill,
    rounds_of,
    settings,
    simulate,
    wait,
)

pytestmark = pytest.mark.flower


def test_scaffold_by_command_is_the_simulation(federation: Running, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--method", "scaffold", "--rounds", "3", "--out", str(out), "--json")
    done = federation.command("run", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "flower"
    simulated = simulate(settings("scaffold", 3), tmp_path / "simulated")
    assert_same(out, simulated)
    assert_same_states(federation, out, simulated)
    # what works on a run works on this one
    assert "scaffold reaches" in re.sub("<[^>]*>", "", (out / "report.html").read_text())
    predicted = subprocess.run(
        ["kedge", "predict", str(out), "digits", "-o", str(tmp_path / "predicted.csv")],
        env=os.environ | spec.environment(federation.folder), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert predicted.returncode == 0, predicted.stderr
    assert len((tmp_path / "predicted.csv").read_text().splitlines()) > 300
    shown = federation.command("status", "--json")
    rows = {row["name"]: row for row in json.loads(shown.stdout)["processes"]}
    assert len(rows) == 1 + 2 * NODES
    assert all(row["running"] for row in rows.values())
    assert json.loads(shown.stdout)["runs"][0]["status"] == "finished:completed"
    assert "complete" in federation.command("log").stdout
    assert "train of round 3: answered" in federation.command("log", "client-1").stdout


def assert_same_states(federation: Running, out: Path, simulated: Path) -> None:
    """What members keep on disk is the client state of the simulation."""
    run = json.loads((out / "federation.json").read_bytes())["run"]
    expected = load_file(simulated / "seed-0" / "checkpoint.safetensors")
    for k, node in enumerate(federation.spec.nodes):
        folder = federation.folder / "nodes" / node.name / "state" / "runs" / run
        newest = max(folder.glob("state-*.safetensors"))
        found = load_file(newest)
        rows = {key[8:]: value[k] for key, value in expected.items() if key[:8] == "clients|"}
        assert found
        assert tree.equal(found, {key: rows[key] for key in found})


#: Of the papers, FedBR has surveys, and FLBoost trains on the server. All parts are compared in one
#: process by tests/flower/test_parity.py.
METHODS = [
    "fedavg",
    "fedbr(rows=4, samples=3, width=5, out=3)",
    "scaffold+flboost(steps=2, student_steps=2, batch=6, noise=3, width=4)",
]


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_the_simulation(method: str, federation: Running, tmp_path: Path) -> None:
    config = settings(method, 2)
    federation.train(config, tmp_path / "run")
    assert_same(tmp_path / "run", simulate(config, tmp_path / "simulated"))


def test_processes_are_killed_and_the_run_ends_as_the_simulation(
    federation: Running, tmp_path: Path
) -> None:
    """One kill of each kind in one run; after that of the SuperLink or the ServerApp it is
    resumed."""
    config, out = settings("scaffold", 5), tmp_path / "run"
    run = federation.submit(config, out)
    wait(lambda: rounds_of(out) >= 1)
    kill(federation.client_process("client-0"))
    kill(federation.pid("member-client-1"))
    wait(lambda: rounds_of(out) >= 2)
    kill(federation.pid("client-2"))
    wait(lambda: rounds_of(out) >= 3)
    kill(federation.pid("superlink"))
    with pytest.raises(KedgeError, match="the server of the run"):
        follow(federation.folder, run, "")
    assert rounds_of(out) in (3, 4)
    run = federation.submit(config, out, resume=True)
    wait(lambda: rounds_of(out) >= 4)
    kill(federation.server_process())
    with pytest.raises(KedgeError, match="the server of the run"):
        follow(federation.folder, run, "")
    assert rounds_of(out) in (4, 5)
    federation.train(config, out, resume=True)
    assert_same(out, simulate(config, tmp_path / "simulated"))
    processes = read_processes(federation.folder)[1]
    assert processes["superlink"].starts == 2
    assert processes["member-client-1"].starts == 2
    assert processes["client-2"].starts >= 2
    log = (out / "log.txt").read_text()
    assert "client-2 did not reply (unreachable)" in log
    assert log.count("resumed after round") == 2


def test_strangers_are_not_let_in(federation: Running, tmp_path: Path) -> None:
    """A key that was not registered, no key, and a server that the node does not trust."""
    own_spec, keys = federation.spec, federation.folder / "keys"
    make_node_key(tmp_path / "stranger")
    make_authority(tmp_path / "other")
    trusted, own = str(keys / "ca.crt"), str(tmp_path / "stranger")
    for words, said in (
        (("--root-certificates", trusted, "--auth-supernode-private-key", own), "2004"),
        (("--root-certificates", trusted), "2001"),
        (("--root-certificates", str(tmp_path / "other" / "ca.crt"),
          "--auth-supernode-private-key", str(keys / "client-0")), "CERTIFICATE_VERIFY_FAILED"),
    ):  # fmt: skip
        log = tmp_path / "log.txt"  # no pipe: what a SuperNode starts may outlive it
        with log.open("wb") as file:
            done = subprocess.run(
                [spec.flower("flower-supernode"), "--superlink", f"127.0.0.1:{own_spec.port}",
                 *words, "--host", "127.0.0.1", "--port", str(free_ports(1)[0]),
                 "--max-retries", "1"],
                env=os.environ | spec.environment(tmp_path) | {TOKEN: own_spec.token},
                stdout=file, stderr=subprocess.STDOUT, check=False, timeout=60,
            )  # fmt: skip
        assert done.returncode != 0
        assert said in log.read_text()
