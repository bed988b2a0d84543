"""The one writer of the package: files whole, of the right mode, through no link; and no other."""

from __future__ import annotations

import ast
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.errors import KedgeError
from kedge.files import (
    NotPlain,
    append_file,
    check_links,
    create_file,
    make_folder,
    move_file,
    new_file,
    open_append,
    remove_file,
    write_file,
)
from kedge.history.lock import Lock

ROOT = Path(kedge.__file__).parent


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- a new file -----------------------------------------------------------------------------------


def test_a_file_replaces_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "folder").mkdir()
    for goal in ("precious", "missing", "folder", "a.txt"):
        (tmp_path / "a.txt").unlink(missing_ok=True)
        (tmp_path / "a.txt").symlink_to(tmp_path / goal)
        write_file(tmp_path / "a.txt", b"new")
        assert not (tmp_path / "a.txt").is_symlink()
        assert (tmp_path / "a.txt").read_bytes() == b"new"
    os.link(tmp_path / "precious", tmp_path / "b.txt")
    write_file(tmp_path / "b.txt", [b"ne", memoryview(b"w")])
    assert (tmp_path / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt", "folder", "precious"]


def test_names_that_systems_allow_can_be_written(tmp_path: Path) -> None:
    for name in ("two\nlines", "x" * 255, "ü" * 127, "-rf", " ", "a.part"):
        write_file(tmp_path / name, name.encode())
        assert (tmp_path / name).read_bytes() == name.encode()


def test_modes_are_those_of_the_user_or_private(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kedge.files import *\n"
        "os.umask(int(sys.argv[1], 8)); here = Path(sys.argv[2])\n"
        "write_file(here / 'a', b''); write_file(here / 'b', b'', private=True)\n"
        "append_file(here / 'c', ''); os.close(open_append(here / 'd', private=True))\n"
        "create_file(here / 'e'); create_file(here / 'f', private=True)\n"
        "make_folder(here / 'g'); make_folder(here / 'h' / 'i', private=True, inside=here)\n"
    )
    for umask, public in (("022", 0o644), ("027", 0o640), ("000", 0o666)):
        folder = tmp_path / umask
        folder.mkdir()
        subprocess.run([sys.executable, "-c", code, umask, str(folder)], check=True)
        assert [mode(folder / name) for name in "ace"] == [public] * 3
        assert [mode(folder / name) for name in "bdf"] == [0o600] * 3
        assert [mode(folder / x) for x in ("h", "h/i")] == [0o700] * 2


def test_nothing_stays_of_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "a", b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "a", b"after")
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "a") as file:
        file.write(b"half")
        [temporary] = tmp_path.glob(".a.*.part")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"
    assert len(temporary.name) > 20  # nobody knows it beforehand


def test_pipes_sockets_and_folders_are_no_files(tmp_path: Path) -> None:
    import socket

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(tmp_path / "socket"))
    for name in ("pipe", "socket", "folder", "link"):
        for write in (lambda p: write_file(p, b"x"), lambda p: append_file(p, "x")):
            with pytest.raises(OSError):
                write(tmp_path / name)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # even if somebody reads
    with pytest.raises(NotPlain):
        append_file(tmp_path / "pipe", "x")
    os.close(reader)
    one.close()
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "socket"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could replace a device")
def test_no_device_is_replaced() -> None:
    for path in map(Path, ("/dev/null", "/dev/stdout", "/dev/full")):
        before = os.lstat(path)
        if stat.S_ISREG(os.stat(path).st_mode):
            continue  # a file that pytest writes to
        with pytest.raises(NotPlain):
            write_file(path, b"x")
        assert os.lstat(path).st_ino == before.st_ino


# -- appending, folders, locks --------------------------------------------------------------------


def test_appending_follows_no_link_of_either_kind(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    for goal in ("precious", "missing"):
        (tmp_path / "log").unlink(missing_ok=True)
        (tmp_path / "log").symlink_to(tmp_path / goal)
        with pytest.raises(NotPlain, match="it is a link"):
            append_file(tmp_path / "log", "x")
    os.link(tmp_path / "precious", tmp_path / "hard")
    with pytest.raises(NotPlain, match="several names"):
        open_append(tmp_path / "hard")
    append_file(tmp_path / "new", "a\n")
    append_file(tmp_path / "new", "b\n", synchronised=True)
    assert (tmp_path / "new").read_text() == "a\nb\n"
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "missing").exists()


def test_folders_that_are_links_are_not_entered(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "deep" / "a").write_text("mine")
    run.mkdir()
    for name, goal in (("seed-0", victim), ("gone", tmp_path / "missing"), ("file", run / "x")):
        (run / name).symlink_to(goal)
    (run / "x").write_text("")
    for name in ("seed-0", "gone", "file", "x", ".."):
        for act in (
            lambda p: write_file(p, b"x", inside=run),
            lambda p: append_file(p, "x", inside=run),
            lambda p: create_file(p, inside=run),
            lambda p: remove_file(p, inside=run),
            lambda p: make_folder(p, inside=run),
            lambda p: move_file(run / "x", p, inside=run),
            lambda p: make_folder(p.parent.parent, inside=run),
        ):
            with pytest.raises(NotPlain):
                act(run / name / "deep" / "a")
    assert (victim / "deep" / "a").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["run", "victim"]
    with pytest.raises(KedgeError, match=r"run has a link, '(seed-0|gone|file)'"):
        check_links(run)
    with pytest.raises(KedgeError, match="run has a link, 'gone'"):
        check_links(run, "gone/er")


