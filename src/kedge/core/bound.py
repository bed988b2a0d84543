"""Bind a method to a model, a task, an optimiser and data; the binding is constant over a run."""

from __future__ import annotations

import copy
import warnings
import weakref
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.core.hooks import call
from kedge.core.method import Method
from kedge.core.model import Model
from kedge.core.optim import Optimizer
from kedge.core.part import HOOKS, Part
from kedge.core.schedules import schedule
from kedge.core.task import Batch, Task
from kedge.core.task_base import Sums
from kedge.core.tree import Tree, Weights
from kedge.core.view import Data, Noise, Spec
from kedge.errors import IncompatibleError, ModelError, UnknownName

STEP_HOOKS = (
    "transform", "inject", "ascend", "logits", "weigh", "term", "correct", "trainable", "project",
    "observe",
)  # fmt: skip
PRIVATE = "private"  # the client slot of private leaves, which never leave the client


class Server(NamedTuple):
    """The server's state between rounds: the global weights, and each part's slot."""

    weights: Weights
    slots: dict[str, Tree]


class LocalStatistics(Part):
    """The BatchNorm policy ``local``: running statistics stay on the client."""

    name = "local_statistics"

    def private(self, spec: Spec) -> set[str]:
        return set(spec.buffers)


class Bound:
    """A method, checked against its model, task and optimiser.

    Args:
        method: the parts.
        model: the network.
        task: loss and metrics; its outputs must match the model's.
        optim: the local optimiser.
        data: where batches come from.
        num_clients: clients of the federation.
        batch: rows of a local batch.
        input_shape: shape of one input, without the batch axis.
        initial: the initial weights, on the device and in the dtype of the run.
        key: root key of the hooks that run once, ``[2]``.
        releases: what the owner of the data adds to the method: parts that act last on what leaves.

    Raises:
        ModelError: the outputs do not match the task, or the model lacks a head.
        IncompatibleError: a part does not suit the task, the optimiser or another part.
    """

    def __init__(
        self,
        method: Method,
        model: Model,
        task: Task,
        optim: Optimizer,
        data: Data,
        *,
        num_clients: int,
        batch: int,
        input_shape: tuple[int, ...],
        initial: Weights,
        key: Tensor,
        releases: tuple[Part, ...] = (),
    ) -> None:
        self.method = Method(tuple(p.for_model(model) for p in method.parts))
        self.model, self.task, self.optim, self.data = model, task, optim, data
        self.parts: tuple[Part, ...] = self.method.parts
        self.details = False  # see :meth:`detailed`
        #: Where parts draw the noise on what leaves, see :meth:`with_noise`.
        self.noise: Noise = rng.normal_like
        if model.batchnorm == "local":
            self.parts = (*self.parts, LocalStatistics())
        self.parts = (*self.parts, *releases)
        #: Each part's phase in the present round, by part name; see :meth:`at`.
        self.phases: dict[str, str] = {}
        self._by_phases: dict[tuple[tuple[str, str], ...], Bound] = {}
        self._root: weakref.ref[Bound] | None = None  # weak: the root owns its copies with phases
        self.counted = {p.name: p.counted for p in self.parts if p.counted}
        self._hooked = {h: tuple(p for p in self.parts if p.has(h)) for h in HOOKS}
        #: Whether no part has a hook in a local step, so that it is one of plain FedAvg.
        self.steps_are_plain = not any(self._hooked[hook] for hook in STEP_HOOKS)
        #: Sum of what parts tell as their pull; 0 if no part reads it.
        self.pull = sum(p.anchor_pull() or 0.0 for p in self.parts) if self.needs("pull") else 0.0
        self._check()
        self._factor = schedule(optim.schedule)

        like = next(iter(initial.params.values()))
        tokens = getattr(data, "tokens", False)
        self._check_inputs(tokens)
        input_dtype = torch.int64 if tokens else like.dtype
        sample = torch.zeros((2, *input_shape), dtype=input_dtype, device=like.device)
        spec = Spec(
            model=model,
            task=task,
            params=initial.params,
            buffers=initial.buffers,
            num_clients=num_clients,
            batch=batch,
            input_shape=input_shape,
            shapes=_shapes(model, initial, sample),
            dtype=like.dtype,
            device=like.device,
            key=key,
            tokens=tokens,
        )
        width = int(torch.Size(spec.shapes["logits"]).numel())
        if width != task.outputs:
            raise ModelError(
                f"the model has {width} outputs, but the data need {task.outputs} ({task.name})"
            )
        params = dict(initial.params)
        for part in self.parts_with("extend"):
            leaves = call(part, "extend", spec.for_part(part))
            params |= {f"{part.name}/{n}": v for n, v in leaves.items()}
        self.initial = Weights(params, initial.buffers)
        extended = replace(spec, params=params)
        hidden = {n for p in self.parts_with("private") for n in call(p, "private", extended)}
        self.private_params = [n for n in params if n in hidden]
        self._check_head(hidden)
        self.private_buffers = [n for n in initial.buffers if n in hidden]
        public = {n: v for n, v in params.items() if n not in hidden}
        self.spec = replace(spec, params=public)
        self.cuts = tuple(dict.fromkeys(c for p in self.parts for c in p.cuts()))

    def with_data(self, data: Data) -> Bound:
        """This binding on other data, in the same phases."""
        return self._changed(data=data)

    def with_noise(self, noise: Noise) -> Bound:
        """This binding with another source of noise on what leaves; keys are public, so noise that
        must hide something is not drawn from them."""
        return self._changed(noise=noise)

    def detailed(self) -> Bound:
        """This binding with all of the task's sums in tests, also those of ``task.details``."""
        return self._changed(details=True)

    def _changed(self, **values: object) -> Bound:
        other = copy.copy(self)
        vars(other).update(values, _by_phases={}, _root=None)
        return other

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        """The sums that metrics are functions of, over the samples where ``mask`` is 1."""
        sums = self.task.sums(logits, batch, mask)
        return sums | self.task.details(logits, batch, mask) if self.details else sums

    def part(self, name: str) -> Part:
        """The part of the method that has this name."""
        return next(p for p in self.parts if p.name == name)

    def parts_with(self, hook: str) -> tuple[Part, ...]:
        """The parts that override a hook, in the method's order."""
        return self._hooked[hook]

    def needs(
        self, what: Literal["clients", "sum", "share_sum", "labels", "sweep", "pull"]
    ) -> bool:
        """Whether a part declares ``needs_<what>``."""
        return any(getattr(p, f"needs_{what}") for p in self.parts)

    def at(self, round: int) -> Bound:
        """This binding with its parts' phases in a round; rounds with equal phases share one
        object."""
        return self.in_phases({p.name: call(p, "phase", round) for p in self.parts_with("phase")})

    def in_phases(self, phases: dict[str, str]) -> Bound:
        """This binding with the given phases, by part."""
        root, key = self.root, tuple(phases.items())
        if not phases:
            return root
        if key not in root._by_phases:
            derived = root._by_phases[key] = copy.copy(root)
            derived.phases, derived._by_phases, derived._root = phases, {}, weakref.ref(root)
        return root._by_phases[key]

    @property
    def root(self) -> Bound:
        """The binding without phases from which this one is derived."""
        root = self if self._root is None else self._root()
        assert root is not None
        return root

    def lr(self, round: int) -> float:
        """The learning rate of a round."""
        return self.optim.lr * self._factor(round)

    def server(self) -> Server:
        """The server's state before the first round."""
        return Server(self.initial, self._slots("server_init"))

    def client(self) -> dict[str, Tree]:
        """A client's state before its first round."""
        slots = self._slots("client_init")
        if self.private_params or self.private_buffers:
            slots[PRIVATE] = self.only_private(self.initial)
        return slots

    def _slots(self, hook: str) -> dict[str, Tree]:
        return {p.name: call(p, hook, self.spec.for_part(p)) for p in self.parts_with(hook)}

    def sent(self, server: Server) -> dict[str, Tree]:
        """What parts broadcast with the weights, by part name."""
        slots = server.slots
        return {p.name: call(p, "send", slots.get(p.name, {})) for p in self.parts_with("send")}

    def only_private(self, weights: Weights) -> Tree:
        """The leaves that stay on the client."""
        return {
            "params": {n: weights.params[n] for n in self.private_params},
            "buffers": {n: weights.buffers[n] for n in self.private_buffers},
        }

    def only_public(self, weights: Weights) -> Weights:
        """The leaves that travel."""
        if not self.private_params and not self.private_buffers:
            return weights
        return Weights(
            {n: v for n, v in weights.params.items() if n in self.spec.params},
            {n: v for n, v in weights.buffers.items() if n not in self.private_buffers},
        )

    def _check_head(self, hidden: set[str]) -> None:
        owners = [p.name for p in self.parts if p.needs_shared_head]
        if owners and hidden & set(self.model.head_names()):
            keepers = [p.name for p in self.parts_with("private")]
            raise IncompatibleError(
                f"{owners[0]} works on the head on the server, but {keepers[0]} leaves it on the "
                "clients; use one of them"
            )

    def _check_inputs(self, tokens: bool) -> None:
        makers = [p.name for p in self.parts if p.makes_inputs()]
        if tokens and makers:
            raise IncompatibleError(
                f"{makers[0]} makes or mixes inputs, which only real numbers allow; these inputs "
                "are whole numbers (token ids)"
            )

    def _check(self) -> None:
        for part in self.parts:
            if not {self.task.name, self.task.like} & set(part.tasks):
                raise IncompatibleError(
                    f"{part.name} has no meaning for {self.task.name}; it is for: "
                    + ", ".join(part.tasks)
                )
            if part.needs_features:
                self.model.require_head(part.name)
            for cut in part.cuts():
                try:
                    self.model.check_cut(cut)
                except UnknownName:
                    raise IncompatibleError(
                        f"{part.name} cuts the model after {cut!r}, but it can be cut after: "
                        f"{', '.join(self.model.cuts) or 'nothing'}; choose one in the options of "
                        f"{part.name} (kedge show {part.name}), or another --model"
                    ) from None
            if part.needs_plain_sgd and not self.optim.is_linear:
                raise IncompatibleError(
                    f"{part.name} divides the update by the sum of its steps, which "
                    f"{self.optim.name} does not have; use sgd"
                )
            if part.needs_plain_sgd and not self.optim.is_plain:
                warnings.warn(
                    f"{part.name} assumes plain SGD; with momentum the update is divided by the "
                    "effective sum of its steps",
                    stacklevel=3,
                )
            if part.needs_pull and self.pull and not self.optim.tells_pull:
                pulling = ", ".join(p.name for p in self.parts if p.anchor_pull())
                raise IncompatibleError(
                    f"{part.name} must know how {pulling} shrinks a step, which {self.optim.name} "
                    "does not tell; use sgd"
                )


def _shapes(model: Model, initial: Weights, sample: Tensor) -> dict[str, tuple[int, ...]]:
    try:
        return model.shapes(initial, sample)
    except (RuntimeError, ValueError, IndexError) as error:
        what = "whole-number inputs" if not sample.is_floating_point() else "inputs"
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"the model cannot take {what} of shape {tuple(sample.shape[1:])}: {line}"
        embeds = any(isinstance(m, nn.Embedding) for m in model.template.modules())
        if embeds and sample.is_floating_point():
            text += "; its embedding takes token ids, which are read as FILE.npz(kind=tokens)"
        raise ModelError(text) from error
