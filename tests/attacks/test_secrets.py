"""Other users of the machine read no secret of a federation, and write in no member's folder."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kedge.errors import DataError, KedgeError
from kedge.federation.coordinator.members import Roster
from kedge.federation.member.member import Member
from kedge.federation.member.run_state import MemberFolder
from tests.flower.federations import Members, coordinator, datasets, settings

CONFIG = settings("scaffold", rounds=2, model="linear", steps=1, clients=2, per_round=2)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two members that has run, with the widest umask."""
    folder = tmp_path_factory.mktemp("federation")
    before = os.umask(0)
    try:
        coordinator(few(folder), CONFIG, folder / "run").run()
    finally:
        os.umask(before)
    return folder


def few(folder: Path) -> Members:
    return Members(folder, datasets(sizes=(4, 5)), names=("north", "south"))


def tokens(folder: Path) -> dict[str, str]:
    found = Roster.load(folder)
    assert found is not None
    return {seat.name: seat.token for seat in found.participants}


# -- tokens of seats ------------------------------------------------------------------------------


def test_no_token_is_in_a_file_that_others_read(federation: Path) -> None:
    known = tokens(federation / "run")
    assert len(set(known.values())) == 2
    for path in federation.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(token.encode() in content for token in known.values()):
            assert mode(path) == 0o600, path
    assert mode(federation / "run" / "federation.json") == 0o666  # as everything that is no secret


def test_tokens_of_an_older_federation_move_with_the_next_write(tmp_path: Path) -> None:
    members, out = few(tmp_path), tmp_path / "run"
    coordinator(members, CONFIG, out).run()
    path, known = out / "federation.json", tokens(out)
    old = json.loads(path.read_text())
    old["format"] = 1
    for seat in old["members"]:
        seat["token"] = known[seat["name"]]
    path.write_text(json.dumps(old))
    (out / "seats.json").unlink()
    assert tokens(out) == known
    longer = settings("scaffold", rounds=3, model="linear", steps=1, clients=2, per_round=2)
    members.handles = {f"other {name}": handle for name, handle in members.handles.items()}
    result = coordinator(members, longer, out, resume=True).run()
    assert len(result.records[0]) == 3
    assert tokens(out) == known
    assert mode(out / "seats.json") == 0o600
    assert not [token for token in known.values() if token in path.read_text()]


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"north": "a"}', "garbage"])
def test_lost_tokens_are_named(content: str | None, federation: Path, tmp_path: Path) -> None:
    for name in ("federation.json", "seats.json"):
        (tmp_path / name).write_bytes((federation / "run" / name).read_bytes())
    (tmp_path / "seats.json").unlink()
    if content is not None:
        (tmp_path / "seats.json").write_text(content)
    with pytest.raises(DataError, match=r"seats\.json beside it is damaged"):
        Roster.load(tmp_path)


# -- a member's folder ----------------------------------------------------------------------------


def test_what_a_member_keeps_is_its_own(federation: Path) -> None:
    for name in ("north", "south"):
        folder = federation / name
        assert mode(folder) == mode(folder / "runs") == 0o700
        [run] = (folder / "runs").iterdir()
        assert mode(run) == 0o700
        kept = {path.name.partition("-")[0] for path in run.iterdir()}
        assert kept == {"committed.json", "initial.safetensors", "seat.json", "state"}
        assert {mode(path) for path in run.iterdir()} == {0o600}


def test_the_secret_is_for_its_owner(tmp_path: Path) -> None:
    member = tmp_path / "member"
    member.mkdir(mode=0o700)
    (member / ".secret.part").write_text("old")
    (member / ".secret.part").chmod(0o666)
    secret = MemberFolder(member).secret
    assert mode(member / "secret") == 0o600
    (member / "secret").chmod(0o644)
    (member / "runs").chmod(0o755)
    assert MemberFolder(member).secret == secret
    assert (mode(member / "secret"), mode(member / "runs")) == (0o600, 0o700)


@pytest.mark.parametrize("bits", [0o770, 0o720, 0o777, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(bits: int, tmp_path: Path) -> None:
    folder = tmp_path / "my member"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(KedgeError) as caught:
        Member("north", datasets()[0], folder)
    text = str(caught.value)
    assert text == f"others can write in {folder}; type: chmod go-w '{folder}'"
    assert not list(folder.iterdir())
    subprocess.run(text.partition("type: ")[2], shell=True, check=True)
    Member("north", datasets()[0], folder)


def test_a_folder_in_one_that_everybody_writes_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(KedgeError, match=f"they can write in {above}; type: chmod o-w {above}"):
        Member("north", datasets()[0], above / "deep" / "member")
    above.chmod(0o1777)  # as /tmp: nobody moves what belongs to others
    Member("north", datasets()[0], above / "deep" / "member")
    above.chmod(0o775)
    Member("north", datasets()[0], above / "deep" / "member")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "member"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(KedgeError, match="belongs to another user") as caught:
        Member("north", datasets()[0], folder)
    assert f"sudo chown -R $(id -un) {folder}" in str(caught.value)
    assert not list(folder.iterdir())


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "member").mkdir()
    (tmp_path / "member").chmod(0o777)
    words = ["--name", "north", "--data", "digits", "--folder", str(tmp_path / "member")]
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "flower", "node", *words, "--socket", str(tmp_path / "s")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: others can write in {tmp_path / 'member'}")


@pytest.mark.parametrize("name", ["log.txt", "released.txt", "node.lock"])
def test_what_a_member_appends_to_is_no_link(name: str, tmp_path: Path) -> None:
    from kedge.federation.member.releases import Release
    from kedge.flower.agent import Node

    folder, victim = MemberFolder(tmp_path / "member"), tmp_path / "victim"
    for plant in (lambda p: p.symlink_to(victim), lambda p: os.link(victim, p), os.mkfifo):
        victim.write_text("mine\n")
        plant(folder.path / name)
        refused = pytest.raises((OSError, KedgeError), match="it is a link|several names|no file")
        with nullcontext() if name == "log.txt" else refused:
            if name == "log.txt":
                folder.log("text")  # an answer does not depend on the log
            elif name == "released.txt":
                folder.releases.__dict__["_known"] = {"update": {}}  # not read from there
                folder.releases.note(Release("update", "0" * 64, "a", 1))
            else:
                Node(lambda _: b"", tmp_path / "socket", folder.path, folder.log)
        assert victim.read_text() == "mine\n"
        (folder.path / name).unlink()


def test_keys_are_for_their_owner_and_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.local.keys import make_authority, make_node_key, make_server

    before = os.umask(0)
    try:
        make_authority(tmp_path / "keys")
        make_server(tmp_path / "keys")
        make_node_key(tmp_path / "keys" / "north")
    finally:
        os.umask(before)
    assert {mode(tmp_path / "keys" / n) for n in ("ca.key", "server.key", "north")} == {0o600}
    (tmp_path / "keys" / "south").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KedgeError, match="south"):
        make_node_key(tmp_path / "keys" / "south")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KedgeError, match="No space left"):
        make_node_key(tmp_path / "keys" / "west")
    assert not list(tmp_path.glob("keys/*west*"))
    assert not (tmp_path / "elsewhere").exists()
