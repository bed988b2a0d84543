"""Write files whole, and through no link; read files that may be a stranger's.

Everything that kedge writes passes here; ``tests/attacks/test_writing.py`` sees to it. A new file
has a random name beside its place; it is synchronised, then renamed, which replaces a link in its
place and leaves alone what the link names. A file that is appended to must be a file of one name:
no link, no pipe, no hard link to a file elsewhere. Below the folder ``inside``, such as that of a
run, folders that are links are not entered. This is asked of the system with the opening itself, so
a link that is put there in between changes nothing. Windows, which cannot be asked so, looks first.

What is read from the folder of a run, or given as settings, passes :func:`open_file`: a pipe, a
device or a file without an end is none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kedge.errors import KedgeError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | _NO_LINK | getattr(os, "O_BINARY", 0)
_NEW = _WRITE | os.O_EXCL
_APPEND = _WRITE | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)  # a pipe without a reader is an error
_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", os.O_RDONLY)
_IS_POSIX = os.open in os.supports_dir_fd
#: Links that Weights & Biases leaves in the folder of a run; nobody writes to these names.
_KNOWN_LINKS = tuple(
    f"log-wandb/wandb/{name}" for name in ("latest-run", "debug*.log", "*/logs/debug-core.log")
)

#: Files that are read as a whole: at most so many bytes, of a table of settings and of others.
#: Objects of JSON need up to 25 times the memory, a key of TOML time quadratic in its length.
MAX_TOML_BYTES, MAX_BYTES = 2**16, 2**28
#: Digits of a number; one with more is infinite as a real number.
MAX_DIGITS = 300

# -- reading --------------------------------------------------------------------------------------


def open_file(path: Path, *, links: bool = True) -> IO[bytes]:
    """Open a file to read.

    Args:
        path: the file.
        links: whether it may be a link to a file.

    Raises:
        NotPlain: it is a folder, a pipe or a device.
        OSError: it cannot be opened.
    """
    handle = os.open(path, _READ | (0 if links else _NO_LINK))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlain(path, "it is no file")
    return os.fdopen(handle, "rb")


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file.

    Raises:
        NotPlain: it is no file, or has more than ``most`` bytes.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(most + 1)  # it may grow meanwhile
    if max(size, len(content)) > most:
        raise NotPlain(path, f"it has more than the {most:,} bytes that kedge reads")
    return content


def read_json(path: Path) -> Any:
    """The content of a JSON file; an OSError, or a ValueError if it is none."""
    return parse_json(read_file(path))


def parse_json(content: bytes | str) -> Any:
    """JSON of a stranger; a ValueError if it is none, or has a number that is none for others."""
    text = content.decode() if isinstance(content, bytes) else content
    if re.search(rf"\d{{{MAX_DIGITS}}}", text):
        raise ValueError(f"a number of {MAX_DIGITS} digits or more")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path, most: int = MAX_TOML_BYTES) -> tuple[dict[str, Any], str]:
    """The table in a TOML file and its text; an OSError, or a ValueError if it is none."""
    text = read_file(path, most).decode()
    return parse_toml(text), text


def parse_toml(text: str) -> dict[str, Any]:
    """TOML of a stranger; a ValueError if it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(value: Any) -> Any:
    """Data for a JSON file: numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encoded(text: str) -> bytes:
    r"""Text in UTF-8; half a character, as JSON of a stranger may have, is written as its number.

    >>> encoded("\u00e9 \ud800")
    b'\xc3\xa9 \\ud800'
    """
    return text.encode(errors="backslashreplace")


# -- writing --------------------------------------------------------------------------------------


class NotPlain(PermissionError):
    """Something else than a file or folder of one name is in its place, such as a link."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EPERM, what, str(path))


