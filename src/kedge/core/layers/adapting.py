"""A user's module in the form that kedge trains: with all weights, and one tensor of outputs.

Forward hooks convert the outputs, so the names of weights stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from kedge.core.model import find_head
from kedge.errors import ModelError


class Adapted(NamedTuple):
    """A module that is ready to be trained."""

    module: nn.Module
    shape: tuple[int, ...]  # of the outputs, without the batch
    tokens: bool  # takes whole numbers


def check_module(model: object) -> nn.Module:
    """The module itself; a ModelError says what to give instead of anything else."""
    if isinstance(model, type):
        raise ModelError(f"model is the class {model.__name__}; give an instance: call it first")
    if not isinstance(model, nn.Module):
        what = "a function" if callable(model) else f"of type {type(model).__name__}"
        raise ModelError(
            f"model is {what}; give an nn.Module, or a name such as 'mlp(hidden=[32])'"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ModelError("the model has no values yet (its device is meta); load its weights first")
    return model


def adapt(module: nn.Module, x: Tensor, seed: int = 0) -> Adapted:
    """A copy of a module on the CPU, tried on some inputs.

    Lazy layers get their shapes. Whole numbers are given as they are if the module takes them, as
    ``nn.Embedding`` does, else as real numbers. A dictionary of outputs, such as that of a Hugging
    Face model, is replaced by its entry ``logits``.

    Args:
        module: the user's module; it is not changed.
        x: two inputs or more, ``[n, ...]``.
        seed: for the weights of lazy layers.

    Raises:
        ModelError: the module cannot take the inputs, or returns something else than outputs
            ``[n, ...]``.
    """
    net = _copied(check_module(module)).cpu().eval()
    whole = not x.is_floating_point()
    tries = [x, x.float()] if whole else [x]
    first: Exception | None = None
    for i, given in enumerate(tries):
        candidate = _copied(net)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                out = _in_float32(candidate, given)
        except Exception as error:
            first = first or error
            if i + 1 < len(tries):
                continue
            reason = first if _embeddings(net) else error
            raise ModelError(_cannot_take(net, x, reason)) from error
        tokens = whole and i == 0
        if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
            _last(candidate).register_forward_hook(take_logits)
            out = out["logits"]
        return Adapted(candidate, tuple(_outputs(out, len(x)).shape[1:]), tokens)
    raise AssertionError


def check_logits(module: nn.Module, x: Tensor) -> None:
    """Raise a ModelError if the outputs are probabilities, by the last layer or by their values.

    The loss takes their softmax or sigmoid once more, so that the model hardly learns.
    """
    last = _last(module)
    with torch.no_grad():
        out = module.eval()(x)
    sums_to_one = out.shape[-1] > 1 and bool(
        (out >= 0).all() and ((out.sum(-1) - 1).abs() < 1e-5).all()
    )
    if isinstance(last, nn.Softmax) or sums_to_one:
        raise ModelError("the model ends in a softmax; leave it out, so that it returns logits")
    if isinstance(last, nn.Sigmoid):
        raise ModelError("the model ends in a sigmoid; leave it out, so that it returns logits")


def one_logit(module: nn.Module, x: Tensor) -> nn.Module:
    """A copy of a module with one output z per sample, which now returns the two logits [0, z].

    Their softmax is [1 - sigmoid(z), sigmoid(z)], and their cross-entropy is the binary
    cross-entropy of z: training is the same, and all parts see two classes.
    """
    net = copy.deepcopy(module).eval()
    seen: dict[str, Tensor] = {}
    last = _last(net)
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, name=name: seen.update({name: out}))
        for name, layer in net.named_modules()
        if name and "." not in name
    ]
    with torch.no_grad():
        out = net(x)
    for handle in handles:
        handle.remove()
    if last is net:  # the layer whose output is that of the model, so that it stays the head
        same = [name for name, value in seen.items() if value is out]
        last = net.get_submodule(same[-1]) if same else net
    last.register_forward_hook(two_logits)
    name = find_head(net)
    if name is not None and _output_at(net, name, x).shape[-1:] != (2,):
        net.head_name = ""  # type: ignore[assignment]  # something follows, so it is no head
    return net


def _output_at(net: nn.Module, name: str, x: Tensor) -> Tensor:
    """The output of a submodule in a pass."""
    found: list[Tensor] = []
    handle = net.get_submodule(name).register_forward_hook(lambda _m, _a, out: found.append(out))
    with torch.no_grad():
        net(x)
    handle.remove()
    return found[-1]


def take_logits(_module: nn.Module, _args: object, out: Mapping[str, Tensor]) -> Tensor:
    """Forward hook: the entry ``logits`` of a dictionary."""
    return out["logits"]


def two_logits(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
    """Forward hook: the logits [0, z] of one output z."""
    z = out.reshape(-1, 1)
    return torch.cat([torch.zeros_like(z), z], -1)


#: Hooks by the names under which a saved model has them.
HOOKS: dict[str, Callable[..., Tensor]] = {"logits": take_logits, "one_logit": two_logits}


def hooks_of(module: nn.Module) -> dict[str, list[str]]:
    """The hooks that convert outputs, by the name of the submodule that has them."""
    names = {function: name for name, function in HOOKS.items()}
    found = {}
    for where, layer in module.named_modules():
        kinds = [names[f] for f in layer._forward_hooks.values() if f in names]
        if kinds:
            found[where] = kinds
    return found


def add_hooks(module: nn.Module, hooks: Mapping[str, Sequence[str]]) -> None:
    """Add the hooks that :func:`hooks_of` found to a module built again, in place."""
    for where, kinds in hooks.items():
        layer = module.get_submodule(where)
        for kind in kinds:
            if HOOKS[kind] not in layer._forward_hooks.values():
                layer.register_forward_hook(HOOKS[kind])


def _last(net: nn.Module) -> nn.Module:
    """The module whose output is that of a sequence; the net itself if it is none."""
    while type(net) is nn.Sequential and len(net):
        net = net[-1]
    return net


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy; torch itself does not copy the buffers of lazy layers."""
    lazy = (b for b in module.buffers() if isinstance(b, UninitializedBuffer))
    return copy.deepcopy(module, {id(b): UninitializedBuffer() for b in lazy})


