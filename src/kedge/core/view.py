"""What parts see before the first round (:class:`Spec`) and on a client (:class:`View`).

On the server they see a :class:`~kedge.core.round.Round`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.model import InjectedRows, Mode, Model, Pass
from kedge.core.part import Out, Part
from kedge.core.task import Batch, Task
from kedge.core.tree import Params, Tree, Weights
from kedge.errors import HookError

if TYPE_CHECKING:
    from kedge.core.bound import Bound


class Data(Protocol):
    """A source of batches: rows of a dataset on the device."""

    @property
    def is_random(self) -> bool:
        """Whether training batches are augmented."""
        ...

    def batch(self, index: Tensor, key: Tensor) -> Batch:
        """Samples for training, augmented."""
        ...

    def clean(self, index: Tensor) -> Batch:
        """The same samples without augmentation."""
        ...


@dataclass(frozen=True)
class Spec:
    """What a part may know before the first round."""

    model: Model  # the network, cut into stages
    task: Task  # loss and labels
    params: Params  # trainable leaves that travel, those of ``extend`` included
    buffers: Params  # such as the running statistics of BatchNorm
    num_clients: int  # in the federation
    batch: int  # rows of a local batch
    input_shape: tuple[int, ...]  # without batch
    shapes: dict[str, tuple[int, ...]]  # without batch: at every cut, "features" and "logits"
    dtype: torch.dtype  # of parameters and real inputs
    device: torch.device  # where a part makes its tensors
    key: Tensor = field(repr=False)  # randomness of what is made once
    tokens: bool = False  # inputs are whole numbers

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of inputs: int64 for whole numbers."""
        return torch.int64 if self.tokens else self.dtype

    @property
    def features(self) -> int:
        """Width of the features before the head (0 for a model without a head)."""
        shape = self.shapes.get("features", (0,))
        return int(torch.Size(shape).numel())

    def symbols(self, part: Part) -> dict[str, int]:
        """Sizes by the letters used in a part's ``sends``, ``uploads`` and ``keeps``."""
        params = self.model.weights().params
        head = self.model.head_names() if self.model.has_head else []
        return {
            "P": tree.numel(self.params),
            "W": tree.numel(params),
            "B": tree.numel(self.buffers),
            "H": sum(params[n].numel() for n in head),
            "E": tree.numel(tree.under(self.params, part.name)),
            "F": self.features,
            "C": self.task.outputs,
            "N": self.num_clients,
            "R": self.batch,
            "X": torch.Size(self.input_shape).numel(),
            **{f"D_{cut}": torch.Size(shape).numel() for cut, shape in self.shapes.items()},
            **{f"K_{cut}": shape[0] for cut, shape in self.shapes.items() if shape},
        }

    def for_part(self, part: Part) -> Spec:
        return replace(self, key=rng.fold(self.key, part.name))


class Info(NamedTuple):
    """Numbers about a client's round, each a scalar tensor."""

    client: Tensor  # number of the client, from 0
    round: Tensor  # number of the round, from 0
    lr: Tensor  # learning rate of the round
    num_steps: Tensor  # local steps that the client takes
    effective_steps: Tensor  # sum of the coefficients of the gradients in the update, over lr
    pulled_steps: Tensor  # the same where parts pull towards the anchor, see Part.anchor_pull
    num_examples: Tensor  # training samples of the client
    weight: Tensor  # p_k before normalisation over the cohort
    share: Tensor  # r_k = N n_k / sum of all n (1 for uniform client weights)


class SweepPieces(NamedTuple):
    """A client's whole data as fixed-size pieces, for sweeps."""

    rows: Tensor  # [pieces, rows]
    mask: Tensor  # [pieces, rows], 0 for padding


Fields = dict[str, dict[str, Tensor]]
#: Standard normal numbers in the shapes of a tree, from a key if the source is keyed.
Noise = Callable[[Tensor, Tree], Tree]


class Job(NamedTuple):
    """The inputs of one client round.

    Jobs of several clients are stacked, except for ``anchor`` and ``sent``, which they share. Jobs
    of several simulations have ``fields``, and then everything is stacked.
    """

    anchor: Weights
    sent: dict[str, Tree]
    client: dict[str, Tree]
    info: Info
    key: Tensor  # of (seed, round, client)
    counts: Tensor  # samples per class, [C]; empty if no part reads them
    sweep: SweepPieces
    fields: Fields = {}  # what differs between simulations, by owner and name


class Passes:
    """The forward passes of one step: a cache, so that each distinct pass runs once."""

    def __init__(
        self, model: Model, buffers: Params, key: Tensor, track: bool, taps: tuple[str, ...]
    ) -> None:
        self.model, self.buffers, self.key, self.track = model, buffers, key, track
        self.taps = taps  # the cuts that any part reads
        self._done: dict[tuple[int, int, int, Mode, bool], tuple[Pass, Weights, Tensor]] = {}

    def run(
        self,
        weights: Weights | Params,
        x: Tensor,
        train: bool = True,
        update: bool = False,
        rows: tuple[InjectedRows, ...] = (),
    ) -> Pass:
        if not isinstance(weights, Weights):
            weights = Weights(weights, self.buffers)
        elif update:
            raise HookError(
                "update=True moves the statistics of the model in training; pass bare parameters"
            )
        update = update and train and self.track
        mode: Mode = "train" if update else "probe" if train else "eval"
        name = (id(weights.params), id(weights.buffers), id(x), mode, bool(rows))
        if name not in self._done or update:
            key = rng.fold(self.key, len(self._done)) if self.model.is_random else None
            done = self.model.forward(weights, x, mode, key=key, rows=rows, taps=self.taps)
            if update:
                self.buffers = done.buffers
            self._done[name] = (done, weights, x)  # references, so that ids are not reused
        return self._done[name][0]


