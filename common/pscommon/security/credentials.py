"""What this process shows to others, and asks of them."""

from dataclasses import dataclass

from pscommon.security.tls import Tls
from pscommon.security.tokens import TokenFile


@dataclass(frozen=True)
class Credentials:
    """The credentials of a process. All addresses that it opens or connects to use them.

    Attributes:
        tls: Certificates; None: plain text.
        tokens: Tokens that a server accepts and a client sends; None: none.
        is_insecure: Plain text is allowed also off this machine (--insecure).
    """

    tls: Tls | None = None
    tokens: TokenFile | None = None
    is_insecure: bool = False


NONE = Credentials()

_used = NONE


def use_credentials(credentials: Credentials) -> None:
    """Set the credentials of this process; for connections that are opened from now on."""
    global _used
    _used = credentials


def process_credentials() -> Credentials:
    return _used
