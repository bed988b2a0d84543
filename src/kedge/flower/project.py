"""Write an app that ``flwr run`` accepts: a pyproject.toml, two short modules, two TOML files.

A bundle of Flower holds Python, TOML, Markdown, YAML and JSON files, but nothing below ``lib`` and
``parts`` and no ``test_*.py``; the names here are outside of these.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kedge._version import __version__
from kedge.errors import KedgeError
from kedge.federation.coordinator.rules import Rules, Scaling, write_rules
from kedge.federation.coordinator.settings import check_config
from kedge.files import make_folder, remove_file, write_file
from kedge.flower.apps import OWN, RULES, RUN_CONFIG, SETTINGS
from kedge.settings import Config

PACKAGE = "kedge_app"

PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A kedge federation: {method}"
license = "Apache-2.0"
dependencies = ["kedge[flower]>={release}"]

[tool.flwr.app]
publisher = "kedge"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# flwr run . NAME --run-config 'out="runs/first" resume=true'
[tool.flwr.app.config]
{config}
"""

SERVER = '''\
"""The server of this federation; its settings are in settings.toml and rules.toml."""

from pathlib import Path

from kedge.flower.apps import server_app

app = server_app(Path(__file__).parent)
'''

CLIENT = '''\
"""The client of this federation: data and policy are those of its node, nothing is set here."""

from pathlib import Path

from kedge.flower.apps import client_app

app = client_app(Path(__file__).parent)
'''

README = """\
# {name}

A federation that trains `{method}` with kedge {release} on Flower.

- `{package}/settings.toml`: the settings of the run, as for `kedge run`
- `{package}/rules.toml`: how long to wait for members, and what replies are dropped

Run it with `flwr run . CONNECTION --run-config 'out="/path/of/the/run"'`, where CONNECTION is a
SuperLink in Flower's configuration. On this machine alone, `kedge flower up` starts a SuperLink and
SuperNodes, and `kedge flower run` does the rest.
"""


def write_app(
    folder: Path,
    config: Config,
    rules: Rules | None = None,
    scaling: Scaling | None = None,
    name: str = "",
    replace: bool = False,
    own: Sequence[str | Path] = (),
) -> Path:
    """Write an app.

    Args:
        folder: the folder of the app.
        config: the settings of the run.
        rules: patience and distrust.
        scaling: mean and standard deviation of inputs; agreed from the members' data for None.
        name: name of the app; that of the folder if empty.
        replace: whether to overwrite an app that is there.
        own: Python files that register parts or models of one's own. Resident nodes do not take
            code from an app, and need the same files: ``kedge flower node --load FILE.py``.

    Returns:
        The folder.

    Raises:
        KedgeError: the settings are not for a federation, or the folder is not empty.
    """
    check_config(config)
    package = folder / PACKAGE
    config_values = RUN_CONFIG | {"app": str(folder.resolve())}
    values = {
        "name": _name(name or folder.resolve().name),
        "method": config.method.replace("\\", "").replace('"', "'"),
        "release": __version__,
        "package": PACKAGE,
        "config": "\n".join(f"{k} = {_toml(v)}" for k, v in config_values.items()),
    }
    files = {
        folder / "pyproject.toml": PYPROJECT.format(**values),
        folder / "README.md": README.format(**values),
        package / "__init__.py": '"""A kedge federation."""\n',
        package / "server.py": SERVER,
        package / "client.py": CLIENT,
        package / SETTINGS: config.to_toml(),
        package / RULES: write_rules(rules or Rules(), scaling),
    }
    for number, file in enumerate(own):
        files[package / f"own_{number}.py"] = Path(file).read_text(encoding="utf-8")
    with new_folder(folder, replace=replace):
        make_folder(package, inside=folder)
        for old in package.glob(OWN):
            remove_file(old, inside=folder)
        for path, text in files.items():
            write_file(path, text.encode(), inside=folder)
    return folder


@contextmanager
def new_folder(
    folder: Path, advice: str = "", *, private: bool = False, replace: bool = False
) -> Iterator[None]:
    """An empty folder to write in; what is written there is removed if the block fails.

    Args:
        folder: the folder.
        advice: how to choose another one.
        private: whether only its owner may read it.
        replace: whether it may have files, which then stay.

    Raises:
        KedgeError: it cannot be made, or it is not empty.
    """
    made = next((p for p in (*reversed(folder.parents), folder) if not p.exists()), None)
    try:
        make_folder(folder, private=private)
        is_empty = replace or not any(folder.iterdir())
    except OSError as error:
        file = next(p for p in (folder, *folder.parents) if p.exists())
        reason = f"{folder} cannot be made: {error.strerror}"
        what = reason if file.is_dir() else f"{file} is a file"
        raise KedgeError(f"{what}; choose another folder{advice}") from None
    if not is_empty:
        raise KedgeError(f"{folder} is not empty; choose another folder{advice}")
    try:
        yield
    except BaseException:
        if not replace:
            shutil.rmtree(made or folder, ignore_errors=True)
            if not made:  # it was there, empty
                make_folder(folder, private=private)
        raise


def _name(text: str) -> str:
    """A name that Flower accepts: at most 32 letters, digits and dashes.

    >>> _name("My federation #1")
    'my-federation-1'
    """
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:32].strip("-")
    return found or "federation"


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, (bool, str)) else str(value)
