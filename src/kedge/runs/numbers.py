"""Which number of a run counts, seed by seed: one rule for the report and the board.

Seeds that ended count, at their last test; one whose loss was not finite is NaN. Before a seed has
ended, all that have a test count, at the last tested round that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Series(NamedTuple):
    """The headline of a seed."""

    values: Mapping[int, float]  # by tested round, in their order
    ended: bool  # after its last round, or stopped early by validation data
    failed: bool = False  # a loss was not finite

    def at(self, number: int) -> float:
        """The value after a round; a seed that ended before it keeps its last one."""
        if self.failed:
            return math.nan
        return self.values[number] if number in self.values else self.values[max(self.values)]


def counted(seeds: Mapping[int, Series]) -> tuple[dict[int, float], int | None]:
    """The numbers that count, by seed, and the round that they are of; None: after the last test
    of each.

    >>> seeds = {0: Series({1: 3.0, 2: 2.0}, False), 1: Series({1: 2.5}, False)}
    >>> counted(seeds)
    ({0: 3.0, 1: 2.5}, 1)
    >>> counted(seeds | {0: Series({1: 3.0, 2: 2.0}, True)})
    ({0: 2.0}, None)
    """
    ended = {k: s for k, s in seeds.items() if s.failed or (s.ended and s.values)}
    if ended:
        return {k: s.at(max(s.values, default=0)) for k, s in ended.items()}, None
    tested = {k: s for k, s in seeds.items() if s.values}
    at = common_round(tested.values())
    return ({k: s.at(at) for k, s in tested.items()} if at is not None else {}), at


def common_round(series: Iterable[Series]) -> int | None:
    """The last tested round that all seeds have, but for those that failed; None without one."""
    running = [s for s in series if not s.failed]
    shared = {number for s in running for number in s.values}
    for s in running:
        last = max(s.values, default=math.inf)
        shared = {n for n in shared if n in s.values or (s.ended and n > last)}
    return max(shared, default=None)
