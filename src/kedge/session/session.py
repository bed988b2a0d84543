"""The server's side of a run: one round, whoever answers.

A round is a generator over the session's state, which it does not change. It yields requests to
clients and is sent their totals; at its end it returns what :meth:`Session.accept` commits. So a
round that fails, pauses or is interrupted leaves no trace, and can be asked again::

    done = drive(session.rounds(), answer)       # answer(request) -> Totals
    session.accept(done)

A simulation, worker processes and a real federation differ in ``answer`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, server, tree
from kedge.core.bound import Bound, Server
from kedge.core.steps import REFERENCE as PLAIN_STEPS
from kedge.core.steps import Steps
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import ZERO, Totals
from kedge.core.work import Workload
from kedge.errors import KedgeError, NotFinite
from kedge.session.purity import Checks, watching
from kedge.session.sampler import Sampler, Uniform

NEVER = -1  # in the ledger: no update of this client was accepted yet


class Broadcast(NamedTuple):
    """What every client of a request receives: the public weights, and ``sent`` of each part."""

    weights: Weights
    sent: dict[str, Tree]


class Request(NamedTuple):
    """A request to clients: to train, or to answer a part's survey."""

    round: int
    clients: list[int]
    part: str  # whose survey is asked; empty: train
    broadcast: Broadcast


class Done(NamedTuple):
    """What a round comes to, before it is accepted."""

    server: Server
    round: int  # the next one
    totals: Totals  # of the training
    up_bytes: int  # payload from clients, the answers to surveys included
    down_bytes: int  # payload to clients, likewise

    @property
    def losses(self) -> Params:
        """Each client's mean loss in the training, by term: ``[K]`` each."""
        return self.totals.stacked.losses


Rounds = Generator[Request, Totals, Done]


