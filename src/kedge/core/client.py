"""One client round as three pure functions: :func:`begin`, :func:`step`, :func:`end`.

Together with :mod:`kedge.core.server` this is the only place where an algorithm runs. The loop
engine calls them client by client, the vectorised engine maps them over all clients at once, and a
remote client calls them on its own data. Each is a function of a :class:`Job` and a :class:`Carry`
and changes neither.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import PRIVATE, Bound
from kedge.core.hooks import call
from kedge.core.model import InjectedRows
from kedge.core.ops import REFERENCE, Ops
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Update
from kedge.core.view import ClientContext, Job, Passes, View, view_out


class Carry(NamedTuple):
    """State between local steps."""

    weights: Weights
    optim: Tree
    local: dict[str, Tree]
    step: Tensor
    losses: Params  # sum over the steps of each term of the objective


class Trained(NamedTuple):
    """What leaves a client, and its next state, which does not."""

    update: Update
    next_state: dict[str, Tree]


def begin(bound: Bound, job: Job) -> Carry:
    """The state before the first step: private leaves restored, each part's ``local`` prepared."""
    context = client_context(bound, job, local={})
    local = {p.name: _call(p, "prepare", context) for p in bound.parts_with("prepare")}
    zero = torch.zeros((), dtype=bound.spec.dtype, device=bound.spec.device)
    return Carry(
        weights=context.anchor,
        optim=bound.optim.init(context.anchor.params),
        local=local,
        step=torch.zeros((), dtype=torch.int32, device=bound.spec.device),
        losses=dict.fromkeys(["task", *(p.name for p in bound.parts_with("term"))], zero),
    )


def step(bound: Bound, job: Job, carry: Carry, index: Tensor, ops: Ops = REFERENCE) -> Carry:
    """One local step.

    Args:
        bound: the binding with the phases of the round.
        job: the client's job.
        carry: the state before the step.
        index: rows of the batch, ``[B]``.
        ops: the engine's arithmetic.

    Returns:
        The state after the step.
    """
    batch = bound.data.batch(index, _data_key(bound, job, carry.step))
    if bound.steps_are_plain:
        return _plain_step(bound, job, carry, batch, ops)
    context = client_context(bound, job, carry.local, carry.step)
    for part in bound.parts_with("transform"):
        batch = _call(part, "transform", context, batch)

    objective = partial(_objective, bound, context, carry, batch)
    params = carry.weights.params
    grads, done = ops.gradient(objective, params)
    context.local = carry.local | done["local"]
    losses = tree.add(carry.losses, done["losses"])

    def grad_at(point: Params) -> Params:
        return ops.gradient(partial(objective, again=context.local), point)[0]

    total = grads
    for part in bound.parts_with("correct"):
        change = _call(part, "correct", replace(context, gradient=grad_at), params, grads)
        total = total | tree.map(torch.add, change, total)

    new, optim = _descend(bound, context, params, total, carry.optim, ops)
    for part in bound.parts_with("project"):
        new = _call(part, "project", context, new)
    weights = Weights(new, done["buffers"])

    context.passes = _passes(context, weights)
    # without a prepared value, a part's local state lasts for this step only
    local = {name: context.local[name] for name in carry.local}
    for part in bound.parts_with("observe"):
        local[part.name] = _call(part, "observe", context, new, batch, done["outs"][part.name])
    return Carry(weights, optim, local, carry.step + 1, losses)


def _plain_step(bound: Bound, job: Job, carry: Carry, batch: Batch, ops: Ops) -> Carry:
    """A step in which no part has a hook: the same result, without what only hooks need."""
    key = rng.fold(_pass_key(job, carry.step), 0) if bound.model.is_random else None

    def objective(params: Params) -> tuple[Tensor, Tree]:
        weights = Weights(params, carry.weights.buffers)
        done = bound.model.forward(weights, batch.x, "train", key=key)
        loss = bound.task.mean_loss(done.logits, batch)
        return loss, {"loss": loss, "buffers": done.buffers}

    params = carry.weights.params
    grads, done = ops.gradient(objective, params)
    new, optim = bound.optim.update(params, grads, carry.optim, job.info.lr, ops)
    losses = {"task": carry.losses["task"] + done["loss"]}
    return Carry(Weights(new, done["buffers"]), optim, carry.local, carry.step + 1, losses)


def end(bound: Bound, job: Job, carry: Carry) -> Trained:
    """What leaves the client after the last step, and its next state."""
    context = client_context(bound, job, carry.local)
    context.passes = _passes(context, carry.weights)
    uploads: dict[str, Tree] = {}
    next_state: dict[str, Tree] = {p: job.client[p] for p in job.client if p != PRIVATE}
    for part in bound.parts_with("reply"):
        next_state[part.name], uploads[part.name] = _call(part, "reply", context, carry.weights)
    if PRIVATE in job.client:
        next_state[PRIVATE] = bound.only_private(carry.weights)
    local, anchor = bound.only_public(carry.weights), bound.only_public(context.anchor)
    dtype = bound.spec.dtype
    buffers = tree.map(lambda a, b: a.to(dtype) - b.to(dtype), local.buffers, anchor.buffers)
    delta = Weights(tree.sub(local.params, anchor.params), buffers)
    contribution: Tree = {}
    for part in bound.parts_with("contribute"):
        contribution = _call(part, "contribute", context, delta.params)
    steps = carry.step.clamp_min(1).to(dtype)
    losses = tree.map(lambda t: t / steps, carry.losses)
    info = job.info
    update = Update(delta, contribution, uploads, losses, info.weight, info.share)
    return _released(bound, context, update, next_state)


