"""``python -m tools.mutants``: see the package's docstring, and ``--help``."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

from tools.mutants import child, report
from tools.mutants.cover import read_map
from tools.mutants.mutate import Mutant, Source, sample
from tools.mutants.tables import Tables, is_survivor
from tools.mutants.trial import Trials

SOURCES = ("src/kedge/core/*.py", "src/kedge/parts/*.py")
#: A class body runs no line in a test, so that no test is known to touch it.
ALWAYS = [
    "tests/parts/test_defaults.py::test_defaults_are_those_of_the_table",
    "tests/core/test_declarations.py::test_a_part_that_declares_nothing_asks_for_nothing",
]


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--files", nargs="*", default=SOURCES, help="sources, as globs")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files or folders, as globs")
    parser.add_argument("--always", nargs="*", default=ALWAYS, help="tests that all face")
    parser.add_argument("--per-file", type=int, default=20, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="forks at a time")
    parser.add_argument("--cap", type=float, default=20.0, help="seconds of tests per mutant")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds per test, at least")
    parser.add_argument("--resume", action="store_true", help="skip mutants in the record")
    parser.add_argument("--survivors", action="store_true", help="skip mutants that were killed")
    parser.add_argument("--named", action="store_true", help="only the faults in named.toml")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--map", action="store_true", help="trace the tests and stop")
    parser.add_argument("--warm", nargs="*", default=["torch", "pytest"], help="imported first")
    parser.add_argument("--root", type=Path, default=Path(), help="folder with src and tests")
    parser.add_argument("--tables", type=Path, default=Path("tools/mutants"))
    parser.add_argument("--page", type=Path, default=Path("docs/mutation.md"))
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args, start = arguments(argv), time.monotonic()
    root = args.root.resolve()
    os.chdir(root)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
    sys.path[:0] = [str(root), str(root / "src")]
    tables = Tables(args.tables, "python -m tools.mutants " + " ".join(argv), args.seed)
    files = sorted({str(p) for glob in args.files for p in Path().glob(glob)})
    sources = {f: Source(f, Path(f).read_text(encoding="utf-8")) for f in files}
    mutants = tables.named(sources)
    if not args.named:
        mutants += [m for s in sources.values() for m in sample(s, args.per_file, args.seed)]
    mutants = list({m.key: m for m in reversed(mutants)}.values())[::-1]
    if args.list:
        for m in mutants:
            print(f"{m.kind:>10}  {m.key}")
        return 0
    child.warm(args.warm)
    print("which test runs which line", flush=True)
    everything = sorted({str(p) for g in (*SOURCES, *args.files) for p in Path().glob(g)})
    lines = read_map(root, everything, args.tests, args.jobs)
    trials = Trials(root, lines, args.cap, args.limit, tuple(args.always))
    if args.map:
        return 0
    done = tables.done(mutants, killed_only=args.survivors) if args.resume or args.survivors else {}
    todo = [m for m in mutants if m.key not in done]
    print(f"{len(todo)} mutants of {len(files)} files", flush=True)
    results = dict(done)
    while todo:
        for number, (mutant, answer) in enumerate(child.pool(todo, trials.run, args.jobs), 1):
            result = results[mutant.key] = outcome(answer)
            if is_survivor(result):
                print(f"{mutant.key}\n    {result}", flush=True)
            else:
                trials.learn(mutant, result.removeprefix("killed: "))
            if number % 25 == 0 or number == len(todo):
                seconds = time.monotonic() - start
                alive = sum(map(is_survivor, results.values()))
                busy = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
                text = f"{seconds:.0f} s, {busy:.0f} s of processors"
                print(f"-- {number} of {len(todo)}, {text}: {alive} survive", flush=True)
                tables.write(mutants, results, seconds, keep=args.named)
        todo = doubtful(trials, sources, mutants, results, args.jobs)
    noticed = sum(not is_survivor(result) for result in results.values())
    again = bool(done) or args.named
    tables.finish(time.monotonic() - start, noticed, len(results), again)
    args.page.write_text(report.page(tables.read(), tables.equivalent()), encoding="utf-8")
    return 0


def outcome(answer: child.Answer) -> str:
    """``killed: test``, ``timeout``, ``survived: n of m tests`` or ``error: text``."""
    if "signal" in answer:
        late = answer["signal"] in ("SIGALRM", "SIGPROF")
        return "timeout" if late else f"killed: {answer['signal']}"
    ((what, text),) = answer.items()
    return f"{what}: {text}"


def doubtful(
    trials: Trials,
    sources: dict[str, Source],
    mutants: list[Mutant],
    results: dict[str, str],
    jobs: int,
) -> list[Mutant]:
    """Mutants that were killed by a test which also fails without them, in a fork like theirs."""
    killer = {m.key: results[m.key].removeprefix("killed: ") for m in mutants}
    tests: dict[str, dict[str, None]] = {}
    for m in mutants:
        if killer[m.key] in trials.map.times and killer[m.key] not in trials.trusted:
            tests.setdefault(m.file, {})[killer[m.key]] = None
    tasks = [(f, sources[f].bytes.decode(), list(names)) for f, names in tests.items()]
    for (file, _, names), answer in child.pool(tasks, trials.clean, jobs):
        failed = answer.get("failed", names)
        trials.trusted.update(names)
        trials.unreliable.update(failed)
        if failed:
            print(f"without a mutant, for {file}: {answer}", flush=True)
    return [m for m in mutants if killer[m.key] in trials.unreliable]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
