"""Clients' own state between rounds: one row per client, gathered and written back by client id."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kedge.core import tree
from kedge.core.tree import Tree


class Store:
    """Rows of a tree. Gathering copies, so what a round works on is never changed underneath it."""

    def __init__(self, first: Tree, num_clients: int) -> None:
        self.rows = tree.map(lambda x: x.expand(num_clients, *x.shape).clone(), first)

    def gather(self, clients: Sequence[int]) -> Tree:
        return tree.map(lambda x: x[torch.tensor(clients, device=x.device)], self.rows)

    def put(self, clients: Sequence[int], values: Tree) -> None:
        def write(rows: torch.Tensor, new: torch.Tensor) -> None:
            rows[torch.tensor(clients, device=rows.device)] = new

        tree.map(write, self.rows, values)
