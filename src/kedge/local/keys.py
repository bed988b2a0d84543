"""Keys of a federation: an authority, the certificate of the server, and a key per node.

Nodes trust the server by the authority's certificate (``ca.crt``). The server knows nodes by their
public keys. Private keys are readable by their owner alone, and no key is ever overwritten. The key
of the authority signs servers, and nothing else needs it: keep it off the server.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kedge.errors import KedgeError
from kedge.files import create_file, make_folder, remove_file, write_file

CA_DAYS = 3650
LOOPBACK = ("localhost", "127.0.0.1")
HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_PEM, _NONE = form.Encoding.PEM, form.NoEncryption()


def make_authority(folder: Path, name: str = "kedge federation", days: int = CA_DAYS) -> Path:
    """Write ``ca.crt`` and ``ca.key``.

    Args:
        folder: where to write them.
        name: of the federation.
        days: how long the certificate is valid.

    Returns:
        The path of the certificate.

    Raises:
        KedgeError: there is an authority already, or the folder cannot be written.
    """
    certificate, secret = folder / "ca.crt", folder / "ca.key"
    _check_free(secret, certificate)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _name(f"{name} authority")
    limits = x509.BasicConstraints(ca=True, path_length=0)
    usage = _usage(key_cert_sign=True, crl_sign=True)
    signed = _signed(subject, key, subject, key, days, limits, usage)
    _write_private(secret, _private(key))
    _write_public(certificate, signed)
    return certificate


def make_server(
    folder: Path, hosts: Sequence[str] = LOOPBACK, days: int = CA_DAYS, renew: bool = False
) -> tuple[Path, Path]:
    """Write ``server.pem`` and ``server.key``, signed by the authority in the same folder.

    Args:
        folder: where ``ca.crt`` and ``ca.key`` are.
        hosts: names and addresses by which nodes reach the server.
        days: how long the certificate is valid.
        renew: replace the certificate, and keep the key that is there.

    Returns:
        The paths of the certificate and of the key.

    Raises:
        KedgeError: the authority is missing, a host is none, or there is a key already.
    """
    certificate, secret = folder / "server.pem", folder / "server.key"
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    authority, signer = _authority(folder)
    if renew:
        key = _read_private(secret, "there is no certificate to renew; leave out --renew")
    else:
        _check_free(secret, certificate, advice="sign a new certificate for it with --renew")
        key = ec.generate_private_key(ec.SECP384R1())
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    limits = x509.BasicConstraints(ca=False, path_length=None)
    usage, subject = _usage(digital_signature=True), _name(hosts[0])
    more = server, names, issuer
    signed = _signed(subject, key, authority.subject, signer, days, limits, usage, *more)
    if not renew:
        _write_private(secret, _private(key))
    _write_public(certificate, signed)
    return certificate, secret


def make_node_key(path: Path, comment: str = "") -> Path:
    """Write the key of a node, and its public key as ``PATH.pub``.

    Args:
        path: where to write the private key.
        comment: name of the node, at the end of the public key.

    Returns:
        The path of the public key.

    Raises:
        KedgeError: there is a key already, or it cannot be written.
    """
    shown = path.with_name(path.name + ".pub")
    _check_free(path, shown)
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(_PEM, form.PrivateFormat.OpenSSH, _NONE)
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    note = " ".join(comment.split())
    _write_private(path, secret)
    _write_public(shown, public + (f" {note}".encode() if note else b"") + b"\n")
    return shown


def fingerprint(path: Path) -> str:
    """The SHA-256 fingerprint of a certificate, as ``openssl x509 -fingerprint -sha256`` writes it,
    or of a public key of a node, as ``ssh-keygen -l`` does."""
    content = path.read_bytes()
    if content.startswith(b"ecdsa-"):
        digest = hashlib.sha256(base64.b64decode(content.split()[1])).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
    return x509.load_pem_x509_certificate(content).fingerprint(hashes.SHA256()).hex(":").upper()


# -- certificates -------------------------------------------------------------------------------


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    advice = "make one with: kedge flower keys authority"
    missing = f"{folder} has no authority (ca.crt, ca.key); {advice}"
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError):
        raise KedgeError(missing) from None
    key = _read_private(folder / "ca.key", missing)
    if key.public_key() != certificate.public_key():
        raise KedgeError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.crt'}")
    return certificate, key


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: x509.ExtensionType,
) -> bytes:
    """A certificate of a key; its limits and its use must be understood by whoever reads it."""
    now, public = datetime.datetime.now(datetime.UTC), key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension in (x509.SubjectKeyIdentifier.from_public_key(public), *extensions):
        critical = isinstance(extension, (x509.BasicConstraints, x509.KeyUsage))
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(_PEM)


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
        if HOST.fullmatch(text):
            return x509.DNSName(text)
    raise KedgeError(
        f"{text!r} is no name or address of a server; write it without port and protocol, such as "
        "server.example.org"
    )


# -- files --------------------------------------------------------------------------------------


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, form.PrivateFormat.PKCS8, _NONE)


def _read_private(path: Path, missing: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = form.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise KedgeError(missing) from None
    except (OSError, ValueError, TypeError) as error:
        raise KedgeError(f"{path} cannot be read as a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KedgeError(f"{path} is no key of an elliptic curve, as kedge makes them")
    return key


def _check_free(*paths: Path, advice: str = "") -> None:
    """Raise a KedgeError if a file is there: a key that is lost cannot be made again."""
    for path in paths:
        if path.exists():
            other = "choose another place, or move it away if nobody needs it any more"
            raise KedgeError(f"{path} exists, and keys are not overwritten; {advice or other}")


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and that must not be there."""
    try:
        make_folder(path.parent)
        create_file(path, private=True)  # nobody else's is overwritten
        try:
            write_file(path, content, private=True)
        except BaseException:
            remove_file(path)
            raise
    except OSError as error:
        raise KedgeError(f"{path} cannot be written: {error.strerror}") from None


def _write_public(path: Path, content: bytes) -> None:
    try:
        write_file(path, content)
    except OSError as error:
        raise KedgeError(f"{path} cannot be written: {error.strerror}") from None
