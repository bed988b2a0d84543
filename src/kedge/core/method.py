"""A method is a sum of parts; FedAvg is the empty sum.

``parse("scaffold+fedprox(mu=0.1)")`` and ``SCAFFOLD() + FedProx(mu=0.1)`` are the same method, and
``repr`` writes it back in the grammar, so one string serves Python, the command line, TOML,
reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kedge.core.part import Part, make_part
from kedge.core.part import parts as registered
from kedge.errors import FieldError, IncompatibleError, TwoAggregators, UnknownName
from kedge.grammar import Call, parse_calls
from kedge.schema import ErrorCollector


class FedAvg(Part):
    r"""Average the clients' models, weighted by their samples: the method without parts.

    :math:`w^{t+1} = w^t + \sum_k p_k (w_k - w^t)` with :math:`p_k = n_k / \sum_j n_j`, where
    :math:`w_k` is what client k has after its local steps from :math:`w^t` (algorithm 1).
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017, arXiv:1602.05629.
    """

    # Not registered: it is the empty sum, and this class only describes it.
    side = "both"
    neutral: ClassVar[dict[str, Any] | None] = {}


@dataclass(frozen=True, repr=False)
class Method:
    """An ordered sum of parts."""

    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        names = [p.name for p in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise IncompatibleError(f"{name} is in the method twice; a part may appear once")
        owners = [p.name for p in self.parts if p.has("combine") or p.has("contribute")]
        if len(owners) > 1:
            raise TwoAggregators(
                f"{' and '.join(owners)} both define how updates are combined; "
                "a method may have one such part"
            )

    def __add__(self, other: Part | Method | str) -> Method:
        return Method(self.parts + parse(other).parts)

    def __repr__(self) -> str:
        return "+".join(str(p) for p in self.parts) or "fedavg"

    __str__ = __repr__


def parse(text: str | Method | Part) -> Method:
    """Read a method.

    >>> parse("scaffold + fedprox(mu=0.5)")
    scaffold+fedprox(mu=0.5)
    >>> parse("fedavg")
    fedavg
    """
    if isinstance(text, Method):
        return text
    if isinstance(text, Part):
        return Method((text,))
    errors, found = ErrorCollector(), []
    for call in parse_calls(text):
        with errors.collect():
            if call.name == "fedavg":
                _check_fedavg(call)
            elif call.name not in registered:
                raise UnknownName("part", call.name, ["fedavg", *registered], see="kedge list")
            else:
                found.append(make_part(*call))
    errors.raise_all()
    return Method(tuple(found))


def _check_fedavg(call: Call) -> None:
    if call.args or call.kwargs or call.preset:
        raise FieldError("fedavg has no fields and no presets; write just: fedavg")
