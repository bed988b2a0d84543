"""The loop's shortcuts on a CPU give what the core defines, bit for bit where they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.check.problems import images
from kedge.core import client, ops, tree
from kedge.core.client import Carry
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Params, Weights
from kedge.core.update import Update, add, total
from kedge.core.view import View
from kedge.core.work import single_jobs, take_jobs
from kedge.engines import torch_private
from kedge.engines.cohort import clone
from kedge.engines.loop import gradient, run_steps, total_of_one
from kedge.engines.ops import FOREACH
from kedge.engines.torch_private import foreach_add_


class Idle(Part):
    """A hook in every step that changes nothing, so that steps are not plain."""

    name = "idle"

    def transform(self, v: View, batch: Batch) -> Batch:
        return batch


@pytest.mark.parametrize("norm", ["none", "bn"])
def test_a_plain_step_is_a_step_with_hooks_that_do_nothing(norm: str) -> None:
    problem = images(norm=norm, dropout=0.5, optim=SGD(0.1, momentum=0.9))

    def steps(method: str | Part) -> Carry:
        run = problem.simulate(method)
        cohort = run.cohort([1])
        assert cohort.bound.steps_are_plain == (method == "fedavg")
        return run_steps(cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0], 1)

    plain, hooked = steps("fedavg"), steps(Idle())
    assert tree.equal(plain, hooked)
    assert float(plain.losses["task"]) > 0
    assert int(plain.step) == 2


def objective(params: Params) -> tuple[Tensor, dict[str, Tensor]]:
    value = (params["a"] ** 3).sum() * params["b"][0]
    return value, {"twice": 2 * value}


@pytest.mark.parametrize("public", [False, True])
def test_a_gradient_is_that_of_the_core(public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if public:
        monkeypatch.setattr(torch_private, "_autograd", None)
    params = {n: torch.arange(1.0, 4.0) for n in ("a", "b", "unused")}
    found, wanted = gradient(objective, params), ops.gradient(objective, params)
    assert tree.equal(found[0], wanted[0])
    assert tree.equal(found[1], wanted[1])
    assert not found[1]["twice"].requires_grad
    assert not params["a"].requires_grad
    assert found[0]["a"].tolist() == [3.0, 12.0, 27.0]
    assert found[0]["unused"].tolist() == [0.0, 0.0, 0.0]


def update_of(method: str, params: Callable[[Params], Params]) -> tuple[Any, ...]:
    """The binding, a client's update and the anchor."""
    run = images(norm="bn").simulate(method)
    cohort = run.cohort([1])
    job = take_jobs(cohort.jobs, 0)
    carry = run_steps(cohort.bound, job, cohort.batches[0], 1)
    update = client.end(cohort.bound, job, carry).update
    delta = Weights(params(update.delta.params), update.delta.buffers)
    return cohort.bound, update._replace(delta=delta), job.anchor


def small(params: Params) -> Params:
    return params


def large(params: Params) -> Params:
    """An update with a leaf in channels-last and one of more elements than a dot product takes."""
    generator = torch.Generator().manual_seed(0)
    filters = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64)
    dense = torch.randn(300, 300, generator=generator, dtype=torch.float64)
    return params | {"filters": filters.to(memory_format=torch.channels_last), "dense": dense}


def none_travel(params: Params) -> Params:
    return {}


@pytest.mark.parametrize(
    ("method", "params"),
    [("fedavg", small), ("fedavg", large), ("fedavg", none_travel)]
    + [(method, small) for method in ("scaffold", "fednova", "krum")],
)
def test_totals_of_one_client_are_those_of_the_core(
    method: str, params: Callable[[Params], Params]
) -> None:
    bound, update, anchor = update_of(method, params)
    stacked: Update = tree.map(lambda x: x.unsqueeze(0), update)
    found, wanted = total_of_one(bound, update, anchor), total(bound, stacked, anchor)
    fast = total(bound, stacked, anchor, FOREACH)
    assert found.up_bytes == wanted.up_bytes
    for some, exact, slow in (
        (found.summed, fast.summed, wanted.summed),
        (found.stacked, fast.stacked, wanted.stacked),
    ):
        assert tree.equal(some, exact)
        shapes = [tree.map(lambda x: x.shape, one) for one in (some, slow)]
        assert shapes[0] == shapes[1]
        assert tree.gap(some, slow) < 1e-12


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "krum"])
def test_totals_are_added_in_place_as_the_core_adds(method: str) -> None:
    bound, update, anchor = update_of(method, small)
    other = tree.map(lambda x: 3 * x + 1, update)
    one, two = (
        total_of_one(bound, own, anchor).of([k], 0) for k, own in enumerate((update, other))
    )
    wanted = add(one, two)
    found = add(clone(one), two, foreach_add_)
    assert (found.clients, found.up_bytes) == (wanted.clients, wanted.up_bytes)
    assert tree.equal(found.summed, wanted.summed)
    assert tree.equal(found.stacked, wanted.stacked)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcog"])
def test_single_jobs_are_those_of_take_jobs(method: str) -> None:
    jobs = images().simulate(method).cohort([2, 0]).jobs
    each = single_jobs(jobs)
    for i in range(2):
        assert tree.equal(each(i), take_jobs(jobs, i))
