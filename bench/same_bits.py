"""Check that two checkouts compute the same bits: every part, on both engines, with both norms.

    python bench/same_bits.py BASE [HERE] [--parts a,b] [--engines loop,vector] [--list]

BASE and HERE are folders with ``src``; HERE is by default the checkout of this script. Each of
them gets one process with one thread on the CPU. It runs two rounds of every row in float32: a tiny
problem with clients of different sizes, three of five per round. The rows are FedAvg and all parts
with their ``tiny`` setting (plain SGD with BatchNorm, momentum with GroupNorm), some sums of parts,
and other executions, models, data and optimisers.

The arrays of ``Simulation.state()`` are compared: weights, slots of the server, rows of the
clients. Personal weights, scores and bytes are compared if both checkouts have them. A row that
cannot be run is compared by the type of its error. The table lists the rows that differ, and their
largest difference relative to the largest value; the last line is 'N of M equal'. The exit status
is 1 if any row differs. ``--ignore-names`` compares arrays regardless of their names, for a state
whose names have changed.

``--parts`` takes names from the first column of ``--list``, including those of other rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkouts

ENGINES = ("loop", "vector")
ROUNDS, PER_ROUND, SIZES = 2, 3, (5, 9, 14, 6, 11)
PLAIN = {"lr": 0.05}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
SUMS = (
    ("scaffold", "fedprox"),
    ("fedimpro", "scaffold"),
    ("moon", "feddyn"),
    ("fedcog", "fednova"),
    ("flboost", "scaffold"),
)


@dataclass(frozen=True)
class Row:
    """One run, as text and numbers, so that both checkouts get the same."""

    what: str
    method: str
    engine: str
    net: str = "bn"  # bn, gn, none, dropout or module, see `network`
    optim: dict[str, Any] = field(default_factory=lambda: PLAIN)
    execution: dict[str, Any] = field(default_factory=dict)  # besides the engine
    model: dict[str, Any] = field(default_factory=dict)  # BatchNorm policy, precision
    work: dict[str, Any] = field(default_factory=dict)  # besides the size of a batch
    weighting: str = "size"
    task: str = "classification"
    augment: str = ""  # if not empty, images are bytes that are normalised
    seeds: int = 1  # several seeds train as a fleet
    rates: bool = False  # each seed has its own learning rate

    @property
    def name(self) -> str:
        return f"{self.what:22} {self.engine:7} {self.net}"


def rows(texts: dict[str, str]) -> Iterator[Row]:
    """All rows for the parts of a checkout; ``texts`` are their tiny settings by name."""
    texts = {"fedavg": "fedavg"} | texts
    nets = (("bn", PLAIN), ("gn", MOMENTUM))
    for what, text in texts.items():
        yield from (Row(what, text, e, net, optim) for e in ENGINES for net, optim in nets)
    for names in SUMS:
        if all(name in texts for name in names):
            what, text = "+".join(names), "+".join(texts[name] for name in names)
            yield from (Row(what, text, e, net, optim) for e in ENGINES for net, optim in nets)
    for e in ENGINES:
        yield from _other_rows(texts, e)
    for part in ("fedavg", "scaffold", "fedcog"):
        if part in texts:
            yield Row(f"workers:{part}", texts[part], "loop", execution={"workers": 2})
            yield Row(f"chunk:{part}", texts[part], "vector", execution={"chunk": 2})
    if "fedbr" in texts:
        yield Row("workers:fedbr", texts["fedbr"], "loop", "gn", execution={"workers": 2})


def _other_rows(texts: dict[str, str], e: str) -> Iterator[Row]:
    """Other executions, models, data and optimisers, on one engine."""
    for policy in ("local", "frozen", "batch"):
        yield Row(f"batchnorm:{policy}", "fedavg", e, model={"batchnorm": policy})
    for net in ("bn", "gn", "none"):
        yield Row("bf16", "fedavg", e, net, model={"precision": "bf16"})
    yield Row("dropout", "fedavg", e, "dropout", MOMENTUM)
    for net in ("bn", "none"):
        yield Row("augment", "fedavg", e, net, augment="crop(2)+flip")
    yield Row("bytes", "fedavg", e, augment="none")
    yield Row("adam", "fedavg", e, optim={"name": "Adam", "lr": 0.01, "weight_decay": 0.01})
    nesterov = {"nesterov": True, "weight_decay": 0.01, "clip": 0.5, "schedule": "exponential(0.9)"}
    yield Row("nesterov", "fedavg", e, optim=MOMENTUM | nesterov)
    work = {"steps": 3, "replacement": True}
    yield Row("uniform", "fedavg", e, work=work, weighting="uniform")
    for task in ("multilabel", "regression"):
        yield Row(f"task:{task}", "fedavg", e, task=task)
    variants = {
        "fleet": ("scaffold",),
        "host": ("scaffold",),
        "module": ("moon",),
        "none": ("fedavg", "fedcog", "fedsam", "fedtr", "moon", "scaffold"),
    }
    for kind, names in variants.items():
        for name in names:
            if name not in texts:
                continue
            what, text = f"{kind}:{name}", texts[name]
            if kind == "fleet":
                yield Row(what, text, e, seeds=2)
                yield Row(f"rates:{name}", text, e, seeds=2, rates=True)
            elif kind == "host":
                yield Row(what, text, e, execution={"state": "host"})
            else:  # without norms the loop uses another memory format
                yield Row(what, text, e, kind, MOMENTUM)


# -- the process of one checkout -----------------------------------------------------------------


def network(kind: str, outputs: int) -> Any:
    """Convolution, pool | hidden layer | head, for 8x8 images with one channel."""
    import torch
    from torch import nn

    class Module(nn.Module):
        """Not an ``nn.Sequential``; its head is ``fc``."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.hidden = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(16, 6)
            self.fc = nn.Linear(6, outputs)

        def forward(self, x: Any) -> Any:
            maps = nn.functional.avg_pool2d(torch.tanh(self.conv(x)), 4)
            return self.fc(torch.tanh(self.hidden(maps.flatten(1))))

    torch.manual_seed(0)
    if kind == "module":
        return Module()
    norm = {"bn": nn.BatchNorm2d(4), "gn": nn.GroupNorm(2, 4)}.get(kind, nn.Identity())
    first = [nn.Conv2d(1, 4, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(4)]
    second = [nn.Flatten(), nn.Linear(16, 6), nn.Tanh()]
    if kind == "dropout":
        first, second = [*first, nn.Dropout(0.25)], [*second, nn.Dropout(0.5)]
    return checkouts.stack(
        stage1=nn.Sequential(*first), stage2=nn.Sequential(*second), head=nn.Linear(6, outputs)
    )


def federation(task: str, augment: str) -> Any:
    """Images of three classes; each client holds mostly one class."""
    import torch

    draw = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    y = torch.randint(0, 3, (total,), generator=draw)
    x = 0.7 * torch.randn(total, 1, 8, 8, generator=draw)
    x = x + torch.randn(3, 1, 8, 8, generator=draw)[y]
    order = torch.argsort(y + 1.5 * torch.rand(total, generator=draw))
    labels, outputs = y, 3
    if task == "multilabel":
        labels = torch.stack([y == 0, y != 1, y == 2], 1).float()
    elif task == "regression":
        labels, outputs = y.float() - 1.0, 1
    options: dict[str, Any] = {}
    if augment:
        x = (x * 40 + 128).clamp(0, 255).to(torch.uint8)
        options = {"moments": ([0.5], [0.25]), "augment": augment}
    clients = torch.split(order, list(SIZES))
    learning_task = checkouts.task(task, outputs)
    federation_class = checkouts.find("Federation")
    return federation_class(x, labels, clients, learning_task, test=(x, labels), **options)


def compute(row: Row) -> dict[str, Any]:
    """Run a row, and return its final arrays by name."""
    outputs = 1 if row.task == "regression" else 3
    sims = [
        checkouts.simulation(
            federation(row.task, row.augment),
            network(row.net, outputs),
            row.method,
            execution={"engine": row.engine} | row.execution,
            optim=row.optim | ({"lr": 0.05 * (1 + seed)} if row.rates else {}),
            work={"batch": 5} | row.work,
            model=row.model,
            per_round=PER_ROUND,
            weighting=row.weighting,
            seed=seed,
        )
        for seed in range(row.seeds)
    ]
    found: dict[str, Any] = {}
    run = checkouts.find("Fleet")(sims).run_round if row.seeds > 1 else sims[0].run_round
    for i in range(ROUNDS):
        returned = run()
        for s, totals in enumerate(returned if row.seeds > 1 else [returned]):
            for name, value in checkouts.traffic(totals).items():
                found[f"traffic/{s}/{i}/{name}"] = value
    for s, sim in enumerate(sims):
        checkouts.finish(sim)
        found |= {f"state/{s}/{name}": x for name, x in checkouts.arrays(sim).items()}
        found |= flat(checkouts.results(sim), lambda path, s=s: path.replace("/", f"/{s}/", 1))
    return {name: as_tensor(value) for name, value in found.items()}


def flat(tree: Any, name: Callable[[str], str], path: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and tuples, by ``name(path)``."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (tuple, list)):
        items = zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    else:
        return {name(path): tree}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= flat(value, name, f"{path}/{key}" if path else str(key))
    return found


def as_tensor(value: Any) -> Any:
    """A leaf as a tensor on the CPU."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().clone()
    return torch.tensor(value, dtype=torch.float64)


def digest(x: Any) -> str:
    """A hash of the type, shape and bytes of an array."""
    import torch

    text = f"{x.dtype} {tuple(x.shape)} ".encode()
    data = x.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(text + data).hexdigest()


def worker(folder: Path, given: str) -> None:
    """Run the given rows and print their hashes; for ``LIST``, print the rows of this checkout."""
    import torch

    checkouts.begin()
    if given == "LIST":
        print(json.dumps([asdict(row) for row in rows(checkouts.part_texts())]))
        return
    found, arrays = {}, {}
    for row in (Row(**settings) for settings in json.loads(given)):
        start = time.perf_counter()
        try:
            arrays[row.name] = compute(row)
            found[row.name] = {"hashes": {n: digest(x) for n, x in arrays[row.name].items()}}
        except Exception as error:  # noqa: BLE001  (errors are compared, too)
            text = (str(error).strip().splitlines() or [""])[0]
            found[row.name] = {"error": type(error).__name__, "text": text}
        found[row.name]["seconds"] = time.perf_counter() - start
    torch.save(arrays, folder / "arrays.pt")
    print(json.dumps(found))


# -- the comparison ------------------------------------------------------------------------------


def shared(a: dict[str, str], b: dict[str, str], names_count: bool) -> tuple[Any, Any]:
    """The hashes of two rows that are compared: the state, and the other groups that both have."""
    groups = {name.split("/")[0] for name in a} & {name.split("/")[0] for name in b} | {"state"}
    some, other = ({n: h for n, h in x.items() if n.split("/")[0] in groups} for x in (a, b))
    if names_count:
        return some, other
    return (Counter((n.split("/")[0], h) for n, h in x.items()) for x in (some, other))


def difference(base: dict, here: dict, names_count: bool, gap: Callable[[list[str]], str]) -> str:
    """The difference of two rows as text; empty if there is none."""
    if "error" in base or "error" in here:
        if base.get("error") == here.get("error"):
            return ""
        errors = [
            f"{x['error']}: {x['text']}" if "error" in x else "no error" for x in (base, here)
        ]
        return f"base: {errors[0]}; here: {errors[1]}"
    a, b = shared(base["hashes"], here["hashes"], names_count)
    if a == b:
        return ""
    a, b = base["hashes"], here["hashes"]
    known = [n for n in a if n in b]
    differing = sorted((n for n in known if a[n] != b[n]), key=lambda n: (n[:5] != "state", n))
    counts = Counter(n.split("/")[0] for n in differing)
    total = Counter(n.split("/")[0] for n in known)
    words = [f"{n} {counts[n]}/{total[n]}" for n in sorted(counts)]
    for where, some, other in (("base", a, b), ("here", b, a)):
        only = sorted(n for n in some if n not in other)
        if only:
            words.append(f"{len(only)} only in {where} (the first: {only[0]})")
    if differing:
        words.append(f"{gap(differing)}, the first: {differing[0]}")
    return ", ".join(words)


def largest(a: Any, b: Any) -> float:
    """The largest difference of two arrays, relative to the largest value of the first."""
    if a.shape != b.shape:
        return float("inf")
    x, y = a.double(), b.double()
    scale = float(x.abs().max()) if x.numel() else 0.0
    return float((x - y).abs().nan_to_num(float("inf")).max()) / (scale or 1.0)


class Gaps:
    """The largest difference of arrays, which are loaded on first use."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self._arrays = folders, None

    def __call__(self, row: str, names: list[str]) -> str:
        import torch

        if self._arrays is None:
            self._arrays = [torch.load(f / "arrays.pt") for f in self.folders]
        base, here = (x[row] for x in self._arrays)
        return f"by {max(largest(base[n], here[n]) for n in names):.1e}"


def compare(args: argparse.Namespace) -> int:
    with checkouts.both(args.base, args.here) as pair:
        listing = pair[0].run("same_bits.py", "--worker", given="LIST")
        every = [Row(**settings) for settings in json.loads(listing)]
        parts = set(
            checkouts.read_names(args.parts, list(dict.fromkeys(r.what for r in every)), "row")
        )
        engines = set(checkouts.read_names(args.engines, ENGINES, "engine"))
        selected = [row for row in every if row.what in parts and row.engine in engines]
        if args.list:
            print("\n".join(f"{row.name:40} {row.method}" for row in selected))
            return 0
        given, found, seconds = json.dumps([asdict(row) for row in selected]), [], []
        for checkout in pair:
            start = time.perf_counter()
            text = checkout.run("same_bits.py", "--worker", given=given)
            found.append(json.loads(text))
            seconds.append(time.perf_counter() - start)
        gaps = Gaps([c.copy.parent for c in pair])
        equal = 0
        for row in selected:
            one, other = (x[row.name] for x in found)
            words = difference(
                one, other, not args.ignore_names, lambda names, row=row: gaps(row.name, names)
            )
            equal += not words
            if words:
                print(f"{row.name:40} {words}")
        if args.slowest:
            slow = sorted(selected, key=lambda row: -found[0][row.name]["seconds"])[: args.slowest]
            for row in slow:
                print(f"{row.name:40} {found[0][row.name]['seconds']:.2f} s")
        _print_notes(found, seconds)
        print(f"{equal} of {len(selected)} equal")
        return 0 if equal == len(selected) else 1


def _print_notes(found: list[dict[str, Any]], seconds: list[float]) -> None:
    """Print rows that fail on both sides, times, and results that only one side has."""
    errors = [
        {n: f"{x['error']}: {x['text']}" for n, x in rows.items() if "error" in x} for rows in found
    ]
    for name in (n for n in errors[0] if n in errors[1]):
        print(f"{name:40} fails on both sides: {errors[0][name]}")
    print(f"base {seconds[0]:.0f} s, here {seconds[1]:.0f} s")
    groups = [
        {name.split("/")[0] for x in rows.values() for name in x.get("hashes", ())}
        for rows in found
    ]
    for name in sorted(groups[0] ^ groups[1]):
        print(f"not compared: {name}, which only one side has (see checkouts.py)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("here", type=Path, nargs="?", default=checkouts.this_checkout())
    parser.add_argument("--parts", default="", help="names from --list, separated by commas")
    parser.add_argument("--engines", default="", help="loop or vector")
    parser.add_argument("--list", action="store_true", help="list the rows without running them")
    parser.add_argument(
        "--ignore-names", action="store_true", help="compare arrays regardless of names"
    )
    parser.add_argument(
        "--slowest", type=int, default=0, help="also list so many of the slowest rows"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(Path.cwd(), sys.stdin.read())
        return 0
    if args.base is None:
        parser.error("BASE is missing: the folder of a checkout")
    try:
        return compare(args)
    except checkouts.Failed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
