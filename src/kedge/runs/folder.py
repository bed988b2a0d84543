"""A run on disk: configuration, environment, and per seed its partition, metrics and checkpoint.

::

    runs/digits-scaffold-1/
        config.toml            every setting
        environment.json       versions, device, threads, precision, how it is computed, files
        log.txt                what happened, with times
        result.json            the summary, once the run is complete
        seed-0/partition.json
        seed-0/metrics.jsonl   one line per round
        seed-0/checkpoint.safetensors
        seed-0/model.safetensors     the trained global model, once the seed is complete

Files appear whole or not at all: each is written under another name and then renamed. Metrics of a
round are written before its checkpoint, so a killed run has at least the metrics its checkpoint
needs; what goes beyond is dropped on resume.
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
from safetensors.torch import load_file, save
from torch import nn

from kedge._version import __version__
from kedge.engines.device import device_name
from kedge.engines.execution import Execution
from kedge.errors import DataError, KedgeError
from kedge.loading import files
from kedge.runs.config import Config, load_config

CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
ENVIRONMENT = "environment.json"
#: Format of checkpoints, in the metadata of the file; a file without a number has format 1.
#: Increase it with every change that an older kedge would misread.
FORMAT, FORMAT_KEY = 1, "kedge.format"
METRICS, PARTITION = "metrics.jsonl", "partition.json"
_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Folder:
    """One run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Config) -> Folder:
        """A new folder; one that holds a run already is refused."""
        folder = cls(path)
        if (folder.path / "config.toml").exists():
            raise KedgeError(
                f"{path} holds a run already. Continue it with --resume, or choose another --out"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{path} cannot be made: {error.strerror}") from None
        folder.write("config.toml", config.to_toml().encode())
        return folder

    @classmethod
    def resume(cls, path: str | Path, config: Config | None) -> tuple[Folder, Config]:
        """An existing folder, if its configuration is the given one."""
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
                f"{path} was started with other settings, so it cannot go on with these:\n"
                + "\n".join(changed)
                + "\nLeave them as they were, or start anew with another --out"
            )
        return folder, stored

    def seed(self, seed: int) -> Path:
        path = self.path / f"seed-{seed}"
        path.mkdir(exist_ok=True)
        return path

    def write(self, name: str, content: bytes | Iterable[bytes | memoryview]) -> None:
        """A whole file or none; ``content`` may come piece by piece."""
        target = self.path / name
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as file:
                for piece in (content,) if isinstance(content, bytes) else content:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{target} cannot be written: {error.strerror}. What was saved before is whole; "
                "make room and go on with --resume"
            ) from None

    def append(self, name: str, line: str) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise DataError(
                f"{self.path / name} cannot be written: {error.strerror}. "
                "Make room and go on with --resume"
            ) from None

    @property
    def has_environment(self) -> bool:
        return (self.path / ENVIRONMENT).exists()

    def environment(self) -> dict[str, Any]:
        """Where and with what the run was started."""
        found: dict[str, Any] = json.loads((self.path / ENVIRONMENT).read_text())
        return found

    def save_environment(self, execution: Execution, device: torch.device, precision: str) -> None:
        self.write(ENVIRONMENT, json.dumps(environment(execution, device, precision)).encode())

    def log(self, text: str) -> None:
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, seed: int, state: dict[str, torch.Tensor]) -> None:
        """``state`` is what a run goes on from."""
        self.seed(seed)
        self.write(f"seed-{seed}/{CHECKPOINT}", _pieces(state))

    def save_model(self, seed: int, module: nn.Module) -> None:
        state = {n: v.detach().cpu().contiguous() for n, v in module.state_dict().items()}
        self.write(f"seed-{seed}/{MODEL}", save(state))

    def load(self, seed: int) -> dict[str, torch.Tensor] | None:
        """The last state that was saved, or None if there is none.

        Raises :class:`DataError` for a file that is damaged or of a format that a newer kedge
        writes.
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
                    f"formats up to {FORMAT}. Go on with the kedge that wrote it, or delete it to "
                    f"run seed {seed} from its beginning"
                )
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} is damaged ({error}); delete it to run seed {seed} from its beginning"
            ) from None

    def record(self, seed: int, line: dict[str, Any]) -> None:
        self.append(f"seed-{seed}/{METRICS}", json.dumps(line))

    def records(self, seed: int, rounds: int) -> list[dict[str, Any]]:
        """The metrics of the first ``rounds`` rounds; what goes beyond is dropped from the file."""
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


def _pieces(arrays: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file, array by array: clients' state may be larger than the free memory."""
    header: dict[str, Any] = {"__metadata__": {FORMAT_KEY: str(FORMAT)}}
    end = 0
    for name, value in arrays.items():
        start, end = end, end + value.numel() * value.element_size()
        kind = _KINDS[value.dtype]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in arrays.values():
        flat = value.detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data


def environment(execution: Execution, device: torch.device, precision: str) -> dict[str, Any]:
    """Where and with what a run was made."""
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
    """The settings in a run's folder. A name that only a loaded file knew is said to be one."""
    try:
        return load_config(path / "config.toml")
    except KedgeError as error:
        made = path / "environment.json"
        before = json.loads(made.read_text()).get("loaded", []) if made.is_file() else []
        missing = [file["path"] for file in before if Path(file["path"]) not in files]
        if not missing:
            raise
        options = " ".join(f"--load {file}" for file in missing)
        raise KedgeError(f"{error}\nThis run was made with a file of its own: {options}") from None


def new_path(config: Config, root: str | Path = "runs") -> Path:
    """A free name for a run, from its data and method."""
    words = f"{Path(config.data.rstrip('/')).name}-{config.method}"
    slug = "".join(c if c.isalnum() else "-" for c in words.lower())
    slug = "-".join(piece for piece in slug.split("-") if piece)[:60]
    number = 1
    while (Path(root) / f"{slug}-{number}").exists():
        number += 1
    return Path(root) / f"{slug}-{number}"
