"""TLS files of a process: CA, certificate and key, checked together before they are used."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pscommon.core.errors import AuthenticationError, InvalidRequestError
from pscommon.security.secret_files import read_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

SERVER_NAME = "paramserver"
"""DNS name in the certificates of all servers; clients accept no other, at any address."""

CLIENT_NAME = "paramserver-client"
MAKE_TLS = "ps-ctl tls init"
WARNING_SECONDS = 14 * 86400.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files of one process.

    Attributes:
        ca: certificates of the authorities whose peers are accepted; old and new during a change.
        cert: this process's certificate, followed by its chain, if any.
        key: the certificate's private key, without a passphrase.
    """

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Content of TLS files that fit together.

    Attributes:
        ca, cert, key: PEM.
        expires: end of the certificate's validity, in seconds of Unix time.
        names: DNS names of the certificate.
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    expires: float
    names: tuple[str, ...]


def read_tls(files: TlsFiles, needs_name: str | None = None) -> TlsMaterial:
    """Read and check the TLS files of this process. It never asks for a passphrase.

    Args:
        files: the files.
        needs_name: DNS name that the certificate must have; None: any.

    Raises:
        InvalidRequestError: a file is missing, unreadable or no PEM, the key can be read by
            others, has a passphrase or does not fit the certificate, or the name is missing.
        AuthenticationError: the certificate, or the whole CA file, has expired or is not yet valid.
    """
    ca = read_file(files.ca, "CA file", MAKE_TLS, is_secret=False)
    cert = read_file(files.cert, "certificate", MAKE_TLS, is_secret=False)
    key = read_file(files.key, "TLS key", MAKE_TLS)
    authorities = certificates_in(ca, f"the CA file {files.ca}")
    leaf = certificates_in(cert, f"the certificate {files.cert}")[0]
    _check_key(files, leaf, key)
    names, _ = names_in(leaf, files.cert)
    if needs_name is not None and needs_name not in names:
        raise InvalidRequestError(
            f"the certificate {files.cert} lacks the DNS name {needs_name}: it has "
            f"{', '.join(names) or 'none'}. Try: cert.pem of `{MAKE_TLS} DIR`"
        )
    now = time.time()
    check_dates(f"the certificate {files.cert}", leaf, now, f"`{MAKE_TLS} DIR --renew`")
    check_dates(f"the CA file {files.ca}", _latest(authorities, now), now, f"`{MAKE_TLS} NEW_DIR`")
    return TlsMaterial(ca, cert, key, leaf.not_valid_after_utc.timestamp(), names)


def certificates_in(pem: bytes, named: str) -> "list[x509.Certificate]":
    """Return the certificates of a PEM file, at least one; `named` names the file in the error."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidRequestError(
            f"{named} has no valid certificate in PEM format. Try: a file of `{MAKE_TLS} DIR`"
        ) from error


def names_in(leaf: "x509.Certificate", path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the DNS names and the IP addresses of a certificate; `path` names it in the error."""
    from cryptography import x509

    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return (), ()
    except ValueError as error:
        raise InvalidRequestError(
            f"the certificate {path} is damaged: {error}. Try: `{MAKE_TLS} DIR --renew`"
        ) from error
    addresses = tuple(map(str, found.get_values_for_type(x509.IPAddress)))
    return tuple(found.get_values_for_type(x509.DNSName)), addresses


def certificate_dates(der: bytes) -> tuple[float, float]:
    """Return beginning and end of a certificate's validity, in seconds of Unix time.

    Raises ValueError for something else than a certificate.
    """
    from cryptography import x509

    leaf = x509.load_der_x509_certificate(der)
    return leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()


def expiry_warning(expires: float, now: float) -> str | None:
    """Return a warning from 14 days before a certificate expires; None before.

    Both times are in seconds of Unix time.
    """
    if expires - now > WARNING_SECONDS:
        return None
    days = int((expires - now) // 86400)
    when = f"expires in {days} days" if expires > now else "has expired"
    return f"the certificate {when} ({moment(expires)}). Try: `{MAKE_TLS} DIR --renew`"


def moment(seconds: float) -> str:
    """Format a Unix time: "2026-11-27 15:48:02 UTC"."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def private_key_in(pem: bytes, path: Path) -> "PrivateKeyTypes":
    """Return the private key of a PEM file; `path` names the file in the error."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(pem, None)
    except TypeError:  # raised only where a passphrase is needed
        raise InvalidRequestError(
            f"the TLS key {path} has a passphrase. Try: `openssl pkey -in {path} -out FILE` "
            "removes it"
        ) from None
    except (ValueError, UnsupportedAlgorithm):  # without the cause: it may quote the file
        raise InvalidRequestError(
            f"the TLS key {path} is no private key in PEM format. Try: a file of `{MAKE_TLS} DIR`"
        ) from None


def public_bytes(holder: "x509.Certificate | PrivateKeyTypes") -> bytes:
    """Return the public key of a certificate or of a private key, to compare them."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return holder.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def check_dates(named: str, certificate: "x509.Certificate", now: float, renewal: str) -> None:
    """Raise AuthenticationError unless a certificate is valid at this Unix time.

    Args:
        named: what the certificate is, for the message.
        certificate: the certificate.
        now: time in seconds.
        renewal: remedy for an expired certificate.
    """
    begin = certificate.not_valid_before_utc.timestamp()
    end = certificate.not_valid_after_utc.timestamp()
    if now < begin:
        raise AuthenticationError(
            f"{named} is not valid yet: it is valid from {moment(begin)}, and it is {moment(now)} "
            "now. Try: correct the clock"
        )
    if now > end:
        raise AuthenticationError(
            f"{named} has expired: it was valid until {moment(end)}, and it is {moment(now)} now. "
            f"Try: {renewal}"
        )


def _check_key(files: TlsFiles, leaf: "x509.Certificate", pem: bytes) -> None:
    """Raise InvalidRequestError if the key cannot be used or is not the certificate's."""
    if public_bytes(private_key_in(pem, files.key)) != public_bytes(leaf):
        raise InvalidRequestError(
            f"the TLS key {files.key} does not fit the certificate {files.cert}. Try: files that "
            f"were made together"
        )


def _latest(authorities: "Sequence[x509.Certificate]", now: float) -> "x509.Certificate":
    """Return an authority that is valid now, if any, else the one that expires last."""
    return max(
        authorities,
        key=lambda each: (each.not_valid_before_utc.timestamp() <= now, each.not_valid_after_utc),
    )
