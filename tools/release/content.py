"""What a wheel and an sdist must hold, and what they must not."""

from __future__ import annotations

import email
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from pathlib import Path, PurePosixPath

PACKAGE = "kedge"
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "tests")
OUTPUTS = {".git", ".venv", "dist", "runs", "site"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def wheel_faults(wheel: Path, root: Path, version: str) -> list[str]:
    """What is wrong with a wheel: files of the package that are missing, files that do not belong
    there, metadata that contradict the repository."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = f"{PACKAGE}-{version}.dist-info/METADATA"
        if metadata not in names:
            return [f"the wheel has no {metadata}"]
        found = email.message_from_bytes(archive.read(metadata))
    source = root / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"{PACKAGE}-{version}.dist-info/"
    own = {name for name in names if not name.startswith(info)}
    faults = [f"{name} is missing" for name in sorted(expected - own)]
    faults += [f"{name} does not belong into a wheel" for name in sorted(own - expected)]
    if not any(name.startswith(info) and name.endswith("LICENSE") for name in names):
        faults.append("the licence is missing")
    return faults + list(_metadata_faults(found, version))


def _metadata_faults(found: Message, version: str) -> Iterable[str]:
    if found["Version"] != version:
        yield f"the metadata say version {found['Version']}, the package says {version}"
    if found["Requires-Python"] != f">={PYTHONS[0]}":
        yield f"Requires-Python is {found['Requires-Python']}"
    classifiers = found.get_all("Classifier") or []
    for python in PYTHONS:
        if f"Programming Language :: Python :: {python}" not in classifiers:
            yield f"no classifier for Python {python}"
    if found["License-Expression"] != "Apache-2.0":
        yield f"License-Expression is {found['License-Expression']}"
    if not (found.get_payload() or "").startswith("# kedge"):
        yield "the README is missing"


def sdist_faults(sdist: Path, version: str) -> list[str]:
    """What is wrong with an sdist: files that it needs, and build outputs that it holds."""
    with tarfile.open(sdist) as archive:
        paths = [PurePosixPath(name) for name in archive.getnames()]
    top = f"{PACKAGE}-{version}"
    inside = {path.parts[1] for path in paths if len(path.parts) > 1}
    faults = [f"{path} is outside {top}" for path in paths if path.parts[0] != top]
    faults += [f"{name} is missing" for name in IN_SDIST if name not in inside]
    faults += [f"{name} is a build output" for name in sorted(inside & OUTPUTS)]
    return faults + [f"{path} is compiled" for path in paths if path.name == "__pycache__"]
