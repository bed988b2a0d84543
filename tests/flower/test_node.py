"""The resident node and the forwarder: a Unix socket, real processes, no Flower."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import kedge
from kedge.errors import KedgeError
from kedge.federation.large_messages import Message
from kedge.flower.agent import Node, peer, run_node
from kedge.flower.relay import NodeDown, forward, read, write

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX") or sys.platform == "win32", reason="needs Unix sockets"
)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


class Serving:
    """A node in a thread that answers with its request in reverse."""

    @staticmethod
    def reverse(request: Message) -> bytes:
        return (request if isinstance(request, bytes) else _content(request))[::-1]

    def __init__(self, folder: Path, **options: object) -> None:
        self.path, self.said = folder / "socket", list[str]()
        self.node = Node(
            self.reverse, self.path, folder / "state", self.said.append,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.thread = threading.Thread(target=self.node.serve)
        self.thread.start()

    def end(self) -> None:
        self.node.stop()
        self.thread.join()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    found = Serving(tmp_path)
    yield found
    found.end()


def ask(path: Path, message: bytes, patience_s: float = 5.0) -> bytes:
    return b"".join(forward(str(path), [message], time.time() + 60, patience_s))


def test_messages_of_all_sizes(serving: Serving) -> None:
    for message in (b"", b"abc", bytes(range(256)) * 20_000):
        assert ask(serving.path, message) == message[::-1]


def test_the_socket_is_for_its_user_alone(serving: Serving) -> None:
    assert stat.S_IMODE(serving.path.stat().st_mode) == 0o600
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer(one) in (os.getuid(), None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")
def test_other_users_must_be_named(tmp_path: Path) -> None:
    """Who connects is known from the system, not from the message."""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[: len(tmp_path.parents) - 2]:
        folder.chmod(folder.stat().st_mode | 0o011)
    serving = Serving(tmp_path, users=[65533])
    assert stat.S_IMODE(serving.path.stat().st_mode) == 0o666
    try:
        assert ask_as(65533, serving.path) == b"cba"
        assert ask_as(65534, serving.path) == b""
    finally:
        serving.end()
    assert "refused a connection of user 65534" in " ".join(serving.said)


def ask_as(user: int, path: Path) -> bytes:
    """What another user gets for ``abc``; in a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(str(path))
                write(connection, [b"abc"])
                os.write(writing, b"".join(read(connection)))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


def test_what_is_too_long_or_breaks_off_is_dropped(tmp_path: Path) -> None:
    serving = Serving(tmp_path, max_bytes=1000)
    try:
        for content in ((2000).to_bytes(8, "little"), (900).to_bytes(8, "little") + b"x", b"\1"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(serving.path))
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                with pytest.raises(ConnectionError):
                    list(read(connection))
        assert ask(serving.path, b"still here") == b"ereh llits"
    finally:
        serving.end()
    assert sum("a connection broke" in line for line in serving.said) == 3


def test_a_length_that_is_a_lie_takes_no_memory() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        write(one, [b"ab", b"c"])
        assert list(read(other)) == [b"abc"]
        write(one, [b"abc"])
        assert list(read(other, piece=2)) == [b"ab", b"c"]
        one.sendall((1 << 32).to_bytes(8, "little") + b"x")
        one.close()
        with pytest.raises(ConnectionError):
            list(read(other))


def test_one_node_per_folder_and_sockets_of_the_dead_are_replaced(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    with pytest.raises(KedgeError, match="another node runs there"):
        Node(bytes, tmp_path / "other", tmp_path / "state", print)
    serving.end()
    assert not serving.path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "socket"))
    again = Serving(tmp_path)
    assert ask(again.path, b"ab") == b"ba"
    again.end()


def test_paths_that_cannot_be_sockets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("data")
    with pytest.raises(KedgeError, match="is a file"):
        Node(bytes, tmp_path / "file", tmp_path / "state", print)
    assert (tmp_path / "file").read_text() == "data"
    with pytest.raises(KedgeError, match="100 bytes at most"):
        Node(bytes, tmp_path / ("x" * 100), tmp_path / "state", print)


def test_without_a_node_the_forwarder_says_so(tmp_path: Path) -> None:
    with pytest.raises(NodeDown) as caught:
        ask(tmp_path / "secret-name", b"abc", patience_s=0.1)
    assert "secret" not in str(caught.value)


def test_the_client_app_imports_neither_torch_nor_the_core() -> None:
    code = (
        "import sys, kedge.flower.apps, kedge.flower.relay; "
        "print([m for m in sys.modules if m.startswith(('torch', 'kedge.core', 'numpy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def start(folder: Path) -> subprocess.Popen[bytes]:
    code = (
        "from kedge.flower.agent import run_node; from pathlib import Path; "
        "run_node('north', 'data.npz', Path('state'), Path('socket'))"
    )
    command, source = [sys.executable, "-c", code], str(Path(kedge.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)


def test_a_node_with_wrong_data_makes_no_socket(tmp_path: Path) -> None:
    """A socket says that its member is there."""
    with pytest.raises(KedgeError, match="there is no such file"):
        run_node("north", str(tmp_path / "no.csv"), tmp_path / "state", tmp_path / "socket")
    assert not (tmp_path / "socket").exists()


def test_a_node_process_is_killed_restarted_and_ended(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    x, y = rows.normal(size=(40, 5)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y)
    path = os.path.relpath(tmp_path / "socket")
    nodes = []
    try:
        nodes.append(start(tmp_path))
        reply = ask(Path(path), b"no message of kedge", patience_s=60)
        assert b"BAD_REQUEST" in reply
        nodes[0].kill()
        nodes[0].wait()
        assert (tmp_path / "socket").exists()
        nodes.append(start(tmp_path))
        assert ask(Path(path), b"no message of kedge", patience_s=60) == reply
        nodes[1].send_signal(signal.SIGTERM)
        assert nodes[1].wait(timeout=30) == 0
        assert not (tmp_path / "socket").exists()
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    log = (tmp_path / "state" / "log.txt").read_text()
    assert log.count("north listens at socket") == 2
    assert log.count("north has ended") == 1
