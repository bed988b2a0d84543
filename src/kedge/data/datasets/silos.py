"""Silos: a folder with one file or folder per client, which is then the partition."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kedge.data.datasets.formats import (
    SPLIT_NAMES,
    ClientFiles,
    DataReader,
    Peek,
    detect,
    entries,
    file_suffixes,
    readers,
    recognise,
    stem_of,
)
from kedge.errors import DataError

KINDS = ("npz", "csv", "images")


@readers.register("silos")
@dataclass(frozen=True)
class Silos(DataReader):
    """A folder with one .npz file, CSV table or folder of images per client: the partition.

    Options are those of the files: see data:csv, data:npz, data:images.
    """

    precedence = -1
    examples = (
        ("hospitals", "a folder with one file or folder per client"),
        ("hospitals(label=sick, missing=mean)", "with the options of its files"),
    )

    @classmethod
    def detect(cls, path: Path) -> bool:
        inside = entries(path) if path.is_dir() else []
        if any(p.is_file() and p.name.lower().endswith(file_suffixes()) for p in inside):
            return True
        return any(p.is_dir() and recognise(p) in ("images", "csv") for p in inside)

    @classmethod
    def peek(cls, path: Path) -> Peek:
        kind, paths, _ = find_silos(path)
        peeks = [readers[kind].peek(p) for p in paths]
        total = {split: sum(sizes.get(split, 0) for _, sizes in peeks) for split in peeks[0][1]}
        return peeks[0][0], total | {"silos": len(paths)}

    @classmethod
    def clients(cls, path: Path) -> ClientFiles:
        return find_silos(path)


def find_silos(path: Path) -> ClientFiles:
    """The format of all silos in a folder, their paths and their names."""
    if not path.is_dir():
        raise DataError(
            f"{path}: not a folder; silos are a folder with one file or folder per client"
        )
    paths = entries(path)
    if len(paths) < 2:
        content = f"only {paths[0].name}" if paths else "nothing"
        raise DataError(
            f"{path}: {content} in there; silos are a folder with one file or folder per client "
            "(.npz, .csv or class/image.png). For a single dataset, give the file itself"
        )
    names = [stem_of(p) for p in paths]
    for i, name in enumerate(names):
        if name.lower() in SPLIT_NAMES:
            raise DataError(
                f"{paths[i]}: {name!r} names a split, not a client; silos need client names"
            )
        if name in names[:i]:
            other = paths[names.index(name)].name
            raise DataError(f"{path}: {other} and {paths[i].name} are silos of the same name")
    first = detect(paths[0])
    for p in paths:
        kind = detect(p)
        if kind not in KINDS:
            what = f"{kind} inside silos; a silo is an .npz, a .csv or class/image.png"
            raise DataError(f"{p}: {what}")
        if kind != first:
            raise DataError(
                f"{p} is of kind {kind} but {paths[0]} of kind {first}; silos must be alike"
            )
    return first, paths, tuple(names)
