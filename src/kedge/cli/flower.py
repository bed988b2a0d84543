"""``kedge flower``: real federations on Flower, on this machine or many."""

from __future__ import annotations

import importlib.util
import json
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kedge.cli.flower_keys import app as keys
from kedge.cli.flower_settings import check_same, config_of, rules_of
from kedge.cli.options import JSON, LOAD, OUT, RESUME, load_files, with_settings
from kedge.cli.report import NO_REPORT, after_training
from kedge.cli.screen import console, dim, errors, print_table
from kedge.errors import Interrupted, KedgeError
from kedge.local.federation import HERE as HERE_NAME

app = typer.Typer(
    help="Real federations on Flower: the same methods, with data that stay where they are.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
    file: Annotated[
        str | None, typer.Argument(help="a TOML file with settings (the long options as keys)")
    ] = None,
    override: Annotated[list[str] | None, typer.Argument(help="settings as key=value")] = None,
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
    config = config_of(file, override, settings, resume=False, out=None)
    write_app(folder, config, rules_of(rule), own=load or [])
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
        check_same(context, at, spec)
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
    where = "" if at == HERE else f" --at {shlex.quote(str(at))}"
    dim(f"next: kedge flower run --method scaffold --rounds 5{where}")


@app.command()
@with_settings
def run(
    file: Annotated[
        str | None, typer.Argument(help="a TOML file with settings (the long options as keys)")
    ] = None,
    override: Annotated[list[str] | None, typer.Argument(help="settings as key=value")] = None,
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
    config = config_of(file, override, settings, resume, out, FederationSpec.load(folder))
    path = Path(out) if out else new_path(config)
    if not resume:
        TrainingFolder.create(
            path, config
        )  # raises an error if it cannot be used; nothing is written
    command = shlex.join(
        ["kedge", "flower", "run", "--out", str(path), "--resume"]
        + ([] if at == HERE else ["--at", str(at)])
        + [word for one in rule or () for word in ("--rule", one)]
        + [word for one in load or () for word in ("--load", one)]
    )
    hint = f"Resume with: {command}"
    with Watcher(config.rounds, console=errors) as watcher:
        rules = rules_of(rule)
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
        where = "" if at == HERE else f" --at {shlex.quote(str(at))}"
        died = " any more: its supervisor was ended" if rows else ""
        text = f"the federation in {at} does not run{died}; start it: kedge flower up{where}"
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
    from kedge.api import load

    run = load(path)
    if as_json:
        typer.echo(json.dumps(run.result))
        return
    console.print(run.summary, highlight=False, soft_wrap=True)
    dim(f"saved in {path}; use the model: kedge predict {shlex.quote(str(path))} FILE")
