"""A model as a pure function of its weights, with named cuts and a head.

Any ``nn.Module`` will do. An ``nn.Sequential`` can be cut after each of its children, and its
child ``head`` (else its last one) is the head. Another module can be cut after any named
submodule, and its head is the submodule named by ``head=`` (``head``, ``fc`` and ``classifier``
are recognised). *Features* are the input of the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kedge.core import tree
from kedge.core.layers.dropout import KeyStream, drawing_from
from kedge.core.layers.keyed import KeyedFunctions, keyed, may_draw
from kedge.core.tree import Params, Weights
from kedge.errors import FieldError, ModelError, UnknownName

# -- What a pass records and injects on its way through a network ----------------------------------


class InjectedRows(NamedTuple):
    """Extra rows that join a pass after ``cut`` and run through the rest of the network."""

    owner: str
    cut: str
    values: Tensor


class Tape:
    """Record activations and features during a pass, and inject rows at their cuts."""

    def __init__(self, count: int, rows: tuple[InjectedRows, ...], taps: tuple[str, ...]) -> None:
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

        def read_features(_: nn.Module, args: tuple[Tensor, ...]) -> None:
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


# -- Call a module with other weights, without changing it -----------------------------------------


class FunctionalModule:
    """A module as a function of its weights.

    It is a faster ``torch.func.functional_call``: the slots of the tensors in the module are looked
    up once, not in every call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_parameters = len(list(module.parameters()))
        #: (dict of a submodule, key in it, full name, the module's own tensor)
        self._slots: list[tuple[dict[str, Tensor | None], str, str, Tensor]] = []
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


#: ``train`` updates BatchNorm's running statistics, ``probe`` normalises by the batch without
#: updating them, ``eval`` uses them.
Mode = Literal["train", "probe", "eval"]
MODES: tuple[Mode, ...] = ("train", "probe", "eval")

#: What the server does with BatchNorm statistics. ``average``: they are averaged like parameters
#: (all five headline papers). ``local``: each client keeps its own. ``frozen``: never updated,
#: also used in training. ``batch``: evaluation, too, normalises by the batch at hand.
BATCHNORM = ("average", "local", "frozen", "batch")

#: ``fp32``; ``tf32``: matrix products in TF32 on a GPU; ``bf16``: passes in bfloat16 by autocast.
#: Parameters, their updates and all of the server stay in float32.
PRECISIONS = ("fp32", "tf32", "bf16")

_HEADS = ("head", "fc", "classifier")
NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


class Pass(NamedTuple):
    """Result of a forward pass; real rows come first, then those of each owner."""

    logits: Tensor
    features: Tensor | None
    at: dict[str, Tensor]  # real rows after each wanted cut
    where: dict[str, slice]  # rows of each owner in logits and features
    buffers: Params


class Layout:
    """Memory format and replaced layers of a model in an engine; this one changes nothing."""

    def replace_layers(self, net: nn.Module) -> None:
        """Replace layers of a private copy of the module, in place."""

    def arrange(self, x: Tensor, params: Params) -> tuple[Tensor, Params]:
        """Convert inputs and parameters of a pass to the memory format of the layers."""
        return x, params


