"""kedge: federated learning on heterogeneous data.

A method is a sum of parts, each one paper. ``kedge.run("scaffold+fedprox(mu=0.01)",
data="digits")`` runs one by names, ``kedge.fit(model, clients)`` on one's own model and data.
"""

from kedge import parts as _parts  # registers the built-in parts
from kedge._version import __version__ as __version__
from kedge.api import compare, fit, load_model, run, sweep
from kedge.check import Claim, check_part, oracle
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Adam
from kedge.core.part import Mean, Out, Part, Stack, Sum, register
from kedge.core.task import Batch, Classification, MultiLabel, Regression
from kedge.core.tree import Weights
from kedge.core.view import Round, Spec, View
from kedge.errors import KedgeError
from kedge.data.federation import Federation, LocalWork
from kedge.runs.result import Result
from kedge.sim.simulation import Simulation

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
    "Round",
    "Simulation",
    "Spec",
    "Stack",
    "Sum",
    "View",
    "Weights",
    "check_part",
    "compare",
    "fit",
    "load_model",
    "oracle",
    "parse",
    "register",
    "run",
    "sweep",
]

del _parts