def survey(bound: Bound, job: Job, part: Part) -> Update:
    """A client's answer to a part's survey; its state does not change."""
    context, info = client_context(bound, job, local={}), job.info
    answer = {part.name: _call(part, "survey", context)}
    update = Update(uploads=answer, weight=info.weight, share=info.share)
    job = job._replace(key=rng.fold(job.key, part.name))  # not the draws of the training
    context = replace(context, job=job)
    return _released(bound, context, update, dict(job.client)).update


def _released(
    bound: Bound, context: ClientContext, update: Update, state: dict[str, Tree]
) -> Trained:
    """The update as the parts that change what leaves make it, left to right, and the state."""
    for part in bound.parts_with("release"):
        job = context.job._replace(client=context.job.client | state)
        released = _call(part, "release", replace(context, job=job), update)
        update, state[part.name] = released
    return Trained(update, state)


def personal(bound: Bound, job: Job) -> Weights:
    """The personal weights of a client."""
    context = client_context(bound, job, local={})
    weights = context.anchor
    for part in bound.parts_with("personal"):
        weights = _call(part, "personal", context, weights)
    return weights


def _objective(
    bound: Bound,
    context: ClientContext,
    carry: Carry,
    batch: Batch,
    params: Params,
    again: dict[str, Tree] | None = None,
) -> tuple[Tensor, Tree]:
    """The task's loss plus every part's term, and auxiliary results of the forward pass.

    ``again`` is the ``local`` state if the objective is evaluated a second time in a step, at
    another point. Max steps and updates of BatchNorm statistics then are skipped: they happen once
    per step.
    """
    weights, size = Weights(params, carry.weights.buffers), len(batch.x)
    passes = _passes(context, weights, track=again is None)
    context = replace(context, passes=passes, local=carry.local if again is None else again)
    rows = tuple(
        InjectedRows(p.name, *_call(p, "inject", context, batch))
        for p in bound.parts_with("inject")
    )
    main = passes.run(params, batch.x, train=True, update=True, rows=rows)

    ascended: dict[str, Tree] = {}
    for part in bound.parts_with("ascend") if again is None else ():
        out = tree.detach(view_out(main, part, size))
        next_local = _call(part, "ascend", context, tree.detach(params), batch, out)
        ascended[part.name] = tree.detach(next_local)
    context.local = context.local | ascended

    logits = main.logits[:size] if rows else main.logits
    for part in bound.parts_with("logits"):
        logits = _call(part, "logits", context, batch, logits)
    losses = {"task": _task_loss(bound, context, batch, logits)}
    for part in bound.parts_with("term"):
        losses[part.name] = _call(part, "term", context, params, batch, view_out(main, part, size))
    total = losses["task"]
    for part in bound.parts_with("term"):
        total = total + losses[part.name]
    outs = {p.name: view_out(main, p, size) for p in bound.parts_with("observe")}
    return total, {"outs": outs, "buffers": passes.buffers, "local": ascended, "losses": losses}


def _task_loss(bound: Bound, context: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
    weighing = bound.parts_with("weigh")
    if not weighing:
        return bound.task.mean_loss(logits, batch)
    losses = bound.task.loss(logits, batch)  # [B]
    for part in weighing:
        losses = losses * _call(part, "weigh", context, batch)
    return losses.mean()


def _descend(
    bound: Bound, context: ClientContext, params: Params, grads: Params, state: Tree, ops: Ops
) -> tuple[Params, Tree]:
    """The optimiser's update of the leaves that are trainable in this step."""
    lr = context.job.info.lr
    mask: dict[str, Tensor | bool] = {}
    for part in bound.parts_with("trainable"):
        for name, flag in _call(part, "trainable", context, params).items():
            mask[name] = flag if name not in mask else mask[name] & flag
    if not mask:
        return bound.optim.update(params, grads, state, lr, ops)

    def masked(new: Params, old: Params) -> Params:
        return {n: _chosen(mask.get(n, True), v, old[n]) for n, v in new.items()}

    grads = masked(grads, tree.zeros_like(grads))
    new, new_state = bound.optim.update(params, grads, state, lr, ops)
    next_state = {
        k: masked(v, state[k]) if isinstance(v, dict) else v for k, v in new_state.items()
    }
    return masked(new, params), next_state


def _chosen(flag: Tensor | bool, new: Tensor, old: Tensor) -> Tensor:
    if isinstance(flag, bool):
        return new if flag else old
    return torch.where(flag, new, old)


def client_context(
    bound: Bound, job: Job, local: dict[str, Tree], step: Tensor | None = None
) -> ClientContext:
    """What this client's hooks share; its private leaves are restored into the anchor."""
    anchor = job.anchor
    if PRIVATE in job.client:
        private = job.client[PRIVATE]
        anchor = Weights(anchor.params | private["params"], anchor.buffers | private["buffers"])
    key = _pass_key(job, step) if bound.model.is_random else job.key
    passes = Passes(bound.model, anchor.buffers, key, True, bound.cuts)
    return ClientContext(bound, job, anchor, passes, local, step)


def _passes(context: ClientContext, weights: Weights, track: bool = True) -> Passes:
    """Passes at other weights in the same step, with the same random key."""
    same = context.passes
    return Passes(same.model, weights.buffers, same.key, track, same.taps)


def _pass_key(job: Job, step: Tensor | None) -> Tensor:
    """The key from which the passes of a step draw, or those outside of a step."""
    key = rng.fold(job.key, "pass")
    return key if step is None else rng.fold(key, step)


def _data_key(bound: Bound, job: Job, step: Tensor) -> Tensor:
    return rng.fold(rng.fold(job.key, "data"), step) if bound.data.is_random else job.key


def _call(part: Part, hook: str, context: ClientContext, *args: Any) -> Any:
    """Call a hook with the part's view of the context."""
    return call(part, hook, View(context, part, hook), *args)
