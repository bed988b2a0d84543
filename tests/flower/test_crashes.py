"""Killed at any file operation, a coordinator resumes and a member restarts: nothing is lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.core import tree
from kedge.core.bound import Server
from kedge.federation.member.policy import OPEN
from kedge.federation.messages import Direct
from kedge.history.lock import Lock
from tests.flower.federations import NAMES, Members, coordinator, datasets, settings


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class HalfWritten:
    """A file that is killed in the middle of its first write."""

    def __init__(self, file: Any, operation: Any) -> None:
        self.file, self.operation, self.first = file, operation, True

    def write(self, data: Any) -> int:
        if self.first:
            self.first = False
            try:
                self.operation()
            except Killed:
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                raise
        return self.file.write(data)

    def __enter__(self) -> HalfWritten:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def killed_at(number: int, folder: Path) -> Iterator[list[str]]:
    """Raise Killed at the n-th operation that changes a file in a folder; yields what happened."""
    happened: list[str] = []
    real = {name: getattr(os, name) for name in ("open", "fdopen", "replace", "unlink", "mkdir")}
    opened: dict[int, Path] = {}

    def operation(what: str, path: Path) -> None:
        happened.append(f"{what} {path.name}")
        if len(happened) == number:
            raise Killed

    def inside(name: Any, place: int | None) -> Path | None:
        above = Path() if place is None else Path(os.readlink(f"/proc/self/fd/{place}"))
        path = above / os.fspath(name)
        is_log = path.name == "log.txt"  # nobody reads it back
        return path if path.is_relative_to(folder) and not is_log else None

    def opening(name: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        path = inside(name, dir_fd) if flags & os.O_WRONLY else None
        if path is not None:
            operation("open", path)
        handle = real["open"](name, flags, mode, dir_fd=dir_fd)
        if path is not None:
            opened[handle] = path
        return handle

    def reading(handle: int, *args: Any, **kwargs: Any) -> Any:
        file, path = real["fdopen"](handle, *args, **kwargs), opened.pop(handle, None)
        return file if path is None else HalfWritten(file, lambda: operation("write", path))

    def acting(what: str) -> Any:
        def act(name: Any, *args: Any, **kwargs: Any) -> Any:
            path = inside(name, kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
            if path is not None:
                operation(what, path)
            return real[what](name, *args, **kwargs)

        return act

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lock, "take", lambda *_: None)  # the system frees that of a killed process
        patch.setattr(os, "open", opening)
        patch.setattr(os, "fdopen", reading)
        for name in ("replace", "unlink", "mkdir"):
            patch.setattr(os, name, acting(name))
        yield happened


CONFIG = settings("scaffold", rounds=2, model="linear", steps=1, clients=3, per_round=2)


#: As many answers as an undisturbed run needs: a crash must not spend one.
EXACT = replace(OPEN, max_updates=2, max_tests=2)


def few(folder: Path) -> Members:
    return Members(folder, datasets(sizes=(4, 5, 6)), policies=dict.fromkeys(NAMES, EXACT))


def undisturbed(tmp_path: Path) -> Server:
    members = few(tmp_path / "undisturbed")
    run = coordinator(members, CONFIG, tmp_path / "undisturbed" / "run")
    run.run()
    return run.session.server


@pytest.mark.long
def test_a_coordinator_that_is_killed_at_any_operation_resumes(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    for number in itertools.count(1):
        members, out = few(tmp_path / str(number)), tmp_path / str(number) / "run"
        with killed_at(number, out) as happened:
            try:
                coordinator(members, CONFIG, out).run()
                break
            except Killed:
                pass
        again = coordinator(members, CONFIG, out, resume=True)
        result = again.run()
        assert tree.equal(again.session.server, expected), happened[-1]
        assert [r["round"] for r in result.records[0]] == [1, 2], happened[-1]
        assert all(r["tested"] == 3 for r in result.records[0]), happened[-1]
        assert (out / "result.json").exists()
    assert number > 40  # it was killed that often


@pytest.mark.long
def test_a_member_that_is_killed_at_any_operation_restarts(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    for number in itertools.count(1):
        server, count = run_with_a_kill(tmp_path / str(number), number)
        assert tree.equal(server, expected)
        if count < number:
            break
    assert number > 15


def run_with_a_kill(folder: Path, number: int) -> tuple[Server, int]:
    """A run in which south dies at its n-th operation; the server, and how many it had."""
    members, count = few(folder), 0

    def guarded(message: bytes) -> bytes:
        nonlocal count
        with killed_at(number - count, folder / "south") as happened:
            try:
                return members.members["south"].handle(message)
            except Killed:
                members.handles["node of south"] = members.start("south").handle
                raise OSError("its process has died") from None
            finally:
                count += len(happened)

    members.handles["node of south"] = guarded
    run = coordinator(members, CONFIG, folder / "run", transport=Surviving(members))
    run.run()
    assert all(r["tested"] == 3 for r in run.recorder.records)
    return run.session.server, count


class Surviving(Direct):
    """Sends a request once more to a process that has died."""

    def __init__(self, members: Members) -> None:
        super().__init__(members.handles)

    def receive(self, ids: Any, deadline: float) -> Iterator[tuple[str, Any]]:
        for number in ids:
            node, message = self._sent.pop(number)
            try:
                yield number, self.nodes[node](message)
            except OSError:
                yield number, self.nodes[node](message)
