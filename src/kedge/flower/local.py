"""A whole federation on this machine as real processes: SuperLink, SuperNodes, resident nodes.

::

    FOLDER/federation.json        what was asked for: members, ports, data
    FOLDER/programs.json          what the supervisor runs, see kedge.flower.processes
    FOLDER/processes.json         who runs now
    FOLDER/keys/                  certificates and keys
    FOLDER/superlink.db           Flower's database: runs and registered nodes
    FOLDER/flower/                Flower's configuration, with the connection "kedge"
    FOLDER/nodes/NAME/            data, state, log and socket of a member
    FOLDER/logs/NAME.txt          output of each process
    FOLDER/app/                   the app of the last run
    FOLDER/journals/              what happened in each run, for the command that started it
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import KedgeError
from kedge.flower.processes import (
    PROCESSES,
    PROGRAMS,
    Program,
    free_ports,
    is_running,
    read_processes,
    start_supervisor,
    stop,
    write_programs,
)

FILE, FORMAT = "federation.json", 1
CONNECTION = "kedge"
DEFAULT_FOLDER = "kedge-federation"
READY_S = 180.0
MAX_STARTS = 8  # of one program while a federation gets ready; the pauses are a minute together
SUPERLINK = "superlink"
ONLINE = b"SuperNode ID:"  # in the log of a SuperNode that was let in
#: Flower reports nothing, asks for no newer release, and looks for work more often than each second.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}


@dataclass(frozen=True)
class NodeSpec:
    """A member: what it reads, and the port of its SuperNode."""

    name: str
    data: str
    port: int
    policy: str = ""


@dataclass(frozen=True)
class Spec:
    """A federation on this machine.

    Attributes:
        token: marks its processes.
        port: of the SuperLink.
        nodes: the members.
        resident: whether members are resident nodes; otherwise they live in client processes.
        threads: threads of torch in each process.
        data, partition, split, seed: where the members' data come from.
        scaling: mean and standard deviation of the dataset; empty if they are agreed.
    """

    token: str
    port: int
    nodes: tuple[NodeSpec, ...]
    resident: bool = True
    threads: int = 1
    data: str = ""
    partition: str = "auto"
    split: str = "auto"
    seed: int = 0
    scaling: tuple[tuple[float, ...], ...] = field(default=())

    def save(self, folder: Path) -> None:
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        (folder / FILE).write_text(json.dumps(values, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Read a federation.

        Raises:
            KedgeError: there is none in the folder.
        """
        try:
            values = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise KedgeError(f"{folder / FILE} is of another release of kedge")
            nodes = tuple(NodeSpec(**node) for node in values.pop("nodes"))
            scaling = tuple(tuple(row) for row in values.pop("scaling"))
            return cls(nodes=nodes, scaling=scaling, **values)
        except FileNotFoundError:
            raise KedgeError(
                f"there is no federation in {folder}; start one with: kedge flower up --nodes 4"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise KedgeError(f"{folder / FILE} cannot be read: {error!r}") from None


def create(
    folder: Path,
    data: str,
    partition: str = "auto",
    nodes: int = 0,
    *,
    split: str = "auto",
    seed: int = 0,
    resident: bool = True,
    policy: str = "",
    threads: int = 1,
) -> Spec:
    """Write the files of a federation; nothing is started.

    Raises:
        KedgeError: the folder is in use, or the data cannot be divided so.
    """
    from kedge.flower.keys import make_authority, make_node_key, make_server
    from kedge.flower.shares import shares_of

    if folder.exists() and any(folder.iterdir()):
        raise KedgeError(f"{folder} is not empty; choose another folder: --at FOLDER")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    shares, scaling = shares_of(data, partition, nodes, split, seed, folder / "nodes")
    make_authority(folder / "keys")
    make_server(folder / "keys")
    port, *ports = free_ports(len(shares) + 1)
    policy = str(Path(policy).resolve()) if policy else ""
    specs = []
    for share, own in zip(shares, ports, strict=True):
        (folder / "nodes" / share.name).mkdir(parents=True, exist_ok=True, mode=0o700)
        make_node_key(folder / "keys" / share.name)
        specs.append(NodeSpec(share.name, share.data, own, policy))
    spec = Spec(
        secrets.token_hex(8), port, tuple(specs), resident, threads, data, partition, split, seed,
        scaling or (),
    )  # fmt: skip
    _write_connection(folder, port)
    spec.save(folder)
    return spec


def _write_connection(folder: Path, port: int) -> None:
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{folder / "keys" / "ca.crt"}"\n',
        encoding="utf-8",
    )


