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
from kedge.federation.coordinator.agreement import Agreement
from kedge.federation.member.profile import Profile
from kedge.files import read_json
from kedge.history.folder import FEDERATION, SEATS
from kedge.session.terms import Terms

FORMAT = 2  # since which the tokens are in a file of their own


@dataclass
class Participant:
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
    participants: list[Participant] = field(default_factory=list)

    @classmethod
    def of(cls, run: str, terms: Terms, agreement: Agreement, nodes: Mapping[str, str]) -> Roster:
        """The roster of a new run; ``nodes`` are those of the members, by name."""
        participants = [
            Participant(
                k, s.name, secrets.token_hex(16), s.train, s.test, nodes[s.name], present=True
            )
            for k, s in enumerate(agreement.members)
        ]
        return cls(run, terms, agreement.encoding, participants)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(participant.train, participant.test) for participant in self.participants]

    def seat_at(self, node: str) -> Participant | None:
        """The member at a node."""
        return next(
            (
                participant
                for participant in self.participants
                if participant.node == node and participant.present
            ),
            None,
        )

    def see(self, nodes: Collection[str]) -> list[str]:
        """Note which nodes are connected; return those that belong to no member yet."""
        for participant in self.participants:
            participant.present = participant.present and participant.node in nodes
        known = {participant.node for participant in self.participants if participant.present}
        return [node for node in nodes if node not in known]

    def admit(self, node: str, profile: Profile) -> str:
        """Let a member back in that has come as a new node; why not, if it cannot."""
        participant = next(
            (participant for participant in self.participants if participant.name == profile.name),
            None,
        )
        if participant is None:
            return (
                f"{profile.name} is not a member of this run, which has started with "
                f"{len(self.participants)}; start a new run to take it in"
            )
        if participant.present and participant.node != node:
            return f"there is a member {profile.name} already; give this one another name"
        shows_token = hmac.compare_digest(participant.token.encode(), profile.token.encode())
        if not shows_token and participant.node != node:
            return f"this node does not show that it is {profile.name}; restore its folder"
        if (profile.train, profile.test) != (participant.train, participant.test):
            return (
                f"{profile.name} has {profile.train} samples to train on and {profile.test} "
                f"to test on; it joined with {participant.train} and {participant.test}"
            )
        participant.node, participant.present, participant.agreed = node, True, shows_token
        return ""

    def forgive(self, strikes: int) -> None:
        """Let excluded members try again when a run is resumed, since somebody may have restored a
        state or changed a policy; not those with so many strikes."""
        for participant in self.participants:
            if participant.strikes < strikes:
                participant.excluded = ""

    # -- saving -------------------------------------------------------------------------------

    def tokens_json(self) -> str:
        """What members show when they come back, for a file of the server alone."""
        return json.dumps(
            {participant.name: participant.token for participant in self.participants}
        )

    def to_json(self) -> str:
        """All but the tokens."""
        hidden = ("present", "agreed", "token")
        participants = [
            {k: v for k, v in dataclasses.asdict(participant).items() if k not in hidden}
            for participant in self.participants
        ]
        encoding = {"kind": self.encoding.kind} | self.encoding.to_dict()
        return json.dumps(
            {
                "format": FORMAT,
                "run": self.run,
                "terms": self.terms.to_json(),
                "encoding": encoding,
                "members": participants,
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
                members = [
                    participant | {"token": str(tokens[participant["name"]])}
                    for participant in members
                ]
            participants = [Participant(**participant) for participant in members]
            terms = Terms.from_json(values["terms"])
            return cls(str(values["run"]), terms, kind.from_dict(encoding), participants)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, UnknownName) as error:
            raise DataError(
                f"{path} or {SEATS} beside it is damaged ({error!r}); restore both from a backup"
            ) from None
