"""Runs in MLflow, one per seed: in ``RUN/log-mlflow``, or where ``MLFLOW_TRACKING_URI`` says.

Without a server MLflow keeps runs in files here. It advises a database instead, which needs the
whole package; its files are as complete, and need a word of consent, which is given here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kedge.files import read_json, write_file
from kedge.loggers.protocol import numbers, own_folder, summary
from kedge.runs.result import Result
from kedge.settings import Config

EXPERIMENT = "kedge"
RUNS = "runs.json"  # the run of each seed
MAX_PARAM = 500  # characters of a setting
LAST_WRITTEN = "train_loss"  # a round that has it is whole


class MLflow:
    """Logs metrics by round and settings as parameters. A resumed run goes on in the same one."""

    def start(self, config: Config, folder: Path | None) -> None:
        """Open the store, and the runs of an earlier start."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self.folder, self.config = own_folder(folder, "mlflow"), config
        place = os.environ.get("MLFLOW_TRACKING_URI") or self.folder.absolute().as_uri()
        self.client = MlflowClient(tracking_uri=place)
        known = self.folder / RUNS
        found = read_json(known) if known.exists() else {}
        self.runs: dict[int, str] = {
            int(seed): run["id"] for seed, run in found.items() if run["place"] == place
        }
        self._place, self._is_open = place, set[int]()

    def logged(self, seed: int) -> int:
        """The last round of a seed in the store."""
        if seed not in self.runs:
            return 0
        history = self.client.get_metric_history(self.runs[seed], LAST_WRITTEN)
        return max((metric.step for metric in history), default=0)

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Log the numbers of a round; the one that `logged` looks for is the last to be written."""
        from mlflow.entities import Metric

        number, now = record["round"], int(time.time() * 1000)
        values = numbers(record)
        for name in self._written(seed, number, values):
            del values[name]
        names = sorted(values, key=LAST_WRITTEN.__eq__)
        metrics = [Metric(name, values[name], now, number) for name in names]
        self.client.log_batch(self._run(seed), metrics=metrics)

    def end(self, result: Result | None) -> None:
        """Set the status of the runs, and the headline as a tag of each."""
        for seed in self._is_open:
            run = self.runs[seed]
            if result is not None:
                for name, value in summary(result).items():
                    self.client.set_tag(run, f"kedge.{name}", f"{value:.6g}")
            self.client.set_terminated(run, "FINISHED" if result is not None else "KILLED")
        self._is_open = set()

    def _written(self, seed: int, number: int, names: Iterable[str]) -> list[str]:
        """The numbers of a round that a run has already: it was killed in the middle of them."""
        if seed not in self.runs or seed in self._is_open:
            return []
        return [
            name
            for name in names
            if any(m.step == number for m in self.client.get_metric_history(self.runs[seed], name))
        ]

    def _run(self, seed: int) -> str:
        """The run of a seed; it is created or opened again."""
        if seed in self._is_open:
            return self.runs[seed]
        self._is_open.add(seed)
        if seed in self.runs:
            self.client.update_run(self.runs[seed], status="RUNNING")
            return self.runs[seed]
        from mlflow.entities import Param

        name = self.folder.parent.name
        tags = {"kedge.run": name, "kedge.seed": str(seed)}
        run = self.client.create_run(
            self._experiment(), run_name=f"{name} seed {seed}", tags=tags
        ).info.run_id
        settings = vars(self.config) | {"seeds": seed}
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in settings.items()]
        self.client.log_batch(run, params=params)
        self.runs[seed] = str(run)
        known = {str(s): {"id": r, "place": self._place} for s, r in self.runs.items()}
        content = json.dumps(known).encode()
        write_file(self.folder / RUNS, content, inside=self.folder.parent)
        return self.runs[seed]

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self.client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self.client.create_experiment(name))
