"""Partition files: JSON, readable in any language and small enough to publish with a paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kedge.errors import DataError
from kedge.files import make_folder, read_json, write_file

FORMAT, VERSION = "kedge partition", 1
FIELDS = {
    "name": str,
    "seed": int,
    "num_samples": int,
    "hash": str,
    "clients": list,
    "rotation": list | None,
    "noise": list | None,
    "angles": list | None,
}


def text_of(record: dict[str, Any]) -> str:
    """The content of a file, with one client per line."""
    lines = [f'"format": {_json(FORMAT)}', f'"version": {VERSION}']
    for key, value in record.items():
        if isinstance(value, tuple):
            rows = ",\n".join(_json(row) for row in value)
            lines.append(f"{_json(key)}: [\n{rows}\n]")
        elif value is not None:
            lines.append(f"{_json(key)}: {_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(text: str, path: Path) -> Path:
    """Write the file atomically.

    Raises:
        DataError: it cannot be written, e.g. since the disk is full.
    """
    try:
        make_folder(path.parent)
        write_file(path, text.encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def load(path: Path) -> tuple[dict[str, Any], str]:
    """Read the fields of a partition and the hash stored with them.

    Raises:
        DataError: the file cannot be read, is damaged, or has another version.
    """
    try:
        found = read_json(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise DataError(
            f"{path} is not a partition file, or is cut short: not valid JSON"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} is not a partition file; write one with Partition.save")
    if found.get("version") != VERSION:
        raise DataError(
            f"{path} has version {found.get('version')!r}, this kedge reads {VERSION}; update kedge"
        )
    for key, kind in FIELDS.items():
        if not isinstance(found.get(key), kind) or isinstance(found.get(key), bool):
            raise DataError(f"{path} is damaged: {key} is missing or of the wrong type")
    record = {key: found[key] for key in FIELDS if key in found}
    hash_ = record.pop("hash")
    return record, hash_


def _json(value: Any) -> str:
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)
