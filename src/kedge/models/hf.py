"""Models of Hugging Face for classification: ``hf:NAME_OR_FOLDER(lora=8)``."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.errors import ModelError
from kedge.models.networks import Shape
from kedge.schema import Doc, NotNegative, Size

# -- LoRA: train a low-rank update of some linear layers, and leave their weights as they are ------

#: Names of the projections to queries and values in common architectures.
ATTENTION = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_proj", "value_proj")


class LoRA(nn.Module):
    """A linear layer with frozen weights W and a trained update: W x + (alpha / rank) B A x.

    A is drawn as the weights of a linear layer, B is zero, so that training starts at W.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = F.linear(F.linear(x, self.a), self.b)
        return self.base(x) + self.scale * update

    def extra_repr(self) -> str:
        return f"rank={len(self.a)}, scale={self.scale:g}"


def add_lora(module: nn.Module, rank: int, alpha: float, targets: Sequence[str] = ()) -> None:
    """Freeze a module and give some of its linear layers a trained update, in place.

    Args:
        module: the network.
        rank: rank of the update.
        alpha: the update is multiplied by ``alpha / rank``.
        targets: last names of the layers; those of queries and values if empty.

    Raises:
        ModelError: there is no such layer.
    """
    module.requires_grad_(False)
    wanted = set(targets or ATTENTION)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    chosen = {n: m for n, m in layers.items() if n.rpartition(".")[2] in wanted}
    if not chosen:
        known = sorted({n.rpartition(".")[2] for n in layers})
        raise ModelError(
            f"no linear layer is called {', '.join(targets or ATTENTION)}; name some of: "
            f"{', '.join(known)} (targets=[...])"
        )
    for name, layer in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, LoRA(layer, rank, alpha))


#: The other forms of attention have no rule for vmap and keyed dropout.
_FORM: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
_HEADS = ("classifier", "score", "classification_head", "pre_classifier")


