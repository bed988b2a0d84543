"""Mixup: labels that another part has mixed before."""

from kedge.check.problems import images, step_view
from kedge.core import tree
from kedge.parts.pools import Mixup


def test_labels_that_are_mixed_already_are_mixed_further() -> None:
    """The mixture is linear: labels t / 4 + 1/4 give a quarter of the mixed t, plus 1/4."""
    part = Mixup(alpha=1.0)
    run = images().simulate(part)
    v, batch = step_view(run, 1, part, "transform")
    hard = run.federation.task.soft(batch.y, batch.x.dtype)
    once, again = (part.transform(v, batch._replace(target=t)) for t in (None, 0.25 * hard + 0.25))
    assert once.target is not None
    assert again.target is not None
    assert tree.gap(again.target, 0.25 * once.target + 0.25) < 1e-15
    assert tree.gap(again.x, once.x) == 0
