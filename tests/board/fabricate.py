"""Many run folders from one: ``python tests/board/fabricate.py RUN FOLDER 300``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

METHODS = ("fedavg", "scaffold", "fedprox(mu=0.1)", "feddyn", "moon")


def fabricate(run: Path, folder: Path, count: int) -> list[Path]:
    """Copies of a run with other methods and ages, without its weights."""
    made = []
    settings = (run / "config.toml").read_text()
    method = next(line for line in settings.splitlines() if line.startswith("method"))
    for i in range(count):
        path = folder / f"digits-{i:03d}"
        shutil.copytree(run, path, ignore=shutil.ignore_patterns("*.safetensors", ".lock"))
        own = f'method = "{METHODS[i % len(METHODS)]}"'
        (path / "config.toml").write_text(settings.replace(method, own))
        old = 1_700_000_000 + 600 * i
        for file in [*path.rglob("*"), path]:
            os.utime(file, (old, old))
        made.append(path)
    os.utime(folder, (1_700_000_000, 1_700_000_000))
    return made


if __name__ == "__main__":
    fabricate(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
