"""Small files that others wait for: there whole, or not at all. What a user names that is no
file stays what it is.
"""

import os
from pathlib import Path

OPEN_FILES = Path("/proc/self/fd")


def is_special(path: Path) -> bool:
    """Is there something that no file may replace: a pipe, a terminal, or what this process has
    open (/dev/stdout)?
    """
    return _descriptor(path) is not None or (path.exists() and not path.is_file())


def why_no_file(path: Path) -> str:
    """Why no file can be written there, seen now; empty where one can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if is_special(path):
        return "it is no regular file"
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} cannot be written to"
    return ""


def write_whole(path: Path, text: str) -> None:
    """Nobody sees half of it, and no file of anybody else is in the way; a link stays one. What
    is_special is written to, where a pipe waits for its reader. Not durable. OSError leaves
    nothing behind.
    """
    if is_special(path):
        number = _descriptor(path)  # opened by its name a file would be written to from its start
        with open(
            path if number is None else number, "w", encoding="utf-8", closefd=number is None
        ) as special:
            special.write(text)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_whole(path: Path) -> None:
    """The file that `write_whole` has made, where it made one."""
    if not is_special(path):
        path.resolve().unlink(missing_ok=True)


def _descriptor(path: Path) -> int | None:
    """N for /dev/fd/N, and for links that lead there, as /dev/stdout does."""
    for _ in range(8):  # links of links
        folder = path.parent.resolve()
        if folder == OPEN_FILES.resolve() and path.name.isdigit():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = folder / path.readlink()
    return None
