"""What a part sees on a client, and the passes of one step: modes, which run, what they leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.core.nets import KEY, X, stages

from kedge.check.problems import images, step_view
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.core.view import Passes, View
from kedge.errors import HookError

MODEL = Model(stages())
WEIGHTS = MODEL.weights()


def passes(track: bool = True) -> Passes:
    return Passes(MODEL, WEIGHTS.buffers, KEY, track, ("stage1",))


def test_a_pass_normalises_by_the_batch_unless_it_evaluates() -> None:
    probe, evaluated = (MODEL.forward(WEIGHTS, X, mode).logits for mode in ("probe", "eval"))
    assert torch.equal(passes().run(WEIGHTS.params, X).logits, probe)
    assert torch.equal(passes().run(WEIGHTS, X, train=False).logits, evaluated)
    assert list(passes().run(WEIGHTS, X).at) == ["stage1"]


def test_the_same_pass_runs_once() -> None:
    of = passes()
    first = of.run(WEIGHTS.params, X)
    assert of.run(WEIGHTS.params, X) is first
    assert of.run(Weights(WEIGHTS.params, WEIGHTS.buffers), X) is first
    others = [(dict(WEIGHTS.params), X, True), (WEIGHTS.params, X.clone(), True)]
    for other in [*others, (WEIGHTS.params, X, False)]:
        assert of.run(*other) is not first


def test_only_an_update_in_training_moves_the_statistics() -> None:
    of = passes()
    of.run(WEIGHTS.params, X)
    of.run(WEIGHTS.params, X, train=False, update=True)
    still = passes(track=False)
    still.run(WEIGHTS.params, X, update=True)
    assert of.buffers is still.buffers is WEIGHTS.buffers
    moved = WEIGHTS
    for _ in range(2):  # an update is never taken from an earlier one
        of.run(WEIGHTS.params, X, update=True)
        moved = Weights(WEIGHTS.params, MODEL.forward(moved, X, "train").buffers)
        assert tree.equal(of.buffers, moved.buffers)
    assert not tree.equal(of.buffers, WEIGHTS.buffers)


def test_statistics_of_other_weights_are_not_updated() -> None:
    with pytest.raises(HookError, match=r"^update=True moves .* pass bare parameters$"):
        passes().run(WEIGHTS, X, update=True)


def test_what_is_known_before_the_first_round_is_printed_without_its_key() -> None:
    text = repr(images().simulate("fedavg").bound.spec)
    assert text.startswith("Spec(model=")
    assert "key=" not in text


def view_of(**members: Any) -> View:
    """The view in ``term`` of a part named ``ridge`` with these members."""
    part: Part = type("Ridge", (Part,), {"name": "ridge", **members})()
    return step_view(images().simulate("fedlc"), 0, part)[0]


def test_a_view_refuses_what_its_part_has_not_declared() -> None:
    v = view_of()
    with pytest.raises(HookError, match=r"^ridge reads v\.label_counts: declare needs_labels = Tr"):
        _ = v.label_counts
    with pytest.raises(HookError, match=r"^ridge calls v\.sweep: declare needs_sweep = True$"):
        v.sweep(lambda batch, mask: mask.sum())
    assert view_of(needs_labels=True).label_counts.sum().item() == 5


def test_a_view_refuses_what_there_is_not_in_its_hook() -> None:
    v = view_of()
    with pytest.raises(HookError, match=r"^ridge\.term asks for v\.grad; only correct may$"):
        v.grad(v.anchor.params)
    before = View(replace(v._context, step=None), v._part, "prepare")
    with pytest.raises(HookError, match=r"^ridge\.prepare asks for v\.step outside a local step$"):
        _ = before.step
    assert v.step.item() == 0
