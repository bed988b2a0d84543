"""The only place where an algorithm runs: one client round, and one server round.

A client round is three pure functions, :func:`begin`, :func:`step` and :func:`end`, of a :class:`Job`
and a :class:`Carry`. A loop calls them client by client, the vectorised engine maps them over all
clients at once, a remote client calls them where the data are. :func:`totals` reduces what comes back,
and :func:`server_round` makes the next global model of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import PRIVATE, Bound, Server
from kedge.core.model import Pass, Rows
from kedge.core.part import Mean, Out, Part, Stack, Sum
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Context, Job, Passes, Round, View, view_out
from kedge.errors import HookError, KedgeError


class Carry(NamedTuple):
    """What goes from one local step to the next."""

    weights: Weights
    optim: Tree
    local: dict[str, Tree]
    step: Tensor
    terms: Params  # sum over the steps of every term of the objective


class Reply(NamedTuple):
    """What a client returns: ``delta = local - anchor``, uploads, and its next own state."""

    delta: Weights
    contribution: Tree
    uploads: dict[str, Tree]
    client: dict[str, Tree]
    terms: Params  # mean over the steps
    weight: Tensor


# -- the client --------------------------------------------------------------------------------


def begin(bound: Bound, job: Job, phases: dict[str, str]) -> Carry:
    """Restore the client's private leaves and let parts prepare."""
    context = _context(bound, job, phases, local={})
    local = {p.name: _call(p, "prepare", context) for p in bound.parts_with("prepare")}
    zero = torch.zeros((), dtype=bound.spec.dtype, device=bound.spec.device)
    return Carry(
        weights=context.anchor,
        optim=bound.optim.init(context.anchor.params),
        local=local,
        step=torch.zeros((), dtype=torch.int32, device=bound.spec.device),
        terms=dict.fromkeys(["task", *(p.name for p in bound.parts_with("term"))], zero),
    )


def step(
    bound: Bound, job: Job, carry: Carry, index: Tensor, phases: dict[str, str], functional: bool
) -> Carry:
    """One local step on the batch ``index``. ``functional`` differentiates by ``torch.func``, which
    works under ``vmap``; otherwise plain autograd, which is faster, gives the same gradient."""
    context = _context(bound, job, phases, carry.local, carry.step)
    batch = bound.data.batch(index, _data_key(job, carry.step))
    for part in bound.parts_with("transform"):
        batch = _call(part, "transform", context, batch)

    run: dict[str, Any] = {}

    def objective(params: Params, track: bool = True) -> tuple[Tensor, Tree]:
        return _objective(bound, context, carry, params, batch, track, run)

    params = carry.weights.params
    grads, done = gradient(objective, params, functional)
    context.gradient = lambda at: gradient(lambda p: objective(p, track=False), at, functional)[0]
    context.local = carry.local | done["local"]

    total = grads
    for part in bound.parts_with("correct"):
        change = _call(part, "correct", context, params, grads)
        total = total | tree.map(torch.add, change, total)
    context.gradient = None

    new, optim = _descend(bound, context, params, total, carry.optim)
    for part in bound.parts_with("project"):
        new = _call(part, "project", context, new)
    weights = Weights(new, done["buffers"])

    context.passes = _passes(bound, weights, job, carry.step)
    seen = run["pass"](done)
    local = dict(context.local)
    for part in bound.parts_with("observe"):
        out = view_out(seen, part, len(batch.x))
        local[part.name] = _call(part, "observe", context, new, batch, out)
    terms = tree.add(carry.terms, done["terms"])
    return Carry(weights, optim, local, carry.step + 1, terms)


def end(bound: Bound, job: Job, carry: Carry, phases: dict[str, str]) -> Reply:
    """What leaves the client, and what it keeps."""
    context = _context(bound, job, phases, carry.local)
    context.passes = _passes(bound, carry.weights, job, None)
    uploads: dict[str, Tree] = {}
    kept: dict[str, Tree] = {p: job.client[p] for p in job.client if p != PRIVATE}
    for part in bound.parts_with("reply"):
        kept[part.name], uploads[part.name] = _call(part, "reply", context, carry.weights)
    if PRIVATE in job.client:
        kept[PRIVATE] = bound.only_private(carry.weights)
    local, anchor = bound.only_public(carry.weights), bound.only_public(context.anchor)
    delta = Weights(
        tree.sub(local.params, anchor.params),
        tree.map(lambda a, b: a.to(bound.spec.dtype) - b.to(bound.spec.dtype), local.buffers, anchor.buffers),
    )
    contribution: Tree = {}
    for part in bound.parts_with("contribute"):
        contribution = _call(part, "contribute", context, delta.params)
    steps = carry.step.clamp_min(1).to(bound.spec.dtype)
    terms = tree.map(lambda t: t / steps, carry.terms)
    return Reply(delta, contribution, uploads, kept, terms, job.info.weight)


