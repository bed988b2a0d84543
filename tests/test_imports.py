"""The import contract: packages import inwards only, and modules form no cycle.

Imports inside functions count, too, and between packages those for type checkers as well. The
picture is in docs/architecture.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge

ROOT = Path(kedge.__file__).parent

#: Each package may import those on the lines above it, and itself. Those on one line are
#: independent of each other. The rooms of ``federation`` are packages of their own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "_version"),
    ("grammar", "registry", "files", "csv_text"),
    ("schema", "loading", "limits"),
    ("core",),
    ("parts", "data", "models", "engines", "session"),
    ("sim", "catalogue"),
    ("settings",),
    ("history", "tuning", "federation"),
    ("report", "saved", "federation.member"),
    ("runs", "board"),
    ("diagnostics",),
    ("check", "loggers"),
    ("reproduction", "federation.coordinator"),
    ("flower",),
    ("local",),
    ("api",),
    ("cli",),
)
LEVEL = {package: i for i, layer in enumerate(LAYERS) for package in layer}
TOP = ("__init__", "__main__")  # these offer everything


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["kedge", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


class _Running(ast.NodeTransformer):
    """Leaves out what is for type checkers only."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def imported(path: Path, name: str, types: bool = True) -> Iterator[tuple[str, int]]:
    """The modules of kedge that a file imports, anywhere in it, with the line; with or without the
    imports for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree if types else _Running().visit(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "kedge":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                start = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*start, base] if base else start)
            if base.split(".")[0] == "kedge":
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner if inner in MODULES else base), node.lineno


def package_of(module: str) -> str:
    names = module.split(".")[1:]
    return next((key for key in (".".join(names[:2]), *names[:1]) if key in LEVEL), "__init__")


def edges(types: bool = True) -> Iterator[tuple[str, str, int]]:
    for name, path in MODULES.items():
        for other, line in imported(path, name, types):
            yield name, other, line


def test_every_package_has_its_place() -> None:
    assert {package_of(name) for name in MODULES} - {"__init__"} == set(LEVEL)


def test_packages_import_inwards_only() -> None:
    wrong = []
    for name, other, line in edges():
        here, there = package_of(name), package_of(other)
        if here in TOP or here == there:
            continue
        if there in TOP or LEVEL[there] >= LEVEL[here]:
            wrong.append(f"{MODULES[name].relative_to(ROOT)}:{line} imports {other}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_modules_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, other, _ in edges(types=False):
        # a package's own list of names does not make its modules depend on each other
        inside_its_package = name.startswith(f"{other}.")
        if package_of(name) not in TOP and other != name and not inside_its_package:
            graph[name].add(other)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycle = (*path[path.index(name) :], name)
            pytest.fail("these modules import each other: " + " -> ".join(cycle))
        if name in done:
            return
        for other in sorted(graph[name]):
            visit(other, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_core_is_what_the_papers_say() -> None:
    """No layouts, graphs, compilers, maps, streams or workers in the core's code."""
    banned = ("channels_last", "cuda", "vmap", "compile", "_C", "functorch", "_inductor", "fork")
    found = []
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in banned:
                found.append(f"core/{path.name}:{node.lineno} {name}")
    assert not found, "\n".join(found)


def test_private_interfaces_of_torch_are_in_two_files() -> None:
    """Of torch's modules whose names begin with an underscore."""
    allowed = [ROOT / "engines" / f"torch_{name}.py" for name in ("private", "compiler")]
    found = []
    for path in MODULES.values():
        if path in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            for name in names:
                pieces = name.split(".")
                private = any(p.startswith("_") for p in pieces[1:]) and name != "torch.__version__"
                if pieces[0] == "torch" and private:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not found, "\n" + "\n".join(found)
