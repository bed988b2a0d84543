"""Options that several commands share, and one option for each setting of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_origin

import typer

from kedge.loading import load_file
from kedge.settings import DEFAULTS, FIELDS, HELP

PANELS = {
    "What": (
        "method", "data", "partition", "clients", "split", "validation", "unseen", "augment",
        "angles", "model", "metric", "class_weights",
    ),
    "Rounds": (
        "rounds", "per_round", "sampler", "steps", "epochs", "batch", "replacement", "weighting",
        "patience",
    ),
    "Optimiser": ("optimizer", "lr", "momentum", "nesterov", "weight_decay", "clip", "schedule"),
    "How": (
        "seeds", "engine", "device", "precision", "workers", "threads", "chunk", "compile", "state",
        "batchnorm", "personal", "target", "eval_every",
    ),
}  # fmt: skip
SHORT = {"method": "-m", "data": "-d", "rounds": "-r"}
FILE = Annotated[
    str | None, typer.Argument(help="a TOML file with settings (the long options as keys)")
]
OVERRIDE = Annotated[list[str] | None, typer.Argument(help="settings as key=value")]
OUT = Annotated[str | None, typer.Option("--out", help="folder for the run")]
RESUME = Annotated[bool, typer.Option("--resume", help="continue the run in --out")]
LOAD = Annotated[
    list[str] | None,
    typer.Option(
        "--load",
        metavar="FILE.py",
        help="a file that registers your own parts, models or partitions; may be repeated",
        show_default=False,
    ),
]
LOG = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="NAMES",
        help="also log to csv, tensorboard, mlflow or wandb; several with commas",
        show_default=False,
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="print one JSON object only")]


def load_files(names: list[str] | None) -> None:
    """Load the files that ``--load`` names."""
    for name in names or ():
        load_file(name)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the ``**settings`` of a command by one option per setting of a run."""
    panels = {key: panel for panel, keys in PANELS.items() for key in keys}
    options = []
    for key, hint in FIELDS.items():
        kind: Any = str if get_origin(hint) is tuple else hint
        flags = [f"--{key.replace('_', '-')}", *([SHORT[key]] if key in SHORT else [])]
        if kind is bool:
            flags = [f"{flags[0]}/--no-{key.replace('_', '-')}"]
        text = HELP[key] if kind is bool else f"{HELP[key]} (default: {DEFAULTS[key]})"
        option = typer.Option(
            *flags, help=_plain(text), rich_help_panel=panels[key], show_default=False
        )
        annotation = Annotated[kind | None, option]
        options.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*explicit, *options]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__  # otherwise typer reads the signature of the command itself
    return wrapper


def _plain(text: str) -> str:
    """A text without markup: rich takes ``[chol,visit]`` for a style."""
    return text.replace("[", "\\[")
