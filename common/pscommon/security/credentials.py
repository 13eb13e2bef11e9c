"""What this process shows to others, and asks of them."""

from collections.abc import Callable
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
    used = NONE


def process_credentials() -> Credentials:
    """Return the credentials for connections that are opened now."""
    return _Process.used


def use_credentials(credentials: Credentials | None) -> None:
    """Set the credentials of this process; None: those of its environment."""
    _Process.chosen = credentials
    _update()


def use_environment(settings: SecuritySettings) -> None:
    """Use these settings of the environment unless `use_credentials` has set others.

    Raises:
        InvalidRequestError: A file is invalid.
        AuthenticationError: A certificate is not valid now.
    """
    if settings != _Process.settings:
        _Process.environment, _Process.settings = read_credentials(settings), settings
        _update()


def are_tokens_named() -> bool:
    """Return whether the user has named tokens: with a flag, or in the environment."""
    return (_Process.chosen or _Process.environment).tokens is not None


def use_local_tokens(tokens: Tokens) -> None:
    """Send these tokens from now on, unless the user has named others.

    They are those of servers on this machine: from the user's registry of jobs, or of children.
    """
    _Process.local_tokens = tokens
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
    if found.tokens is None and tokens is not None:
        found = replace(found, tokens=lambda: tokens)
    _Process.used = found
