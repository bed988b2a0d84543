"""Distrust: what a reply must be before it is averaged.

ReplyChecks go from cheap to costly, and the first that fails drops the reply: its size; version and
kind; the run, round, attempt, client and terms of the request that it answers; names, types, shapes
and lengths of all arrays, and a checksum, before an array is allocated; then that all numbers are
finite and of a plausible size, that the client weight is the one that follows from the number of
samples with which the member joined, and that a test was on as many samples as it has. The numbers
of several replies are compared by :func:`outliers`.

A client's number is known from its connection. Where a part uploads it (as ``client``), it is
overwritten, so nobody can speak for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.part import Stack
from kedge.core.tree import Tree
from kedge.core.update import Update
from kedge.engines.engine import metric_sums
from kedge.errors import WireError
from kedge.federation.coordinator.rules import Rules
from kedge.federation.large_messages import Message, size_of
from kedge.federation.member.testing import counts_of
from kedge.federation.messages import REPLY, RequestHeader, reply_header
from kedge.session import blob, wire
from kedge.session.session import Broadcast, Session
from kedge.sim.clients import all_weights

MAX_HEADER_BYTES = 1 << 20  # of a reply, beyond the names of its arrays
BLOCK = 1 << 20  # numbers of a leaf that are converted at a time
#: Sums of a test that cannot be negative.
COUNTS = (
    "count", "right", "predicted", "samples", "histogram", "hits", "said", "calibration",
    "sum_y2", "sum_abs", "sum_sq",
)  # fmt: skip
SHARED = ("contribution", "uploads")  # contents besides the weights
ROUNDING = 1e-3  # of a sum of a test


class Opened(NamedTuple):
    """A reply that has passed all checks."""

    code: str  # of a refusal, or empty
    value: Tree
    sizes: Mapping[str, float] = {}  # the largest number of each content, or its norm


class ReplyChecks:
    """The checks of replies in one session.

    Args:
        session: the server's session.
        rules: bounds.
        sizes: training and test samples of each client, as it stated when it joined.
    """

    def __init__(self, session: Session, rules: Rules, sizes: list[tuple[int, int]]) -> None:
        self.session, self.rules, self.sizes = session, rules, sizes
        self._templates: dict[tuple[str, str, int], Tree] = {}

    def open(self, message: Message, request: RequestHeader, broadcast: Broadcast) -> Opened:
        """Read a reply to a request with this broadcast.

        Raises:
            WireError: it is bad; the text says why, for the log of the coordinator.
        """
        (names, arrays), size = self._size(request, broadcast), size_of(message)
        if size > names + arrays:
            raise WireError(f"{size} bytes, of {names + arrays} at most")
        file = blob.opened(message)
        file.seek(0)
        if int.from_bytes(file.read(8), "little") > names:
            raise WireError("a header that is larger than that of the message may be")
        header, notes = reply_header(message)
        for name, value in vars(header).items():
            if value != getattr(request, name):
                expected = getattr(request, name)
                raise WireError(f"{name} {value!r:.40} of another request, not {expected!r:.40}")
        if notes["code"]:
            wire.check(message, REPLY, {})
            return Opened(notes["code"], {})
        tested = notes.get("tested", "0")
        if tested != "0" and (not request.test or tested != str(self.sizes[request.client][1])):
            raise WireError(f"a test on {tested!r:.20} samples, which the member does not have")
        template = self._template(request, tested != "0", broadcast)
        whole = {kind: template[kind] for kind in ("sums", "personal") if kind in template}
        if whole and "sums" in notes:
            template |= {kind: _told(sums, notes["sums"]) for kind, sums in whole.items()}
        value = wire.unpack(message, REPLY, template)
        sizes = self._check_numbers(value)
        if "update" in value:
            value["update"] = self._checked_update(value["update"], request, broadcast)
        for kind, sums in whole.items():
            one_class = self.session.bound.task.one_class
            check_sums(value[kind], int(tested), one_class, rounded="sums" in notes)
            value[kind] = {n: value[kind].get(n, _unknown(leaf)) for n, leaf in sums.items()}
        return Opened("", value, sizes)

    # -- before decoding ----------------------------------------------------------------------

    def _size(self, request: RequestHeader, broadcast: Broadcast) -> tuple[int, int]:
        """The largest sizes that the header and the arrays of a reply may have, in bytes."""
        template = self._template(request, bool(request.test), broadcast)
        sizes = [leaf.nbytes for leaf in _leaves(template)]
        return MAX_HEADER_BYTES + 1000 * len(sizes), sum(sizes)

    def _template(self, request: RequestHeader, tested: bool, broadcast: Broadcast) -> Tree:
        bound = self.session.bound.at(request.round)
        personal = getattr(request, "personal", False)
        found: dict[str, Tree] = {}
        if request.kind in ("train", "survey"):
            key = request.kind, request.part, id(bound)
            found["update"] = self._once(key, lambda: self._derive(request, bound, broadcast))
        if tested:
            detailed = request.test == "detailed"
            key = "sums", str(detailed), id(bound)
            found["sums"] = self._once(key, lambda: self._sums_template(bound, detailed))
            if personal:
                found["personal"] = found["sums"]
        return found

    def _once(self, key: tuple[str, str, int], derive: Callable[[], Tree]) -> Tree:
        """A template that takes a dry run, made once."""
        if key not in self._templates:
            self._templates[key] = derive()
        return self._templates[key]

    def _derive(self, request: RequestHeader, bound: Bound, broadcast: Broadcast) -> Tree:
        received = broadcast._replace(weights=all_weights(bound, broadcast.weights))
        batch = self.session.workload.work.batch
        return wire.update_template(bound, received, batch, request.part)

    def _sums_template(self, bound: Bound, detailed: bool) -> Tree:
        blank = wire.Blank(bound).clean(torch.zeros(2, dtype=torch.int64))
        chosen = bound.detailed() if detailed else bound
        return wire.template_of(metric_sums(chosen, self.session.server.weights, [blank]))

    # -- after decoding -----------------------------------------------------------------------

    def _check_numbers(self, value: Tree) -> dict[str, float]:
        """Check the size of all numbers; return the largest of each content, of ``SHARED`` ones
        the norm."""
        contents = dict(value)
        if "update" in value:
            contents |= (update := contents.pop("update"))._asdict()
            contents |= {"delta": update.delta.params, "statistics": update.delta.buffers}
        sizes = {name: largest(content) for name, content in contents.items()}
        size = max(sizes.values(), default=0.0)
        if size == math.inf:
            raise WireError("a number that is not finite")
        if size > self.rules.max_number:
            raise WireError(f"a number above {self.rules.max_number:g}")
        return {name: _norm(contents[name]) if name in SHARED else n for name, n in sizes.items()}

    def _checked_update(
        self, update: Update, request: RequestHeader, broadcast: Broadcast
    ) -> Update:
        workload, size = self.session.workload, self.sizes[request.client][0]
        self._check_weight(update.weight, workload.weight_of(size))
        self._check_weight(update.share, workload.share_of(size))
        if request.kind == "train":
            anchor = broadcast.weights
            _check_norm(update.delta.params, anchor.params, self.rules.max_norm, "an update")
            floats = {n: b for n, b in anchor.buffers.items() if b.is_floating_point()}
            changes = {n: update.delta.buffers[n] for n in floats}
            for name, buffer in floats.items():  # rounding is monotonic: an honest one is not below
                lowest = -buffer.clamp(min=0)
                if name.endswith("running_var") and bool((changes[name] < lowest).any()):
                    raise WireError("a variance below 0")
            _check_norm(changes, floats, self.rules.max_statistics, "statistics")
        return update._replace(uploads=with_client(update.uploads, request.client))

    def _check_weight(self, value: Tensor, expected: float) -> None:
        wanted = torch.tensor(expected, dtype=value.dtype)
        if not bool(value == wanted):
            raise WireError(
                f"the weight {float(value):g}; from its samples it is {float(wanted):g}"
            )


def _check_norm(change: Tree, of: Tree, factor: float, what: str) -> None:
    norm, size = _norm(change), _norm(of)
    bound = factor * max(1.0, size)
    if norm > bound:
        raise WireError(f"{what} of norm {norm:.3g}, above {bound:.3g} = {factor:g} x max(1, |w|)")


def _norm(values: Tree) -> float:
    """The norm of all leaves in float64, without a copy of a leaf."""
    blocks = (b for leaf in tree.leaves(values) for b in leaf.reshape(-1).split(BLOCK))
    return math.sqrt(math.fsum(float(block.double().square().sum()) for block in blocks))


def with_client(uploads: Tree, client: int) -> Tree:
    """Uploads in which every client number, a stacked whole number called ``client``, is the
    sender's.

    >>> with_client({"client": Stack(torch.tensor(7))}, 2)
    {'client': Stack(value=tensor(2))}
    """
    if not isinstance(uploads, dict):
        return uploads
    found = {}
    for name, value in uploads.items():
        found[name] = with_client(value, client)
        if name == "client" and isinstance(value, Stack) and _is_number(value.value):
            found[name] = Stack(torch.full_like(value.value, client))
    return found


def _is_number(value: Tree) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.numel() == 1


def largest(value: Tree) -> float:
    """The largest absolute number in a tree; infinite if one number is not finite."""
    found = [0.0]
    for leaf in tree.leaves(value):
        if leaf.numel():
            low, high = map(float, leaf.aminmax())  # NaN if one number is
            found += [-low, high]
    return math.inf if any(map(math.isnan, found)) else max(found)


def outliers(
    sizes: Mapping[int, Mapping[str, float]], rules: Rules, samples: Sequence[int]
) -> dict[int, str]:
    """Clients whose numbers are many times those of most, and than 1; and why. Sums and counts of
    who has more ``samples`` may be as many times larger. Updates have a bound of their own.

    >>> sizes = {0: {"uploads": 3.0}, 1: {"uploads": 5.0}, 2: {"uploads": 700.0}}
    >>> outliers(sizes, Rules(), [10, 10, 12])
    {2: 'uploads of size 700, those of most members are of 5 or less'}
    >>> outliers(sizes, Rules(), [10, 10, 20])
    {}
    """
    found: dict[int, str] = {}
    for kind in (*SHARED, "statistics"):
        ratio = rules.max_norm if kind in SHARED else rules.max_ratio
        known = {client: each[kind] for client, each in sizes.items() if kind in each}
        typical = median_low(known.values()) if known else 0.0
        usual = median_low(samples[client] for client in known) if known else 0
        for client, size in known.items():
            more = max(1.0, samples[client] / max(1, usual))
            if size > ratio * max(1.0, typical) * more:
                text = (
                    f"{kind} of size {size:.3g}, those of most members are of {typical:.3g} or less"
                )
                found.setdefault(client, text)
    return found


def check_sums(
    sums: dict[str, Tensor], samples: int, one_class: bool, rounded: bool = False
) -> None:
    """Raise a WireError for sums of a test that cannot be those of ``samples`` samples.

    A policy may have ``rounded`` numbers of answers, but not those of samples.
    """
    for name in COUNTS:
        if name in sums and bool((sums[name] < 0).any()):
            raise WireError("a negative number of samples in a test")
    answers = [] if rounded else ["predicted", "said", "histogram"]
    known = {name: sums[name] for name in ("count", *answers) if name in sums}
    every = [known[name].sum() for name in ("count", "predicted") if one_class and name in known]
    every += [sums["samples"]] if "samples" in sums else []
    every += known["histogram"].flatten(1).sum(1) if "histogram" in known else []
    every += [sums["calibration"][0].sum()] if "calibration" in sums else []
    if any(float(count) != samples for count in every):
        raise WireError("a test on other samples than the member has")
    if any(bool((known[name] > samples).any()) for name in ("count", "said") if name in known):
        raise WireError("a test on other samples than the member has")
    pairs = (("right", "count"), ("right", "predicted"), ("hits", "count"), ("hits", "said"))
    for part, whole in pairs:
        if part in sums and whole in sums and bool((sums[part] > sums[whole]).any()):
            raise WireError("a test with more right answers than samples")
    for first, second in (("sum_y", "sum_y2"), ("sum_abs", "sum_sq")):  # Cauchy and Schwarz
        if first in sums and second in sums:
            bound = (1 + ROUNDING) * samples * sums[second]
            if bool((sums[first] ** 2 > bound).any()):
                raise WireError("a test with sums of squares that are too small")


def _told(sums: dict[str, wire.Leaf], names: str) -> dict[str, wire.Leaf]:
    """The sums of a test that a member's policy lets leave; numbers of samples must be there."""
    found = {name: leaf for name, leaf in sums.items() if name in names.split(",")}
    if counts_of(sums) - found.keys():
        raise WireError("a test without its numbers of samples")
    return found


def _unknown(leaf: wire.Leaf) -> Tensor:
    return torch.full(leaf.shape, math.nan, dtype=leaf.dtype)


def _leaves(template: Tree) -> Iterator[wire.Leaf]:
    if isinstance(template, wire.Leaf):
        yield template
    elif isinstance(template, dict):
        for item in template.values():
            yield from _leaves(item)
    elif isinstance(template, tuple):
        for item in template:
            yield from _leaves(item)


def finite(value: Tree) -> bool:
    """Whether all numbers are finite."""
    return largest(value) < math.inf
