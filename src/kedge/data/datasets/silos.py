"""Silos: a folder with one file or folder per client, which is then the partition."""

from __future__ import annotations

from pathlib import Path

from kedge.data.datasets.find import SPLIT_NAMES, detect, entries, stem_of
from kedge.errors import DataError

KINDS = ("npz", "csv", "images")


def find_silos(path: Path) -> tuple[str, list[Path], tuple[str, ...]]:
    """A folder with one .npz file, CSV table or folder of images per client: the partition.

    Options are those of the files: see data:csv, data:npz, data:images. In Python, it returns the
    format of all silos, their paths and their names.
    """
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
    kinds = [_kind(p) for p in paths]
    for p, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                f"{p} is of kind {kind} but {paths[0]} of kind {kinds[0]}; silos must be alike"
            )
    return kinds[0], paths, tuple(names)


def _kind(path: Path) -> str:
    kind = detect(path)
    if kind not in KINDS:
        raise DataError(
            f"{path}: {kind} inside silos; a silo is an .npz, a .csv or class/image.png"
        )
    return kind
