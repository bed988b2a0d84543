"""Folders of runs with made-up records: what a report reads, without training."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.settings import Config


def run_folder(
    path: Path,
    method: str = "fedavg",
    level: float = 80.0,
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = 10,
    done: int | None = None,
    classes: Sequence[str] = ("cat", "dog", "eel"),
    clients: Sequence[str] = ("client 0", "client 1"),
    noise: float = 0.5,
    partition: str = "p",
    values: dict[int, float] | None = None,
    held_out: bool = True,
    changes: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run whose accuracy rises to ``level``; ``values`` are the last ones by seed, ``changes`` go
    into every record."""
    config = Config(rounds=rounds, seeds=tuple(seeds), **settings or {})
    path.mkdir(parents=True, exist_ok=True)
    text = config.to_toml().replace('method = "fedavg"', f"method = {json.dumps(method)}")
    (path / "config.toml").write_text(text, encoding="utf-8")
    environment = {"kedge": "0", "device": "cpu", "threads": 1, "how": {"engine": "loop"}}
    (path / "environment.json").write_text(json.dumps(environment | {"data": "d"}))
    for seed in seeds:
        folder = path / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng([seed, *method.encode()])
        last = (values or {}).get(seed, level + float(rng.normal(0, noise)))
        lines = []
        for r in range(1, (rounds if done is None else done) + 1):
            value = last * (1 - math.exp(-4 * r / rounds)) / (1 - math.exp(-4))
            record = {
                "round": r, "train_loss": 2.0 / r, "divergence": 1.0 / r, "mb_up": 0.5,
                "mb_down": 0.25, "accuracy": value, "loss": 1.0 / r, "seconds": 0.01,
                "per_class": [value + c for c in range(len(classes))],
            }  # fmt: skip
            if held_out:
                own = [value + 2.0 * k - len(clients) for k in range(len(clients))]
                record |= {"per_client": own, "client_mean": float(np.mean(own))}
                record |= {"client_worst": min(own), "client_spread": float(np.std(own))}
            lines.append(json.dumps(record | (changes or {})))
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        _write_clients(folder, clients, classes)
        _write_partition(folder, f"{partition}{seed}", len(clients))
    return path


def _write_clients(folder: Path, clients: Sequence[str], classes: Sequence[str]) -> None:
    counts = [[(3 * k + 5 * c) % 11 for c in range(len(classes))] for k in range(len(clients))]
    found = {
        "format": 1, "names": list(clients), "sizes": [sum(row) for row in counts],
        "classes": list(classes), "counts": counts,
    }  # fmt: skip
    (folder / "clients.json").write_text(json.dumps(found))


def _write_partition(folder: Path, name: str, clients: int) -> None:
    """Its hash depends on the name."""
    from kedge.data.partition import Partition

    size = 1 + zlib.crc32(name.encode()) % 97
    rows = [np.arange(size * k, size * (k + 1)) for k in range(clients)]
    Partition(rows, name=name, seed=0, num_samples=size * clients).save(folder / "partition.json")


def comparison(path: Path, runs: dict[str, dict[str, Any]], pooled: bool = False) -> Path:
    """The folder of a comparison; ``runs`` has the arguments of :func:`run_folder` by method."""
    rows = []
    for i, (method, arguments) in enumerate(runs.items()):
        run_folder(path / f"m{i}", method, **arguments)
        rows.append({"folder": f"m{i}", "name": method, "yardstick": "", "settings": {}})
    if pooled:
        first = next(iter(runs.values()))
        run_folder(path / "pooled", "fedavg", **first | {"level": 95.0, "values": None})
        rows.append(
            {"folder": "pooled", "name": "pooled data", "yardstick": "pooled data", "settings": {}}
        )
    (path / "compare.json").write_text(json.dumps(rows))
    return path
