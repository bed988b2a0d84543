"""Where a source file can be changed, and to what."""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Edit = tuple[str, ast.AST, str]  # kind, the node that is replaced, its new text

OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.Pow: ("**", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.MatMult: ("@", "*"),
    ast.BitAnd: ("&", "|"), ast.BitXor: ("^", "|"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")), ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)), ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
_PAIRS = [
    ("sum", "mean"), ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"),
    ("clamp_min", "clamp_max"), ("minimum", "maximum"), ("add", "sub"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("sin", "cos"), ("softmax", "log_softmax"), ("exp", "expm1"),
    ("log", "log1p"), ("floor", "ceil"), ("union", "intersection"),
]  # fmt: skip
EXCHANGED = dict(_PAIRS) | {b: a for a, b in _PAIRS}
#: Calls that return something like their input, which takes their place.
UNWRAPPED = {
    "detach", "sqrt", "relu", "abs", "exp", "log", "clamp", "clamp_min", "clamp_max", "normalize",
    "softmax", "log_softmax", "sigmoid", "tanh", "sign", "round", "square", "double", "float",
    "sorted", "reversed", "scale", "clone", "flatten", "fold", "only_public", "only_private",
    "public", "to", "contiguous", "cos", "sin", "unsqueeze", "squeeze", "flip", "cumsum",
    "zeros_like",
}  # fmt: skip
#: Keywords whose loss no CPU test can notice, or that only guard against our own mistakes.
SILENT = {"device", "copy", "strict", "stacklevel", "module", "group", "see"}
#: Calls whose last two arguments may be exchanged without effect.
SYMMETRIC = {"dot", "add", "sq_dist", "minimum", "maximum", "min", "max", "gap", "zip"}
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Dict, ast.List)


@dataclass(frozen=True)
class Mutant:
    """One change of one file. ``old`` and ``new`` are the lines it touches, on one line."""

    file: str
    line: int
    kind: str
    old: str
    new: str
    source: str
    scope: tuple[tuple[int, int], ...]  # ranges of lines, in order of preference: who runs these?
    why: str = ""

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}: {self.old} => {self.new}"


class Source:
    """The text of a file, its tree, and where nodes are in it."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.bytes, self.tree = file, text.encode(), ast.parse(text)
        lines = self.bytes.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {c: p for p in ast.walk(self.tree) for c in ast.iter_child_nodes(p)}

    def span(self, node: Any) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: Any) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def wrapped(self, node: ast.AST) -> str:
        return self.text(node) if isinstance(node, ATOMS) else f"({self.text(node)})"

    def gap(self, left: ast.AST, right: ast.AST) -> str:
        return self.bytes[self.span(left)[1] : self.span(right)[0]].decode()

    def swapped(self, node: ast.AST, left: Any, right: Any, sign: str, other: str) -> str | None:
        """The node's text with the one operator between two of its parts exchanged."""
        gap = self.gap(left, right)
        if "#" in gap or gap.count(sign) != 1:
            return None
        start, end = self.span(node)
        cut, after = self.span(left)[1], self.span(right)[0]
        new = gap.replace(sign, other)
        return self.bytes[start:cut].decode() + new + self.bytes[after:end].decode()

    def mutant(
        self, kind: str, start: int, end: int, text: str, node: Any, why: str = ""
    ) -> Mutant:
        source = self.bytes[:start] + text.encode() + self.bytes[end:]
        first = self.bytes.rfind(b"\n", 0, start) + 1
        last = self.bytes.find(b"\n", end)
        tail = len(self.bytes) - last
        return Mutant(
            self.file,
            self.bytes.count(b"\n", 0, start) + 1,
            kind,
            _squeezed(self.bytes[first:last]),
            _squeezed(source[first : len(source) - tail]),
            source.decode(),
            tuple(self.scopes(node) if node else self.lines_of(start, end)),
            why,
        )

    def lines_of(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The scopes of a stretch of text: those of the statement it begins in."""
        line = self.bytes.count(b"\n", 0, start) + 1
        yield line, self.bytes.count(b"\n", 0, end) + 1
        around = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt)]
        around = [n for n in around if n.lineno <= line <= (n.end_lineno or 0)]
        yield from self.scopes(max(around, key=lambda n: n.lineno))

    def is_run(self, node: ast.AST | None) -> bool:
        """Whether a node is in a function, so that tests run its line."""
        while node is not None and not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            node = self.parents.get(node)
        return node is not None

    def scopes(self, node: Any) -> Iterator[tuple[int, int]]:
        """The node's lines, then its statement's, then those of the class or file around it."""
        if self.is_run(node):
            yield node.lineno, node.end_lineno or 0
            while not isinstance(node, ast.stmt):
                node = self.parents[node]
            yield node.lineno, node.end_lineno or 0
        else:
            while node is not None and not isinstance(node, ast.ClassDef):
                node = self.parents.get(node)
            if node is not None:
                yield node.lineno, node.end_lineno or 0
            yield 1, len(self.starts)


def sample(source: Source, count: int, seed: int) -> list[Mutant]:
    """Up to ``count`` mutants; each time a kind is drawn, then one of that kind."""
    kinds: dict[str, list[Edit]] = {}
    for edit in _edits(source, source.tree):
        kinds.setdefault(edit[0], []).append(edit)
    draw = random.Random(f"{seed}:{source.file}")
    chosen: dict[str, Mutant] = {}  # by its tree: no two are the same
    same = ast.dump(source.tree)
    while kinds and len(chosen) < count:
        kind = draw.choice(sorted(kinds))
        _, node, text = kinds[kind].pop(draw.randrange(len(kinds[kind])))
        if not kinds[kind]:
            del kinds[kind]
        made = source.mutant(kind, *source.span(node), text, node)
        try:
            tree = ast.dump(ast.parse(made.source))
        except SyntaxError:
            continue
        if tree != same:
            chosen.setdefault(tree, made)
    return sorted(chosen.values(), key=lambda m: m.line)


def _edits(s: Source, node: ast.AST) -> Iterator[Edit]:
    """Edits of a node and of those inside it, without text, types and errors."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_type(node.value):
        return
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "tiny":
        return  # settings for tests
    find = FINDERS.get(type(node))
    if find:
        yield from find(s, node)
    if isinstance(node, ast.stmt):
        yield from _statement(s, node)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in SILENT:
                continue
            if isinstance(child, ast.AST):
                yield from _edits(s, child)


def _binary(s: Source, node: ast.BinOp) -> Iterator[Edit]:
    left, right = s.wrapped(node.left), s.wrapped(node.right)
    if isinstance(node.op, ast.BitOr):
        yield "merge", node, left
        yield "merge", node, right
        return
    sign, other = OPERATORS[type(node.op)]
    swapped = s.swapped(node, node.left, node.right, sign, other)
    if swapped is not None:
        yield "operator", node, swapped
    yield "operand", node, left
    if isinstance(node.op, (ast.Add, ast.Mult)):
        yield "operand", node, right
    if isinstance(node.op, (ast.Mult, ast.Div, ast.Sub)):
        yield "sign", node, f"(-({s.text(node)}))"


def _unary(s: Source, node: ast.UnaryOp) -> Iterator[Edit]:
    if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int):
        yield "constant", node, "0"  # an axis or an index
    elif isinstance(node.op, (ast.USub, ast.Not)):
        kind = "sign" if isinstance(node.op, ast.USub) else "condition"
        yield kind, node, s.wrapped(node.operand)


def _compare(s: Source, node: ast.Compare) -> Iterator[Edit]:
    if len(node.ops) == 1:
        sign, others = COMPARISONS[type(node.ops[0])]
        for other in others:
            text = s.swapped(node, node.left, node.comparators[0], sign, other)
            if text is not None:
                yield "comparison", node, text


def _boolean(s: Source, node: ast.BoolOp) -> Iterator[Edit]:
    texts = [s.wrapped(v) for v in node.values]
    word = " or " if isinstance(node.op, ast.And) else " and "
    yield "boolean", node, f"({word.join(texts)})"
    same = " and " if isinstance(node.op, ast.And) else " or "
    for i in range(len(texts)):
        yield "boolean", node, f"({same.join(texts[:i] + texts[i + 1 :])})"


def _constant(s: Source, node: ast.Constant) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node.value, (int, float)):
        kind = "constant"
        if not s.is_run(node):
            kind = "default" if isinstance(s.parents[node], ast.AnnAssign) else "table"
        if node.value:
            yield kind, node, repr(node.value * 2)
        yield kind, node, repr(node.value + 1)


