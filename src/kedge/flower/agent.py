"""The resident node: a process that owns a member's data, state and release policy.

The app that a SuperNode runs comes from whoever can reach the SuperLink, so it must not be able to
read data or to bypass the policy. With a resident node it does not: this process has a user of its
own, and the app only carries bytes to its Unix socket. It also saves the start of torch and the
reading of the data in every message.

The socket is for the node's own user, and for users that are named when it starts; the system tells
who is at the other end, whatever that process says. One request is answered at a time, others wait.
All state is on disk before a reply leaves, so the process can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType

import torch

from kedge.engines.device import resolve_device
from kedge.errors import KedgeError
from kedge.federation.large_messages import Message, spooled
from kedge.federation.member.member import Member
from kedge.federation.member.policy import Policy
from kedge.files import NotPlain, make_folder, open_append
from kedge.flower.relay import CHUNK, MAX_BYTES, read, write

try:
    import fcntl
except ImportError:  # Windows, which has no such sockets either
    fcntl = None  # type: ignore[assignment]

STOP_S = 10.0  # for a request that is being answered when the node stops
IDLE_S = 600.0  # until a connection on which nothing happens is closed


MAX_PATH = 100  # bytes of the path of a socket; systems allow 104 to 108


class Node:
    """Serves one member at a Unix socket.

    Args:
        handle: what answers a request, such as ``Member.handle``.
        path: path of the socket.
        folder: the member's folder; one node may use it at a time. Large requests wait there.
        log: told of connections that were refused or broke.
        users: ids of users that may connect, besides the node's own.
        max_bytes: size of a request, at most.

    Raises:
        KedgeError: another node runs, or there can be no socket.

    Example::

        Node(member.handle, Path("/run/kedge/north"), folder, member.folder.log).serve()
    """

    def __init__(
        self,
        handle: Callable[[Message], bytes],
        path: Path,
        folder: Path,
        log: Callable[[str], None],
        users: Collection[int] = (),
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.handle, self.path, self.log, self.max_bytes = handle, path, log, max_bytes
        self.users = {os.getuid(), *users}
        self._folder = folder
        self._turn, self._stopping = threading.Lock(), threading.Event()
        self._lock = _locked(folder)
        try:
            self._socket = self._listen()
        except BaseException:
            os.close(self._lock)
            raise

    def _listen(self) -> socket.socket:
        if len(os.fsencode(self.path)) > MAX_PATH:
            raise KedgeError(f"{self.path}: a socket has a path of {MAX_PATH} bytes at most")
        others = self.users - {os.getuid()}
        if others and not hasattr(socket, "SO_PEERCRED"):
            raise KedgeError("this system does not tell who connects; use the node's own user")
        make_folder(self.path.parent, private=not others)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.stat().st_mode):
                raise KedgeError(f"{self.path} is a file; choose another path for the socket")
            self.path.unlink()  # of a node that was killed: the folder's lock was free
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(str(self.path))
        except OSError as error:
            listening.close()
            raise KedgeError(f"{self.path}: there can be no socket ({error})") from None
        finally:
            os.umask(before)
        if others:
            self.path.chmod(0o666)  # who connects is checked below
        listening.listen(16)
        return listening

    # -- serving ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests until :meth:`stop`."""
        self._socket.settimeout(0.5)
        while not self._stopping.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._stopping.is_set():
                    break
                raise
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
        self._close()

    def stop(self, *_: int | FrameType | None) -> None:
        """End :meth:`serve`; also the handler of signals."""
        self._stopping.set()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(IDLE_S)
            user = peer(connection)
            if user is not None and user not in self.users:
                self.log(f"refused a connection of user {user}, who is not among {self.users}")
                return
            try:
                pieces = read(connection, self.max_bytes, CHUNK)
                request = spooled(pieces, self._folder)
                with self._turn:
                    if self._stopping.is_set():
                        return
                    reply = self.handle(request)
                del request
                write(connection, [reply])
            except OSError as error:
                self.log(f"a connection broke: {error}")

    def _close(self) -> None:
        """Let the present request end, then remove the socket."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if self._turn.acquire(timeout=STOP_S):
            self._turn.release()
        os.close(self._lock)

    def serve_until_signal(self) -> None:
        """Answer requests until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        self.serve()


def peer(connection: socket.socket) -> int | None:
    """The user at the other end of a Unix socket, as the system knows it; None if it does not."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None  # then only the node's own user can open the socket
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", found)[1])


def _locked(folder: Path) -> int:
    """Hold the folder as long as this process lives."""
    if fcntl is None:
        raise KedgeError("resident nodes need Unix sockets; this system has none")
    make_folder(folder, private=True)
    try:
        file = open_append(folder / "node.lock", private=True)
    except NotPlain as error:
        raise KedgeError(f"{folder / 'node.lock'}: {error.strerror}; delete it") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise KedgeError(f"{folder} is in use: another node runs there") from None
    return file


def run_node(
    name: str,
    data: str,
    folder: Path,
    socket: Path,
    policy: str = "",
    allow: Sequence[str] = (),
    threads: int = 0,
    device: str = "cpu",
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve a member until SIGTERM.

    Args:
        name: name of the member.
        data: what :func:`kedge.data.datasets.load` reads.
        folder: its state and its log.
        socket: path of the Unix socket.
        policy: path of its release policy; everything may leave without one.
        allow: names or numbers of users that may connect.
        threads: threads of torch; 0: torch's own choice.
        device: where to compute.
        report: told when it is ready.

    Raises:
        KedgeError: the data or the policy cannot be read, or another node runs there.
    """
    if threads:
        torch.set_num_threads(threads)
    users = [_user(word) for word in allow]
    release = Policy.load(policy) if policy else None
    member = Member(name, data, folder, release, device=resolve_device(device))
    member.dataset  # noqa: B018  so that wrong data are known now: a socket is a sign of life
    node = Node(member.handle, socket, folder, member.folder.log, users)
    member.folder.log(f"{name} listens at {socket}, process {os.getpid()}")
    report(f"{name} listens at {socket}; its log: {folder / 'log.txt'}")
    node.serve_until_signal()
    member.folder.log(f"{name} has ended")


def _user(word: str) -> int:
    """The id of a user, by name or number."""
    import pwd

    try:
        return int(word) if word.isdecimal() else pwd.getpwnam(word).pw_uid
    except KeyError:
        raise KedgeError(f"--allow {word}: there is no such user on this machine") from None
