"""TLS files of tests, with any names and dates."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pscommon.security.certificates import (
    Authority,
    certificate_pem,
    key_pem,
    make_authority,
    make_certificate,
    make_key,
)
from pscommon.security.credentials import Credentials
from pscommon.security.tls import Tls
from pscommon.security.tls_files import SERVER_NAME, TlsFiles
from pscommon.security.tokens import TokenFile


def new_authority(begin: float = -1.0, end: float = 100.0) -> Authority:
    """Return an authority that is valid from and until these numbers of days from now."""
    key = make_key()
    return Authority(make_authority(key, _in_days(begin), _in_days(end)), key)


def write_files(
    folder: Path,
    names: Sequence[str] = (SERVER_NAME,),
    begin: float = -1.0,
    end: float = 30.0,
    authority: Authority | None = None,
) -> TlsFiles:
    """Write files whose certificate is valid from and until these numbers of days from now."""
    authority = authority or new_authority()
    key = make_key()
    made = make_certificate(authority, key, names, _in_days(begin), _in_days(end))
    files = TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    files.ca.write_text(certificate_pem(authority.certificate))
    files.cert.write_text(certificate_pem(made))
    files.key.touch(0o600)
    files.key.write_text(key_pem(key))
    return files


def client_credentials(folder: Path, token_file: str) -> Credentials:
    """Return those of a client, from the files of `ps-ctl tls init` and `ps-ctl token init`."""
    files = TlsFiles(folder / "ca.pem", folder / "client-cert.pem", folder / "client-key.pem")
    return Credentials(Tls(files), TokenFile(folder / token_file).tokens)


def _in_days(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)