def survey(bound: Bound, job: Job, phases: dict[str, str], part: Part) -> Tree:
    """What a client answers to a part's survey."""
    return _call(part, "survey", _context(bound, job, phases, local={}))


def personal(bound: Bound, job: Job, phases: dict[str, str]) -> Weights:
    """The weights this client would use itself."""
    context = _context(bound, job, phases, local={})
    weights = context.anchor
    for part in bound.parts_with("personal"):
        weights = _call(part, "personal", context, weights)
    return weights


def gradient(
    fn: Callable[[Params], tuple[Tensor, Tree]], params: Params, functional: bool
) -> tuple[Params, Tree]:
    """Gradient of ``fn`` and what else it returns, detached."""
    if functional:
        grads, (_, aux) = torch.func.grad_and_value(fn, has_aux=True)(params)
        return grads, aux
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with torch.enable_grad():
        value, aux = fn(leaves)
        flat = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, flat, strict=True)), tree.detach(aux)


def _objective(
    bound: Bound,
    context: Context,
    carry: Carry,
    params: Params,
    batch: Batch,
    track: bool,
    run: dict[str, Any],
) -> tuple[Tensor, Tree]:
    """The task's loss plus every part's term, and what the step needs of the pass besides."""
    context.passes = _passes(bound, Weights(params, carry.weights.buffers), context.job, carry.step, track)
    context.local = carry.local
    rows = tuple(
        Rows(p.name, *_call(p, "inject", context, batch)) for p in bound.parts_with("inject")
    )
    main = context.passes.run(params, batch.x, True, True, rows, bound.cuts)
    size = len(batch.x)

    ascended = {}
    for part in bound.parts_with("ascend"):
        out = tree_out_detached(view_out(main, part, size))
        frozen = tree.detach(params)
        ascended[part.name] = tree.detach(_call(part, "ascend", context, frozen, batch, out))
    context.local = carry.local | ascended

    logits = main.logits[:size]
    for part in bound.parts_with("logits"):
        logits = _call(part, "logits", context, batch, logits)
    losses = bound.task.loss(logits, batch)  # [B]
    for part in bound.parts_with("weigh"):
        losses = losses * _call(part, "weigh", context, batch)
    terms = {"task": losses.mean()}
    for part in bound.parts_with("term"):
        terms[part.name] = _call(part, "term", context, params, batch, view_out(main, part, size))
    total = terms["task"]
    for name, term in terms.items():
        total = total if name == "task" else total + term

    done = {
        "logits": main.logits,
        "at": main.at,
        "buffers": context.passes.buffers,
        "local": ascended,
        "terms": terms,
    }
    if main.features is not None:
        done["features"] = main.features
    where = main.where
    run["pass"] = lambda d: Pass(d["logits"], d.get("features"), d["at"], where, d["buffers"])
    return total, done


def _descend(
    bound: Bound, context: Context, params: Params, grads: Params, state: Tree
) -> tuple[Params, Tree]:
    """The optimiser's step on the leaves that are trainable in this step."""
    lr = context.job.info.lr
    mask: dict[str, Tensor | bool] = {}
    for part in bound.parts_with("trainable"):
        for name, flag in _call(part, "trainable", context, params).items():
            mask[name] = flag if name not in mask else mask[name] & flag
    if not mask:
        return bound.optim.update(params, grads, state, lr)

    def masked(new: Params, old: Params) -> Params:
        flags = {n: torch.as_tensor(mask.get(n, True), device=lr.device) for n in new}
        return {n: torch.where(flags[n], v, old[n]) for n, v in new.items()}

    grads = masked(grads, tree.zeros_like(grads))
    new, new_state = bound.optim.update(params, grads, state, lr)
    kept = {k: masked(v, state[k]) if isinstance(v, dict) else v for k, v in new_state.items()}
    return masked(new, params), kept


