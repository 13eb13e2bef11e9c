"""The pages of the documentation, as text."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "FAULTS.md", "deploy/README.md")

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """All pages, in the order of their names."""
    found = [ROOT / name for name in ROOT_PAGES]
    return sorted([*(page for page in found if page.exists()), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, *languages: str) -> list[str]:
    """The texts of fenced blocks in these languages, in the order of the page."""
    return [match[3] for match in FENCE.finditer(page.read_text(encoding="utf-8")) if match[2] in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))
