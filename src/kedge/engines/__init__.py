"""Engines compute rounds: loop, vector and reference, and the machinery that makes them fast.

Importing this package registers the engines. A new engine is one class in one file, imported here.
"""

from kedge.engines import loop, vector, workers
from kedge.engines.engine import Engine, engines, make_engine
from kedge.engines.execution import Execution

__all__ = ["Engine", "Execution", "engines", "make_engine"]

del loop, vector, workers
