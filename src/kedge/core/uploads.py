"""Uploads of clients: each declares the reduction that the server sees."""

from __future__ import annotations

from typing import NamedTuple

from kedge.core.tree import Tree


class Sum(NamedTuple):
    """An upload of which the server sees the sum over the cohort.

    ``return next_client, Sum(change)`` in ``reply``, and ``r.uploads`` is the sum of the changes.
    """

    value: Tree


class Mean(NamedTuple):
    """An upload of which the server sees the mean over the cohort, weighted as the model is."""

    value: Tree


class Stack(NamedTuple):
    """An upload that the server sees client by client; needs ``needs_clients = True``."""

    value: Tree
