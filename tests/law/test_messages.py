"""Messages to people: WHAT failed: WHY. Try: HOW. `messages.txt` has every one.

A message is a text of at least three words in shipped code, with {} for each value. Docstrings,
help, examples and patterns are none. After a change of a message run
`python -m tests.law.test_messages`, and read the difference.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import Source, dotted, packages, parse

GOLDEN = Path(__file__).with_name("messages.txt")
MAX_CHARACTERS = 200
FREE = (
    "cannot start as primary of shard {}: its standby was in sync",
    "the sampler {} gave another order in {}",
    "Attempting to unscale FP16 gradients.",
)
"""Beginnings of messages without this form: remedies, a long condition, words of torch."""
EXAMPLES = "psworker.examples"
NOT_MESSAGES = ("help", "epilog", "metavar")
"""Arguments of commands and options: --help and the reference show them."""
WORDS = re.compile(r"[a-z]+ +([a-z`'-]+|\{\})", re.IGNORECASE)


def pieces(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an expression and the parts that it joins to one text."""
    yield node
    match node:
        case ast.JoinedStr(values=parts):
            yield from (piece for part in parts for piece in pieces(part))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (*pieces(left), *pieces(right))


def text_of(piece: ast.AST) -> str:
    match piece:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr() | ast.BinOp(op=ast.Add()):
            return ""  # its parts follow
        case _:
            return "{}"


def other_texts(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the parts of a module whose texts are no messages."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                yield node.value
            case ast.keyword(arg=str(name)) if name in NOT_MESSAGES:
                yield node.value
            case ast.Call() if dotted(node.func).startswith(("re.", "warnings.")):
                yield node


def messages(source: Source) -> Iterator[str]:
    """Yield the messages of a module."""
    skipped = {id(part) for node in other_texts(source.tree) for part in ast.walk(node)}
    for node in ast.walk(source.tree):
        if id(node) in skipped or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        joined = list(pieces(node))
        skipped.update(map(id, joined))
        text = "".join(map(text_of, joined))
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and WORDS.search(text):
            yield text


def found() -> set[str]:
    """Return the messages of all shipped modules."""
    shipped = [source for source in packages() if not source.module.startswith(EXAMPLES)]
    return {text for source in shipped for text in messages(source)}


def lines(texts: set[str]) -> str:
    return "".join(f"{line}\n" for line in sorted(text.replace("\n", r"\n") for text in texts))


def problem(text: str) -> str:
    """Return what is wrong with the form of a message; empty: nothing."""
    if text.startswith(FREE):
        return ""
    if text.count("Try: ") > 1:
        return "more than one remedy"
    if "Try: " in text and not re.search(r"(^|\. |\n|; )Try: \S", text):
        return "the remedy is no sentence of its own"
    if len(text) > MAX_CHARACTERS:
        return f"{len(text)} characters"
    return "a full stop at the end" if re.search(r"\w\.$", text) else ""


def test_all_messages_are_in_the_golden_file() -> None:
    """To fix it, run `python -m tests.law.test_messages`."""
    assert lines(found()) == GOLDEN.read_text(encoding="utf-8")


def test_messages_have_one_remedy_and_are_short() -> None:
    wrong = [f"{why}: {text!r}" for text in sorted(found()) if (why := problem(text))]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('fail(f"{a} log failed: {b}. Try: c")', {"{} log failed: {}. Try: c"}),
        ('fail("no log of " + f"{name} is here")', {"no log of {} is here"}),
        ("fail(f\"it is {why('not at all')} so here\")", {"it is {} so here", "not at all"}),
        ('"""No message of mine."""\nOption(help="not one of mine")', set()),
    ],
)
def test_messages_are_found(code: str, expected: set[str]) -> None:
    assert set(messages(parse(code))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a failed. Try: b", ""),
        ("a failed. Try: b. Try: c", "more than one remedy"),
        ("a failed, Try: b", "the remedy is no sentence of its own"),
        ("a failed.", "a full stop at the end"),
        (f"{'a ' * 100}failed", "206 characters"),
    ],
)
def test_the_form_is_checked(text: str, expected: str) -> None:
    assert problem(text) == expected


if __name__ == "__main__":
    GOLDEN.write_text(lines(found()), encoding="utf-8")