@dataclass
class ClientContext:
    """What all parts of one step share; a :class:`View` restricts it to one part."""

    bound: Bound
    job: Job
    anchor: Weights
    passes: Passes
    local: dict[str, Tree]
    step: Tensor | None = None
    gradient: Callable[[Params], Params] | None = None


class View:
    """What a part sees on a client. Everything is read-only."""

    def __init__(self, context: ClientContext, part: Part, hook: str) -> None:
        self._context, self._part, self._hook = context, part, hook

    @property
    def spec(self) -> Spec:
        """Sizes and shapes of the run: model, task, clients."""
        return self._context.bound.spec

    @property
    def task(self) -> Task:
        """The task of the run: loss and labels."""
        return self._context.bound.task

    @property
    def info(self) -> Info:
        """Numbers about the client's round: learning rate, steps, samples, client weight."""
        return self._context.job.info

    @property
    def round(self) -> Tensor:
        """Number of the round, from 0."""
        return self._context.job.info.round

    @property
    def phase(self) -> str:
        """The part's phase in this round."""
        return self._context.bound.phases.get(self._part.name, "")

    @property
    def step(self) -> Tensor:
        """Number of the local step, from 0."""
        if self._context.step is None:
            raise HookError(f"{self._part.name}.{self._hook} asks for v.step outside a local step")
        return self._context.step

    @property
    def key(self) -> Tensor:
        """Randomness of this (seed, round, client, part, hook, step)."""
        key = rng.fold(rng.fold(self._context.job.key, self._part.name), self._hook)
        return key if self._context.step is None else rng.fold(key, self._context.step)

    def counted(self, part: str) -> tuple[str, ...]:
        """The names of a part's uploads that count samples."""
        return self._context.bound.counted.get(part, ())

    def noise(self, like: Tree) -> Tree:
        """Standard normal numbers in the shapes of a tree, for ``release``. In a simulation they
        are drawn from :attr:`key`, in a real federation from a source that nobody else knows."""
        return self._context.bound.noise(self.key, like)

    @property
    def anchor(self) -> Weights:
        """The weights the client started the round from."""
        return self._context.anchor

    @property
    def sent(self) -> Tree:
        """What the part's ``send`` made in this round."""
        return self._context.job.sent.get(self._part.name, {})

    @property
    def client(self) -> Tree:
        """The part's state on this client, from its last ``reply``."""
        return self._context.job.client.get(self._part.name, {})

    @property
    def local(self) -> Tree:
        """The part's state within this round, from ``prepare``, ``ascend`` and ``observe``."""
        return self._context.local.get(self._part.name, {})

    @property
    def label_counts(self) -> Tensor:
        """Samples of each class on this client, ``[C]``."""
        if not self._part.needs_labels:
            raise HookError(f"{self._part.name} reads v.label_counts: declare needs_labels = True")
        return self._context.job.counts

    def own(self, params: Params) -> Params:
        """The part's own leaves (from ``extend``) among the parameters."""
        return tree.under(params, self._part.name)

    def public(self, params: Params) -> Params:
        """The leaves that travel: all but those that stay on the client."""
        return {n: p for n, p in params.items() if n in self.spec.params}

    def forward(
        self, weights: Weights | Params, x: Tensor, train: bool = True, update: bool = False
    ) -> Out:
        """The network at ``weights`` (bare parameters: with the present buffers) on ``x``.

        In training mode BatchNorm normalises by the batch; only ``update=True`` moves its running
        statistics. The same pass asked for twice in a step, by any part, runs once.
        """
        done = self._context.passes.run(weights, x, train, update)
        return view_out(done, self._part, len(x))

    def head(self, params: Params, features: Tensor) -> Tensor:
        """The head alone, from features to logits."""
        return self._context.bound.model.head(params, features)

    def grad(self, params: Params) -> Params:
        """Gradient of the whole objective at another point, on the same batch."""
        if self._context.gradient is None:
            raise HookError(f"{self._part.name}.{self._hook} asks for v.grad; only correct may")
        return self._context.gradient(params)

    def sweep(self, fn: Callable[[Batch, Tensor], Tree]) -> Tree:
        """Sum of ``fn(batch, mask)`` over the client's whole data, piece by piece.

        Samples are not augmented. All pieces have one size; ``mask`` is 0 for padding rows, so each
        summand must be multiplied by it.
        """
        if not self._part.needs_sweep:
            raise HookError(f"{self._part.name} calls v.sweep: declare needs_sweep = True")
        sweep, data = self._context.job.sweep, self._context.bound.data
        pieces = [fn(data.clean(sweep.rows[i]), sweep.mask[i]) for i in range(len(sweep.rows))]
        total = pieces[0]
        for piece in pieces[1:]:
            total = tree.add(total, piece)
        return total


def view_out(done: Pass, part: Part, rows: int) -> Out:
    """A pass as one part sees it: the real rows, and the rows that it injected."""
    empty = done.logits.new_zeros(0)
    features = empty if done.features is None else done.features
    injected: Out | tuple[()] = ()
    if part.name in done.where:
        rows_of_part = done.where[part.name]
        part_features = features[rows_of_part] if done.features is not None else empty
        injected = Out(done.logits[rows_of_part], part_features, {})
    real = features[:rows] if done.features is not None else empty
    at = {cut: done.at[cut] for cut in part.cuts() if cut in done.at}
    return Out(done.logits[:rows], real, at, injected)
