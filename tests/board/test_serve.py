"""The process of the board: ports, Ctrl-C, what is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kedge.board.app import Board
from kedge.board.serve import BoardServer, address, listen
from kedge.cli.board import board as command
from kedge.errors import KedgeError


def test_the_next_free_port_is_taken() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] < port + 50


def test_an_address_of_another_machine_cannot_be_used() -> None:
    with pytest.raises(KedgeError, match="--host 192.0.2.1 cannot be used"):
        listen("192.0.2.1", 0)
    with pytest.raises(KedgeError, match="no address of this machine"):
        listen("not a host", 0)


def test_addresses() -> None:
    assert address("0.0.0.0", 1, "t") == "http://127.0.0.1:1/?token=t"
    assert address("::1", 1, "t") == "http://[::1]:1/?token=t"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KedgeError, match="does not exist; name a folder of runs"):
        command(str(tmp_path / "none"))


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    with pytest.raises(KedgeError, match=r"needs uvicorn: pip install 'kedge\[board\]'"):
        command(str(tmp_path))


def test_streams_end_in_the_loop_not_within_the_signal(tmp_path: Path) -> None:
    """A stream that checks its queue and is interrupted before it waits would never wake up."""
    board = Board(tmp_path, "127.0.0.1", 1)
    server = BoardServer(uvicorn.Config(board.app, lifespan="off", log_level="warning", ws="none"))
    server.board = board

    async def interrupted() -> list[bytes]:
        stream = board.live.stream()
        found = [await anext(stream)]
        with listen("127.0.0.1", 0) as listener:
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([listener])
            waiting = asyncio.ensure_future(anext(stream, b"end"))
            server.handle_exit(signal.SIGINT, None)
            assert server.should_exit
            assert not board.live._closed  # not yet: the loop has not had its turn
            found.append(await asyncio.wait_for(waiting, 5))
            await server.shutdown([listener])
        return found

    first, last = asyncio.run(interrupted())
    assert first.startswith(b"event: all")
    assert last == b"end"


def test_the_token_is_not_among_the_arguments_of_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def serve(root: Path, host: str, port: int, ready: Any, say: Any) -> None:
        ready("http://127.0.0.1:1/?token=secret")
        path = Path(opened[0].removeprefix("file://"))
        assert "url=http://127.0.0.1:1/?token=secret" in path.read_text()
        assert path.parent.stat().st_mode & 0o077 == 0
        opened.append(str(path))

    monkeypatch.setattr("kedge.board.serve.serve", serve)
    monkeypatch.setattr("webbrowser.open", opened.append)
    command(str(tmp_path), browser=True)
    assert "secret" not in opened[0]
    assert not Path(opened[1]).exists()


def test_the_board_starts_without_torch_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    """With a page open, whose stream would never end by itself, and its port in use."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code = (
            "import sys\nfrom kedge.cli import main\n"
            f"sys.argv = ['kedge', 'board', {str(tmp_path)!r}, '--port', '{port}']\n"
            "sys.argv.append('--no-browser')\n"
            "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300"},
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", line)
        assert found is not None, line
        assert int(found[1]) > port
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        stream: Any = None
        for _ in range(50):  # the address is printed just before the server listens
            try:
                opener.open(found[0]).close()
                break
            except OSError:
                continue
        stream = opener.open(f"http://127.0.0.1:{found[1]}/events")
        assert stream.readline() == b"event: all\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        stream.close()
    assert process.returncode == 0, err
    assert out.strip() == "False"
    assert f"port {port} is in use; the board is on port {found[1]}" in err
    assert err.rstrip().endswith("The board is closed")
    assert "Traceback" not in err
