"""What a process uses to prove itself and to know others, from its settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.security.tls_files import MAKE_TLS, TlsFiles

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


def security_settings(settings: Mapping[str, Any]) -> SecuritySettings:
    """Return the security settings among parsed settings; a missing key is an unset one.

    Raises:
        InvalidRequestError: some, but not all TLS files are set.
    """
    paths: dict[str, Any] = {key: settings.get(key) for key in TLS_KEYS}
    unset = [f"`--{key.replace('_', '-')}`" for key, path in paths.items() if path is None]
    if 0 < len(unset) < len(TLS_KEYS):
        raise InvalidRequestError(
            f"{' and '.join(unset)} must be set too: TLS needs CA, certificate and key. Try: the "
            f"files of `{MAKE_TLS} DIR`"
        )
    tls = None if unset else TlsFiles(paths["tls_ca"], paths["tls_cert"], paths["tls_key"])
    return SecuritySettings(tls, settings.get("token_file"), bool(settings.get("insecure")))
