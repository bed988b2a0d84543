"""Layers that draw from a key and work under ``vmap``, in place of those of torch."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kedge.core.layers.dropout import Dropout, drop, has_keys
from kedge.core.layers.sequence import GRU, LSTM, RNN, Attention, attend
from kedge.errors import ModelError

# -- Random functions that a user's module calls by itself, such as ``F.dropout`` ------------------

#: Code that draws, as a regular expression.
_DRAWS = (
    r"(?<!self\.)\bdropout[123]?d?\(|scaled_dot_product|\brand|bernoulli|multinomial|gumbel"
    r"|normal_?\(|uniform_\(|exponential_\(|rrelu|alpha_dropout"
)


def may_draw(module: nn.Module) -> bool:
    """Whether the code of a module may call random functions.

    Layers of torch and kedge do not, and most files of users do not name any.
    """
    homes = {cls.__module__ for m in module.modules() for cls in type(m).__mro__}
    own = (h for h in homes if h.partition(".")[0] not in ("builtins", "kedge"))
    return any(_names_draws(home) for home in own if not home.startswith("torch.nn."))


@cache
def _names_draws(module: str) -> bool:
    try:
        return bool(re.search(_DRAWS, inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):  # no source, as in a notebook
        return True


class KeyedFunctions(TorchFunctionMode):
    """Within the block, functions that drop values draw from the keys of the pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))


def _check(name: str) -> None:
    if not has_keys():
        raise ModelError(
            f"the model calls {name} in evaluation, too; pass it self.training, or use nn.Dropout"
        )


def _dropout(
    _: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    _check("F.dropout")
    return drop(input, p)


def _torch_dropout(_: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(_, input, p, train)


def _channels(
    func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    _check(f"F.{func.__name__}")
    return drop(input, p, channels=True)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, **options)
    _check("F.scaled_dot_product_attention with dropout_p")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # True: takes part
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(~attn_mask, -math.inf)
    return attend(query, key, value, attn_mask, dropout_p, scale)[0]


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("generator") is not None:  # of the user, who may know
        return func(*args, **kwargs)
    raise ModelError(
        f"the model draws random numbers by {func.__name__}, where no key reaches, so that no run "
        "could be repeated; use nn.Dropout, or draw them outside of the model"
    )


def _refused_in_training(func: Any, *args: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", args[2] if len(args) > 2 else False)
    return _refused(func) if training else args[0]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    F.scaled_dot_product_attention: _attention,
    F.alpha_dropout: _refused_in_training,
    F.feature_alpha_dropout: _refused_in_training,
}
_HANDLERS |= dict.fromkeys(
    [
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint,
        torch.randint_like, torch.randperm, torch.bernoulli, torch.multinomial, torch.normal,
        Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_, Tensor.uniform_,
        Tensor.random_, Tensor.exponential_, F.gumbel_softmax,
    ],
    _refused,
)  # fmt: skip


#: Layers of torch that :func:`keyed` replaces by a :class:`Dropout`.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
#: Layers that change their class alone, so that their weights stay where they are.
SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: Attention,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
}


def keyed(module: nn.Module) -> nn.Module:
    """Replace the layers of a module, in place where it has children, by layers that draw from a
    key; a ModelError for layers that cannot."""
    _convert(module, type(module).__name__)
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if isinstance(child, DROPOUTS):
            setattr(module, name, Dropout(child.p, channels=not isinstance(child, nn.Dropout)))
        elif isinstance(child, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise ModelError(
                f"{type(child).__name__} ({name}) cannot draw from a key; use nn.Dropout"
            )
        else:
            keyed(child)
    return module


def _convert(layer: nn.Module, name: str) -> None:
    if type(layer) in SUBCLASSES:
        layer.__class__ = SUBCLASSES[type(layer)]
    elif isinstance(layer, (Attention, LSTM, GRU, RNN)):
        return  # a layer that is used twice
    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.dropout:
        raise ModelError(
            f"{name} drops out inside, where no key reaches; "
            "set its dropout to 0 and add nn.Dropout after it"
        )
    elif isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # no fused kernel in evaluation: vmap has no rule for it
    elif isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False
