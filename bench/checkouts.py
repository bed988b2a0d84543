"""Shared code of ``same_bits.py`` and ``same_speed.py``: one process per checkout of kedge.

Names move from version to version. The two scripts look up all names of the package in ``PLACES``
and use them through the functions below that table. After a move, add a place (or an alternative in
the function); the old places still serve older checkouts.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# -- places of names, as module:name; the first that exists is used ------------------------------

PLACES: dict[str, tuple[str, ...]] = {
    "Adam": ("kedge:Adam", "kedge.core.optim:Adam"),
    "Classification": ("kedge:Classification", "kedge.core.task:Classification"),
    "Federation": ("kedge:Federation", "kedge.sim.federation:Federation"),
    "LocalWork": ("kedge:LocalWork", "kedge.sim.federation:LocalWork"),
    "Model": ("kedge:Model", "kedge.core.model:Model"),
    "MultiLabel": ("kedge:MultiLabel", "kedge.core.task:MultiLabel"),
    "Regression": ("kedge:Regression", "kedge.core.task:Regression"),
    "SGD": ("kedge:SGD", "kedge.core.optim:SGD"),
    "Simulation": ("kedge:Simulation", "kedge.sim:Simulation", "kedge.sim.simulation:Simulation"),
    # settings of an engine: engine, workers, chunk, state
    "Execution": (
        "kedge:Execution",
        "kedge.engines:Execution",
        "kedge.engine:Execution",
        "kedge.sim:Execution",
        "kedge.engines.cohort:How",
        "kedge.sim.engine:How",
        "kedge.sim.cohort:How",
    ),
    "Fleet": ("kedge:Fleet", "kedge.sim:Fleet", "kedge.fleet:Fleet", "kedge.sim.fleet:Fleet"),
    # names of parts to their classes
    "registry": (
        "kedge.core.part:parts",
        "kedge.core.parts:parts",
        "kedge.core:parts",
        "kedge.part:parts",
        "kedge.parts:parts",
        "kedge.parts:registry",
    ),
}


BYTES = ("up_bytes", "down_bytes")


class Missing(Exception):
    """A name is in none of its places."""


def find(name: str) -> Any:
    """Import a name of the package.

    Raises:
        Missing: it is in none of its places. A module that exists but fails raises its own error.
    """
    for place in PLACES[name]:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not error.name or not f"{module}.".startswith(f"{error.name}."):
                raise
        except AttributeError:
            continue
    places = ", ".join(PLACES[name])
    raise Missing(f"{name} is in none of {places}; add its place to PLACES in checkouts.py")


# -- use of the package --------------------------------------------------------------------------


def part_texts() -> dict[str, str]:
    """Every part with its smallest setting, as text: ``{"fedcog": "fedcog(samples=6)"}``."""
    registry = find("registry")
    return {name: str(registry[name](**registry[name].tiny)) for name in registry}


def task(name: str, outputs: int) -> Any:
    kinds = {
        "classification": "Classification",
        "multilabel": "MultiLabel",
        "regression": "Regression",
    }
    return find(kinds[name])(outputs)


def optimiser(settings: dict[str, Any]) -> Any:
    """SGD, or another where ``name`` says so."""
    settings = dict(settings)
    return find(settings.pop("name", "SGD"))(**settings)


def make_execution(settings: dict[str, Any]) -> Any:
    """The settings of an engine, or its name if nothing else is set."""
    if set(settings) == {"engine"}:
        return settings["engine"]
    return find("Execution")(**settings)


def simulation(
    federation: Any,
    module: Any,
    method: str,
    *,
    execution: dict[str, Any],
    optim: dict[str, Any],
    work: dict[str, Any],
    model: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Build a simulation; ``options`` are ``per_round``, ``weighting`` and ``seed``."""
    return find("Simulation")(
        federation,
        find("Model")(module, **model or {}),
        method,
        optim=optimiser(optim),
        work=find("LocalWork")(**work),
        engine=make_execution(execution),
        **options,
    )


