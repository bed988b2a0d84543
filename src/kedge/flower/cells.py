"""What leaves of a test under a policy: numbers of samples, none of which tells of a single one.

A server chooses the weights that it broadcasts, and so what a test counts: the samples above a
threshold, for instance. If sums left as they are, two tests whose counts differ by one would give
the value of one patient, and one sum of losses would, if the weights are such that only one
patient has a loss. So

- classes with fewer than ``min_test_cell`` samples are counted with others, as one class;
- of each class the samples that are right, and those that are wrongly said to be of it, are rounded
  to a multiple of ``min_test_cell``, up or down at random, so that the mean is right. No number
  that follows from them, such as that of wrong samples, is between 0 and ``min_test_cell``;
- the same test is rounded in the same way, so the rounding cannot be averaged away;
- all other sums (losses, residuals, histograms, those of a task of one's own) leave only if the
  policy names them, as ``test:NAME``. A histogram has at most a bin for ten samples, and is rounded
  like other counts; what else is named leaves as it is, and *does* tell single samples to a server
  that lies about its weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from kedge.core.task_base import Sums

Draw = np.random.Generator
#: Sums that count samples of each class or label: all, those that are right, those that are said to
#: be of it.
COUNTED = (("count", "right", "predicted"), ("count", "hits", "said"))
HISTOGRAM, SAMPLES = "histogram", "samples"
SAMPLES_PER_BIN = 10


def counts_of(names: Collection[str]) -> set[str]:
    """Of the names of sums those that leave with ``test``."""
    known = next((set(group) for group in COUNTED if set(group) <= set(names)), set[str]())
    return known | ({SAMPLES} & set(names))


def rounded(sums: Sums, samples: int, least: int, key: bytes, own: bytes) -> Sums:
    """Sums of a test without small cells.

    Args:
        sums: what may leave.
        samples: the number of samples of the test.
        least: ``min_test_cell``; of 0 and 1 nothing is rounded.
        key: of the rounding, one for each distinct answer.
        own: a key that all answers share, for what no weights change.
    """
    if least <= 1:
        return sums
    draw, always = _draw(key), _draw(own)
    found = dict(sums)
    for names in COUNTED:
        if set(names) <= sums.keys():
            numbers = [sums[name].double().cpu().numpy() for name in names]
            if SAMPLES in sums:  # labels, of which one sample may have several
                every = np.full(len(numbers[0]), float(samples))
                numbers[0] = _rounded(numbers[0], least, always, every)
            else:
                numbers = _merged(numbers, least)
            count, right, said = numbers
            told = _rounded(np.minimum(right, count), least, draw, count)
            told_said = told + _rounded(np.maximum(said - right, 0), least, draw)
            for name, values in zip(names, (count, told, told_said), strict=True):
                found[name] = torch.from_numpy(values).to(sums[name])
    if HISTOGRAM in sums:
        found[HISTOGRAM] = _coarse(sums[HISTOGRAM], samples, least, draw)
    return found


def _draw(key: bytes) -> Draw:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


def _merged(numbers: list[np.ndarray], least: int) -> list[np.ndarray]:
    """Classes with few samples in one with others: all is counted at the largest of them."""
    count = numbers[0]
    order = [c for c in np.argsort(count, kind="stable") if count[c]]
    small = [c for c in order if count[c] < least]
    for other in order[len(small) :]:
        if not small or count[small].sum() >= least:
            break
        small.append(other)
    if small:
        for values in numbers:
            values[small], values[small[-1]] = 0.0, values[small].sum()
    return numbers


def _rounded(
    values: np.ndarray, least: int, draw: Draw, whole: np.ndarray | None = None
) -> np.ndarray:
    """Multiples of ``least`` at random, with the values as their means; or the whole, from which
    others are at least ``least`` away."""
    steps = np.floor(values / least)
    low, high = steps * least, (steps + 1) * least
    if whole is not None:
        last = np.maximum(np.floor(whole / least) - 1, 0) * least  # the last step is longer
        low, high = np.minimum(low, last), np.where(low < last, high, whole)
    share = (values - low) / np.maximum(high - low, 1)
    return np.where(draw.random(values.shape) < share, high, low)


def _coarse(histogram: Tensor, samples: int, least: int, draw: Draw) -> Tensor:
    """A histogram ``[C, 2, bins]`` with a bin for ten samples, each at the middle of its range."""
    bins = histogram.shape[-1]
    width = math.ceil(bins / max(1, samples // SAMPLES_PER_BIN))
    starts = np.arange(0, bins, width)
    wide = np.add.reduceat(histogram.double().cpu().numpy(), starts, axis=-1)
    found = np.zeros(histogram.shape)
    found[..., np.minimum(starts + width // 2, bins - 1)] = _rounded(wide, least, draw)
    return torch.from_numpy(found).to(histogram)
