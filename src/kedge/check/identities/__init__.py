"""Identities of the built-in parts, at least one per part, derived by hand from its paper.

Each module covers the module of the same name in :mod:`kedge.parts`. Importing the package
registers them all.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
