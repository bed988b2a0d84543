"""The numbers that measures of one probe give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kedge.diagnostics.training.divergence_by_layer import Layer
from kedge.diagnostics.training.gradients import Variance


class Scores(NamedTuple):
    """A metric of the model before the round, of local models, and of the aggregate.

    With private leaves, each client has a model of its own before and after the round.
    """

    metric: str
    unit: str
    higher_is_better: bool
    before: list[float]  # one per client, also of one model for all
    local: list[float]
    afters: list[float]

    @property
    def mean_before(self) -> float:
        return sum(self.before) / len(self.before)

    @property
    def after(self) -> float:
        return sum(self.afters) / len(self.afters)

    @property
    def mean_local(self) -> float:
        return sum(self.local) / len(self.local)


class Classes(NamedTuple):
    """Confusion matrices on the common test data, one per client, and its training samples."""

    names: list[str]
    counts: Tensor  # [K, C]
    before: list[Tensor]  # [C, C]
    local: list[Tensor]
    after: list[Tensor]


class Features(NamedTuple):
    """Similarity of features before and after local training."""

    cka: list[tuple[str, list[float]]]  # by layer: local against global, one value per client
    across_before: float  # mean cosine of samples of different classes; NaN without classes
    across_local: list[float]
    lacking_before: list[float]  # own against lacking classes, of clients that lack some
    lacking_local: list[float]


class Margins(NamedTuple):
    """Worst-case margins on the data of the other clients (FedImpro, eq. 2)."""

    clients: list[int]  # positions among the kept clients
    before: list[float]
    local: list[float]


class Map(NamedTuple):
    """Features of one client's model and of the global one, for t-SNE."""

    client: str
    features: Tensor  # [2n, F]: the global model's, then the local one's
    labels: list[str]  # [n]
    lacking: list[bool]  # [n] whether the client lacks the sample's class


@dataclass(frozen=True)
class Measures:
    """What was measured after a number of rounds."""

    method: str
    round: int
    names: list[str]  # of the measured clients
    cohort: int
    lr: float
    layers: list[Layer]
    divergence: float
    update: float  # mean norm of the clients' updates
    cancelled: float
    cosines: Tensor  # [K, K]
    variance: Variance
    high: str  # where the high part of the variance is
    general: Scores
    personal: Scores | None
    personal_on: str
    classes: Classes | None = None
    features: Features | None = None
    margins: Margins | None = None
    map: Map | None = field(default=None, repr=False)
    left_out: list[str] = field(default_factory=list)
    tested_on: str = ""
    probe_seconds: float = 0.0
    seconds: float = 0.0
