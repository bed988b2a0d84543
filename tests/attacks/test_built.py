"""A member asks its policy, and sizes, before it builds what a server names."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.core.model import Model
from kedge.core.part import parts
from kedge.federation.member import run_state as seats
from kedge.federation.member.policy import Policy
from kedge.federation.member.run_state import agreement_text
from kedge.models import build
from tests.attacks.server import Server, patients

WHOLE = 2**62


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were built with memory of their own."""
    found: list[str] = []

    def spy(text: str, *rest: Any) -> nn.Module:
        module = build(text, *rest)
        if any(not p.is_meta for p in module.parameters()):
            found.append(text)
        return module

    monkeypatch.setattr(seats, "build", spy)
    return found


def agree(tmp_path: Path, policy: Policy | None = None, **terms: Any) -> tuple[str, Server]:
    """The code of a member that is told terms with the initial weights of a small model."""
    lying = Server(tmp_path / "north", policy, **{"model": "linear"} | terms)
    start = time.perf_counter()
    answer = lying.agree()
    assert time.perf_counter() - start < 10
    assert "Traceback" not in lying.log
    assert not list((tmp_path / "north" / "runs").iterdir()) or not answer
    return answer, lying


def test_a_model_of_the_right_size_is_built(tmp_path: Path, built: list[str]) -> None:
    assert agree(tmp_path)[0] == ""
    assert built == ["linear"]


@pytest.mark.parametrize("policy", [None, Policy(max_mb=5.0), Policy()])
@pytest.mark.parametrize(
    "model",
    [
        "mlp(hidden=[30000, 30000])",
        f"mlp(hidden=[{WHOLE}])",
        f"mlp(hidden=[{WHOLE}, {WHOLE}])",
        "mlp(hidden=[-5])",
        "mlp(hidden=[0])",
        "mlp(hidden=big)",
        "mlp(hidden=[1e9])",
        "mlp(hidden=[" + "1," * 10**6 + "1])",
        "mlp(hidden=" + "[" * 10**6 + ")",
        "mlp(hidden=[" + "9" * 4000 + "])",
        "resnet50(groups=-1)",
        "resnet18",
        "no_such_model",
        "linear + linear",
        " hf:bert-base-uncased",
        "mlp(norm='(', hidden=[30000, 30000])",
        "",
        "(",
        "linear(" + "\0" * 9 + ")",
    ],
)
def test_a_model_that_does_not_fit_is_not_built(
    model: str, policy: Policy | None, tmp_path: Path, built: list[str]
) -> None:
    code, _ = agree(tmp_path, policy, model=model)
    assert code in ("TERMS", "BAD_REQUEST")
    assert built == []


def test_initial_weights_of_the_right_shape_are_bounded_by_the_policy(
    tmp_path: Path, built: list[str]
) -> None:
    lying = Server(tmp_path / "north", Policy(max_mb=0.1), model="mlp(hidden=[9000])")
    initial = Model(build("mlp(hidden=[9000])", (4,), 2)).own_weights()
    assert lying.agree(initial) == "POLICY"
    assert "an update has 0.3 MB, more than max_mb=0.1" in lying.log
    assert built == []


@pytest.mark.parametrize(
    "model",
    [
        "hf:bert-base-uncased",
        "hf:/etc",
        "hf:../north",
        "hf:gpt2(lora=8)",
        "hf:a(b)/c",
        "hf:",
    ],
)
def test_nothing_is_loaded_or_imported_by_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the library of Hugging Face is imported")

    monkeypatch.setattr(sys.modules["kedge.models.hf"], "_library", never)
    for number, policy in enumerate((None, Policy(), Policy(models=("mlp", "hf:a")))):
        code, lying = agree(tmp_path / str(number), policy, model=model)
        assert code == "POLICY"
        assert "is not built here; to allow it: models = [" in lying.log


def test_a_policy_lists_models(tmp_path: Path, built: list[str]) -> None:
    code, lying = agree(tmp_path / "other", Policy(models=("mlp",)))
    assert code == "POLICY"
    assert "'linear' is not built here; to allow it: models = ['linear']" in lying.log
    assert built == []
    assert agree(tmp_path / "this", Policy(models=("linear",)))[0] == ""
    assert agree(tmp_path / "own", Policy(models=("mlp",)), model="own")[0] == ""


def test_parts_are_asked_for_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.core.part.make_part", None)  # nothing is made
    code, lying = agree(tmp_path, Policy(parts=("fedprox",)), method="fedprox+moon(projection=9)")
    assert code == "POLICY"
    assert "the method has the part 'moon', which is not allowed" in lying.log


