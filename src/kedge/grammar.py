"""The grammar of kedge: ``name:preset(value, field=value)+name+...``.

Methods, models and partitions are all written in it. The same string is accepted on the command
line, in TOML and in Python. A value is a number, ``true``/``false``, a quoted string, a bare word
(``cut=stage2``) or a bracketed list of values. In a quoted string its own quote is written twice.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kedge.errors import GrammarError


class Call(NamedTuple):
    """A parsed ``name:preset(args, key=value)``."""

    name: str
    preset: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)(?![\w.]))
    | (?P<string>"(?:[^"]|"")*"|'(?:[^']|'')*')
    | (?P<word>[A-Za-z_][\w.\-]*(?:/[\w.\-]+)*)
    | (?P<sign>[()\[\],=:+])
    )""",
    re.VERBOSE,
)
_CONSTANTS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False}
_CONSTANTS |= {"nan": float("nan")}
MAX_DEPTH = 100  # of nested lists
MAX_DIGITS = 1000  # of a whole number; Python itself reads 4300


def parse_calls(text: str) -> list[Call]:
    """Parse a sum of calls.

    Raises:
        GrammarError: the text does not follow the grammar; the message names the position.

    >>> parse_calls("moon:fedcog+fedprox(mu=0.1)")[1]
    Call(name='fedprox', preset=None, args=(), kwargs={'mu': 0.1})
    """
    return _Parser(text).parse_sum()


def parse_call(text: str) -> Call:
    """Parse exactly one call.

    Raises:
        GrammarError: the text does not follow the grammar, or has several calls.

    >>> parse_call("dirichlet(0.1, clients=20)")
    Call(name='dirichlet', preset=None, args=(0.1,), kwargs={'clients': 20})
    """
    calls = parse_calls(text)
    if len(calls) != 1:
        raise GrammarError(f"{text!r}: expected one name, found {len(calls)} joined by '+'")
    return calls[0]


def write_value(value: Any) -> str:
    """Write a value so that parsing it gives the value back; None is the word ``none``.

    >>> write_value((1, "stage2", True))
    '[1, stage2, true]'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_][\w.\-]*", value) and value not in (*_CONSTANTS, "inf")
        quote = "'" if '"' in value else '"'
        return value if plain else quote + value.replace(quote, 2 * quote) + quote
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(write_value(v) for v in value) + "]"
    return repr(value.item() if hasattr(value, "item") else value)


class _Parser:
    """Recursive descent over the tokens of one string."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise GrammarError(
                f"expected a string such as 'scaffold+fedprox(mu=0.1)', not {text!r}"
            )
        self.text, self.at, self.kind, self.value = text, 0, "", ""
        self._advance()

    def _advance(self) -> None:
        self.start = self.at
        rest = self.text[self.at :]
        if not rest.strip():
            self.kind, self.value, self.at = "end", "", len(self.text)
            return
        m = _TOKEN.match(self.text, self.at)
        if m is None:
            self.start += len(rest) - len(rest.lstrip())
            self.value = self.text[self.start]
            raise self._error(f"unexpected {self.value!r}")
        self.kind = m.lastgroup or ""
        self.value, self.start, self.at = m.group(self.kind), m.start(self.kind), m.end()

    def _error(self, what: str, at: int | None = None) -> GrammarError:
        at = self.start if at is None else at
        return GrammarError(
            f"{what} at position {at + 1} of {self.text!r}. "
            "Write for example: scaffold+fedprox(mu=0.1)"
        )

    def _found(self) -> str:
        return repr(self.value) if self.value else "the end"

    def _take(self, sign: str) -> bool:
        if self.kind == "sign" and self.value == sign:
            self._advance()
            return True
        return False

    def _word(self, what: str) -> str:
        if self.kind != "word":
            raise self._error(f"expected {what}, found {self._found()}")
        word = self.value
        self._advance()
        return word

    def parse_sum(self) -> list[Call]:
        calls = [self.parse_call()]
        while self._take("+"):
            calls.append(self.parse_call())
        if self.kind != "end":
            raise self._error(f"expected '+' or the end, found {self.value!r}")
        return calls

    def parse_call(self) -> Call:
        name = self._word("a name")
        preset = self._word("a preset") if self._take(":") else None
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if self._take("("):
            while not self._take(")"):
                is_word, at = self.kind == "word", self.start
                value = self.parse_value()
                if is_word and self._take("="):
                    if value in kwargs:
                        raise self._error(f"{value!r} is given twice", at)
                    kwargs[str(value)] = self.parse_value()
                elif kwargs:
                    raise self._error(f"{value!r} has no name but follows a named value", at)
                else:
                    args.append(value)
                if not self._take(",") and not (self.kind == "sign" and self.value == ")"):
                    raise self._error(f"expected ',' or ')', found {self._found()}")
        return Call(name, preset, tuple(args), kwargs)

    def parse_value(self, depth: int = 0) -> Any:
        kind, value = self.kind, self.value
        if kind == "number":
            is_whole = re.fullmatch(r"[+-]?\d+", value)
            if is_whole and len(value) > MAX_DIGITS:
                raise self._error(f"a number of {len(value)} digits is too long")
            self._advance()
            return int(value) if is_whole else float(value)
        if kind == "string":
            self._advance()
            return value[1:-1].replace(2 * value[0], value[0])
        if kind == "word":
            self._advance()
            is_key = self.kind == "sign" and self.value == "="
            return value if is_key else _CONSTANTS.get(value, value)
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} nested lists")
        if self._take("["):
            items = []
            while not self._take("]"):
                items.append(self.parse_value(depth + 1))
                if not self._take(",") and not (self.kind == "sign" and self.value == "]"):
                    raise self._error(f"expected ',' or ']', found {self._found()}")
            return tuple(items)
        raise self._error(f"expected a value, found {self._found()}")
