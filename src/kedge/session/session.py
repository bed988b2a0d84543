"""The server's side of a run: requests to clients, broadcasts, and aggregation of replies.

A simulation and a deployment run the same session; they differ in who answers. In each round::

    for ask in session.asks():
        down = session.down()                        # the broadcast to the clients of the ask
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
from kedge.core.steps import REFERENCE as PLAIN_STEPS
from kedge.core.steps import Steps
from kedge.core.tree import Tree, Weights
from kedge.core.work import WEIGHTINGS, Lane, LocalWork, share_of
from kedge.errors import FieldError, KedgeError, NotFinite

NEVER = -1  # in the ledger: no reply of this client was accepted yet


class Ask(NamedTuple):
    """A request to clients: ``train``, or answer a part's ``survey``."""

    kind: str
    round: int
    clients: list[int]
    part: str = ""  # name of the part, for a survey


class Down(NamedTuple):
    """The broadcast to the clients of an ask: the public weights, and ``sent`` of each part."""

    weights: Weights
    sent: dict[str, Tree]


class Answer(NamedTuple):
    """A client's answer to a survey, and its client weight in means."""

    value: Tree
    weight: Tensor


class Session:
    """The state of a run between rounds, without data.

    The next round is a function of ``server`` and ``round`` alone, so a session that is saved and
    restored continues unchanged. ``ledger[k]`` is the last round in which the reply of client k was
    accepted: the client continues from its state after that round and discards later attempts.

    Args:
        bound: the method, bound to a model, a task, an optimiser and data.
        work: batch size and local steps or epochs; the default of LocalWork for None.
        per_round: clients in the cohort of a round; all of them for None.
        weighting: client weights p_k: ``"size"`` or ``"uniform"``.
        examples: number of training samples of all clients together.
        seed: seed of everything random.

    Raises:
        FieldError: ``per_round`` or ``weighting`` is out of range.

    Example::

        session = terms.session(bound)
        for ask in session.asks():
            totals = collect(session, ask, messages)
            session.absorb(ask, totals) if ask.kind == "survey" else session.take(ask, totals)
    """

    def __init__(
        self,
        bound: Bound,
        *,
        work: LocalWork | None = None,
        per_round: int | None = None,
        weighting: str = "size",
        examples: int,
        seed: int = 0,
    ) -> None:
        count = bound.spec.num_clients
        if weighting not in WEIGHTINGS:
            raise FieldError(f"weighting = {weighting!r} is not one of: {', '.join(WEIGHTINGS)}")
        per_round = count if per_round is None else per_round
        if not 1 <= per_round <= count:
            raise FieldError(f"per_round = {per_round} is not between 1 and the {count} clients")
        self.bound, self.work = bound, work or LocalWork()
        self.per_round, self.weighting, self.examples = per_round, weighting, examples
        self.key = rng.key(seed)  # on the host: a round's few draws are faster there
        self.server: Server = bound.server()
        self.round = 0
        self.ledger = [NEVER] * count
        self._drawn: tuple[tuple[int, int], list[int]] | None = None

    @property
    def num_clients(self) -> int:
        return self.bound.spec.num_clients

    # -- requests ------------------------------------------------------------------------------

    def draw_clients(self, round: int) -> list[int]:
        """The cohort of a round in ascending order: ``per_round`` clients without replacement.

        It depends on the seed and the round alone, so it is the same for every method.
        """
        if self.per_round == self.num_clients:
            return list(range(self.per_round))
        if self._drawn is None or self._drawn[0] != (round, self.per_round):
            key = rng.fold(rng.fold(self.key, "cohort"), round)
            drawn = rng.permutation(key, self.num_clients)[: self.per_round]
            self._drawn = (round, self.per_round), sorted(drawn.tolist())
        return list(self._drawn[1])

    def asks(self, clients: Sequence[int] | None = None) -> Iterator[Ask]:
        """The asks of the present round: surveys that are due, then training.

        Args:
            clients: the cohort; drawn from the seed for None.
        """
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
        """The ask for a part's survey in the present round."""
        return Ask("survey", self.round, clients, part.name)

    def down(self) -> Down:
        """The broadcast to the clients of the next ask."""
        return Down(self.bound.only_public(self.server.weights), self.bound.sent(self.server))

    def lane(self, client: int, size: int, round: int) -> Lane:
        """The lane of a client with ``size`` samples in a round."""
        bound, steps = self.bound, self.work.steps_for(size)
        share = share_of(size, self.num_clients, self.examples, self.weighting)
        rest = self.work, bound.lr(round), self.weighting, bound.optim, bound.pull
        return Lane(client, size, steps, *rest, share)

    # -- replies -------------------------------------------------------------------------------

    def reduce(self, replies: Iterable[Reply], ops: Ops = REFERENCE) -> Totals:
        """Totals of single replies in the cohort's order; each is freed after it is added."""
        total: Totals = {}
        for reply in replies:
            alone = tree.map(lambda x: x.unsqueeze(0), reply)
            del reply
            added = server.totals(self.bound, alone, self.server.weights, ops)
            del alone  # its memory is needed: replies may be as large as the model
            total = server.add_totals(total, added, in_place=True) if total else added
            del added
        return total

    def reduce_survey(self, ask: Ask, answers: Iterable[Answer], ops: Ops = REFERENCE) -> Totals:
        """Totals of the answers to a survey."""
        stacked: Answer = tree.stack(list(answers))
        return server.survey_totals(self.bound.part(ask.part), stacked.value, stacked.weight, ops)

    def absorb(self, ask: Ask, totals: Totals) -> int:
        """Pass the reduced answers of a survey to its part; return the bytes that clients sent."""
        self.server = self.absorbed(ask, totals)
        return int(totals["up_bytes"])

    def absorbed(self, ask: Ask, totals: Totals) -> Server:
        """The server after the answers to a survey; the session itself does not change."""
        part, key = self.bound.part(ask.part), self._server_key()
        return server.absorb(self.bound, self.server, part, totals, self.round, key)

    def aggregate(self, totals: Totals, steps: Steps = PLAIN_STEPS) -> Server:
        """The server after the present round; the session itself does not change.

        Args:
            totals: of the replies.
            steps: how parts take steps on the server.
        """
        key = self._server_key()
        return server.server_round(self.bound, self.server, totals, self.round, key, steps)

    def output(self) -> Weights:
        """The weights to evaluate and to keep as the model; clients start from the others."""
        return server.output(self.bound, self.server)

    def accept(self, after: Server, clients: Sequence[int]) -> None:
        """Advance to the next round, and record in the ledger whose replies were accepted."""
        for k in clients:
            self.ledger[k] = self.round
        self.server = after
        self.round += 1

    def take(self, ask: Ask, totals: Totals) -> None:
        """Aggregate a round and advance; raises NotFinite for a loss that is not finite."""
        self.check_finite(totals, ask.clients)
        self.accept(self.aggregate(totals), ask.clients)

    def check_finite(self, totals: Totals, clients: Sequence[int]) -> None:
        """Raise NotFinite, with the client's number, if a loss is not finite."""
        terms = totals["terms"]
        bad = ~torch.stack([torch.isfinite(v) for v in terms.values()]).all(0)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            values = ", ".join(f"{name} {float(value[i]):.4g}" for name, value in terms.items())
            raise NotFinite(
                f"the loss of client {clients[i]} is not finite in round {self.round + 1}; "
                f"terms: {values}. Lower the learning rate or set clip"
            )

    def _server_key(self) -> Tensor:
        key = rng.fold(rng.fold(self.key, "server"), self.round)
        return key.to(self.bound.spec.device, non_blocking=True)

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The state that the next round depends on, as named tensors."""
        return tree.to_wire(self._state_tree())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state of the same method, model and clients; a KedgeError for any other."""
        loaded = read_state(state, self._state_tree())
        self.server = tree.map(self._to_device, Server(loaded["weights"], loaded["slots"]))
        self.round = int(loaded["round"])
        self.ledger = loaded["ledger"].tolist()

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.bound.spec.device)

    def _state_tree(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "round": torch.tensor(self.round),
            "ledger": torch.tensor(self.ledger),
        }


def read_state(state: dict[str, Tensor], like: Tree) -> Tree:
    """Named tensors in the structure of ``like``; a KedgeError if names or shapes differ."""
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