@contextmanager
def new_file(
    path: Path, *, private: bool = False, inside: Path | None = None
) -> Iterator[IO[bytes]]:
    """A file to write, which replaces ``path`` at the end. Nothing stays of a failed write.

    Args:
        path: the file.
        private: whether only its owner may read it.
        inside: a folder below which no folder of the path may be a link; its own folder if None.

    Raises:
        OSError: the file cannot be written.
    """
    with _folder_of(path, inside) as (folder, name):
        _check_replaceable(path, folder, name)
        short = Path(name).name[:50]
        temporary = str(Path(name).with_name(f".{short}.{secrets.token_hex(8)}.part"))
        handle = os.open(temporary, _NEW, 0o600 if private else 0o666, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(handle)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        with contextlib.suppress(OSError):  # so that the rename outlives a loss of power
            opened = os.open(path.parent if folder is None else ".", os.O_RDONLY, dir_fd=folder)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def write_file(
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    private: bool = False,
    inside: Path | None = None,
) -> None:
    """Write a :func:`new_file`; ``content`` may be an iterator over its parts."""
    with new_file(path, private=private, inside=inside) as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)


def check_target(path: str | Path, force: bool, suffix: str = "") -> Path:
    """The path of a file to be written.

    Raises:
        KedgeError: its folder does not exist, it exists already (unless ``force``), or its name
            does not end with ``suffix``.
    """
    path = Path(path).expanduser()
    if suffix and path.suffix.lower() != suffix:
        raise KedgeError(f"{path}: the name must end with {suffix}, such as {path.stem}{suffix}")
    if path.is_dir():
        raise KedgeError(
            f"{path} is a folder; give the name of a file, such as {path / 'out'}{suffix}"
        )
    if not path.parent.is_dir():
        raise KedgeError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise KedgeError(f"{path} cannot be written: the folder {path.parent} is not writable")
    if path.exists() and not force:
        raise KedgeError(f"{path} exists already; write --force to replace it")
    return path


