"""One remote client: a :class:`Silo` answers the requests of a session.

It is :class:`~kedge.sim.clients.Clients` of one, so it computes what the loop engine computes for
this client, bit for bit. The client's state between rounds stays in the silo.

It also tells how many rows an update is really computed from.
A server chooses batches, class weights and the optimiser, so it can let a few rows make an update
though many are drawn. A row counts if it is drawn, and if its weight is at least a tenth of that of
the heaviest row. The weight of a row is its class weight, times what is left of its step at the end
of the round: weight decay, and a part that pulls towards the server's weights, forget earlier
steps. With a learning rate of 1 / decay only the last step is left. Where the pull is not known, or
a part chooses what a step trains, the last step alone is counted. Rows that a *model* ignores
cannot be counted.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.bound import Bound
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.tree import Tree, Weights
from kedge.core.update import NO_WEIGHTS, Update
from kedge.core.view import Noise
from kedge.data.federation import Federation
from kedge.engines.engine import sums_over
from kedge.engines.layout import layout_of
from kedge.engines.loop import Loop
from kedge.errors import KedgeError, TermsError, WireError
from kedge.session import wire
from kedge.session.session import NEVER, Broadcast, Request
from kedge.session.terms import NoData, Terms
from kedge.sim.clients import Clients, all_weights
from kedge.sim.store import FirstState

Parts = tuple[Part, ...]
LIGHT = 0.1  # rows of less than this share of the largest weight do not count


class Usage(NamedTuple):
    """What a round uses.

    Attributes:
        rows: distinct rows that count in the update.
        batch: rows that count in the batch that has fewest, ``rows`` at most.
        steps: batches.
    """

    rows: int
    batch: int
    steps: int


def usage_of(rows: Tensor, weights: Tensor, shares: Tensor) -> Usage:
    """The usage of a round.

    Args:
        rows: rows of the batches, ``[steps, batch]``.
        weights: weight of each of them in the loss, likewise.
        shares: what is left of each step in the update, ``[steps]``.

    >>> rows = torch.tensor([[0, 1], [1, 1]])
    >>> usage_of(rows, torch.ones(2, 2), torch.ones(2))
    Usage(rows=2, batch=2, steps=2)
    >>> usage_of(rows, torch.ones(2, 2), torch.tensor([0.0, 1.0]))
    Usage(rows=1, batch=1, steps=2)
    """
    left = weights * shares[:, None]
    count = len(rows[_counts(left, left.amax())].unique())
    batches = _counts(weights, weights.amax(1, keepdim=True)).sum(1)
    return Usage(count, min(count, int(batches.min())), len(rows))


def _counts(weights: Tensor, largest: Tensor) -> Tensor:
    return (weights >= LIGHT * largest) & (weights > 0)


def remaining(optim: Optimizer, lr: float, pull: float | None, steps: int) -> Tensor:
    """What is left of the gradient of each step in the update of a round, ``[steps]``.

    Args:
        optim: the local optimiser.
        lr: the learning rate.
        pull: the mu of a pull mu (w - anchor), see :meth:`kedge.core.part.Part.anchor_pull`; None
            if it is not known.
        steps: number of steps.

    >>> remaining(SGD(weight_decay=5.0), 0.1, 0.0, 3)
    tensor([0.2500, 0.5000, 1.0000], dtype=torch.float64)
    """
    decay = getattr(optim, "weight_decay", 0.0)
    if pull == 0 and decay == 0:
        return torch.ones(steps, dtype=torch.float64)
    if pull is None or not isinstance(optim, SGD):  # the last step is left, whatever is forgotten
        return (torch.arange(1, steps + 1) == steps).double()
    impulse, done, velocity = list[float](), 0.0, 0.0  # the effect of one gradient, step by step
    for t in range(steps):
        gradient = float(t == 0) - lr * (decay + pull) * done
        velocity = optim.momentum * velocity + gradient
        done += gradient + optim.momentum * velocity if optim.nesterov else velocity
        impulse.append(abs(done))
    return torch.tensor(impulse[::-1], dtype=torch.float64)


MAX_ROWS = 10**8  # of all batches of a round


class Silo:
    """Data and state of one client of a federation.

    Args:
        terms: the terms of the federation.
        model: the model, with the same initial weights at every member.
        data: a federation whose only client is this one.
        client: its number among all clients of the federation.
        releases: parts that act last on what leaves, besides those of the terms.

    Raises:
        KedgeError: the data are not those of one client, or there is no such client.
        TermsError: the terms ask for too many rows in a round.

    Example::

        silo = Silo(terms, model, data, client=3)
        update = silo.answer(request, session.ledger[3])
    """

    def __init__(
        self, terms: Terms, model: Model, data: Federation, client: int, releases: Parts = ()
    ) -> None:
        if data.num_clients != 1:
            raise KedgeError(f"a silo holds one client's data, these are {data.num_clients}")
        if not 0 <= client < terms.num_clients:
            raise KedgeError(f"client {client} is not in 0..{terms.num_clients - 1}")
        drawn = terms.workload.work.steps_for(data.sizes[0]) * terms.batch
        if drawn > MAX_ROWS:
            raise TermsError(f"a round draws {drawn} rows, more than {MAX_ROWS}")
        self.terms, self.data, self.client = terms, data, client
        self.bound = bind(terms, model, data, releases).with_noise(
            lambda *drawn: self._noise(*drawn)
        )
        self._noise: Noise = rng.normal_like
        #: States by round: the last accepted one, and that of the last attempt.
        self.states: dict[int, Tree] = {}
        self._clients = Clients(
            self.bound, terms.workload, data, Loop(), FirstState(self.bound.client()), ids=[client]
        )

    def request(self, round: int, broadcast: Broadcast, part: str = "") -> Request:
        """A request to this client: to train, or to answer a part's survey."""
        return Request(round, [self.client], part, broadcast)

    def read(self, value: Tree) -> Broadcast:
        """A broadcast as it was unpacked, in the order of the method's own trees: a sum over leaves
        must not depend on the order in which they arrive. Raises a WireError if it does not fit."""
        nothing = value is None or value == {}  # if all weights are private
        broadcast = Broadcast(NO_WEIGHTS, {}) if nothing else value
        if not isinstance(broadcast, Broadcast):
            raise WireError("the message is no broadcast of a server")
        sent = _in_order(broadcast.sent, self._sent)
        if wire.template_of(sent) != wire.template_of(self._sent):
            raise WireError("what the server's parts sent is not of this method; compare the terms")
        return Broadcast(checked_weights(self.bound, broadcast.weights), sent)

    @cached_property
    def _sent(self) -> Tree:
        """What parts broadcast before the first round; later broadcasts have its structure."""
        return self.bound.sent(self.bound.server())

    def answer(self, request: Request, accepted: int = NEVER, noise: Noise | None = None) -> Update:
        """Train one round, or answer a part's survey. The next state of the training is stored
        until the server accepts the update; a survey changes none.

        Args:
            request: see :meth:`request`.
            accepted: the last round in which the server accepted this client's update. The client
                continues from its state after that round.
            noise: the source of the noise on what leaves; that of a simulation for None.

        Raises:
            KedgeError: the state of the accepted round is missing.
        """
        [done] = self._at(accepted, noise).updates(request)
        if not request.part:
            self.states = {r: state for r, state in self.states.items() if r == accepted}
            self.states[request.round] = done.next_state
        return done.update

    def personal(self, request: Request, accepted: int = NEVER) -> Weights:
        """The personal weights of this client."""
        weights: Weights = tree.take(self._at(accepted).personal(request), 0)
        return weights

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
        return layout_of(self.bound.model).place(all_weights(self.bound, public))

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
        return self._clients.rows(self.client, round)

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

    def _at(self, accepted: int, noise: Noise | None = None) -> Clients:
        """This client in its state after an accepted round."""
        self._clients.states = FirstState(self.state(accepted))
        self._noise = noise or rng.normal_like
        return self._clients


def model_of(terms: Terms, module: nn.Module) -> Model:
    """The model of the terms around a module."""
    return Model(module, batchnorm=terms.batchnorm, precision=terms.precision)


def bind(
    terms: Terms,
    model: Model,
    data: Federation | NoData,
    releases: Parts = (),
    device: torch.device | None = None,
) -> Bound:
    """Bind the method of the terms to a model, prepared for the loop engine, and to data.

    Without data, as on the server, it is bound on the given ``device``.
    """
    device = data.device if isinstance(data, Federation) else device or torch.device("cpu")
    prepared = Loop().prepare(model, device, getattr(torch, terms.dtype))
    return terms.bind(prepared, data, device, releases)


def checked_weights(bound: Bound, value: Tree) -> Weights:
    """Public weights as they were unpacked; a WireError if they do not fit the model."""
    weights = value if isinstance(value, Weights) else Weights({}, {})
    if wire.template_of(weights) != wire.template_of(bound.only_public(bound.initial)):
        raise WireError("the server's weights are not those of this model; compare the terms")
    return weights


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
