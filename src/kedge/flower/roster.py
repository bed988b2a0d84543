"""The members of a run as the coordinator knows them: number, name, samples, trust.

A member's number is its place among all names in alphabetical order, so it does not depend on who
joined first. The transport vouches for nodes, not for names, and a node may come back under another
id. So each member gets a random token when the terms are agreed. A new node that claims a name must
show the token, and the old node must be gone.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.data.encoding import Encoding, encodings
from kedge.errors import DataError, UnknownName
from kedge.files import read_json
from kedge.flower.joining import Agreement
from kedge.flower.statement import Statement
from kedge.runs.resuming import FEDERATION, SEATS
from kedge.session.terms import Terms

FORMAT = 2  # since which the tokens are in a file of their own


@dataclass
class Seat:
    """One member of a run.

    Attributes:
        client: its number.
        name: its name.
        token: what it shows when it comes back as another node.
        train, test: numbers of samples.
        node: the node where it was last.
        strikes: bad replies so far.
        excluded: why it takes no part any more; empty if it does.
        present: whether its node is connected now.
        agreed: whether it knows the present terms, as far as the coordinator knows.
    """

    client: int
    name: str
    token: str
    train: int
    test: int
    node: str = ""
    strikes: int = 0
    excluded: str = ""
    present: bool = False
    agreed: bool = False

    def strike(self, most: int) -> None:
        """Count a bad reply; ``most`` of them exclude the member."""
        self.strikes += 1
        if self.strikes >= most:
            self.excluded = f"sent {self.strikes} bad replies"


@dataclass
class Roster:
    """All members of a run, and what they agreed on."""

    run: str
    terms: Terms
    encoding: Encoding
    seats: list[Seat] = field(default_factory=list)

    @classmethod
    def of(cls, run: str, terms: Terms, agreement: Agreement, nodes: Mapping[str, str]) -> Roster:
        """The roster of a new run; ``nodes`` are those of the members, by name."""
        seats = [
            Seat(k, s.name, secrets.token_hex(16), s.train, s.test, nodes[s.name], present=True)
            for k, s in enumerate(agreement.members)
        ]
        return cls(run, terms, agreement.encoding, seats)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(seat.train, seat.test) for seat in self.seats]

    def seat_at(self, node: str) -> Seat | None:
        """The member at a node."""
        return next((seat for seat in self.seats if seat.node == node and seat.present), None)

    def see(self, nodes: Collection[str]) -> list[str]:
        """Note which nodes are connected; return those that belong to no member yet."""
        for seat in self.seats:
            seat.present = seat.present and seat.node in nodes
        known = {seat.node for seat in self.seats if seat.present}
        return [node for node in nodes if node not in known]

    def admit(self, node: str, statement: Statement) -> str:
        """Let a member back in that has come as a new node; why not, if it cannot."""
        seat = next((seat for seat in self.seats if seat.name == statement.name), None)
        if seat is None:
            return (
                f"{statement.name} is not a member of this run, which has started with "
                f"{len(self.seats)}; start a new run to take it in"
            )
        if seat.present and seat.node != node:
            return f"there is a member {statement.name} already; give this one another name"
        shows_token = hmac.compare_digest(seat.token.encode(), statement.seat.encode())
        if not shows_token and seat.node != node:
            return f"this node does not show that it is {statement.name}; restore its folder"
        if (statement.train, statement.test) != (seat.train, seat.test):
            return (
                f"{statement.name} has {statement.train} samples to train on and {statement.test} "
                f"to test on; it joined with {seat.train} and {seat.test}"
            )
        seat.node, seat.present, seat.agreed = node, True, shows_token
        return ""

    def forgive(self, strikes: int) -> None:
        """Let excluded members try again when a run is resumed, since somebody may have restored a
        state or changed a policy; not those with so many strikes."""
        for seat in self.seats:
            if seat.strikes < strikes:
                seat.excluded = ""

    # -- saving -------------------------------------------------------------------------------

    def tokens_json(self) -> str:
        """What members show when they come back, for a file of the server alone."""
        return json.dumps({seat.name: seat.token for seat in self.seats})

    def to_json(self) -> str:
        """All but the tokens."""
        hidden = ("present", "agreed", "token")
        seats = [
            {k: v for k, v in dataclasses.asdict(seat).items() if k not in hidden}
            for seat in self.seats
        ]
        encoding = {"kind": self.encoding.kind} | self.encoding.to_dict()
        return json.dumps(
            {
                "format": FORMAT,
                "run": self.run,
                "terms": self.terms.to_json(),
                "encoding": encoding,
                "members": seats,
            }
        )

    @classmethod
    def load(cls, folder: Path) -> Roster | None:
        """The roster in the folder of a run; None if members have not agreed yet.

        Raises:
            DataError: the file is damaged.
        """
        path = folder / FEDERATION
        if not path.exists():
            return None
        try:
            values: dict[str, Any] = read_json(path)
            if values["format"] not in (1, FORMAT):
                raise DataError(f"{path} has format {values['format']}, this kedge reads {FORMAT}")
            encoding = dict(values["encoding"])
            kind = encodings[encoding.pop("kind")]
            members = values["members"]
            if values["format"] == FORMAT:
                tokens = read_json(folder / SEATS)
                members = [seat | {"token": str(tokens[seat["name"]])} for seat in members]
            seats = [Seat(**seat) for seat in members]
            terms = Terms.from_json(values["terms"])
            return cls(str(values["run"]), terms, kind.from_dict(encoding), seats)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, UnknownName) as error:
            raise DataError(
                f"{path} or {SEATS} beside it is damaged ({error!r}); restore both from a backup"
            ) from None
