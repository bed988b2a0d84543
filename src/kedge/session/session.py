"""The server's side of a run: whom it asks for what, what it sends, what it makes of replies.

A simulator and a deployment run the same session; they differ in who answers. In each round::

    for ask in session.asks():
        down = session.down()                        # what all clients of the ask are sent
        replies = ...                                # from an engine, or from remote clients
        if ask.kind == "survey":
            session.absorb(ask, totals)
        else:
            session.take(ask, totals)                # the next global model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, server, tree
from kedge.core.bound import Bound, Server
from kedge.core.client import Reply
from kedge.core.ops import REFERENCE, Ops
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.work import WEIGHTINGS, Lane, LocalWork
from kedge.errors import FieldError, KedgeError, NotFinite

NEVER = -1  # in the ledger: no reply of this client was accepted yet


class Ask(NamedTuple):
    """What the server wants of some clients: ``train``, or an answer to a part's ``survey``."""

    kind: str
    round: int
    clients: list[int]
    part: str = ""  # whose survey it is


class Down(NamedTuple):
    """What all clients of an ask are sent: the public weights, and what parts broadcast."""

    weights: Weights
    sent: dict[str, Tree]


class Answer(NamedTuple):
    """A client's answer to a survey, and the weight it has in means."""

    value: Tree
    weight: Tensor


