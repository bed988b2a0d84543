"""The command ``kedge``: its subcommands, and how errors are printed and logged.

The module of a subcommand is imported when it is called, since most of them need torch:
``kedge --help`` and ``kedge --version`` work without it.
"""

from __future__ import annotations

import errno
import importlib
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from kedge._version import __version__
from kedge.cli.screen import accept_any_text, errors, warn
from kedge.cli.screen import console as console
from kedge.errors import Interrupted, KedgeError
from kedge.files import make_folder, write_file
from kedge.limits import is_out_of_memory, out_of_memory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_CODE = 70  # EX_SOFTWARE: an internal error

app = typer.Typer(
    help="Federated learning on heterogeneous data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Subcommand(NamedTuple):
    """A subcommand: its function, or a group of commands, and its help text, the first paragraph of
    the docstring."""

    function: str  # module:name
    panel: str
    help: str


COMMANDS = {
    "run": Subcommand(
        "kedge.cli.train:run",
        "Run",
        "Train with one method. Works without any argument: digits, 20 clients, 3 seeds.",
    ),
    "compare": Subcommand(
        "kedge.cli.train:compare",
        "Run",
        "Compare methods on the same partitions, cohorts and initial weights.",
    ),
    "sweep": Subcommand(
        "kedge.cli.train:sweep",
        "Run",
        "Run all combinations of some settings; those that differ only in numbers train together.",
    ),
    "demo": Subcommand(
        "kedge.cli.train:demo",
        "Run",
        "Compare a few methods on digits; plot the curves and the partition. No network needed.",
    ),
    "reproduce": Subcommand(
        "kedge.cli.reproduce:reproduce",
        "Run",
        "Run the tables of papers, and print the paper's numbers and ours side by side.",
    ),
    "flower": Subcommand(
        "kedge.cli.flower:app",
        "Run",
        "Real federations on Flower: the same methods, with data that stay where they are.",
    ),
    "predict": Subcommand(
        "kedge.cli.model:predict",
        "Use",
        "Predict from raw data with the model of a run; a CSV file of ids, classes, probabilities.",
    ),
    "evaluate": Subcommand(
        "kedge.cli.model:evaluate",
        "Use",
        "Score the model of a run on labelled data: all metrics, per client and per class.",
    ),
    "export": Subcommand(
        "kedge.cli.model:export",
        "Use",
        "Write the model of a run as a program for other software, with its scaling inside.",
    ),
    "report": Subcommand(
        "kedge.cli.report:report",
        "Look",
        "Write a page about runs: who wins and how sure that is, curves, classes, clients, "
        "settings.",
    ),
    "data": Subcommand(
        "kedge.cli.list:data",
        "Look",
        "List the datasets on this machine, and those that can be added.",
    ),
    "partition": Subcommand(
        "kedge.cli.list:partition",
        "Look",
        "Draw a partition: how many samples of each class each client holds.",
    ),
    "diagnose": Subcommand(
        "kedge.cli.diagnose:diagnose",
        "Look",
        "Measure how unlike clients are, or what training made of it, with a verdict in words.",
    ),
    "list": Subcommand(
        "kedge.cli.list:list_things",
        "Look",
        "List the parts of methods, or the entries of another kind, e.g. models.",
    ),
    "show": Subcommand(
        "kedge.cli.list:show",
        "Look",
        "Show a part, a model, a partition, ...: what it does, its paper, options and ranges.",
    ),
    "board": Subcommand(
        "kedge.cli.board:board",
        "Look",
        "Watch the runs below a folder on a local page: live curves, comparisons, notes, stop.",
    ),
    "check": Subcommand(
        "kedge.cli.check:check",
        "Prove",
        "Check parts against the laws and against identities from their papers. Exit code 1 if one "
        "fails.",
    ),
}
#: Commands of earlier releases, and what does their work.
MOVED = {
    "bench": "is in the repository: python -m bench",
    "conformance": "is in the repository: python -m bench.conformance. The identities of parts are "
    "checked by kedge check",
}


def function_of(name: str) -> Callable[..., None] | typer.Typer:
    """Import the function behind a command, or the commands below it."""
    module, attribute = COMMANDS[name].function.split(":")
    function: Callable[..., None] | typer.Typer = getattr(
        importlib.import_module(module), attribute
    )
    return function


#: Options of tables that look like options of a command.
DATA_OPTIONS = {
    "label": "label=sick",
    "drop": "label=sick, drop=[note,code]",
    "missing": "label=sick, missing=median",
    "id": "label=sick, id=patient",
    "task": "label=dose, task=regression",
}


class LazyCommand(TyperCommand):
    """A line of the help; the subcommand is imported when it is called."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """The context of the imported subcommand, which parses ``args``."""
        assert self.name is not None
        function = function_of(self.name)
        if isinstance(function, typer.Typer):
            group = typer.main.get_command(function)
            return group.make_context(info_name, args, parent, **extra)
        single = typer.Typer(add_completion=False)
        single.command(self.name)(function)
        try:
            return typer.main.get_command(single).make_context(info_name, args, parent, **extra)
        except Exception as error:  # click's NoSuchOption; some releases of typer have a copy of it
            name = str(getattr(error, "option_name", "")).lstrip("-")
            if name in DATA_OPTIONS:
                raise KedgeError(
                    f"{self.name} has no --{name}: it is an option of the data and stands in "
                    f'brackets, as in "hospitals({DATA_OPTIONS[name]})". See: kedge show data:csv'
                ) from None
            raise


def _placeholder() -> None:
    """Never called: see :class:`LazyCommand`."""


for _name, _entry in COMMANDS.items():
    app.command(_name, cls=LazyCommand, help=_entry.help, rich_help_panel=_entry.panel)(
        _placeholder
    )


def _version(requested: bool) -> None:
    if requested:
        console.print(f"kedge {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning on heterogeneous data."""


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    warn(message)


def main(command: Callable[[], Any] = app) -> None:
    """Run a command. User errors are printed in one line, without a traceback.

    An unforeseen error is printed in one line, too, and its traceback is written to a log file. The
    environment variable ``KEDGE_DEBUG=1`` shows tracebacks instead.
    """
    warnings.showwarning = _show_warning
    accept_any_text()
    try:
        if command is app and (moved := MOVED.get("".join(sys.argv[1:2]))):
            raise KedgeError(f"kedge {sys.argv[1]} {moved}")
        command()
    except Interrupted as error:
        errors.print(str(error), highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        errors.print("interrupted; saved files are intact", highlight=False)
        sys.exit(130)
    except BrokenPipeError:  # the reader has closed, as in: kedge list | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except KedgeError as error:
        _print_error(error)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("KEDGE_DEBUG") == "1":
            raise
        try:
            code = _report_unforeseen(error)
        except MemoryError:  # not even enough for a message
            os.write(2, b"error: out of memory; close other programs, or raise the limit\n")
            os._exit(2)
        sys.exit(code)


def _report_unforeseen(error: Exception) -> int:
    """Print an error that no code expected in one line; returns the exit code."""
    known = as_user_error(error)
    if known:  # libraries that were half imported fail again at exit
        sys.excepthook = lambda *_: None
    _print_error(known or sentence(error))
    return 2 if known else EXIT_CODE


def _print_error(error: object) -> None:
    Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)


def as_user_error(error: BaseException) -> KedgeError | None:
    """The error in a sentence if its cause is known: memory or disk space, or a locked file."""
    if is_out_of_memory(error):
        return out_of_memory(error)
    if isinstance(error, OSError) and error.errno in (*DISK_FULL, *NO_ACCESS):
        file = f"{error.filename}" if error.filename else "a file"
        advice = "free some disk space" if error.errno in DISK_FULL else "choose another folder"
        reason = (error.strerror or str(error)).lower()
        return KedgeError(f"{file} cannot be written or opened: {reason}; {advice}")
    return None


def sentence(error: BaseException) -> str:
    """What went wrong in one line, and where the traceback is."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    kind = type(error).__name__ + (f": {first}" if first else "")
    path = write_log(error)
    where = f"The details are in {path}" if path else "KEDGE_DEBUG=1 shows the details"
    return f"an error in kedge that should not happen ({kind}). {where}; please report it"


def write_log(error: BaseException) -> Path | None:
    """Write the traceback to the folder of the run, or of the user; None if neither is writable."""
    lines = traceback.format_exception(error)
    head = [
        f"kedge {__version__}, Python {platform.python_version()}, {platform.platform()}\n",
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(sys.argv)}\n\n",
    ]
    for folder in _folders():
        path = folder / f"kedge-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            make_folder(folder)
            write_file(path, "".join([*head, *lines]).encode(errors="replace"))
        except OSError:
            continue
        return path
    return None


def _folders() -> list[Path]:
    """Where the log may go, the best place first."""
    runs = sys.modules.get("kedge.history.folder")
    opened: list[Path] = [p for p in getattr(runs, "opened", [])[-1:] if p.is_dir()]
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path(os.path.expanduser("~")) / ".local" / "state"
    return [*opened, home / "kedge", Path(tempfile.gettempdir())]
