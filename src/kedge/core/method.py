"""A method is a sum of parts; FedAvg is the empty sum.

``parse("scaffold+fedprox(mu=0.1)")`` and ``SCAFFOLD() + FedProx(mu=0.1)`` are the same method, and
``repr`` writes it back in the grammar, so one string serves Python, the command line, TOML,
reports.
"""

from __future__ import annotations

from typing import ClassVar

from kedge.core.part import Method, Options, Part, parse

__all__ = ["FedAvg", "Method", "parse"]


class FedAvg(Part):
    r"""Average the clients' models, weighted by their samples: the method without parts.

    :math:`w^{t+1} = w^t + \sum_k p_k (w_k - w^t)` with :math:`p_k = n_k / \sum_j n_j`, where
    :math:`w_k` is what client k has after its local steps from :math:`w^t` (algorithm 1).
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017, arXiv:1602.05629.
    """

    # Not registered: it is the empty sum, and this class only describes it.
    side = "both"
    neutral: ClassVar[Options | None] = {}
