"""How long commands take that need no torch: ``python -m bench.start_up``.

Prints the median wall time of several starts of ``kedge --help``, ``kedge report`` on a comparison
of three methods, and ``kedge board`` until it listens, with the bounds that they should stay below
on an idle machine; and whether torch was imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BOUNDS_S = {"kedge --help": 0.5, "kedge report": 1.5, "kedge board": 1.0}
KEDGE = [sys.executable, "-m", "kedge"]


def seconds(words: list[str], until: str = "") -> float:
    """Wall time of a command; with ``until``, until it prints this."""
    begin = time.perf_counter()
    if not until:
        subprocess.run([*KEDGE, *words], check=True, capture_output=True)
        return time.perf_counter() - begin
    with subprocess.Popen(
        [*KEDGE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if until in line:
                break
        passed = time.perf_counter() - begin
        process.send_signal(signal.SIGINT)
    return passed


def imports_torch(words: list[str]) -> bool:
    """Whether a command imports torch."""
    command = [sys.executable, "-X", "importtime", "-m", "kedge", *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "| torch\n" in found.stderr or "torch._C" in found.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        fast = ["--rounds", "3", "--clients", "5", "--seeds", "0,1,2", "--out", str(runs)]
        words = [*KEDGE, "compare", "fedavg", "scaffold", "fedprox", *fast]
        subprocess.run(words, check=True, capture_output=True)
        commands = {
            "kedge --help": (["--help"], ""),
            "kedge report": (["report", str(runs)], ""),
            "kedge board": (["board", str(runs), "--no-browser"], "http://"),
        }
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, n = {times}")
        for name, (words, until) in commands.items():
            found = [seconds(words, until) for _ in range(times)]
            torch = "" if until else f"  imports torch: {imports_torch(words)}"
            print(f"{name:14} {statistics.median(found):5.2f} s  (below {BOUNDS_S[name]} s){torch}")


if __name__ == "__main__":
    main()
