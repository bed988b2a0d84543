"""A run on disk: its configuration and environment; partition, metrics and checkpoint of each seed.

::

    runs/digits-scaffold-1/
        config.toml            every setting
        environment.json       versions, device, threads, precision, execution, loaded files
        log.txt                events with times
        bundle.json            the model but for its weights, see kedge.runs.bundle
        result.json            the summary, once the run is complete
        seed-0/partition.json
        seed-0/metrics.jsonl   one line per round
        seed-0/checkpoint.safetensors
        seed-0/model.safetensors     weights of the global model, once the seed is complete
        seed-0/best.safetensors      those of the best round on the validation data, if there are
        seed-0/personal.safetensors  those of all clients, if they have personal models
        seed-0/scores.json           its metrics: global, per client, per class; confusion matrix

Files are written atomically: under a temporary name, then renamed. The metrics of a round are
written before its checkpoint, so a killed run has all metrics up to its checkpoint; later ones are
dropped on resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from kedge._version import __version__
from kedge.engines.device import device_name
from kedge.engines.execution import Execution
from kedge.errors import DataError, KedgeError
from kedge.loading import files
from kedge.runs.config import Config
from kedge.runs.reading import load_config

CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
ENVIRONMENT = "environment.json"
#: Format of checkpoints, in the metadata of the file; a file without a number has format 1.
#: Increase it with every change that an older kedge would misread.
FORMAT, FORMAT_KEY = 1, "kedge.format"
METRICS, PARTITION, SCORES = "metrics.jsonl", "partition.json", "scores.json"
_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Folder:
    """The folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Config) -> Folder:
        """Create the folder of a new run.

        Raises:
            KedgeError: the folder holds a run already.
            DataError: the folder cannot be created.
        """
        folder = cls(path)
        if (folder.path / "config.toml").exists():
            raise KedgeError(
                f"{path} holds a run already. Continue it with --resume, or choose another --out"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{path} cannot be created: {error.strerror}") from None
        folder.write("config.toml", config.to_toml().encode())
        return folder

    @classmethod
    def resume(cls, path: str | Path, config: Config | None) -> tuple[Folder, Config]:
        """Open the folder of a run, and return it with its configuration.

        Raises:
            KedgeError: the folder holds no run, or ``config`` is given and differs from its own.
        """
        folder = cls(path)
        if not (folder.path / "config.toml").is_file():
            raise KedgeError(
                f"{path} holds no run to resume; leave out --resume to start one there"
            )
        stored = stored_config(folder.path)
        if config is not None and config != stored:
            old, new = vars(stored), vars(config)
            changed = [f"  {k}: {old[k]!r} -> {new[k]!r}" for k in old if old[k] != new[k]]
            raise KedgeError(
                f"{path} was started with other settings and cannot be resumed with these:\n"
                + "\n".join(changed)
                + "\nResume it with the old settings, or start a new run with another --out"
            )
        return folder, stored

    def seed(self, seed: int) -> Path:
        """The folder of a seed; it is created if needed."""
        path = self.path / f"seed-{seed}"
        path.mkdir(exist_ok=True)
        return path

    def write(self, name: str, content: bytes | Iterable[bytes | memoryview]) -> None:
        """Write a file atomically; ``content`` may be an iterator over its parts.

        Raises:
            DataError: the file cannot be written, e.g. since the disk is full.
        """
        target = self.path / name
        temporary = target.with_name(f".{target.name}.part")
        try:
            with temporary.open("wb") as file:
                for piece in (content,) if isinstance(content, bytes) else content:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(
                f"{target} cannot be written: {error.strerror}. Earlier files are intact; "
                "free some disk space and continue with --resume"
            ) from None

    def append(self, name: str, line: str) -> None:
        """Append a line to a file."""
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise DataError(
                f"{self.path / name} cannot be written: {error.strerror}. "
                "Free some disk space and continue with --resume"
            ) from None

    @property
    def has_environment(self) -> bool:
        return (self.path / ENVIRONMENT).exists()

    def environment(self) -> dict[str, Any]:
        """The environment in which the run was started."""
        found: dict[str, Any] = json.loads((self.path / ENVIRONMENT).read_text())
        return found

    def save_environment(self, execution: Execution, device: torch.device, precision: str) -> None:
        self.write(ENVIRONMENT, json.dumps(environment(execution, device, precision)).encode())

    def log(self, text: str) -> None:
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, seed: int, state: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint: the state of a simulation after a round."""
        self.seed(seed)
        self.write(f"seed-{seed}/{CHECKPOINT}", safetensors_of(state, {FORMAT_KEY: str(FORMAT)}))

    def save_model(
        self, seed: int, module: nn.Module, metadata: dict[str, str] | None = None
    ) -> None:
        """Write the weights of the trained global model."""
        state = {n: v.detach() for n, v in module.state_dict().items()}
        self.write(f"seed-{seed}/{MODEL}", safetensors_of(state, metadata or {}))

    def load(self, seed: int) -> dict[str, torch.Tensor] | None:
        """Read the checkpoint of a seed; None if there is none.

        Raises:
            DataError: the file is damaged, or a newer kedge wrote it in another format.
        """
        path = self.path / f"seed-{seed}" / CHECKPOINT
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                found = (file.metadata() or {}).get(FORMAT_KEY, "1")
            if found not in map(str, range(1, FORMAT + 1)):
                raise DataError(
                    f"{path} has checkpoint format {found}; kedge {__version__} reads "
                    f"formats up to {FORMAT}. Resume with the kedge that wrote it, or delete it to "
                    f"run seed {seed} from the start"
                )
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} is damaged ({error}); delete it to run seed {seed} from the start"
            ) from None

    def record(self, seed: int, record: dict[str, Any]) -> None:
        """Append the record of a round to the metrics of a seed."""
        self.append(f"seed-{seed}/{METRICS}", json.dumps(record))

    def records(self, seed: int, rounds: int) -> list[dict[str, Any]]:
        """Read the metrics of the first ``rounds`` rounds, and drop later ones from the file."""
        path = self.path / f"seed-{seed}" / METRICS
        found = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the line that was being written when the run was killed
            if record["round"] <= rounds:
                found.append(record)
        text = "".join(json.dumps(r) + "\n" for r in found)
        self.write(f"seed-{seed}/{METRICS}", text.encode())
        return found


def safetensors_of(
    arrays: dict[str, torch.Tensor], metadata: dict[str, str]
) -> Iterator[bytes | memoryview]:
    """Serialise array by array, since client state may be larger than the free memory."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, value in arrays.items():
        start, end = end, end + value.numel() * value.element_size()
        dtype = _SAFETENSORS_DTYPES[value.dtype]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in arrays.values():
        flat = value.detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data


def environment(execution: Execution, device: torch.device, precision: str) -> dict[str, Any]:
    """Versions, hardware, execution and loaded files of a run, as plain data."""
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
    }


def stored_config(path: Path) -> Config:
    """Read the configuration in the folder of a run.

    Raises:
        KedgeError: it is not valid. If the run was started with ``--load``, the message says so.
    """
    try:
        return load_config(path / "config.toml")
    except KedgeError as error:
        environment = path / ENVIRONMENT
        text = environment.read_text() if environment.is_file() else "{}"
        loaded = json.loads(text).get("loaded", [])
        missing = [file["path"] for file in loaded if Path(file["path"]) not in files]
        if not missing:
            raise
        options = " ".join(f"--load {file}" for file in missing)
        raise KedgeError(f"{error}\nThis run was started with: {options}") from None


def new_path(config: Config, root: str | Path = "runs") -> Path:
    """An unused folder for a run, named by its data and method: ``runs/digits-scaffold-1``."""
    words = f"{Path(config.data.rstrip('/')).name}-{config.method}"
    slug = "".join(c if c.isalnum() else "-" for c in words.lower())
    slug = "-".join(piece for piece in slug.split("-") if piece)[:60]
    number = 1
    while (Path(root) / f"{slug}-{number}").exists():
        number += 1
    return Path(root) / f"{slug}-{number}"