class Model:
    """A module as a pure function ``forward(weights, x, mode)``.

    The module is copied. A model is immutable; an engine derives one in its own layout by
    :meth:`prepared`.

    Args:
        module: any ``nn.Module``.
        head: name of the head's submodule; recognised by name or position for None.
        batchnorm: what happens to BatchNorm statistics, see :data:`BATCHNORM`.
        precision: precision of passes, see :data:`PRECISIONS`.

    Raises:
        FieldError: ``batchnorm`` or ``precision`` is unknown.
        ModelError: there is nothing to train, or a layer cannot draw from a key.
        UnknownName: there is no submodule ``head``.

    >>> layers = [nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)]
    >>> model = Model(nn.Sequential(*layers), head="3")
    >>> model.head_names()
    ['3.weight', '3.bias']
    """

    def __init__(
        self,
        module: nn.Module,
        head: str | None = None,
        batchnorm: str = "average",
        precision: str = "fp32",
    ) -> None:
        if precision not in PRECISIONS:
            raise FieldError(f"precision = {precision!r} is not one of: {', '.join(PRECISIONS)}")
        if batchnorm not in BATCHNORM:
            raise FieldError(f"batchnorm = {batchnorm!r} is not one of: {', '.join(BATCHNORM)}")
        if isinstance(module, nn.Sequential) and not len(module):
            raise ModelError("the model is an empty nn.Sequential; give it at least a head")
        self.batchnorm, self.precision = batchnorm, precision
        # frozen parameters (requires_grad = False) are constants: neither trained nor sent
        self.names = [n for n, p in module.named_parameters() if p.requires_grad]
        if not self.names:
            raise ModelError("the model has no parameters to train")
        self.head_name = find_head(module, head)
        self.template = copy.deepcopy(module)
        self._keyed = keyed(_copied(self.template))
        #: Whether code of the module may draw, which then is watched in every pass.
        self._draws = may_draw(module)
        self.is_random = self._draws or any(
            getattr(m, "is_random", False) for m in self._keyed.modules()
        )
        self.layout = Layout()
        names, kept = set(self.names), set(module.state_dict())
        both = [*self.template.named_parameters(), *self.template.named_buffers()]
        #: What no round changes and nobody sends: frozen parameters, and buffers that are not
        #: part of the module's state.
        self.constants: Params = {
            n: v.detach()
            for n, v in both
            if n not in (names if isinstance(v, nn.Parameter) else kept)
        }

    def prepared(
        self, layout: Layout, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Model:
        """The same model, computed in another layout, with constants on a device in a dtype."""
        model = copy.copy(self)
        model.layout = layout
        model.constants = {
            n: v.to(device, dtype if v.is_floating_point() else None)
            for n, v in self.constants.items()
        }
        model.__dict__.pop("_nets", None)
        assert model._nets  # built now: the first pass may be inside a trace
        return model

    def at_precision(self, precision: str) -> Model:
        """The same model, with passes in another precision."""
        if precision == self.precision:
            return self
        model = copy.copy(self)
        model.precision = precision
        return model

    @cached_property
    def _nets(self) -> dict[str, FunctionalModule]:
        """The network in every mode, and its head alone; built on first use."""
        nets: dict[str, nn.Module] = {
            mode: _skeleton(self._keyed, mode, self.batchnorm, self.head_name, self.layout)
            for mode in MODES
        }
        if self.head_name is not None:
            nets["head"] = nets["eval"].get_submodule(self.head_name)
        return {name: FunctionalModule(net) for name, net in nets.items()}

    @property
    def has_head(self) -> bool:
        return self.head_name is not None

    @property
    def cuts(self) -> list[str]:
        """Names of the cuts in depth order, without the head."""
        module = self.template
        if isinstance(module, nn.Sequential):
            return [n for n in module._modules if n != self.head_name]
        inside_head = f"{self.head_name}."
        names = [n for n, _ in module.named_modules(remove_duplicate=False) if n]
        return [n for n in names if n != self.head_name and not n.startswith(inside_head)]

    def check_cut(self, cut: str) -> None:
        if cut not in self.cuts:
            raise UnknownName("cut", cut, self.cuts)

    def head_names(self) -> list[str]:
        """Names of the head's parameters."""
        self.require_head("the model")
        return [n for n in self.names if n.startswith(f"{self.head_name}.")]

    def require_head(self, who: str) -> None:
        if not self.has_head:
            raise ModelError(
                f"{who} needs to know the model's head (its last linear layer). "
                "Name it: kedge.Model(module, head='name_of_the_submodule')"
            )

    def weights(self) -> Weights:
        """A copy of the module's weights, without constants."""
        return tree.map(Tensor.clone, self.own_weights())

    def own_weights(self) -> Weights:
        """The module's weights themselves, without constants; nobody may write to them."""
        params = dict(self.template.named_parameters())
        buffers = {n: b for n, b in self.template.named_buffers() if n not in self.constants}
        return Weights(
            {n: params[n].detach() for n in self.names},
            {n: b.detach() for n, b in buffers.items()},
        )

    def module(self, weights: Weights) -> nn.Module:
        """A copy of the module with the given weights, in evaluation mode."""
        like = weights.params[self.names[0]]
        module = copy.deepcopy(self.template).to(like.device, like.dtype)
        params = {n: weights.params[n] for n in self.names}
        module.load_state_dict(params | weights.buffers, strict=False)
        return module.eval()

    def forward(
        self,
        weights: Weights,
        x: Tensor,
        mode: Mode = "train",
        *,
        key: Tensor | None = None,
        rows: tuple[InjectedRows, ...] = (),
        taps: tuple[str, ...] = (),
    ) -> Pass:
        """One forward pass.

        Args:
            weights: parameters and buffers.
            x: inputs, ``[B, ...]``.
            mode: what BatchNorm and dropout do, see :data:`Mode`.
            key: random key for dropout.
            rows: extra rows, each joined to the batch after its cut.
            taps: further cuts whose activations are returned.
        """
        buffers = weights.buffers
        if mode != "eval":
            buffers = {n: b.clone() for n, b in buffers.items()}  # norm layers write into them
        state = self.constants | buffers
        x, params = self.layout.arrange(x, weights.params)
        net, tape = self._nets[mode], Tape(len(x), rows, taps)
        stream = KeyStream(key) if key is not None and mode != "eval" else None
        with (
            drawing_from(stream) if self.is_random else nullcontext(),
            KeyedFunctions() if self._draws else nullcontext(),
            self._precise(x),
        ):
            if isinstance(net.module, Stages):
                logits = net.call(state | params, x, tape, self.head_name)
            else:
                with tape.hooked(net.module, self.head_name):
                    logits = net.call(state | params, x)
        after = buffers if mode == "train" else weights.buffers
        features = tape.features
        if self.precision == "bf16":  # losses stay in full precision
            full = torch.promote_types(weights.params[self.names[0]].dtype, torch.float32)
            logits = logits.to(full)
            features = features.to(full) if features is not None else None
        return Pass(logits, features, tape.at, tape.where, after)

    def _precise(self, x: Tensor) -> AbstractContextManager[object]:
        """This model's precision, which overrides an autocast of the caller."""
        if x.is_meta:  # shapes alone; torch knows no autocast there
            return nullcontext()
        enabled, wanted = torch.is_autocast_enabled(x.device.type), self.precision == "bf16"
        if not enabled and not wanted:
            return nullcontext()
        return torch.autocast(x.device.type, torch.bfloat16, wanted, cache_enabled=False)

    def head(self, params: Params, features: Tensor) -> Tensor:
        """The head alone, from features ``[B, F]`` to logits ``[B, C]``."""
        self.require_head("the model")
        start = f"{self.head_name}."
        head = {n.removeprefix(start): params[n] for n in self.names if n.startswith(start)}
        if len(head) != self._nets["head"].num_parameters:
            raise ModelError(
                "the head shares weights with another layer or is frozen in part, so it cannot be "
                "used by itself; give it weights of its own"
            )
        return self._nets["head"].call(head, features)

    def shapes(self, weights: Weights, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Output shape (without batch) at every cut and of the features, for inputs like ``x``."""
        with torch.no_grad():
            done = self.forward(weights, x, "eval", taps=tuple(self.cuts))
        shapes = {cut: tuple(value.shape[1:]) for cut, value in done.at.items()}
        if done.features is not None:
            shapes["features"] = tuple(done.features.shape[1:])
        return shapes | {"logits": tuple(done.logits.shape[1:])}


def _copied(module: nn.Module) -> nn.Module:
    """A copy that shares all parameters and buffers: nobody writes to them, since each pass brings
    its own, and they may be large."""
    return copy.deepcopy(module, {id(v): v for v in (*module.parameters(), *module.buffers())})


def find_head(module: nn.Module, head: str | None = None) -> str | None:
    """The name of a module's head; None if it is not known."""
    if head is not None:
        known = [n for n, _ in module.named_modules() if n]
        if head not in known:
            raise UnknownName("submodule (head)", head, known)
        return head
    named = getattr(module, "head_name", None)  # a module may tell; "": it has none
    if isinstance(named, str):
        return named or None
    for name in _HEADS:
        if isinstance(getattr(module, name, None), nn.Module):
            return name
    return list(module._modules)[-1] if isinstance(module, nn.Sequential) else None


def _skeleton(
    module: nn.Module, mode: str, batchnorm: str, head: str | None, layout: Layout
) -> nn.Module:
    """A copy of the module, fixed in one mode, so that no pass has to switch modes."""
    net = _copied(module).train(mode != "eval")
    layout.replace_layers(net)
    for child in net.modules():
        if isinstance(child, NORMS):
            if batchnorm == "frozen":
                child.eval()
            elif mode == "probe" or (mode == "eval" and batchnorm == "batch"):
                child.train()
                child.track_running_stats = False  # type: ignore[assignment]  # batch statistics
    # a head inside a child can only be read by a hook
    if type(net) is nn.Sequential and head in net._modules:
        return _as_stages(net)
    return net


def _as_stages(net: nn.Sequential) -> Stages:
    stages = Stages()
    stages._modules.update(net._modules)
    stages.training = net.training
    return stages
