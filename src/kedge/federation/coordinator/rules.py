"""The rules by which a coordinator waits, repeats, gives up and refuses replies.

``rules.toml`` has them, and agreed constants of the scaling::

    deadline_s = 600.0      # any field of Rules
    minimum = 0.5

    [scaling]               # in place of mean and standard deviation of the members' data
    mean = [0.1307]
    std = [0.3081]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from kedge.errors import FieldError, UnknownName
from kedge.files import MAX_BYTES, read_toml
from kedge.schema import Count, Range, read_fields, schema_of

Scaling = tuple[tuple[float, ...], tuple[float, ...]]
Above = Annotated[float, Range(0, open=True, infinite=True)]

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

    deadline_s: Above = 600.0
    join_s: Above = 300.0
    minimum: Annotated[float, Range(0, 1, open=True)] = 0.5
    attempts: Count = 3
    wait_s: Annotated[float, Range(0, infinite=True)] = 30.0
    strikes: Count = 3
    max_norm: Above = 100.0
    max_statistics: Above = 1e6
    max_number: Above = 1e15
    max_ratio: Annotated[float, Range(1, infinite=True)] = 1e4
    max_classes: Count = 10_000
    max_columns: Count = 100_000
    max_variety: Annotated[float, Range(1)] = 10.0

    def __post_init__(self) -> None:
        schema_of(Rules, "").check(vars(self))

    def needed(self, drawn: int) -> int:
        """Replies that a round with ``drawn`` clients needs.

        >>> Rules().needed(5), Rules(minimum=1.0).needed(4)
        (3, 4)
        """
        return max(1, math.ceil(self.minimum * drawn - 1e-9))


def read_rules(path: Path) -> tuple[Rules, Scaling | None]:
    """Read the file; defaults where there is none.

    Raises:
        FieldError: it cannot be read, or a value is wrong.
        UnknownName: there is no such rule.
    """
    try:
        values = read_toml(path, MAX_BYTES)[0]  # lists of the moments of all columns
    except FileNotFoundError:
        return Rules(), None
    except (OSError, ValueError) as error:
        raise FieldError(f"{path} cannot be read: {error}") from None
    scaling = _scaling(values.pop("scaling", None))
    return make_rules(values), scaling


def make_rules(values: Mapping[str, Any]) -> Rules:
    """Rules from values by name."""
    known = [field.name for field in dataclasses.fields(Rules)]
    for name in values.keys() - set(known):
        raise UnknownName("rule", name, known)
    return read_fields(Rules, values)


def write_rules(rules: Rules, scaling: Scaling | None) -> str:
    """The content of the file."""
    lines = [f"{name} = {value!r}" for name, value in dataclasses.asdict(rules).items()]
    if scaling is not None:
        mean, std = ([float(v) for v in values] for values in scaling)
        lines += ["", "[scaling]", f"mean = {mean}", f"std = {std}"]
    return "\n".join(lines) + "\n"


def _scaling(values: Any) -> Scaling | None:
    if values is None:
        return None
    try:
        mean, std = (tuple(float(v) for v in values[key]) for key in ("mean", "std"))
    except (TypeError, KeyError, ValueError):
        raise FieldError("scaling needs mean = [...] and std = [...]", "scaling") from None
    if len(mean) != len(std):
        raise FieldError("mean and std of the scaling must be as many numbers", "scaling")
    return mean, std
