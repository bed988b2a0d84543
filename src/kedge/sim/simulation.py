"""Simulate a federated method on one machine: a federation, a method and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kedge.core import client, rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.task import Batch, Task
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals
from kedge.core.work import LocalWork, Workload, take_jobs
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine
from kedge.engines.cohort import Cohort
from kedge.engines.engine import EVALUATION_ROWS, Engine, as_execution, metric_sums
from kedge.engines.layout import initial_weight
from kedge.engines.server_steps import server_steps
from kedge.errors import FieldError, KedgeError
from kedge.session.purity import disabled, watching
from kedge.session.sampler import Sampler, Uniform
from kedge.session.session import Done, Request, Session, drive, read_state
from kedge.sim.clients import Clients
from kedge.sim.store import FirstState, Store

Array = npt.NDArray[np.generic]


class Simulation:
    """A session whose clients are all on this machine.

    The next round is a function of ``server``, ``store`` and ``round`` alone. A
    run that is saved by :meth:`state` and restored by :meth:`load_state` continues bit for bit.
    In its tests, ``detailed`` adds the metrics that are too costly for every one, such as AUROC.

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
    def task(self) -> Task:
        return self.federation.task

    @property
    def has_personal_models(self) -> bool:
        """Whether a client's personal weights may differ from the global model."""
        private = self.bound.private_params or self.bound.private_buffers
        hooks = self.bound.parts_with("personal") or self.bound.parts_with("output")
        return bool(private or hooks)

    @cached_property
    def largest_class(self) -> float | None:
        """Share of the most frequent class in the test data; None if there are no classes."""
        if not self.task.one_class or not self.federation.has_test:
            return None
        labels = torch.cat([batch.y for batch in self.federation.test_batches()])
        return float(torch.bincount(labels).max() / len(labels))

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

    # -- metrics from sums --------------------------------------------------------------------

    def evaluate(self, weights: Weights | None = None, detailed: bool = False) -> dict[str, float]:
        """Metrics on the test set (of the global model for None), as means over test angles."""
        return self.evaluate_all(weights, detailed)[0]

    def evaluate_all(
        self, weights: Weights | None = None, detailed: bool = False
    ) -> tuple[dict[str, float], list[float | None]]:
        """Metrics as in :meth:`evaluate`, and the headline metric by class (None: no samples)."""
        fed, weights = self.federation, weights or self.output
        angle_sums = [self.sums(weights, fed.test_batches(a), detailed) for a in fed.angles]
        reports = [fed.task.report(sums) for sums in angle_sums]
        for angle, report in zip(fed.angles, reports, strict=True):
            report |= self._of_scores(weights, partial(fed.test_batches, angle), strict=True)
        mean = {name: sum(r[name] for r in reports) / len(reports) for name in reports[0]}
        total = angle_sums[0]
        for sums in angle_sums[1:]:
            total = tree.add(total, sums)
        return mean, fed.task.per_class(total)

    def evaluate_rows(
        self, weights: Weights, rows: Tensor, detailed: bool | None = None
    ) -> dict[str, float]:
        """Metrics of one model on rows ``[n]`` of the data, e.g. those for validation.

        ``detailed`` None takes them if the headline metric needs them.
        """
        detailed = bool(self.task.headline.needs) if detailed is None else detailed

        def batches() -> Iterable[Batch]:
            return map(self.federation.clean, torch.split(rows, EVALUATION_ROWS))

        report = self.task.report(self.sums(weights, batches(), detailed)) if len(rows) else {}
        return report | (self._of_scores(weights, batches) if len(rows) else {})

    def evaluate_clients(
        self,
        personal: bool = False,
        detailed: bool = False,
        names: Collection[str] | None = None,
    ) -> list[dict[str, float]]:
        """Metrics (all for ``names`` None) on each client's held-out rows, empty without any, of
        the global or of its personal weights. Raises a FieldError without held-out rows."""
        if not self.federation.held_out:
            raise FieldError("no client holds anything out for testing; set holdout, e.g. 0.2")
        weights = self.personal() if personal else self.output
        bound = self.bound.detailed() if detailed else self.bound
        client_sums = self.engine.evaluate(bound, weights, self.federation.held_out, personal)
        reports = [self.task.report(sums, names) if sums else {} for sums in client_sums]
        if self.task.headline.function is not None:
            batches = self.federation.held_out_batches
            for k, report in enumerate(reports):
                own = tree.take(weights, k) if personal else weights
                if client_sums[k]:
                    report |= self._of_scores(own, partial(batches, k))
        return reports

    def sums(
        self, weights: Weights, batches: Iterable[Batch], detailed: bool = False
    ) -> dict[str, Tensor]:
        """The task's metric sums of one model over batches."""
        return metric_sums(self.bound.detailed() if detailed else self.bound, weights, batches)

    # -- all scores ---------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, weights: Weights, batches: Iterable[Batch]) -> tuple[Array, Array]:
        """Labels, and probabilities or predicted values ``[n, outputs]`` in float64."""
        labels, scores = [], []
        for batch in batches:
            logits = self.bound.model.forward(weights, batch.x, "eval").logits
            labels.append(batch.y.cpu())
            scores.append(self.task.probs(logits.double().reshape(len(logits), -1)).cpu())
        return torch.cat(labels).numpy(), torch.cat(scores).numpy()

    def _of_scores(
        self, weights: Weights, batches: Callable[[], Iterable[Batch]], strict: bool = False
    ) -> dict[str, float]:
        """The headline metric if it is a function of labels and scores."""
        metric = self.task.headline
        if metric.function is None:
            return {}
        return own_metric(self.task, *self.scores(weights, batches()), strict=strict)

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


def own_metric(task: Task, y: Array, scores: Array, *, strict: bool = False) -> dict[str, float]:
    """The headline metric if it is a function of labels and scores.

    It is left out where the function raises a ValueError, as scikit-learn's do for samples of one
    class, unless ``strict``. Raises a KedgeError for any other error.
    """
    metric = task.headline
    if metric.function is None:
        return {}
    try:
        return {metric.name: float(metric.function(y, for_sklearn(task, scores)))}
    except Exception as error:
        if isinstance(error, ValueError) and not strict:
            return {}
        raise KedgeError(
            f"the metric {metric.name} failed: {type(error).__name__}: {error}. It is called as "
            f"{metric.name}(y_true, y_score) with arrays of shape {y.shape} and "
            f"{for_sklearn(task, scores).shape}"
        ) from error


def for_sklearn(task: Task, scores: Array) -> Array:
    """Scores as scikit-learn's metrics take them: ``[n]`` for two classes (the probability of class
    1) and for a single output, otherwise ``[n, outputs]``."""
    if task.one_class and scores.shape[1] == 2:
        return scores[:, 1]
    return scores[:, 0] if scores.shape[1] == 1 else scores
