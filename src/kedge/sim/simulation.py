"""Simulate a federated method on one machine: a federation, a method and an engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kedge.core import client, rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine
from kedge.engines.cohort import Cohort, Group, Outcome
from kedge.engines.engine import Engine, as_execution
from kedge.engines.layout import initial_weight
from kedge.engines.server_steps import server_steps
from kedge.session.check_client import Checks, check_client, check_survey, watching
from kedge.session.session import Session, read_state
from kedge.sim.cohorts import Cohorts
from kedge.sim.evaluation import Evaluation
from kedge.sim.store import FirstState, Store


class Simulation(Evaluation):
    """A session whose clients are trained by an engine on this machine.

    The next round is a function of ``server``, ``store`` and ``round`` alone. A run that is saved
    by :meth:`state` and restored by :meth:`load_state` continues bit for bit.

    Args:
        federation: the data of all clients, with task, device and dtype.
        model: the network; its weights are the initial global model and are not changed.
        method: a method string such as ``"scaffold+fedprox(mu=0.1)"``, a method or a part.
        optim: the local optimiser; ``SGD(lr=0.1)`` for None.
        work: batch size and local steps or epochs; one epoch of batches of 32 for None.
        per_round: clients in the cohort of a round; all of them for None.
        weighting: client weights p_k: ``"size"`` (number of samples) or ``"uniform"``.
        engine: ``"loop"``, ``"vector"`` or an :class:`~kedge.engines.Execution`.
        seed: seed of everything random.

    Raises:
        FieldError: a setting is out of range.
        IncompatibleError: a part does not suit the task, the optimiser or another part.
        ModelError: the model does not fit the data or lacks what a part needs.

    >>> from kedge.core.task import Classification
    >>> x, y = torch.rand(40, 8), torch.arange(40) % 2
    >>> federation = Federation(x, y, [range(25), range(25, 40)], Classification(2), (x, y))
    >>> sim = Simulation(federation, nn.Linear(8, 2), "scaffold", optim=SGD(lr=0.05))
    >>> for _ in range(3):
    ...     report = sim.run_round()
    >>> sorted(sim.evaluate())
    ['accuracy', 'balanced_accuracy', 'f1_macro', 'loss']
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
                batch=(work or LocalWork()).batch,
                input_shape=federation.input_shape,
                initial=tree.map(place, model.weights()),
                key=rng.fold(rng.key(seed), "init").to(device),
            )
            self.session = Session(
                self.bound, work=work, per_round=per_round, weighting=weighting,
                examples=sum(federation.sizes), seed=seed,
            )  # fmt: skip
            first_state = self.bound.client()
        self._checks = Checks(self.bound.parts)
        #: Samples per class on each client, [clients, C]; no columns if no part reads them.
        self.label_counts = torch.zeros((federation.num_clients, 0), device=device)
        if self.bound.needs("labels"):
            self.label_counts = federation.label_counts()
        state, folder = self.execution.state, self.execution.folder
        self.store = Store(first_state, federation.num_clients, state, folder)
        #: CUDA runs asynchronously; the next round is drawn while the GPU computes.
        self.draws_ahead = device.type == "cuda"
        self._cohorts = Cohorts([weakref.proxy(self)])  # weak: no reference cycle

    # -- rounds -------------------------------------------------------------------------------

    def run_round(self, clients: Sequence[int] | None = None, check: bool = True) -> Totals:
        """Run one round: surveys, local training, aggregation.

        Args:
            clients: the cohort; drawn from the seed for None.
            check: whether to test the losses for NaN and infinity, which synchronises the device.

        Returns the totals of the round, see :func:`kedge.core.server.totals`. Raises NotFinite for
        a loss that is not finite; the simulation then stays at the start of the round.
        """
        clients = list(clients) if clients is not None else self.draw_cohort(self.round)
        before = self.server
        try:
            surveyed = self.surveys(clients)
            group, done = self.train(clients)
            if check:
                self.session.check_finite(done.totals, clients)
        except BaseException:
            self.server = before  # a failed round can be repeated
            raise
        return self.advance(group, done, surveyed)

    def train(self, clients: list[int]) -> tuple[Group, Outcome]:
        """Train clients for the present round; the state of the simulation does not change."""
        self.check_parts(clients[0])
        cohort = self._cohorts.form([clients], self.round)
        [done] = self.engine.train(cohort)
        self._cohorts.draw_ahead(self.round + 1)
        return cohort.groups[0], done

    def surveys(self, clients: list[int]) -> int:
        """Run the surveys before the present round of these clients; return the bytes uploaded."""
        asks = self.session.surveys(clients)
        return sum(self.survey(self.bound.part(ask.part), ask.clients) for ask in asks)

    def advance(self, group: Group, done: Outcome, surveyed: int) -> Totals:
        """Aggregate the outcome of a round, store the clients' next states and move on."""
        phases = self.bound.at(self.round).phases
        with self._checks.once("server", phases) as due, watching(due):
            after = self.aggregate(done.totals)
        for places, states in done.next_states:
            self.store.put([group.clients[i] for i in places], states)
        self.session.accept(after, group.clients)
        down = tree.nbytes(self.bound.only_public(group.anchor)) + tree.nbytes(group.sent)
        up = done.totals["up_bytes"] + surveyed
        return done.totals | {"up_bytes": up, "down_bytes": down * len(group.clients)}

    def aggregate(self, totals: Totals) -> Server:
        """The server after a round with these totals; the simulation itself does not change."""
        return self.session.aggregate(totals, self._steps)

    def finish(self) -> None:
        """Run the surveys after the last round."""
        for ask in self.session.last_surveys():
            self.survey(self.bound.part(ask.part), ask.clients)

    def survey(self, part: Part, clients: Sequence[int] | None) -> int:
        """Run a part's survey on clients (all for None); return the bytes they upload."""
        clients = list(clients if clients is not None else range(self.federation.num_clients))
        ask, cohort = self.session.ask_survey(part, clients), self.cohort(clients)
        with self._checks.once(f"survey of {part.name}", cohort.bound.phases) as due:
            if due:
                check_survey(cohort.bound, take_jobs(cohort.jobs, 0), part, clients[0])
            totals = self.engine.survey(cohort, part)
            with watching(due):
                return self.session.absorb(ask, totals)

    def check_parts(self, client_id: int) -> None:
        """Check third-party parts on one client before the first round of each phase, see
        :mod:`kedge.session.check_client`."""
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
        """The engine's input for some clients in the present round, their states included."""
        return self._cohorts.form([list(clients)], self.round, states=True)

    def trial(self, execution: Execution, round: int) -> Simulation:
        """A copy of this simulation in a given round, for measurements: every client has its
        initial state, and next states are discarded."""
        copied = Simulation(
            self.federation,
            self.bound.model,
            self.bound.method,
            optim=self.bound.optim,
            work=self.work,
            per_round=self.session.per_round,
            weighting=self.session.weighting,
            engine=execution,
        )
        copied.store, copied._checks = FirstState(self.bound.client()), Checks(())
        copied.session.round = round
        return copied

    @property
    def engine(self) -> Engine:
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = server_steps(engine, self.federation.device)

    # -- the session's state ------------------------------------------------------------------

    @property
    def server(self) -> Server:
        return self.session.server

    @server.setter
    def server(self, server: Server) -> None:
        self.session.server = server

    @property
    def round(self) -> int:
        """Number of the next round, from 0."""
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
        """Parameters and buffers from which training goes on."""
        return self.server.weights

    @property
    def output(self) -> Weights:
        """Parameters and buffers of the global model: ``weights``, unless a part has others."""
        with self._checks.once("output", {}) as due, watching(due):
            return self.session.output()

    def module(self) -> nn.Module:
        """The global model as an ``nn.Module`` in evaluation mode."""
        return self.bound.model.module(self.output)

    def personal(self, clients: Sequence[int] | None = None) -> Weights:
        """Personal weights of clients (all for None), stacked: leaves ``[clients, ...]``."""
        clients = list(clients if clients is not None else range(self.federation.num_clients))
        return self.engine.personal(self.cohort(clients))

    def prepared(self, client_id: int) -> dict[str, Tree]:
        """The ``local`` state of each part before a client's first step of the next round, such as
        FedCOG's generated samples: ``prepared(k)["fedcog"]``. The round itself is not affected."""
        cohort = self.cohort([client_id])
        return client.begin(cohort.bound, take_jobs(cohort.jobs, 0)).local

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """The state that the next round depends on, as named tensors. Those of clients are views
        that the next round writes to; clone them to keep a copy."""
        return tree.to_wire(self._state_tree())

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state of the same method, model and clients; a KedgeError for any other."""
        loaded = read_state(state, self._state_tree())
        server = Server(loaded["weights"], loaded["slots"])
        self.server = tree.map(lambda x: x.to(self.federation.device), server)
        self.store.rows = loaded["clients"]
        self.session.round = int(loaded["round"])

    def _state_tree(self) -> Tree:
        return {
            "weights": self.server.weights,
            "slots": self.server.slots,
            "clients": self.store.rows,
            "round": torch.tensor(self.round),
        }
