"""Runs in a stranger's hands: what looks at them, within bounds of time and memory."""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kedge

SECONDS, MEGABYTES = 2, 500  # of one look at a run
#: Values in the place of any other.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3.5, 1e308, float("nan"), float("inf"), 10**12, 2**62, 2**63, 10**299,
    "", "x", "../..", "\x00", "kedge", [], {}, [[]], [None], ["x"], [1, "x"], {"a": 1}, [0] * 100,
    {"x": []}, [float("nan")], "mlp(hidden=[9999999])", "resnet18", "hf:x", "os:system",
)  # fmt: skip


class Slow(Exception):
    """It takes too long."""


@contextmanager
def bounded(seconds: int = SECONDS, megabytes: int = MEGABYTES) -> Iterator[None]:
    """Raise if the block takes more memory, or ten times as long: the machine may be busy."""

    def stop(*_: object) -> None:
        raise Slow(f"over {10 * seconds} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, known)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert taken < megabytes, f"{taken:.0f} MB"


def load(run: Path) -> None:
    """As a program of a user looks at a run."""
    found = kedge.load(run)
    assert repr(found)
    assert str(found)
    found.frame()
    model = found.model
    model.predict(np.zeros((2, 1, 8, 8), "uint8"))
    if found.has_personal:
        found.personal(0)


def report(run: Path) -> None:
    kedge.write_report(run, run.parent / "report.html")


LOOKS: dict[str, Callable[[Path], None]] = {"load": load, "report": report}


def mutated(value: Any, rng: random.Random) -> Any:
    """JSON with one value that is another, missing, or deeper."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        one = stack.pop()
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        for key in keys:
            places.append((one, key))
            if isinstance(one[key], (dict, list)):
                stack.append(one[key])
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1:
            holder[key] = [holder[key]]
        case _:
            holder[key] = rng.choice(VALUES)
    return value


def mutate_file(path: Path, rng: random.Random) -> None:
    """Change some bytes of a file, cut it, or change a value of its JSON."""
    content = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    if kind == 0:
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == 1:
        for _ in range(rng.randrange(1, 5)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
    elif path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        header = json.dumps(mutated(json.loads(content[8 : 8 + size]), rng)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    elif path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(mutated(json.loads(lines[at]), rng))
        path.write_text("\n".join([*lines, ""]))
    elif path.suffix == ".json":
        path.write_text(json.dumps(mutated(json.loads(content), rng)))
    else:  # TOML
        lines = content.decode().splitlines()
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0]
        word = rng.choice(["-1", "1e308", "nan", "inf", '""', "[]", "[[]]", "{}", "true", '"x"'])
        lines[at] = f"{key} = {word}"
        path.write_text("\n".join(lines))
