"""Layers that draw from a key and work under ``vmap``, in place of those of torch."""

from __future__ import annotations

from torch import nn

from kedge.core.attention import Attention
from kedge.core.dropout import Dropout
from kedge.core.recurrent import GRU, LSTM, RNN
from kedge.errors import ModelError

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
