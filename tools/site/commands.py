"""A page for every command, and the page of all settings of a run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from tools.site.markdown import boxed, code, help_text, plain, table
from tools.site.templates import render
from typer.models import ArgumentInfo, OptionInfo

from kedge.cli.app import COMMANDS, function_of
from kedge.cli.options import PANELS, SHORT
from kedge.schema.values import type_name
from kedge.settings import DEFAULTS, FIELDS, HELP, settings


class Parameter(NamedTuple):
    """An argument or an option of a command."""

    name: str
    flags: tuple[str, ...]  # empty for an argument
    value: str  # what is written after the flag; empty for a switch
    default: str
    help: str
    panel: str


class Command(NamedTuple):
    """A command as it is typed: ``run``, ``flower up``."""

    name: str
    panel: str
    help: str
    more: str
    examples: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def usage(self) -> str:
        arguments = [p.name for p in self.parameters if not p.flags]
        words = [
            f"kedge {self.name}",
            *(["[OPTIONS]"] if len(arguments) < len(self.parameters) else []),
        ]
        return " ".join([*words, *arguments])


def commands() -> list[Command]:
    """Every command; those of a group follow one another."""
    found = []
    for name, entry in COMMANDS.items():
        function = function_of(name)
        if isinstance(function, typer.Typer):
            found += _group(name, entry.panel, function)
        else:
            found.append(_command(name, entry.panel, function))
    return found


def _group(name: str, panel: str, group: typer.Typer) -> list[Command]:
    """The commands of a group, then those of groups in it."""
    found = []
    for info in group.registered_commands:
        assert info.callback is not None
        own = info.name or info.callback.__name__.replace("_", "-")
        found.append(_command(f"{name} {own}", panel, info.callback))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        found += _group(f"{name} {inner.name}", panel, inner.typer_instance)
    return found


def _command(name: str, panel: str, function: Callable[..., Any]) -> Command:
    first, *others = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    examples: list[str] = []
    more: list[str] = []
    for paragraph in others:
        lines = paragraph.splitlines()
        if all(line.startswith("kedge ") for line in lines):
            examples += [_example(line) for line in lines]
        else:
            more.append(" ".join(paragraph.split()))
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    rows = tuple(row for p in parameters if (row := _parameter(p)) is not None)
    text = " ".join(first.split())
    return Command(name, panel, text, "\n\n".join(map(plain, more)), tuple(examples), rows)


def _example(line: str) -> str:
    """A line of a docstring; what follows several spaces is a remark."""
    command, _, remark = line.partition("   ")
    return f"{command.strip()}  # {remark.strip()}" if remark.strip() else command.strip()


def _parameter(p: inspect.Parameter) -> Parameter | None:
    annotated = get_origin(p.annotation) is Annotated
    kind, *notes = get_args(p.annotation) if annotated else (p.annotation,)
    info = next((n for n in notes if isinstance(n, (OptionInfo, ArgumentInfo))), None)
    if info is None:
        info = p.default if isinstance(p.default, (OptionInfo, ArgumentInfo)) else OptionInfo()
    if info.hidden or kind is typer.Context:
        return None
    kind = _without_none(kind)
    name = p.name.replace("_", "-")
    flags: tuple[str, ...] = ()
    if isinstance(info, OptionInfo):
        first = [info.default] if isinstance(info.default, str) and annotated else []
        flags = (*first, *(info.param_decls or ())) or (f"--{name}",)  # typer takes one as default
    default = "" if p.default in (None, False, p.empty) or info is p.default else str(p.default)
    several = get_origin(kind) is list
    value = "" if kind is bool else info.metavar or _value(kind)
    if not flags:
        shown = (info.metavar or name.upper()).strip("[]")
        shown += "..." if several else ""
        name = shown if p.default is p.empty else f"[{shown}]"
    text = re.sub(r"\\\[", "[", info.help or "")
    if several and flags and "may be repeated" not in text:
        text += "; may be repeated"
    return Parameter(name, flags, value, default, text, info.rich_help_panel or "Options")


def _without_none(kind: Any) -> Any:
    options = [k for k in get_args(kind) if k is not type(None)]
    is_union = type(None) in get_args(kind)
    return options[0] if is_union and len(options) == 1 else kind


def _value(kind: Any) -> str:
    if get_origin(kind) is list:
        return _value(get_args(kind)[0])
    return {str: "TEXT", int: "INTEGER", float: "NUMBER"}.get(kind, type_name(kind).upper())


def page(command: Command) -> str:
    """The page of a command as Markdown."""
    panels: dict[str, list[Parameter]] = {}
    for p in command.parameters:
        panels.setdefault(p.panel if p.flags else "Arguments", []).append(p)
    panels = {
        "Arguments": panels.pop("Arguments", []),
        "Options": panels.pop("Options", []),
        **panels,
    }
    sections = [(name, _table(rows)) for name, rows in panels.items() if rows]
    return render("command.md.j2", command=command, help=help_text(command.help), sections=sections,
                  has_settings=any(p.panel in PANELS for p in command.parameters))  # fmt: skip


def _table(rows: list[Parameter]) -> str:
    if not rows[0].flags:
        return table(["argument", "meaning"], [[code(p.name), help_text(p.help)] for p in rows])
    cells = []
    for p in rows:
        flags = ", ".join(code(flag) for flag in p.flags)
        text, _, default = p.help.partition(" (default: ")
        default = default[:-1] if default else p.default
        cells.append([flags, code(p.value), code(default), help_text(text)])
    return boxed("options", table(["option", "value", "default", "meaning"], cells))


def index() -> str:
    """The page with all commands."""
    panels: dict[str, list[list[str]]] = {}
    for command in commands():
        link = f"[`kedge {command.name}`]({command.slug}.md)"
        panels.setdefault(command.panel, []).append([link, help_text(command.help)])
    tables = [(panel, table(["command", "what it does"], rows)) for panel, rows in panels.items()]
    return render("commands.md.j2", tables=tables)


def settings_page() -> str:
    """The page with every setting of a run: flag, TOML key, keyword, type, default, range, help."""
    rows = {row.name: row for row in settings().rows()}
    sections = []
    for panel, keys in PANELS.items():
        cells = []
        for key in keys:
            flag = f"--{key.replace('_', '-')}"
            flags = [flag, *([SHORT[key]] if key in SHORT else [])]
            flags = [f"{flag}/--no-{key.replace('_', '-')}"] if FIELDS[key] is bool else flags
            row = rows[key]
            cells.append(
                [f'<span id="setting-{key}"></span>{code(key)}', ", ".join(map(code, flags)),
                 plain(row.type), code(str(DEFAULTS[key])), _unbroken(row.range), plain(HELP[key])]
            )  # fmt: skip
        heads = ["key", "flag", "type", "default", "range", "meaning"]
        sections.append((panel, boxed("options", table(heads, cells))))
    return render("settings.md.j2", sections=sections, total=len(FIELDS))


def _unbroken(text: str) -> str:
    """A short text that stays on one line."""
    return plain(text).replace(" ", "&nbsp;")
