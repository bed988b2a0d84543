"""Forks of a warm process: a test run in a process where one module may be another."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Task = TypeVar("Task")
Answer = dict[str, Any]
#: The plugins of others stay out: xdist would start processes of its own.
PYTEST = ("-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:unraisableexception")
MEMORY = 12 * 2**30  # a mutant that asks for more fails
_own = Path()  # the folder of this fork


def pool(
    tasks: Iterable[Task], work: Callable[[Task], Answer], jobs: int
) -> Iterator[tuple[Task, Answer]]:
    """Yield each task with its answer as it ends, from ``jobs`` forks at a time. A fork that is
    ended by a signal answers ``{"signal": name}``."""
    waiting, running = iter(tasks), dict[int, tuple[Task, Path]]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no fork is left behind
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    gc.collect()
    gc.freeze()  # objects of this process are not copied when a fork collects garbage
    number = 0
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)) is not None:
                number += 1
                own = folder / str(number)
                own.mkdir()
                running[_fork(work, task, own)] = task, own
            if not running:
                return
            pid, status = os.wait()
            task, own = running.pop(pid)
            answer = own / "answer.json"
            if answer.exists():
                result = json.loads(answer.read_text())
            elif os.WIFSIGNALED(status):
                result = {"signal": signal.Signals(os.WTERMSIG(status)).name}
            else:
                result = {"error": (own / "log").read_text(errors="replace")[-2000:]}
            shutil.rmtree(own, ignore_errors=True)
            yield task, result
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _fork(work: Callable[[Task], Answer], task: Task, own: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Python warns of threads, of which libraries have idle ones
        pid = os.fork()
    if pid:
        return pid
    global _own
    _own = own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(own / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        reply(work(task))
    except BaseException:  # noqa: BLE001  the process ends here in any case
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def reply(answer: Answer) -> NoReturn:
    """End the process with this answer, at once and without cleaning up."""
    draft = _own / "draft.json"
    draft.write_text(json.dumps(answer))
    draft.rename(_own / "answer.json")
    os._exit(0)


def run_tests(files: Iterable[str], *plugins: object) -> int:
    """Pytest's exit code."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return int(pytest.main([*PYTEST, *files], plugins=list(plugins)))


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):  # type: ignore[misc]
    """Imports one file with another text."""

    def __init__(self, path: Path, source: str) -> None:
        self.file, self.source, self.used = path, source, False
        super().__init__("", str(path))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.rpartition(".")[2] not in (self.file.stem, self.file.parent.name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or Path(spec.origin) != self.file:
            return None
        self.name = name
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=spec.submodule_search_locations
        )

    def get_code(self, fullname: str) -> Any:
        self.used = True
        return compile(self.source, str(self.file), "exec", dont_inherit=True)


def install(change: Changed) -> None:
    sys.meta_path.insert(0, change)


def warm(names: Iterable[str]) -> None:
    """Import libraries, and keep torch to one thread: forks of a process with more would hang."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  a test may import what cannot be imported by itself
            continue
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def libraries() -> list[str]:
    """Modules of this process that are neither the project's nor its tests'."""
    roots = tuple({sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")})
    return [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(roots)
        and not name.startswith(("__m", "torch._inductor", "torch._dynamo", "triton", "_pytest.py"))
    ]