# -- programs -----------------------------------------------------------------------------------


def environment(folder: Path, home: str = "flower", threads: int = 1) -> dict[str, str]:
    """Variables for Flower's programs."""
    (folder / home).mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = QUIET | {"FLWR_HOME": str(folder / home), "PATH": path}
    return found | {"OMP_NUM_THREADS": str(threads)}


def flower(name: str) -> str:
    """The path of one of Flower's programs, which are beside Python's.

    Raises:
        KedgeError: Flower is not installed.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise KedgeError(INSTALL)
    return str(path)


INSTALL = "this needs Flower; install it with: pip install 'kedge[flower]'"


def programs(folder: Path, spec: Spec) -> list[Program]:
    """What a supervisor runs for a federation, in this order."""
    keys, base = folder / "keys", environment(folder, threads=spec.threads)
    found = [
        Program(
            SUPERLINK,
            [
                flower("flower-superlink"), "--host", "127.0.0.1", "--port", str(spec.port),
                "--ssl-ca-certfile", str(keys / "ca.crt"),
                "--ssl-certfile", str(keys / "server.pem"),
                "--ssl-keyfile", str(keys / "server.key"),
                "--enable-supernode-auth", "--database", str(folder / "superlink.db"),
                "--disable-runtime-dependency-installation",
            ],
            base,
            port=spec.port,
        )
    ]  # fmt: skip
    for node in spec.nodes:
        if not (keys / f"{node.name}.registered").exists():
            found.append(_registration(folder, node, base))
    if spec.resident:
        found += [_resident(folder, node, base) for node in spec.nodes]
    return found + [_supernode(folder, spec, node) for node in spec.nodes]


def _registration(folder: Path, node: NodeSpec, base: dict[str, str]) -> Program:
    """Tell the SuperLink a node's public key; a mark remains, since it can be told once."""
    key = folder / "keys" / node.name
    code = (
        "import subprocess, sys, pathlib; "
        "done = subprocess.run(sys.argv[2:], capture_output=True, text=True); "
        "text = done.stdout + done.stderr; print(text); "
        "known = done.returncode == 0 or 'already' in text.lower(); "
        "known and pathlib.Path(sys.argv[1]).touch(); "
        "sys.exit(not known)"
    )
    command = [flower("flwr"), "supernode", "register", f"{key}.pub", CONNECTION]
    return Program(
        f"register-{node.name}",
        [sys.executable, "-c", code, f"{key}.registered", *command],
        base,
        once=True,
    )


def socket_of(folder: Path, node: NodeSpec) -> Path:
    return folder / "nodes" / node.name / "socket"


def _resident(folder: Path, node: NodeSpec, base: dict[str, str]) -> Program:
    home = folder / "nodes" / node.name
    command = [
        sys.executable, "-m", "kedge", "flower", "node", "--name", node.name, "--data",
        node.data, "--folder", str(home / "state"), "--socket", str(socket_of(folder, node)),
    ]  # fmt: skip
    if node.policy:
        command += ["--policy", node.policy]
    return Program(f"member-{node.name}", command, base)


