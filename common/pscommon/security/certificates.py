"""`ps-ctl tls init`: an authority, and certificates that it signs for servers and for clients.

Servers and workers serve, and connect to others: so both kinds of certificates have both usages.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.security.secret_files import FileStates, make_folder, read_file, write_file
from pscommon.security.tls_files import (
    CLIENT_NAME,
    MAKE_TLS,
    SERVER_NAME,
    certificates_in,
    check_dates,
    names_in,
    private_key_in,
    public_bytes,
)

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

    SigningKey = EllipticCurvePrivateKey | RSAPrivateKey

AUTHORITY_LIFETIME = timedelta(days=3650)
CERTIFICATE_LIFETIME = timedelta(days=365)
CLOCK_DIFFERENCE = timedelta(hours=1)
"""Certificates are valid from this time ago: the clocks of other machines may be behind."""

PUBLIC_MODE_BITS = 0o644
HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.I)
MAX_HOST_CHARACTERS = 253


class Authority(NamedTuple):
    """Certificate of an authority, and its key; None: the key is kept elsewhere."""

    certificate: "x509.Certificate"
    key: "SigningKey | None"


def init_tls(folder: Path, hosts: Sequence[str] = (), renew: bool = False) -> FileStates:
    """Make the files that are missing in a folder: authority, server's and client's pair.

    Args:
        folder: folder of the files; made with mode 0700 if it does not exist.
        hosts: further DNS names and IP addresses of servers.
        renew: make new pairs from the existing authority. Without `hosts`, the names stay.

    Returns:
        State of each file.

    Raises:
        InvalidRequestError: a file cannot be read or written, or a missing one cannot be made.
        AuthenticationError: the authority has expired.
    """
    hosts = [str(_name(host).value) for host in hosts]
    make_folder(folder)
    states: FileStates = {}
    authority = _authority(folder, states)
    pairs = (("", [SERVER_NAME, *hosts]), ("client-", [CLIENT_NAME]))
    for prefix, names in pairs:
        cert, key = folder / f"{prefix}cert.pem", folder / f"{prefix}key.pem"
        if cert.exists():
            old = certificates_in(_read(cert), f"the certificate {cert}")[0]
            old_names = [name for kind in names_in(old, cert) for name in kind]
            if renew:
                names = names if len(names) > 1 else [*names, *old_names]
            else:
                _check_existing(cert, key, names, old_names)
        _make_pair(authority, cert, key, names, renew, states)
    return states


def make_key() -> "EllipticCurvePrivateKey":
    """Return a new P-256 key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def make_authority(key: "SigningKey", begin: datetime, end: datetime) -> "x509.Certificate":
    """Return the self-signed certificate of an authority that is valid between these times."""
    from cryptography import x509

    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # different authorities have different names, so that a file may hold several
    subject = _subject(f"paramserver CA {identifier.digest.hex()[:8]}")
    builder = _builder(subject, subject, key, begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _sign(builder.add_extension(_usage(is_authority=True), critical=True), key)


def make_certificate(
    authority: Authority, key: "SigningKey", names: Sequence[str], begin: datetime, end: datetime
) -> "x509.Certificate":
    """Return a certificate for a server and client with these names, valid between these times.

    Raises:
        InvalidRequestError: the authority's key is missing.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if authority.key is None:
        raise InvalidRequestError(
            "no certificate can be made: ca-key.pem is missing. Try: bring it back for this command"
        )
    issuer = authority.key.public_key()
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(_subject(names[0]), authority.certificate.subject, key, begin, end)
    for extension, critical in (
        (x509.SubjectAlternativeName(list(map(_name, dict.fromkeys(names)))), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(is_authority=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return _sign(builder, authority.key)


def certificate_pem(certificate: "x509.Certificate") -> str:
    """Return a certificate as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()


def key_pem(key: "SigningKey") -> str:
    """Return a private key as PEM, without a passphrase."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _authority(folder: Path, states: FileStates) -> Authority:
    """Return the authority of a folder; make what is missing of it."""
    path, key_path = folder / "ca.pem", folder / "ca-key.pem"
    if path.exists() and not key_path.exists():
        states[path] = "kept"
        return Authority(certificates_in(_read(path), f"the CA file {path}")[0], None)
    now = datetime.now(UTC)
    key = _key(key_path, states)
    if not path.exists():
        made = make_authority(key, now - CLOCK_DIFFERENCE, now + AUTHORITY_LIFETIME)
        write_file(path, certificate_pem(made), states, PUBLIC_MODE_BITS)
        return Authority(made, key)
    states[path] = "kept"
    found = certificates_in(_read(path), f"the CA file {path}")
    fitting = [each for each in found if public_bytes(each) == public_bytes(key)]
    if not fitting:
        raise InvalidRequestError(
            f"the CA key {key_path} does not fit the CA file {path}. Try: an empty folder"
        )
    return Authority(fitting[0], key)


def _make_pair(
    authority: Authority,
    cert: Path,
    key_path: Path,
    names: Sequence[str],
    renew: bool,
    states: FileStates,
) -> None:
    if cert.exists() and not renew:
        states[cert] = states[key_path] = "kept"
        return
    now = datetime.now(UTC)
    end = min(now + CERTIFICATE_LIFETIME, authority.certificate.not_valid_after_utc)
    check_dates(f"the CA of {cert.parent}", authority.certificate, now.timestamp(), "a new folder")
    key = make_key() if renew else _key(key_path, states)
    made = make_certificate(authority, key, names, now - CLOCK_DIFFERENCE, end)
    if renew:
        write_file(key_path, key_pem(key), states)
    write_file(cert, certificate_pem(made), states, PUBLIC_MODE_BITS)


def _key(path: Path, states: FileStates) -> "SigningKey":
    """Return the key of a file; make it if it is missing."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

    if not path.exists():
        made = make_key()
        write_file(path, key_pem(made), states)
        return made
    states[path] = "kept"
    found = private_key_in(read_file(path, "TLS key", MAKE_TLS), path)
    if not isinstance(found, EllipticCurvePrivateKey | RSAPrivateKey):
        raise InvalidRequestError(f"the key {path} cannot sign. Try: an EC or RSA key")
    return found


def _check_existing(cert: Path, key: Path, names: Sequence[str], has: Sequence[str]) -> None:
    """Raise InvalidRequestError if an existing certificate is not what was asked for."""
    if not key.exists():
        raise InvalidRequestError(
            f"the key {key} of the certificate {cert} is missing. Try: `--renew` makes both"
        )
    absent = [name for name in names[1:] if name not in has]
    if absent:
        raise InvalidRequestError(
            f"the certificate {cert} exists and lacks {', '.join(absent)}. Try: `--renew` with "
            "every --host"
        )


def _read(path: Path) -> bytes:
    return read_file(path, "certificate", MAKE_TLS, is_secret=False)


def _name(text: str) -> "x509.GeneralName":
    """Return a DNS name or IP address as an alternative name of a certificate."""
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        if len(text) <= MAX_HOST_CHARACTERS and HOST.fullmatch(text):
            return x509.DNSName(text)
    raise InvalidRequestError(
        f"--host {text} is neither a DNS name nor an IP address. Try: a name without port"
    )


def _subject(name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "SigningKey", begin: datetime, end: datetime
) -> "x509.CertificateBuilder":
    from cryptography import x509

    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = x509.CertificateBuilder(issuer, subject, key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(identifier, critical=False)


def _usage(is_authority: bool) -> "x509.KeyUsage":
    """Return what the key may do: sign certificates, or the handshakes of its owner."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(builder: "x509.CertificateBuilder", key: "SigningKey") -> "x509.Certificate":
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())
