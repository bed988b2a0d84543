"""A federation, a method and an engine, round after round."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kedge.core import client, rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine
from kedge.engines.cohort import Cohort, Group, Outcome
from kedge.engines.engine import as_execution
from kedge.engines.layout import initial_weight
from kedge.errors import FieldError
from kedge.session.check_client import Checks, check_client, check_survey, watching
from kedge.session.session import Session, read_state
from kedge.sim.cohorts import Cohorts
from kedge.sim.store import FirstState, Store


class Simulation:
    """A session whose clients an engine trains, and :meth:`run_round` to go on.

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
        engine: str | Execution = "vector",
        seed: int = 0,
    ) -> None:
        model = model if isinstance(model, Model) else Model(model)
        self.federation, self.execution = federation, as_execution(engine)
        device, dtype = federation.device, federation.dtype
        self.engine = make_engine(self.execution, device)
        model = self.engine.prepare(model, device, dtype)

        def place(w: Tensor) -> Tensor:
            w = w.to(device, dtype if w.is_floating_point() else None)
            return initial_weight(model, w)

        with watching():  # the hooks that run once
            self.bound = Bound(
                parse(method),
                model,
                federation.task,
                optim or SGD(),
                federation,
                num_clients=federation.num_clients,
                input_shape=federation.input_shape,
                initial=tree.map(place, model.weights()),
                key=rng.fold(rng.key(seed), "init").to(device),
            )
            self.session = Session(
                self.bound, work=work, per_round=per_round, weighting=weighting, seed=seed
            )
            first_state = self.bound.client()
        self._checks = Checks(self.bound.parts)
        #: Samples per class on each client, [clients, C]; no columns where no part asks.
        self.label_counts = torch.zeros((federation.num_clients, 0), device=device)
        if self.bound.needs("labels"):
            self.label_counts = federation.label_counts()
        state, folder = self.execution.state, self.execution.folder
        self.store = Store(first_state, federation.num_clients, state, folder)
        #: A GPU is given its work and does it by itself; the next round is drawn meanwhile.
        self.draws_ahead = device.type == "cuda"
        self._cohorts = Cohorts([weakref.proxy(self)])  # no cycle: a simulation ends with its name

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
                self.session.check_finite(done.totals, clients)
        except BaseException:
            self.server = before  # a round that failed can be run again
            raise
        return self.advance(group, done, surveyed)

    def train(self, clients: list[int]) -> tuple[Group, Outcome]:
        """What clients return in the present round, as a pure function of the state."""
        self.check_parts(clients[0])
        cohort = self._cohorts.form([clients], self.round)
        [done] = self.engine.train(cohort)
        self._cohorts.draw_ahead(self.round + 1)
        return cohort.groups[0], done

    def surveys(self, clients: list[int]) -> int:
        """Ask what comes before the present round, of which these are the clients; bytes sent."""
        asks = self.session.surveys(clients)
        return sum(self.survey(self.bound.part(ask.part), ask.clients) for ask in asks)

    def advance(self, group: Group, done: Outcome, surveyed: int) -> Totals:
        """Take in what the clients of a round returned."""
        phases = self.bound.at(self.round).phases
        with self._checks.once("server", phases) as due, watching(due):
            after = self.session.aggregate(done.totals)
        for places, states in done.next_states:
            self.store.put([group.clients[i] for i in places], states)
        self.session.accept(after, group.clients)
        down = tree.nbytes(self.bound.only_public(group.anchor)) + tree.nbytes(group.sent)
        up = done.totals["up_bytes"] + surveyed
        return done.totals | {"up_bytes": up, "down_bytes": down * len(group.clients)}

    def aggregate(self, totals: Totals) -> Server:
        """The server after a round with these totals; the simulation does not move."""
        return self.session.aggregate(totals)

    def finish(self) -> None:
        """Ask for the surveys that come after the last round."""
        for ask in self.session.last_surveys():
            self.survey(self.bound.part(ask.part), ask.clients)

    def survey(self, part: Part, clients: Sequence[int] | None) -> int:
        """Ask clients (all of them for None), let the part take the answers in; bytes they sent."""
        every = list(clients if clients is not None else range(self.federation.num_clients))
        ask, cohort = self.session.ask_survey(part, every), self.cohort(every)
        with self._checks.once(f"survey of {part.name}", cohort.bound.phases) as due:
            if due:
                check_survey(cohort.bound, take_jobs(cohort.jobs, 0), part, every[0])
            totals = self.engine.survey(cohort, part)
            with watching(due):
                return self.session.absorb(ask, totals)

    def check_parts(self, client_id: int) -> None:
        """Before the first round of each phase, run other people's parts on one client and watch
        their hooks, see :mod:`kedge.session.check_client`."""
        with watching(self._checks.foreign):
            phases = self.bound.at(self.round).phases
        with self._checks.once("client", phases) as due:
            if due:
                cohort = self.cohort([client_id])
                job, index = take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
                check_client(cohort.bound, job, index, client_id)

    def draw_cohort(self, round: int) -> list[int]:
        """Clients of a round, see :meth:`~kedge.session.Session.draw_clients`."""
        return self.session.draw_clients(round)

    def cohort(self, clients: Sequence[int]) -> Cohort:
        """Some clients with their own state, as an engine gets them in the present round."""
        return self._cohorts.form([list(clients)], self.round, states=True)

    def trial(self, execution: Execution, round: int) -> Simulation:
        """A simulation like this one in a given round, for measuring only: no client has trained
        yet, and nothing that it does is kept."""
        made = Simulation(
            self.federation,
            self.bound.model,
            self.bound.method,
            optim=self.bound.optim,
            work=self.work,
            per_round=self.session.per_round,
            weighting=self.session.weighting,
            engine=execution,
        )
        made.store, made._checks = FirstState(self.bound.client()), Checks(())
        made.session.round = round
        return made

    # -- the session's state ------------------------------------------------------------------

    @property
    def server(self) -> Server:
        return self.session.server

    @server.setter
    def server(self, server: Server) -> None:
        self.session.server = server

    @property
    def round(self) -> int:
        """The round that comes next, from 0."""
        return self.session.round

    @round.setter
    def round(self, round: int) -> None:
        self.session.round = round

    @property
    def key(self) -> Tensor:
        """The root key of the run."""
        return self.session.key

    @property
    def work(self) -> LocalWork:
        return self.session.work

    @work.setter
    def work(self, work: LocalWork) -> None:
        self.session.work = work

    @property
    def per_round(self) -> int:
        return self.session.per_round

    @per_round.setter
    def per_round(self, count: int) -> None:
        self.session.per_round = count

    @property
    def weighting(self) -> str:
        return self.session.weighting

    @weighting.setter
    def weighting(self, weighting: str) -> None:
        self.session.weighting = weighting

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
        return self.engine.personal(self.cohort(clients))

    def prepared(self, client_id: int) -> dict[str, Tree]:
        """What parts prepare on a client for the coming round, by part: FedCOG's generated samples
        are ``prepared(k)["fedcog"]``. Nothing is trained, and the round itself will be the same."""
        cohort = self.cohort([client_id])
        return client.begin(cohort.bound, take_jobs(cohort.jobs, 0)).local

    def evaluate(self, weights: Weights | None = None) -> dict[str, float]:
        """Metric and loss of a model (the global one for None), as a mean over the test angles."""
        return self.evaluate_all(weights)[0]

    def evaluate_all(
        self, weights: Weights | None = None
    ) -> tuple[dict[str, float], list[float | None]]:
        """The same, and the metric class by class over all angles (None: no such class)."""
        fed = self.federation
        found = [self.sums(weights or self.weights, fed.test_batches(a)) for a in fed.angles]
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
        if not fed.held_out:
            raise FieldError("no client holds anything out for testing; set holdout, e.g. 0.2")
        weights = self.personal() if personal else self.weights
        found = self.engine.evaluate(self.bound, weights, fed.held_out, personal)
        return [fed.task.report(sums) if sums else {} for sums in found]

    @torch.no_grad()
    def sums(self, weights: Weights, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """The task's sums of one model over some batches."""
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
        found = read_state(state, self._held())
        loaded = Server(found["weights"], found["slots"])
        self.server = tree.map(lambda x: x.to(self.federation.device), loaded)
        self.store.rows = found["clients"]
        self.session.round = int(found["round"])

    def _held(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "clients": self.store.rows,
            "round": torch.tensor(self.round),
        }
