"""A whole federation on this machine as real processes: SuperLink, SuperNodes, resident nodes.

::

    FOLDER/federation.json        what was asked for: members, ports, data
    FOLDER/programs.json          what the supervisor runs, see kedge.local.processes
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

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kedge.core.task import tasks
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.datasets.silos import find_silos
from kedge.errors import DataError, KedgeError
from kedge.federation.coordinator.rules import Scaling
from kedge.federation.member.own_data import read_data
from kedge.federation.member.policy import Policy
from kedge.files import make_folder, move_file, new_file, read_json, write_file
from kedge.flower.agent import MAX_PATH
from kedge.flower.apps import flower_words
from kedge.flower.project import new_folder
from kedge.grammar import parse_call
from kedge.history.lock import Lock
from kedge.local.processes import (
    ProcessSpec,
    free_ports,
    is_open,
    is_running,
    read_processes,
    read_token,
    start_supervisor,
    stop,
    write_programs,
)
from kedge.runs.build import partition_of
from kedge.schema import read_fields

FILE, FORMAT = "federation.json", 1
CONNECTION, SUPERLINK = "kedge", "superlink"
HERE = "kedge-federation"  # the folder of a federation, unless another one is named
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
class FederationSpec:
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
    scaling: tuple[tuple[float, ...], ...] = ()
    own: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        write_file(folder / FILE, json.dumps(values, indent=1).encode(), private=True)

    @classmethod
    def load(cls, folder: Path) -> FederationSpec:
        """Read a federation.

        Raises:
            KedgeError: there is none in the folder.
        """
        try:
            values = read_json(folder / FILE)
            if values.pop("format") == FORMAT:
                return read_fields(cls, values, complete=True)
        except FileNotFoundError:
            raise KedgeError(
                f"there is no federation in {folder}; start one with: kedge flower up --nodes 4"
                + option(folder)
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, KedgeError) as error:
            raise KedgeError(f"{folder / FILE} cannot be read: {error!r}") from None
        raise KedgeError(f"{folder / FILE} is of another release of kedge")


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


def programs(folder: Path, spec: FederationSpec) -> list[ProcessSpec]:
    """What a supervisor runs for a federation, in this order."""
    keys, base = folder / "keys", environment(folder, threads=spec.threads)
    command = [
        flower("flower-superlink"), "--host", "127.0.0.1", "--port", str(spec.port),
        "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem"),
        "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
        "--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    found = [ProcessSpec(SUPERLINK, command, base, port=spec.port)]
    for node in spec.nodes:
        if not (keys / f"{node.name}.registered").exists():
            found.append(_registration(folder, node, base))
    if spec.resident:
        found += [_resident(folder, spec, node, base) for node in spec.nodes]
    return found + [_supernode(folder, spec, node) for node in spec.nodes]


def _registration(folder: Path, node: NodeSpec, base: dict[str, str]) -> ProcessSpec:
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
    register = [flower("flwr"), "supernode", "register", f"{key}.pub", CONNECTION]
    command = [sys.executable, "-c", code, f"{key}.registered", *register]
    return ProcessSpec(f"register-{node.name}", command, base, once=True)


def socket_of(folder: Path, name: str) -> Path:
    return folder / "nodes" / name / "socket"


def _resident(
    folder: Path, spec: FederationSpec, node: NodeSpec, base: dict[str, str]
) -> ProcessSpec:
    home = folder / "nodes" / node.name
    command = [
        sys.executable, "-m", "kedge", "flower", "node", "--name", node.name, "--data",
        node.data, "--folder", str(home / "state"), "--socket", str(socket_of(folder, node.name)),
    ]  # fmt: skip
    command += ["--policy", node.policy] if node.policy else []
    command += [word for file in spec.own for word in ("--load", file)]
    return ProcessSpec(f"member-{node.name}", command, base)


def _supernode(folder: Path, spec: FederationSpec, node: NodeSpec) -> ProcessSpec:
    home = folder / "nodes" / node.name
    config = {"member": node.name, "data": node.data, "folder": str(home / "state")}
    config |= {"policy": node.policy} if node.policy else {}
    if spec.resident:
        config = {"socket": str(socket_of(folder, node.name))}
    command = [
        flower("flower-supernode"), "--superlink", f"127.0.0.1:{spec.port}",
        "--root-certificates", str(folder / "keys" / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "keys" / node.name),
        "--host", "127.0.0.1", "--port", str(node.port),
        "--node-config", flower_words(config),
    ]  # fmt: skip
    return ProcessSpec(node.name, command, environment(folder, f"nodes/{node.name}/flower"))


READY_S = 180.0
MAX_STARTS = 8  # of one program while a federation gets ready; the pauses are a minute together
MIN_FREE_BYTES = 1 << 20  # of the disk of a federation that starts
NODE = re.compile(r"\bnode (\d+)\b")
ONLINE = b"SuperNode ID:"  # in the log of a SuperNode that was let in


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
    own: Sequence[str] = (),
) -> FederationSpec:
    """Write the files of a federation; nothing is started. Nothing stays of a failed attempt.

    Raises:
        KedgeError: the folder is in use, or the data cannot be divided so.
    """
    from kedge.local.keys import make_authority, make_node_key, make_server

    if policy:
        Policy.load(policy)  # a wrong one is told now, not by every member
        policy = str(Path(policy).resolve())
    with new_folder(folder, ": --at FOLDER", private=True):
        shares, scaling = shares_of(data, partition, nodes, split, seed, folder / "nodes")
        _check_names(folder, [share.name for share in shares], resident)
        make_authority(folder / "keys")
        make_server(folder / "keys")
        port, *ports = free_ports(len(shares) + 1)
        for share in shares:
            make_folder(folder / "nodes" / share.name, private=True)
            make_node_key(folder / "keys" / share.name)
        pairs = zip(shares, ports, strict=True)
        spec = FederationSpec(
            secrets.token_hex(8), port,
            tuple(NodeSpec(share.name, share.data, its_port, policy) for share, its_port in pairs),
            resident, threads, data, partition, split, seed, scaling or (),
            tuple(str(Path(file).resolve()) for file in own),
        )  # fmt: skip
        _write_connection(folder, port)
        spec.save(folder)
    return spec


def _check_names(folder: Path, names: Sequence[str], resident: bool) -> None:
    """Names of members become names of programs, files and sockets."""
    taken = {SUPERLINK, "supervisor"}
    for name in names:
        own = {name, f"member-{name}", f"register-{name}"}
        if own & taken:
            raise KedgeError(
                f"a member cannot be called {name!r}: this is the name of a process; rename it"
            )
        taken |= own
    longest = max((os.fsencode(socket_of(folder, name)) for name in names), key=len)
    if resident and len(longest) > MAX_PATH:
        raise KedgeError(
            f"{folder} is too long for the paths of sockets, by {len(longest) - MAX_PATH} "
            "characters; choose a shorter one: --at FOLDER"
        )


def _write_connection(folder: Path, port: int) -> None:
    home = folder / "flower"
    make_folder(home, inside=folder)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{folder / "keys" / "ca.crt"}"\n'
    )
    write_file(home / "config.toml", text.encode(), inside=folder)


# -- shares of a dataset ------------------------------------------------------------------------
#
# Each member gets a file of its own with the training rows that a simulated client has, in the same
# order, and a share of the test set: its own held-out rows, or every n-th row of a common test set.
# So tests of all members together are the test of a simulation, and training is equal bit for bit
# if the scaling is that of the dataset. A folder of silos is not copied: each member reads its own.


@dataclass(frozen=True)
class DataShare:
    """The data of one member: its name, and what ``kedge.data.datasets.load`` reads."""

    name: str
    data: str


def shares_of(
    data: str, partition: str, nodes: int, split: str, seed: int, folder: Path
) -> tuple[list[DataShare], Scaling | None]:
    """Divide a dataset among members.

    Args:
        data: name or path of the dataset, with options.
        partition: which member gets which samples; ``auto`` keeps silos as they are.
        nodes: number of members; 0: one per silo.
        split: where test data come from.
        seed: of the partition.
        folder: where to write a file per member.

    Returns:
        The shares in the order of the members, and the scaling of the dataset; None for silos,
        whose scaling is agreed.

    Raises:
        KedgeError: the data cannot be divided so.
    """
    own, why = list[DataShare](), ""
    if partition in ("auto", "silos"):
        try:
            own = _silos(data)
        except DataError as error:  # a folder of classes, for instance
            if partition == "silos":
                raise
            why = f"{error}. To divide it as one dataset: "
    if own:
        if nodes and nodes != len(own):
            raise KedgeError(f"--nodes {nodes}: {data} has {len(own)} silos; leave it out")
        for share in own:
            read_data(share.data)  # what cannot be read is told now, not by its member
        return own, None
    if why and nodes < 1:
        raise KedgeError(f"{why}give the number of members, such as --nodes 4")
    dataset = load(data)
    if nodes < 1:
        raise KedgeError("how many members? give their number, such as --nodes 4")
    federation = federate(
        dataset, partition_of(partition, dataset), clients=nodes, split=split, seed=seed
    )
    x, y = federation.x.numpy(), federation.y.numpy()
    width, shares = len(str(nodes - 1)), []
    for k in range(nodes):
        start = federation.offsets[k]
        rows = federation.rows[start : start + federation.sizes[k]].numpy()
        arrays = {"x_train": x[rows], "y_train": y[rows]} | _test(federation, k, nodes)
        name = f"client-{k:0{width}d}"
        path = folder / name / "data.npz"
        _write_share(path, arrays, dataset)
        shares.append(DataShare(name, f"{path}(task={dataset.task}, kind={dataset.kind})"))
        _compare(shares[-1].data, arrays)
    return shares, (_numbers(dataset.mean), _numbers(dataset.std))


def _silos(data: str) -> list[DataShare]:
    """The silos of a folder, each with the options of the whole; empty if it is no folder.

    Raises:
        DataError: the folder has no silos.
    """
    ends = [i for i, sign in enumerate(data) if sign == "("]  # a path may have brackets, too
    end = next((i for i in (len(data), *ends) if Path(data[:i]).expanduser().is_dir()), 0)
    if not data[:end].strip():
        return []
    _, paths, names = find_silos(Path(data[:end]).expanduser())
    return [
        DataShare(name, f"{own.resolve()}{data[end:]}")
        for name, own in sorted(zip(names, paths, strict=True))
    ]


def _test(federation: Any, k: int, nodes: int) -> dict[str, Any]:
    if federation.held_out:
        rows = federation.held_out[k].numpy()
        x, y = federation.x.numpy()[rows], federation.y.numpy()[rows]
    elif federation.test_data is not None:
        x, y = (part.numpy()[k::nodes] for part in federation.test_data)
    else:
        return {}
    return {"x_test": x, "y_test": y} if len(x) else {}


def _write_share(path: Path, arrays: dict[str, Any], dataset: Dataset) -> None:
    names = dataset.classes
    if names is None and tasks[dataset.task].one_class:
        names = tuple(map(str, range(dataset.outputs)))  # a member may lack the last ones
    make_folder(path.parent, private=True)
    if names is not None:
        arrays = arrays | {"classes": np.array(names)}
    with new_file(path) as file:
        np.savez(file, **arrays)


def _compare(data: str, arrays: dict[str, Any]) -> None:
    """Read a share back: what a member trains on must be what was meant for it."""
    found = read_data(data)
    for name, array in arrays.items():
        other = getattr(found, name)
        if other is None or other.dtype != array.dtype or not np.array_equal(other, array):
            raise DataError(f"{parse_call(data).name}: {name} does not come back as it was written")


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in np.ravel(values))


# -- up and down --------------------------------------------------------------------------------


def up(
    folder: Path, spec: FederationSpec, owner: int = 0, ready_s: float = READY_S
) -> FederationSpec:
    """Start a federation, and wait until all its nodes are connected.

    Args:
        folder: its folder.
        spec: what :func:`create` returned, or :meth:`Spec.load`.
        owner: a process with whose end the federation ends, too; 0: none.
        ready_s: how long to wait.

    Returns:
        The federation, at other ports if its own are taken.

    Raises:
        KedgeError: it runs already, is being started, or does not get ready.
    """
    with _starting(folder):
        check_down(folder)
        stop(folder, spec.token)  # what a supervisor that was killed has left behind
        for node in spec.nodes:
            socket_of(folder, node.name).unlink(missing_ok=True)  # of a member that was killed
        spec = _with_free_ports(folder, spec)
        for log in (folder / "logs").glob("*.txt"):
            move_file(log, log.with_suffix(".old"), inside=folder)
        write_programs(folder, spec.token, programs(folder, spec))
        try:
            _wait_until_ready(folder, spec, start_supervisor(folder, spec.token, owner), ready_s)
        except BaseException:  # Ctrl-C, too: nothing runs that nobody knows of
            stop(folder, spec.token)
            raise
    return spec


@contextlib.contextmanager
def _starting(folder: Path) -> Iterator[None]:
    """Only one command at a time starts a federation: the second would end what the first has."""
    lock = Lock()
    lock.take(folder, "another command starts the federation there. Wait until it has ended")
    try:
        yield
    finally:
        lock.give_back()


def check_down(folder: Path) -> None:
    """Raise a KedgeError if a federation runs already."""
    if is_up(folder):
        raise KedgeError(
            f"the federation in {folder} runs already; see: kedge flower status{option(folder)}"
        )


def _wait_until_ready(folder: Path, spec: FederationSpec, supervisor: int, ready_s: float) -> None:
    end = time.time() + ready_s
    while time.time() < end:
        if all(is_ready(folder, spec, node) for node in spec.nodes):
            return
        if not is_running(supervisor):
            log = folder / "supervisor.txt"
            raise KedgeError(f"the supervisor has ended: {_last_line(log)} See {log}")
        if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
            again = f"free some space, then: kedge flower up{option(folder)}"
            raise KedgeError(f"the disk of {folder} is full; {again}")
        _check_starts(folder, spec)
        time.sleep(0.25)
    missing = [node.name for node in spec.nodes if not is_ready(folder, spec, node)]
    raise KedgeError(
        f"the federation did not get ready within {ready_s:g} s; missing: {', '.join(missing)}. "
        f"See the logs in {folder / 'logs'}"
    )


def _with_free_ports(folder: Path, spec: FederationSpec) -> FederationSpec:
    """The same federation at other ports, if others have taken its own meanwhile."""
    if not any(is_open(port) for port in (spec.port, *(node.port for node in spec.nodes))):
        return spec
    port, *ports = free_ports(len(spec.nodes) + 1)
    nodes = tuple(replace(node, port=p) for node, p in zip(spec.nodes, ports, strict=True))
    spec = replace(spec, port=port, nodes=nodes)
    _write_connection(folder, port)
    spec.save(folder)
    return spec


def _check_starts(folder: Path, spec: FederationSpec) -> None:
    """Give up if a program ends as often as it is started."""
    for name, process in read_processes(folder)[1].items():
        if process.starts > (MAX_STARTS if name in (n.name for n in spec.nodes) else 3):
            log = folder / "logs" / f"{name}.txt"
            raise KedgeError(f"{name} does not start: {_last_line(log)} See {log}")


def _last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def is_ready(folder: Path, spec: FederationSpec, node: NodeSpec) -> bool:
    """Whether a node is connected, and its member answers."""
    if spec.resident and not socket_of(folder, node.name).exists():
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


def with_names(folder: Path, text: str) -> str:
    """A text with the names of members in place of Flower's numbers of their nodes."""
    if "node " not in text:
        return text
    names = {node_id(folder, node.name): node.name for node in FederationSpec.load(folder).nodes}
    return NODE.sub(lambda found: names.get(found[1], found[0]), text)


def down(folder: Path) -> None:
    """End a federation and all its processes; its files stay."""
    stop(folder, read_token(folder) or FederationSpec.load(folder).token)


def is_up(folder: Path) -> bool:
    """Whether the processes of a federation are supervised."""
    return bool(read_processes(folder)[0])


def status(folder: Path) -> list[dict[str, Any]]:
    """One row per process: name, id, since when, how often it was started, its last exit code."""
    spec, (supervisor, processes) = FederationSpec.load(folder), read_processes(folder)
    rows: list[dict[str, Any]] = []
    for name, process in processes.items():
        if name.startswith("register-"):
            continue
        running = bool(supervisor) and process.running and is_running(process.pid)
        row = {"name": name} | dataclasses.asdict(process)
        row |= {"running": running, "pid": process.pid if running else 0}
        if name in {node.name for node in spec.nodes}:
            row["node"] = node_id(folder, name)
        rows.append(row)
    return rows
