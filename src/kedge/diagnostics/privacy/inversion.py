"""Model inversion: reconstruct inputs from features, or from means of features, and compare the
errors with those of plain guesses.

The attacker knows the network. It looks for inputs whose features match the ones it was given
(Mahendran and Vedaldi, Understanding Deep Image Representations by Inverting Them, CVPR 2015,
arXiv:1412.0035), smooth ones if it knows nothing else. An attacker that has other samples of the
same kind first fits a linear decoder from features to inputs on them and starts from its answer
(after Dosovitskiy and Brox, Inverting Visual Representations with Convolutional Networks, CVPR
2016, arXiv:1506.02753, with a linear map in place of their network).

FedImpro's appendix F.7 inverts the features of single images and the mean of the features of many
images and shows the pictures. Here the errors are measured, for means over 1, 2, 4, ... samples of
one class and for what a client really uploads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.optim import Adam
from kedge.data.federation import Federation
from kedge.diagnostics.privacy.pictures import Features, Pixels
from kedge.diagnostics.privacy.uploads import Statistics

RIDGE = 1e-2  # of the decoder, in mean squares of a feature
SMOOTH = 0.1  # weight of the total variation, without a decoder
STAY = 0.1  # weight of the squared distance from the decoder's answer
RATE, RATE_NEAR = 0.1, 0.02  # first learning rates, from noise and from a decoder's answer
NOISE = 0.02  # standard deviation of the noise in the start
SIZES = (1, 2, 4, 8, 16)  # samples in a mean
Shape = tuple[int, ...]
OWN_SAMPLES = 1000  # test samples that some attackers have
PLAIN, DECODER, INFORMED = "without other samples", "linear decoder", "decoder, then matching"
GUESSED = 512  # samples of each class in a guess at most
ROWS = 256  # per forward pass without gradients


@dataclass(frozen=True)
class Decoder:
    """A linear map from features to inputs, fitted to the attacker's own samples."""

    feature_mean: Tensor  # [D]
    input_mean: Tensor  # [X]
    dual: Tensor  # [n, X]
    centred: Tensor  # [n, D]
    shape: Shape

    def __call__(self, features: Tensor) -> Tensor:
        """Inputs ``[B, ...]`` from 0 to 1 for features ``[B, D]``."""
        flat = (features - self.feature_mean) @ self.centred.T @ self.dual + self.input_mean
        return flat.clamp(0, 1).reshape(-1, *self.shape)


def fit_decoder(features: Tensor, inputs: Tensor, ridge: float = RIDGE) -> Decoder:
    """Ridge regression of inputs ``[n, ...]`` on features ``[n, D]``.

    It is solved in its dual form, since features are often more than samples.
    """
    h, x = features.double(), inputs.flatten(1).double()
    feature_mean, input_mean = h.mean(0), x.mean(0)
    h = h - feature_mean
    gram = h @ h.T
    shift = ridge * gram.diagonal().sum() / h.shape[1] + torch.finfo(gram.dtype).tiny
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    dual = torch.linalg.solve(gram + shift * eye, x - input_mean)
    to = features.dtype
    tensors = (feature_mean.to(to), input_mean.to(to), dual.to(to), h.to(to))
    return Decoder(*tensors, tuple(inputs.shape[1:]))


class Inversion(NamedTuple):
    """Reconstructed inputs ``[B, ...]`` from 0 to 1, and the relative error of their features."""

    inputs: Tensor
    mismatch: Tensor  # ||h(x) - h||^2 / ||h||^2, [B]


def invert(
    features: Features,
    targets: Tensor,
    shape: Shape,
    *,
    decoder: Decoder | None = None,
    start: Tensor | float = 0.5,
    steps: int = 200,
    key: Tensor | None = None,
) -> Inversion:
    """Look for inputs whose features equal the targets.

    Every target is attacked by itself: neither the loss nor Adam mixes rows, so the answer does not
    depend on the other targets.

    Args:
        features: the lower layers, from inputs between 0 and 1 to features; in evaluation mode.
        targets: features ``[B, D]``.
        shape: shape of one input.
        decoder: the answer to start from and to stay near; None: prefer smooth inputs.
        start: the input to start from, with some noise, without a decoder.
        steps: steps of Adam; the learning rate falls to 0 by a cosine.
        key: randomness of the start, without a decoder.
    """
    lr = RATE if decoder is None else RATE_NEAR
    if decoder is None:
        key = rng.key(0, targets.device) if key is None else key
        noise = rng.normal(key, shape, targets.dtype)  # the same for all targets
        first = (start + NOISE * noise).clamp(0, 1).expand(len(targets), *shape)
    else:
        first = decoder(targets)
    scale = targets.square().sum(1).clamp_min(torch.finfo(targets.dtype).tiny)  # [B]

    def mismatch(u: Tensor) -> Tensor:
        return (features(u) - targets).square().sum(1) / scale

    def loss(u: Tensor) -> Tensor:
        if decoder is None:
            return (mismatch(u) + SMOOTH * total_variation(u)).sum()
        return (mismatch(u) + STAY * (u - first).square().flatten(1).mean(1)).sum()

    adam, point = Adam(), {"u": first.detach().clone()}
    state = adam.init(point)
    for step in range(steps):
        u = point["u"].requires_grad_()
        [grad] = torch.autograd.grad(loss(u), [u])
        rate = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.no_grad():
            point, state = adam.update(point, {"u": grad}, state, torch.as_tensor(rate).to(grad))
            point = {"u": point["u"].clamp(0, 1)}
    with torch.no_grad():
        return Inversion(point["u"].detach(), mismatch(point["u"]))


