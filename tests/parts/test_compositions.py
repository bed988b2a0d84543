"""Compositions of the headline methods with others, end to end, on both engines."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kedge
from kedge.check.problems import images
from kedge.core import tree

TINY = {
    "flboost": "flboost(steps=2, student_steps=2, batch=6, width=4, noise=3)",
    "fedcog": "fedcog(samples=6, steps=3, batch=4)",
    "fedbr": "fedbr(rows=4, samples=3, width=5, out=3)",
    "fedimpro": "fedimpro(cut=stage1, ramp=1)",
    "moon": "moon(projection=4)",
    "feddyn": "feddyn(alpha=1)",
}
METHODS = [
    "scaffold+flboost", "feddyn+flboost", "fedprox+flboost", "fedcog+moon", "fedcog+scaffold",
    "fedcog+fedavgm", "fedbr+feddecorr", "fedbr+fedcm", "fedbr+fedntd", "fedbr+mixup",
    "fedimpro+feddyn", "fedimpro+fedcog", "fedtr+fedimpro", "fedcog+fedtr+fedimpro+fedbr+flboost",
]  # fmt: skip


def spelled(method: str) -> str:
    return "+".join(TINY.get(name, name) for name in method.split("+"))


@pytest.mark.long
@pytest.mark.parametrize("norm", ["bn", pytest.param("gn", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_loop_is_vector_with_ragged_clients_and_sampled_cohorts(method: str, norm: str) -> None:
    problem = images(norm=norm, sizes=(6, 9, 14, 21))
    runs = [problem.simulate(spelled(method), e, per_round=3) for e in ("loop", "vector")]
    for run in runs:
        for _ in range(3):
            run.run_round()
        assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_engines_agree_by_the_public_interface(method: str) -> None:
    """The records of a run in float32 are those of the reference engine."""
    runs = [
        kedge.run(spelled(method), model="mlp(hidden=[24, 16])", clients=5, rounds=3, seeds=(0,),
                  lr=0.05, steps=4, engine=engine).records[0]
        for engine in ("reference", "vector")
    ]  # fmt: skip
    assert [record["round"] for record in runs[0]] == [1, 2, 3]
    for expected, found in zip(*runs, strict=True):
        assert expected.keys() == found.keys()
        if "feddecorr" in method:  # it divides by deviations near 0, which magnifies rounding
            assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
            continue
        for name in expected.keys() - {"seconds", "per_class", "accuracy"}:
            assert found[name] == pytest.approx(expected[name], rel=2e-4), name
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.6)  # two of 359


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("method", METHODS)
def test_a_neutral_part_adds_nothing_to_the_others(method: str, engine: str) -> None:
    """With one part at its neutral setting, the rest trains as it does alone."""
    whole = kedge.parse(spelled(method)).parts
    problem = images(norm="gn", sizes=(6, 9, 14))
    for quiet in whole:
        others = tuple(p for p in whole if p is not quiet)
        if quiet.neutral is None or len(whole) > 2:
            continue
        place = whole.index(quiet)
        neutral = dataclasses.replace(quiet, **quiet.neutral)
        runs = [
            problem.simulate(kedge.Method(parts), engine, per_round=2)
            for parts in (others, (*others[:place], neutral, *others[place:]))
        ]
        for run in runs:
            for _ in range(2):
                run.run_round()
        shared = tree.map(lambda _, x: x, runs[0].weights, runs[1].weights)
        gap = tree.gap(runs[0].weights, shared)
        # injected rows change the batch size, and with it kernels and their rounding
        assert gap <= (1e-11 if quiet.has("inject") else 0.0), str(neutral)
