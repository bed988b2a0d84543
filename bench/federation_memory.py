"""Peak memory of a federation on Flower with a large model: server, client app, resident node.

    python bench/federation_memory.py [--mb 250] [--members 3] [--method fedavg]

The coordinator runs in this process over Flower's own message types and functions; in place of the
SuperLink, objects are files. Each member is a resident node, a process of its own, and each message
is carried to it by a process of the client app, as a SuperNode starts it. What is not measured is
HTTP, which adds some chunks of 5 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.task_identity import TaskIdentity

MB = 1 << 20


def memory(pid: int | str = "self") -> dict[str, float]:
    """Present and peak resident memory of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(line.split(":", 1) for line in text.splitlines())
    return {key: int(found[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}


class Store:
    """Flower's objects as files, in place of a SuperLink."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pushed = 0
        for name in ("_run_id", "_node_id", "_task_id"):
            setattr(TaskIdentity, name, 1)

    def push(self, message: Message) -> str:
        with no_object_id_recompute():
            number = message.metadata.__dict__["_message_id"] = message.object_id
            objects = get_all_nested_objects(message)
            ids = [one.object_id for one in iterate_object_tree(get_object_tree(message))]
            (self.folder / f"{number}.json").write_text(json.dumps(ids))
            wanted = {one for one in objects if not (self.folder / one).exists()}
            push_objects(objects, self._write, object_ids_to_push=wanted)
        return str(number)

    def _write(self, number: str, content: bytes) -> None:
        (self.folder / number).write_bytes(content)
        self.pushed += len(content)

    def pull(self, number: str) -> Message:
        ids = json.loads((self.folder / f"{number}.json").read_text())
        contents = pull_objects(ids, lambda one: (self.folder / one).read_bytes())
        message: Any = inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        return message


class DiskGrid:
    """A grid whose client apps are processes, as a SuperNode starts them."""

    def __init__(self, store: Store, sockets: list[Path]) -> None:
        self.store, self.sockets = store, sockets
        self.run = SimpleNamespace(run_id=1)
        self.to: dict[str, int] = {}
        self.client_mb = 0.0

    def get_node_ids(self) -> Iterable[int]:
        return list(range(len(self.sockets)))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found = [self.store.push(message) for message in messages]
        self.to |= {n: m.metadata.dst_node_id for n, m in zip(found, messages, strict=True)}
        return found

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
        return [self._answer(number) for number in ids]

    def _answer(self, number: str) -> Message:
        socket = self.sockets[self.to[number]]
        words = [sys.executable, __file__, "client", str(self.store.folder), number, str(socket)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        self.client_mb = max(self.client_mb, answer["VmHWM"])
        return self.store.pull(answer["number"])


def client(folder: Path, number: str, socket: str) -> None:
    """The process of a client app: one message."""
    from kedge.flower.apps import answer

    store = Store(folder)
    message = store.pull(number)
    message.metadata.__dict__["_src_node_id"] = 1
    print(
        json.dumps({"number": store.push(answer(message, {"socket": socket}, folder))} | memory())
    )


class Sampler(threading.Thread):
    """Watches the memory of this process, and remembers where it was at its peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.where, self.main = 0.0, "", threading.main_thread().ident

    def run(self) -> None:
        while True:
            now = memory()["VmRSS"]
            if now > self.peak + 5:
                self.peak = now
                frame = sys._current_frames()[self.main or 0]
                calls = traceback.extract_stack(frame)
                self.where = " > ".join(
                    f"{Path(c.filename).stem}.{c.name}:{c.lineno}" for c in calls
                )
            time.sleep(0.002)


def measure(args: argparse.Namespace, folder: Path) -> None:
    from kedge.federation.coordinator.coordinator import Coordinator
    from kedge.federation.coordinator.rules import Rules
    from kedge.flower.grid import GridTransport
    from kedge.local.federation import shares_of
    from kedge.settings import Config

    width = round((args.mb * 1e6 / 4) ** 0.5)
    shares, scaling = shares_of("digits", "iid", args.members, "auto", 0, folder / "data")
    sockets, nodes = [folder / f"{s.name}.sock" for s in shares], []
    try:
        for share, socket in zip(shares, sockets, strict=True):
            words = ["--name", share.name, "--data", share.data, "--socket", str(socket)]
            words += ["--folder", str(folder / share.name), "--threads", "1"]
            command = [sys.executable, "-m", "kedge", "flower", "node", *words]
            nodes.append(subprocess.Popen(command))
        while not all(socket.exists() for socket in sockets):
            time.sleep(0.1)
        (folder / "store").mkdir()
        store = Store(folder / "store")
        grid: Any = DiskGrid(store, sockets)
        config = Config(
            method=args.method, data="digits", clients=args.members, rounds=args.rounds,
            seeds=(0,), model=f"mlp(hidden=[{width}, {width}])", steps=1, batch=8, lr=0.01,
        )  # fmt: skip
        at_rest = [memory(node.pid)["VmRSS"] for node in nodes]
        before, sampler, start = memory()["VmRSS"], Sampler(), time.perf_counter()
        sampler.start()
        run = Coordinator(
            config, GridTransport(grid), folder / "run", rules=Rules(), scaling=scaling
        )
        run.run()
        weights = run.session.server.weights
        size = sum(w.numel() * w.element_size() for w in weights.params.values()) / MB
        at_nodes = max(memory(n.pid)["VmHWM"] - b for n, b in zip(nodes, at_rest, strict=True))
        at_server = memory()["VmHWM"] - before
        seconds = time.perf_counter() - start
    finally:
        for node in nodes:
            node.send_signal(signal.SIGTERM)
            node.wait()
    print(sampler.where)
    print(f"model {size:.0f} MB, {args.members} members, {args.rounds} rounds, {args.method}")
    print(
        f"server:        {at_server:.0f} MB more than at rest, {at_server / size:.1f} x the model"
    )
    print(f"resident node: {at_nodes:.0f} MB more than at rest, {at_nodes / size:.1f} x the model")
    print(f"client app:    {grid.client_mb:.0f} MB in all, {grid.client_mb / size:.1f} x the model")
    print(f"pushed by the server {store.pushed / MB / size:.1f} x the model, {seconds:.0f} s")


def main() -> None:
    if sys.argv[1:2] == ["client"]:
        client(Path(sys.argv[2]), *sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=250.0)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        measure(args, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
