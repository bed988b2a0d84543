"""What a pass records and injects on its way through a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.errors import ModelError


class Rows(NamedTuple):
    """Extra rows that join a pass after ``cut`` and run through the rest of the network."""

    owner: str
    cut: str
    values: Tensor


class Tape:
    """Record activations and features during a pass, and inject rows at their cuts."""

    def __init__(self, count: int, rows: tuple[Rows, ...], taps: tuple[str, ...]) -> None:
        self.real, self.count = count, count
        self.rows, self.taps = rows, set(taps) | {r.cut for r in rows}
        self.at: dict[str, Tensor] = {}
        self.where: dict[str, slice] = {}
        self.features: Tensor | None = None

    def after(self, cut: str, x: Tensor) -> Tensor:
        if cut not in self.taps or not isinstance(x, Tensor):
            return x  # a submodule with several outputs (an LSTM) is not a cut
        injected = [row for row in self.rows if row.cut == cut]
        if injected and cut in self.at:
            raise ModelError(f"{cut} runs twice in one pass, so nothing can be injected after it")
        self.at[cut] = x[: self.real]
        for row in injected:
            values = row.values.reshape(len(row.values), *x.shape[1:])
            self.where[row.owner] = slice(self.count, self.count + len(values))
            self.count += len(values)
            x = torch.cat([x, values.to(x.dtype)])
        return x

    @contextmanager
    def hooked(self, net: nn.Module, head: str | None) -> Iterator[None]:
        """For modules that are not sequential: install forward hooks within the block."""

        def read_features(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.features = args[0]

        with ExitStack() as stack:
            if head is not None:
                handle = net.get_submodule(head).register_forward_pre_hook(read_features)
                stack.callback(handle.remove)
            for cut in self.taps:
                handle = net.get_submodule(cut).register_forward_hook(
                    lambda _m, _a, out, cut=cut: self.after(cut, out)
                )
                stack.callback(handle.remove)
            yield


class Stages(nn.Sequential):
    """A sequential model that passes the output of each child to a tape."""

    def forward(self, x: Tensor, tape: Tape, head: str) -> Tensor:  # type: ignore[override]
        for name, stage in self._modules.items():
            assert stage is not None
            if name == head:
                tape.features = x
            x = tape.after(name, stage(x))
        return x
