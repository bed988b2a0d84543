"""The rules by which a coordinator waits, repeats, gives up and distrusts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.errors import FieldError

PAUSED = "paused in round"  # how the message of a pause begins


@dataclass(frozen=True)
class Rules:
    """Patience and distrust of a coordinator.

    Attributes:
        deadline_s: how long members may take for one request.
        join_s: how long to wait for members when a run starts.
        minimum: share of the clients of a round whose replies are needed, at least one reply. A
            round with fewer is repeated for those that are missing, and in the end the run pauses.
        attempts: requests to one client in one round, at most.
        wait_s: pause between two attempts, in which members may come back. A SuperLink takes back a
            SuperNode that was killed after about a minute, so with the defaults, and `minimum=1.0`,
            a run survives it without a pause.
        strikes: bad replies after which a member is excluded.
        max_norm: an update whose norm is above ``max_norm * max(1, norm of the global weights)`` is
            bad. Honest updates are far below it, since training moves weights by less than their
            own size. It stops overflow and vandalism, not a careful attack: for that there are
            robust parts, such as ``krum`` and ``trimmedmean``. Where policies of members add much
            noise, it must be larger. What a reply has besides weights is bad if its norm is as
            many times larger than that of most members, or than 1; in proportion more for who has
            more samples.
        max_statistics: the same for running statistics, which may be far from their first values.
        max_number: any other number of a reply is bad if it is larger than this.
        max_ratio: a member is refused if it states more than this many times as many samples as
            most members, or inputs as many times larger; and its reply is bad if its running
            statistics are as many times larger (than theirs, or than 1).
        max_classes: classes or labels of all members together.
        max_columns: columns of a table of all members together, one-hot ones counted singly.
        max_variety: a member is refused if it has more than this many times as many classes or
            columns as most members, unless it has no more than 100 classes and 1000 columns.
    """

    deadline_s: float = 600.0
    join_s: float = 300.0
    minimum: float = 0.5
    attempts: int = 3
    wait_s: float = 30.0
    strikes: int = 3
    max_norm: float = 100.0
    max_statistics: float = 1e6
    max_number: float = 1e15
    max_ratio: float = 1e4
    max_classes: int = 10_000
    max_columns: int = 100_000
    max_variety: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= 1:
            raise FieldError(f"minimum = {self.minimum} is not above 0 and at most 1", "minimum")
        whole = ("attempts", "strikes", "max_classes", "max_columns")
        for name in (*whole, "max_ratio", "max_variety"):
            if not getattr(self, name) >= 1:
                raise FieldError(f"{name} = {getattr(self, name)} is below 1", name)
        for name in ("deadline_s", "join_s", "max_norm", "max_statistics", "max_number"):
            if not getattr(self, name) > 0:
                raise FieldError(f"{name} = {getattr(self, name)} is not above 0", name)

    def needed(self, drawn: int) -> int:
        """Replies that a round with ``drawn`` clients needs.

        >>> Rules().needed(5), Rules(minimum=1.0).needed(4)
        (3, 4)
        """
        return max(1, math.ceil(self.minimum * drawn - 1e-9))
