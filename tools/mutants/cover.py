"""Which test runs which lines, and how long it takes: one traced run of the tests."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.mutants import child

#: Tests of other things, tests that start programs, tests of this tool; and the 1,300 pairs of
#: parts, a third of the suite's time for what the laws and compositions notice sooner.
SKIPPED = (
    "cli", "bench", "runs", "tools", "docs", "test_docs.py", "test_imports.py",
    "test_public_api.py", "test_dependencies.py", "parts/test_pairs.py",
    "engines/test_workers.py", "engines/test_compiled.py", "models",
)  # fmt: skip
MARKS = {"gpu", "slow", "data", "network"}
#: A test that runs longer than this is not used.
LONGEST = 10.0


class Map:
    """``times`` of tests, and the lines that each runs as bits of a number per file."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.lines: dict[str, dict[str, int]] = {}  # file -> test -> bits

    def add(self, timed: dict[str, Any], lined: dict[str, Any]) -> None:
        """Tests that passed both times."""
        for test in timed.keys() & lined.keys():
            seconds, (_, lines) = timed[test][0], lined[test]
            if seconds < LONGEST:
                self.times[test] = seconds
                for file, bits in lines.items():
                    self.lines.setdefault(file, {})[test] = int(bits, 16)

    def tests(self, file: str, scopes: Iterable[tuple[int, int]]) -> list[str]:
        """Tests that run a line of the first of these ranges in which any line is run."""
        for first, last in scopes:
            wanted = (1 << (last + 1)) - (1 << first)
            found = [t for t, bits in self.lines.get(file, {}).items() if bits & wanted]
            if found:
                return found
        return []


def read_map(root: Path, sources: list[str], globs: Iterable[str], jobs: int) -> Map:
    """The map, from the folder ``.mutants`` as far as sources and tests are the same."""
    tests = sorted((root / "tests").rglob("*.py"))
    wanted = {p for glob in globs for p in root.glob(glob)}
    skip = {root / "tests" / name for name in SKIPPED}
    files = [t for t in tests if t.name.startswith("test_") and not skip & {t, *t.parents}]
    files = [t for t in files if wanted & {t, *t.parents}]
    source, parts = _digest((root / "src").rglob("*.py")), 1 + jobs // 4
    helpers = [t for t in tests if not t.name.startswith("test_")]
    keys = {}
    for file in files:
        own = _digest([file, *(h for h in helpers if h.parent in file.parents)])
        keys[file] = root / ".mutants" / f"{own}-{source}-{parts}.json"
    (root / ".mutants").mkdir(exist_ok=True)
    # each file twice, in its own fork: for the lines and for the times; tracing triples a time
    tasks = [(f, i, traced) for traced in (True, False) for f in files for i in range(parts)]
    missing = [task for task in tasks if not _part(keys[task[0]], *task[1:]).exists()]
    targets = {str(root / s): s for s in sources}

    def work(task: tuple[Path, int, bool]) -> child.Answer:
        recorder = Recorder(targets, task[1], parts, task[2])
        child.run_tests([str(task[0])], recorder)
        return {"tests": recorder.found, "libraries": child.libraries()}

    start, left = time.monotonic(), len(missing)
    for (file, i, traced), answer in child.pool(missing, work, jobs):
        left -= 1
        short = file.relative_to(root)
        if "tests" not in answer:
            print(f"  {short} is not used: {answer}", flush=True)
            continue
        _part(keys[file], i, traced).write_text(json.dumps(answer))
        seconds = time.monotonic() - start
        print(f"  {short}: {len(answer['tests'])} tests; {left} to go, {seconds:.0f} s", flush=True)
    result, libraries = Map(), dict[str, None]()
    for key in keys.values():
        for i in range(parts):
            pair = [_part(key, i, traced) for traced in (False, True)]
            if all(p.exists() for p in pair):
                timed, lined = (json.loads(p.read_text()) for p in pair)
                libraries |= dict.fromkeys(timed["libraries"])
                result.add(timed["tests"], lined["tests"])
    child.warm(libraries)
    return result


class Recorder:
    """Pytest plugin: times or traces every test, and keeps those that pass and start no process.
    Times are of the processor, since other programs may slow this one down."""

    def __init__(self, targets: dict[str, str], part: int, parts: int, traced: bool) -> None:
        self.targets, self.part, self.parts, self.traced = targets, part, parts, traced
        self.found: dict[str, tuple[float, dict[str, str]]] = {}
        self.seen: set[tuple[str, int]] = set()
        self.bad: set[str] = set()
        self.test = ""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
            self.bad.add(self.test)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item
            for item in items[self.part :: self.parts]
            if not MARKS & {mark.name for mark in item.iter_markers()}
        ]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test, self.seen = nodeid, set()
        self.start = time.process_time()
        sys.settrace(self._call if self.traced else None)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:  # skipped ones, too: they run no lines
            self.bad.add(self.test)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        seconds = time.process_time() - self.start
        if nodeid in self.bad:
            return
        bits: dict[str, int] = {}
        for file, line in self.seen:
            bits[file] = bits.get(file, 0) | 1 << line
        lines = {self.targets[file]: f"{b:x}" for file, b in bits.items()}
        self.found[nodeid] = round(seconds, 3), lines

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        # a module or a class body runs once, in whichever test comes first: not recorded
        code = frame.f_code
        return self._line if code.co_filename in self.targets and code.co_flags & 1 else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def _part(key: Path, i: int, traced: bool) -> Path:
    return key.with_suffix(f".{i}-{'lines' if traced else 'times'}.json")


def _digest(paths: Iterable[Path]) -> str:
    text = hashlib.sha256()
    for path in sorted(paths):
        text.update(str(path.name).encode() + path.read_bytes())
    return text.hexdigest()[:16]
