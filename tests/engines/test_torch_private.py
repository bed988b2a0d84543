"""The mapped functions against those of torch.func, and the fallback to public interfaces."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.tree import Tree
from kedge.engines import Execution, torch_compiler, torch_private
from kedge.engines.torch_private import gradient, over_clients, transforms_active
from kedge.tuning import memory
from kedge.tuning.memory import Need
from kedge.tuning.trial import measure_need


class Given(NamedTuple):
    common: Tensor
    own: dict[str, Tensor]


CLIENTS = 3
KEY = torch.Generator().manual_seed(0)
OWN = {"w": torch.randn(CLIENTS, 4, 5, generator=KEY), "unused": torch.randn(CLIENTS, 2)}
X, Y = torch.randn(CLIENTS, 6, 4, generator=KEY), torch.randint(0, 5, (CLIENTS, 6), generator=KEY)


def objective(x: Tensor, y: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = torch.tanh(x @ params["w"])
    return F.cross_entropy(logits, y), {"logits": logits, "kept": params["unused"] * 2}


def test_a_mapped_gradient_is_that_of_torch_func() -> None:
    def ours(given: Given, y: Tensor) -> Any:
        return gradient(lambda p: objective(given.common @ given.own["x"], y, p), given.own["p"])

    def theirs(common: Tensor, x: Tensor, p: dict[str, Tensor], y: Tensor) -> Any:
        by = torch.func.grad_and_value(lambda p: objective(common @ x, y, p), has_aux=True)
        grads, (_, rest) = by(p)
        return grads, rest

    def listed(given: Given, y: Tensor) -> dict[str, Any]:
        return dict(zip(("grads", "rest"), ours(given, y), strict=True))

    common = torch.randn(6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of operators that are mapped client by client
        found = over_clients(listed, Given(None, 0), 0)(Given(common, {"x": X, "p": OWN}), Y)  # type: ignore[arg-type]
    expected = torch.func.vmap(theirs, in_dims=(None, 0, 0, 0))(common, X, OWN, Y)
    assert tree.gap(found["grads"], expected[0]) < 1e-7
    assert tree.gap(found["rest"], expected[1]) == 0
    assert not bool(found["grads"]["unused"].any())
    for x in tree.leaves(found):
        assert not x.requires_grad


ALONE = """
import torch, torch.nn.functional as F
from kedge.engines.torch_private import over_clients
found = over_clients(F.cross_entropy, 0, 0)(torch.zeros(2, 3, 4), torch.zeros(2, 3).long())
print(found.shape)
"""


def test_all_rules_are_there_where_nothing_else_was_mapped() -> None:
    """Without them torch warns, and maps the loss client by client."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE], capture_output=True, text=True
    )
    assert done.stdout == "torch.Size([2])\n", done.stderr


def test_what_is_common_stays_so_and_constants_are_given_to_every_client() -> None:
    double = over_clients(lambda a, b: {"sum": a + b, "one": torch.ones(2), "b": b}, 0, None)
    found = double(torch.arange(3.0), torch.tensor(10.0))
    assert found["sum"].tolist() == [10, 11, 12]
    assert found["one"].tolist() == [[1, 1]] * 3
    assert found["b"].tolist() == [10] * 3


