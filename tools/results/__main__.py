"""Write docs/results.md and its figures from the records.

python -m tools.results            # write them
python -m tools.results --check    # exit code 1 if the page is not what the records say
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.results.page import render

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    page, target = render(DOCS / "results", draw=not args.check), DOCS / "results.md"
    if args.check:
        if target.read_text(encoding="utf-8") == page:
            return 0
        print(f"{target} is not what the records say; run python -m tools.results", file=sys.stderr)
        return 1
    target.write_text(page, encoding="utf-8")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
