"""One client where its data are: a :class:`Silo` answers the asks of a session.

It computes what the loop engine computes for this client, bit for bit. What comes down and what
goes up are bytes (:mod:`kedge.session.wire`); what a client keeps between rounds stays here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import client, rng, tree
from kedge.core.bound import Bound
from kedge.core.model import Model
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job, SweepPieces
from kedge.core.work import Lane, batches, client_keys, infos
from kedge.data.federation import Federation
from kedge.engines.layout import layout_of
from kedge.engines.loop import Loop, run_steps
from kedge.engines.ops import FOREACH
from kedge.engines.reference import sums_over
from kedge.errors import KedgeError, WireError
from kedge.session import wire
from kedge.session.session import NEVER, Answer, Ask, Down, Session
from kedge.session.terms import Terms


class Work(NamedTuple):
    """A job of this client, and the rows of its batches ``[steps, batch]``."""

    job: Job
    rows: Tensor


class Silo:
    """Data and state of one client of a federation.

    Args:
        terms: what all members have agreed on.
        model: the model, with the same first weights at every member.
        data: a federation whose only client is this one.
        client: its number among all clients.
        states: states kept earlier, by the round they come from; for a restart.

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
        self.terms, self.data, self.client = terms, data, client
        self.bound = bind(terms, model, data)
        self._root = rng.key(terms.seed)
        #: State after each round that this client has tried and not forgotten.
        self.states: dict[int, Tree] = dict(states or {})
        self._counts = torch.zeros((1, 0), device=data.device)
        if self.bound.needs("labels"):
            self._counts = data.label_counts()

    def answer(self, ask: Ask, down: bytes, accepted: int = NEVER) -> bytes:
        """The message that answers an ask. ``accepted`` is the last round of which the server has
        accepted this client's reply: the state of that round is where the client goes on."""
        received = unpack_down(self.bound, down)
        if ask.kind == "survey":
            return wire.pack("answer", self.survey(ask, received, accepted), round=str(ask.round))
        return wire.pack("reply", self.train(ask, received, accepted), round=str(ask.round))

    def train(self, ask: Ask, down: Down, accepted: int = NEVER) -> client.Reply:
        """Train one round; the next state is kept here until the server accepts the reply."""
        bound, work = self.bound.at(ask.round), self._work(ask, down, accepted)
        reply = client.end(bound, work.job, run_steps(bound, work.job, work.rows, self.client))
        self.states = {r: state for r, state in self.states.items() if r == accepted}
        self.states[ask.round] = reply.client
        return wire.without_state(reply)

    def survey(self, ask: Ask, down: Down, accepted: int = NEVER) -> Answer:
        """Answer a part's survey; nothing is kept."""
        bound, job = self.bound.at(ask.round), self._work(ask, down, accepted).job
        return Answer(client.survey(bound, job, bound.part(ask.part)), job.info.weight)

    def personal(self, ask: Ask, down: Down, accepted: int = NEVER) -> Weights:
        """The weights that this client would use itself."""
        return client.personal(self.bound.at(ask.round), self._work(ask, down, accepted).job)

    def evaluate(self, weights: Weights) -> dict[str, Tensor]:
        """The task's sums on what this client holds out; sums over clients are exact metrics."""
        if not self.data.held_out:
            raise KedgeError("this client holds nothing out for testing; set holdout, e.g. 0.2")
        return sums_over(self.bound, weights, self.data.held_out[0])

    def _state(self, accepted: int) -> Tree:
        if accepted == NEVER:
            return self.bound.client()
        if accepted not in self.states:
            raise KedgeError(
                f"client {self.client} has no state of round {accepted}, which was accepted; "
                "restore its folder from a backup, or start it anew as another client"
            )
        return self.states[accepted]

    def _work(self, ask: Ask, down: Down, accepted: int) -> Work:
        """What this client does in a round, as the simulator draws it for all of them."""
        terms, bound, place = self.terms, self.bound, layout_of(self.bound.model).place
        size = self.data.sizes[0]
        lane = Lane(
            self.client, size, terms.work.steps_for(size), terms.work, bound.lr(ask.round),
            terms.weighting, bound.optim,
        )  # fmt: skip
        keys = client_keys(self._root.expand(1, 2), ask.round, [self.client])
        none = torch.zeros((1, 0), device=self.data.device)
        sweep = self.data.sweep_pieces([0]) if bound.needs("sweep") else SweepPieces(none, none)
        info = infos([lane], ask.round, self.data.dtype)
        job = Job(
            anchor=place(_whole(bound, down.weights)),
            sent=place(down.sent),
            client=place(self._state(accepted)),
            info=tree.take(info, 0),
            key=keys[0],
            counts=self._counts[0],
            sweep=tree.take(sweep, 0),
        )
        return Work(job, self.data.rows[batches(keys, [lane])[0]])


def bind(terms: Terms, model: Model, data: Federation) -> Bound:
    """The binding of a member, on the model as the loop engine computes it."""
    engine = Loop()
    prepared = engine.prepare(model, data.device, data.dtype)
    return terms.bind(prepared, data, data.device)


def pack_down(session: Session) -> bytes:
    """What the clients of the next ask are sent, as a message."""
    return wire.pack("down", session.down(), round=str(session.round))


def unpack_down(bound: Bound, message: bytes) -> Down:
    """What the server sent; its weights are checked against the model's."""
    down = wire.unpack(message, "down") or Down(Weights({}, {}), {})  # all of it stays private
    if not isinstance(down.weights, Weights):
        down = down._replace(weights=Weights({}, {}))
    if wire.template_of(down.weights) != wire.template_of(bound.only_public(bound.initial)):
        raise WireError("the server's weights are not those of this model; compare the terms")
    return down


def collect(session: Session, ask: Ask, messages: Iterable[bytes]) -> Totals:
    """Totals of the messages that answer an ask, in the cohort's order, one at a time.

    Raises:
        WireError: a message is not what this method's clients send.
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


def _whole(bound: Bound, public: Weights) -> Weights:
    """All weights in the model's order: those received, and placeholders for private ones, which
    a client has itself."""
    first = bound.initial
    return Weights(
        {name: public.params.get(name, own) for name, own in first.params.items()},
        {name: public.buffers.get(name, own) for name, own in first.buffers.items()},
    )