def test_a_gradient_of_a_gradient() -> None:
    """As of a part that punishes steep gradients."""

    def steep(x: Tensor) -> Tensor:
        def size(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            inner = torch.func.grad(lambda z: (z**3).sum())(p["w"] * x)
            return (inner**2).sum(), {}

        return gradient(size, {"w": torch.ones(())})[0]["w"]

    x = torch.tensor([1.0, 2.0])
    found = over_clients(steep, 0)(x)
    assert torch.allclose(found, 36 * x**4)  # of (3 (w x)^2)^2


def test_outside_of_a_map_and_without_gradients_switched_on() -> None:
    with torch.no_grad():
        grads, rest = gradient(lambda p: objective(X[0], Y[0], p), tree.take(OWN, 0))
    expected = torch.func.grad(lambda p: objective(X[0], Y[0], p)[0])(tree.take(OWN, 0))
    assert tree.gap(grads, expected) < 1e-7
    assert rest["logits"].shape == (6, 5)


def test_an_error_leaves_no_transform_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        assert transforms_active()
        return gradient(lambda p: (p["x"].sum() / len(p["y"]), {}), {"x": x})[0]["x"]

    for _ in range(2):
        with pytest.raises(KeyError):
            over_clients(fail, 0)(X)
        assert not transforms_active()


def test_a_gradient_that_is_differentiated_from_outside() -> None:
    """As by a part that asks for the slope of the gradient's size."""
    x = torch.tensor([1.0, 2.0])

    def size(w: Tensor, x: Tensor) -> Tensor:
        found, _ = gradient(lambda p: ((p["w"] * x) ** 3, {}), {"w": w})
        return found["w"] ** 2  # (3 w^2 x^3)^2

    by = torch.func.vmap(torch.func.grad(size), in_dims=(None, 0))
    assert torch.allclose(by(torch.tensor(1.0), x), 36 * x**6)


# -- the fallback to public interfaces ---------------------------------------------------------

METHODS = (
    "scaffold+fedprox(mu=0.1)",
    "fedimpro(cut=stage1, ramp=1)",
    "fedcog(start=0, samples=6, steps=3, batch=4)",
)
LARGE = 50_000_000  # numbers, 200 MB: more than the imports have freed


def final_states() -> dict[str, Tree]:
    """The states after two rounds, by method, engine and kind of network."""
    found = {}
    for method in METHODS:
        for engine in ("loop", "vector"):
            for norm, dropout in (("bn", 0.0), ("none", 0.3)):
                sim = images(norm=norm, dropout=dropout).simulate(method, engine)
                for _ in range(2):
                    sim.run_round()
                found[f"{method} {engine} {norm}"] = dict(sim.state())
    return found


def run_in_fallback(path: str) -> None:
    """In a process with KEDGE_PUBLIC_TORCH=1: all that kedge uses of torch is public."""
    torch.set_num_threads(1)
    assert torch_private.layers is None
    assert torch_private._core is None
    assert torch_private._lists is None
    assert not torch_compiler.can_compile()
    torch.save(final_states(), path)
    for test in (
        test_a_mapped_gradient_is_that_of_torch_func,
        test_what_is_common_stays_so_and_constants_are_given_to_every_client,
        test_a_gradient_of_a_gradient,
        test_outside_of_a_map_and_without_gradients_switched_on,
        test_an_error_leaves_no_transform_behind,
        test_a_gradient_that_is_differentiated_from_outside,
    ):
        test()

    with torch_private.watching_operators(lambda *_: None) as watched:
        assert not watched
    assert memory.peak(lambda: torch.ones(LARGE), torch.device("cpu")) > LARGE
    for engine in ("loop", "vector"):
        need = measure_need(images().simulate("scaffold"), engine, 2)
        assert isinstance(need, Need), need

    eager, fused = (
        images().simulate("scaffold", Execution("vector", compile=c)) for c in (False, True)
    )
    eager.run_round()
    with pytest.warns(UserWarning, match="steps run eagerly: this version of torch has no"):
        fused.run_round()
    assert tree.equal(fused.state(), eager.state())


@pytest.mark.long
def test_public_interfaces_give_the_same_results(tmp_path: Path) -> None:
    """A release of torch that moves its private interfaces makes kedge slower, not wrong."""
    if os.environ.get("KEDGE_PUBLIC_TORCH"):
        pytest.skip("there is nothing to compare with: KEDGE_PUBLIC_TORCH is set")
    assert torch_private.layers is not None
    assert torch_private._core is not None
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_torch_private as t; "
    script += "t.run_in_fallback(sys.argv[2])"
    arguments = [str(Path(__file__).parent), str(tmp_path / "states.pt")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"KEDGE_PUBLIC_TORCH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    public, private = torch.load(arguments[1]), final_states()
    assert list(public) == list(private)
    for name, state in private.items():
        assert list(public[name]) == list(state), name
        assert tree.gap(public[name], state) < 1e-10, name


# -- operations in place ------------------------------------------------------------------------


def counted(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


def slim(function: Any, *leaves: Tensor) -> torch.fx.GraphModule:
    """The graph of a function in which equal subexpressions are computed once."""
    graph = torch_compiler.trace(function, *leaves)
    graph.graph = torch_compiler.eliminate_common_subexpressions(graph.graph)
    graph.recompile()
    return graph


def test_equal_subexpressions_are_merged_across_operations_in_place() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        first = torch.exp(x)
        kept = (x * 2).clamp_min_(0.5)
        kept.masked_fill_(kept > 1, 3.0).add_(first)
        return [torch.exp(x.detach()) + kept, torch.exp(x)]

    x = torch.linspace(-1, 1, 7)
    graph = slim(twice, x)
    assert counted(graph, "exp") == 2  # the result is a tensor of its own
    assert not any(counted(graph, f"{name}_.") for name in ("clamp_min", "masked_fill", "add"))
    for found, wanted in zip(graph(x), twice(x), strict=True):
        assert torch.equal(found, wanted)


def test_what_has_a_view_is_written_in_place() -> None:
    """The view must see it, and so must the argument that is written."""

    def through_a_view(x: Tensor, y: Tensor) -> list[Tensor]:
        base = x * 1
        row = base[0]
        base.mul_(2)
        y.add_(1)
        other = x + 1
        other[1].fill_(7)
        return [row + 1, base.clone(), y * 3, other + 0]

    x, y = torch.arange(6.0).view(2, 3), torch.ones(3)
    graph = slim(through_a_view, x.clone(), y.clone())
    assert counted(graph, "mul_.") == 1
    written = [y.clone(), y.clone()]
    for found, wanted in zip(graph(x, written[0]), through_a_view(x, written[1]), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(*written)
