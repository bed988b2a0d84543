"""The check of a release finds what is wrong with a wheel; the wheel of this repository works."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from tools.release import __main__ as release
from tools.release.content import PYTHONS, sdist_faults, wheel_faults

ROOT = Path(__file__).parents[2]
VERSION = release.read_version()
INFO = f"kedge-{VERSION}.dist-info"
METADATA = "\n".join(
    [f"Metadata-Version: 2.4\nName: kedge\nVersion: {VERSION}", "License-Expression: Apache-2.0",
     *(f"Classifier: Programming Language :: Python :: {p}" for p in PYTHONS),
     "Requires-Python: >=3.11\n", "# kedge\n"],
)  # fmt: skip


def make_wheel(folder: Path, left_out: str = "", metadata: str = METADATA, **more: str) -> Path:
    """The wheel of a small package that lies in ``folder``, without a file or with more of them."""
    (folder / "src/kedge/recipes").mkdir(parents=True)
    files = {"kedge/__init__.py": "", "kedge/recipes/table.toml": "title = 1"}
    for name, text in files.items():
        (folder / "src" / name).write_text(text)
    held = {name: text for name, text in files.items() if name != left_out}
    held |= {f"{INFO}/METADATA": metadata, f"{INFO}/licenses/LICENSE": "", **more}
    path = folder / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in held.items():
            archive.writestr(name, text)
    return path


def test_a_right_wheel_has_no_faults(tmp_path: Path) -> None:
    assert wheel_faults(make_wheel(tmp_path), tmp_path, VERSION) == []


def test_faults_of_a_wheel_are_named(tmp_path: Path) -> None:
    def faults(name: str, **options: str) -> list[str]:
        return wheel_faults(make_wheel(tmp_path / name, **options), tmp_path / name, VERSION)

    recipe = "kedge/recipes/table.toml"
    assert faults("a", left_out=recipe) == [f"{recipe} is missing"]
    more = {"tests/test_a.py": ""}
    assert faults("b", **more) == ["tests/test_a.py does not belong into a wheel"]
    older = METADATA.replace(f"Version: {VERSION}", "Version: 0.0.1")
    [fault] = faults("c", metadata=older)
    assert fault.startswith("the metadata say version 0.0.1")
    newer = METADATA.replace(":: 3.14", ":: 3.15").replace(">=3.11", ">=3.12")
    assert faults("d", metadata=newer) == [
        "Requires-Python is >=3.12", "no classifier for Python 3.14"
    ]  # fmt: skip
    assert faults("e", metadata=METADATA.replace("# kedge", "")) == ["the README is missing"]


def test_faults_of_an_sdist_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "dist/b.whl"):
            info = tarfile.TarInfo(f"kedge-{VERSION}/{name}")
            archive.addfile(info, io.BytesIO())
    assert sdist_faults(path, VERSION) == [
        "CITATION.cff is missing", "tests is missing", "dist is a build output"
    ]  # fmt: skip


def test_a_tag_must_be_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--tag", "v99.0.0"]) == 1
    assert f"the tag is v99.0.0, but the version is {VERSION}" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_of_this_repository_works_where_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("build", "hatchling", "twine"):
        pytest.importorskip(name)
    assert release.main(["--out", str(tmp_path / "dist"), "--tag", f"v{VERSION}"]) == 0
    assert f"kedge {VERSION} can be released" in capsys.readouterr().out
    assert len(list((tmp_path / "dist").iterdir())) == 2
