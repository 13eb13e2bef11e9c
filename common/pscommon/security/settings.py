"""What a process uses to prove itself and to know others, from its settings."""

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.security.tls_files import MAKE_TLS, TlsFiles
from pscommon.telemetry.logs import get_logger

log = get_logger(__name__)

TLS_KEYS = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Security settings of a process; the files have not been read.

    Attributes:
        tls: its TLS files; None: no TLS.
        token_file: file of its tokens; None: none.
        insecure: whether it may use plain text beyond loopback.
    """

    tls: TlsFiles | None = None
    token_file: Path | None = None
    insecure: bool = False

    @property
    def is_secured(self) -> bool:
        """Return whether strangers are kept out."""
        return self.tls is not None or self.token_file is not None


def check_exposure(flag: str, address: str, settings: SecuritySettings) -> None:
    """Check that an address to listen on is closed to strangers.

    Args:
        flag: The option that sets it.
        address: HOST:PORT.

    Raises:
        InvalidRequestError: Others can reach it, there is no TLS, and plain text is not permitted.
    """
    if settings.tls is None and not settings.insecure and not is_loopback(address):
        raise InvalidRequestError(
            f"{flag} {address} is open to other machines. Try: `--tls-ca`, `--tls-cert` and "
            f"`--tls-key` with the files of `{MAKE_TLS} DIR`, or `--insecure` where everyone in "
            f"the network may change the job"
        )


def warn_of_plain_text(addresses: Iterable[str | None], settings: SecuritySettings) -> None:
    """Warn, once per start, if others can reach addresses of this process without TLS."""
    exposed = sorted({each for each in addresses if each is not None and not is_loopback(each)})
    if exposed and settings.tls is None:
        log.warning(
            "plain_text_permitted",
            addresses=exposed,
            effect="all who reach these addresses can read and change the job's traffic",
            remedy="--tls-ca, --tls-cert and --tls-key instead of --insecure",
        )


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reached on this machine only: all addresses of the host are."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(each[0]) for *_, each in socket.getaddrinfo(host, None)}
    except OSError:  # the use of the address tells
        return host == "localhost"
    return all(ip_address(each.partition("%")[0]).is_loopback for each in found)


def security_settings(settings: Mapping[str, Any]) -> SecuritySettings:
    """Return the security settings among parsed settings; a missing key is an unset one.

    Raises:
        InvalidRequestError: some, but not all TLS files are set.
    """
    paths = {key: path for key in TLS_KEYS if (path := settings.get(key)) is not None}
    unset = [f"`--{key.replace('_', '-')}`" for key in TLS_KEYS if key not in paths]
    if paths and unset:
        raise InvalidRequestError(
            f"{' and '.join(unset)} must be set too: TLS needs CA, certificate and key. Try: the "
            f"files of `{MAKE_TLS} DIR`"
        )
    tls = None if unset else TlsFiles(*(paths[key] for key in TLS_KEYS))
    return SecuritySettings(tls, settings.get("token_file"), bool(settings.get("insecure")))
