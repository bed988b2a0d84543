"""The settings of a command line of ``kedge flower``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kedge.errors import KedgeError

if TYPE_CHECKING:
    from kedge.federation.coordinator.rules import Rules
    from kedge.local.federation import FederationSpec
    from kedge.settings import Config


def check_same(context: typer.Context, at: Path, spec: FederationSpec) -> None:
    """Raise a KedgeError for options that differ from those of a federation that is there."""
    stored = {
        "nodes": len(spec.nodes), "data": spec.data, "partition": spec.partition,
        "split": spec.split, "seed": spec.seed, "resident": spec.resident,
        "policy": spec.nodes[0].policy, "threads": spec.threads, "load": list(spec.own),
    }  # fmt: skip
    for name, value in stored.items():
        source = context.get_parameter_source(name)
        given = context.params.get(name)
        if name == "policy" and given:
            given = str(Path(given).resolve())
        if name == "load" and given:
            given = [str(Path(file).resolve()) for file in given]
        if source is not None and source.name == "COMMANDLINE" and given != value:
            has = f"{len(spec.nodes)} members with {spec.data}"
            raise KedgeError(
                f"there is a federation in {at} already, of {has}, and --{name} would change it. "
                f"Start it as it is, without options; or make another one: --at FOLDER; or end it "
                f"and delete the folder {at}"
            )


def config_of(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
    spec: Any = None,
) -> Config:
    """The settings of a command line, with one seed and the members of a federation."""
    from kedge.cli.run import _config as read_config

    if not resume and settings.get("seeds") is None:
        settings["seeds"] = "0"
    if spec is not None and not resume:
        members = {"data": spec.data, "partition": spec.partition, "split": spec.split}
        for key, value in members.items():
            if settings.get(key) not in (None, value):
                raise KedgeError(f"--{key} is that of the federation: {value}; leave it out")
            settings[key] = value
        settings["clients"] = settings.get("clients") or len(spec.nodes)
    return read_config(file, override, settings, resume, out)


def rules_of(words: list[str] | None) -> Rules:
    """The rules of a command line."""
    import tomllib

    from kedge.federation.coordinator.rules import make_rules

    try:
        return make_rules(tomllib.loads("\n".join(words or ())))
    except tomllib.TOMLDecodeError:
        raise KedgeError("--rule takes key=value, such as deadline_s=60") from None
