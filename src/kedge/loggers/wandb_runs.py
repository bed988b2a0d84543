"""Runs in Weights & Biases, one per seed, grouped by the run.

They are offline in ``RUN/log-wandb`` unless a key is configured or ``WANDB_MODE`` says otherwise;
``wandb sync RUN/log-wandb/wandb/offline-run-*`` uploads them. A resumed run adds a further folder
with the same identifier, from the first round that is missing.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kedge.files import read_json, write_file
from kedge.loggers.protocol import numbers, own_folder, summary
from kedge.runs.result import Result
from kedge.settings import Config

PROJECT = "kedge"
RUNS = "runs.json"  # the identifier of each seed


class WandB:
    """Logs the numbers of each round; the step is the round."""

    def __init__(self) -> None:
        self.runs: dict[int, Any] = {}

    def start(self, config: Config, folder: Path | None) -> None:
        """Find the identifiers of an earlier start."""
        self.folder, self.config = own_folder(folder, "wandb"), config
        known = self.folder / RUNS
        found = read_json(known) if known.exists() else {}
        self.ids: dict[int, str] = {int(seed): name for seed, name in found.items()}

    def logged(self, seed: int) -> int:
        """The last round of a seed, in the files here or on the server."""
        if seed not in self.ids:
            return 0
        files = self.place.glob(f"wandb/*/run-{self.ids[seed]}.wandb")
        here = max((step for file in files for step in steps_of(file)), default=0)
        return max(here, int(self._run(seed).starting_step) - 1) if not self.is_offline else here

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Log the numbers of a round."""
        self._run(seed).log({"round": record["round"]} | numbers(record), step=record["round"])

    def end(self, result: Result | None) -> None:
        """Finish the runs; one that was interrupted is marked as failed."""
        for run in self.runs.values():
            if result is not None:
                run.summary.update(summary(result))
            run.finish(exit_code=0 if result is not None else 1)
        self.runs = {}

    @property
    def place(self) -> Path:
        """The folder of W&B's files."""
        return Path(os.environ.get("WANDB_DIR") or self.folder)

    @property
    def is_offline(self) -> bool:
        """Whether nothing is sent: the user's word, otherwise for want of a key."""
        mode = os.environ.get("WANDB_MODE")
        if mode:
            return mode != "online"
        return not (os.environ.get("WANDB_API_KEY") or _has_login())

    def _run(self, seed: int) -> Any:
        if seed not in self.runs:
            import wandb

            if seed not in self.ids:
                self.ids[seed] = secrets.token_hex(4)
                content = json.dumps(self.ids).encode()
                write_file(self.folder / RUNS, content, inside=self.folder.parent)
            name = self.folder.parent.name
            mode: Any = os.environ.get("WANDB_MODE") or ("offline" if self.is_offline else "online")
            self.runs[seed] = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=f"{name} seed {seed}",
                group=name,
                id=self.ids[seed],
                dir=str(self.place),
                mode=mode,
                resume=None if self.is_offline else "allow",
                reinit="create_new",
                config=vars(self.config) | {"seed": seed},
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )
        return self.runs[seed]


def _has_login() -> bool:
    """Whether ``wandb login`` has left a key on this machine."""
    address = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    try:
        return netrc.netrc().authenticators(urlsplit(address).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def steps_of(file: Path) -> list[int]:
    """The steps in a file of W&B, by its own reader; a record that was cut ends it.

    Raises:
        RuntimeError: the file cannot be read.
    """
    from wandb.util import get_core_path

    words = ["leet", "inspect", "-no-observability", "-json", "-run-file", str(file)]
    done = subprocess.run([get_core_path(), *words], capture_output=True, check=False)
    if done.returncode and not done.stdout:
        raise RuntimeError(f"W&B cannot read {file}: {done.stderr.decode(errors='replace')}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]
