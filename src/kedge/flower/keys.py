"""Keys of a federation: an authority, the certificate of the server, and a key per node.

Nodes trust the server by the authority's certificate (``ca.crt``). The server knows nodes by their
public keys. Private keys are readable by their owner alone. The key of the authority signs servers,
and nothing else needs it: keep it off the server.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kedge.errors import KedgeError

YEARS = 10
LOOPBACK = ("localhost", "127.0.0.1")
_PEM, _NONE = form.Encoding.PEM, form.NoEncryption()


def make_authority(folder: Path, name: str = "kedge federation") -> Path:
    """Write ``ca.crt`` and ``ca.key``; return the path of the certificate."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _name(f"{name} authority")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _certificate(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    certificate = builder.sign(key, hashes.SHA384())
    folder.mkdir(parents=True, exist_ok=True)
    _write_private(folder / "ca.key", _private(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(_PEM))
    return folder / "ca.crt"


def make_server(folder: Path, hosts: Sequence[str] = LOOPBACK) -> tuple[Path, Path]:
    """Write ``server.pem`` and ``server.key``, signed by the authority in the same folder.

    Args:
        folder: where ``ca.crt`` and ``ca.key`` are.
        hosts: names and addresses by which nodes reach the server.

    Raises:
        KedgeError: the authority is missing.
    """
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        signer = form.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise KedgeError(f"{folder} has no authority (ca.crt, ca.key): {error}") from None
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        _certificate(_name(hosts[0]), authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(server, critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer, critical=False)
    )
    certificate = builder.sign(signer, hashes.SHA384())
    _write_private(folder / "server.key", _private(key))
    (folder / "server.pem").write_bytes(certificate.public_bytes(_PEM))
    return folder / "server.pem", folder / "server.key"


def make_node_key(path: Path) -> Path:
    """Write the key of a node, and its public key as ``PATH.pub``; return the latter's path."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(_PEM, form.PrivateFormat.OpenSSH, _NONE)
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_private(path, secret)
    shown = path.with_name(path.name + ".pub")
    shown.write_bytes(public + b"\n")
    return shown


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(
    digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature, False, False, False, False, key_cert_sign, crl_sign, False, False
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, form.PrivateFormat.PKCS8, _NONE)


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
