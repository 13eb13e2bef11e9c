"""Atomic writes of small files; special files (pipes, devices) are written directly."""

import os
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")


def is_special(path: Path) -> bool:
    """Return whether the path is not a regular file: a pipe, a terminal or /dev/stdout."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file())


def why_no_file(path: Path) -> str:
    """Return why a file cannot be written to this path now; empty if it can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if is_special(path):
        return "it is not a regular file"
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} is not writable"
    return ""


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file atomically, but not durably; a symbolic link stays.

    A special file is written directly; a pipe blocks until its reader opens it. A regular file gets
    this mode, less the umask, before it has content.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    if is_special(path):
        number = _descriptor(path)  # opening by name would overwrite a redirected file
        with open(
            path if number is None else number, "w", encoding="utf-8", closefd=number is None
        ) as special:
            special.write(text)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by a process with the same number
    try:
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Remove a file written by `replace_file`; special files stay."""
    if not is_special(path):
        path.resolve().unlink(missing_ok=True)


def _descriptor(path: Path) -> int | None:
    """Return N for /dev/fd/N and for links to it, such as /dev/stdout."""
    for _ in range(8):  # chains of links
        folder = path.parent.resolve()
        if folder == OPEN_FILES.resolve() and path.name.isdigit():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = folder / path.readlink()
    return None
