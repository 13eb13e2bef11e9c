"""What this process shows to others, and asks of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pscommon.security.settings import SecuritySettings
from pscommon.security.tls import Tls
from pscommon.security.tokens import TokenFile, Tokens


@dataclass(frozen=True)
class Credentials:
    """The credentials of a process. All addresses that it opens or connects to use them.

    Attributes:
        tls: Certificates; None: plain text.
        tokens: Returns the tokens that a server accepts and a client sends; None: there are none.
        is_insecure: Plain text may go beyond loopback (--insecure).
    """

    tls: Tls | None = None
    tokens: Callable[[], Tokens] | None = None
    is_insecure: bool = False


NONE = Credentials()


class _Process:
    """The credentials of this process, by where they come from."""

    chosen: Credentials | None = None
    environment = NONE
    settings = SecuritySettings()  # those of `environment`
    local_tokens: Tokens | None = None
    own_servers, of_own_servers = 0, NONE
    used = NONE


_lock = threading.Lock()


def process_credentials() -> Credentials:
    """Return the credentials for connections that are opened now."""
    return _Process.used


def use_credentials(credentials: Credentials | None) -> None:
    """Set the credentials of this process; None: those of its environment."""
    _Process.chosen = credentials
    _update()


def use_environment(settings: SecuritySettings) -> None:
    """Use these settings of the environment unless others are set.

    Raises:
        InvalidRequestError: A file is invalid.
        AuthenticationError: A certificate is not valid now.
    """
    if settings != _Process.settings and not _Process.own_servers:
        _Process.environment, _Process.settings = read_credentials(settings), settings
        _update()


def use_local_tokens(tokens: Tokens) -> None:
    """Send these tokens of the user's registry of jobs, unless the user has named others."""
    _Process.local_tokens = tokens
    _update()


@contextmanager
def own_servers(tokens: Tokens) -> Iterator[None]:
    """Connect with these tokens and without TLS, to servers that this process has started.

    What the user has named is for other servers. Such blocks may overlap, with the same tokens.
    """
    with _lock:
        _Process.own_servers += 1
        _Process.of_own_servers = Credentials(tokens=lambda: tokens)
        _update()
    try:
        yield
    finally:
        with _lock:
            _Process.own_servers -= 1
            _update()


def read_credentials(settings: SecuritySettings, needs_name: str | None = None) -> Credentials:
    """Read the files of these settings; `needs_name` and the errors are those of `read_tls`."""
    return Credentials(
        Tls(settings.tls, needs_name) if settings.tls is not None else None,
        TokenFile(settings.token_file).tokens if settings.token_file is not None else None,
        settings.insecure,
    )


def _update() -> None:
    found, tokens = _Process.chosen or _Process.environment, _Process.local_tokens
    if _Process.own_servers:
        found = _Process.of_own_servers
    if found.tokens is None and tokens is not None:
        found = replace(found, tokens=lambda: tokens)
    _Process.used = found