def test_a_link_that_comes_in_between_changes_nothing(tmp_path: Path) -> None:
    """A folder and a link to one outside change places all the time."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "seed-0").mkdir(parents=True)
    victim.mkdir()
    (run / "link").symlink_to(victim)
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            os.rename(run / "seed-0", run / "real")
            os.rename(run / "link", run / "seed-0")
            os.rename(run / "seed-0", run / "link")
            os.rename(run / "real", run / "seed-0")

    thread = threading.Thread(target=swap)
    thread.start()
    end, written, refused = time.time() + 1.0, 0, 0
    while time.time() < end or not (written and refused):
        for write in (write_file, lambda p, x, inside: append_file(p, "x", inside=inside)):
            try:
                write(run / "seed-0" / "a", b"x", inside=run)
                written += 1
            except OSError:
                refused += 1
    over.set()
    thread.join()
    assert not os.listdir(victim)


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KedgeError, match=r"\.lock: it is a link; delete it"):
        Lock().take(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# -- no other writer ------------------------------------------------------------------------------

#: Calls that create or change a file or a folder, by their last name.
WRITERS = {
    "write_text", "write_bytes", "touch", "mkdir", "makedirs", "renames", "symlink", "symlink_to",
    "hardlink_to", "save_file", "savetxt", "tofile", "memmap", "mkdtemp", "mkstemp",
    "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile", "copy2",
    "copyfile", "copytree", "FileHandler", "RotatingFileHandler", "to_parquet", "to_pickle",
    "to_excel", "to_hdf", "to_feather", "mknod", "mkfifo",
}  # fmt: skip
#: The same by their whole name.
FUNCTIONS = {
    "np.save", "numpy.save", "torch.save", "onnx.save", "os.replace", "os.rename", "os.link",
    "shutil.move", "shutil.copy",
}  # fmt: skip
#: These are fine with an open file, or without one.
SAVERS = {"savefig", "to_csv", "savez", "savez_compressed"}
#: These move a path if they have one argument; those of texts and of tables have others.
MOVERS = {"replace", "rename"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC", "O_TMPFILE"}
#: What may write by itself, and why.
ALLOWED = {
    "cli/app.py: O_WRONLY": "/dev/null, in the place of a closed standard output",
    "cli/board.py: TemporaryDirectory": "a private folder for a page with the token",
    "local/processes.py: fdopen": "of a descriptor of kedge.files",
    "local/processes.py: open": "/dev/null, where a log cannot be written",
    "federation/large_messages.py: TemporaryFile": "it has no name",
    "sim/store.py: TemporaryFile": "it has no name",
}


def writes(path: Path) -> Iterator[str]:
    """What writes in a module: ``MODULE: CALL``."""
    module = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in FLAGS:
            yield f"{module}: {node.attr}"
        if not isinstance(node, ast.Call):
            continue
        dotted = ast.unparse(node.func)
        name = dotted.rpartition(".")[2]
        first = ast.unparse(node.args[0]) if node.args else ""
        if name == "open" and (dotted, first) != ("os.open", first) and _is_written(node, dotted):
            yield f"{module}: open"
        if name == "fdopen" and _is_written(node, "open"):
            yield f"{module}: fdopen"
        if name in WRITERS or dotted in FUNCTIONS or (name in SAVERS and first not in ("", "file")):
            yield f"{module}: {name}"
        if name in MOVERS and len(node.args) == 1 and not node.keywords:
            yield f"{module}: {name}"


def _is_written(node: ast.Call, dotted: str) -> bool:
    """Whether a call of ``open`` has a mode that writes, or one that is not known."""
    at = 1 if dotted in ("open", "io.open", "gzip.open", "codecs.open") else 0
    modes = [*node.args[at : at + 1], *(k.value for k in node.keywords if k.arg == "mode")]
    return any(
        set(m.value) & set("wax+") if isinstance(m, ast.Constant) and isinstance(m.value, str)
        else "mode" in ast.unparse(m)
        for m in modes
    )  # fmt: skip


def test_nothing_else_in_the_package_writes() -> None:
    """Write with kedge.files; what cannot is listed above, with the reason."""
    found = [one for path in sorted(ROOT.rglob("*.py")) for one in writes(path)]
    own = {one for one in found if one.startswith("files.py: ")}
    assert {"files.py: fdopen", "files.py: mkdir", "files.py: O_WRONLY"} <= own  # it sees them
    assert sorted(set(found) - own - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - set(found)) == []
