"""The members of a run as the coordinator knows them: number, name, samples, trust.

A member's number is its place among all names in alphabetical order, so it does not depend on who
joined first. The transport vouches for nodes, not for names, and a node may come back under another
id. So each member gets a random token when the terms are agreed. A new node that claims a name must
show the token, and the old node must be gone.
"""

from __future__ import annotations

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
from kedge.federation.member.profile import MemberProfile
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
        members = [
            Participant(
                k, s.name, secrets.token_hex(16), s.train, s.test, nodes[s.name], present=True
            )
            for k, s in enumerate(agreement.members)
        ]
        return cls(run, terms, agreement.encoding, members)

    def see(self, nodes: Collection[str]) -> list[str]:
        """Note which nodes are connected; return those that belong to no member yet."""
        for member in self.participants:
            member.present = member.present and member.node in nodes
        known = {member.node for member in self.participants if member.present}
        return [node for node in nodes if node not in known]

    def admit(self, node: str, profile: MemberProfile) -> str:
        """Let a member back in that has come as a new node; why not, if it cannot."""
        name = profile.name
        member = {member.name: member for member in self.participants}.get(name)
        if member is None:
            return (
                f"{name} is not a member of this run, which has started with "
                f"{len(self.participants)}; start a new run to take it in"
            )
        if member.present and member.node != node:
            return f"there is a member {name} already; give this one another name"
        shows_token = hmac.compare_digest(member.token.encode(), profile.token.encode())
        if not shows_token and member.node != node:
            return f"this node does not show that it is {name}; restore its folder"
        if (profile.train, profile.test) != (member.train, member.test):
            return (
                f"{name} has {profile.train} samples to train on and {profile.test} "
                f"to test on; it joined with {member.train} and {member.test}"
            )
        member.node, member.present, member.agreed = node, True, shows_token
        return ""

    def forgive(self, strikes: int) -> None:
        """Let excluded members try again when a run is resumed, since somebody may have restored a
        state or changed a policy; not those with so many strikes."""
        for member in self.participants:
            if member.strikes < strikes:
                member.excluded = ""

    # -- saving -------------------------------------------------------------------------------

    def tokens_json(self) -> str:
        """What members show when they come back, for a file of the server alone."""
        return json.dumps({member.name: member.token for member in self.participants})

    def to_json(self) -> str:
        """All but the tokens."""
        hidden = ("present", "agreed", "token")
        values = {
            "format": FORMAT,
            "run": self.run,
            "terms": self.terms.to_json(),
            "encoding": {"kind": self.encoding.kind} | self.encoding.to_dict(),
            "members": [
                {k: v for k, v in vars(member).items() if k not in hidden}
                for member in self.participants
            ],
        }
        return json.dumps(values)

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
                members = [one | {"token": str(tokens[one["name"]])} for one in members]
            terms, known = Terms.from_json(values["terms"]), [Participant(**one) for one in members]
            return cls(str(values["run"]), terms, kind.from_dict(encoding), known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, UnknownName) as error:
            raise DataError(
                f"{path} or {SEATS} beside it is damaged ({error!r}); restore both from a backup"
            ) from None
