"""kedge: federated learning on heterogeneous data.

A method is a sum of parts; each part implements one paper. ``kedge.run("scaffold+fedprox(mu=0.01)",
data="digits")`` runs a method on a named dataset, ``kedge.fit(model, clients)`` on your own model
and data.

Public names are imported on first use, so that ``import kedge`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge._version import __version__ as __version__

if TYPE_CHECKING:
    from kedge.api import Run, compare, fit, load, reproduce, run, sweep, write_report
    from kedge.api.diagnosing import diagnose
    from kedge.api.results import Results
    from kedge.check import Claim, check_part, oracle
    from kedge.core.method import Method, parse
    from kedge.core.model import Model
    from kedge.core.optim import SGD, Adam
    from kedge.core.part import Mean, Out, Part, Stack, Sum, register
    from kedge.core.round import Round
    from kedge.core.task import Batch, Classification, MultiLabel, Regression
    from kedge.core.task_custom import register_metric
    from kedge.core.tree import Weights
    from kedge.core.view import Spec, View
    from kedge.core.work import LocalWork
    from kedge.data.federation import Federation
    from kedge.errors import KedgeError
    from kedge.runs.result import Result
    from kedge.sim.simulation import Simulation
else:
    from importlib import import_module as _import_module

    _PUBLIC = {
        "api": ("Run", "compare", "fit", "load", "reproduce", "run", "sweep", "write_report"),
        "api.diagnosing": ("diagnose",),
        "api.results": ("Results",),
        "check": ("Claim", "check_part", "oracle"),
        "core.method": ("Method", "parse"),
        "core.model": ("Model",),
        "core.optim": ("SGD", "Adam"),
        "core.part": ("Mean", "Out", "Part", "Stack", "Sum", "register"),
        "core.task": ("Batch", "Classification", "MultiLabel", "Regression"),
        "core.task_custom": ("register_metric",),
        "core.tree": ("Weights",),
        "core.round": ("Round",),
        "core.view": ("Spec", "View"),
        "core.work": ("LocalWork",),
        "data.federation": ("Federation",),
        "errors": ("KedgeError",),
        "runs.result": ("Result",),
        "sim.simulation": ("Simulation",),
    }
    _MODULES = {name: f"kedge.{module}" for module, names in _PUBLIC.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import a public name, or a module such as ``kedge.models``, on first use."""
        if name in _MODULES:
            value = getattr(_import_module(_MODULES[name]), name)
            globals()[name] = value
            return value
        if name == "load_model":
            raise AttributeError("kedge.load_model is gone; write kedge.load(FOLDER).model.module")
        if not name.startswith("_"):
            try:
                return _import_module(f"kedge.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"kedge.{name}":
                    raise
        raise AttributeError(f"module 'kedge' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "SGD",
    "Adam",
    "Batch",
    "Claim",
    "Classification",
    "Federation",
    "KedgeError",
    "LocalWork",
    "Mean",
    "Method",
    "Model",
    "MultiLabel",
    "Out",
    "Part",
    "Regression",
    "Result",
    "Results",
    "Round",
    "Run",
    "Simulation",
    "Spec",
    "Stack",
    "Sum",
    "View",
    "Weights",
    "check_part",
    "compare",
    "diagnose",
    "fit",
    "load",
    "oracle",
    "parse",
    "register",
    "register_metric",
    "reproduce",
    "run",
    "sweep",
    "write_report",
]
