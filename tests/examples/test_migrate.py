"""The programs of the migration guides: kedge's always, those of other libraries where they are.

$KEDGE_FLOWER_PYTHON, $KEDGE_PFL_PYTHON and $KEDGE_FEDLAB_PYTHON name the Python of an environment
that has the library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
RUN = ("flower", "pfl", "fedlab")  # pages with programs
SHARE = 307 / 360  # right answers on the test set, of every right FedAvg
#: FedLab imports torchvision, which it does not use here, and whose build may not fit torch.
STAND_IN = """\
import sys
from unittest import mock
for name in ("", ".transforms", ".datasets", ".models"):
    sys.modules["torchvision" + name] = mock.MagicMock()
"""


def blocks(page: str, kind: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(python: str, code: str, folder: Path) -> str:
    """What a program prints last, with the data and the model of the experiment in ``task.py``."""
    [task] = blocks("index", "python")
    task = task.partition("\n\nsettings = ")[0].replace("import kedge\n", "")
    (folder / "task.py").write_text(task, encoding="utf-8")
    (folder / "program.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [python, "program.py"], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("page", RUN)
def test_the_program_of_kedge(page: str, tmp_path: Path) -> None:
    _, kedge = blocks(page, "py")
    assert float(run(sys.executable, kedge, tmp_path)) == pytest.approx(100 * SHARE, abs=0.01)


@pytest.mark.parametrize("page", RUN)
def test_the_program_of_the_other_library(page: str, tmp_path: Path) -> None:
    other, _ = blocks(page, "py")
    compile(other, page, "exec")
    python = os.environ.get(f"KEDGE_{page.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"$KEDGE_{page.upper()}_PYTHON is not set")
    start = STAND_IN if page == "fedlab" else ""
    printed = run(python, start + other, tmp_path)
    assert float(printed.strip("tensor()")) == pytest.approx(SHARE, abs=1e-4)


def test_every_guide_is_listed_and_says_what_was_run() -> None:
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    for path in PAGES.glob("*.md"):
        if path.stem == "index":
            continue
        text = path.read_text(encoding="utf-8")
        assert f"({path.name})" in index
        assert "Both were run" in text or "was not run" in text
        for heading in ("## The same experiment", "## Terms", "## What differs in meaning"):
            assert heading in text, f"{path.name} lacks {heading!r}"
        assert re.search(r"^## What .* does better$", text, re.MULTILINE)