def _choice(s: Source, node: ast.IfExp) -> Iterator[Edit]:
    yield "branch", node, s.wrapped(node.body)
    yield "branch", node, s.wrapped(node.orelse)


def _condition(s: Source, node: ast.If | ast.While) -> Iterator[Edit]:
    yield "condition", node.test, f"not ({s.text(node.test)})"


def _comprehension(s: Source, node: ast.comprehension) -> Iterator[Edit]:
    for test in node.ifs:
        yield "condition", test, "True"


def _call(s: Source, node: ast.Call) -> Iterator[Edit]:
    func, args = node.func, node.args
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    if name in ("isinstance", "cast", "TypeVar", "Annotated", "warn", "getattr", "super"):
        return
    of = func.value if isinstance(func, ast.Attribute) else None
    own_module = isinstance(of, ast.Name) and of.id == "tree"  # it has no mean, no ones_like
    known = hasattr(builtins, EXCHANGED.get(name, "")) if of is None else not own_module
    if name in EXCHANGED and (known or name in ("add", "sub")):
        new = re.sub(rf"{name}$", EXCHANGED[name], s.text(func))
        yield "method", node.func, new
    if name in UNWRAPPED:
        if of is not None and not (isinstance(of, ast.Name) and of.id in OWNERS):
            yield "unwrapped", node, s.wrapped(of)
        elif args:
            yield "unwrapped", node, s.wrapped(args[0])
    plain = not any(isinstance(a, ast.Starred) for a in args)
    texts = [s.text(a) for a in args] + [s.text(k) for k in node.keywords]
    start = s.text(func) + "("
    n = len(args)
    if plain and n > 1 and name not in SYMMETRIC and not _is_text(args[-2], args[-1]):
        turned = [*texts[: n - 2], texts[n - 1], texts[n - 2], *texts[n:]]
        yield "argument", node, start + ", ".join(turned) + ")"
    for i, keyword in enumerate(node.keywords, len(args)):
        if keyword.arg is not None and keyword.arg not in SILENT:
            yield "argument", node, start + ", ".join(texts[:i] + texts[i + 1 :]) + ")"


