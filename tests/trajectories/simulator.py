"""Federated learning in plain numpy: a small network with gradients by hand, and FedAvg.

All weights are one vector, so that a method reads like the algorithm box of its paper. A method is
a subclass of :class:`FedAvg` that overrides the pieces its paper changes. Nothing here knows kedge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Stats = tuple[Vector, Vector] | None  # running mean and variance; None: those of the batch


class Net:
    """x -> h = tanh(A x + a), the features -> B h + b, the logits; weights are one vector.

    With ``norm`` there is BatchNorm before the tanh. It normalises by the batch, or by ``stats``,
    a mean and a variance, where these are given: that is evaluation mode. ``extra`` are leaves that
    a part adds, by name and shape; they follow the network's own.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        norm: bool = False,
        extra: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.inputs, self.width, self.outputs, self.norm = inputs, width, outputs, norm
        self.shapes: dict[str, tuple[int, ...]] = {
            "body.weight": (width, inputs),
            "body.bias": (width,),
            **({"norm.weight": (width,), "norm.bias": (width,)} if norm else {}),
            "head.weight": (outputs, width),
            "head.bias": (outputs,),
        } | (extra or {})

    def split(self, w: Vector) -> dict[str, Vector]:
        """The leaves of a vector, by name; views, not copies."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        pieces = np.split(w, ends[:-1])
        return {n: p.reshape(s) for p, (n, s) in zip(pieces, self.shapes.items(), strict=True)}

    def join(self, leaves: dict[str, Any]) -> Vector:
        """The vector of some leaves, 0 where a leaf is not given."""
        zeros = {name: np.zeros(shape) for name, shape in self.shapes.items()}
        return np.concatenate([np.ravel(v) for v in (zeros | leaves).values()])

    def with_leaves(self, w: Vector, leaves: dict[str, Any]) -> Vector:
        """The vector with some leaves replaced."""
        return self.join(self.split(w) | leaves)

    def mask(self, *prefixes: str) -> Vector:
        """1 on the leaves whose names begin with one of the prefixes, 0 elsewhere."""
        ones = {n: np.ones(s) for n, s in self.shapes.items() if n.startswith(prefixes)}
        return self.join(ones)

    # -- forward --------------------------------------------------------------------------------

    def linear(self, w: Vector, x: Vector) -> Vector:
        """What BatchNorm sees, [B, H]."""
        leaf = self.split(w)
        return x.reshape(len(x), -1) @ leaf["body.weight"].T + leaf["body.bias"]

    def features(self, w: Vector, x: Vector, stats: Stats = None) -> Vector:
        """Features [B, H] of inputs [B, ...]."""
        z = self.linear(w, x)
        if self.norm:
            leaf, (z, _) = self.split(w), normalised(z, stats)
            z = leaf["norm.weight"] * z + leaf["norm.bias"]
        return np.tanh(z)

    def head(self, w: Vector, features: Vector) -> Vector:
        """Logits [B, C] of features [B, H]."""
        leaf = self.split(w)
        return features @ leaf["head.weight"].T + leaf["head.bias"]

    def logits(self, w: Vector, x: Vector, stats: Stats = None) -> Vector:
        return self.head(w, self.features(w, x, stats))

    # -- backward -------------------------------------------------------------------------------

    def backward(
        self,
        w: Vector,
        x: Vector,
        d_logits: Vector | float,
        d_features: Vector | float = 0.0,
        stats: Stats = None,
    ) -> Vector:
        """Gradient of a loss whose derivatives are ``d_logits`` [B, C] and ``d_features`` [B, H].

        ``d_features`` is what reaches the features besides the head; 0 stands for no such loss.
        """
        d_logits = np.broadcast_to(d_logits, (len(x), self.outputs))
        d, of_norm = self._to_linear(w, x, d_logits, d_features, stats)
        return self.join(
            {
                "body.weight": d.T @ x.reshape(len(x), -1),
                "body.bias": d.sum(0),
                "head.weight": d_logits.T @ self.features(w, x, stats),
                "head.bias": d_logits.sum(0),
            }
            | of_norm
        )

    def backward_to_input(
        self,
        w: Vector,
        x: Vector,
        d_logits: Vector | float,
        d_features: Vector | float = 0.0,
        stats: Stats = None,
    ) -> Vector:
        """The derivative by the inputs, in their shape."""
        d, _ = self._to_linear(w, x, d_logits, d_features, stats)
        return (d @ self.split(w)["body.weight"]).reshape(x.shape)

    def _to_linear(
        self,
        w: Vector,
        x: Vector,
        d_logits: Vector | float,
        d_features: Vector | float,
        stats: Stats,
    ) -> tuple[Vector, dict[str, Vector]]:
        """The derivative by :meth:`linear`, [B, H], and those by the leaves of BatchNorm."""
        h, leaf = self.features(w, x, stats), self.split(w)
        d_logits = np.broadcast_to(d_logits, (len(x), self.outputs))
        d = (d_logits @ leaf["head.weight"] + d_features) * (1 - h * h)
        if not self.norm:
            return d, {}
        z, deviation = normalised(self.linear(w, x), stats)
        of_norm = {"norm.weight": (d * z).sum(0), "norm.bias": d.sum(0)}
        d = d * leaf["norm.weight"]
        if stats is None:  # mean and variance depend on the batch, too
            d = d - d.mean(0) - z * (d * z).mean(0)
        return d / deviation, of_norm


def normalised(z: Vector, stats: Stats) -> tuple[Vector, Vector]:
    """Rows with mean 0 and variance 1, and the standard deviation."""
    mean, variance = (z.mean(0), z.var(0)) if stats is None else stats
    deviation = np.sqrt(variance + 1e-5)
    return (z - mean) / deviation, deviation


def softmax(z: Vector) -> Vector:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy(logits: Vector, target: Vector) -> Vector:
    """Loss of each row [B] for targets [B, C] that sum to 1."""
    return -(target * np.log(softmax(logits))).sum(-1)


@dataclass
class Client:
    """One client in one round. A method may hang what the client uploads on it."""

    k: int
    n: int  # samples
    lr: float
    weight: float  # n, or 1 if client weights are uniform
    p: float  # weight in the cohort's mean; they sum to 1
    share: float  # weight among all N clients; they sum to N
    batches: list[NDArray[np.int64]]  # rows of each local step
    a: float  # effective steps: sum of the coefficients of the gradients in the update
    key: Callable[..., Any]  # (part, hook, step): where a part's random numbers come from
    t: int = 0  # present local step
    loss: float = 0.0  # mean of the task's loss over the steps
    anchor: Vector = field(default_factory=lambda: np.zeros(0))  # where local training starts
    w: Vector = field(default_factory=lambda: np.zeros(0))  # trained model, after the last step
    delta: Vector = field(default_factory=lambda: np.zeros(0))  # w - anchor, 0 on private leaves
    stats: Stats = None  # BatchNorm's running statistics at the present step

    @property
    def steps(self) -> int:
        return len(self.batches)


@dataclass
class World:
    """What is given: data, network, first weights, optimiser."""

    net: Net
    x: Vector  # [n, ...]
    y: NDArray[np.int64]  # [n]
    rows: list[NDArray[np.int64]]  # of each client
    w0: Vector
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0
    init_key: Any = None  # (part): key of what a part draws before the first round
    server_key: Any = None  # (round, part): key of what a part draws on the server

    @property
    def num_clients(self) -> int:
        return len(self.rows)

    def one_hot(self, y: NDArray[np.int64]) -> Vector:
        return np.eye(self.net.outputs)[y]

    def label_counts(self, k: int) -> Vector:
        return np.bincount(self.y[self.rows[k]], minlength=self.net.outputs).astype(float)


class FedAvg:
    """Federated averaging with SGD. Fields of a method are attributes of the same name.

    Leaves whose names begin with ``private`` stay on the clients: they are not averaged, and a
    method that moves ``self.public`` leaves only does not touch them. With ``private_stats`` so do
    BatchNorm's running statistics.
    """

    private_stats = False

    def __init__(self, world: World, private: str = "none", **fields: Any) -> None:
        self.world, self.net, self.w = world, world.net, world.w0
        self.N = world.num_clients
        self.zero, self.round_number = np.zeros_like(self.w), 0
        self.public = 1 - self.net.mask(private)
        self.own = [self.w] * self.N  # private leaves of each client
        self.stats: Stats = None  # BatchNorm's running statistics
        self.seen = 0  # batches that they have seen
        if self.net.norm:
            self.stats = np.zeros(self.net.width), np.ones(self.net.width)
        self.own_stats = [self.stats] * self.N  # private statistics of each client
        self.own_seen = [0] * self.N
        for name, value in fields.items():
            assert not callable(getattr(self, name, None)), f"{name} is a function of the loop"
            setattr(self, name, value)
        self.setup()

    # -- what a method overrides ----------------------------------------------------------------

    def setup(self) -> None:
        """First state of the server and of all clients."""

    def survey(self, cohort: list[Client]) -> None:
        """Before the round's training, at the global model ``self.w``."""

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        """The batch that is trained on."""
        return x, target

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        """Gradient of the client's objective, with everything that is added to it."""
        z = self.net.logits(w, x)
        return self.net.backward(w, x, (softmax(z) - target) / len(x))

    def trainable(self, c: Client) -> Vector:
        """1 where this step may change a weight, 0 where it is frozen."""
        return np.ones_like(self.w)

    def after_step(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        """The weights after the optimiser's step."""
        return w

    def reply(self, c: Client) -> None:
        """The client's next state; ``c.w`` and ``c.delta`` are the result of its steps."""

    def mean(self, cohort: list[Client], values: list[Any]) -> Any:
        """How the cohort's values become one."""
        return sum(c.p * value for c, value in zip(cohort, values, strict=True))

    def server(self, cohort: list[Client]) -> Vector:
        """The next global model."""
        return self.w + self.mean(cohort, [c.delta for c in cohort])

    def output(self) -> Vector:
        """The weights to evaluate; the next round starts from ``self.w``."""
        return self.w

    def server_state(self) -> dict[str, Any]:
        """The server's state of each part: a vector, or a dict of vectors and arrays."""
        return {}

    def client_state(self, k: int) -> dict[str, Any]:
        """The state of client k, of each part."""
        return {}

    def personal(self, k: int) -> Vector | None:
        """The personal weights of client k; None for a method without."""
        return None

    def personal_stats(self, k: int) -> Stats:
        """BatchNorm's running statistics of client k's personal model."""
        return self.own_stats[k] if self.private_stats else self.stats

    def personal_seen(self, k: int) -> int:
        """Batches that these statistics have seen."""
        return self.own_seen[k] if self.private_stats else self.seen

    def finish(self) -> None:
        """After the last round."""

    # -- what all of them share -----------------------------------------------------------------

    def round(self, cohort: list[Client]) -> None:
        self.survey(cohort)
        for c in cohort:
            c.anchor = np.where(self.public, self.w, self.own[c.k])
            c.stats = self.own_stats[c.k] if self.private_stats else self.stats
            c.w = self.own[c.k] = self.local(c)
            c.delta = self.public * (c.w - c.anchor)
            self.reply(c)
            self.own_stats[c.k] = c.stats
            self.own_seen[c.k] += c.steps
        self.w = self.server(cohort)
        if self.net.norm and not self.private_stats:
            mean, variance = (self.mean(cohort, [c.stats[i] for c in cohort]) for i in (0, 1))
            self.stats = mean, variance
            self.seen = round(self.seen + self.mean(cohort, [c.steps for c in cohort]))
        self.round_number += 1

    def local(self, c: Client) -> Vector:
        w, u, opt = c.anchor, self.zero, self.world
        for t, rows in enumerate(c.batches):
            c.t = t
            x, target = self.batch(c, opt.x[rows], opt.one_hot(opt.y[rows]))
            c.loss += cross_entropy(self.net.logits(w, x), target).mean() / c.steps
            free = self.trainable(c)
            g = free * self.gradient(c, w, x, target)
            if opt.clip:
                g = g * min(1.0, opt.clip / (np.linalg.norm(g) + 1e-6))
            g = g + opt.weight_decay * w
            u = np.where(free, opt.momentum * u + g, u)
            step = g + opt.momentum * u if opt.nesterov else u
            if self.net.norm:
                c.stats = self.moved(c.stats, self.net.linear(w, x))
            w = self.after_step(c, np.where(free, w - c.lr * step, w), x, target)
        return w

    def moved(self, stats: Stats, z: Vector) -> Stats:
        """Running statistics after a batch, with momentum 0.1 and the unbiased variance."""
        return 0.9 * stats[0] + 0.1 * z.mean(0), 0.9 * stats[1] + 0.1 * z.var(0, ddof=1)
