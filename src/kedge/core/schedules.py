"""Learning-rate schedules: a factor of the learning rate for every round.

A schedule is a function of its options that returns a function of the round. A new one is such a
function, registered by name::

    @schedules.register("linear")
    def linear(*, rounds: Annotated[Count, Doc("rounds until the rate is 0")]) -> Factor:
        return lambda t: max(0.0, 1 - t / rounds)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from kedge.registry import Registry
from kedge.schema import Count, Doc, Positive, Range, bind_sum

Factor = Callable[[int], float]  # of the round, from 0

schedules = Registry[Callable[..., Factor]]("schedule", see="kedge list schedules")

Gamma = Annotated[Positive, Doc("factor of one decay")]


@schedules.register("constant")
def constant() -> Factor:
    """The learning rate is constant."""
    return lambda t: 1.0


@schedules.register("exponential")
def exponential(*, gamma: Gamma) -> Factor:
    r"""The rate decays every round: :math:`\gamma^t` in round t, e.g. exponential(0.998)."""
    return lambda t: gamma**t


@schedules.register("step")
def step(*, every: Annotated[Count, Doc("rounds between decays")], gamma: Gamma = 0.1) -> Factor:
    """The rate decays once in so many rounds, e.g. step(every=100)."""
    return lambda t: gamma ** (t // every)


@schedules.register("cosine")
def cosine(
    *,
    rounds: Annotated[Count, Doc("rounds until the floor is reached")],
    floor: Annotated[float, Doc("last factor"), Range(0, 1)] = 0.0,
) -> Factor:
    r"""Half a cosine from 1 to the floor f: :math:`f + (1 - f) (1 + \cos(\pi t / T)) / 2`.

    Loshchilov & Hutter, SGDR, ICLR 2017, arXiv:1608.03983, without restarts.
    """

    def factor(t: int) -> float:
        progress = min(1.0, t / max(1, rounds))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


@schedules.register("warmup")
def warmup(*, rounds: Annotated[Count, Doc("rounds until the full rate is reached")]) -> Factor:
    """The rate grows in equal steps over the first rounds, e.g. warmup(5)+exponential(0.998)."""
    return lambda t: min(1.0, (t + 1) / rounds)


def schedule(text: str) -> Factor:
    """The learning-rate factor of every round.

    ``constant``, ``exponential(0.998)``, ``step(every=100, gamma=0.1)``, ``cosine(rounds=1000)``,
    ``warmup(rounds=5)``, or several joined by ``+``, whose factors multiply.

    Raises:
        UnknownName: there is no such schedule or option.
        FieldError: the value of an option is wrong or missing.

    >>> schedule("warmup(4)+exponential(0.5)")(1)
    0.25
    """
    factors: list[Factor] = [bound() for bound in bind_sum(schedules, text)]
    return lambda t: math.prod(f(t) for f in factors)
