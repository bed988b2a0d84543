"""Samplers: which clients take part in a round.

A sampler is a value; :func:`make_sampler` reads it from text. A draw is a function of a key and the
round, so it is the same for every method and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kedge.core import rng
from kedge.errors import FieldError
from kedge.grammar import parse_call


class Sampler(Protocol):
    """Draws the cohort of a round."""

    def check(self, num_clients: int) -> None:
        """Raise a FieldError if the sampler does not suit the number of clients."""

    def draw(self, key: Tensor, round: int, num_clients: int) -> list[int]:
        """The clients of a round in ascending order; without any, nothing happens in the round."""
        ...

    def size(self, num_clients: int) -> int:
        """The number of clients to expect in a round."""
        ...


@dataclass(frozen=True)
class Uniform:
    """``count`` clients (0: all), drawn without replacement with equal probabilities."""

    count: int = 0

    def check(self, num_clients: int) -> None:
        if not 0 <= self.count <= num_clients:
            raise FieldError(
                f"per_round = {self.count} is not between 1 and the {num_clients} clients"
            )

    def draw(self, key: Tensor, round: int, num_clients: int) -> list[int]:
        if self.size(num_clients) == num_clients:
            return list(range(num_clients))
        return sorted(self._order(key, num_clients)[: self.count].tolist())

    def _order(self, key: Tensor, num_clients: int) -> Tensor:
        """All clients in random order."""
        return rng.permutation(key, num_clients)

    def size(self, num_clients: int) -> int:
        return self.count or num_clients


@dataclass(frozen=True)
class BySize(Uniform):
    """``count`` clients, drawn one after the other with probabilities proportional to their numbers
    of samples. With ``weighting = uniform``, the number of samples counts once, not twice."""

    sizes: tuple[int, ...] = ()

    def _order(self, key: Tensor, num_clients: int) -> Tensor:
        uniform = rng.uniform(key, (num_clients,), torch.float64).clamp_min(2.0**-25)
        times = -uniform.log() / torch.tensor(self.sizes, dtype=torch.float64)
        return torch.argsort(times, stable=True)  # exponential clocks, whose rates are the sizes


@dataclass(frozen=True)
class Poisson(Uniform):
    """Every client by itself, with probability ``count`` / number of clients: ``count`` clients on
    average, sometimes none."""

    def draw(self, key: Tensor, round: int, num_clients: int) -> list[int]:
        rate = self.size(num_clients) / num_clients
        drawn: list[int] = (rng.uniform(key, (num_clients,)) < rate).nonzero()[:, 0].tolist()
        return drawn


@dataclass(frozen=True)
class Fixed:
    """Cohorts as they are listed, from the first again after the last."""

    cohorts: tuple[tuple[int, ...], ...]

    def check(self, num_clients: int) -> None:
        for cohort in self.cohorts:
            if sorted({*cohort} & {*range(num_clients)}) != list(cohort):
                raise FieldError(
                    f"sampler = fixed(...): {list(cohort)} are not different clients in ascending "
                    f"order from 0 to {num_clients - 1}"
                )

    def draw(self, key: Tensor, round: int, num_clients: int) -> list[int]:
        return list(self.cohorts[round % len(self.cohorts)])

    def size(self, num_clients: int) -> int:
        return max(map(len, self.cohorts))


def make_sampler(text: str, count: int = 0, sizes: Sequence[int] = ()) -> Sampler:
    """A sampler from its text: ``uniform``, ``size``, ``poisson`` or ``fixed([[0, 1], [2]])``.

    Args:
        text: the name, with the cohorts of ``fixed``.
        count: clients in a round; 0: all.
        sizes: training samples of every client.

    Raises:
        FieldError: there is no such sampler, or its cohorts are no lists of numbers.

    >>> make_sampler("fixed([[0, 2], [1]])").draw(rng.key(0), 1, 3)
    [1]
    """
    call = parse_call(text)
    simple = {"uniform": Uniform(count), "size": BySize(count, tuple(sizes))}
    simple |= {"poisson": Poisson(count)}
    plain = not (call.kwargs or call.preset)
    if call.name in simple and plain and not call.args:
        return simple[call.name]
    lists = call.args[0] if call.name == "fixed" and plain and len(call.args) == 1 else ()
    valid = isinstance(lists, (list, tuple)) and all(isinstance(c, (list, tuple)) for c in lists)
    if not (lists and valid and all(type(k) is int for cohort in lists for k in cohort)):
        raise FieldError(
            f"sampler = {text!r} is not one of: uniform, size, poisson, fixed([[0, 1], [2, 3]])",
            "sampler",
        )
    return Fixed(tuple(map(tuple, lists)))