def _in_float32(net: nn.Module, x: Tensor) -> object:
    """Outputs of a net; its lazy layers are created, and it is then in float32."""
    if not _is_lazy(net):
        net.float()
    out: object = net(x)
    net.float()
    if _is_lazy(net):
        raise ModelError("a lazy layer is not used in the forward pass; leave it out")
    return out


def _is_lazy(net: nn.Module) -> bool:
    kinds = (UninitializedParameter, UninitializedBuffer)
    return any(isinstance(v, kinds) for v in [*net.parameters(), *net.buffers()])


def _outputs(out: object, rows: int) -> Tensor:
    """The outputs of a module; a ModelError if they are none."""
    if isinstance(out, Mapping):
        raise ModelError(
            f"the model returns a dictionary of {', '.join(map(str, out))}; let it return its "
            "outputs as a tensor, or as the entry 'logits'"
        )
    if isinstance(out, (tuple, list)):
        raise ModelError(
            f"the model returns a {type(out).__name__} of {len(out)}; let its forward return the "
            "outputs alone, such as out[0]"
        )
    if not isinstance(out, Tensor):
        raise ModelError(f"the model returns a {type(out).__name__}, not a tensor of outputs")
    if not out.ndim or len(out) != rows:
        raise ModelError(
            f"the model returns the shape {list(out.shape)} for {rows} inputs; the batch must be "
            "its first axis (batch_first=True in recurrent layers and attention)"
        )
    if not out.is_floating_point():
        raise ModelError("the model returns whole numbers; let it return logits")
    return out


def _cannot_take(net: nn.Module, x: Tensor, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = f"the model cannot take inputs of shape {tuple(x.shape[1:])}: {lines[0]}"
    rows = _embeddings(net)
    if rows and x.is_floating_point():
        text += "; its embedding takes whole numbers, so give an array of integers"
    elif rows and isinstance(error, IndexError):
        text += (
            f"; its embedding has rows 0 to {min(rows) - 1}, the inputs go from {int(x.min())} "
            f"to {int(x.max())}"
        )
    return text


def _embeddings(net: nn.Module) -> list[int]:
    """How many rows each embedding has."""
    return [m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)]