#: Names whose methods return their argument, changed; others' return their object.
OWNERS = {"tree", "torch", "F", "math", "np", "rng", "ops", "functional", "v", "bound", "r"}


def _return(s: Source, node: ast.Return) -> Iterator[Edit]:
    """An argument of the returned type, or of the name ``params``, takes the value's place."""
    function = s.parents[node]
    while not isinstance(function, ast.FunctionDef):
        function = s.parents[function]
    if node.value is None or function.returns is None:
        return
    kind = ast.unparse(function.returns)
    for arg in [*function.args.args, *function.args.kwonlyargs]:
        if arg.annotation is not None and ast.unparse(arg.annotation) == kind:
            yield "return", node.value, arg.arg
    if isinstance(node.value, ast.Tuple):
        for arg in function.args.args:
            for i, item in enumerate(node.value.elts):
                if arg.annotation is not None and arg.arg == "weights" and i == 0:
                    yield "return", item, "weights"


def _attribute(s: Source, node: ast.Attribute) -> Iterator[Edit]:
    """A field of the class that is a number becomes 1."""
    if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
        return
    owner: Any = node
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = s.parents.get(owner)
    for line in owner.body if owner is not None else ():
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            number = isinstance(line.value, ast.Constant) and type(line.value.value) in (int, float)
            if line.target.id == node.attr and number and isinstance(node.ctx, ast.Load):
                yield "field", node, "1"


def _statement(s: Source, node: ast.stmt) -> Iterator[Edit]:
    """Statements that can go without leaving a name unknown."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        goes = isinstance(target, (ast.Attribute, ast.Subscript)) or (
            isinstance(target, ast.Name) and target.id in names
        )
    elif isinstance(node, ast.Expr):
        goes = not isinstance(node.value, (ast.Constant, ast.Yield))
    elif isinstance(node, ast.If):
        goes = not node.orelse and _leaves(node.body)
    else:
        goes = isinstance(node, ast.AugAssign)
    if goes:
        yield "statement", node, "pass"


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Raise, ast.Return, ast.Continue))


def _is_text(*nodes: ast.AST) -> bool:
    """A string or a function among them: their exchange is a plain error."""
    return any(
        isinstance(n, ast.Lambda) or isinstance(getattr(n, "value", None), str) for n in nodes
    )


def _is_type(value: ast.AST | None) -> bool:
    """``Annotated[...]``, ``dict[str, Any]``, ``TypeVar(...)``: an alias for type checkers."""
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", "") == "TypeVar"
    names = {"Annotated", "dict", "list", "tuple", "set", "Callable", "Literal", "Mapping"}
    return isinstance(value, ast.Subscript) and getattr(value.value, "id", "") in names


def _squeezed(text: bytes) -> str:
    return re.sub(r"\s+", " ", text.decode()).strip()


FINDERS: dict[type[ast.AST], Any] = {
    ast.BinOp: _binary, ast.UnaryOp: _unary, ast.Compare: _compare, ast.BoolOp: _boolean,
    ast.Constant: _constant, ast.IfExp: _choice, ast.If: _condition, ast.While: _condition,
    ast.comprehension: _comprehension, ast.Call: _call, ast.Return: _return,
    ast.Attribute: _attribute,
}  # fmt: skip
