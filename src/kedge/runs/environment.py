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
from kedge.files import read_toml
from kedge.loading import files
from kedge.runs.config import Config
from kedge.runs.reading import load_config
from kedge.runs.saved import read_json

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
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
    found = read_json(path, advice)
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


#: Settings that every run writes down; a file without them was cut.
WRITTEN = ("method", "data", "rounds", "seeds")


def stored_config(path: Path) -> Config:
    """Read the configuration in the folder of a run.

    Raises:
        KedgeError: it is not valid. If the run was started with ``--load``, the message says so.
    """
    try:
        config = load_config(path / CONFIG)
        given, _ = read_toml(path / CONFIG)
        if missing := [name for name in WRITTEN if name not in given]:
            raise KedgeError(f"{path / CONFIG} is damaged: it lacks {', '.join(missing)}")
        return config
    except KedgeError as error:
        found = path / ENVIRONMENT
        loaded = read_environment(found).get("loaded", []) if found.is_file() else []
        missing = [file["path"] for file in loaded if Path(file["path"]) not in files]
        if not missing:
            raise KedgeError(
                f"{error}\nThese are the settings of the run in {path}: correct the file, or start "
                "a new run with another --out"
            ) from None
        options = " ".join(f"--load {file}" for file in missing)
        raise KedgeError(f"{error}\nThis run was started with: {options}") from None


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