class HuggingFace(nn.Module):
    """A model of Hugging Face as a function from token ids ``[B, T]`` or images to logits.

    Tokens with the padding id of the model are masked.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.input_name: str = net.main_input_name
        self.pad: int | None = getattr(net.config, "pad_token_id", None)
        #: A mask [B, 1, 1, T], which all clients at once can have, is as good as one [B, T].
        self.wide_mask = False
        heads = [name for name in _HEADS if isinstance(getattr(net, name, None), nn.Module)]
        self.head_name = f"net.{heads[0]}" if heads else ""

    def forward(self, x: Tensor) -> Tensor:
        inputs = {self.input_name: x}
        if self.input_name == "input_ids" and self.pad is not None:
            inputs["attention_mask"] = self._mask(x)
        logits: Tensor = self.net(**inputs).logits
        return logits

    def _mask(self, x: Tensor) -> Tensor:
        known = x.ne(self.pad or 0)
        if not self.wide_mask:
            return known.long()
        dtype = next(self.net.parameters()).dtype
        zeros = torch.zeros(known.shape, dtype=dtype, device=x.device)
        return zeros.masked_fill(~known, torch.finfo(dtype).min)[:, None, None]

    def try_wide_mask(self, length: int) -> None:
        """Use the mask that works for all clients at once if the logits are the same."""
        if self.input_name != "input_ids" or self.pad is None:
            return
        other = 0 if self.pad else 1
        x = torch.full((2, length), other)
        x[1, length // 2 :] = self.pad
        before = self.training
        self.eval()
        with torch.no_grad():
            try:
                expected = self(x)
            except (RuntimeError, ValueError, IndexError) as error:
                most = getattr(self.net.config, "max_position_embeddings", None)
                has = f" (it has positions for {most})" if most else ""
                raise ModelError(f"the model cannot take {length} tokens{has}: {error}") from error
            self.wide_mask = True
            try:
                same = torch.allclose(self(x), expected, atol=1e-5)
            except (RuntimeError, ValueError, IndexError):
                same = False
        self.wide_mask = same
        self.train(before)


def hf(
    shape: Shape,
    outputs: int,
    name: str,
    *,
    lora: Annotated[Size, Doc("rank of the trained updates; 0: train all weights")] = 0,
    alpha: Annotated[NotNegative, Doc("updates are multiplied by alpha / lora")] = 16.0,
    targets: Annotated[
        tuple[str, ...] | str, Doc("linear layers with updates; empty: queries and values")
    ] = (),
    train: Annotated[Literal["all", "head"], Doc("head: freeze all but the classifier")] = "all",
) -> nn.Module:
    """A pretrained model with a new classifier, for token ids (T,) or images (C, H, W).

    With ``lora`` above 0, only low-rank updates of the attention and the classifier are trained
    and sent; all other weights stay as they are, on every client. ``name`` is a name on the Hub,
    or a folder.
    """
    transformers = _library()
    auto = _auto_class(transformers, shape)
    path = Path(name).expanduser()
    is_folder = path.is_dir()
    if not is_folder and name.startswith(("/", ".", "~")):
        raise ModelError(f"there is no folder {name}; give one with config.json and weights")
    try:
        with _quiet(transformers):
            net = auto.from_pretrained(
                str(path) if is_folder else name,
                num_labels=outputs,
                ignore_mismatched_sizes=True,
                **_FORM,
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(_cannot_load(name, is_folder, error)) from error
    return _finished(net, shape, lora, alpha, targets, train)


def hf_config(module: nn.Module) -> dict[str, Any] | None:
    """The configuration of a Hugging Face model as plain data; None for other models."""
    if not isinstance(module, HuggingFace):
        return None
    found: dict[str, Any] = json.loads(module.net.config.to_json_string(use_diff=False))
    return found


def hf_from_config(shape: Shape, config: dict[str, Any], **options: Any) -> nn.Module:
    """The model of a configuration, with arbitrary weights: without its folder or the Hub."""
    transformers = _library()
    auto = _auto_class(transformers, shape)
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with _quiet(transformers):
            own = transformers.AutoConfig.for_model(config["model_type"], **values)
            net = auto.from_config(own, trust_remote_code=False, **_FORM)
    except (KeyError, OSError, ValueError, RuntimeError, ImportError, TypeError) as error:
        raise ModelError(f"the Hugging Face model cannot be built again: {error}") from error
    return _finished(net, shape, **options)


def _auto_class(transformers: Any, shape: Shape) -> Any:
    if len(shape) == 1:
        return transformers.AutoModelForSequenceClassification
    if len(shape) == 3:
        return transformers.AutoModelForImageClassification
    raise ModelError(
        f"hf: models take token ids (length,) or images (channels, height, width), not inputs "
        f"of shape {tuple(shape)}"
    )


def _finished(
    net: Any,
    shape: Shape,
    lora: int = 0,
    alpha: float = 16.0,
    targets: tuple[str, ...] | str = (),
    train: str = "all",
) -> nn.Module:
    """The model with its low-rank updates, its frozen weights and its mask."""
    base = net.base_model
    if lora:
        add_lora(base, lora, alpha, (targets,) if isinstance(targets, str) else targets)
    elif train == "head":
        base.requires_grad_(False)
    module = HuggingFace(net)
    module.try_wide_mask(shape[0])
    return module


def _library() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ModelError(
            "models hf:NAME need the library transformers; install it with: pip install 'kedge[hf]'"
        ) from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and the notice that the classifier is new."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _cannot_load(name: str, is_folder: bool, error: Exception) -> str:
    text = str(error)
    line = (text.strip().splitlines() or [type(error).__name__])[0]
    if is_folder:
        return f"the folder {name} holds no model for classification: {line}"
    words = ("connect", "offline", "internet", "timed out", "resolve")
    if any(word in text.lower() for word in words):
        return (
            f"the model {name!r} is not on this machine, and Hugging Face cannot be reached; "
            "download it first, and give its folder: hf:FOLDER"
        )
    return f"the model {name!r} cannot be loaded from Hugging Face: {line}"
