"""The command ``kedge``."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: How OpenMP's threads wait: GNU's library and others, then Intel's and LLVM's.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait for others sleep, since spinning takes the cores of other work.

    OpenMP reads the environment when torch is imported. What the user has set is not changed.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(environment):
        environment.update(WAITING)


def main() -> None:
    """Run the command. User errors are printed in one line, without a traceback."""
    let_waiting_threads_sleep()
    from kedge.cli import app

    app.main()
