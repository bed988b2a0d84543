r"""LaTeX formulas of docstrings as MathML, which browsers draw without a library.

Only what docstrings use is known: scripts, fractions, roots, accents, brackets, Greek letters and a
few operators. A formula with anything else stays text.
"""

from __future__ import annotations

import re
from html import escape

_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi pi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega"
)
_GREEK = dict(
    zip(
        _NAMES.split(),
        "αβγδϵεζηθκλμνξπρστϕφχψωΓΔΘΛΠΣΦΨΩ",
        strict=True,
    )
)
_OPERATORS = {
    "leftarrow": "←", "rightarrow": "→", "to": "→", "in": "∈", "sum": "∑", "prod": "∏",
    "nabla": "∇", "sim": "∼", "langle": "⟨", "rangle": "⟩", "|": "‖", "cdot": "·", "neq": "≠",
    "ne": "≠", "leq": "≤", "le": "≤", "geq": "≥", "ge": "≥", "times": "×", "propto": "∝",
    "approx": "≈", "dots": "…", "ldots": "…", "cdots": "⋯", "odot": "⊙", "circ": "∘", "pm": "±",
    "cup": "∪", "mid": "∣", "partial": "∂", "infty": "∞", "{": "{", "}": "}", "top": "⊤",
}  # fmt: skip
_LETTERS = {"ell": "ℓ", "hbar": "ℏ"}
_FUNCTIONS = {"log", "exp", "min", "max", "cos", "sin", "arg", "argmin", "argmax", "log2", "det"}
_FUNCTIONS |= {"sup", "inf", "tanh", "sign", "softmax", "Var", "Pr"}
_ACCENTS = {"hat": "^", "tilde": "~", "bar": "¯", "vec": "→", "dot": "˙", "overline": "¯"}
_SKIPPED = {"left", "right", "big", "Big", "bigl", "bigr", "limits", "displaystyle"}
_SPACES = {",": "0.17em", ";": "0.28em", " ": "0.25em", "quad": "1em", "qquad": "2em", "!": "0"}
_TEXTS = {"text", "mathrm", "operatorname", "mathbf", "mathcal", "textrm"}


class Unknown(ValueError):
    """A formula with something that is not known here."""


def mathml(tex: str) -> str:
    r"""A formula as a MathML element; it is safe to write into a page.

    Raises:
        Unknown: the formula has a command that is not known, or a brace that is not closed.

    >>> mathml(r"w^2")
    '<math><mrow><msup><mi>w</mi><mn>2</mn></msup></mrow></math>'
    """
    tokens = re.findall(r"\\[A-Za-z]+2?|\\.|\d+(?:\.\d+)?|[^\s]|\s", tex)
    reader = _Reader([token for token in tokens if not token.isspace()])
    row = reader.row(None)
    return f"<math>{row}</math>"


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def row(self, end: str | None) -> str:
        pieces = []
        while self.at < len(self.tokens) and self.tokens[self.at] != end:
            pieces.append(self._scripted())
        if end is not None:
            if self.at >= len(self.tokens):
                raise Unknown("a brace is not closed")
            self.at += 1
        return f"<mrow>{''.join(pieces)}</mrow>"

    def _scripted(self) -> str:
        base = self._atom()
        low = high = None
        while self.at < len(self.tokens) and self.tokens[self.at] in ("_", "^", "'"):
            sign = self.tokens[self.at]
            self.at += 1
            if sign == "'":
                high = (high or "") + "<mo>′</mo>"
            elif sign == "_":
                low = self._atom()
            else:
                high = self._atom()
        if low and high:
            return f"<msubsup>{base}{low}<mrow>{high}</mrow></msubsup>"
        if low:
            return f"<msub>{base}{low}</msub>"
        return f"<msup>{base}{high}</msup>" if high else base

    def _atom(self) -> str:
        if self.at >= len(self.tokens):
            raise Unknown("a script or an argument is missing")
        token = self.tokens[self.at]
        self.at += 1
        if token == "{":
            return self.row("}")
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{escape(token)}</mi>"
        if token == "}":
            raise Unknown("a brace too many")
        return f"<mo{_flat(token)}>{escape({'-': '−', '*': '∗'}.get(token, token))}</mo>"

    def _command(self, name: str) -> str:
        if name in _GREEK:
            return f"<mi>{_GREEK[name]}</mi>"
        if name in _LETTERS:
            return f"<mi>{_LETTERS[name]}</mi>"
        if name in _OPERATORS:
            return f"<mo{_flat(name)}>{escape(_OPERATORS[name])}</mo>"
        if name in _FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name in _SPACES:
            return f'<mspace width="{_SPACES[name]}"></mspace>'
        if name == "frac":
            return f"<mfrac>{self._atom()}{self._atom()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self._atom()}</msqrt>"
        if name in _ACCENTS:
            return f'<mover accent="true">{self._atom()}<mo>{_ACCENTS[name]}</mo></mover>'
        if name in _SKIPPED:
            return ""
        if name in _TEXTS:
            return f"<mtext>{self._text()}</mtext>"
        raise Unknown(name)

    def _text(self) -> str:
        if self.at >= len(self.tokens) or self.tokens[self.at] != "{":
            raise Unknown("a text needs braces")
        end = self.tokens.index("}", self.at) if "}" in self.tokens[self.at :] else -1
        if end < 0:
            raise Unknown("a brace is not closed")
        words = "".join(self.tokens[self.at + 1 : end])
        self.at = end + 1
        return escape(words)


def _flat(sign: str) -> str:
    """Brackets and bars do not grow with what is between them: pairs are not always known."""
    return (
        ' stretchy="false"'
        if sign in ("(", ")", "[", "]", "|", "langle", "rangle", "{", "}")
        else ""
    )
