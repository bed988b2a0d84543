"""Strangers are refused: wrong host, token, origin, paths and names that are meant to do harm."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kedge.board.app import STATIC, Board
from kedge.board.guard import Guard, is_loopback

ADDRESS = "http://127.0.0.1:8765"
PATHS = ("/", "/static/main.js", "/events", "/runs", "/sparks?ids=a", "/run/a", "/table?ids=a",
         "/report?ids=a", "/run/a/curves", "/nothing")  # fmt: skip


@pytest.fixture
def board(runs: Path) -> Board:
    return Board(runs, "127.0.0.1", 8765)


def visitor(board: Board, token: bool = True, address: str = ADDRESS) -> TestClient:
    cookies = {"kedge-board-8765": board.token} if token else {}
    return TestClient(board.app, base_url=address, cookies=cookies, follow_redirects=False)


def test_nothing_is_answered_without_the_token(board: Board) -> None:
    stranger = visitor(board, token=False)
    for path in PATHS:
        answer = stranger.get(path)
        assert answer.status_code == 403, path
        assert "set-cookie" not in answer.headers
        assert board.token not in answer.text
        assert board.key not in answer.text


def test_a_wrong_token_is_no_token(board: Board) -> None:
    for wrong in ("", "x", board.token[:-1], board.token + "x", board.key, "é"):
        stranger = visitor(board, token=False)
        assert stranger.get("/", params={"token": wrong}).status_code == 403
        cookie = {"Cookie": f"kedge-board-8765={wrong}".encode()}
        assert stranger.get("/runs", headers=cookie).status_code == 403
    twice = f"/?token={board.token}&token={board.token}"
    assert visitor(board, token=False).get(twice).status_code == 403


def test_the_token_in_the_address_opens_the_page_only(board: Board) -> None:
    stranger = visitor(board, token=False)
    assert stranger.get(f"/runs?token={board.token}").status_code == 403
    answer = stranger.get(f"/?token={board.token}")
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie == f"kedge-board-8765={board.token}; Path=/; HttpOnly; SameSite=Strict"
    assert board.token not in answer.text
    assert stranger.get("/runs").status_code == 200  # by the cookie


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "192.168.1.7:8765", "", "@",
     "localhost@evil.example", "evil.example#localhost", "localhost:x", "[::1", "0.0.0.0:8765"],
)  # fmt: skip
def test_a_host_that_is_not_this_machine_is_refused(board: Board, host: str) -> None:
    """A page elsewhere may point its own name at 127.0.0.1: DNS rebinding."""
    for path in ("/runs", f"/?token={board.token}"):
        assert visitor(board).get(path, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost:8765", "LOCALHOST", "[::1]:8765", "localhost:9000"]
)
def test_names_of_this_machine_are_known(board: Board, host: str) -> None:
    assert visitor(board).get("/runs", headers={"Host": host}).status_code == 200


def test_another_interface_is_known_by_number_or_by_its_name(board: Board) -> None:
    guard = Guard(board.app, "0.0.0.0", 8765, "t", "k")
    assert guard.knows(["192.168.1.7:8765"])
    assert not guard.knows(["evil.example:8765"])
    assert not guard.knows(["localhost", "evil.example"])
    assert not guard.knows([])
    assert Guard(board.app, "lab.example", 8765, "t", "k").knows(["lab.example:8765"])
    assert all(map(is_loopback, ("127.0.0.5", "::1", "localhost")))
    assert not is_loopback("0.0.0.0")


def test_a_change_needs_the_origin_and_the_key(board: Board, runs: Path) -> None:
    user = visitor(board)
    [name, _] = [row["id"] for row in user.get("/runs").json()["rows"]]
    good = {"Origin": ADDRESS, "X-Kedge-Key": board.key}
    body = {"tags": ["x"], "note": ""}
    wrong = [
        {}, {"Origin": ADDRESS}, {"X-Kedge-Key": board.key}, good | {"X-Kedge-Key": board.token},
        good | {"Origin": "http://evil.example"}, good | {"Origin": "null"},
        good | {"Origin": "https://127.0.0.1:8765"}, good | {"Origin": "http://127.0.0.1:9999"},
        good | {"Sec-Fetch-Site": "cross-site"}, good | {"Sec-Fetch-Site": "same-site"},
    ]  # fmt: skip
    for headers in wrong:
        for path in (f"/run/{name}/notes", f"/run/{name}/stop"):
            assert user.post(path, json=body, headers=headers).status_code == 403, headers
    assert visitor(board, token=False).post(f"/run/{name}/notes", json=body, headers=good
                                            ).status_code == 403  # fmt: skip
    assert not list(runs.rglob("notes.json"))
    assert not list(runs.rglob("stop"))
    assert user.post(f"/run/{name}/notes", json=body, headers=good).status_code == 200


def test_reading_changes_nothing_and_other_methods_are_refused(board: Board) -> None:
    user = visitor(board)
    [name, _] = [row["id"] for row in user.get("/runs").json()["rows"]]
    good = {"Origin": ADDRESS, "X-Kedge-Key": board.key}
    for path in (f"/run/{name}/stop", f"/run/{name}/notes"):
        assert user.get(path).status_code == 405
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert user.request(method, "/runs").status_code == 403
        assert user.request(method, "/runs", headers=good).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["../../../../etc/passwd", "..%2f..%2fapp.py", "%2e%2e/app.py", "index.html", "/etc/passwd",
     "..\\app.py", "main.js%00.css", "app.py", "d3.LICENSE", ""],
)  # fmt: skip
def test_paths_lead_nowhere(board: Board, path: str) -> None:
    answer = visitor(board).get(f"/static/{path}")
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_runs_are_not_named_by_paths(board: Board, runs: Path) -> None:
    user = visitor(board)
    user.get("/runs")
    for name in ("both/fedavg", "both%2ffedavg", "%2e%2e%2fx", str(runs), "both"):
        for path in (f"/run/{name}", f"/run/{name}/curves"):
            assert user.get(path).status_code == 404, path
        assert user.get("/report", params={"ids": name}).status_code == 404
        assert user.get("/table", params={"ids": name}).status_code == 404


def test_every_answer_has_its_policy(board: Board) -> None:
    user = visitor(board)
    for path in ("/", "/runs", "/static/main.js", "/static/d3.min.js", "/nothing"):
        headers = user.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
    assert user.get("/", headers={"Host": "evil.example"}).headers["x-frame-options"] == "DENY"


def test_the_page_has_no_scripts_inside_and_makes_no_html_of_data() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\son\w+=|javascript:", page)
    for file in STATIC.glob("*.js"):
        words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("
        assert not re.search(words, file.read_text()), file.name


def test_hostile_names_are_data(board: Board, runs: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "both/fedavg", runs / name)
    settings = (runs / name / "config.toml").read_text()
    hostile = '"</script><script>alert(2)</script>"'
    (runs / name / "config.toml").write_text(settings.replace('"fedavg"', hostile))
    bytes_name = bytes(runs) + b"/\xff\xfe"
    shutil.copytree(bytes(runs / "both/fedavg"), bytes_name)
    answer = visitor(board).get("/runs")
    assert answer.headers["content-type"] == "application/json"
    rows = {row["name"]: row for row in answer.json()["rows"]}
    assert {name, "\ufffd\ufffd"} <= rows.keys()
    assert rows[name]["method"] == "</script><script>alert(2)</script>"
    assert all(re.fullmatch(r"[0-9a-f]{16}", row["id"]) for row in rows.values())
