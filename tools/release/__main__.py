"""``python -m tools.release``: build, check and try the files of a release; ``make dist``."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.release.content import sdist_faults, wheel_faults
from tools.release.trial import Failed, try_wheel

ROOT = Path(__file__).parents[2]


def read_version() -> str:
    """The version of the repository, without importing it."""
    text = (ROOT / "src" / "kedge" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def build(out: Path) -> tuple[Path, Path]:
    """Build wheel and sdist into an empty folder, with what is installed: no network."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def main(arguments: list[str] | None = None) -> int:
    """Run all steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files")
    parser.add_argument("--python", default=sys.executable, help="of the new environment")
    parser.add_argument("--tag", help="the tag of the release, which must be the version")
    parser.add_argument("--demo", action="store_true", help="also run the demo")
    parser.add_argument("--no-trial", action="store_true", help="build and check only")
    given = parser.parse_args(arguments)
    version = read_version()
    if given.tag is not None and given.tag != f"v{version}":
        print(f"error: the tag is {given.tag}, but the version is {version}", file=sys.stderr)
        return 1
    wheel, sdist = build(given.out)
    faults = [f"{wheel.name}: {fault}" for fault in wheel_faults(wheel, ROOT, version)]
    faults += [f"{sdist.name}: {fault}" for fault in sdist_faults(sdist, version)]
    if faults:
        print("\n".join(f"error: {fault}" for fault in faults), file=sys.stderr)
        return 1
    files = [str(wheel), str(sdist)]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    if not given.no_trial:
        try:
            try_wheel(wheel, ROOT / "constraints.txt", version, given.python, given.demo)
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"kedge {version} can be released: {wheel.name}, {sdist.name} in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
