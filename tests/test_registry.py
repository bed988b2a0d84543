"""Registries and the errors that suggest a name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kedge.errors as errors
from kedge.errors import KedgeError, UnknownName, nearest
from kedge.registry import Registry


def colours(see: str = "") -> Registry[str]:
    registry: Registry[str] = Registry("colour", see=see)
    for name in ("red", "green", "Blue", "blue-green"):
        registry.add(name, name.upper())
    return registry


def test_names_lead_to_things() -> None:
    registry = colours()
    assert registry["red"] == "RED"
    assert "red" in registry
    assert "rod" not in registry
    assert len(registry) == 4
    assert list(registry) == ["Blue", "blue-green", "green", "red"]


def test_register_is_a_decorator_that_returns_what_it_got() -> None:
    registry: Registry[type] = Registry("thing")

    @registry.register("one")
    class One:
        pass

    assert registry["one"] is One


def test_a_name_is_given_once() -> None:
    registry = colours()
    with pytest.raises(KedgeError, match="colour 'red' is registered twice; choose another name"):
        registry.add("red", "other")
    assert registry["red"] == "RED"
    assert registry.add("green", registry["green"]) == "GREEN"  # the same thing again is no harm


def test_remove_forgets_and_does_not_mind_twice() -> None:
    registry = colours()
    registry.remove("red")
    registry.remove("red")
    assert "red" not in registry


def test_match_by_part_of_a_name_or_by_wildcards() -> None:
    registry = colours()
    assert registry.match() == ["Blue", "blue-green", "green", "red"]
    assert registry.match("green") == ["blue-green", "green"]
    assert registry.match("b*") == ["Blue", "blue-green"]
    assert registry.match("R?D") == ["red"]
    assert registry.match("[rg]*") == ["green", "red"]
    assert registry.match("purple") == []


def test_a_near_name_is_suggested_whatever_its_case() -> None:
    with pytest.raises(UnknownName) as caught:
        colours(see="kedge list")["BLEU"]
    assert str(caught.value) == "no colour 'BLEU'. Did you mean 'Blue'? See: kedge list"
    assert (caught.value.kind, caught.value.name) == ("colour", "BLEU")


def test_all_names_are_listed_where_none_is_near() -> None:
    with pytest.raises(UnknownName, match=r"There are: Blue, blue-green, green, red\.$"):
        colours()["xyzzy"]
    with pytest.raises(UnknownName, match=r"no colour 'red'\. There are: none\.$"):
        Registry[str]("colour")["red"]


def test_nearest_is_ordered_and_short() -> None:
    assert nearest("scafold", ["fedprox", "scaffold", "scaffnew"])[0] == "scaffold"
    assert len(nearest("fed", ["feda", "fedb", "fedc", "fedd"])) == 2
    assert nearest("zzz", ["scaffold"]) == []


def test_every_error_is_a_kedge_error_and_in_the_drawn_tree() -> None:
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, KedgeError)
        assert kind.__name__ in (errors.__doc__ or "")
        assert kind.__doc__


# -- filled at the first look-up --------------------------------------------------------------

PLUGIN = """
from dataclasses import dataclass
import kedge
from kedge.core.method import parse

assert "scaffold" in repr(parse("scaffold"))  # a look-up while the registry is being filled

@kedge.register
@dataclass(frozen=True)
class Tether(kedge.Part):
    '''Pull towards the anchor.'''
    mu: float = 0.1
"""
PARTITION = """
from kedge.data.partition import partitions, shifts

@partitions.register("halves")
def halves(labels, clients, rng, *, first=0):
    '''Cut in order.'''
    import numpy as np
    return np.array_split(np.arange(len(labels)), clients)

@shifts.register("nothing")
def nothing(sizes, rng):
    '''No shift.'''
    return {}
"""
MODEL = """
from collections import OrderedDict
from torch import nn
from kedge.models import models

@models.register("tiny")
def tiny(shape, outputs):
    '''One layer.'''
    return nn.Sequential(OrderedDict(stage1=nn.Flatten(), head=nn.LazyLinear(outputs)))
"""


def install(folder: Path, name: str, points: dict[str, str], **modules: str) -> None:
    """Write a distribution as pip would leave it: modules and metadata with entry points."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"[{group}]\n{point}\n" for group, point in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def in_a_new_process(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_built_in_parts_and_partitions_need_no_import() -> None:
    for code in (
        "from kedge.core.method import parse; print(parse('scaffold'))",
        "from kedge.data.partition.grammar import partitions as p; print('iid' in p, len(p))",
        "from kedge.data.partition.grammar import shifts; print(shifts['rotation'].__name__)",
    ):
        done = in_a_new_process(Path("."), code)
        assert done.returncode == 0, done.stderr


def test_an_installed_distribution_adds_its_own(tmp_path: Path) -> None:
    points = {
        "kedge.parts": "tether = plug_part",
        "kedge.models": "tiny = plug_model:tiny",
        "kedge.partitions": "halves = plug_partition",
    }
    install(
        tmp_path, "kedge-plug", points,
        plug_part=PLUGIN, plug_model=MODEL, plug_partition=PARTITION,
    )  # fmt: skip
    code = """
from kedge.core.method import parse
from kedge.data.partition import draw
from kedge.data.partition.grammar import shifts
from kedge.models import build
print(parse("tether(mu=0.5)+scaffold"))
print([len(c) for c in draw("halves+nothing", [0, 1] * 4, 2, 0).clients])
print([name for name, _ in build("tiny", (4,), 2).named_children()])
"""
    done = in_a_new_process(tmp_path, code)
    assert done.returncode == 0, done.stderr
    expected = ["tether(mu=0.5)+scaffold", "[4, 4]", "['stage1', 'head']"]
    assert done.stdout.splitlines() == expected
    command = "import sys; sys.argv[1:] = ['show', 'tether']; from kedge.cli import main; main()"
    assert "Pull towards the anchor" in in_a_new_process(tmp_path, command).stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (PLUGIN.replace("Tether", "SCAFFOLD"), "part 'scaffold' is registered twice"),
    ],
)
def test_a_broken_entry_point_is_one_warning(tmp_path: Path, text: str, reason: str) -> None:
    install(tmp_path, "kedge-old", {"kedge.parts": "broken = plug_broken"}, plug_broken=text)
    code = "from kedge.core.method import parse; print(parse('scaffold'), parse('fedprox'))"
    done = in_a_new_process(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "scaffold fedprox\n"
    message = "kedge-old 1.2: its entry point broken = plug_broken (kedge.parts) failed"
    assert done.stderr.count(message) == 1
    assert reason in done.stderr


def test_threads_wait_until_a_registry_is_filled() -> None:
    code = """
import threading
from kedge.core.part import parts
found = []
threads = [threading.Thread(target=lambda: found.append(len(parts))) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(set(found)), found[0] > 20)
"""
    assert in_a_new_process(Path("."), code).stdout == "1 True\n"
