"""Find datasets on disk and detect their format."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kedge.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")
FILES = (".npz", *TABLES)
SHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLIT_NAMES |= {"val": "val", "valid": "val", "validation": "val"}
LAYOUTS = (
    "an .npz, .csv, .tsv, .csv.gz or .parquet file; a folder with train-images-idx3-ubyte.gz and "
    "the like (MNIST); "
    "cifar-10-batches-py or cifar-100-python; a folder class/image.png or train/class/image.png; "
    "a folder with train.csv; a folder with one such file or folder per client (silos)"
)


def roots() -> list[Path]:
    """The folders where names are searched: $KEDGE_DATA, then the user's cache."""
    data = os.environ.get("KEDGE_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [*([Path(data).expanduser()] if data else []), Path(cache).expanduser() / "kedge"]


def locate(name: str, layouts: tuple[str, ...] = ()) -> Path | None:
    """The file or folder of a named dataset, or None."""
    for root in roots():
        for entry in (*(name + suffix for suffix in FILES), name, *layouts):
            if (root / entry).exists():
                return root / entry
    return None


def places() -> str:
    """The folders to put a dataset into, for messages."""
    cache = roots()[-1]
    data = os.environ.get("KEDGE_DATA")
    if not data:
        return f"{cache} (or set KEDGE_DATA to the folder that has it)"
    missing = "" if Path(data).expanduser().is_dir() else ", which is not a folder"
    return f"{data} ($KEDGE_DATA{missing}) or {cache}"


def natural(path: Path | str) -> list[tuple[int, str]]:
    """Natural sort key: hospital_10 comes after hospital_2."""
    name = path.name if isinstance(path, Path) else path
    pieces = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(p), p) if p.isascii() and p.isdigit() else (1 << 62, p) for p in pieces]


def suffix_of(path: Path) -> str:
    """The ending of a file that kedge reads, such as ``.csv.gz``, else its suffix; lower case."""
    name = path.name.lower()
    return next((s for s in sorted(FILES, key=len)[::-1] if name.endswith(s)), path.suffix.lower())


def stem_of(path: Path) -> str:
    """The name of a folder, or of a file without its ending."""
    return path.name if path.is_dir() else path.name[: len(path.name) - len(suffix_of(path))]


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


def detect(path: Path) -> str:
    """Detect the format of a path: npz, csv, idx, cifar, images or silos.

    Raises:
        DataError: the path does not exist or has no known format.
    """
    if path.is_file():
        kind = {".npz": "npz", **dict.fromkeys(TABLES, "csv")}.get(suffix_of(path))
        if kind is None:
            advice = "give the folder it is in" if _needs_folder(path) else f"kedge reads {LAYOUTS}"
            if path.suffix.lower() in SHEETS:
                advice = "save its table as CSV (UTF-8), or move the file elsewhere"
            raise DataError(f"{path}: not a kind of file that kedge reads on its own; {advice}")
        return kind
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    kind = _detect_folder(path)
    if kind is None:
        state = "no data that kedge recognises in this folder" if entries(path) else "empty folder"
        raise DataError(f"{path}: {state}. kedge reads {LAYOUTS}")
    return kind


def _detect_folder(path: Path) -> str | None:
    inside = entries(path)
    files = {p.name.lower() for p in inside if p.is_file()}
    subfolders = [p for p in inside if p.is_dir()]
    if idx_folder(path):
        return "idx"
    if cifar_folder(path):
        return "cifar"
    if any(f"train{suffix}" in files for suffix in TABLES):
        return "csv"
    if any(SPLIT_NAMES.get(p.name.lower()) == "train" for p in subfolders):
        return "images"
    if any(f.is_file() and f.suffix.lower() in IMAGES for p in subfolders for f in entries(p)):
        return "images"
    if any(f.endswith(FILES) for f in files):
        return "silos"
    return "silos" if any(_detect_folder(p) in ("images", "csv") for p in subfolders) else None


def idx_folder(path: Path) -> Path | None:
    """The folder with MNIST-style files: ``path`` or ``path/raw`` (torchvision's layout)."""
    for folder in (path, path / "raw"):
        if folder.is_dir() and any(folder.glob("train-images[-.]idx3-ubyte*")):
            return folder
    return None


def cifar_folder(path: Path) -> Path | None:
    """The folder with CIFAR's Python batches: ``path`` or its subfolder of the published name."""
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-100-python"):
        if (folder / "data_batch_1").is_file():
            return folder
        if all((folder / name).is_file() for name in ("train", "test", "meta")):
            return folder
    return None


def _is_ignored(path: Path) -> bool:
    name = path.name.lower()
    if name.startswith(".") or name in ("thumbs.db", "desktop.ini", "__macosx"):
        return True
    return path.is_file() and name.split(".")[0] in ("readme", "license", "licence")


def _needs_folder(path: Path) -> bool:
    """Whether a file is part of a dataset that is a folder."""
    name = path.name
    is_image = path.suffix.lower() in IMAGES
    return is_image or "ubyte" in name or "_batch" in name or name in ("train", "test")