def write_target(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in one step, so that no half file is left.

    Raises:
        KedgeError: the file cannot be written, e.g. since the disk is full.
    """
    try:
        write_file(path, content)
    except OSError as error:
        raise KedgeError(f"{path} cannot be written: {error.strerror or error}") from None


def create_file(path: Path, *, private: bool = False, inside: Path | None = None) -> None:
    """Create an empty file.

    Raises:
        FileExistsError: there is something of that name.
    """
    with _folder_of(path, inside) as (folder, name):
        os.close(os.open(name, _NEW, 0o600 if private else 0o666, dir_fd=folder))


def open_append(path: Path, *, private: bool = False, inside: Path | None = None) -> int:
    """The descriptor of a file to append to, or to lock; it is created if it is missing.

    Raises:
        NotPlain: it is a link, a pipe or a device, or has several names.
    """
    with _folder_of(path, inside) as (folder, name):
        try:
            handle = os.open(name, _APPEND, 0o600 if private else 0o666, dir_fd=folder)
        except OSError as error:
            reasons = {errno.ELOOP: "it is a link", errno.ENXIO: "it is no file"}
            if error.errno in reasons:
                raise NotPlain(path, reasons[error.errno]) from None
            raise
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    several = stat.S_ISREG(found.st_mode)
    raise NotPlain(path, "it has several names (hard links)" if several else "it is no file")


def append_file(
    path: Path, text: str, *, inside: Path | None = None, synchronised: bool = False
) -> None:
    """Append to a file, as :func:`open_append`; ``synchronised``: it outlives a loss of power. What
    a full disk takes only in part is taken back."""
    with os.fdopen(open_append(path, inside=inside), "ab", buffering=0) as file:
        size, content = os.fstat(file.fileno()).st_size, text.encode()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if synchronised:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def make_folder(
    path: Path, *, private: bool = False, inside: Path | None = None, new: bool = False
) -> None:
    """Make a folder, and those above it.

    Raises:
        FileExistsError: it is there, and must be ``new``; or it is a file.
        NotPlain: it is a link or a file, or a folder between it and ``inside`` is one.
    """
    mode = 0o700 if private else 0o777
    if inside is None:
        path.mkdir(mode, parents=True, exist_ok=not new)
        return
    inside.mkdir(parents=True, exist_ok=True)
    place = inside
    for one in path.relative_to(inside).parts:
        place /= one
        with _folder_of(place, inside) as (folder, name):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=folder)
            _close(_entered(place, folder, name))


def move_file(path: Path, target: Path, *, inside: Path | None = None) -> None:
    """Give a file another name; a file or a link of that name is replaced."""
    with _folder_of(path, inside) as (old, name), _folder_of(target, inside) as (new, other):
        os.replace(name, other, src_dir_fd=old, dst_dir_fd=new)


def remove_file(path: Path, *, inside: Path | None = None) -> None:
    """Delete a file, or a link and not what it names; nothing happens if there is none."""
    with contextlib.suppress(FileNotFoundError), _folder_of(path, inside) as (folder, name):
        os.unlink(name, dir_fd=folder)


def check_owned(folder: Path) -> None:
    """Raise a KedgeError if other users can write in a folder, or put another one in its place."""
    if not hasattr(os, "geteuid"):  # Windows
        return
    found, name = folder.stat(), shlex.quote(str(folder))
    if found.st_uid != os.geteuid():
        raise KedgeError(
            f"{folder} belongs to another user, who could read and change what is kept there; "
            f"choose another folder, or type: sudo chown -R $(id -un) {name}"
        )
    if found.st_mode & 0o022:
        raise KedgeError(f"others can write in {folder}; type: chmod go-w {name}")
    for above in folder.resolve().parents:
        mode = above.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise KedgeError(
                f"everybody can put another folder in the place of {folder}, since they can write "
                f"in {above}; type: chmod o-w {shlex.quote(str(above))}"
            )


def find_link(folder: Path, below: Path | str = "") -> Path | None:
    """A link in a folder, or in a part of it; None if there is none. It may be one itself."""
    for name in Path(below).parts:
        folder /= name
        if folder.is_symlink():
            return folder
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not any(map(path.match, _KNOWN_LINKS)):
                return path
    return None


def check_links(folder: Path, below: Path | str = "") -> None:
    """Raise a KedgeError if a folder, or a part of it, has links: what is written there may belong
    elsewhere."""
    link = find_link(folder, below)
    if link is not None:
        raise KedgeError(
            f"{folder} has a link, {str(link.relative_to(folder))!r}, and kedge does not go on in "
            "a folder with links; put what it names in its place, or delete it"
        )


@contextmanager
def _folder_of(path: Path, inside: Path | None) -> Iterator[tuple[int | None, str]]:
    """The descriptor of the folder that a file is in, and the file's name there.

    Without descriptors of folders, as on Windows: None, and the path.
    """
    top = path.parent if inside is None else inside
    *between, name = path.relative_to(top).parts
    folder = os.open(top, _FOLDER) if _IS_POSIX else None
    try:
        for one in between:
            top /= one
            folder, above = _entered(top, folder, one), folder
            _close(above)
        yield folder, name if _IS_POSIX else str(path)
    finally:
        _close(folder)


def _entered(path: Path, folder: int | None, name: str) -> int | None:
    """Open a folder in a folder; a NotPlain if it is a link, a file, or the one above."""
    if name == "..":
        raise NotPlain(path, "it is outside of the folder")
    if folder is None:
        if path.is_symlink() or not path.is_dir():
            raise NotPlain(path, "it is a link or a file, and no folder")
        return None
    try:
        return os.open(name, _FOLDER | _NO_LINK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise NotPlain(path, "it is a link or a file, and no folder") from None
        raise


def _close(folder: int | None) -> None:
    if folder is not None:
        os.close(folder)


def _check_replaceable(path: Path, folder: int | None, name: str) -> None:
    """Raise a NotPlain for a pipe or a device: whoever reads there would wait for ever."""
    try:
        mode = os.stat(name, dir_fd=folder).st_mode
    except OSError:  # nothing is there, or a link that leads nowhere
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotPlain(path, "it is no file")
