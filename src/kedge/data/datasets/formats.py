"""Formats of data on disk, one :class:`DataReader` each, and the folders they are looked for in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kedge.data.datasets.dataset import Dataset, ReadResult, assemble
from kedge.errors import DataError, KedgeError
from kedge.grammar import Call
from kedge.limits import host_available
from kedge.registry import Registry
from kedge.schema import schema_of

if TYPE_CHECKING:
    from kedge.data.datasets.known import KnownDataset

Shape = tuple[int, ...]
Peek = tuple[Shape | None, dict[str, int]]  # shape of a sample, if known, and sizes by split
ClientFiles = tuple[str, list[Path], tuple[str, ...]]  # format, paths and names

SPLIT_NAMES = {
    "train": "train", "training": "train", "test": "test", "testing": "test",
    "val": "val", "valid": "val", "validation": "val",
}  # fmt: skip
SHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
LAYOUTS = (
    "an .npz, .csv, .tsv, .csv.gz or .parquet file; a folder with train-images-idx3-ubyte.gz and "
    "the like (MNIST); "
    "cifar-10-batches-py or cifar-100-python; a folder class/image.png or train/class/image.png; "
    "a folder with train.csv; a folder with one such file or folder per client (silos)"
)

readers: Registry[type[DataReader]] = Registry(
    "reader", see="kedge data", module="kedge.data.datasets.load"
)


class DataReader:
    """One format of data: how it is recognised, listed and read.

    A format is a frozen dataclass, registered by name in :data:`readers`; its fields are the
    options that are written in brackets behind a path.
    """

    noun: ClassVar[str] = "option"
    #: Endings of files that are a dataset on their own.
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: A pattern in names of files that are only part of a dataset, which is their folder.
    pieces: ClassVar[str] = "$^"
    #: Which format is asked first, the highest, where a path could be of several.
    precedence: ClassVar[int] = 0
    #: What is written after ``--data``, and what it does.
    examples: ClassVar[tuple[tuple[str, str], ...]] = ()

    @classmethod
    def detect(cls, path: Path) -> bool:
        """Whether a path, which exists, has this format."""
        return suffix_of(path) in cls.suffixes and path.is_file()

    @classmethod
    def peek(cls, path: Path) -> Peek:
        """Shape of a sample and number of samples per split, from headers and counts alone."""
        raise NotImplementedError

    @classmethod
    def clients(cls, path: Path) -> ClientFiles | None:
        """The data of each client, if the format is a folder of these."""
        return None

    def read(self, paths: Sequence[Any], limit: int | None = None) -> ReadResult:
        """Read one path, or one per silo.

        Args:
            paths: files or folders of this format.
            limit: number of classes, if it is known; only formats of numbered classes heed it.

        Raises:
            DataError: the data cannot be read or used.
        """
        raise NotImplementedError


def open_path(
    path: Path,
    name: str,
    options: dict[str, Any],
    kind: str | None = None,
    known: KnownDataset | None = None,
) -> Dataset:
    """Read a file or folder.

    Args:
        path: the file or folder.
        name: name of the dataset.
        options: options of the reader.
        kind: name of the reader; detected if None.
        known: the known dataset that the path holds, for its constants.

    Raises:
        DataError: the data cannot be read or used.
        UnknownName: the reader has no such option.
        FieldError: the value of an option is wrong.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    kind = kind or detect(path)
    kind, paths, names = readers[kind].clients(path) or (kind, [path], None)
    reader: Callable[..., DataReader] = readers[kind]
    result = reader(**bind_options(kind, reader, options)).read(
        paths, known.count if known else None
    )
    moments = None
    if known:
        moments = known.moments(result.sources[0]["train"][0].shape[1:])
        if result.classes is None and known.classes and len(known.classes) == result.outputs:
            result = result._replace(classes=known.classes)
    return assemble(name, paths, result, names, moments)


