"""A stranger's run that is read: no code of it is executed, no memory or time is taken for it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import kedge
from kedge.board.watch import Catalogue
from kedge.errors import DataError, KedgeError, ModelError
from kedge.files import MAX_BYTES, MAX_TOML_BYTES
from kedge.models import build_again
from kedge.saved.architecture import Bounded
from tests.attacks.hostile_runs import LOOKS, bounded, mutate_file
from tests.cli.commands import kedge_command

FAST: dict[str, Any] = {
    "clients": 3, "rounds": 2, "seeds": [0], "steps": 1, "engine": "loop", "validation": 0.1,
}  # fmt: skip
EVIL = "import pathlib; pathlib.Path({!r}).write_text('executed')\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with personal models, results on validation data and a diagnosis."""
    out = tmp_path_factory.mktemp("trained") / "run"
    kedge.run("fedper", out=out, **FAST)
    kedge.diagnose(out, what=["data"])
    for look in LOOKS.values():
        look(out)  # what is imported later takes no memory of a test
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def change(run: Path, **values: Any) -> None:
    """Change values of a bundle."""
    path = run / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evil", "evil.inner", "antigravity"])
def test_a_bundle_imports_no_code(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from its own folder nor from what is installed."""
    (run / "evil").mkdir()
    for file in ("evil.py", "evil/__init__.py", "evil/inner.py"):
        (run / file).write_text(EVIL.format(str(tmp_path / "mark")))
    change(run, model={"kind": "class", "path": f"{name}:Net", "needs": []})
    monkeypatch.chdir(run)
    for entry in ("", str(run)):
        monkeypatch.syspath_prepend(entry)
    with pytest.raises(ModelError, match=r"imports no code; .*--load FILE\.py.*kedge\.load\("):
        _ = kedge.load(run).model
    assert not (tmp_path / "mark").exists()
    assert name not in sys.modules
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ModelError, match="do not fit the model"):
        _ = kedge.load(run, model=model).model  # and a model that is given is taken


def test_no_attribute_of_a_module_is_computed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules import others once they are asked for them."""
    lazy, asked = ModuleType("lazy"), list[str]()
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    change(run, model={"kind": "class", "path": "lazy:Net", "needs": []})
    with pytest.raises(ModelError, match="is not imported"):
        _ = kedge.load(run).model
    assert not asked


def test_a_class_of_a_loaded_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is imported in Python, or loaded with --load; the file registers nothing."""
    (tmp_path / "nets_of_mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(5, 2)\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets_of_mine  # type: ignore[import-not-found]

    x, y = np.ones((8, 5), np.float32), np.arange(8) % 2
    kedge.fit(nets_of_mine.Net(), [(x, y), (x, y)], test=(x, y), rounds=1, out=tmp_path / "run")
    assert kedge.load(tmp_path / "run").model.predict(x).shape == (8,)
    del sys.modules["nets_of_mine"]
    np.savez(tmp_path / "x.npz", x=x)
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "x.npz")]
    done = kedge_command(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the model is of your class nets_of_mine:Net, which is not" in done.stderr
    done = kedge_command(*words, "--load", "nets_of_mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [["--help"], pytest.param(["predict", ".", "digits"], marks=pytest.mark.long)],
    ids=lambda words: words[0],
)
def test_the_command_imports_nothing_from_its_folder(
    words: list[str], run: Path, tmp_path: Path
) -> None:
    """A module of the name of a library, and an entry point beside it."""
    for name in ("pandas", "onnx", "rich", "evil"):
        (run / f"{name}.py").write_text(EVIL.format(str(tmp_path / "mark")))
    (run / "evil-1.dist-info").mkdir()
    (run / "evil-1.dist-info/METADATA").write_text("Name: evil\nVersion: 1\n")
    (run / "evil-1.dist-info/entry_points.txt").write_text("[kedge.models]\nevil = evil\n")
    done = subprocess.run(
        [sys.executable, "-m", "kedge", *words], cwd=run, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists()


def test_no_model_is_fetched_for_a_bundle() -> None:
    with pytest.raises(ModelError, match="configuration of hf:evil/model is missing"):
        build_again("hf:evil/model", (8,), 2)


def test_a_configuration_of_hugging_face_brings_no_code(run: Path) -> None:
    pytest.importorskip("transformers")
    code = {"AutoModelForSequenceClassification": "evil/repository--model.Net"}
    for config in ({"model_type": "vit", "auto_map": code}, {"model_type": "x"}, {}, {"a": 1}):
        change(run, model={"kind": "zoo", "text": "hf:evil", "config": config})
        change(run, shape=[8], encoding={**ENCODING, "shape": [8]})
        with pytest.raises(ModelError):
            _ = kedge.load(run).model


ENCODING = {
    "kind": "array",
    "shape": [1, 8, 8],
    "dtype": "uint8",
    "columns": [],
    "from_files": True,
}

# -- memory and time ------------------------------------------------------------------------------

LARGE = 30_000
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"type": "Linear", "arguments": {"in_features": LARGE, "out_features": LARGE}},
    "embedding": {
        "type": "Embedding", "arguments": {"num_embeddings": 2**40, "embedding_dim": 2**20}
    },
    "overflow": {"type": "Linear", "arguments": {"in_features": 2**62, "out_features": 2**62}},
    "digits": {"type": "Linear", "arguments": {"in_features": 10**299, "out_features": 1}},
    "many": {
        "type": "LSTM", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 10**7}
    },
    "copies": {"type": "Transformer", "arguments": {"d_model": 8, "num_encoder_layers": 10**6}},
    "types": {"type": "Linear", "arguments": {"in_features": "x", "out_features": [1]}},
    "text": {"type": "Linear", "arguments": "x"},
    "deep": {"type": "Sequential", "children": {"0": {"type": "Sequential", "children": []}}},
    "base": {"type": "Module", "arguments": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_is_built_that_the_weights_do_not_fill(name: str, run: Path) -> None:
    change(run, model={"kind": "layers", "layers": MODELS[name]})
    with bounded(), pytest.raises(KedgeError):
        _ = kedge.load(run).model


@pytest.mark.parametrize("text", [f"mlp(hidden=[{LARGE},{LARGE}])", "resnet18", "no(", "mlp(x=1)"])
def test_no_model_is_built_that_the_weights_do_not_fill(text: str, run: Path) -> None:
    change(run, model={"kind": "zoo", "text": text})
    with bounded(), pytest.raises(KedgeError):
        _ = kedge.load(run).model


def test_a_pass_takes_no_more_than_there_is(run: Path) -> None:
    """Layers without weights whose outputs are large."""
    layers = {"0": {"type": "Upsample", "arguments": {"scale_factor": 10**6}}}
    change(run, model={"kind": "layers", "layers": {"type": "Sequential", "children": layers}})
    save_file({}, run / "seed-0/model.safetensors", {"kedge.probe": '{"whole": 0, "outputs": [1]}'})
    with bounded(), pytest.raises(ModelError, match="takes over .* GB; by the size"):
        _ = kedge.load(run).model


def test_what_fits_the_weights_is_built() -> None:
    """Also what does not work without numbers."""

    def numbers() -> nn.Module:
        rates = [float(rate) for rate in torch.linspace(0, 0.1, 4)]
        return nn.Sequential(nn.Linear(100, 100), *map(nn.Dropout, rates))

    torch.manual_seed(0)
    expected = numbers().state_dict()
    torch.manual_seed(0)
    with Bounded(40_400, "it"):
        found = numbers().state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with Bounded(4 * LARGE**2, "it"):
        assert nn.Linear(LARGE, 1000).weight.shape == (1000, LARGE)


@pytest.mark.parametrize(
    "values",
    [
        {"shape": [2**20, 2**20]}, {"shape": [2**62]}, {"shape": [-1]}, {"shape": [0]},
        {"mean": [float("nan")]}, {"std": ["1"]}, {"outputs": 10**299}, {"classes": [[1]]},
        {"classes": ["a"]}, {"encoding": {**ENCODING, "dtype": "V1000000000"}}, {"model": 1},
        {"provenance": {}}, {"loaded": [{}]}, {"task": []}, {"method": None}, {"more": 1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(values: dict[str, Any], run: Path) -> None:
    change(run, **values)
    with bounded(), pytest.raises(DataError, match=r"bundle\.json is damaged .*copy it again"):
        kedge.load(run)


# -- files ----------------------------------------------------------------------------------------

FILES = (
    "bundle.json", "config.toml", "environment.json", "run.json", "result.json", "log.txt",
    "notes.json", "diagnosis/data.json", "seed-0/metrics.jsonl", "seed-0/clients.json",
    "seed-0/scores.json",
    "seed-0/partition.json", "seed-0/model.safetensors", "seed-0/personal.safetensors",
    "seed-0/checkpoint.safetensors",
)  # fmt: skip


def look_at(run: Path) -> list[str]:
    """All commands that read a run, and the messages of those that fail."""
    messages = []
    (run / "out").mkdir(exist_ok=True)
    for words in (
        ["report", str(run)],
        ["diagnose", str(run), "--what", "data"],
        ["predict", str(run), "digits", "-o", f"{run}/out/p.csv", "--force"],
        ["evaluate", str(run), "digits"],
        ["run", "--out", str(run), "--resume", "--rounds", "3"],
    ):
        done = kedge_command(*words)
        assert done.returncode in (0, 2), done.stderr
        assert "should not happen" not in done.stderr, done.stderr
        messages += [done.stderr] if done.returncode else []
    Catalogue(run.parent).refresh()
    return messages


@pytest.mark.parametrize("name", FILES)
def test_pipes_devices_and_folders_are_no_files(name: str, run: Path) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with bounded(20):
        look_at(run)
        for goal in ("/dev/zero", ".."):
            path.unlink(missing_ok=True)
            path.symlink_to(goal)
            for look in LOOKS.values():
                with suppress(KedgeError):
                    look(run)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["sparse", "deep", "digits", "cut", "zeros"])
def test_files_without_measure_are_refused(kind: str, name: str, run: Path) -> None:
    path = run / name
    content = path.read_bytes() if path.exists() else b""
    deep = b"[" * 200_000
    new = {
        "sparse": b"",
        "deep": b"a = " * path.name.endswith("toml") + deep,
        "digits": b"a = " * path.name.endswith("toml") + b"1" * 5000,
        "cut": content[: len(content) // 2],
        "zeros": b"\x00" * 100,
    }[kind]
    path.write_bytes(new + b"\n" * path.name.endswith("jsonl"))
    if kind == "sparse":
        os.truncate(path, 2**40)
    messages = []
    with bounded(6):
        for look in LOOKS.values():
            try:
                look(run)
            except KedgeError as error:
                messages.append(str(error))
    assert all(path.name in text and len(text) < 500 for text in messages)


def test_bounds_are_generous(run: Path) -> None:
    for path in (*run.rglob("*.json"), *run.rglob("*.jsonl")):
        assert path.stat().st_size < MAX_BYTES / 1000
    assert (run / "config.toml").stat().st_size < MAX_TOML_BYTES / 50


@pytest.mark.parametrize("shape", [[2**62, 4], [2**62], [-1], [2**64], ["x"], 2**62, None, [0]])
def test_shapes_of_weights_are_checked(shape: Any, run: Path) -> None:
    for name in ("model", "personal", "checkpoint"):
        path = run / f"seed-0/{name}.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        first = next(key for key in header if key != "__metadata__")
        header[first]["shape"] = shape
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with bounded(5):
        with pytest.raises(KedgeError, match=r"model\.safetensors"):
            _ = kedge.load(run).model
        for message in look_at(run):
            assert message.startswith("error: ")


def test_a_resumed_run_starts_no_army(run: Path) -> None:
    path = run / "environment.json"
    known = json.loads(path.read_text())
    for changed in (
        {"threads": 10**9},
        {"threads": -1},
        {"how": known["how"] | {"workers": 10**6}},
        {"how": known["how"] | {"streams": 10**6}},
        {"how": known["how"] | {"engine": []}},
    ):
        path.write_text(json.dumps(known | changed))
        with pytest.raises(DataError, match=r"environment\.json is damaged"):
            kedge.run("fedper", out=run, resume=True, **FAST | {"rounds": 3})


#: Calls that read a file, or parse it, without a bound.
READERS = re.compile(
    r"read_text\(|read_bytes\(|json\.loads?\(|tomllib\.|safe_open\(|(?<![\w_])open\("
)
#: What may read by itself, and why.
ALLOWED = {
    "saved/tensors.py: safe_open(": "after a look at the file; it checks the header",
    "saved/bundle.py: json.loads(": "its own text",
    "report/page.py: read_text(": "a file of the package",
    "board/app.py: read_text(": "a file of the package",
    "board/app.py: read_bytes(": "a file of the package",
    "board/app.py: json.loads(": "a request of bounded length",
    "board/watch.py: json.loads(": "a line of a bounded reading; numbers of any length are NaN",
    "loggers/wandb_runs.py: json.loads(": "what its own process printed",
}


def test_nothing_else_reads_a_run() -> None:
    """Read with kedge.files; what cannot is listed above, with the reason."""
    root = Path(kedge.__file__).parent
    packages = (
        "history",
        "saved",
        "runs",
        "report",
        "board",
        "api",
        "loggers",
        "reproduction",
        "diagnostics",
    )
    found = {
        f"{path.relative_to(root).as_posix()}: {call}"
        for package in packages
        for path in (root / package).rglob("*.py")
        for call in READERS.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


# -- mutations ------------------------------------------------------------------------------------


@pytest.mark.long
def test_whatever_is_changed_ends_in_an_answer(trained: Path, tmp_path: Path) -> None:
    """Bytes and values of any file: loading and reporting works, or raises a KedgeError."""
    end, number, answers = time.time() + 20, 0, [0, 0]
    names = [str(p.relative_to(trained)) for p in sorted(trained.rglob("*.[jst]*"))]
    names = [name for name in names if name.endswith((".json", ".jsonl", ".toml", ".safetensors"))]
    assert len(names) >= 10
    while time.time() < end:
        number += 1
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        rng = random.Random(number)
        name = rng.choice(names)
        mutate_file(run / name, rng)
        for look in LOOKS.values():
            try:
                with bounded():
                    look(run)
                answers[0] += 1
            except KedgeError:
                answers[1] += 1
            except Exception as error:
                raise AssertionError(f"mutation {number} of {name}") from error
    assert min(answers) > 20
