"""Scalars for TensorBoard: ``RUN/log-tensorboard/seed-N``, one folder per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedge.loggers.protocol import numbers, own_folder
from kedge.runs.result import Result
from kedge.settings import Config

FLUSH_S = 5  # a page of TensorBoard is at most so late


class TensorBoard:
    """Writes event files. A resumed run gets a further one, from the first missing round on."""

    def __init__(self) -> None:
        self.writers: dict[int, Any] = {}

    def start(self, config: Config, folder: Path | None) -> None:
        """Make the folder."""
        self.folder, self.config = own_folder(folder, "tensorboard"), config

    def logged(self, seed: int) -> int:
        """The last round in the event files of a seed."""
        path = self.folder / f"seed-{seed}"
        if not path.is_dir():
            return 0
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        if "train_loss" not in events.Tags()["scalars"]:
            return 0
        return max((event.step for event in events.Scalars("train_loss")), default=0)

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Write the numbers of a round, as one event: a file that ends early has whole rounds."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if seed not in self.writers:
            from torch.utils.tensorboard import FileWriter
            from torch.utils.tensorboard.summary import text

            self.writers[seed] = FileWriter(str(self.folder / f"seed-{seed}"), flush_secs=FLUSH_S)
            if record["round"] == 1:
                lines = "".join(f"    {line}\n" for line in self.config.to_toml().splitlines())
                self.writers[seed].add_summary(text("settings", lines), 0)
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()
        ]
        self.writers[seed].add_summary(Summary(value=values), record["round"])

    def end(self, result: Result | None) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()
        self.writers = {}
