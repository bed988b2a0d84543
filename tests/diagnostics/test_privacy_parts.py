"""Parts describe themselves: those of others are told and attacked like built-in ones."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kedge.diagnostics
from kedge.check.problems import images
from kedge.core.part import ClassMeans, parts
from kedge.diagnostics.data.sheet import WORDS, made_for
from kedge.diagnostics.privacy import diagnose_privacy
from kedge.diagnostics.privacy.shares import sentences, share_round
from kedge.loading import files, load_file
from kedge.sim.simulation import Simulation

DESCRIPTIONS = json.loads(Path(__file__).with_name("descriptions.json").read_text())

OWN = '''
from dataclasses import dataclass

import torch

from kedge.core.part import ClassMeans, Drawn, Part, Sum, register


@register
@dataclass(frozen=True)
class Whisper(Part):
    """Send class sums of features, and make samples up."""

    tells_labels = ("many",)
    made_for = {"features": "strong"}

    def describe_uploads(self, spec):
        return f"sends sums of {spec.features} features per class"

    def class_means(self, spec, uploads, sent):
        return ClassMeans.of_sums(uploads["total"], uploads["many"])

    def draw_samples(self, present):
        x = torch.zeros((present.count, *present.spec.input_shape), dtype=present.spec.dtype)
        return Drawn(x, None, "blank images", "they are on the server")

    def reply(self, v, weights):
        def sums(batch, mask):
            classes = torch.arange(v.task.outputs)
            one_hot = (batch.y[:, None] == classes).to(mask.dtype) * mask[:, None]
            z = v.forward(weights, batch.x, train=False).features.flatten(1)
            return {"total": one_hot.T @ z, "many": one_hot.sum(0)}

        return {}, {name: Sum(value) for name, value in v.sweep(sums).items()}

    needs_features = True
    needs_sweep = True
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Simulation]:
    """A run of a part from a file, as with ``--load``."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    loaded = load_file(file)
    run = images().simulate("whisper")
    run.run_round()
    yield run
    parts.remove("whisper")
    del files[loaded.path]


def test_a_part_from_a_file_is_described_and_attacked(own: Simulation) -> None:
    sheet = diagnose_privacy(own, client=2, steps=3, targets=2, samples=4)
    text = " ".join(sheet.findings)
    assert "Whisper sends sums of 6 features per class." in text
    assert "Labels are counted or averaged in what clients send: Whisper (as a sum)." in text
    assert sheet.values["upload"]["part"] == "whisper"
    rows = own.federation.rows[own.federation.offsets[2] :][: own.federation.sizes[2]]
    classes = own.federation.y[rows].unique().tolist()
    assert {attack["label"] for attack in sheet.values["upload"]["attacks"]} == set(classes)
    assert "Whisper, blank images: they are" in text
    assert "(they are on the server)" in text
    assert sheet.values["generated"]["whisper"]["inputs"]["samples"] == 4
    assert "whisper" in made_for("features", 3, own.bound.task)
    assert "whisper" not in made_for("features", 2, own.bound.task)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(DESCRIPTIONS))
def test_built_in_parts_are_described_in_the_same_words(name: str) -> None:
    part = parts[name](**parts[name].tiny)
    run = images(norm="bn", task=part.tasks[0]).simulate(part)
    run.run_round()
    assert sentences(run, share_round(run, 1)) == DESCRIPTIONS[name]


def test_built_in_parts_are_not_named_in_the_diagnoses() -> None:
    """Only as citations of papers, in docstrings and notes, with a capital letter."""
    words = {"local", "median", "clip", "gauss", "mixup", "fedavg"}  # words, and what all share
    names = {n for n in parts if parts[n].__module__.startswith("kedge.")} - words
    found = []
    for path in Path(kedge.diagnostics.__file__ or "").parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [(path.name, w) for w in re.findall(r"\w+", node.value) if w in names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kedge.parts"):
                found.append((path.name, node.module))
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("part._"):
                found.append((path.name, node.attr))
    assert not found


def test_what_parts_say_they_were_made_for() -> None:
    for name in parts:
        for kind, level in parts[name].made_for.items():
            assert kind in ("labels", "features", "sizes"), name
            assert level in WORDS[1:], name


def test_class_means_of_sums() -> None:
    means = ClassMeans.of_sums(torch.tensor([[2.0, 4.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0]))
    assert means.means.tolist() == [[1.0, 2.0], [0.0, 0.0]]
