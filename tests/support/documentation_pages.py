"""Pages of the documentation and their code blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOT_PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "FAULTS.md",
    "SECURITY.md",
    "deploy/README.md",
)

FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    section: heading above it.
    title: title above it, such as a file name.
    """

    section: str
    language: str
    title: str
    text: str


def pages() -> list[Path]:
    """Return all pages by name."""
    found = [ROOT / name for name in ROOT_PAGES]
    return sorted([*(page for page in found if page.exists()), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        headings = re.findall(r"^## (.*)$", FENCE.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(headings[-1] if headings else "", match[2], match[3] or "", match[4]))
    return found


def prose(page: Path) -> str:
    """Return the page without fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}