def total_variation(u: Tensor) -> Tensor:
    """Mean squared difference of neighbours along the axes of space, ``[B]``; 0 for tables.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).tolist()
    [1.0]
    """
    total = u.new_zeros(len(u))
    for axis in range(2, u.ndim):
        if u.shape[axis] > 1:
            total = total + u.diff(dim=axis).square().flatten(1).mean(1)
    return total


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference of samples, ``[...]`` for ``[..., C, H, W]`` flattened to rows."""
    return (a.flatten(1) - b.flatten(1)).square().mean(1)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of values between 0 and 1.

    >>> psnr(0.01)
    20.0
    """
    return math.inf if mse <= 0 else -10 * math.log10(mse)


# -- attacks, and guesses beside them ------------------------------------------------------------


class Level(NamedTuple):
    """The attack on means over some number of samples; errors are means over all targets."""

    attacker: str
    size: int  # samples in a mean; 0: all of the client's samples of the class
    mse: float  # to a sample behind the mean
    closest: float  # to the closest of the samples behind the mean
    mismatch: float  # relative squared error of the features
    inputs: Tensor  # [T, ...], from 0 to 1


class Study(NamedTuple):
    """Attacks on means over more and more samples of one class, and the guesses beside them."""

    targets: Tensor  # [T, ...], from 0 to 1
    labels: list[int]
    levels: list[Level]
    class_mean: float  # error of the mean of other clients' samples of the class
    random: float  # error of a random one of these

    def level(self, size: int, attacker: str | None = None) -> Level:
        """The best attack on means over ``size`` samples, or that of one attacker."""
        found = [x for x in self.levels if x.size == size and attacker in (None, x.attacker)]
        return min(found, key=lambda x: x.mse)


class ClassAttack(NamedTuple):
    """The attack on the uploaded mean of one class."""

    attacker: str
    label: int
    samples: int
    effective: float
    mse: float  # weighted as the samples are in the mean
    closest: float
    guess: float  # the error of the mean of other clients' samples of the class, likewise
    guess_closest: float
    input: Tensor
    nearest: Tensor  # the sample behind the mean that is closest to it


class Attacker(NamedTuple):
    """What an attacker starts from, and how many steps it takes from there."""

    decoder: Decoder | None
    steps: int
    start: Tensor | float = 0.5

    def __call__(self, features: Features, targets: Tensor, shape: Shape, key: Tensor) -> Inversion:
        """Inputs of a shape whose features match the targets ``[B, D]``."""
        decoder, start, steps = self.decoder, self.start, self.steps
        return invert(features, targets, shape, decoder=decoder, start=start, steps=steps, key=key)


def attackers(
    federation: Federation, pixels: Pixels, features: Features, steps: int, key: Tensor
) -> dict[str, Attacker]:
    """The attacker that knows only the network, and two that also have some test samples.

    The first starts from the mean of the inputs, which their standardisation tells: from a brighter
    start, many rectified features of the networks here are 0 and have no gradient.
    """
    mean = torch.zeros(
        (1, *federation.input_shape), dtype=federation.dtype, device=federation.device
    )
    found = {PLAIN: Attacker(None, steps, pixels.to_unit(mean)[0])}
    if not federation.has_test:
        return found
    own = torch.cat([pixels.to_unit(batch.x) for batch in federation.test_batches()])
    own = own[rng.permutation(key, len(own))[:OWN_SAMPLES].to(own.device)]
    decoder = fit_decoder(evaluate(features, own), own)
    return found | {DECODER: Attacker(decoder, 0), INFORMED: Attacker(decoder, steps)}


def evaluate(features: Features, u: Tensor) -> Tensor:
    """Features of inputs ``[n, ...]`` without gradients, some rows at a time."""
    with torch.no_grad():
        return torch.cat([features(piece) for piece in torch.split(u, ROWS)])


class Guesses(NamedTuple):
    """What one may guess of a sample without any upload, by class, from 0 to 1."""

    mean: dict[int, Tensor]  # the mean of samples that other clients have
    samples: dict[int, Tensor]  # these samples, [m, ...]


def guesses(federation: Federation, pixels: Pixels, rows: Tensor, key: Tensor) -> Guesses:
    """Guesses from the training samples that are not among ``rows``, at most some of each class.

    A class that only these rows have is guessed from the test samples; one that nobody else has,
    from all other training samples.
    """
    others = federation.rows[~torch.isin(federation.rows, rows)]
    others = others if len(others) else rows
    others = others[rng.permutation(key, len(others))]
    y, found = classes_of(federation, others), {}
    for c in classes_of(federation, rows).unique().tolist():
        same = others[y == c][:GUESSED]
        tested = [] if len(same) else _tested(federation, c)
        x = tested or [federation.clean(same if len(same) else others[:GUESSED]).x]
        found[c] = pixels.to_unit(torch.cat(x)[:GUESSED])
    return Guesses({c: x.mean(0) for c, x in found.items()}, found)