def _context(
    bound: Bound,
    job: Job,
    phases: dict[str, str],
    local: dict[str, Tree],
    step: Tensor | None = None,
) -> Context:
    anchor = job.anchor
    if PRIVATE in job.client:
        own = job.client[PRIVATE]
        anchor = Weights(anchor.params | own["params"], anchor.buffers | own["buffers"])
    return Context(
        model=bound.model,
        task=bound.task,
        spec=bound.spec,
        data=bound.data,
        job=job,
        anchor=anchor,
        passes=_passes(bound, anchor, job, step),
        local=local,
        phases=phases,
        step=step,
    )


def _passes(
    bound: Bound, weights: Weights, job: Job, step: Tensor | None, track: bool = True
) -> Passes:
    key = rng.fold(job.key, "pass") if bound.model.is_random else job.key
    if bound.model.is_random and step is not None:
        key = rng.fold(key, step)
    return Passes(bound.model, weights.buffers, key, track)


def _data_key(job: Job, step: Tensor) -> Tensor:
    return rng.fold(rng.fold(job.key, "data"), step)


def tree_out_detached(out: Out) -> Out:
    mine = None if out.mine is None else tree_out_detached(out.mine)
    return Out(out.logits.detach(), out.features.detach(), tree.detach(out.at), mine)


def _call(part: Part, hook: str, context: Context, *args: Any) -> Any:
    """Call one hook with the part's own view; a failure names the part and the hook."""
    try:
        return getattr(part, hook)(View(context, part, hook), *args)
    except KedgeError:
        raise
    except Exception as error:
        raise HookError(f"{part.name}.{hook} failed: {type(error).__name__}: {error}") from error


# -- the server --------------------------------------------------------------------------------

Totals = dict[str, Any]


def totals(bound: Bound, replies: Reply, anchor: Weights) -> Totals:
    """Reduce replies that are stacked along a first axis. Sums only, unless a part needs clients."""
    w = replies.weight  # [K]

    def weighted(x: Tensor) -> Tensor:
        return (x * w.reshape(-1, *(1,) * (x.ndim - 1)).to(x.dtype)).sum(0)

    def plain(x: Tensor) -> Tensor:
        return x.sum(0)

    uploads: dict[tuple[str, ...], Any] = {}
    for path, upload in _uploads(replies.uploads):
        reduce = {Sum: plain, Mean: weighted, Stack: _same}[type(upload)]
        uploads[path] = type(upload)(tree.map(reduce, upload.value))
    found: Totals = {
        "count": len(w),
        "weight": w.sum(),
        "mean_delta": tree.map(weighted, replies.delta),
        "contribution": tree.map(plain, replies.contribution),
        "uploads": uploads,
        "terms": replies.terms,  # [K] each: small, and a NaN must be traced to its client
        "sq_norm": weighted(_sq_norms(replies.delta.params)),
    }
    if bound.needs("sum"):
        found["sum_delta"] = tree.map(plain, replies.delta)
    if bound.needs("clients"):
        public = bound.only_public(anchor)
        found["client_weights"] = w
        found["clients"] = Weights(
            anchor.params | tree.add(replies.delta.params, public.params),
            anchor.buffers | tree.map(_moved, replies.delta.buffers, public.buffers),
        )
    return found


def add_totals(a: Totals, b: Totals) -> Totals:
    """Totals of two cohorts as those of their union."""
    out: Totals = {"count": a["count"] + b["count"]}
    for name in a.keys() - {"count", "uploads"}:
        join = _cat if name in ("terms", "clients", "client_weights") else torch.add
        out[name] = tree.map(join, a[name], b[name])
    out["uploads"] = {
        path: type(one)(
            tree.map(_cat if isinstance(one, Stack) else torch.add, one.value, b["uploads"][path].value)
        )
        for path, one in a["uploads"].items()
    }
    return out


