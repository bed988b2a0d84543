"""A member's state on disk: one file per run and round, written atomically.

A member keeps the state after the last *accepted* round and the one after its last attempt, which
the server may accept or not. Which one counts is known with the next request, which names the
accepted round: the ledger of the server is committed by it. So a reply that was lost, late or
dropped leaves no trace, and a member that restarts goes on. A request that names an older accepted
round than one before is *stale* (a replay, or a server that went back): it changes nothing, since
obeying it would delete the state that counts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kedge.errors import DataError
from kedge.files import make_folder, write_file
from kedge.session.session import NEVER

STATE = re.compile(r"state-(\d{9})\.safetensors")


class States:
    """The states of one run in a folder.

    Args:
        folder: the folder of the run; it is created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder, private=True)
        for leftover in folder.glob(".*.part"):  # of a process that was killed
            leftover.unlink(missing_ok=True)

    @property
    def rounds(self) -> list[int]:
        """Rounds of which there is a state, in ascending order."""
        found = (STATE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    @property
    def committed(self) -> int:
        """The newest round that the server has named as accepted."""
        path = self.folder / "committed.json"
        try:
            return int(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return NEVER
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None

    def commit(self, accepted: int) -> None:
        """Note that the server has accepted a round; older states are deleted.

        The mark is written before anything is deleted, so a crash in between loses nothing.
        """
        if accepted != self.committed:
            content = json.dumps(accepted).encode()
            write_file(self.folder / "committed.json", content, private=True)
        self._keep(lambda round: round >= accepted)

    def load(self, round: int) -> dict[str, Tensor] | None:
        """The state after a round; None if it is lost, or if its file is damaged."""
        try:
            return load(self._path(round).read_bytes())
        except (OSError, SafetensorError, ValueError):
            return None

    def save(self, round: int, state: dict[str, Tensor], accepted: int) -> None:
        """Write the state after an attempt; of other attempts since ``accepted`` none is kept."""
        arrays = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        write_file(self._path(round), save(arrays), private=True)
        self._keep(lambda other: other in (accepted, round))

    def _keep(self, wanted: Any) -> None:
        for round in self.rounds:
            if not wanted(round):
                self._path(round).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round:09d}.safetensors"
