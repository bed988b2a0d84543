"""``kedge flower``: real federations on Flower, on this machine or many."""

from __future__ import annotations

import importlib.util
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kedge.cli.options import FILE, JSON, LOAD, OUT, OVERRIDE, RESUME, load_files, with_settings
from kedge.cli.report import NO_REPORT, after_training
from kedge.cli.screen import console, dim, errors, print_table
from kedge.cli.train import config_of
from kedge.errors import Interrupted, KedgeError
from kedge.local.federation import HERE as HERE_NAME

if TYPE_CHECKING:
    from kedge.federation.coordinator.rules import Rules
    from kedge.local.federation import FederationSpec
    from kedge.settings import Config


def _group(text: str) -> typer.Typer:
    """A group of commands."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, context_settings=names
    )


app = _group("Real federations on Flower: the same methods, with data that stay where they are.")
keys = _group("Keys of a federation on many machines: its authority, its server, its nodes.")
app.add_typer(keys, name="keys")

AT = Annotated[Path, typer.Option("--at", help="folder of the federation")]
HERE = Path(HERE_NAME)
RULE = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="KEY=VALUE",
        help="a rule of the coordinator, such as deadline_s=60 or minimum=1.0; may be repeated",
        show_default=False,
    ),
]


def _option(at: Path) -> str:
    """How a command names the folder of a federation, with a space before it."""
    return "" if at == HERE else f" --at {shlex.quote(str(at))}"


@app.callback()
def _needs_flower(context: typer.Context) -> None:
    """Real federations on Flower: the same methods, with data that stay where they are."""
    starts = context.invoked_subcommand in ("up", "run", "status")  # programs of Flower
    if starts and importlib.util.find_spec("flwr") is None:
        from kedge.local.federation import INSTALL

        raise KedgeError(INSTALL)


@app.command()
@with_settings
def init(
    folder: Annotated[Path, typer.Argument(help="folder for the app; it must be empty")],
    file: FILE = None,
    override: OVERRIDE = None,
    *,
    rule: RULE = None,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Write an app that `flwr run` accepts.

    kedge flower init hospitals --method scaffold --model "mlp(hidden=[64])" --clients 3
    """
    from kedge.flower.project import write_app

    load_files(load)
    config = _config_of(file, override, settings, resume=False, out=None)
    write_app(folder, config, _rules_of(rule), own=load or [])
    console.print(f"{folder} holds the app; run it with: flwr run {folder}", highlight=False)


@app.command()
def up(
    context: typer.Context,
    *,
    nodes: Annotated[int, typer.Option(help="number of members; 0: one per silo", min=0)] = 0,
    data: Annotated[str, typer.Option("--data", "-d", help="dataset to divide")] = "digits",
    partition: Annotated[str, typer.Option(help="which member gets which samples")] = "auto",
    split: Annotated[str, typer.Option(help="where test data come from")] = "auto",
    seed: Annotated[int, typer.Option(help="seed of the partition", min=0)] = 0,
    resident: Annotated[
        bool,
        typer.Option(
            "--resident/--no-resident",
            help="a process of its own for each member, or a member in every client process",
        ),
    ] = True,
    policy: Annotated[str, typer.Option(help="release policy of all members, a TOML file")] = "",
    threads: Annotated[int, typer.Option(help="threads of torch in each process", min=1)] = 1,
    at: AT = HERE,
    load: LOAD = None,
) -> None:
    """Start a whole federation on this machine: a SuperLink, a SuperNode per member, keys, TLS.

    kedge flower up --nodes 4 --data digits --partition "dirichlet(0.5)"
    kedge flower up                                after `down`, with the same members and runs
    """
    from kedge.local import federation as local
    from kedge.local.federation import FILE, FederationSpec, option

    load_files(load)
    folder = at.resolve()
    if (folder / FILE).exists():
        spec = FederationSpec.load(folder)
        local.check_down(folder)
        _check_same(context, at, spec)
        dim(f"the federation in {at} starts again, with the members that it has")
    else:
        spec = local.create(
            folder, data, partition, nodes, split=split, seed=seed, resident=resident,
            policy=policy, threads=threads, own=load or [],
        )  # fmt: skip
    start = time.perf_counter()
    try:
        spec = local.up(folder, spec)
    except KeyboardInterrupt:
        again = f"kedge flower up{option(folder)}"
        raise Interrupted(f"interrupted; no process runs. Start again with: {again}") from None
    names = ", ".join(node.name for node in spec.nodes)
    console.print(f"{len(spec.nodes)} members are connected: {names}", highlight=False)
    dim(f"ready after {time.perf_counter() - start:.0f} s; SuperLink at 127.0.0.1:{spec.port}")
    dim(f"next: kedge flower run --method scaffold --rounds 5{_option(at)}")


