"""One identity or more per built-in part, worked out by hand from its paper.

Each module here belongs to the module of the same name in :mod:`kedge.parts`; importing the package
registers them all.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
