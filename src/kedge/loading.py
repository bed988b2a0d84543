"""Load a file that registers parts, models, partitions or tasks: ``--load FILE.py``."""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kedge.errors import KedgeError, LoadError
from kedge.registry import Registry, additions


class Loaded(NamedTuple):
    """A loaded file and what it registered."""

    path: Path
    sha256: str
    entries: tuple[tuple[Registry[Any], str], ...]

    def names(self, kind: str) -> list[str]:
        """The names it registered of a kind, such as ``"part"``."""
        return sorted(name for registry, name in self.entries if registry.kind == kind)


files: dict[Path, Loaded] = {}
"""The files that this process has loaded; they are recorded in the folder of a run."""


def load_file(name: str | Path) -> Loaded:
    """Run a Python file that registers parts, models, partitions or tasks, or that has classes of
    modules, which bundles name.

    A file that is already loaded and unchanged is not run again. The file may import modules in
    its own folder.

    Returns:
        The path, hash and registrations of the file.

    Raises:
        LoadError: the file cannot be read, fails (with its line), or registers nothing.

    >>> load_file("missing.py")
    Traceback (most recent call last):
    kedge.errors.LoadError: there is no file 'missing.py'; give a Python file that registers ...
    """
    path = Path(name).resolve()
    if not path.is_file():
        raise LoadError(f"there is no file {str(name)!r}; give a Python file that registers a part")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{name} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(source).hexdigest()
    known = files.get(path)
    registered = known and all(entry in registry for registry, entry in known.entries)
    if known and registered and known.sha256 == digest:
        return known
    before = len(additions)
    try:
        module = _execute(source, path, name)
        entries = tuple(additions[before:])
        if not entries and not _has_modules(module):
            raise LoadError(
                f"{name} registers no part, model or partition; put @kedge.register above the "
                "class of a part, or "
                '@kedge.models.models.register("name") above the function of a model'
            )
    except BaseException:
        for registry, entry in additions[before:]:
            registry.remove(entry)
        raise
    files[path] = Loaded(path, digest, entries)
    return files[path]


def load_options() -> str:
    """The command-line options that load the same files in another process."""
    return "".join(f" --load {path}" for path in files)


def _has_modules(loaded: ModuleType) -> bool:
    """Whether a file defines a class of modules of torch."""
    nn = sys.modules.get("torch.nn")
    return nn is not None and any(
        isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == loaded.__name__
        for value in vars(loaded).values()
    )


def _execute(source: bytes, path: Path, name: str | Path) -> ModuleType:
    """Run the source as a module, so that its classes can be pickled and annotations resolved."""
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)  # no `annotations` of ours
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise LoadError(f"{name}{where}: {error.msg}") from None
    except ValueError as error:
        raise LoadError(f"{name} is not Python: {error}") from None
    module_name = f"kedge_file_{path.stem}"
    while module_name in sys.modules and sys.modules[module_name].__file__ != str(path):
        module_name += "_"
    module = ModuleType(module_name)
    module.__file__ = str(path)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
        where = f"{name}, line {line}" if line else str(name)
        kind = "" if isinstance(error, KedgeError) else f"{type(error).__name__}: "
        raise LoadError(f"{where}: {kind}{error}") from error
    return module
