"""The command line in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kedge.cli import app as cli
from kedge.cli import main
from kedge.core.part import parts
from kedge.data.partition import partitions
from kedge.loading import files
from kedge.models import models


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def kedge_command(*args: str, cwd: Path | None = None) -> Done:
    """The command in this process: what it prints, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(cli.console, "_width", 120)
        patch.setattr(sys, "argv", ["kedge", *args])
        if cwd is not None:
            patch.chdir(cwd)
        known = [(registry, set(registry)) for registry in (parts, models, partitions)]
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        finally:
            for registry, before in known:
                for name in set(registry) - before:  # a user's file registered it
                    registry.remove(name)
            files.clear()
    return Done(code, out.getvalue(), err.getvalue())
