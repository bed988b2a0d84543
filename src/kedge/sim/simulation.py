"""A federation, a method and an engine, round after round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kedge.core import client, rng, server, tree
from kedge.core.bound import Bound, Server, client_key
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.view import Chunks, Info, Job
from kedge.data.federation import Federation, LocalWork
from kedge.engines import stacked
from kedge.engines.cohort import Cohort, Draw, sent, take_jobs
from kedge.engines.lanes import Group, Outcome, Stack
from kedge.engines.registry import How, make_engine
from kedge.engines.vector import Vector
from kedge.errors import FieldError, KedgeError, NotFinite
from kedge.sim.evaluate import held_sums
from kedge.sim.joint import stores
from kedge.sim.store import Store

WEIGHTINGS = ("size", "uniform")


class Simulation:
    """The state of a run between rounds, and :meth:`run_round` to go on.

    Nothing depends on how many rounds ran before in this process: the next round is a function of
    ``server``, ``store`` and ``round`` alone, so a run that is saved and loaded goes on unchanged.
    """

    def __init__(
        self,
        federation: Federation,
        model: Model | nn.Module,
        method: str | Method | Part = "fedavg",
        *,
        optim: Optimizer | None = None,
        work: LocalWork | None = None,
        per_round: int | None = None,
        weighting: str = "size",
        engine: str | How = "vector",
        seed: int = 0,
    ) -> None:
        model = model if isinstance(model, Model) else Model(model)
        self.how = how = engine if isinstance(engine, How) else How(engine)
        likes = model.likes_channels_last(federation.device, federation.dtype)
        model.channels_last = how.engine == "loop" and likes
        at_once = how.engine == "vector" and federation.device.type == "cuda"
        model.stacked = at_once and stacked.available()
        if weighting not in WEIGHTINGS:
            raise FieldError(f"weighting = {weighting!r} is not one of: {', '.join(WEIGHTINGS)}")
        per_round = federation.num_clients if per_round is None else per_round
        if not 1 <= per_round <= federation.num_clients:
            raise FieldError(
                f"per_round = {per_round} is not between 1 and the {federation.num_clients} clients"
            )
        self.federation, self.per_round, self.weighting = federation, per_round, weighting
        self.work, self.engine = work or LocalWork(), make_engine(how, federation.device)
        self.key = rng.key(seed)  # on the host, where drawing a round's few numbers is quick
        initial = tree.map(partial(_placed, federation, model), model.weights())
        self.bound = Bound(
            parse(method),
            model,
            federation.task,
            optim or SGD(),
            federation,
            num_clients=federation.num_clients,
            input_shape=federation.input_shape,
            initial=initial,
            key=rng.fold(self.key, "init").to(federation.device),
        )
        #: Samples per class on each client, [clients, C]; no columns where no part asks.
        self.label_counts = torch.zeros((federation.num_clients, 0), device=federation.device)
        if self.bound.needs("labels"):
            self.label_counts = federation.label_counts()
        self.server: Server = self.bound.server()
        self.store = Store(self.bound.client(), federation.num_clients, how.state, how.folder)
        self.round = 0
        #: A GPU is given its work and does it by itself; the next round is drawn meanwhile.
        self.draws_ahead = federation.device.type == "cuda"
        self._ahead: Draw | None = None

    # -- rounds -------------------------------------------------------------------------------

    def run_round(self, clients: Sequence[int] | None = None, check: bool = True) -> Totals:
        """One round with a drawn cohort (or the given clients).

        ``check`` stops at a loss that is not finite, for which it waits for the device.
        """
        clients = list(clients) if clients is not None else self.draw_cohort(self.round)
        before = self.server
        try:
            surveyed = self.surveys(clients)
            group, done = self.train(clients)
            if check:
                self.check_finite(done.totals, clients)
        except BaseException:
            self.server = before  # a round that failed can be run again
            raise
        return self.advance(group, done, surveyed)

    def train(self, clients: list[int]) -> tuple[Group, Outcome]:
        """What clients return in the present round, as a pure function of the state."""
        found = self._train(clients)
        if self.draws_ahead:
            self._ahead = self.draw(self.draw_cohort(self.round + 1), self.round + 1)
        return found

    def _train(self, clients: list[int]) -> tuple[Group, Outcome]:
        phases = self.bound.phases(self.round)
        if not isinstance(self.engine, Vector):
            cohort = self.cohort(clients)
            totals, kept = self.engine.train(self.bound, cohort, phases)
            every = list(range(len(clients)))
            return Group.of(self.bound, cohort), Outcome(totals, [(every, kept)])
        cohort = self.cohort(clients, state=False)
        group = Group.of(self.bound, cohort)
        stack = Stack(self.bound, [group], cohort.jobs, cohort.plan, *stores([self], [group]))
        return group, self.engine.train_stack(stack, phases)[0]

    def surveys(self, clients: Sequence[int]) -> int:
        """Ask what comes before the present round, of which these are the clients; bytes sent."""
        surveyed = 0
        for part in self.bound.parts_with("survey"):
            if part.surveys() == "every" or (part.surveys() == "first" and self.round == 0):
                surveyed += self.survey(part, clients if part.surveys() == "every" else None)
        return surveyed

    def advance(self, group: Group, done: Outcome, surveyed: int) -> Totals:
        """Take in what the clients of a round returned."""
        totals, key = done.totals, self._server_key()
        after = server.server_round(self.bound, self.server, totals, self.round, key)
        for places, kept in done.kept:
            self.store.put([group.clients[i] for i in places], kept)
        self.server = after
        self.round += 1
        public = self.bound.only_public(group.anchor)
        down = tree.nbytes(public) + tree.nbytes(group.sent)
        up = totals["up_bytes"] + surveyed
        return totals | {"up_bytes": up, "down_bytes": down * len(group.clients)}

    def check_finite(self, totals: Totals, clients: Sequence[int]) -> None:
        """Stop at a loss that is not finite, and say whose it is."""
        terms = totals["terms"]
        bad = ~torch.stack([torch.isfinite(v) for v in terms.values()]).all(0)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            values = ", ".join(f"{name} {float(value[i]):.4g}" for name, value in terms.items())
            raise NotFinite(
                f"the loss of client {clients[i]} is not finite in round {self.round}; "
                f"terms: {values}. Lower the learning rate or set clip"
            )

    def finish(self) -> None:
        """Ask for the surveys that come after the last round."""
        for part in self.bound.parts_with("survey"):
            if part.surveys() == "last":
                self.survey(part, None)

    def survey(self, part: Part, clients: Sequence[int] | None) -> int:
        """Ask clients (all of them for None), let the part take the answers in; bytes they sent."""
        cohort = self.cohort(list(clients or range(self.federation.num_clients)))
        answers = self.engine.survey(self.bound, cohort, self.bound.phases(self.round), part)
        key = self._server_key()
        self.server = server.absorb(self.bound, self.server, part, answers, self.round, key)
        return int(answers["up_bytes"])

    def draw_cohort(self, round: int) -> list[int]:
        """Clients of a round: a fixed count without replacement, the same for every method."""
        if self.per_round == self.federation.num_clients:
            return list(range(self.per_round))
        ahead = self._ahead
        if ahead is not None and (ahead.round, ahead.settings) == (round, self._settings):
            return list(ahead.clients)
        key = rng.fold(rng.fold(self.key, "cohort"), round)
        drawn = rng.permutation(key, self.federation.num_clients)[: self.per_round]
        return sorted(drawn.tolist())

    def draw(self, clients: Sequence[int], round: int) -> Draw:
        """What some clients will do in a round, as far as nothing has to be trained for it."""
        ahead, clients, settings = self._ahead, list(clients), self._settings
        if ahead is not None and ahead[:3] == (round, clients, settings):
            return ahead
        fed, dtype = self.federation, self.federation.dtype
        ids = torch.tensor(clients)
        keys = client_key(self.key, round, ids)
        steps = [self.work.steps_for(fed.sizes[k]) for k in clients]
        sizes = torch.tensor([fed.sizes[k] for k in clients], dtype=dtype)
        taken = torch.tensor(steps, dtype=dtype)
        info = Info(
            client=ids,
            round=torch.full_like(ids, round),
            lr=torch.full_like(sizes, self.bound.lr(round)),
            num_steps=taken,
            effective_steps=self.bound.optim.effective_steps(taken),
            num_examples=sizes,
            weight=sizes if self.weighting == "size" else torch.ones_like(sizes),
        )
        plan = fed.plan(rng.fold(keys, "plan"), clients, self.work, steps)
        return Draw(round, clients, settings, keys, steps, info, plan)

    @property
    def _settings(self) -> tuple[object, ...]:
        """What a draw depends on besides; it may be changed between rounds."""
        return self.work, self.per_round, self.weighting

    def cohort(self, clients: Sequence[int], state: bool = True) -> Cohort:
        """The jobs of some clients for the present round, with or without their own state."""
        fed, bound, drawn = self.federation, self.bound, self.draw(clients, self.round)
        info = tree.map(self._to_device, drawn.info)
        none = torch.zeros((len(clients), 0), device=fed.device)
        jobs = Job(
            anchor=self.server.weights,
            sent=bound.sent(self.server),
            client=self.store.gather(clients) if state else {},
            info=info,
            key=self._to_device(drawn.keys),
            counts=self.label_counts[info.client],
            chunks=fed.chunks(clients) if bound.needs("sweep") else Chunks(none, none),
        )
        return Cohort(drawn.clients, jobs, drawn.steps, fed.rows[self._to_device(drawn.plan)])

    def _server_key(self) -> Tensor:
        return self._to_device(rng.fold(rng.fold(self.key, "server"), self.round))

    def _to_device(self, x: Tensor) -> Tensor:
        return sent(x, self.federation.device)

    # -- results ------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The global model."""
        return self.server.weights

    def module(self) -> nn.Module:
        """The global model as an ordinary module."""
        return self.bound.model.module(self.server.weights)

    def personal(self, clients: Sequence[int] | None = None) -> Weights:
        """The weights each client would use itself, stacked."""
        clients = list(clients if clients is not None else range(self.federation.num_clients))
        phases = self.bound.phases(self.round)
        return self.engine.personal(self.bound, self.cohort(clients), phases)

    def prepared(self, client_id: int) -> dict[str, Tree]:
        """What parts prepare on a client for the coming round, by part: FedCOG's generated samples
        are ``prepared(k)["fedcog"]``. Nothing is trained, and the round itself will be the same."""
        cohort = self.cohort([client_id])
        job = take_jobs(cohort.jobs, 0)
        return client.begin(self.bound, job, self.bound.phases(self.round)).local

    def evaluate(self, weights: Weights | None = None) -> dict[str, float]:
        """Metric and loss of a model (the global one for None), as a mean over the test angles."""
        return self.evaluate_all(weights)[0]

    def evaluate_all(
        self, weights: Weights | None = None
    ) -> tuple[dict[str, float], list[float | None]]:
        """The same, and the metric class by class over all angles (None: no such class)."""
        fed = self.federation
        found = [self._measure(weights or self.weights, fed.test_batches(a)) for a in fed.angles]
        reports = [fed.task.report(sums) for sums in found]
        mean = {name: sum(r[name] for r in reports) / len(reports) for name in reports[0]}
        total = found[0]
        for sums in found[1:]:
            total = tree.add(total, sums)
        return mean, fed.task.per_class(total)

    def evaluate_clients(self, personal: bool = False) -> list[dict[str, float]]:
        """The same on every client's held-out rows (empty where there are none): the global model,
        or the client's own."""
        fed = self.federation
        if not fed.held:
            raise FieldError("no client holds anything out for testing; set holdout, e.g. 0.2")
        weights = self.personal() if personal else self.weights
        # by the batch at hand, the result would depend on who is tested beside a client
        if isinstance(self.engine, Vector) and self.bound.model.batchnorm != "batch":
            found = held_sums(self.bound, fed, weights, personal)
        else:
            every = [tree.take(weights, k) if personal else weights for k in range(fed.num_clients)]
            found = [
                self._measure(w, fed.held_batches(k)) if len(fed.held[k]) else {}
                for k, w in enumerate(every)
            ]
        return [fed.task.report(sums) if sums else {} for sums in found]

    @torch.no_grad()
    def _measure(self, weights: Weights, batches: Iterable[Batch]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for batch in batches:
            logits = self.bound.model.forward(weights, batch.x, "eval").logits
            ones = torch.ones(len(logits), dtype=logits.dtype, device=logits.device)
            sums = self.federation.task.sums(logits, batch, ones)
            total = tree.add(total, sums) if total else sums
        return total

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next round depends on, as named arrays; those of clients are the ones that
        it will write to."""
        return tree.to_wire(self._held())

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a saved state of the same method, model and number of clients."""
        held = self._held()
        wanted, given = tree.to_wire(held), set(state)
        wrong = sorted(
            (wanted.keys() ^ given)
            | {n for n in wanted.keys() & given if wanted[n].shape != state[n].shape}
        )
        if wrong:
            raise KedgeError(
                "this state belongs to another method, model or federation; "
                f"{len(wrong)} arrays do not fit, the first is {wrong[0]!r}"
            )
        found = tree.from_wire(state, held)
        loaded = Server(found["weights"], found["slots"])
        self.server = tree.map(lambda x: x.to(self.federation.device), loaded)
        self.store.rows = found["clients"]
        self.round = int(found["round"])

    def _held(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "clients": self.store.rows,
            "round": torch.tensor(self.round),
        }


def _placed(federation: Federation, model: Model, w: Tensor) -> Tensor:
    """A weight on the device; of a convolution with a client axis, as its kernels read it."""
    w = w.to(federation.device, federation.dtype if w.is_floating_point() else None)
    turned = model.stacked and w.ndim == 4
    return w.contiguous(memory_format=torch.channels_last) if turned else w
