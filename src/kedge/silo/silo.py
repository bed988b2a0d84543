"""One remote client: a :class:`Silo` answers the asks of a session.

It computes what the loop engine computes for this client, bit for bit. Broadcasts and replies are
messages (:mod:`kedge.session.wire`); the client's state between rounds stays in the silo.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from kedge.core import client, rng, tree
from kedge.core.bound import Bound
from kedge.core.model import Model
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job, SweepPieces
from kedge.core.work import Lane, batches, client_keys, infos, round_key, share_of
from kedge.data.federation import Federation
from kedge.engines.layout import layout_of
from kedge.engines.loop import Loop, run_steps
from kedge.engines.ops import FOREACH
from kedge.engines.reference import sums_over
from kedge.errors import KedgeError, TermsError, WireError
from kedge.session import wire
from kedge.session.session import NEVER, Answer, Ask, Down, Session
from kedge.session.terms import Terms
from kedge.silo.usage import Usage, remaining, usage_of

MAX_ROWS = 10**8  # of all batches of a round


class Silo:
    """Data and state of one client of a federation.

    Args:
        terms: the terms of the federation.
        model: the model, with the same initial weights at every member.
        data: a federation whose only client is this one.
        client: its number among all clients of the federation.
        states: saved states by round, for a restart.

    Raises:
        KedgeError: the data are not those of one client, or there is no such client.
        TermsError: the terms ask for too many rows in a round.

    Example::

        silo = Silo(terms, model, data, client=3)
        for ask in session.asks():
            message = silo.answer(ask, pack_down(session), session.ledger[3])
    """

    def __init__(
        self,
        terms: Terms,
        model: Model,
        data: Federation,
        client: int,
        states: dict[int, Tree] | None = None,
    ) -> None:
        if data.num_clients != 1:
            raise KedgeError(f"a silo holds one client's data, these are {data.num_clients}")
        if not 0 <= client < terms.num_clients:
            raise KedgeError(f"client {client} is not in 0..{terms.num_clients - 1}")
        drawn = terms.work.steps_for(data.sizes[0]) * terms.batch
        if drawn > MAX_ROWS:
            raise TermsError(f"a round draws {drawn} rows, more than {MAX_ROWS}")
        self.terms, self.data, self.client = terms, data, client
        self.bound = bind(terms, model, data)
        self._root = rng.key(terms.seed)
        #: States by round: the last accepted one, and that of the last attempt.
        self.states: dict[int, Tree] = dict(states or {})
        self._counts = torch.zeros((1, 0), device=data.device)
        if self.bound.needs("labels"):
            self._counts = data.label_counts()

    def answer(self, ask: Ask, down: bytes, accepted: int = NEVER) -> bytes:
        """Answer an ask.

        Args:
            ask: the server's request.
            down: the server's broadcast, from :func:`pack_down`.
            accepted: the last round in which the server accepted this client's reply. The client
                continues from its state after that round.

        Returns:
            A message for :func:`collect`.

        Raises:
            WireError: the broadcast does not fit the model, or has a number that is not finite.
            NotFinite: the answer has one.
            KedgeError: the state of the accepted round is missing.
        """
        received = self.read_down(wire.unpack(down, "down"))
        if ask.kind == "survey":
            answer = self.survey(ask, received, accepted)
            return wire.pack_finite("answer", answer, round=str(ask.round))
        reply = self.train(ask, received, accepted)
        return wire.pack_finite("reply", reply, round=str(ask.round))

    def read_down(self, value: Tree) -> Down:
        """A broadcast as it was unpacked, in the order of the method's own trees: a sum over leaves
        must not depend on the order in which they arrive. Raises a WireError if it does not fit."""
        nothing = value is None or value == {}  # if all weights are private
        down = Down(Weights({}, {}), {}) if nothing else value
        if not isinstance(down, Down):
            raise WireError("the message is no broadcast of a server")
        sent = _in_order(down.sent, self._sent)
        if wire.template_of(sent) != wire.template_of(self._sent):
            raise WireError("what the server's parts sent is not of this method; compare the terms")
        return Down(checked_weights(self.bound, down.weights), sent)

    @cached_property
    def _sent(self) -> Tree:
        """What parts broadcast before the first round; later broadcasts have its structure."""
        return self.bound.sent(self.bound.server())

    def train(self, ask: Ask, down: Down, accepted: int = NEVER) -> client.Reply:
        """Train one round; the next state is stored until the server accepts the reply."""
        bound, job = self.bound.at(ask.round), self._job(ask, down, accepted)
        reply = client.end(bound, job, run_steps(bound, job, self.rows(ask.round), self.client))
        self.states = {r: state for r, state in self.states.items() if r == accepted}
        self.states[ask.round] = reply.client
        return wire.without_state(reply)

    def survey(self, ask: Ask, down: Down, accepted: int = NEVER) -> Answer:
        """Answer a part's survey; the client's state does not change."""
        bound, job = self.bound.at(ask.round), self._job(ask, down, accepted)
        return Answer(client.survey(bound, job, bound.part(ask.part)), job.info.weight)

    def personal(self, ask: Ask, down: Down, accepted: int = NEVER) -> Weights:
        """The personal weights of this client."""
        return client.personal(self.bound.at(ask.round), self._job(ask, down, accepted))

    def evaluate(self, weights: Weights, detailed: bool = False) -> dict[str, Tensor]:
        """The task's metric sums on this client's held-out rows. Sums of several clients add up to
        exact metrics; ``detailed`` adds those of costly ones, such as AUROC. Raises a KedgeError
        without held-out rows."""
        if not self.data.held_out:
            raise KedgeError("this client holds nothing out for testing; set holdout, e.g. 0.2")
        bound = self.bound.detailed() if detailed else self.bound
        return sums_over(bound, weights, self.data.held_out[0])

    def full(self, public: Weights) -> Weights:
        """All weights of the global model: the public ones, and initial values of private ones."""
        return layout_of(self.bound.model).place(_all_weights(self.bound, public))

    def state(self, accepted: int) -> Tree:
        """The client's state after a round that was accepted; a KedgeError if it is missing."""
        if accepted == NEVER:
            return self.bound.client()
        if accepted not in self.states:
            raise KedgeError(
                f"client {self.client} has no state of round {accepted}, which was accepted; "
                "restore its folder from a backup, or start it anew as another client"
            )
        return self.states[accepted]

    def rows(self, round: int) -> Tensor:
        """The rows of the batches of a round, ``[steps, batch]``."""
        return self.data.rows[batches(self._keys(round), [self._lane(round)])[0]]

    def usage(self, round: int) -> Usage:
        """How many rows the update of a round is really computed from."""
        rows, bound, weights = self.rows(round), self.bound, self.terms.class_weights
        pulls = [part.anchor_pull() for part in bound.parts]
        unknown = None in pulls or any(map(bound.parts_with, ("trainable", "project")))
        pull = None if unknown else sum(p or 0.0 for p in pulls)
        factors = torch.ones(rows.shape, dtype=torch.float64)
        if weights:
            factors = torch.tensor(weights, dtype=torch.float64)[self.data.y[rows].cpu()]
        shares = remaining(bound.optim, bound.lr(round), pull, len(rows))
        return usage_of(rows.cpu(), factors, shares)

    def _lane(self, round: int) -> Lane:
        terms, bound, size = self.terms, self.bound, self.data.sizes[0]
        return Lane(
            self.client, size, terms.work.steps_for(size), terms.work, bound.lr(round),
            terms.weighting, bound.optim, bound.pull,
            share_of(size, terms.num_clients, terms.examples, terms.weighting),
        )  # fmt: skip

    def _keys(self, round: int) -> Tensor:
        return client_keys(round_key(self._root, round), [self.client])

    def _job(self, ask: Ask, down: Down, accepted: int) -> Job:
        """This client's job in a round, drawn as the simulator draws it."""
        bound, place = self.bound, layout_of(self.bound.model).place
        empty = torch.zeros((1, 0), device=self.data.device)
        sweep = self.data.sweep_pieces([0]) if bound.needs("sweep") else SweepPieces(empty, empty)
        info = infos([self._lane(ask.round)], ask.round, self.data.dtype)
        return Job(
            anchor=place(_all_weights(bound, down.weights)),
            sent=place(down.sent),
            client=place(self.state(accepted)),
            info=tree.take(info, 0),
            key=self._keys(ask.round)[0],
            counts=self._counts[0],
            sweep=tree.take(sweep, 0),
        )


