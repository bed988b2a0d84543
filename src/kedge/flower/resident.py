"""The program of a resident node, see :mod:`kedge.flower.node`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kedge.engines.device import resolve_device
from kedge.errors import KedgeError
from kedge.flower.member import Member
from kedge.flower.node import Node
from kedge.flower.policy import Policy


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
