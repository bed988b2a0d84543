"""``python -m bench``: see :mod:`bench.speed`."""

from __future__ import annotations

from kedge.cli import let_waiting_threads_sleep

if __name__ == "__main__":
    let_waiting_threads_sleep()  # before torch is imported
    from bench.speed.command import run

    run()
