"""The page of errors: every class, a message that a small mistake brings, and what to do.

Messages are not written down: each example makes its mistake when the page is built, and the page
has what kedge then says. A class without an example fails the build.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.site.computed import kept
from tools.site.markdown import markdown
from tools.site.templates import render

import kedge
import kedge.cli.app  # imports what defines further classes
from kedge.check.problems import images
from kedge.core.part import Part, parts
from kedge.data.datasets import load
from kedge.errors import DataError, KedgeError
from kedge.limits import out_of_memory
from kedge.loading import load_file
from kedge.models import build
from kedge.session import wire
from kedge.session.terms import Terms
from kedge.settings import Config


class Example(NamedTuple):
    """A mistake: what was typed or written, the function that makes it, and what to do."""

    typed: str
    make: Callable[[], Any]
    todo: str


@dataclass(frozen=True)
class Wild(Part):
    """A part whose term is a vector, which is wrong."""

    def term(self, v: Any, params: Any, batch: Any, out: Any) -> Any:
        return out.logits.sum(1)


@dataclass(frozen=True)
class Pushed(parts["fedprox"]):  # type: ignore[misc]
    """FedProx with a wrong sign."""

    def term(self, v: Any, params: Any, batch: Any, out: Any) -> Any:
        return -super().term(v, params, batch, out)


#: Classes that no user sees: kedge catches them itself.
INTERNAL = {"OutOfTime"}
QUICK: dict[str, Any] = {"clients": 3, "rounds": 2, "seeds": (0,), "engine": "loop"}


def _interrupt() -> None:
    from kedge.history.folder import request_stop

    def stop(*_: Any) -> None:
        request_stop(Path("runs/digits"))

    kedge.run("fedavg", data="digits", out="runs/digits", watch=stop, **QUICK)


def _write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def _pause() -> None:
    """A federation of two members, of which one is gone after it has joined."""
    from kedge.federation.coordinator.coordinator import Coordinator
    from kedge.federation.coordinator.rules import Rules
    from kedge.federation.member.member import Member
    from kedge.federation.messages import Direct

    rows = "\n".join(f"{i % 7},{i % 5},{'yes' if i % 3 else 'no'}" for i in range(30))
    for name in ("north", "south"):
        _write(f"{name}.csv", f"age,dose,sick\n{rows}\n")
    members = {n: Member(n, f"{n}.csv(label=sick)", f"members/{n}") for n in ("north", "south")}
    nodes: dict[str, Any] = {name: member.handle for name, member in members.items()}
    config = Config(
        method="fedavg", data="members", clients=2, rounds=2, seeds=(0,), model="linear"
    )
    rules = Rules(wait_s=0.0, join_s=0.01, minimum=1.0, attempts=1)

    def leave(line: str) -> None:
        if line.startswith("round 1 of"):
            nodes.pop("south")

    Coordinator(config, Direct(nodes), "runs/real", rules=rules, report=leave).run()


EXAMPLES: dict[str, Example] = {
    "UnknownName": Example(
        "kedge run --method scafold", lambda: kedge.parse("scafold"),
        "Take the name that is suggested, or list the names with the command at the end.",
    ),
    "FieldError": Example(
        'kedge run --method "fedprox(mu=-0.1)"', lambda: kedge.parse("fedprox(mu=-0.1)"),
        "`kedge show NAME` has the type, the range and the default of every field.",
    ),
    "SeveralErrors": Example(
        'kedge run --method "fedprox(mu=-0.1)+scafold"',
        lambda: kedge.parse("fedprox(mu=-0.1)+scafold"),
        "Each line is an error of its own; correct them all at once.",
    ),
    "ConfigError": Example(
        "kedge run --rounds 0 --momentum 1.5", lambda: Config(rounds=0, momentum=1.5),
        "Each line names a setting. All of them: [settings](settings.md).",
    ),
    "GrammarError": Example(
        'kedge run --method "fedprox(mu=0.1"', lambda: kedge.parse("fedprox(mu=0.1"),
        "A method, model or partition is written `name(option=value)`, a sum with `+`.",
    ),
    "IncompatibleError": Example(
        "kedge run --method scaffold+scaffold", lambda: kedge.parse("scaffold+scaffold"),
        "Leave one of them out. The page of a method lists what it does not combine with.",
    ),
    "TwoAggregators": Example(
        "kedge run --method fednova+krum", lambda: kedge.parse("fednova+krum"),
        "Keep one of the two: only one part may say how updates are averaged.",
    ),
    "ModelError": Example(
        "kedge run --model lenet5 --data heart.csv", lambda: build("lenet5", (13,), 2),
        "Take a model for this kind of input, or `--model auto`.",
    ),
    "DataError": Example(
        "kedge run --data hospitals.csv", lambda: load("hospitals.csv"),
        "The message names the file, and where there is one the row and the column. The guide: "
        "[data](../data.md).",
    ),
    "MissingValues": Example(
        'kedge run --data "heart.csv(label=sick)"',
        lambda: load(_write("heart.csv", "age,sick\n61,yes\n,no\n48,no\n") + "(label=sick)"),
        "Fill the gaps in the file, or say how: `missing=mean`, `median`, `indicator` or `drop`.",
    ),
    "OneClass": Example(
        'kedge run --data "heart.csv(label=sick)"',
        lambda: load(_write("heart.csv", "age,sick\n61,yes\n55,yes\n") + "(label=sick)"),
        "A classifier needs at least two classes: check the label column.",
    ),
    "SeveralDataErrors": Example(
        'kedge run --data "hospitals(label=sick)"', lambda: _two_bad_files(),
        "Each line is a problem of its own; the last line says what helps against all of them.",
    ),
    "PartitionError": Example(
        'kedge run --partition "dirichlet(0.1, minimum=500)" --clients 20',
        lambda: kedge.run(
            "fedavg", partition="dirichlet(0.1, minimum=500)", **QUICK | {"clients": 20}
        ),
        "Ask for fewer clients or a smaller minimum. `kedge partition` draws one without training.",
    ),
    "LoadError": Example(
        "kedge run --load mine.py --method tether",
        lambda: load_file(_write("mine.py", "import kedge\n\nkedge.regster\n")),
        "Correct the file at the line that is named; it must register something.",
    ),
    "HookError": Example(
        "a part whose `term` returns a vector",
        lambda: images().simulate(Wild(), "loop").run_round(),
        "The hook, the part and what was expected are named; [`Part`][kedge.core.part.Part] says "
        "what each hook returns.",
    ),
    "NotFinite": Example(
        "kedge run --lr 1e30", lambda: kedge.run("fedavg", data="digits", lr=1e30, **QUICK),
        "Lower the learning rate or clip gradients: `--clip 10`. The value of every term of the "
        "loss shows which one grew.",
    ),
    "OutOfMemory": Example(
        "a run that is too large for the machine",
        lambda: _raise(out_of_memory(MemoryError("Unable to allocate 900 GiB for an array"),
                                     "reading data")),
        "Lower what the message names. On a GPU kedge first tries fewer clients at once by itself.",
    ),
    "WireError": Example(
        "a message of another program", lambda: wire.unpack(b"GET / HTTP/1.1", "reply"),
        "Use the same release of kedge everywhere; a message that was cut off is sent again.",
    ),
    "TermsError": Example(
        "terms of another release", lambda: Terms.from_json('{"format": 0}'),
        "The members of a federation must agree on settings and data: same release, same columns.",
    ),
    "Paused": Example(
        "a federation of two in which one member is gone", _pause,
        "Bring the members back and type the command at the end: the run goes on.",
    ),
    "CheckFailed": Example(
        "kedge check pushed, a FedProx with a wrong sign",
        lambda: kedge.check_part(Pushed()).raise_if_failed(),
        "Each line is a law or an identity with what was expected and what was found.",
    ),
    "Interrupted": Example(
        "Ctrl-C, or *Stop* on the board", _interrupt,
        "Nothing is lost. The message has the options that continue the run.",
    ),
}  # fmt: skip


#: What people who bring files of their own meet first, by a short title.
FILES: dict[str, Example] = {
    "No label column": Example(
        "kedge diagnose hospitals", lambda: _hospitals("age,sick\n61,yes\n48,no\n", ""),
        "Name the column to predict: `hospitals(label=sick)`.",
    ),
    "Not UTF-8": Example(
        "a file that Excel saved as *CSV* with another encoding",
        lambda: _hospitals("ward,sick\nKühl,yes\nWarm,no\n", "(label=sick)", "latin-1"),
        "Save it as *CSV UTF-8*, or convert it: "
        "`iconv -f WINDOWS-1252 -t UTF-8 old.csv > new.csv`.",
    ),
    "A column of free text, codes or names": Example(
        'kedge diagnose "hospitals(label=sick)"',
        lambda: _hospitals(
            "note,sick\n" + "".join(f"seen on day {i},{'no' if i % 2 else 'yes'}\n"
                                    for i in range(40)), "(label=sick)"),
        "`drop=note` leaves it out, several with `drop=[note,code]`; `id=patient` names the rows. "
        "Codes can be kept in groups: the first letter of a diagnosis, for instance.",
    ),
    "A decimal comma": Example(
        'kedge diagnose "hospitals(label=sick)"',
        lambda: _hospitals('dose,sick\n"1,5",yes\n"2,5",no\n3,no\n', "(label=sick)"),
        "Decimal commas are read in files with semicolons. In others, write points.",
    ),
    "A column that one file calls otherwise": Example(
        'kedge diagnose "hospitals(label=sick)"',
        lambda: _hospitals("crp,sick\n1,yes\n2,no\n", "(label=sick)",
                           south="CRP,sick\n1,yes\n2,no\n"),
        "Columns may be in any order, but have the same names in all files.",
    ),
    "Dates whose day and month cannot be told apart": Example(
        'kedge diagnose "hospitals(label=sick)"',
        lambda: _hospitals("visit,sick\n01/02/2024,yes\n03/04/2024,no\n", "(label=sick)"),
        "Write dates as `2024-02-01`.",
    ),
}  # fmt: skip


def _hospitals(text: str, options: str, encoding: str = "utf-8", south: str = "") -> None:
    """Load a folder of two files, which are equal unless ``south`` is given."""
    Path("hospitals").mkdir()
    Path("hospitals/north.csv").write_text(text, encoding=encoding)
    _write("hospitals/south.csv", south or text)
    load(f"hospitals{options}")


def file_message(title: str) -> str:
    """What kedge says about the mistake of an example of ``FILES``."""
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        try:
            FILES[title].make()
        except DataError as error:
            return str(error)
    raise ValueError(f"the example {title!r} brings no error")


def _two_bad_files() -> None:
    Path("hospitals").mkdir()
    _write("hospitals/north.csv", "age,sick\n61,yes\n,no\n48,no\n")
    _write("hospitals/south.csv", "age,dose,sick\n61,1,yes\n70,2,no\n")
    load("hospitals(label=sick)")


def _raise(error: Exception) -> None:
    raise error


def classes() -> list[type[KedgeError]]:
    """All error classes in the order of their tree, the base first."""
    found: list[type[KedgeError]] = [KedgeError]
    for cls in KedgeError.__subclasses__():
        found += _tree(cls)
    return [c for c in found if c.__module__.startswith("kedge.") and c.__name__ not in INTERNAL]


def _tree(cls: type[KedgeError]) -> Iterator[type[KedgeError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def message(name: str) -> str:
    """What kedge says about the mistake of an example."""
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        try:
            EXAMPLES[name].make()
        except KedgeError as error:
            if type(error).__name__ != name:
                raise ValueError(
                    f"the example of {name} brings {type(error).__name__}: {error}"
                ) from error
            return str(error).replace(str(Path.home()), "~")
    raise ValueError(f"the example of {name} brings no error")


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Work in a folder, without warnings and output."""
    before = Path.cwd()
    os.chdir(folder)
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(quiet):
                yield
    finally:
        os.chdir(before)