def server_round(bound: Bound, server: Server, found: Totals, round: int, key: Tensor) -> Server:
    """Aggregate, then let every part take its server step, left to right."""
    found = _finished(found)
    phases = bound.phases(round)

    def seen_by(part: Part) -> Round:
        return Round(
            part=part,
            model=bound.model,
            spec=bound.spec,
            round=round,
            lr=bound.lr(round),
            key=key,
            phase=phases.get(part.name, ""),
            anchor=server.weights,
            server=server.slots.get(part.name, {}),
            uploads=_own_uploads(found["uploads"], part.name),
            totals=found,
        )

    mean = found["mean_delta"]
    delta = mean.params
    for part in bound.parts_with("combine"):
        delta = _server_call(part, "combine", seen_by(part))
    weights = Weights(
        server.weights.params | tree.map(lambda d, w: w + d, delta, server.weights.params),
        server.weights.buffers | tree.map(_moved, mean.buffers, server.weights.buffers),
    )
    slots = dict(server.slots)
    for part in bound.parts_with("server_step"):
        weights, slots[part.name] = _server_call(part, "server_step", seen_by(part), weights)
    return Server(weights, slots)


def absorb(
    bound: Bound, server: Server, part: Part, answers: Totals, round: int, key: Tensor
) -> Server:
    """Give a part the reduced answers to its survey."""
    found = _finished(answers)
    r = Round(
        part=part,
        model=bound.model,
        spec=bound.spec,
        round=round,
        lr=bound.lr(round),
        key=rng.fold(key, "survey"),
        phase=bound.phases(round).get(part.name, ""),
        anchor=server.weights,
        server=server.slots.get(part.name, {}),
        uploads=_own_uploads(found["uploads"], part.name),
        totals=found,
    )
    weights, slot = _server_call(part, "absorb", r, server.weights)
    return Server(weights, server.slots | {part.name: slot})


def survey_totals(part: Part, answers: Tree, weight: Tensor) -> Totals:
    """Reduce stacked answers to a survey as uploads are."""

    def weighted(x: Tensor) -> Tensor:
        return (x * weight.reshape(-1, *(1,) * (x.ndim - 1)).to(x.dtype)).sum(0)

    reduced = {}
    for path, answer in _uploads({part.name: answers}):
        reduce = {Sum: lambda x: x.sum(0), Mean: weighted, Stack: _same}[type(answer)]
        reduced[path] = type(answer)(tree.map(reduce, answer.value))
    return {"count": len(weight), "weight": weight.sum(), "uploads": reduced}


def _finished(found: Totals) -> Totals:
    """Weighted sums become means."""
    total = found["weight"]
    out = dict(found)
    if "mean_delta" in out:
        out["mean_delta"] = tree.map(lambda x: x / total.to(x.dtype), out["mean_delta"])
        out["sq_norm"] = out["sq_norm"] / total
    out["uploads"] = {
        path: Mean(tree.map(lambda x: x / total.to(x.dtype), up.value)) if isinstance(up, Mean) else up
        for path, up in out["uploads"].items()
    }
    return out


def _server_call(part: Part, hook: str, *args: Any) -> Any:
    try:
        return getattr(part, hook)(*args)
    except KedgeError:
        raise
    except Exception as error:
        raise HookError(f"{part.name}.{hook} failed: {type(error).__name__}: {error}") from error


def _uploads(node: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(node, (Sum, Mean, Stack)):
        return [(path, node)]
    if not isinstance(node, dict):
        raise HookError(
            f"{path[0] if path else 'a part'} uploads a bare {type(node).__name__}; "
            "wrap it in Sum(...), Mean(...) or Stack(...)"
        )
    return [found for key, value in node.items() for found in _uploads(value, (*path, key))]


def _own_uploads(reduced: dict[tuple[str, ...], Any], name: str) -> Tree:
    own: dict[str, Any] = {}
    for path, upload in reduced.items():
        if path[0] != name:
            continue
        if len(path) == 1:
            return upload.value
        node = own
        for key in path[1:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = upload.value
    return own


def _sq_norms(stacked: Params) -> Tensor:
    return sum(((x * x).flatten(1).sum(1) for x in stacked.values()), start=torch.zeros(()))  # type: ignore[return-value]


def _moved(delta: Tensor, value: Tensor) -> Tensor:
    """A buffer after its averaged change; integer buffers (counters) are rounded."""
    moved = value.to(delta.dtype) + delta
    return moved if value.is_floating_point() else moved.round().to(value.dtype)


def _same(x: Tensor) -> Tensor:
    return x


def _cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])