class Session:
    """The state of a run between rounds, without data.

    The next round is a function of ``server`` and ``round`` alone, so a session that is saved and
    restored continues unchanged. ``ledger[k]`` is the last round in which the update of client k
    was accepted: the client continues from its state after that round and discards later attempts.

    Args:
        bound: the method, bound to a model, a task, an optimiser and data.
        workload: how much each client trains, and the seed.
        sampler: draws the cohort of a round; all clients for None.

    Raises:
        FieldError: the sampler does not suit the number of clients.

    Example::

        session = terms.session(bound)
        session.accept(drive(session.rounds(), clients.answer))
    """

    def __init__(self, bound: Bound, workload: Workload, sampler: Sampler | None = None) -> None:
        self.bound, self.workload, self.sampler = bound, workload, sampler or Uniform()
        self.sampler.check(workload.num_clients)
        self.key = rng.key(workload.seed)  # on the host: a round's few draws are faster there
        self.checks = Checks(bound.parts)
        self.server: Server = bound.server()
        self.round = 0
        self.ledger = [NEVER] * workload.num_clients
        self._drawn: tuple[tuple[Sampler, int], list[int]] | None = None

    def draw_clients(self, round: int) -> list[int]:
        """The cohort of a round in ascending order. It depends on the seed and the round alone, so
        it is the same for every method."""
        if self._drawn is None or self._drawn[0] != (self.sampler, round):
            key = rng.fold(rng.fold(self.key, "cohort"), round)
            drawn = self.sampler.draw(key, round, self.workload.num_clients)
            self._drawn = (self.sampler, round), drawn
        return list(self._drawn[1])

    @property
    def cohort_size(self) -> int:
        """The number of clients to expect in a round."""
        return self.sampler.size(self.workload.num_clients)

    # -- one round ----------------------------------------------------------------------------

    def rounds(
        self,
        clients: Sequence[int] | None = None,
        *,
        steps: Steps = PLAIN_STEPS,
        check: Literal["none", "losses", "state"] = "losses",
    ) -> Rounds:
        """The present round: surveys that are due, then training; without clients, neither.

        Args:
            clients: the cohort; drawn from the seed for None.
            steps: how parts take steps on the server.
            check: what must be finite: the losses, which synchronises a GPU, and with ``state``
                the server's state after every request, too.

        Raises:
            NotFinite: something that is checked is not finite.
        """
        cohort = list(clients) if clients is not None else self.draw_clients(self.round)
        plan = [*self.surveys(cohort), ("", cohort)] if cohort else []
        return self._run(plan, self.round + 1, steps, check)

    def last_surveys(self, check: Literal["none", "losses", "state"] = "losses") -> Rounds:
        """The surveys after the last round."""
        everyone = list(range(self.workload.num_clients))
        last = [p.name for p in self.bound.parts_with("survey") if p.surveys() == "last"]
        return self._run([(name, everyone) for name in last], self.round, PLAIN_STEPS, check)

    def survey(self, part: str, clients: Sequence[int]) -> Rounds:
        """One survey, whether it is due or not."""
        return self._run([(part, list(clients))], self.round, PLAIN_STEPS, "losses")

    def surveys(self, cohort: list[int]) -> list[tuple[str, list[int]]]:
        """The surveys before the round, as parts and clients; ``first`` asks all clients before the
        first round, ``every`` the cohort."""
        plan = []
        for part in self.bound.parts_with("survey"):
            if part.surveys() == "every":
                plan.append((part.name, cohort))
            elif part.surveys() == "first" and self.round == 0:
                plan.append((part.name, list(range(self.workload.num_clients))))
        return plan

    def _run(
        self, plan: list[tuple[str, list[int]]], next_round: int, steps: Steps, check: str
    ) -> Rounds:
        state, trained, up, down = self.server, ZERO, 0, 0
        for part, clients in plan:
            request = self.request(part, clients, state)
            totals = yield request
            up += totals.up_bytes
            down += len(clients) * tree.nbytes(request.broadcast)
            if check != "none":
                check_losses(totals)
            after = self._after(state, request, totals, steps)
            if check == "state":
                self._check_state(after, state)
            state = after
            trained = trained if part else totals
        return Done(state, next_round, trained, up, down)

    def request(
        self, part: str, clients: Sequence[int] | None = None, state: Server | None = None
    ) -> Request:
        """A request of the present round.

        Args:
            part: whose survey is asked; empty: train.
            clients: whom to ask; the cohort of the round for None.
            state: the server's state; the accepted one for None.
        """
        state = state or self.server
        asked = self.draw_clients(self.round) if clients is None else list(clients)
        public = self.bound.only_public(state.weights)
        return Request(self.round, asked, part, Broadcast(public, self.bound.sent(state)))

    def _after(self, state: Server, request: Request, totals: Totals, steps: Steps) -> Server:
        """The server's state once it has taken the totals of a request."""
        bound, round = self.bound, request.round
        key = rng.fold(rng.fold(self.key, "server"), round)
        key = key.to(bound.spec.device, non_blocking=True)
        phases = bound.at(round).phases
        with self.checks.once(f"totals of {request.part}", phases) as due, watching(due):
            if request.part:
                return server.absorb(bound, state, bound.part(request.part), totals, round, key)
            return server.server_round(bound, state, totals, round, key, steps)

    def _check_state(self, after: Server, before: Server) -> None:
        for what, value, known in (
            ("weights are", after.weights, None),
            ("state of the method is", after.slots, before.slots),
            ("broadcast is", self.bound.sent(after), None),
        ):
            if not tree.is_finite(value) and (known is None or tree.is_finite(known)):
                raise NotFinite(f"the global {what} not finite after round {self.round + 1}")

    def accept(self, done: Done) -> None:
        """Commit a round: all that changes a session, but for :meth:`load_state`."""
        for client, round in done.totals.clients.items():
            self.ledger[client] = round
        self.server, self.round = done.server, done.round

    def output(self) -> Weights:
        """The weights to evaluate and to keep as the model; clients start from the others."""
        with self.checks.once("output", {}) as due, watching(due):
            return server.output(self.bound, self.server)

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The state that the next round depends on, as named tensors."""
        return tree.to_wire(self._state_tree())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state of the same method, model and clients; a KedgeError for any other."""
        loaded = read_state(state, self._state_tree())
        server, device = Server(loaded["weights"], loaded["slots"]), self.bound.spec.device
        self.server = tree.map(lambda x: x.to(device), server)
        self.round = int(loaded["round"])
        self.ledger = loaded["ledger"].tolist()

    def _state_tree(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "round": torch.tensor(self.round),
            "ledger": torch.tensor(self.ledger),
        }


def drive(rounds: Rounds, answer: Callable[[Request], Totals]) -> Done:
    """Run a round to its end: every request is answered by ``answer``."""
    try:
        request = next(rounds)
        while True:
            request = rounds.send(answer(request))
    except StopIteration as end:
        done: Done = end.value
        return done


def check_losses(totals: Totals) -> None:
    """Raise NotFinite, with the client's number, if a loss is not finite."""
    losses = totals.stacked.losses
    if not losses:
        return
    bad = ~torch.stack([torch.isfinite(v) for v in losses.values()]).all(0)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        client, round = list(totals.clients.items())[i]
        values = ", ".join(f"{name} {float(value[i]):.4g}" for name, value in losses.items())
        raise NotFinite(
            f"the loss of client {client} is not finite in round {round + 1}; "
            f"terms: {values}. Lower the learning rate or set clip"
        )


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
