"""What a run was started with: settings, versions, device, execution, loaded files and data."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kedge._version import __version__
from kedge.engines.device import device_name
from kedge.engines.execution import Execution
from kedge.errors import DataError, KedgeError
from kedge.history.folder import read_own_json
from kedge.loading import files

#: Keys that a resumed run reads, and their types.
NEEDED = {"device": str, "threads": int, "how": dict}
PLAIN = dataclasses.asdict(Execution("loop"))
MAX_WORKERS = 1024  # processes and threads that a run may ask for


def environment(
    execution: Execution, device: torch.device, precision: str, fingerprint: str = ""
) -> dict[str, Any]:
    """Versions, hardware, execution, loaded files and data of a run, as plain data."""
    loaded = [{"path": str(file.path), "sha256": file.sha256} for file in files.values()]
    return {
        "kedge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "how": dataclasses.asdict(execution),
        **({"loaded": loaded} if loaded else {}),
        **({"data": fingerprint} if fingerprint else {}),
    }


def read_environment(path: Path) -> dict[str, Any]:
    """The environment in a file.

    Raises:
        DataError: the file is damaged.
    """
    advice = (
        "restore it, or delete it: the run then goes on with an engine that is chosen anew, and "
        "without a check of its data"
    )
    found = read_own_json(path, advice)
    how = found.get("how") if isinstance(found, dict) else None
    if (
        not isinstance(how, dict)
        or not all(isinstance(found.get(key), kind) for key, kind in NEEDED.items())
        or not 0 < found["threads"] <= MAX_WORKERS
        or not {"engine"} <= set(how) <= set(PLAIN)
        or not all(type(how[key]) is type(PLAIN[key]) for key in how)
        or not all(0 <= how.get(key, 0) <= MAX_WORKERS for key in ("workers", "streams", "threads"))
        or not _are_files(found.get("loaded", []))
    ):
        raise DataError(f"{path} is damaged: it does not describe an environment; {advice}")
    return dict(found)


def _are_files(loaded: Any) -> bool:
    if not isinstance(loaded, list):
        return False
    texts = [[f.get("path"), f.get("sha256")] for f in loaded if isinstance(f, dict)]
    return len(texts) == len(loaded) and all(isinstance(t, str) for pair in texts for t in pair)


def check_unchanged(found: dict[str, Any], path: Path, fingerprint: str) -> None:
    """Compare data and loaded files with those that a run was started with.

    Raises:
        KedgeError: they are not the same.
    """
    if fingerprint and found.get("data", fingerprint) != fingerprint:
        raise KedgeError(
            f"the data have changed since {path} was started (fingerprint {found['data']}, now "
            f"{fingerprint}): one curve would come from two datasets. Restore the data, or start a "
            "new run with another --out"
        )
    now = {str(file.path): file.sha256 for file in files.values()}
    for file in found.get("loaded", []):
        if now.get(file["path"], file["sha256"]) != file["sha256"]:
            raise KedgeError(
                f"{file['path']} has changed since {path} was started with it; restore the file, "
                "or start a new run with another --out"
            )
