"""Whether a run in its folder may go on as it is asked to."""

from __future__ import annotations

import shlex
from pathlib import Path

from kedge.errors import KedgeError
from kedge.runs.config import Config

#: Of a run with remote members: their terms and names, and the tokens of their seats.
FEDERATION, SEATS = "federation.json", "seats.json"


def check_settings(path: Path, stored: Config, config: Config) -> None:
    """Raise a KedgeError if settings differ from those of a run, but for more rounds."""
    old, new = vars(stored), vars(config)
    changed = [k for k in old if old[k] != new[k]]
    if changed != ["rounds"]:
        raise KedgeError(
            f"{path} was started with other settings and cannot be resumed with these:\n"
            + "\n".join(f"  {k}: {old[k]!r} -> {new[k]!r}" for k in changed)
            + "\nResume it with the old settings (more rounds are possible), "
            "or start a new run with another --out"
        )
    if config.rounds < stored.rounds:
        raise KedgeError(
            f"{path} was started with {stored.rounds} rounds, and {config.rounds} are fewer; "
            f"resume it without --rounds, or with more than {stored.rounds}"
        )


def check_remote(path: Path, remote: bool | None, has_checkpoint: bool) -> None:
    """Raise a KedgeError for a simulation of a federation's run, which lacks its members' states,
    and for a federation that is to go on with a simulated run; None: either will do."""
    is_remote = (path / FEDERATION).exists()
    again = f"--out {shlex.quote(str(path))} --resume"
    if remote is False and is_remote:
        raise KedgeError(
            f"{path} is a run of a real federation; resume it with: kedge flower run {again}"
        )
    if remote and has_checkpoint and not is_remote:
        raise KedgeError(f"{path} is a simulated run; resume it with: kedge run {again}")
