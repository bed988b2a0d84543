"""A member's test of a model: of which weights, how often, and what of it leaves.

``test`` in the uploads of a policy is for numbers of samples (right, of each class, predicted to
be). Other sums leave only by their own names, whatever else is allowed: ``test:histogram``,
``test:loss``, ``test:sum_sq`` and the like, or ``test:*``. Tested are weights that came to train
from, and one model of each run after its last round. ``output`` in the uploads allows others, too:
those of methods that test other weights than they broadcast (``fedexp``), and of rounds in which
the member does not train.

The server chooses what it broadcasts. So what it learns from tests is not bounded by whose weights
they are of, but by ``max_tests``, ``min_test_cell`` and ``min_test_samples``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from kedge.core.tree import Tree, Weights
from kedge.flower.cells import SAMPLES, counts_of, rounded
from kedge.flower.messages import MemberRequest
from kedge.flower.policy import Policy, PolicyRefusal
from kedge.flower.releases import UPDATE, Release, Releases, fingerprint, release_of
from kedge.flower.seat import MemberFolder, Seat
from kedge.flower.uploads import OUTPUT, TEST
from kedge.silo.silo import checked_weights

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


def make_test(request: MemberRequest, seat: Seat, policy: Policy, folder: MemberFolder) -> Tested:
    """Test the global model, and the member's own if asked for, on held-out samples.

    Raises:
        PolicyRefusal: nothing of the test may leave.
    """
    silo = seat.silo
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
        _check_weights(request, seat, public, folder.releases, releases.values())
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
    seat: Seat,
    weights: Weights,
    before: Releases,
    releases: Iterable[Release],
) -> None:
    """Raise a PolicyRefusal for weights of the server's choice: others than those to train from,
    and after the last round more than one model."""
    down = request.value.get("down")
    if down and fingerprint(seat.silo.read(down).weights) != fingerprint(weights):
        raise PolicyRefusal("it is of other weights than the broadcast, and " + NOT_NAMED)
    if request.kind != "evaluate":
        return
    run, last = request.run, seat.terms.rounds
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
