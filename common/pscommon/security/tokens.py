"""Tokens: what a process shows to prove its role, and how a server knows the role of a token.

A file `tokens` has lines `ROLE TOKEN`; a file `ROLE.token` has only the token of that role. The
role admin includes all others; every role includes read. Messages never contain a token.
"""

import hmac
import re
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pscommon.core.errors import InvalidRequestError
from pscommon.security.secret_files import FileStates, make_folder, read_file, write_file
from pscommon.telemetry.logs import get_logger

Role = Literal["worker", "server", "admin", "read"]
Tokens = tuple[tuple[Role, str], ...]

ROLES: tuple[Role, ...] = get_args(Role)
MAKE_TOKENS = "ps-ctl token init"
MIN_TOKEN_CHARACTERS = 16
NEW_TOKEN_BYTES = 32
TOKEN = re.compile(r"[!-~]+")
"""Characters that are allowed in a header of HTTP, without spaces."""

CHECK_SECONDS = 1.0
SUFFIX = ".token"

log = get_logger(__name__)


def read_tokens(path: Path) -> Tokens:
    """Return the roles and tokens of a file, in its order.

    Raises:
        InvalidRequestError: the file is missing, unreadable or empty, others can read it, or a
            line has an unknown role or no valid token.
    """
    content = read_file(path, "token file", MAKE_TOKENS)
    named = f"the token file {path}"
    lines = [
        (number, words)
        for number, line in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1)
        if (words := line.split()) and not words[0].startswith("#")
    ]
    if not lines:
        raise InvalidRequestError(f"{named} is empty. Try: make one with `{MAKE_TOKENS} DIR`")
    if path.suffix == SUFFIX:
        if len(lines) > 1:
            raise InvalidRequestError(f"{named} has several lines. Try: one line with the token")
        lines = [(number, [path.stem, *words]) for number, words in lines]
    tokens = tuple(_entry(f"line {number} of {named}", words) for number, words in lines)
    roles = {token: role for role, token in tokens}
    if any(roles[token] != role for role, token in tokens):
        raise InvalidRequestError(
            f"{named} has the same token for two roles. Try: one token for each role"
        )
    return tokens


def init_tokens(folder: Path) -> FileStates:
    """Make the token files that are missing in a folder: `tokens`, and one of each role.

    Args:
        folder: folder of the files; made with mode 0700 if it does not exist.

    Returns:
        State of each file.

    Raises:
        InvalidRequestError: a file cannot be written, or an existing one is not valid.
    """
    make_folder(folder)
    states: FileStates = {}
    path, own = folder / "tokens", {role: folder / f"{role}{SUFFIX}" for role in ROLES}
    if path.exists():
        tokens = read_tokens(path)
        states[path] = "kept"
    else:
        tokens = tuple((role, _token_in(own[role])) for role in ROLES)
    for role, file in own.items():
        token = next((token for each, token in tokens if each == role), None)
        if file.exists():
            states[file] = "kept"
        elif token is not None:
            write_file(file, f"{token}\n", states)
    if path not in states:
        write_tokens(path, tokens, states)
    return states


def new_tokens() -> Tokens:
    """Return a new token of each role."""
    return tuple((role, secrets.token_urlsafe(NEW_TOKEN_BYTES)) for role in ROLES)


def write_tokens(path: Path, tokens: Tokens, states: FileStates) -> None:
    """Write a file `tokens`; states and errors are those of `write_file`."""
    write_file(path, "".join(f"{role} {token}\n" for role, token in tokens), states)


def includes(role: Role, needed: Role) -> bool:
    """Return whether a role may do what another one may do."""
    return role in (needed, "admin") or needed == "read"


def token_for(tokens: Tokens, role: Role) -> str:
    """Return the token to send: the first of this role, else the first that includes it.

    Without one it is any other token, so that the server says which role that has.
    """
    own = [token for each, token in tokens if each == role]
    fitting = [token for each, token in tokens if includes(each, role)]
    return [*own, *fitting, *(token for _, token in tokens)][0]


def role_of(tokens: Tokens, presented: str) -> Role | None:
    """Return the role of a token from a peer; None for an unknown one.

    The time does not depend on the position of the first difference, or of the matching entry.
    """
    sent = presented.encode(errors="surrogatepass")
    matching = [role for role, token in tokens if hmac.compare_digest(token.encode(), sent)]
    return matching[0] if matching else None


class TokenFile:
    """Tokens of a file that may be replaced while the process runs; safe for threads.

    The file is examined at most once a second. If the new content is not valid, the old one stays
    in force, and the problem is logged once.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises InvalidRequestError like `read_tokens`."""
        self.path = path
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._tokens = read_tokens(path)
        self._next_check = time.monotonic() + CHECK_SECONDS

    def tokens(self) -> Tokens:
        """Return the tokens in force."""
        if time.monotonic() >= self._next_check and self._lock.acquire(blocking=False):
            try:
                self._check()
            finally:
                self._lock.release()
        return self._tokens

    def _check(self) -> None:
        self._next_check = time.monotonic() + CHECK_SECONDS
        stamp = _stamp(self.path)  # before reading: a later change gives another one
        if stamp in (self._stamp, ()):  # a removed file is no change: another may take its place
            return
        self._stamp = stamp
        try:
            self._tokens = read_tokens(self.path)
        except InvalidRequestError as error:
            log.error("token_file_invalid", problem=str(error))
        else:
            log.info("token_file_read", path=str(self.path), tokens=len(self._tokens))


def _token_in(path: Path) -> str:
    """Return the token of a file, or a new one if there is no file."""
    return read_tokens(path)[0][1] if path.exists() else secrets.token_urlsafe(NEW_TOKEN_BYTES)


def _entry(named: str, words: Sequence[str]) -> tuple[Role, str]:
    """Return role and token of a line. The words are not quoted: one may be a secret."""
    role = next((role for role in ROLES if role == words[0]), None)
    if role is None:
        raise InvalidRequestError(f"{named} has an unknown role. Try: one of {', '.join(ROLES)}")
    if len(words) != 2 or not TOKEN.fullmatch(words[1]):
        raise InvalidRequestError(
            f"{named} has no single token of printable ASCII characters. Try: ROLE TOKEN"
        )
    if len(words[1]) < MIN_TOKEN_CHARACTERS:
        raise InvalidRequestError(
            f"{named} has a token of {len(words[1])} characters. Try: at least "
            f"{MIN_TOKEN_CHARACTERS}"
        )
    return role, words[1]


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with the file's content, mode or owner; empty for a missing file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
