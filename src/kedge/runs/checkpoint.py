"""The folder of a run that is trained: checkpoints, and the environment."""

from __future__ import annotations

import json
from typing import Any

import torch

from kedge._version import __version__
from kedge.errors import DataError
from kedge.history.folder import CHECKPOINT, ENVIRONMENT, RunFolder
from kedge.runs.environment import read_environment
from kedge.saved.tensors import open_tensors, safetensors_of

#: Format of checkpoints, in the metadata of the file; a file without a number has format 1.
#: Increase it with every change that an older kedge would misread. Since format 2 a checkpoint is
#: from before the surveys after the last round, and may hold the best weights.
FORMAT, FORMAT_KEY = 2, "kedge.format"


class TrainingFolder(RunFolder):
    """The folder of a run, with its tensors."""

    @property
    def has_environment(self) -> bool:
        return (self.path / ENVIRONMENT).exists()

    def environment(self) -> dict[str, Any]:
        """The environment in which the run was started; a DataError if the file is damaged."""
        return read_environment(self.path / ENVIRONMENT)

    def save_environment(self, environment: dict[str, Any]) -> None:
        self.write(ENVIRONMENT, json.dumps(environment).encode())

    def save(self, seed: int, state: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint: the state of a simulation after a round."""
        self.seed(seed)
        self.write(f"seed-{seed}/{CHECKPOINT}", safetensors_of(state, {FORMAT_KEY: str(FORMAT)}))

    def load(self, seed: int) -> dict[str, torch.Tensor] | None:
        """Read the checkpoint of a seed; None if there is none.

        Raises:
            DataError: the file is damaged, or a newer kedge wrote it in another format.
        """
        path = self.path / f"seed-{seed}" / CHECKPOINT
        if not path.exists():
            return None
        with open_tensors(path, f"delete it to run seed {seed} from the start") as file:
            found = (file.metadata() or {}).get(FORMAT_KEY, "1")
            if found not in map(str, range(1, FORMAT + 1)):
                raise DataError(
                    f"{path} has checkpoint format {found}; kedge {__version__} reads "
                    f"formats up to {FORMAT}. Resume with the kedge that wrote it, or delete it to "
                    f"run seed {seed} from the start"
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def check_checkpoint(self, seed: int) -> None:
        self.load(seed)