def bind(terms: Terms, model: Model, data: Federation) -> Bound:
    """Bind the method of the terms to a member's model, prepared for the loop engine."""
    engine = Loop()
    prepared = engine.prepare(model, data.device, data.dtype)
    return terms.bind(prepared, data, data.device)


def pack_down(session: Session) -> bytes:
    """The broadcast to the clients of the next ask, as a message."""
    return wire.pack("down", session.down(), round=str(session.round))


def checked_weights(bound: Bound, value: Tree) -> Weights:
    """Public weights as they were unpacked; a WireError if they do not fit the model."""
    weights = value if isinstance(value, Weights) else Weights({}, {})
    if wire.template_of(weights) != wire.template_of(bound.only_public(bound.initial)):
        raise WireError("the server's weights are not those of this model; compare the terms")
    return weights


def collect(session: Session, ask: Ask, messages: Iterable[bytes]) -> Totals:
    """Reduce the messages that answer an ask, one at a time.

    Args:
        session: the server's session.
        ask: the ask that the messages answer.
        messages: what :meth:`Silo.answer` returned, in the order of ``ask.clients``.

    Returns:
        Totals for ``session.absorb`` (a survey) or ``session.take`` (training).

    Raises:
        WireError: a message does not fit the method and the model.
    """
    bound, place = session.bound.at(ask.round), layout_of(session.bound.model).place
    if ask.kind == "survey":
        value = wire.survey_template(bound, session.server, bound.part(ask.part))
        weight = wire.Leaf(bound.spec.dtype, ())
        template = Answer(value, weight)  # type: ignore[arg-type]
        answers = (place(wire.unpack(m, "answer", template)) for m in messages)
        return session.reduce_survey(ask, answers, FOREACH)
    reply = wire.reply_template(bound, session.server, session.work.batch)
    return session.reduce((place(wire.unpack(m, "reply", reply)) for m in messages), FOREACH)


def _in_order(value: Tree, like: Tree, name: str = "sent") -> Tree:
    """A tree in the order of another one; empty branches, which messages lose, are restored."""
    if isinstance(like, dict) and isinstance(value, dict):
        known = {key: _in_order(value.get(key, {}), like[key], key) for key in like}
        return known | {key: item for key, item in value.items() if key not in like}
    if isinstance(like, tuple) and type(value) is type(like):
        pairs = zip(value, like, strict=True)
        return type(like)(*(_in_order(item, other, name) for item, other in pairs))
    if isinstance(like, Tensor) and not isinstance(value, Tensor):
        raise WireError(f"the server's broadcast lacks {name!r}; compare the terms")
    return value


def _all_weights(bound: Bound, public: Weights) -> Weights:
    """All weights in the model's order: public ones as received, and initial values as placeholders
    for private ones, which the client's state contains."""
    initial = bound.initial
    return Weights(
        {name: public.params.get(name, value) for name, value in initial.params.items()},
        {name: public.buffers.get(name, value) for name, value in initial.buffers.items()},
    )
