"""Class means of features, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.check.problems import images, step_view
from kedge.core.part import Part
from kedge.parts.regularisers import class_sums, empty_means, update_means


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_at_first_all_means_are_zero_and_none_is_valid() -> None:
    means, valid = empty_means(images().simulate("fedavg").bound.spec)
    assert torch.equal(means, torch.zeros(3, 6, dtype=torch.float64))
    assert torch.equal(valid, vec(0, 0, 0))


def test_a_class_without_samples_keeps_its_mean() -> None:
    counts, sums = vec(1, 0, 4), vec(2, 0, 12)[:, None].expand(3, 2)
    old, valid = torch.full((3, 2), 7.0, dtype=torch.float64), vec(0, 1, 0)
    means, now = update_means(sums, counts, old, valid)
    assert means.tolist() == [[2, 2], [7, 7], [3, 3]]
    assert now.tolist() == [1, 1, 1]
    assert update_means(sums, counts, old, vec(0, 0, 0))[1].tolist() == [1, 0, 1]


def test_sums_run_over_all_data_of_the_client() -> None:
    part: Part = type("Ridge", (Part,), {"name": "ridge", "needs_sweep": True})()
    run = images(norm="bn").simulate("fedproto")
    v, _ = step_view(run, 1, part)
    sums, counts = class_sums(v, run.weights)
    batch = run.federation.clean(run.federation.rows[5:14])
    features = run.bound.model.forward(run.weights, batch.x, "eval").features
    assert features is not None
    for c in range(3):
        rows = features[batch.y == c]
        assert counts[c].item() == len(rows)
        torch.testing.assert_close(sums[c], rows.sum(0))
