"""A member's test of a model: of which weights, how often, and what of it leaves.

``test`` in the uploads of a policy is for numbers of samples (right, of each class, predicted to
be). Other sums leave only by their own names, whatever else is allowed: ``test:histogram``,
``test:loss``, ``test:sum_sq`` and the like, or ``test:*``. Tested are weights that came to train
from, and one model of each run after its last round. ``output`` in the uploads allows others, too:
those of methods that test other weights than they broadcast (``fedexp``), and of rounds in which
the member does not train.

The server chooses what it broadcasts. So what it learns from tests is not bounded by whose weights
they are of, but by ``max_tests``, ``min_test_cell`` and ``min_test_samples``.

Of a test under a policy numbers of samples leave, none of which tells of a single one.

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
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.core.task_base import Sums
from kedge.core.tree import Tree, Weights
from kedge.federation.member.policy import OUTPUT, Policy, PolicyRefusal
from kedge.federation.member.releases import (
    TEST,
    UPDATE,
    Release,
    Releases,
    fingerprint,
    release_of,
)
from kedge.federation.member.run_state import MemberFolder, MemberRun
from kedge.federation.member.silo import checked_weights
from kedge.federation.messages import MemberRequest

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


SUMS, PERSONAL = "sums", "personal"  # of the global model, and of the member's own
NOT_NAMED = f"the policy names no {OUTPUT!r}"


class Tested(NamedTuple):
    """What a reply tells of a test.

    Attributes:
        value: sums of each model.
        notes: the number of samples and, under a policy, the names of the sums that leave.
    """

    value: dict[str, Tree]
    notes: dict[str, str]


NOTHING = Tested({}, {"tested": "0"})


def make_test(
    request: MemberRequest, member_run: MemberRun, policy: Policy, folder: MemberFolder
) -> Tested:
    """Test the global model, and the member's own if asked for, on held-out samples.

    Raises:
        PolicyRefusal: nothing of the test may leave.
    """
    silo = member_run.silo
    samples = len(silo.data.held_out[0]) if silo.data.held_out else 0
    if not samples:
        return NOTHING
    if not policy.allows_test(samples):
        raise PolicyRefusal(f"sums over {samples} held-out samples may not leave")
    given, down = request.value.get("output"), request.value.get("down")
    public = silo.read(down).weights if given is None else checked_weights(silo.bound, given)
    has_more = any(name.startswith(f"{TEST}:") for name in policy.uploads)
    detailed = request.test == "detailed" and has_more
    facts: list[Any] = ["detailed" if detailed else "plain"]
    releases = {SUMS: release_of(TEST, request, facts, public)}
    if request.personal:
        received = silo.read(down)
        facts += [PERSONAL, request.round, request.accepted, request.terms]
        contents = received, silo.state(request.accepted)
        releases[PERSONAL] = release_of(TEST, request, facts, *contents)
    if not policy.names(OUTPUT):
        _check_weights(request, member_run, public, folder.releases, releases.values())
    policy.count(folder.releases, *releases.values())

    value: dict[str, Tree] = {SUMS: silo.evaluate(silo.full(public), detailed)}
    if request.personal:
        own = silo.personal(silo.request(request.round, received), request.accepted)
        value[PERSONAL] = silo.evaluate(own, detailed)
    notes = {"tested": str(samples)}
    if not policy.names(f"{TEST}:*"):
        kept = _kept(value[SUMS], policy)
        notes[SUMS] = ",".join(sorted(kept))
        for model, sums in value.items():
            keys = folder.key_of(releases[model].digest), folder.key_of("counts of classes")
            allowed = {name: item for name, item in sums.items() if name in kept}
            value[model] = rounded(allowed, samples, policy.min_test_cell, *keys)
    return Tested(value, notes)


def _check_weights(
    request: MemberRequest,
    member_run: MemberRun,
    weights: Weights,
    before: Releases,
    releases: Iterable[Release],
) -> None:
    """Raise a PolicyRefusal for weights of the server's choice: others than those to train from,
    and after the last round more than one model."""
    down = request.value.get("down")
    if down and fingerprint(member_run.silo.read(down).weights) != fingerprint(weights):
        raise PolicyRefusal("it is of other weights than the broadcast, and " + NOT_NAMED)
    if request.kind != "evaluate":
        return
    run, last = request.run, member_run.terms.rounds
    if request.round != last or not before.of(UPDATE, run):
        raise PolicyRefusal(
            "it is of weights that this member does not train from, and " + NOT_NAMED
        )
    others = {r.digest for r in before.of(TEST, run) if r.round == last}
    if others - {release.digest for release in releases}:
        raise PolicyRefusal("another model has been tested after the last round, and " + NOT_NAMED)


def _kept(names: Collection[str], policy: Policy) -> set[str]:
    """The names of the sums that may leave; a PolicyRefusal if they tell nothing."""
    counts = counts_of(names)
    kept = counts | {name for name in names if policy.names(f"{TEST}:{name}")}
    if kept <= {SAMPLES}:
        more = ", ".join(f'"{TEST}:{name}"' for name in names if name not in counts)
        raise PolicyRefusal(f"its sums may tell single samples; to let them leave, name {more}")
    return kept