def messages(cache_folder: Path | None = None) -> dict[str, str]:
    """The message of every example; kept as long as the source is the same."""
    for cls in classes()[1:]:
        if cls.__name__ not in EXAMPLES:
            raise ValueError(f"{cls.__name__} has no example; add one to tools/site/errors.py")
    return kept(
        cache_folder, "errors", inspect.getsource(inspect.getmodule(page)),  # type: ignore[arg-type]
        lambda: {n: message(n) for n in EXAMPLES} | {n: file_message(n) for n in FILES},
    )  # fmt: skip


def page(cache_folder: Path | None = None) -> str:
    """The page as Markdown."""
    found, entries = messages(cache_folder), []
    for cls in classes()[1:]:
        name = cls.__name__
        parent = cls.__bases__[0].__name__
        meaning = markdown(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])
        depth = len(cls.__mro__) - len(KedgeError.__mro__) - 1
        entry = {"name": name, "parent": "" if depth == 0 else parent, "depth": depth}
        entry |= {"meaning": meaning, "message": found[name]}
        entries.append(entry | {"typed": EXAMPLES[name].typed, "todo": EXAMPLES[name].todo})
    of_files = [{"title": t, "message": found[t], **e._asdict()} for t, e in FILES.items()]
    return render("errors.md.j2", entries=entries, files=of_files)
