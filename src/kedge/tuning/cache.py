"""The cache of measurements, a JSON file.

It lies in ``$KEDGE_CACHE``, else in ``$XDG_CACHE_HOME/kedge`` or ``~/.cache/kedge``. A file that
cannot be read or written is ignored: the run is then measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kedge.files import make_folder, write_file

MAX_ENTRIES = 500  # the oldest are evicted


def load(key: dict[str, Any]) -> dict[str, Any] | None:
    """The record stored under a key, or None."""
    return _read().get(_digest(key))


def store(key: dict[str, Any], record: dict[str, Any]) -> None:
    """Store a record under a key; both are JSON objects."""
    path, digest = _path(), _digest(key)
    others = {name: value for name, value in _read().items() if name != digest}
    newest = [*others.items(), (digest, record)][-MAX_ENTRIES:]
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        write_file(path, json.dumps(dict(newest)).encode(), private=True)


def _read() -> dict[str, dict[str, Any]]:
    try:
        records = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(records, dict):
        return {}
    return {name: value for name, value in records.items() if isinstance(value, dict)}


def _path() -> Path:
    folder = os.environ.get("KEDGE_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / "plans.json"
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "kedge" / "plans.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
