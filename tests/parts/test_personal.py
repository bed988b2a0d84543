"""FedRep: which steps train the head."""

import pytest
import torch

import kedge
from kedge.check.problems import images, step_view
from kedge.core import tree
from kedge.data.federation import Federation
from kedge.parts.layers import FedRep
from kedge.sim.fleet import Fleet


def simulate(share: float, steps: int, engine: str, dtype: torch.dtype) -> kedge.Simulation:
    """One client of three samples, who takes many steps."""
    plain = images(sizes=(3,), batch=2, steps=steps)
    fed = plain.federation
    federation = Federation(fed.x, fed.y, [range(3)], fed.task, dtype=dtype)
    module = plain.simulate("fedavg").module().to(dtype)
    method = f"fedrep(head_share={share!r})"
    return kedge.Simulation(
        federation, module, method, optim=kedge.SGD(0.01), work=plain.work, engine=engine
    )


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(
    ("share", "steps", "head", "dtype"),
    [(0.29, 100, 29, torch.float64), (0.21, 300, 63, torch.float32)],
)
def test_a_share_that_is_whole_in_decimals_is_whole(
    share: float, steps: int, head: int, engine: str, dtype: torch.dtype
) -> None:
    """The steps are those of a share in the middle between two whole numbers of steps."""
    runs = [simulate(s, steps, engine, dtype) for s in (share, (head + 0.5) / steps)]
    for run in runs:
        run.run_round()
    assert tree.equal(*(run.state() for run in runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lanes_split_their_steps_as_alone(dtype: torch.dtype) -> None:
    shares = (0.29, 0.57, 0.07)
    together, middle = (
        [simulate(s + d, 100, "vector", dtype) for s in shares] for d in (0.0, 0.005)
    )
    for fleet in (Fleet(together), Fleet(middle)):
        fleet.run_round()
        assert fleet.lanes == [3]
    for a, b in zip(together, middle, strict=True):
        assert tree.equal(a.state(), b.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [1, 7, 100, 300, 999, 99_999])
def test_head_steps_are_the_whole_part_of_the_share(steps: int, dtype: torch.dtype) -> None:
    """Against whole-number arithmetic, for all shares of two decimals."""
    run = images().simulate("fedrep")
    v, _ = step_view(run, 0, FedRep(), "trainable")
    info = v.info._replace(num_steps=torch.tensor(steps, dtype=dtype))
    v._context.job = v._context.job._replace(info=info)
    params, head = run.weights.params, run.bound.model.head_names()[0]
    for hundredths in range(101):
        part = FedRep(head_share=hundredths / 100)
        wanted = hundredths * steps // 100
        for step in range(max(0, wanted - 1), min(wanted + 1, steps)):
            v._context.step = torch.tensor(step)
            assert bool(part.trainable(v, params)[head]) == (step < wanted), (hundredths, step)
