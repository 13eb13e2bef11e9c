"""Files of certificates, keys and tokens: read with checks, and written so that none is replaced.

Each error names the file and a remedy.
"""

import os
import stat
from pathlib import Path
from typing import Literal

from pscommon.core.errors import InvalidRequestError
from pscommon.system.small_files import replace_file

MAX_FILE_BYTES = 1 << 20
OTHERS_BITS = 0o066
"""Bits for reading and writing by others than the owner."""

GROUP_READ_BITS = 0o040
FOLDER_MODE_BITS = 0o700
SECRET_MODE_BITS = 0o600

FileStates = dict[Path, Literal["written", "kept"]]
"""What a command has done with each of its files."""


def read_file(path: Path, what: str, command: str, is_secret: bool = True) -> bytes:
    """Return the content of one of this process's own files.

    Args:
        path: the file, or a symbolic link to it.
        what: what the file is, for the message: "TLS key".
        command: command that makes such a file, for the remedy.
        is_secret: whether other users must not be able to read the file.

    Raises:
        InvalidRequestError: the file is missing, unreadable or too large, or it is secret and
            others can read it. If root owns it, its group may (a volume of Kubernetes).
    """
    named = f"the {what} {path}"
    try:
        # NONBLOCK: opening a pipe must not wait for its writer
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidRequestError(
            f"{named} is missing. Try: correct the path, or make one with `{command} DIR`"
        ) from None
    except OSError as error:
        raise _unreadable(named, error) from error
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequestError(f"{named} is not a file. Try: the path of a regular file")
        if is_secret:
            _check_mode(named, path, found)
        with open(number, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(named, error) from error
    finally:
        os.close(number)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequestError(
            f"{named} is larger than {MAX_FILE_BYTES} bytes. Try: the path of the right file"
        )
    return content


def make_folder(path: Path) -> None:
    """Make a folder for this user alone; an existing one stays as it is.

    Raises:
        InvalidRequestError: the folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE_BITS, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"the folder {path} cannot be made: {error.strerror}. Try: another DIR"
        ) from error


def write_file(path: Path, text: str, states: FileStates, mode: int = SECRET_MODE_BITS) -> None:
    """Write a file atomically, and note it in `states`.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    try:
        replace_file(path, text, mode)
    except OSError as error:
        raise InvalidRequestError(
            f"the file {path} cannot be written: {error.strerror}. Try: another DIR"
        ) from error
    states[path] = "written"


def _check_mode(named: str, path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    allowed = GROUP_READ_BITS if found.st_uid == 0 else 0
    if mode & OTHERS_BITS & ~allowed:
        raise InvalidRequestError(
            f"{named} is refused: other users can read or write it (mode {mode:04o}). "
            f"Try: `chmod 600 {path}`"
        )


def _unreadable(named: str, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"{named} cannot be read: {error.strerror}. Try: make user {os.geteuid()} its owner"
    )
