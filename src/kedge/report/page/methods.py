"""The methods of a report: their parts, equations and papers, and what they send."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from html import escape, unescape
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert_to_element

from kedge.core.method import FedAvg, parse
from kedge.core.part import Part
from kedge.errors import KedgeError
from kedge.report import units
from kedge.report.mathtext import plain_math, title
from kedge.report.page.standings import Standing

#: Symbols of the formulas of what parts send.
SYMBOLS = (
    "P: parameters that travel, W and B: all parameters and buffers, H: those of the head, E: the "
    "part's own, F: features, C: outputs, X: inputs, N: clients, R: rows of a batch"
)

#: What an element of a formula may say: how it looks, never where it leads.
_ATTRIBUTES = {"display", "accent", "fence", "form", "largeop", "lspace", "rspace", "stretchy"}
_ATTRIBUTES |= {"linethickness", "mathvariant", "maxsize", "minsize", "movablelimits", "width"}


class UnknownFormula(ValueError):
    """A formula with something that cannot be written as MathML."""


def parts_of(methods: Sequence[str]) -> list[dict[str, Any]]:
    """The parts of some methods, each once: what it does, its docstring as HTML."""
    classes: dict[str, type[Part]] = {}
    unknown: list[str] = []
    for method in methods:
        try:
            own = parse(method).parts
        except KedgeError:  # a part of a file that is not loaded here
            unknown.append(method)
            continue
        for part in own:
            classes.setdefault(part.name, type(part))
        if not own:
            classes.setdefault("fedavg", FedAvg)
    found = [
        {"name": name, "title": title(cls), "html": html_doc(_body(inspect.getdoc(cls) or ""))}
        for name, cls in classes.items()
    ]
    return found + [
        {"name": method, "title": "its parts are not known here", "html": ""} for method in unknown
    ]


def _body(doc: str) -> str:
    """A docstring without its first paragraph, the title."""
    return doc.partition("\n\n")[2] or doc


def sends(found: Sequence[Standing]) -> list[dict[str, Any]]:
    """What each method sends: the declared formulas of its parts, and the bytes of a round."""
    rows, base = [], None
    seen: set[tuple[str, float, float]] = set()
    for s in found:
        if s.source.yardstick:
            continue
        rounds = max(1, round(sum(len(seed.records) for seed in s.seeds) / len(s.seeds)))
        up, down = s.mb_up / rounds, s.mb_down / rounds
        base = base or (up + down)
        ratio = (up + down) / base if base else None
        key = (s.source.method.split("(")[0], round(up, 9), round(down, 9))
        if s.source.values and key in seen:  # settings of a sweep that send the same
            continue
        seen.add(key)
        rows.append(
            {
                "method": s.source.method if s.source.values else s.source.name,
                "up": units.size(1e6 * up),
                "down": units.size(1e6 * down),
                "ratio": "" if ratio is None else f"{units.digits(ratio)}×",
                "up_mb": up,
                "down_mb": down,
                **_declared(s.source.method),
            }
        )
    return rows


def _declared(method: str) -> dict[str, Any]:
    try:
        parts = parse(method).parts
    except KedgeError:
        return {"extra_up": "unknown", "extra_down": "unknown", "keeps": "unknown", "sums": None}
    return {
        "extra_up": _formula([(p.name, p.uploads) for p in parts]),
        "extra_down": _formula([(p.name, p.sends) for p in parts]),
        "keeps": _formula([(p.name, p.keeps) for p in parts]),
        "sums": not any(p.needs_clients for p in parts),
    }


def _formula(pairs: Sequence[tuple[str, str]]) -> str:
    some = [(name, text) for name, text in pairs if text != "0"]
    if not some:
        return "nothing"
    if len(some) == 1:
        return some[0][1]
    return ", ".join(f"{name}: {text}" for name, text in some)


def html_doc(doc: str) -> str:
    """A docstring as HTML: paragraphs, formulas as MathML, code and emphasis."""
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    return "".join(f"<p>{_inline(p)}</p>" for p in paragraphs if p)


def _inline(text: str) -> str:
    pieces = re.split(r"(:math:`[^`]*`|``[^`]*``)", text)
    return "".join(_piece(piece) for piece in pieces)


def _piece(text: str) -> str:
    if text.startswith(":math:`"):
        tex = text[len(":math:`") : -1]
        try:
            return mathml(tex)
        except UnknownFormula:
            return f'<span class="formula">{escape(_plain(tex))}</span>'
    if text.startswith("``"):
        return f"<code>{escape(text.strip('`'))}</code>"
    linked = re.sub(
        r"arXiv:(\d{4}\.\d{4,5})",
        r'<a href="https://arxiv.org/abs/\1" rel="noreferrer">arXiv:\1</a>',
        escape(text, quote=False),
    )
    return re.sub(r"\*(\w[\w /]*)\*", r"<em>\1</em>", linked)


def mathml(tex: str) -> str:
    r"""A LaTeX formula as a MathML element, which browsers draw; it is safe to write into a page.

    Raises:
        UnknownFormula: the formula has a command that is not known, or a brace that is not closed.

    >>> mathml(r"w^2")
    '<math display="inline"><mrow><msup><mi>w</mi><mn>2</mn></msup></mrow></math>'
    """
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


def _plain(tex: str) -> str:
    try:
        return plain_math(tex)
    except (ValueError, IndexError):
        return tex
