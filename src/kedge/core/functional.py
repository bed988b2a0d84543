"""Call a module with other weights, without changing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kedge.core.tree import Params


class FunctionalModule:
    """A module as a function of its weights.

    It is a faster ``torch.func.functional_call``: the slots of the tensors in the module are looked
    up once, not in every call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_parameters = len(list(module.parameters()))
        #: (dict of a submodule, key in it, full name, the module's own tensor)
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []
        first: dict[int, str] = {}  # shared tensors have the name of their first slot
        for prefix, child in module.named_modules():
            for tensors in (child._parameters, child._buffers):
                for name, default in tensors.items():
                    if default is not None:
                        full = first.setdefault(id(default), f"{prefix}.{name}" if prefix else name)
                        self._slots.append((tensors, name, full, default))

    def call(self, state: Params, *args: Any) -> Any:
        """The module's output with the tensors of ``state`` (by full name) in place of its own."""
        try:
            for tensors, name, full, default in self._slots:
                tensors[name] = state.get(full, default)
            return self.module(*args)
        finally:
            for tensors, name, _, default in self._slots:
                tensors[name] = default