class Session:
    """The state of a run between rounds, without data.

    The next round is a function of ``server`` and ``round`` alone, so a session that is saved and
    loaded goes on unchanged. The ``ledger`` holds, for each client, the last round of which its
    reply was accepted: a client goes on from the state that it had then, whatever it has tried
    since.
    """

    def __init__(
        self,
        bound: Bound,
        *,
        work: LocalWork | None = None,
        per_round: int | None = None,
        weighting: str = "size",
        seed: int = 0,
    ) -> None:
        count = bound.spec.num_clients
        if weighting not in WEIGHTINGS:
            raise FieldError(f"weighting = {weighting!r} is not one of: {', '.join(WEIGHTINGS)}")
        per_round = count if per_round is None else per_round
        if not 1 <= per_round <= count:
            raise FieldError(f"per_round = {per_round} is not between 1 and the {count} clients")
        self.bound, self.work = bound, work or LocalWork()
        self.per_round, self.weighting = per_round, weighting
        self.key = rng.key(seed)  # on the host, where drawing a round's few numbers is quick
        self.server: Server = bound.server()
        self.round = 0
        self.ledger = [NEVER] * count
        self._drawn: tuple[tuple[int, int], list[int]] | None = None

    @property
    def num_clients(self) -> int:
        return self.bound.spec.num_clients

    # -- what clients are asked for -----------------------------------------------------------

    def draw_clients(self, round: int) -> list[int]:
        """Clients of a round: a fixed count without replacement, the same for every method."""
        if self.per_round == self.num_clients:
            return list(range(self.per_round))
        if self._drawn is None or self._drawn[0] != (round, self.per_round):
            key = rng.fold(rng.fold(self.key, "cohort"), round)
            drawn = rng.permutation(key, self.num_clients)[: self.per_round]
            self._drawn = (round, self.per_round), sorted(drawn.tolist())
        return list(self._drawn[1])

    def asks(self, clients: Sequence[int] | None = None) -> Iterator[Ask]:
        """The asks of the present round: surveys that are due, then the training of a drawn cohort
        (or of the given clients)."""
        cohort = list(clients) if clients is not None else self.draw_clients(self.round)
        yield from self.surveys(cohort)
        yield Ask("train", self.round, cohort)

    def surveys(self, cohort: list[int]) -> Iterator[Ask]:
        """The surveys before the round; ``first`` asks all clients, ``every`` the cohort."""
        for part in self.bound.parts_with("survey"):
            if part.surveys() == "every":
                yield self.ask_survey(part, cohort)
            elif part.surveys() == "first" and self.round == 0:
                yield self.ask_survey(part, list(range(self.num_clients)))

    def last_surveys(self) -> Iterator[Ask]:
        """The surveys after the last round."""
        for part in self.bound.parts_with("survey"):
            if part.surveys() == "last":
                yield self.ask_survey(part, list(range(self.num_clients)))

    def ask_survey(self, part: Part, clients: list[int]) -> Ask:
        """The survey of a part, now."""
        return Ask("survey", self.round, clients, part.name)

    def down(self) -> Down:
        """What the clients of the next ask are sent."""
        return Down(self.bound.only_public(self.server.weights), self.bound.sent(self.server))

    def lane(self, client: int, size: int, round: int) -> Lane:
        """What a client of so many samples does in a round."""
        steps, lr = self.work.steps_for(size), self.bound.lr(round)
        return Lane(client, size, steps, self.work, lr, self.weighting, self.bound.optim)

    # -- what comes back ----------------------------------------------------------------------

    def reduce(self, replies: Iterable[Reply], ops: Ops = REFERENCE) -> Totals:
        """Totals of single replies, which are let go one after the other, in the cohort's order."""
        total: Totals = {}
        for reply in replies:
            alone = tree.map(lambda x: x.unsqueeze(0), reply)
            found = server.totals(self.bound, alone, self.server.weights, ops)
            total = server.add_totals(total, found) if total else found
        return total

    def reduce_survey(self, ask: Ask, answers: Iterable[Answer], ops: Ops = REFERENCE) -> Totals:
        """Totals of the answers to a survey."""
        every: Answer = tree.stack(list(answers))
        return server.survey_totals(self.bound.part(ask.part), every.value, every.weight, ops)

    def absorb(self, ask: Ask, totals: Totals) -> int:
        """Give a part the reduced answers to its survey; returns the bytes that clients sent."""
        part = self.bound.part(ask.part)
        key = self._server_key()
        self.server = server.absorb(self.bound, self.server, part, totals, self.round, key)
        return int(totals["up_bytes"])

    def aggregate(self, totals: Totals) -> Server:
        """The server after the present round; the session does not move yet."""
        return server.server_round(self.bound, self.server, totals, self.round, self._server_key())

    def accept(self, after: Server, clients: Sequence[int]) -> None:
        """Move on to the next round, and note whose replies were accepted."""
        for k in clients:
            self.ledger[k] = self.round
        self.server = after
        self.round += 1

    def take(self, ask: Ask, totals: Totals) -> None:
        """Aggregate a round and move on; a loss that is not finite is refused."""
        self.check_finite(totals, ask.clients)
        self.accept(self.aggregate(totals), ask.clients)

    def check_finite(self, totals: Totals, clients: Sequence[int]) -> None:
        """Stop at a loss that is not finite, and name the client."""
        terms = totals["terms"]
        bad = ~torch.stack([torch.isfinite(v) for v in terms.values()]).all(0)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            values = ", ".join(f"{name} {float(value[i]):.4g}" for name, value in terms.items())
            raise NotFinite(
                f"the loss of client {clients[i]} is not finite in round {self.round}; "
                f"terms: {values}. Lower the learning rate or set clip"
            )

    def _server_key(self) -> Tensor:
        key = rng.fold(rng.fold(self.key, "server"), self.round)
        return key.to(self.bound.spec.device, non_blocking=True)

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that the next round depends on, as named arrays."""
        return tree.to_wire(self._held())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state of the same method, model and number of clients."""
        found = read_state(state, self._held())
        self.server = tree.map(self._placed, Server(found["weights"], found["slots"]))
        self.round = int(found["round"])
        self.ledger = found["ledger"].tolist()

    def _placed(self, x: Tensor) -> Tensor:
        return x.to(self.bound.spec.device)

    def _held(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "round": torch.tensor(self.round),
            "ledger": torch.tensor(self.ledger),
        }


def read_state(state: dict[str, Tensor], like: Tree) -> Tree:
    """Named arrays in the structure of ``like``; a KedgeError if names or shapes differ."""
    wanted, given = tree.to_wire(like), set(state)
    wrong = sorted(
        (wanted.keys() ^ given)
        | {n for n in wanted.keys() & given if wanted[n].shape != state[n].shape}
    )
    if wrong:
        raise KedgeError(
            "this state belongs to another method, model or federation; "
            f"{len(wrong)} arrays do not fit, the first is {wrong[0]!r}"
        )
    return tree.from_wire(state, like)