@app.command()
@with_settings
def run(
    file: FILE = None,
    override: OVERRIDE = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    at: AT = HERE,
    rule: RULE = None,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Train with one method on the federation that `up` has started.

    kedge flower run --method scaffold --rounds 5 --out runs/first
    kedge flower run --out runs/first --resume             after a crash or a pause
    """
    from kedge.cli.progress import Watcher
    from kedge.history.folder import new_path
    from kedge.local.federation import FederationSpec
    from kedge.local.runs import follow, submit
    from kedge.runs.checkpoint import TrainingFolder

    load_files(load)
    folder = at.resolve()
    config = _config_of(file, override, settings, resume, out, FederationSpec.load(folder))
    path = Path(out) if out else new_path(config)
    if not resume:
        TrainingFolder.create(
            path, config
        )  # raises an error if it cannot be used; nothing is written
    options = [word for one in rule or () for word in ("--rule", one)]
    options += [word for one in load or () for word in ("--load", one)]
    words = shlex.join(["--out", str(path), "--resume"])
    command = f"kedge flower run {words}{_option(at)} {shlex.join(options)}".rstrip()
    hint = f"Resume with: {command}"
    with Watcher(config.rounds, console=errors) as watcher:
        rules = _rules_of(rule)
        try:
            run = submit(
                folder, config, path, resume=resume, rules=rules, own=load or [], hint=command
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted before the run had started") from None
        watcher.report(f"Flower's run {run.number}; log: {path / 'log.txt'}")
        following = folder, run, hint, watcher.report, lambda s, r: watcher.show(config, s, r)
        try:
            follow(*following)
        except KeyboardInterrupt:
            run.stop()
            watcher.report("stopping after this round; Ctrl-C again: do not wait for that")
            try:
                follow(*following)
            except KeyboardInterrupt:
                raise Interrupted(f"the run stops after its present round. {hint}") from None
    _print_result(path, as_json)
    after_training(path, no_report)


@app.command()
def status(*, at: AT = HERE, as_json: JSON = False) -> None:
    """Show the processes of a federation and its runs."""
    from kedge.local import federation as local
    from kedge.local.federation import SUPERLINK
    from kedge.local.runs import runs

    folder = at.resolve()
    rows = local.status(folder)
    known: list[dict[str, Any]] = []
    trouble = ""
    if any(row["name"] == SUPERLINK and row["running"] for row in rows):
        try:
            known = runs(folder)
        except KedgeError as error:  # it may have just started
            trouble = str(error)
    if as_json:
        typer.echo(json.dumps({"processes": rows, "runs": known}))
        return
    if not local.is_up(folder):
        died = " any more: its supervisor was ended" if rows else ""
        text = f"the federation in {at} does not run{died}; start it: kedge flower up{_option(at)}"
        console.print(text, highlight=False, soft_wrap=True)
        return
    table = Table("process", "state", "pid", "since", "starts", "last exit", "node")
    for row in rows:
        table.add_row(
            row["name"],
            "runs" if row["running"] else "waits to start again",
            str(row["pid"] or ""),
            time.strftime("%H:%M:%S", time.localtime(row["since"])),
            str(row["starts"]),
            "" if row["exit"] is None else str(row["exit"]),
            row.get("node", ""),
        )
    print_table(table)
    for one in known[:10]:
        how = f", {one['end']}" if one.get("end") else ""
        where = f": {one['folder']}" if one.get("folder") else ""
        dim(f"run {one.get('run-id')}, {one.get('status')}{how}{where}")
    if trouble:
        dim(f"its runs are unknown: {trouble}")


@app.command()
def log(
    name: Annotated[
        str, typer.Argument(help="a member, `superlink`, or nothing: the newest run")
    ] = "",
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", help="how many", min=1)] = 50,
    at: AT = HERE,
) -> None:
    """Print the end of a log: of a member and its SuperNode, of the SuperLink, or of a run."""
    from kedge.local.runs import log_lines

    for line in log_lines(at.resolve(), name, lines):
        typer.echo(line)


@app.command()
def down(*, at: AT = HERE) -> None:
    """End a federation and all its processes; data, keys and runs stay."""
    from kedge.local import federation as local

    local.down(at.resolve())
    console.print(f"the federation in {at} has ended", highlight=False)


@app.command()
def node(
    *,
    name: Annotated[str, typer.Option(help="name of the member, unique in its federation")],
    data: Annotated[str, typer.Option("--data", "-d", help="its data, a path with options")],
    folder: Annotated[Path, typer.Option(help="its state and its log; for this member alone")],
    socket: Annotated[Path, typer.Option(help="path of the Unix socket for the client app")],
    policy: Annotated[str, typer.Option(help="its release policy, a TOML file")] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="a user that may connect besides this one; may be repeated"),
    ] = None,
    threads: Annotated[int, typer.Option(help="threads of torch; 0: its own choice", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    load: LOAD = None,
) -> None:
    """Run a resident node: it owns the data, the state and the release policy of a member.

    kedge flower node --name north --data patients.csv --folder /var/lib/kedge --socket
    /run/kedge/north --policy policy.toml --allow flower
    """
    from kedge.flower.agent import run_node

    load_files(load)
    run_node(name, data, folder, socket, policy, allow or [], threads, device, dim)


def _print_result(path: Path, as_json: bool) -> None:
    from kedge.saved.run import load

    run = load(path)
    if as_json:
        typer.echo(json.dumps(run.result))
        return
    console.print(run.summary, highlight=False, soft_wrap=True)
    dim(f"saved in {path}; use the model: kedge predict {shlex.quote(str(path))} FILE")


# -- settings ---------------------------------------------------------------------------------


def _check_same(context: typer.Context, at: Path, spec: FederationSpec) -> None:
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


def _config_of(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
    spec: Any = None,
) -> Config:
    """The settings of a command line, with one seed and the members of a federation."""
    if not resume and settings.get("seeds") is None:
        settings["seeds"] = "0"
    if spec is not None and not resume:
        members = {"data": spec.data, "partition": spec.partition, "split": spec.split}
        for key, value in members.items():
            if settings.get(key) not in (None, value):
                raise KedgeError(f"--{key} is that of the federation: {value}; leave it out")
            settings[key] = value
        settings["clients"] = settings.get("clients") or len(spec.nodes)
    return config_of(file, override, settings, resume, out)


def _rules_of(words: list[str] | None) -> Rules:
    """The rules of a command line."""
    import tomllib

    from kedge.federation.coordinator.rules import make_rules

    try:
        return make_rules(tomllib.loads("\n".join(words or ())))
    except tomllib.TOMLDecodeError:
        raise KedgeError("--rule takes key=value, such as deadline_s=60") from None


# -- keys -------------------------------------------------------------------------------------

FOLDER = Annotated[Path, typer.Option(help="folder of the authority")]
DAYS = Annotated[int, typer.Option(help="how long the certificate is valid", min=1, max=36500)]
SERVER_DAYS = 825


@keys.callback()
def _needs_cryptography() -> None:
    """Keys of a federation on many machines: its authority, its server, its nodes."""
    if importlib.util.find_spec("cryptography") is None:
        from kedge.local.federation import INSTALL

        raise KedgeError(INSTALL)


@keys.command()
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


@keys.command()
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


@keys.command("node")
def node_key(
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