def _tested(federation: Federation, c: int) -> list[Tensor]:
    """The test samples of a class, in pieces."""
    if not federation.has_test:
        return []
    batches = list(federation.test_batches())
    if batches[0].y.ndim != 1 or batches[0].y.is_floating_point():
        return []
    return [b.x[b.y == c] for b in batches if bool((b.y == c).any())]


def study(
    samples: Tensor,
    labels: Tensor,
    guessed: Guesses,
    features: Features,
    known: dict[str, Attacker],
    *,
    targets: int = 16,
    key: Tensor,
) -> Study:
    """Invert means of features over groups of a client's samples of one class.

    Args:
        samples: the client's samples from 0 to 1, ``[n, ...]``.
        labels: their classes ``[n]``.
        guessed: what one may guess of each class.
        features: the lower layers.
        known: the attackers, see :func:`attackers`.
        targets: samples to reconstruct; each is in one group of every size.
        key: randomness of the draw and of the start.
    """
    key_draw, key_start = rng.split(key, 2)
    order = rng.permutation(key_draw, len(samples)).to(samples.device)
    counts = torch.bincount(labels)
    largest = min(SIZES[-1], int(counts.max()))
    sizes = [s for s in SIZES if s <= largest]
    chosen = order[counts[labels[order]] >= sizes[-1]][:targets]  # [T]
    h = evaluate(features, samples)
    groups: list[list[Tensor]] = []  # by size and target: positions, the target first
    for size in (*sizes, 0):
        groups.append([])
        for i in chosen:
            same = order[(labels[order] == labels[i]) & (order != i)]
            same = same[: size - 1] if size else same
            groups[-1].append(torch.cat([i[None], same]))
    means = torch.cat([torch.stack([h[g].mean(0) for g in group]) for group in groups])
    truth = samples[chosen]
    levels = []
    for name, attacker in known.items():
        done = attacker(features, means, tuple(samples.shape[1:]), key_start)
        for j, size in enumerate((*sizes, 0)):
            part = Inversion(*(x[j * len(chosen) : (j + 1) * len(chosen)] for x in done))
            pairs = zip(part.inputs, groups[j], strict=True)
            closest = [float(_errors(u, samples[g]).min()) for u, g in pairs]
            mse = float(squared_error(part.inputs, truth).mean())
            fit = float(part.mismatch.mean())
            levels.append(Level(name, size, mse, sum(closest) / len(closest), fit, part.inputs))
    classes = labels[chosen].tolist()
    means = torch.stack([guessed.mean[c] for c in classes])
    pools = [guessed.samples[c] for c in classes]
    random = torch.stack([pool[i % len(pool)] for i, pool in enumerate(pools)])  # in random order
    return Study(
        truth,
        classes,
        levels,
        class_mean=float(squared_error(means, truth).mean()),
        random=float(squared_error(random, truth).mean()),
    )


def attack_upload(
    stats: Statistics,
    federation: Federation,
    pixels: Pixels,
    guessed: Guesses,
    features: Features,
    known: dict[str, Attacker],
    key: Tensor,
) -> list[ClassAttack]:
    """Invert the class means that a client uploads; classes without samples are left out.

    Args:
        stats: the upload.
        federation: the data.
        pixels: their scale.
        guessed: what one may guess of each class.
        features: the lower layers, of the network that the attacker inverts.
        known: the attackers.
        key: randomness of the start.
    """
    present = [c for c, behind in enumerate(stats.behind) if len(behind.rows)]
    if not present:
        return []
    found = []
    for name, attacker in known.items():
        done = attacker(features, stats.means[present], federation.input_shape, key)
        for u, c in zip(done.inputs, present, strict=True):
            behind = stats.behind[c]
            true = pixels.to_unit(federation.clean(behind.rows).x)
            share = (behind.weights / behind.weights.sum()).to(true.dtype)
            errors, guess = _errors(u, true), _errors(guessed.mean[c], true)
            found.append(
                ClassAttack(
                    name,
                    c,
                    len(behind.rows),
                    behind.effective,
                    mse=float(errors @ share),
                    closest=float(errors.min()),
                    guess=float(guess @ share),
                    guess_closest=float(guess.min()),
                    input=u,
                    nearest=true[int(errors.argmin())],
                )
            )
    return found


def classes_of(federation: Federation, rows: Tensor) -> Tensor:
    """The class of each row; one class for tasks without classes."""
    y = federation.y[rows]
    return (
        y if y.ndim == 1 and not y.is_floating_point() else y.new_zeros(len(y), dtype=torch.int64)
    )


def _errors(one: Tensor, many: Tensor) -> Tensor:
    """Mean squared differences of one sample to many ``[m]``."""
    return squared_error(one.expand(len(many), *one.shape), many)
