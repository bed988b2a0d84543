"""The two apps that Flower runs: a ServerApp around a coordinator, and one generic ClientApp.

The app that `kedge flower init` writes has two modules of two lines each, which call the functions
here; the settings are TOML files beside them. A ClientApp learns from the configuration of its
SuperNode (``--node-config``) what to do:

=============================  ====================================================================
``socket="PATH"``              carry messages to the resident node at this Unix socket
``member="NAME" data="..."     be the member itself, in the client process, which imports torch and
folder="DIR"``                 reads the data for every message; ``policy="FILE"`` may be added
=============================  ====================================================================

With a socket, the client process imports neither torch nor the core of kedge, and it can read
neither data nor state if the resident node has a user of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.files import append_file

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

#: Settings of a run that `flwr run --run-config` can set, with their defaults: the folder of the
#: run, whether to resume it, how many rounds in place of those of the app. `app` is the folder that
#: `kedge flower init` wrote; `kedge flower run` sets the last two.
RUN_CONFIG: dict[str, Any] = {
    "out": "", "resume": False, "rounds": 0, "app": "", "journal": "", "hint": "",
}  # fmt: skip
SETTINGS, RULES, OWN = "settings.toml", "rules.toml", "own_*.py"
NODE_DOWN, MEMBER_FAILED = 101, 102  # codes beside those of Flower
STOP = ".stop"  # after the path of a journal: a file that asks for a stop


# -- the client -----------------------------------------------------------------------------------


def client_app(folder: str | Path) -> ClientApp:
    """The ClientApp of every kedge federation.

    Args:
        folder: of the app, where files with parts of one's own may be. Resident nodes ignore them.
    """
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context.node_config, Path(folder))

    return app


def answer(message: Message, config: Mapping[str, Any], folder: Path) -> Message:
    """Answer a message; whatever happens, no text of an exception leaves.

    Args:
        message: of the server.
        config: that of the node.
        folder: of the app.
    """
    from flwr.app import Error
    from flwr.app import Message as Reply

    from kedge.federation.large_messages import spooled
    from kedge.flower.arrays import MARGIN_S, NoParcel, unwrap, wrap
    from kedge.flower.relay import NodeDown, forward

    deadline = message.metadata.created_at + message.metadata.ttl - MARGIN_S
    try:
        request = unwrap(message)
        if "socket" in config:
            reply = forward(str(config["socket"]), request, deadline)
        else:
            reply = [_member(config, folder).handle(spooled(request))]
        return Reply(wrap(reply), reply_to=message)
    except NodeDown:
        return Reply(Error(NODE_DOWN, "NODE_DOWN"), reply_to=message)
    except NoParcel:
        return Reply(Error(MEMBER_FAILED, "BAD_REQUEST"), reply_to=message)
    except Exception:  # noqa: BLE001  its text stays on this machine
        traceback.print_exc()
        return Reply(Error(MEMBER_FAILED, "FAILED"), reply_to=message)


def _member(config: Mapping[str, Any], folder: Path) -> Any:
    """The member in this process."""
    from kedge.federation.member.member import Member
    from kedge.federation.member.policy import Policy

    _load_own(folder)
    policy = Policy.load(str(config["policy"])) if "policy" in config else None
    return Member(str(config["member"]), str(config["data"]), str(config["folder"]), policy)


def _load_own(folder: Path) -> None:
    """Register the parts and models in files of the app."""
    from kedge.loading import load_file

    for file in sorted(folder.glob(OWN)):
        load_file(str(file))


# -- the server -----------------------------------------------------------------------------------


def server_app(folder: str | Path) -> ServerApp:
    """The ServerApp of a federation.

    Args:
        folder: where ``settings.toml`` (those of a run) and ``rules.toml`` are.
    """
    from flwr.serverapp import ServerApp

    from kedge.errors import KedgeError

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_server(Path(folder), grid, dict(context.run_config))
        except KedgeError:
            sys.tracebacklimit = 0  # Flower logs the exception: the message says it all
            raise

    return app


class Journal:
    """What happens in a run, one JSON object per line, for the command that started it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        if self.path:
            append_file(Path(self.path), json.dumps(values) + "\n")

    def is_stop_requested(self) -> bool:
        """Whether that command asks for a stop, by a file beside the journal."""
        return bool(self.path) and os.path.exists(self.path + STOP)

    def forget_stop(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path + STOP)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal; one that is being written, or that a full disk cut, is left out."""
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def run_server(folder: Path, grid: Grid, settings: dict[str, Any]) -> None:
    """Run a federation to its end.

    Args:
        folder: where the two TOML files are.
        grid: Flower's grid.
        settings: as ``RUN_CONFIG``.

    Raises:
        KedgeError: the run paused or failed; Flower lists it as failed, and it can be resumed.
    """
    from kedge.errors import Interrupted, KedgeError, Paused

    settings = RUN_CONFIG | settings
    journal = Journal(str(settings["journal"]))
    journal.write(pid=os.getpid(), run=str(grid.run.run_id), out=str(settings["out"]))
    try:
        _coordinate(folder, grid, settings, journal)
        journal.write(end="complete")
    except BaseException as error:
        ends = {Paused: "paused", Interrupted: "stopped", KedgeError: "failed"}
        end = next((end for kind, end in ends.items() if isinstance(error, kind)), "crashed")
        crash = f"{type(error).__name__}: {error}"[:1000]
        journal.write(end=end, text=crash if end == "crashed" else str(error))
        raise
    finally:
        journal.forget_stop()


def _coordinate(folder: Path, grid: Grid, settings: dict[str, Any], journal: Journal) -> None:
    from kedge.federation.coordinator.coordinator import Coordinator
    from kedge.federation.coordinator.rules import read_rules
    from kedge.files import finite
    from kedge.flower.grid import GridTransport
    from kedge.settings import load_config

    _load_own(folder)
    flags: dict[str, Any] = {"rounds": settings["rounds"]} if settings["rounds"] else {}
    config = load_config(folder / SETTINGS, flags=flags)
    rules, scaling = read_rules(folder / RULES)
    out = Path(str(settings["out"]) or time.strftime("runs/flower-%Y%m%d-%H%M%S")).resolve()

    def watch(seed: int, record: dict[str, Any]) -> None:
        journal.write(seed=seed, record=finite(record))

    def report(text: str) -> None:
        journal.write(line=text)
        logging.getLogger("flwr").info(text)  # for `flwr log`

    if not journal.path:  # the command that reads the journal says so itself
        report(f"the folder of the run is {out}")
    Coordinator(
        config,
        GridTransport(grid),
        out,
        resume=bool(settings["resume"]),
        rules=rules,
        scaling=scaling,
        watch=watch,
        report=report,
        hint=f"Resume with: {resume_command(settings, out)}",
        stop=journal.is_stop_requested,
    ).run()


def resume_command(settings: Mapping[str, Any], out: Path) -> str:
    """What to type to resume a run: a command of kedge on a federation of `kedge flower up`, else
    one of Flower.

    >>> print(resume_command(RUN_CONFIG, Path("/runs/first")))
    flwr run APP --run-config 'out="/runs/first" resume=true'
    """
    if settings["hint"]:
        return str(settings["hint"])
    values = {"out": str(out), "resume": True}
    if settings["rounds"]:
        values["rounds"] = settings["rounds"]
    app = Path(str(settings["app"]))
    is_here = settings["app"] and (app / "pyproject.toml").exists()
    place, words = shlex.quote(str(app)) if is_here else "APP", shlex.quote(flower_words(values))
    return f"flwr run {place} --run-config {words}"


def flower_words(values: Mapping[str, Any]) -> str:
    """Settings as Flower's options ``--run-config`` and ``--node-config`` take them."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
