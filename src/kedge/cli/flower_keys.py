"""``kedge flower keys``: the authority, the server's certificate, a key per node."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import console, dim
from kedge.errors import KedgeError

app = typer.Typer(
    help="Keys of a federation on many machines: its authority, its server, its nodes.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FOLDER = Annotated[Path, typer.Option(help="folder of the authority")]
DAYS = Annotated[int, typer.Option(help="how long the certificate is valid", min=1, max=36500)]
SERVER_DAYS = 825


@app.callback()
def _needs_cryptography() -> None:
    """Keys of a federation on many machines: its authority, its server, its nodes."""
    if importlib.util.find_spec("cryptography") is None:
        from kedge.local.federation import INSTALL

        raise KedgeError(INSTALL)


@app.command()
def authority(
    *,
    folder: FOLDER = Path(),
    name: Annotated[str, typer.Option(help="name of the federation")] = "kedge federation",
    days: DAYS = 3650,
) -> None:
    """Make the authority that signs servers, on a machine that is neither server nor node.

    kedge flower keys authority --name "our federation"
    """
    from kedge.local.keys import fingerprint, make_authority

    certificate = make_authority(folder, name, days)
    _written(folder / "ca.key", "signs servers; it stays here, readable by you alone")
    _written(certificate, "goes to the server and to every node")
    dim(f"fingerprint of {certificate}: {fingerprint(certificate)}")
    dim("next: kedge flower keys server server.example.org")


@app.command()
def server(
    hosts: Annotated[
        list[str], typer.Argument(help="names and addresses by which nodes reach the server")
    ],
    *,
    folder: FOLDER = Path(),
    days: DAYS = SERVER_DAYS,
    renew: Annotated[
        bool, typer.Option("--renew", help="sign a new certificate for the key that is there")
    ] = False,
) -> None:
    """Make the server's key and certificate, signed by the authority in the same folder.

    Besides HOSTS, the certificate is for localhost and 127.0.0.1: for a filter and for operators on
    the server itself.

    kedge flower keys server server.example.org
    """
    from kedge.local.keys import LOOPBACK, make_server

    names = list(dict.fromkeys([*hosts, *LOOPBACK]))
    certificate, key = make_server(folder, names, days, renew)
    _written(certificate, f"is valid for {days} days, for {', '.join(names)}")
    if renew:
        dim("copy it to the server, and restart what serves it")
    else:
        _written(key, "goes to the server, readable by the SuperLink alone")


@app.command()
def node(
    path: Annotated[Path, typer.Argument(help="file for the private key, such as node.key")],
    *,
    name: Annotated[str, typer.Option(help="name of the member, in the public key")] = "",
) -> None:
    """Make the key of a node, on the node's own machine; only the public half leaves it.

    kedge flower keys node /etc/kedge/node.key --name north
    """
    from kedge.local.keys import fingerprint, make_node_key

    public = make_node_key(path, name)
    _written(path, "stays here, readable by its owner alone")
    _written(public, "goes to the server: flwr supernode register FILE")
    dim(f"fingerprint of {public}: {fingerprint(public)}")


def _written(path: Path, what: str) -> None:
    console.print(f"{path}  {what}", highlight=False, soft_wrap=True)