def _supernode(folder: Path, spec: Spec, node: NodeSpec) -> Program:
    home = folder / "nodes" / node.name
    config = {"member": node.name, "data": node.data, "folder": str(home / "state")}
    if node.policy:
        config["policy"] = node.policy
    if spec.resident:
        config = {"socket": str(socket_of(folder, node))}
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = [
        flower("flower-supernode"), "--superlink", f"127.0.0.1:{spec.port}",
        "--root-certificates", str(folder / "keys" / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "keys" / node.name),
        "--host", "127.0.0.1", "--port", str(node.port), "--node-config", text,
    ]  # fmt: skip
    return Program(node.name, command, environment(folder, f"nodes/{node.name}/flower"))


# -- up and down --------------------------------------------------------------------------------


def up(folder: Path, spec: Spec, owner: int = 0, ready_s: float = READY_S) -> None:
    """Start a federation, and wait until all its nodes are connected.

    Args:
        folder: its folder.
        spec: what :func:`create` returned, or :meth:`Spec.load`.
        owner: a process with whose end the federation ends, too; 0: none.
        ready_s: how long to wait.

    Raises:
        KedgeError: it runs already, or does not get ready.
    """
    if read_processes(folder)[0]:
        raise KedgeError(f"the federation in {folder} runs already; see: kedge flower status")
    stop(folder, spec.token)  # what a supervisor that was killed has left behind
    for log in (folder / "logs").glob("*.txt"):
        log.replace(log.with_suffix(".old"))
    write_programs(folder, spec.token, programs(folder, spec))
    supervisor = start_supervisor(folder, spec.token, owner)
    end = time.time() + ready_s
    while time.time() < end:
        if not is_running(supervisor):
            break
        if all(is_ready(folder, spec, node) for node in spec.nodes):
            return
        _check_starts(folder, spec)
        time.sleep(0.25)
    missing = [node.name for node in spec.nodes if not is_ready(folder, spec, node)]
    stop(folder, spec.token)
    raise KedgeError(
        f"the federation did not get ready within {ready_s:g} s; missing: {', '.join(missing)}. "
        f"See the logs in {folder / 'logs'}"
    )


def _check_starts(folder: Path, spec: Spec) -> None:
    """Give up if a program ends as often as it is started."""
    for name, process in read_processes(folder)[1].items():
        if process.starts > (MAX_STARTS if name in (n.name for n in spec.nodes) else 3):
            stop(folder, spec.token)
            log = folder / "logs" / f"{name}.txt"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise KedgeError(f"{name} does not start: {' '.join(lines[-1:])} See {log}")


def is_ready(folder: Path, spec: Spec, node: NodeSpec) -> bool:
    """Whether a node is connected, and its member answers."""
    if spec.resident and not socket_of(folder, node).exists():
        return False
    return node_id(folder, node.name) != ""


def node_id(folder: Path, name: str) -> str:
    """The last id that the SuperLink gave to a node; empty if it has not let it in yet."""
    try:
        content = (folder / "logs" / f"{name}.txt").read_bytes()
    except OSError:
        return ""
    line = content.rpartition(ONLINE)[2].partition(b"\n")[0] if ONLINE in content else b""
    return line.strip().decode(errors="replace")


def down(folder: Path) -> None:
    """End a federation and all its processes; its files stay."""
    stop(folder, Spec.load(folder).token)


def status(folder: Path) -> list[dict[str, Any]]:
    """One row per process: name, id, since when, how often it was started, its last exit code."""
    spec, (supervisor, processes) = Spec.load(folder), read_processes(folder)
    rows: list[dict[str, Any]] = []
    for name, process in processes.items():
        if name.startswith("register-"):
            continue
        running = bool(supervisor) and process.running and is_running(process.pid)
        row: dict[str, Any] = {
            "name": name, "pid": process.pid if running else 0, "running": running,
            "since": process.since, "starts": process.starts, "exit": process.exit,
        }  # fmt: skip
        if name in {node.name for node in spec.nodes}:
            row["node"] = node_id(folder, name)
        rows.append(row)
    return rows


__all__ = ["PROCESSES", "PROGRAMS", "NodeSpec", "Spec", "create", "down", "status", "up"]