def arrays(sim: Any) -> dict[str, Any]:
    """The state of a simulation: weights, slots of the server, rows of the clients."""
    return dict(sim.state())


def finish(sim: Any) -> None:
    """Run the surveys after the last round, if the checkout has them."""
    getattr(sim, "finish", lambda: None)()


def results(sim: Any) -> dict[str, Any]:
    """Personal weights and scores, as trees of tensors and numbers. They are compared only if both
    checkouts have them."""
    found: dict[str, Any] = {}
    if hasattr(sim, "personal"):
        found["personal"] = sim.personal()
    if hasattr(sim, "evaluate"):
        scores = sim.evaluate()  # metrics that every checkout has
        found["scores"] = {n: scores[n] for n in ("accuracy", "f1", "rmse", "loss") if n in scores}
    return found


def traffic(totals: Any) -> dict[str, Any]:
    """The bytes of a round, if its totals have them, as a dictionary or as attributes."""
    fields = totals if isinstance(totals, dict) else {n: getattr(totals, n, None) for n in BYTES}
    return {name: fields[name] for name in BYTES if fields.get(name) is not None}


# -- one process with one checkout ---------------------------------------------------------------


class Failed(Exception):
    """The process of a checkout failed."""


class Checkout:
    """A copy of the ``src`` of a checkout, so that edits during the run have no effect."""

    def __init__(self, name: str, folder: Path, copy: Path) -> None:
        self.name, self.copy = name, copy
        source = folder / "src"
        if not (source / "kedge" / "__init__.py").exists():
            raise SystemExit(f"{name}: there is no src/kedge in {folder}")
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a script of this folder with this checkout and one thread."""
        variables = {
            "PYTHONPATH": str(self.copy),
            "PYTHONDONTWRITEBYTECODE": "",  # write bytecode into the copy
            "PYTHONHASHSEED": "0",
            "KEDGE_CHECKOUT": str(self.copy),
            "CUDA_VISIBLE_DEVICES": "",
        }
        variables |= dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
        )
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            env=os.environ | variables,
            cwd=self.copy.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, given: str = "") -> str:
        """Run a script to its end, and return its output."""
        process = self.start(script, *arguments)
        try:
            output, _ = process.communicate(given)
        finally:
            process.kill()
        if process.returncode:
            raise Failed(f"{self.name}: the process failed, status {process.returncode}")
        return output


class Worker:
    """A process that answers line by line, until it is closed."""

    def __init__(self, checkout: Checkout, script: str, *arguments: str) -> None:
        self.name, self._process = checkout.name, checkout.start(script, *arguments)

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has exited; `answer` raises
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self.name}: the process failed, status {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def both(base: Path, here: Path) -> Iterator[tuple[Checkout, Checkout]]:
    """Temporary copies of the two checkouts."""
    with tempfile.TemporaryDirectory(prefix="kedge_") as name:
        folder = Path(name)
        yield (
            Checkout("base", base.resolve(), folder / "base" / "src"),
            Checkout("here", here.resolve(), folder / "here" / "src"),
        )


def this_checkout() -> Path:
    """The checkout of these scripts."""
    return Path(__file__).resolve().parent.parent


def begin() -> None:
    """Set up a process of a checkout: one thread, no warnings; check the place of the package."""
    import torch

    import kedge

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected, actual = Path(os.environ["KEDGE_CHECKOUT"]), Path(str(kedge.__file__))
    if not actual.is_relative_to(expected):
        raise SystemExit(f"kedge is imported from {actual}, not from {expected}")


def stack(**layers: Any) -> Any:
    """A sequential network with named stages."""
    from torch import nn

    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net


def read_names(text: str, known: Sequence[str], kind: str) -> list[str]:
    """The names of a list with commas; all known names for an empty one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SystemExit(f"no {kind} {name!r}; there are: {', '.join(known)}")
    return names or list(known)