@pytest.mark.parametrize("policy", [None, Policy()])
@pytest.mark.parametrize(
    "method",
    [
        "moon(projection=1000000000)",
        f"moon(projection={WHOLE})",
        "fedbr(rows=4, samples=3, width=900000000, out=3)",
        "fedmix(rows=1000000000)",
        "fedgen(hidden=1000000000)",
        "fedprox(mu=-1)",
        "fedprox(mu=" + "[" * 10**6,
        "fedprox" + "+fedprox" * 1000,
        "fedprox+",
        "no_such_part",
    ],
)
def test_parts_that_take_too_much_are_not_bound(
    method: str, policy: Policy | None, tmp_path: Path, built: list[str]
) -> None:
    code, _ = agree(tmp_path, policy, method=method)
    assert code in ("TERMS", "BAD_REQUEST")
    assert built == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_clients": -3},
        {"num_clients": "two"},
        {"seed": -1},
        {"seed": 2**70},
        {"rounds": 1.5},
        {"batch": "ten"},
        {"dtype": "load"},
        {"dtype": "int8"},
        {"optimizer": "sgd(" * 1000},
        {"optimizer": "no_such_optimizer"},
        {"augment": "no_such_augmentation"},
        {"precision": "fp1"},
        {"batchnorm": "no"},
        {"method": ["fedavg"]},
        {"model": {"a": 1}},
        {"class_weights": (1.0,) * 9},
        {"class_weights": ("a",)},
        {"metric": "no_such_metric"},
        {"split": "holdout(2)"},
    ],
)
def test_terms_of_other_types_and_sizes_are_refused(
    change: dict[str, Any], tmp_path: Path, built: list[str]
) -> None:
    lying = Server(tmp_path / "north", model="linear")
    lying.terms = replace(lying.terms, **change)
    assert lying.agree() in ("TERMS", "BAD_REQUEST")
    assert "Traceback" not in lying.log
    assert built == []


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": 10**8},
        {"shape": (10**9,)},
        {"shape": (WHOLE, WHOLE)},
        {"shape": (-4,)},
        {"shape": ()},
        {"columns": tuple(f"c{i}" for i in range(10**4))},
        {"classes": tuple(map(str, range(10**4)))},
        {"dtype": "object"},
        {"task": "no_such_task"},
        {"mean": (float("nan"),) * 4},
        {"mean": (1.0,) * 10**4},
        {"std": (0.0,) * 4},
    ],
)
def test_schemas_that_are_not_those_of_the_data_are_refused(
    change: dict[str, Any], tmp_path: Path, built: list[str]
) -> None:
    lying = Server(tmp_path / "north", model="linear")
    lying.terms = replace(lying.terms, data=replace(lying.terms.data, **change))
    assert lying.agree() in ("TERMS", "BAD_REQUEST")
    assert "Traceback" not in lying.log
    assert built == []


def test_deep_terms_are_refused(tmp_path: Path) -> None:
    lying = Server(tmp_path / "north")
    deep = "[" * 10**5 + "]" * 10**5
    for text in (deep, '{"terms": ' + deep + "}", agreement_text(lying.terms, "")[:-9]):
        assert lying.agree(text=text) == "BAD_REQUEST"
    text = '{"terms": "' + deep + '", "token": ""}'
    assert lying.agree(text=text) == "TERMS"
    assert "Traceback" not in lying.log


def test_a_module_of_ones_own_that_meta_cannot_run_still_trains(tmp_path: Path) -> None:
    """The member's own code is trusted: its shapes are those of the member, not of the server."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x if float(x.sum()) < 1e9 else -x)

    lying = Server(tmp_path / "north")
    lying.member._model = lying.module = Branching()
    lying.initial = Model(lying.module).own_weights()
    assert lying.agree() == ""
    refused = Server(tmp_path / "policy", Policy(max_mb=0.00001))
    refused.member._model = lying.module
    refused.initial = lying.initial
    assert refused.agree() == "POLICY"


MEASURE = """
import resource, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from tests.attacks.server import Server
lying = Server(Path({folder!r}), model="mlp(hidden=[30000, 30000])")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = lying.agree()
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_no_memory_is_taken(tmp_path: Path) -> None:
    """The model would have 3.6 GB."""
    here = Path(__file__).parent
    paths = [str(here.parents[1]), *sys.path]
    code = MEASURE.format(paths=paths, folder=str(tmp_path / "north"))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    answer, kilobytes = run.stdout.split()
    assert answer == "TERMS"
    assert int(kilobytes) < 200_000


def test_all_parts_can_be_tried_without_memory(tmp_path: Path) -> None:
    """Else an honest method would be refused."""
    model, x = "fedcog_cnn(norm=bn)", np.zeros((40, 1, 16, 16), np.float32)
    data = replace(patients(), x_train=x, y_train=np.arange(40) % 2, x_test=None, mean=0, std=1)
    for name in sorted(parts):
        lying = Server(tmp_path / name, data=data, split="auto", method=name, model=model)
        lying.initial = Model(build(model, (1, 16, 16), 2)).own_weights()
        assert lying.agree() == "", (name, lying.log)


ROUND = """
import resource, sys
sys.path[:0] = {paths!r}
from pathlib import Path
import torch
from kedge.core.model import Model
from kedge.models import build
from kedge.session.session import Broadcast
from tests.attacks.server import Server, code
lying = Server(Path({folder!r}), model="mlp(hidden=[1000])", **{terms!r})
lying.initial = Model(build("mlp(hidden=[1000])", (4,), 2)).own_weights()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer = lying.agree() or code(lying.ask("train", value={{"down": Broadcast(lying.initial, {{}})}}))
print(answer or "TRAINED", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("terms", [{"batch": 200_000}, {"batch": 100, "steps": 200_000}])
def test_a_round_takes_no_memory_beyond_the_data(terms: dict[str, Any], tmp_path: Path) -> None:
    """Of 60 rows, a batch took 2.3 GB, and the numbers of rows of a round 1.3 GB; the largest that
    terms may name would have taken five times as much."""
    here = Path(__file__).parent
    paths = [str(here.parents[1]), *sys.path]
    text = ROUND.format(paths=paths, folder=str(tmp_path / "north"), terms=terms)
    run = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True
    )
    answer, kilobytes = run.stdout.split()
    assert answer == "TERMS"
    assert int(kilobytes) < 250_000


def test_honest_rounds_are_taken(tmp_path: Path) -> None:
    """More rows in a batch than the member has, and many epochs."""
    for name, terms in enumerate(({"batch": 4096}, {"epochs": 500.0}, {"batch": 60, "steps": 999})):
        assert agree(tmp_path / str(name), **terms)[0] == ""
