"""Keys and certificates: what they are good for, who can read them, and that none is lost."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="needs the extra: pip install 'kedge[flower]'")

import datetime
import ssl
import stat
import subprocess
from pathlib import Path
from shutil import which

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from kedge.cli.app import app
from kedge.errors import KedgeError
from kedge.local.keys import fingerprint, make_authority, make_node_key, make_server


def command(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["flower", "keys", *map(str, words)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def refused(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["flower", "keys", *map(str, words)])
    assert isinstance(done.exception, KedgeError)
    return str(done.exception)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def handshake(folder: Path, host: str) -> None:
    """TLS between a server with these keys and a node that trusts the authority."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(5):
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not sides


def test_three_commands_make_the_keys_of_a_deployment(tmp_path: Path) -> None:
    said = command("authority", "--folder", tmp_path, "--name", "our federation")
    assert fingerprint(tmp_path / "ca.crt") in said
    said = command("server", "fed.example.org", "10.0.0.7", "--folder", tmp_path)
    assert "is valid for 825 days, for fed.example.org, 10.0.0.7, localhost, 127.0.0.1" in said
    said = command("node", tmp_path / "north.key", "--name", "north")
    assert fingerprint(tmp_path / "north.key.pub") in said
    secret = {"ca.key": 0o600, "server.key": 0o600, "north.key": 0o600}
    assert secret.items() <= modes(tmp_path).items()
    assert modes(tmp_path).keys() - secret.keys() == {"ca.crt", "server.pem", "north.key.pub"}
    for host in ("fed.example.org", "10.0.0.7", "localhost", "127.0.0.1"):
        handshake(tmp_path, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, "other.example.org")


def test_the_authority_signs_the_server_and_nothing_can_sign_with_that(tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_server(tmp_path, ["fed.example.org"], days=30)
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        for name in ("ca.crt", "server.pem")
    )
    server.verify_directly_issued_by(authority)
    assert server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 29 < left.total_seconds() / 86400 <= 30


def test_the_key_of_a_node(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "north", "north  of\nhere")
    private = load_ssh_private_key((tmp_path / "north").read_bytes(), None)
    shown = load_ssh_public_key(public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(shown, ec.EllipticCurvePublicKey)
    assert shown.public_numbers() == private.public_key().public_numbers()
    assert public.read_text().endswith(" north of here\n")


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    """Neither a private key, nor a certificate whose key is elsewhere."""
    make_authority(tmp_path)
    make_server(tmp_path)
    make_node_key(tmp_path / "north")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    advice = "exists, and keys are not overwritten; choose another place"
    assert f"ca.key {advice}" in refused("authority", "--folder", tmp_path)
    assert "sign a new certificate for it with --renew" in refused(
        "server", "a.org", "--folder", tmp_path
    )
    assert f"north {advice}" in refused("node", tmp_path / "north")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    for name in ("ca.key", "north"):
        (tmp_path / name).unlink()
    assert f"ca.crt {advice}" in refused("authority", "--folder", tmp_path)
    assert f"north.pub {advice}" in refused("node", tmp_path / "north")
    assert not (tmp_path / "ca.key").exists()


def test_a_certificate_is_renewed_for_the_same_key(tmp_path: Path) -> None:
    make_authority(tmp_path)
    assert "no certificate to renew" in refused("server", "a.org", "--renew", "--folder", tmp_path)
    make_server(tmp_path, ["a.org"])
    key, before = (tmp_path / "server.key").read_bytes(), fingerprint(tmp_path / "server.pem")
    command("server", "b.org", "--renew", "--folder", tmp_path)
    assert (tmp_path / "server.key").read_bytes() == key
    assert fingerprint(tmp_path / "server.pem") != before
    handshake(tmp_path, "b.org")


def test_wrong_hosts_and_authorities_are_named(tmp_path: Path) -> None:
    text = refused("server", "a.org", "--folder", tmp_path)
    assert text.endswith("make one with: kedge flower keys authority")
    make_authority(tmp_path)
    for host in ("https://a.org", "a.org:8443", "a b", "", "-a", "bücher.org"):
        assert "is no name or address of a server" in refused(
            "server", "--folder", tmp_path, "--", host
        )
    assert not (tmp_path / "server.key").exists()
    make_authority(tmp_path / "other")
    (tmp_path / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    assert "is not the key of" in refused("server", "a.org", "--folder", tmp_path)
    (tmp_path / "ca.key").write_text("nonsense")
    assert "cannot be read as a private key" in refused("server", "a.org", "--folder", tmp_path)
    (tmp_path / "file").touch()
    assert "cannot be written" in refused("node", tmp_path / "file" / "key")


@pytest.mark.skipif(not (which("openssl") and which("ssh-keygen")), reason="no openssl")
def test_other_tools_agree(tmp_path: Path) -> None:
    certificate = make_authority(tmp_path)
    make_server(tmp_path)
    public = make_node_key(tmp_path / "north", "north")

    def said(*words: str | Path) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert "OK" in said("openssl", "verify", "-CAfile", certificate, tmp_path / "server.pem")
    shown = said("openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", certificate)
    assert shown.strip().endswith(fingerprint(certificate))
    assert f" {fingerprint(public)} north" in said("ssh-keygen", "-lf", public)
    assert public.read_text().startswith(said("ssh-keygen", "-yf", tmp_path / "north").strip())
