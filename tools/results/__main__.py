"""Write docs/results.md, its figures and docs/learn/choosing.md from the records.

python -m tools.results            # write them
python -m tools.results --check    # exit code 1 if a page is not what the records say
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.results.page import PAGES, render

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    wrong = 0
    for name, template in PAGES.items():
        page, target = render(DOCS / "results", not args.check, template), DOCS / name
        if not args.check:
            target.write_text(page, encoding="utf-8")
            print(f"wrote {target}")
        elif target.read_text(encoding="utf-8") != page:
            print(f"{target} is not what the records say; run: make results", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
