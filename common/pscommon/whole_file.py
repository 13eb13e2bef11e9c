"""Small files that others wait for: there whole, or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Nobody sees half of it, and no file of anybody else is in the way. Not durable. OSError leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
