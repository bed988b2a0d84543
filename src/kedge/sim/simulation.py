"""Simulate a federated method on one machine: a federation, a method and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from kedge.core import client, rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals
from kedge.core.work import LocalWork, Workload, take_jobs
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine
from kedge.engines.cohort import Cohort
from kedge.engines.engine import Engine, as_execution
from kedge.engines.layout import initial_weight
from kedge.engines.server_steps import server_steps
from kedge.session.purity import disabled, watching
from kedge.session.sampler import Sampler, Uniform
from kedge.session.session import Done, Request, Session, drive, read_state
from kedge.sim.clients import Clients
from kedge.sim.evaluation import Evaluation
from kedge.sim.store import FirstState, Store


class Simulation(Evaluation):
    """A session whose clients are all on this machine.

    The next round is a function of ``server``, ``store`` and ``round`` alone. A
    run that is saved by :meth:`state` and restored by :meth:`load_state` continues bit for bit.

    Args:
        federation: the data of all clients, with task, device and dtype.
        model: the network; its weights are the initial global model and are not changed.
        method: a method string such as ``"scaffold+fedprox(mu=0.1)"``, a method or a part.
        optim: the local optimiser; ``SGD(lr=0.1)`` for None.
        work: batch size and local steps or epochs; one epoch of batches of 32 for None.
        per_round: clients in the cohort of a round; all of them for None.
        sampler: draws the cohorts, in place of ``per_round`` clients with equal probabilities.
        weighting: client weights p_k: ``"size"`` (number of samples) or ``"uniform"``.
        engine: ``"loop"``, ``"vector"``, an :class:`~kedge.engines.Execution` or an engine.
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
        sampler: Sampler | None = None,
        weighting: str = "size",
        engine: str | Execution | Engine = "vector",
        seed: int = 0,
    ) -> None:
        model = model if isinstance(model, Model) else Model(model)
        device, dtype = federation.device, federation.dtype
        if not isinstance(engine, Engine):
            engine = make_engine(as_execution(engine), device)
        self.federation, self.engine, self.execution = federation, engine, engine.execution
        model = engine.prepare(model, device, dtype)
        workload = Workload(
            federation.num_clients, sum(federation.sizes), work or LocalWork(), weighting, seed
        )

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
                batch=workload.work.batch,
                input_shape=federation.input_shape,
                initial=tree.map(place, model.weights()),
                key=rng.fold(rng.key(seed), "init").to(device),
            )
            if sampler is None:
                sampler = Uniform(federation.num_clients if per_round is None else per_round)
            self.session = Session(self.bound, workload, sampler)
            first_state = self.bound.client()
        state, folder = self.execution.state, self.execution.folder
        self.store = Store(first_state, federation.num_clients, state, folder)
        self.clients = Clients(self.bound, workload, federation, engine, self.store)
        #: How parts take steps on the server.
        self.steps = server_steps(engine, device)

    # -- rounds -------------------------------------------------------------------------------

    def run_round(
        self,
        clients: Sequence[int] | None = None,
        check: Literal["none", "losses", "state"] = "losses",
    ) -> Done:
        """Run one round: surveys, local training, aggregation.

        Args:
            clients: the cohort; drawn from the seed for None.
            check: what must be finite, see :meth:`~kedge.session.session.Session.rounds`.

        Returns:
            What was accepted.

        Raises:
            NotFinite: a loss is not finite; the simulation then stays at the start of the round.
        """
        done = drive(self.session.rounds(clients, steps=self.steps, check=check), self.answer)
        self.accept(done)
        return done

    def answer(self, request: Request) -> Totals:
        """The totals of a request; a GPU computes while the next round is drawn."""
        totals = self.clients.answer(request)
        if not request.part:
            self.clients.draw_ahead(self.round + 1, self.session.draw_clients(self.round + 1))
        return totals

    def accept(self, done: Done) -> None:
        """Commit a round, or the surveys after the last one."""
        if done.totals.clients:  # if somebody trained
            self.clients.accept()
        self.session.accept(done)

    def finish(self) -> None:
        """Run the surveys after the last round."""
        self.accept(drive(self.session.last_surveys(), self.clients.answer))

    def survey(self, part: Part, clients: Sequence[int] | None = None) -> int:
        """Run a part's survey on clients (all for None); return the bytes they upload."""
        everyone = range(self.federation.num_clients) if clients is None else clients
        done = drive(self.session.survey(part.name, everyone), self.clients.answer)
        self.accept(done)
        return done.up_bytes

    def cohort(self, clients: Sequence[int]) -> Cohort:
        """The engine's input for some clients in the present round, their states included."""
        return self.clients.cohort(self.session.request("", clients))

    def trial(self, execution: Execution, round: int) -> Simulation:
        """A copy of this simulation in a given round, for measurements: every client has its
        initial state, and next states are discarded."""
        with disabled():
            copied = Simulation(
                self.federation,
                self.bound.model,
                self.bound.method,
                optim=self.bound.optim,
                work=self.session.workload.work,
                sampler=self.session.sampler,
                weighting=self.session.workload.weighting,
                engine=execution,
            )
        copied.store = copied.clients.states = FirstState(self.bound.client())
        copied.session.round = round
        return copied

    # -- results ------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of the next round, from 0."""
        return self.session.round

    @property
    def server(self) -> Server:
        """The server's state between rounds."""
        return self.session.server

    @property
    def weights(self) -> Weights:
        """Parameters and buffers from which training goes on."""
        return self.session.server.weights

    @property
    def output(self) -> Weights:
        """Parameters and buffers of the global model: ``weights``, unless a part has others."""
        return self.session.output()

    def module(self) -> nn.Module:
        """The global model as an ``nn.Module`` in evaluation mode."""
        return self.bound.model.module(self.output)

    def personal(self, clients: Sequence[int] | None = None) -> Weights:
        """Personal weights of clients (all for None), stacked: leaves ``[clients, ...]``."""
        everyone = range(self.federation.num_clients) if clients is None else clients
        return self.clients.personal(self.session.request("", everyone))

    def prepared(self, client_id: int) -> dict[str, Tree]:
        """The ``local`` state of each part before a client's first step of the next round, such as
        FedCOG's generated samples: ``prepared(k)["fedcog"]``. The round itself is not affected."""
        cohort = self.cohort([client_id])
        return client.begin(cohort.bound, take_jobs(cohort.jobs, 0)).local

    # -- saving -------------------------------------------------------------------------------

    def state(self, server: Server | None = None) -> dict[str, torch.Tensor]:
        """The state that the next round depends on, as named tensors. Those of clients are views
        that the next round writes to; clone them to keep a copy.

        Args:
            server: the server's state to save, in place of the present one.
        """
        return tree.to_wire(self._state_tree(server or self.server))

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state of the same method, model and clients; a KedgeError for any other."""
        loaded = read_state(state, self._state_tree(self.server))
        server = Server(loaded["weights"], loaded["slots"])
        device = self.federation.device
        self.session.server = tree.map(lambda x: x.to(device), server)
        self.store.rows = loaded["clients"]
        self.session.round = int(loaded["round"])

    def _state_tree(self, server: Server) -> Tree:
        return {
            "weights": server.weights,
            "slots": server.slots,
            "clients": self.store.rows,
            "round": torch.tensor(self.round),
        }
