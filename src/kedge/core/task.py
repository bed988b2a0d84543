"""Tasks: what is minimised, what is reported, and how two models' outputs are compared.

A task works on logits and a :class:`Batch`, sample by sample, so that parts can weigh, mask and mix
samples. Metrics are formed from sums, so that they can be gathered over batches and clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.eager import is_eager
from kedge.errors import FieldError


class Batch(NamedTuple):
    """B samples. ``y`` stays as it is in the data; ``target`` may be added by a part."""

    x: Tensor
    y: Tensor
    target: Tensor | None = None  # [B, C] soft labels in place of y


class Task(Protocol):
    """What a task offers; ``outputs`` is the width of the model's last layer."""

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    has_classes: ClassVar[bool]

    @property
    def outputs(self) -> int: ...

    def loss(self, logits: Tensor, batch: Batch) -> Tensor: ...  # [B]

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor: ...  # [B, outputs]

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor: ...  # [B, outputs]

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor: ...  # [B]

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> dict[str, Tensor]: ...

    def report(self, sums: dict[str, Tensor]) -> dict[str, float]: ...

    def per_class(self, sums: dict[str, Tensor]) -> list[float | None]: ...


@dataclass(frozen=True)
class Classification:
    """One of C classes: cross-entropy, accuracy in percent."""

    outputs: int

    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    has_classes: ClassVar[bool] = True

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.target is not None:
            return -(batch.target * F.log_softmax(logits, -1)).sum(-1)
        if not is_eager(logits):  # the same numbers; under vmap torch's own goes through Python
            return -F.log_softmax(logits, -1).gather(-1, batch.y[:, None]).squeeze(-1)
        return F.cross_entropy(logits, batch.y, reduction="none")

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        # not F.one_hot, which looks at the values and so fails where a gradient is being mapped
        return (y[:, None] == torch.arange(self.outputs, device=y.device)).to(dtype)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return F.softmax(logits / temperature, -1)

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """KL(softmax(p/T) || softmax(q/T)) of two batches of logits, sample by sample."""
        log_p, log_q = F.log_softmax(p / temperature, -1), F.log_softmax(q / temperature, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        own = self.soft(batch.y, logits.dtype) * mask[:, None]  # [B, C]
        right = (logits.argmax(-1) == batch.y).to(logits.dtype)
        return {
            "loss": (self.loss(logits, batch) * mask).sum(),
            "count": own.sum(0),  # [C]
            "right": (own * right[:, None]).sum(0),  # [C]
        }

    def report(self, sums: dict[str, Tensor]) -> dict[str, float]:
        n = max(1.0, float(sums["count"].sum()))
        return {"accuracy": 100.0 * float(sums["right"].sum()) / n, "loss": float(sums["loss"]) / n}

    def per_class(self, sums: dict[str, Tensor]) -> list[float | None]:
        pairs = zip(sums["right"].tolist(), sums["count"].tolist(), strict=True)
        return [100.0 * right / count if count else None for right, count in pairs]


@dataclass(frozen=True)
class MultiLabel:
    """Any subset of L labels: binary cross-entropy (mean over labels), F1 over all decisions."""

    outputs: int

    name: ClassVar[str] = "multilabel"
    metric: ClassVar[str] = "f1"
    higher_is_better: ClassVar[bool] = True
    has_classes: ClassVar[bool] = True

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        target = batch.y.to(logits.dtype) if batch.target is None else batch.target
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y.to(dtype)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.sigmoid(logits / temperature)

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """Sum over labels of the Bernoulli divergence KL(sigmoid(p/T) || sigmoid(q/T))."""
        p, q = p / temperature, q / temperature
        on = torch.sigmoid(p) * (F.logsigmoid(p) - F.logsigmoid(q))
        off = torch.sigmoid(-p) * (F.logsigmoid(-p) - F.logsigmoid(-q))
        return (on + off).sum(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        said, true = (logits > 0).to(logits.dtype), batch.y.to(logits.dtype)
        said, true = said * mask[:, None], true * mask[:, None]
        return {
            "loss": (self.loss(logits, batch) * mask).sum(),
            "samples": mask.sum(),
            "hits": (said * true).sum(0),  # [L]
            "said": said.sum(0),
            "count": true.sum(0),
        }

    def report(self, sums: dict[str, Tensor]) -> dict[str, float]:
        hits, said, count = sums["hits"], sums["said"], sums["count"]
        micro = 2 * hits.sum() / (said.sum() + count.sum()).clamp_min(1)
        macro = (2 * hits / (said + count).clamp_min(1)).mean()
        loss = float(sums["loss"] / sums["samples"])
        return {"f1": 100.0 * float(micro), "f1_macro": 100.0 * float(macro), "loss": loss}

    def per_class(self, sums: dict[str, Tensor]) -> list[float | None]:
        rows = zip(*(sums[k].tolist() for k in ("hits", "said", "count")), strict=True)
        return [200.0 * hits / (said + n) if said + n else None for hits, said, n in rows]


@dataclass(frozen=True)
class Regression:
    """Real targets: squared error (mean over outputs), root mean squared error reported."""

    outputs: int = 1

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "rmse"
    higher_is_better: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        target = batch.y if batch.target is None else batch.target
        said, true = (t.reshape(len(batch.y), -1) for t in (logits, target.to(logits.dtype)))
        return ((said - true) ** 2).mean(-1)

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y.to(dtype).reshape(len(y), self.outputs)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return logits / temperature

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """Half the squared distance: KL of two normals of unit variance."""
        return 0.5 * (((p - q) / temperature) ** 2).sum(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.loss(logits, batch) * mask).sum(), "samples": mask.sum()}

    def report(self, sums: dict[str, Tensor]) -> dict[str, float]:
        mse = float(sums["loss"] / sums["samples"])
        return {"rmse": mse**0.5, "loss": mse}

    def per_class(self, sums: dict[str, Tensor]) -> list[float | None]:
        return []


TASKS = {t.name: t for t in (Classification, MultiLabel, Regression)}


def make_task(name: str, outputs: int) -> Task:
    if name not in TASKS:
        raise FieldError(f"task = {name!r} is not one of: {', '.join(TASKS)}")
    return TASKS[name](outputs)
