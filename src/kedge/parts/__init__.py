"""All built-in parts, one family of papers per file. Importing this package registers them."""

import importlib
import pkgutil

from kedge.core.part import parts

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> object:
    """``kedge.parts.SCAFFOLD``: every part by its class name."""
    for key in parts:
        if parts[key].__name__ == name:
            return parts[key]
    raise AttributeError(f"kedge.parts has no part {name!r}")
