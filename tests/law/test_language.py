"""Texts and names use plain technical English; words that make riddles are counted and may only
become fewer.

`python -m tests.law.test_language [FOLDER]` prints the counts, or each occurrence in a folder.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import ROOT, Source, below, packages, parse, suite

PHRASES = (
    "whoever",
    "whom",
    "nobody",
    "somebody",
    "everybody",
    "so many",
    "so often",
    "of now",
    "of before",
    "anew",
    "how-many-eth",
    "all the same",
)
NAME_PARTS = frozenset(
    {
        "archive",
        "bear",
        "bears",
        "borne",
        "courier",
        "couriers",
        "crew",
        "crews",
        "desk",
        "fitness",
        "fleet",
        "forgotten",
        "gathering",
        "gone",
        "had",
        "heard",
        "held",
        "hub",
        "kept",
        "mirror",
        "mirrors",
        "patience",
        "room",
        "said",
        "stretch",
        "tape",
        "tapes",
        "tether",
        "told",
        "whereabouts",
    }
)
WHOLE_NAMES = frozenset({"look", "most", "over", "still", "sure", "twice", "whole"})
ALLOWED = {
    "benchmarks": 0,
    "common/pscommon": 0,
    "common/pscommon/core": 0,
    "proto": 0,
    "psserver": 0,
    "psserver/core/shard": 0,
    "psserver/monitoring": 0,
    "psserver/parameters": 0,
    "psserver/process": 0,
    "psserver/replication": 0,
    "psserver/exchange": 0,
    "psworker": 0,
    "psworker/ctl": 0,
    "psworker/examples": 0,
    "psworker/integrations": 0,
    "psworker/supervision": 0,
    "psworker/run": 0,
    "tests": 0,
    "tests/chaos": 0,
    "tests/contract": 0,
    "tests/faults": 0,
    "tests/fixtures": 0,
    "tests/integration": 0,
    "tests/law": 0,
    "tests/process": 0,
    "tests/scripts": 0,
    "tests/sim": 0,
    "tests/smoke": 0,
    "tests/support": 0,
    "tests/tools": 0,
    "tests/unit": 0,
}
"""Occurrences in each folder, without folders that have an entry of their own. Lower a number
when the test prints a smaller one, and give a folder without any its own entry; never raise one.
"""
COLUMNS = 100
PRAGMA = re.compile(r"  # (?:type: ignore|noqa).*")
PHRASE = re.compile(r"(?<![\w-])(" + "|".join(PHRASES) + r")(?!\w)", re.IGNORECASE)
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' + r"'''(?:[^\\]|\\.)*?'''|"
    r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'|(#[^\n]*)",
    re.DOTALL,
)
"""Its group is a comment; it matches strings because they may contain the sign of a comment."""


def phrases(text: str) -> Iterator[str]:
    """Yield the banned phrases of a text, across line breaks."""
    yield from (match[1].lower() for match in PHRASE.finditer(" ".join(text.split())))


@cache
def is_banned_name(name: str) -> bool:
    """Return whether an identifier is a banned word or contains one as a part."""
    parts = {part.lower() for part in NAME_PART.findall(name)}
    return name.strip("_").lower() in WHOLE_NAMES or not parts.isdisjoint(NAME_PARTS)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; comments on consecutive lines are one text."""
    first, last, joined = 0, 0, ""
    number, position = 1, 0
    for match in STRING_OR_COMMENT.finditer(text):
        if not match[1]:
            continue
        number += text.count("\n", position, match.start())
        position = match.start()
        if number != last + 1:
            yield first, joined
            first, joined = number, ""
        last, joined = number, f"{joined} {match[1].lstrip('#')}"
    yield first, joined


def names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield each identifier that the code defines: classes, functions, arguments, variables."""
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield line, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield line, node.attr


def occurrences(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and word of each banned phrase in texts and each banned name that is defined."""
    texts = [*comments(source.text)]
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.value))
    for line, part in texts:
        yield from ((line, phrase) for phrase in phrases(part))
    yield from ((line, name) for line, name in names(source.nodes) if is_banned_name(name))


def sources() -> Iterator[Source]:
    """Yield every Python file that people edit."""
    yield from (*packages(), *below("benchmarks"), *suite())


def test_lines_have_at_most_100_columns() -> None:
    """Ruff's E501 allows long lines without spaces; this test allows only pragmas to be longer."""
    long = [
        f"{source.path}:{number}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > COLUMNS and len(PRAGMA.sub("", line)) > COLUMNS
    ]

    assert not long, "\n".join(long)


@cache
def found() -> Mapping[str, list[str]]:
    """Return the occurrences of each key of ALLOWED as `path:line: word`."""
    result: dict[str, list[str]] = {folder: [] for folder in ALLOWED}
    for source in sources():
        file = str(source.path)
        if ROOT / file == Path(__file__):  # defines the banned words
            continue
        folder = max((key for key in ALLOWED if file.startswith(f"{key}/")), key=len)
        result[folder] += [f"{file}:{line}: {word}" for line, word in sorted(occurrences(source))]
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        text = re.sub(r"\s*//", "", path.read_text())
        result["proto"] += [f"{path.name}: {word}" for word in phrases(text)]
    return result


def test_no_new_riddles() -> None:
    """No folder has more banned words than its number in ALLOWED."""
    counts = {folder: len(lines) for folder, lines in found().items()}
    lower = {folder: count for folder, count in counts.items() if count < ALLOWED[folder]}
    if lower:
        print(f"lower ALLOWED of {__file__}: {lower}")
    more = [
        f"{folder}: {counts[folder]} instead of {ALLOWED[folder]}\n  " + "\n  ".join(lines)
        for folder, lines in found().items()
        if counts[folder] > ALLOWED[folder]
    ]

    assert not more, "\n".join(more)


@pytest.mark.parametrize(
    "text",
    [
        '"""Nobody\n    waits."""',
        "x = 'waits for so ' 'many'",
        "# waits for so\n# many workers",
        "x = f'{1} of now'",
        "def is_kept(): ...",
        "class HubState: ...",
        "class TAPE: ...",
        "def f(told): ...",
        "self.x_room = 1",
        "for crew in (): ...",
        "MOST = 1",
    ],
)
def test_the_law_finds(text: str) -> None:
    """One occurrence in each."""
    assert len(list(occurrences(parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "# of nowhere, renewed, wholesale",
        "import desk\ndesk.told()",
        "def take_over(bedroom, subtape, github, whole_file): ...",
    ],
)
def test_the_law_allows(text: str) -> None:
    """Parts of other words, and names that are only used."""
    assert not list(occurrences(parse(text)))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(*(line for lines in found().values() for line in lines if folder in line), sep="\n")
    if not sys.argv[1:]:
        print({folder: len(lines) for folder, lines in found().items()})
