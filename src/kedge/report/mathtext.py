"""Docstrings as plain text: LaTeX formulas in Unicode, without markup."""

from __future__ import annotations

import inspect
import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

_GREEK = (
    "alpha beta gamma delta epsilon eta theta lambda mu nu pi rho sigma tau phi psi omega Delta"
)
_SYMBOLS = dict(zip(_GREEK.split(), "αβγδεηθλμνπρστφψωΔ", strict=True)) | {
    "leftarrow": "←", "in": "∈", "sum": "Σ", "nabla": "∇", "min": "min", "sim": "~", "log": "log",
    "langle": "⟨", "rangle": "⟩", "|": "‖", "cdot": "·", "sqrt": "√", "ell": "ℓ", "max": "max",
    "neq": "≠", "Sigma": "Σ", "big": "", "Big": "", "left": "", "right": "", ",": " ", "quad": "  ",
    "leq": "≤", "geq": "≥", "times": "×", "log2": "log2", "frac": "",
}  # fmt: skip
_ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "bar": "\u0304"}  # combine with the letter before
_SMALL = str.maketrans("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_RAISED = str.maketrans("0123456789+-=()tkKTin", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵗᵏᴷᵀⁱⁿ")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"


def plain_math(tex: str) -> str:
    r"""LaTeX as Unicode text.

    >>> plain_math(r"\frac{\mu}{2}\|w - w^t\|^2")
    '(μ/2)‖w - wᵗ‖²'
    """
    while (at := tex.rfind(r"\frac")) >= 0:  # innermost first: the last one contains no other
        tex = _fraction(tex, at)
    tex = re.sub(r"\\(hat|tilde|bar) ?\{?(\w)\}?", lambda m: m[2] + _ACCENTS[m[1]], tex)
    tex = re.sub(r"\\([A-Za-z]+|[|,])", lambda m: _SYMBOLS.get(m[1], m[1]), tex)
    tex = re.sub(r"_(?:" + _GROUP + r"|(\S))", lambda m: _script(m, _SMALL, "_"), tex)
    tex = re.sub(r"\^(?:" + _GROUP + r"|(\S))", lambda m: _script(m, _RAISED, "^"), tex)
    return re.sub(r"[ ]+", " ", tex.replace("{", "").replace("}", "")).strip()


def plain_formula(tex: str) -> str:
    r"""The same, or the LaTeX itself if it is none: a docstring may be a stranger's.

    >>> plain_formula(r"\mu"), plain_formula(r"\frac")
    ('μ', '\\frac')
    """
    try:
        return plain_math(tex)
    except (ValueError, IndexError):
        return tex


def _fraction(tex: str, at: int) -> str:
    """Replace the fraction at index ``at`` by one with a slash."""
    top, middle = _argument(tex, at + len(r"\frac"))
    bottom, end = _argument(tex, middle)
    inner = (f"({s})" if re.search(r"[ +]|(?<!^)-", s.strip()) else s for s in (top, bottom))
    return tex[:at] + "(" + "/".join(inner) + ")" + tex[end:]


def _argument(tex: str, at: int) -> tuple[str, int]:
    """The argument at index ``at``, in braces or a single character, and its end."""
    if tex[at] != "{":
        return tex[at], at + 1
    depth = 0
    for i in range(at, len(tex)):
        depth += {"{": 1, "}": -1}.get(tex[i], 0)
        if not depth:
            return tex[at + 1 : i], i + 1
    raise ValueError(f"a brace is not closed in {tex!r}")


def _script(m: re.Match[str], table: dict[int, int], sign: str) -> str:
    text = m[1] if m[1] is not None else m[2]
    if all(ord(c) in table for c in text):
        return text.translate(table)
    return f"{sign}{text}" if len(text) == 1 else f"{sign}({text})"


def plain_doc(doc: str) -> str:
    """A docstring without its markup."""
    doc = re.sub(r":math:`([^`]*)`", lambda m: plain_formula(m[1].replace("\n", " ")), doc)
    doc = re.sub(r"\*(\w[\w /]*)\*", r"\1", doc.replace("``", ""))  # emphasis
    paragraphs = doc.split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


def title(thing: Any) -> str:
    """The first paragraph of a docstring, without its full stop."""
    first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
    return plain_doc(first).rstrip(".")


#: What an element of a formula may say: how it looks, never where it leads.
_ATTRIBUTES = {"display", "accent", "fence", "form", "largeop", "lspace", "rspace", "stretchy"}
_ATTRIBUTES |= {"linethickness", "mathvariant", "maxsize", "minsize", "movablelimits", "width"}


class UnknownFormula(ValueError):
    """A formula with something that cannot be written as MathML."""


def mathml(tex: str) -> str:
    r"""A LaTeX formula as a MathML element, which browsers draw; it is safe to write into a page.

    Raises:
        UnknownFormula: the formula has a command that is not known, or a brace that is not closed.

    >>> mathml(r"w^2")
    '<math display="inline"><mrow><msup><mi>w</mi><mn>2</mn></msup></mrow></math>'
    """
    from latex2mathml.converter import convert_to_element  # only a page of parts needs it

    if len(re.findall(r"(?<!\\){", tex)) != len(re.findall(r"(?<!\\)}", tex)):
        raise UnknownFormula("a brace is not closed, or one too many")
    try:
        formula = convert_to_element(tex, xmlns="")
    except Exception as error:  # the library's errors have no class in common
        raise UnknownFormula(f"{tex}: {type(error).__name__}") from error
    formula.attrib.pop("xmlns")
    for element in formula.iter():
        element.text = unescape(element.text or "")
        if "\\" in element.text or not set(element.attrib) <= _ATTRIBUTES:
            raise UnknownFormula(tex)
        if element.tag == "mi" and not element.text.isalnum():  # a relation, a sign, a prime
            element.tag = "mo"
            element.text = element.text.replace("~", "∼")
    return ElementTree.tostring(formula, encoding="unicode", short_empty_elements=False)
