"""Build the documentation site.

python -m tools.site                   # the site in the folder site, ready for any web server
python -m tools.site --out /tmp/site   # elsewhere
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tools.site.assemble import ROOT
from tools.site.build import BuildFailed, build


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".site", help="pages and cached results"
    )
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")
    args = parser.parse_args()
    start = time.monotonic()
    try:
        pages = build(args.out, args.work, (lambda _: None) if args.quiet else _say)
    except BuildFailed as error:
        print(f"the site is not built: {error}", file=sys.stderr)
        return 1
    print(f"{pages} pages in {args.out}, {time.monotonic() - start:.0f} s")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
