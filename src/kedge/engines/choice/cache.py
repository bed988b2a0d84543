"""What was measured once is remembered from run to run, in a file of the user's cache.

``$KEDGE_CACHE`` names the folder, else it is ``$XDG_CACHE_HOME/kedge`` or ``~/.cache/kedge``. A
file that cannot be read or written is no mistake: then things are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

ENTRIES = 500  # the oldest are forgotten


def recall(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was kept under a key, if anything."""
    return _read().get(_digest(key))


def keep(key: dict[str, Any], record: dict[str, Any]) -> None:
    path, digest = _path(), _digest(key)
    every = {name: value for name, value in _read().items() if name != digest}
    newest = [*every.items(), (digest, record)][-ENTRIES:]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(dict(newest), file)
        Path(file.name).replace(path)


def _read() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, dict)}


def _path() -> Path:
    own = os.environ.get("KEDGE_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own) / "plans.json"
    return (Path(shared) if shared else Path.home() / ".cache") / "kedge" / "plans.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
