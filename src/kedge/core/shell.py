"""The structure of a module, lent to any weights, and how tensors lie in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.core import tree
from kedge.core.tree import Params, Tree
from kedge.engines.mapped import transforms_active


class Shell:
    """A module that lends its structure to any weights.

    As ``torch.func.functional_call``, in a fraction of the time: where each tensor hangs in the
    module does not change from call to call, so it is looked up once.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.parameters = len(list(net.parameters()))
        #: (the dict of a module, the name there, the name in the weights, the module's own tensor)
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []
        first: dict[int, str] = {}  # tensors that hang in several places go by their first name
        for prefix, module in net.named_modules():
            for held in (module._parameters, module._buffers):
                for name, own in held.items():
                    if own is not None:
                        full = first.setdefault(id(own), f"{prefix}.{name}" if prefix else name)
                        self._slots.append((held, name, full, own))

    def call(self, state: Params, *args: Any) -> Any:
        """The module's output with the tensors of ``state`` in place of its own."""
        try:
            for held, name, full, own in self._slots:
                held[name] = state.get(full, own)
            return self.net(*args)
        finally:
            for held, name, _, own in self._slots:
                held[name] = own


def in_channels_last(values: Tree) -> Tree:
    """Maps and weights of convolutions in the layout in which a pixel's channels lie together, and
    everything else in the usual one."""

    def turned(x: Tensor) -> Tensor:
        wanted = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        return x.contiguous(memory_format=wanted)

    return tree.map(turned, values)


def turn_gradient(pool: nn.Module, args: Any, out: Any) -> None:
    """Give a pool its gradient in its own layout: in the other one, in which it comes from a layer
    that flattens, the pool would turn its whole input there and back."""
    if isinstance(out, Tensor) and out.requires_grad and not transforms_active():
        out.register_hook(in_channels_last)
