"""What a federation on this machine consists of, and the programs that a supervisor runs for it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kedge.errors import KedgeError
from kedge.files import make_folder, write_file
from kedge.flower.processes import Program

FILE, FORMAT = "federation.json", 1
CONNECTION, SUPERLINK = "kedge", "superlink"
HERE = "kedge-federation"  # the folder of a federation, unless another one is named
MAX_PATH = 100  # bytes of the path of a socket; systems allow 104 to 108
INSTALL = "this needs Flower; install it with: pip install 'kedge[flower]'"
#: Flower reports nothing, does not ask for newer releases, and looks for work often.
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
        own: files with parts of one's own, which resident nodes load.
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
    own: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        write_file(folder / FILE, json.dumps(values, indent=1).encode(), private=True)

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
            own = tuple(values.pop("own"))
            return cls(nodes=nodes, scaling=scaling, own=own, **values)
        except FileNotFoundError:
            raise KedgeError(
                f"there is no federation in {folder}; start one with: kedge flower up --nodes 4"
                + option(folder)
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise KedgeError(f"{folder / FILE} cannot be read: {error!r}") from None


def option(folder: Path) -> str:
    """What a command on the federation in a folder must be given, with a space before it."""
    return "" if folder == Path(HERE).resolve() else f" --at {shlex.quote(str(folder))}"


# -- programs -----------------------------------------------------------------------------------


def environment(folder: Path, home: str = "flower", threads: int = 1) -> dict[str, str]:
    """Variables for Flower's programs."""
    make_folder(folder / home, inside=folder)
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
        found += [_resident(folder, spec, node, base) for node in spec.nodes]
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


def socket_of(folder: Path, name: str) -> Path:
    return folder / "nodes" / name / "socket"


def _resident(folder: Path, spec: Spec, node: NodeSpec, base: dict[str, str]) -> Program:
    home = folder / "nodes" / node.name
    command = [
        sys.executable, "-m", "kedge", "flower", "node", "--name", node.name, "--data",
        node.data, "--folder", str(home / "state"), "--socket", str(socket_of(folder, node.name)),
    ]  # fmt: skip
    if node.policy:
        command += ["--policy", node.policy]
    for file in spec.own:
        command += ["--load", file]
    return Program(f"member-{node.name}", command, base)


def _supernode(folder: Path, spec: Spec, node: NodeSpec) -> Program:
    home = folder / "nodes" / node.name
    config = {"member": node.name, "data": node.data, "folder": str(home / "state")}
    if node.policy:
        config["policy"] = node.policy
    if spec.resident:
        config = {"socket": str(socket_of(folder, node.name))}
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = [
        flower("flower-supernode"), "--superlink", f"127.0.0.1:{spec.port}",
        "--root-certificates", str(folder / "keys" / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "keys" / node.name),
        "--host", "127.0.0.1", "--port", str(node.port), "--node-config", text,
    ]  # fmt: skip
    return Program(node.name, command, environment(folder, f"nodes/{node.name}/flower"))