def bind_options(
    name: str, function: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Check the given options of a reader or a dataset and fill in the defaults."""
    return schema_of(function, name).bind(Call(name, None, (), options))


def check_memory(where: object, size: int) -> None:
    """Raise a DataError if ``size`` bytes, as headers announce them, are more than is free."""
    free = host_available()
    if size > free:
        raise DataError(
            f"{where}: {size / 1e9:.1f} GB of memory are needed, and {free / 1e9:.1f} GB are free; "
            "use less data, or a machine with more memory"
        )


@contextmanager
def reading(path: object, what: str) -> Iterator[None]:
    """Convert any exception of a decoder into a DataError that names the file.

    numpy, zipfile, zlib, Pillow and pickle raise some twenty types of exceptions on damaged files,
    so this catches all of them. Only calls of decoders belong in the block.

    Args:
        path: the file that is read.
        what: its format, such as ``"an IDX file"``.
    """
    try:
        yield
    except KedgeError:
        raise
    except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be opened').lower()}") from error
    except Exception as error:
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as {what} ({message}). It is damaged, cut short or of another "
            "kind; copy or download it again"
        ) from error


# -- recognition ----------------------------------------------------------------------------------


def detect(path: Path) -> str:
    """The format of a path: npz, csv, idx, cifar, images or silos.

    Raises:
        DataError: the path does not exist or has no known format.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    kind = recognise(path)
    if kind is not None:
        return kind
    if path.is_dir():
        state = "no data that kedge recognises in this folder" if entries(path) else "empty folder"
        raise DataError(f"{path}: {state}. kedge reads {LAYOUTS}")
    advice = f"kedge reads {LAYOUTS}"
    if any(re.search(reader.pieces, path.name) for _, reader in _by_precedence()):
        advice = "give the folder it is in"
    elif path.suffix.lower() in SHEETS:
        advice = "save its table as CSV (UTF-8), or move the file elsewhere"
    raise DataError(f"{path}: not a kind of file that kedge reads on its own; {advice}")


def recognise(path: Path) -> str | None:
    """The format of a path that exists, or None."""
    return next((name for name, reader in _by_precedence() if reader.detect(path)), None)


def _by_precedence() -> list[tuple[str, type[DataReader]]]:
    return sorted(((n, readers[n]) for n in readers), key=lambda pair: -pair[1].precedence)


def file_suffixes() -> tuple[str, ...]:
    """The endings of files that are a dataset on their own."""
    return tuple(suffix for _, reader in _by_precedence() for suffix in reader.suffixes)


def suffix_of(path: Path) -> str:
    """The ending of a file that kedge reads, such as ``.csv.gz``, else its suffix; lower case."""
    name, known = path.name.lower(), sorted(file_suffixes(), key=len, reverse=True)
    return next((s for s in known if name.endswith(s)), path.suffix.lower())


def stem_of(path: Path) -> str:
    """The name of a folder, or of a file without its ending."""
    return path.name if path.is_dir() else path.name[: len(path.name) - len(suffix_of(path))]


# -- folders --------------------------------------------------------------------------------------


def roots() -> list[Path]:
    """The folders where names are searched: $KEDGE_DATA, then the user's cache."""
    data = os.environ.get("KEDGE_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [*([Path(data).expanduser()] if data else []), Path(cache).expanduser() / "kedge"]


def places() -> str:
    """The folders to put a dataset into, for messages."""
    cache = roots()[-1]
    data = os.environ.get("KEDGE_DATA")
    if not data:
        return f"{cache} (or set KEDGE_DATA to the folder that has it)"
    missing = "" if Path(data).expanduser().is_dir() else ", which is not a folder"
    return f"{data} ($KEDGE_DATA{missing}) or {cache}"


def locate(name: str, layouts: tuple[str, ...] = ()) -> Path | None:
    """The file or folder of a named dataset, or None."""
    names = [*(name + suffix for suffix in file_suffixes()), name, *layouts]
    return next((root / n for root in roots() for n in names if (root / n).exists()), None)


def entries(folder: Path) -> list[Path]:
    """The entries of a folder in natural order, without hidden files, readmes and licences."""
    try:
        found = sorted(folder.iterdir(), key=natural)
    except OSError as error:
        raise DataError(f"{folder}: {(error.strerror or 'cannot be opened').lower()}") from error
    return [p for p in found if not _is_ignored(p)]


def folders(folder: Path) -> list[Path]:
    """The subfolders of a folder in natural order."""
    return [p for p in entries(folder) if p.is_dir()]


def natural(path: Path | str) -> list[tuple[int, str]]:
    """Natural sort key: hospital_10 comes after hospital_2."""
    name = path.name if isinstance(path, Path) else path
    pieces = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(p), p) if p.isascii() and p.isdigit() else (1 << 62, p) for p in pieces]


def _is_ignored(path: Path) -> bool:
    name = path.name.lower()
    if name.startswith(".") or name in ("thumbs.db", "desktop.ini", "__macosx"):
        return True
    return path.is_file() and name.split(".")[0] in ("readme", "license", "licence")
