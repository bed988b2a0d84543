"""The generated pages: complete, from the registries, without raw markup."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from tools.site import api, commands, errors, kinds, measured, methods, rounds
from tools.site.described import describe
from tools.site.errors import EXAMPLES
from tools.site.navigation import files, navigation

import kedge
from kedge.cli import main
from kedge.cli.app import COMMANDS, function_of
from kedge.cli.options import PANELS
from kedge.core.part import Doc, Part, Range, Sum
from kedge.core.schedules import schedules
from kedge.core.task_custom import own_metrics
from kedge.data.augment import augmentations
from kedge.data.datasets import datasets
from kedge.data.partition import partitions
from kedge.errors import KedgeError
from kedge.models import models
from kedge.registry import Registry
from kedge.settings import FIELDS

SECTIONS = (
    "How it works", "Where it acts", "Paper", "Fields", "Cost", "What leaves a client",
    "Neutral setting", "Identities", "Deviations from paper and code", "Measured results",
    "Try it",
)  # fmt: skip
ROLE = re.compile(r":(math|class|func|meth|mod|attr|data):`")
NAMES = list(methods.entries())


@contextmanager
def registered(registry: Registry[Any], name: str, entry: Any) -> Iterator[None]:
    registry.add(name, entry)
    try:
        yield
    finally:
        registry.remove(name)


# -- methods -----------------------------------------------------------------------------------


@pytest.fixture
def buoy() -> Iterator[type[Part]]:
    """A part that nobody has seen before."""

    @kedge.register
    @dataclass(frozen=True)
    class Buoy(kedge.Part):
        r"""Mark the place of the global model.

        :math:`\min_w f_k(w) + \frac{\beta}{2}\|w - w^t\|^2` (eq. 7), one number more is sent.

        Sailor et al., A Buoy in Every Harbour, ICML 2024, arXiv:2401.00001.

        Deviations: the paper has two buoys. Neutral at: beta = 0. Uploads: one number.
        """

        beta: Annotated[float, Doc("weight of the pull"), Range(0)] = 0.5
        presets = {"heavy": {"beta": 2.0}}
        neutral = {"beta": 0.0}
        uploads = "1"

        def term(self, v: Any, params: Any, batch: Any, out: Any) -> Any:
            square = kedge.core.tree.sq_dist(v.public(params), v.anchor.params)
            return 0.5 * self.beta * square

        def reply(self, v: Any, weights: Any) -> Any:
            return {}, Sum(v.info.lr)

    yield Buoy
    kedge.core.part.parts.remove("buoy")


def test_a_new_part_has_a_page_by_itself(buoy: type[Part], tmp_path: Path) -> None:
    page = methods.page("buoy", tmp_path)
    for section in SECTIONS:
        assert f"\n## {section}\n" in page, section
    assert r"\min_w f_k(w) + \frac{\beta}{2}\|w - w^t\|^2,\quad\text{(eq. 7)}" in page
    assert "@inproceedings{sailor2024a," in page
    assert "[arXiv:2401.00001](https://arxiv.org/abs/2401.00001)" in page
    assert "| `beta` | float | `0.5` | at&nbsp;least&nbsp;0 | weight of the pull |" in page
    assert "| `buoy:heavy` | `beta=2.0` |" in page
    assert re.search(r'<a href="#hook-term">term</a>.*<a href="#hook-reply">reply</a>', page)
    assert "<span>correct</span>" in page
    assert "| buoy | upload | 1 | 1 | every round | the sum over the round's clients |" in page
    assert "| up | `1` | +0.000004 | 44.7 |" in page
    assert "`buoy(beta=0.0)` the run equals FedAvg bit for bit" in page
    assert "The paper has two buoys." in page
    assert "has no oracle" in page
    assert "kedge run --method buoy --rounds" in page
    assert "[`buoy`](buoy.md)" in methods.index()
    assert "reference/methods/buoy.md" in files(navigation(tmp_path))


def test_results_are_kept_until_the_source_changes(
    buoy: type[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.site import computed

    calls = []
    make = lambda: calls.append(1) or {"n": len(calls)}  # noqa: E731
    assert [computed.kept(tmp_path, "x", "a", make)["n"] for _ in range(3)] == [1, 1, 1]
    assert computed.kept(tmp_path, "x", "b", make) == {"n": 2}
    monkeypatch.setattr(computed, "_source_hash", lambda _: "other")
    assert computed.kept(tmp_path, "x", "b", make) == {"n": 3}


def test_every_part_and_fedavg_are_listed() -> None:
    assert {"fedavg", *kedge.core.part.parts} == set(NAMES)
    index = methods.index()
    for name in NAMES:
        assert f"[`{name}`]({name}.md)" in index


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_is_taken_apart(name: str) -> None:
    told = describe(methods.entries()[name])
    assert told.how
    assert told.papers, "the reference is not understood"
    assert all(paper.title for paper in told.papers)
    texts = [told.how, told.reference, told.notes, *told.labelled.values()]
    for text in texts:
        assert not ROLE.search(text)
        assert "``" not in text
    bibtex = told.papers[0].bibtex()
    assert bibtex.count("{") == bibtex.count("}")
    if name not in ("fedtr", "flboost"):  # their papers have no arXiv number of their own first
        assert told.papers[0].arxiv in told.reference
        assert told.papers[0].year


def test_identities_on_a_page_are_those_of_conformance() -> None:
    from tools.site.computed import identities

    [row] = identities("fedsam")
    assert row["expected"] == 0.6
    assert row["got"] == pytest.approx(0.6, abs=1e-9)
    assert row["ok"] is True
    assert (row["oracle"], row["what"]) == ("one step by hand", "w after one step at rho = 0.2")
    assert row["doc"].startswith("f = 10 (w - 1)^2/2 at w = 0")


def test_every_hook_has_one_place_in_the_round() -> None:
    assert not rounds.missing()
    places = [hook for _, _, hooks in rounds.STAGES for hook in hooks]
    assert len(places) == len(set(places))


def test_measured_results_are_those_of_the_records() -> None:
    rows = {(r.table, r.method, r.scale): r for r in measured.results_of("fedtr")}
    row = rows["fedtr/table1_organa", "fedtr", "full"]
    page = (measured.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    line = next(text for text in page.splitlines() if text.startswith("| `fedtr` | 91.4"))
    assert row.ours in line
    assert row.gain in line
    assert row.n == 3
    assert all("fedtr" in r.method for r in rows.values())
    assert all(r.parts == () for r in measured.results_of("fedavg"))


def test_timings_are_over_fedavg() -> None:
    found = {(t.method, t.workload): t.ratio for t in measured.timings_of("scaffold")}
    assert found["scaffold", "pfl, vector(compile=true), tf32"] == pytest.approx(1.15, abs=0.005)
    assert found["scaffold", "FedCOG CNN, 10 clients, vector, tf32"] == 1.03
    assert {t.method for t in measured.timings_of("fedbr")} == {"fedbr(rows=32)"}


@pytest.mark.filterwarnings("ignore:the weight of fedimpro")
@pytest.mark.parametrize("name", ["fedbn", "fedimpro", "krum"])
def test_the_command_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*shlex.split(methods.command(name)), "--no-report"]
    words[words.index("--rounds") + 1] = "1"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, capsys.readouterr().err


# -- other kinds -------------------------------------------------------------------------------


def own_net(shape: tuple[int, ...], outputs: int, *, wide: int = 3) -> None:
    """A net for harbours, :math:`w^2`."""


def own_data() -> None:
    """Ships by harbour."""


def own_metric(y_true: Any, y_score: Any) -> float:
    """Share of ships that arrive."""
    return 0.0


@pytest.mark.parametrize(
    ("registry", "entry", "page"),
    [
        (models, own_net, "models"),
        (partitions, own_data, "partitions"),
        (datasets, own_data, "data"),
        (schedules, own_data, "training"),
        (augmentations, own_data, "augmentations"),
    ],
)
def test_a_new_entry_is_on_its_page(registry: Registry[Any], entry: Any, page: str) -> None:
    one = next(p for p in kinds.PAGES if p.file == page)
    with registered(registry, "harbour", entry):
        text = kinds.page(one)
    assert " harbour { #" in text
    assert not ROLE.search(text)
    if page == "models":
        assert "| `wide` | int | `3` |" in text
    assert "harbour" not in kinds.page(one)


def test_an_own_metric_is_on_its_page() -> None:
    kedge.register_metric(own_metric)
    try:
        page = next(p for p in kinds.PAGES if p.file == "metrics")
        assert "### own_metric { #metric-own_metric }" in kinds.page(page)
    finally:
        own_metrics.remove("own_metric")


def test_every_kind_has_a_page() -> None:
    assert not kinds.uncovered()


# -- commands and settings ---------------------------------------------------------------------


def parser_of(name: str) -> Any:
    """What typer makes of a command."""
    group, *own = name.split()
    function = function_of(group)
    if isinstance(function, typer.Typer):
        parser: Any = typer.main.get_command(function)
        for word in own:
            parser = parser.commands[word]
        return parser
    single = typer.Typer(add_completion=False)
    single.command(name)(function)
    return typer.main.get_command(single)


@pytest.mark.parametrize("command", commands.commands(), ids=lambda c: c.slug)
def test_the_options_of_a_command_are_those_that_it_takes(command: commands.Command) -> None:
    taken: set[str] = set()
    for p in parser_of(command.name).params:
        if getattr(p, "param_type_name", "") == "option" and not getattr(p, "hidden", False):
            taken |= {*p.opts, *p.secondary_opts}
    shown = {one for p in command.parameters for flag in p.flags for one in flag.split("/")}
    assert shown == taken - {"--help", "-h"}
    page = commands.page(command)
    assert page.startswith(f"# kedge {command.name}\n")
    for p in command.parameters:
        assert p.help, f"{p.name} has no help"


def test_every_command_has_a_page() -> None:
    names = {c.name for c in commands.commands()}
    assert {name.split()[0] for name in names} == set(COMMANDS)
    assert {"flower up", "flower keys authority"} <= names
    for command in commands.commands():
        assert f"[`kedge {command.name}`]({command.slug}.md)" in commands.index()


def test_the_page_of_settings_has_them_all() -> None:
    page = commands.settings_page()
    assert set(FIELDS) == {key for keys in PANELS.values() for key in keys}
    for key in FIELDS:
        assert f'<span id="setting-{key}"></span>`{key}` | `--{key.replace("_", "-")}' in page


# -- Python and errors -------------------------------------------------------------------------


def test_every_public_name_is_on_one_page() -> None:
    places = [name for page in api.pages() for name in page.names]
    assert len(places) == len(set(places))
    assert set(kedge.__all__) <= set(places)


def test_a_new_public_name_joins_the_page_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kedge, "__all__", [*kedge.__all__, "Steps"])
    monkeypatch.setattr(kedge, "Steps", kedge.api.train.method_setting, raising=False)
    page = next(page for page in api.pages() if "Steps" in page.names)
    assert page.file == "running"
    assert "::: kedge.api.train.method_setting" in api.page(page)


def test_the_declarations_of_a_part_are_listed() -> None:
    text = api.page(next(p for p in api.PAGES if p.file == "part"))
    for name in ("side", "needs_clients", "neutral", "solves", "sends", "personal_model"):
        assert f"| `{name}` | `" in text


def test_every_error_has_an_example() -> None:
    names = {cls.__name__ for cls in errors.classes()[1:]}
    assert names == set(EXAMPLES)


QUICK = [n for n in EXAMPLES if n not in ("CheckFailed", "PartitionError")]


@pytest.mark.parametrize("name", QUICK)
def test_an_example_of_an_error_brings_it(name: str) -> None:
    text = errors.message(name)
    assert text
    assert "/tmp" not in text
    assert str(Path.home()) not in text


FILE_MESSAGES = {
    "No label column": "no column is called label. Write which it is, for example label='sick'",
    "Not UTF-8": "hospitals/north.csv, line 2: not UTF-8 text",
    "A column of free text, codes or names": "leave it out with drop=note",
    "A decimal comma": "hospitals/north.csv, line 2, column 'dose'",
    "A column that one file calls otherwise": "if 'CRP' is 'crp', use one name in all files",
    "Dates whose day and month cannot be told apart": "may have the day or the month first",
}


def test_messages_about_files_are_those_of_the_mistake() -> None:
    assert list(errors.FILES) == list(FILE_MESSAGES)
    for title, words in FILE_MESSAGES.items():
        assert words in errors.file_message(title)


def test_an_example_that_brings_another_error_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = EXAMPLES["FieldError"]._replace(make=lambda: kedge.parse("scafold"))
    monkeypatch.setitem(EXAMPLES, "FieldError", wrong)
    with pytest.raises(ValueError, match="the example of FieldError brings UnknownName"):
        errors.message("FieldError")
    monkeypatch.setitem(EXAMPLES, "FieldError", wrong._replace(make=lambda: None))
    with pytest.raises(ValueError, match="brings no error"):
        errors.message("FieldError")


def test_an_error_without_an_example_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(EXAMPLES, "Paused")
    with pytest.raises(ValueError, match="Paused has no example"):
        errors.messages()
    assert issubclass(errors.classes()[1], KedgeError)
